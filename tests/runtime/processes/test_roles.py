"""A process becomes what its role says, and whoever starts it knows no more than the role's name."""

from __future__ import annotations

import json
import os
import os.path
import queue

import pytest

from monarch.runtime.processes.parent import warm_parent
from monarch.runtime.processes.roles import role

BOUND = 30.0


def test_a_role_is_a_function_by_its_name() -> None:
    assert role("os.path:basename") is os.path.basename
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        role("no_such_module:f")


def test_processes_are_forked_for_a_role_with_what_they_are_given() -> None:
    warm, heard = warm_parent(), queue.SimpleQueue[dict[str, object]]()

    class Inbox:
        def append(self, packet: dict[str, object], /) -> None:
            heard.put(packet)

    shared = os.memfd_create("shared")
    pipes = [os.pipe() for _ in range(2)]
    try:
        os.write(shared, b"for both")
        files = [(end,) for _, end in pipes]
        number = warm.number()
        warm.fork(number, "tests.runtime.processes.roles:say", [3, 5], shared, files, Inbox(), {"seed": 7})
        for (read, _), rank in zip(pipes, (3, 5), strict=True):
            assert json.loads(os.read(read, 1000)) == [rank, "for both", True, {"seed": 7}]
        ended = []
        while len(ended) < 2:
            warm.read(BOUND)
            while not heard.empty():
                packet = heard.get()
                ended += [(packet["rank"], packet["status"])] if packet["is"] == "exited" else []
        assert sorted(ended) == [(3, 0), (5, 0)]
    finally:
        for end in (shared, *(end for pipe in pipes for end in pipe)):
            os.close(end)
        warm.ask_to_stop(number)
        warm.forget(number)
