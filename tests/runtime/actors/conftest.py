"""What tests of running actors share: failures that nobody dealt with are kept, and nothing is left running."""

from __future__ import annotations

import queue
from collections.abc import Iterator

import pytest

import monarch.actor
from monarch.actor import HostMesh, MeshFailure, shutdown_context
from tests.runtime.actors.agents import TOKEN, Hosts, hosts_here

WAIT = 30.0
"""Longer than anything takes that works, in seconds."""


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Iterator[queue.SimpleQueue[MeshFailure]]:
    """Failures that came to the program and were not dealt with."""
    seen: queue.SimpleQueue[MeshFailure] = queue.SimpleQueue()
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", seen.put)
    yield seen
    shutdown_context().get(timeout=WAIT)


@pytest.fixture(autouse=True)
def _no_faults(faults: queue.SimpleQueue[MeshFailure]) -> Iterator[None]:
    """A test that means to have failures takes them out of the queue."""
    yield
    assert faults.empty(), faults.get_nowait().report()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Two agents on this machine, for the tests of one file, which leave them as they were."""
    with hosts_here(2, tmp_path_factory.mktemp("two")) as two:
        yield two


@pytest.fixture
def hosts(two: Hosts) -> Iterator[HostMesh]:
    """Both agents, attached."""
    with monarch.hosts(two.addresses, token=TOKEN) as attached:
        yield attached
