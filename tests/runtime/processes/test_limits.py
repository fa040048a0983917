"""Where a limit of the system keeps workers from being started, or the controller from reading what they say: it is
told, no descriptor is left open, and those that the warm parent cannot fork count as ended."""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from monarch.compiler.plan import MeshSpec, MonarchError
from monarch.runtime.chaos.workers import Resource
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.processes import warm
from monarch.runtime.processes.warm import Warm
from monarch.testing import chaos
from tests.runtime.building import whole


class Asked:
    """A warm parent in this process, which does one thing at a time."""

    def __init__(self) -> None:
        self.mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.warm = Warm(theirs, os.getpid())

    def fork(self, ranks: list[int]) -> None:
        request = {"do": "fork", "mesh": 1, "role": "tests.runtime.processes.roles:say", "workers": 0, "given": {}}
        files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1 + len(ranks))]
        socket.send_fds(self.mine, [json.dumps({**request, "ranks": ranks}).encode()], files)
        for fd in files:
            os.close(fd)

    def told(self) -> list[dict[str, Any]]:
        self.mine.setblocking(False)
        found = []
        try:
            while True:
                found.append(json.loads(self.mine.recv(warm.PACKET_BYTES)))
        except BlockingIOError:
            return found


@contextmanager
def no_file() -> Iterator[None]:
    """In the block this process can open nothing."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.dup(0)
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_what_cannot_be_forked_counts_as_ended_and_the_rest_lives_on(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()

    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(warm, "plain_fork", fork)
    before = sorted(os.listdir("/proc/self/fd"))
    asked.fork([0, 1])
    assert asked.warm.receive()
    why = "could not be started: Resource temporarily unavailable"
    assert asked.told() == [{"is": "exited", "mesh": 1, "rank": rank, "how": why} for rank in (0, 1)]
    assert sorted(os.listdir("/proc/self/fd")) == before
    asked.mine.send(json.dumps({"do": "stop", "mesh": 1}).encode())
    assert asked.warm.receive()
    assert asked.told() == [{"is": "stopped", "mesh": 1}]


def test_files_that_do_not_come_keep_the_processes_from_starting_and_nothing_else() -> None:
    asked = Asked()
    asked.fork([0])
    with no_file():
        assert asked.warm.receive()
    (told,) = asked.told()
    assert told["how"] == "could not be started: Too many open files"


@pytest.mark.parametrize("resource", ["files", "file size"])
def test_that_a_limit_keeps_workers_from_being_started_is_said(resource: Resource) -> None:
    MeshExecutor(MeshSpec.of(data=2)).close()  # what the first mesh of a program opens stays
    before = sorted(os.listdir("/proc/self/fd"))
    with chaos.limited(resource, 0), pytest.raises(MonarchError, match=r"cannot start 2 workers.*\n.*A limit is reach"):
        MeshExecutor(MeshSpec.of(data=2))
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_a_value_that_a_limit_keeps_from_being_read_is_read_later() -> None:
    with MeshExecutor(MeshSpec.of(data=1)) as executor:
        large = executor.put(torch.ones(1 << 18), whole((1 << 18,)))
        executor.wait(large)
        before = len(os.listdir("/proc/self/fd"))
        with chaos.limited("files", 0), pytest.raises(MonarchError, match="1,048,576 bytes cannot be taken in.*open f"):
            executor.shards(large)
        assert executor.shards(large)[0].sum() == 1 << 18
        assert len(os.listdir("/proc/self/fd")) == before


def test_a_value_whose_file_is_cut_off_is_read_later() -> None:
    """No descriptor is left at all: the system drops the file that the value comes in."""
    with MeshExecutor(MeshSpec.of(data=1)) as executor:
        large = executor.put(torch.ones(1 << 18), whole((1 << 18,)))
        executor.wait(large)
        with no_file(), pytest.raises(MonarchError, match="1,048,576 bytes cannot be taken in: Too many"):
            executor.shards(large)
        assert executor.shards(large)[0].sum() == 1 << 18
