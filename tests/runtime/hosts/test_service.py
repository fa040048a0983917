"""A host's service: what it answers."""

from __future__ import annotations

import json
import os
import queue
import signal

import pytest
import torch

from monarch.compiler.config import for_spawned
from monarch.runtime.control.message import Message
from monarch.runtime.hosts.service import HostService
from monarch.runtime.processes.workers import Workers
from monarch.runtime.shared import wire

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


def test_a_value_whose_file_did_not_come_has_failed_for_the_controller(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system drops a packet's file where this host has no descriptor left."""
    said: queue.SimpleQueue[Message] = queue.SimpleQueue()
    service = HostService(said.put, "127.0.0.1", None)
    came = [(0, wire.value_head(wire.VALUE_FILE, 3, torch.ones(1 << 18)), wire.LOST_FILE)]
    monkeypatch.setattr(Workers, "packets", lambda self: [came.pop()] if came else [])
    across = {"secret": "00" * 32, "transports": ["tcp"], "timeout": 30, "settings": for_spawned()}
    try:
        service.receive(Message("start", 8, head={**MESH, **across, "first": 0, "actor_processes": None}))
        while (message := said.get(timeout=30)).kind != "packet":
            pass
    finally:
        service.detached()
    kind, command = wire.UP_HEAD.unpack_from(message.data)
    report = wire.Report.decode(bytes(message.data)[wire.UP_HEAD.size :])
    assert (kind, command, report.kind, report.rank) == (wire.REPORT, 3, "failed", 0)
    assert report.error == "a worker's value of 1,048,576 bytes cannot be taken in: Too many open files"


def test_a_death_is_told_under_the_number_by_which_the_mesh_goes_now() -> None:
    """What was told under another may have come when nobody listened for that any more."""
    said: queue.SimpleQueue[Message] = queue.SimpleQueue()

    def next_of(kind: str) -> Message:
        while (message := said.get(timeout=30)).kind != kind:
            pass
        return message

    service = HostService(said.put, "127.0.0.1", None)
    across = {"secret": "00" * 32, "transports": ["tcp"], "timeout": 30, "settings": for_spawned()}
    head = {**MESH, **across, "dims": [["data", 2]], "first": 0, "actor_processes": None}
    try:
        service.receive(Message("start", 8, head=head))
        pids = {int(rank): each["pid"] for rank, each in json.loads(bytes(next_of("workers").data)).items()}
        os.kill(pids[1], signal.SIGKILL)
        assert next_of("exited").mesh == 8
        service.receive(Message("renew", 9, head={"first": 1, "ranks": [], "of": 8, "left": []}))
        told = next_of("exited")
        assert (told.mesh, told.head["rank"], told.head["status"]) == (9, 1, -9)
    finally:
        service.detached()
