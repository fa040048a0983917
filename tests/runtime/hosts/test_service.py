"""A host's service, without workers: what it answers where it was given no actors."""

from __future__ import annotations

from monarch.runtime.control.message import Message
from monarch.runtime.hosts.service import HostService

MESH = {"dims": [["data", 1]], "host": 0, "hosts": 1, "secret": "", "transports": [], "timeout": 1, "settings": {}}


def test_a_host_that_was_given_no_actors_refuses_them() -> None:
    replies: list[Message] = []
    service = HostService(replies.append, "127.0.0.1", None)
    service.receive(Message("actors", 7, head={"secret": "", "root": "", "number": 0}))
    beside = {"processes": ["a"], "name": "mesh", "owner": "b"}
    service.receive(Message("start", 8, head={**MESH, "actor_processes": beside}))
    assert [(reply.kind, reply.mesh) for reply in replies] == [("refused", 7), ("refused", 8)]
    assert all("this host runs no actors" in str(reply.head["message"]) for reply in replies)
    service.detached()
