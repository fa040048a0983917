"""Actors for programs on their processes, and the meshes that tests of these use."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import monarch
from monarch.actor import Actor, Port, ProcMesh, ValueMesh, current_rank, endpoint, this_host
from monarch.distributed import Mesh
from monarch.runtime.actors.processes import current
from tests.runtime.actors.conftest import WAIT


class Picture(torch.Tensor):
    """A tensor that is more than that."""


class Service(Actor):
    """Looks at tensors, keeps some, and makes some."""

    def __init__(self, start: torch.Tensor | None = None) -> None:
        self.kept: Any = start
        self.made: list[int] = []

    @endpoint
    def get(self, value: object) -> object:
        """What comes back is a copy of what this actor got."""
        return value

    @endpoint
    def look(self, value: torch.Tensor) -> tuple[str, bool, bool, int]:
        return type(value).__name__, value.requires_grad, value.is_inference(), value.data_ptr()

    @endpoint
    def keep(self, value: object) -> None:
        self.kept = value

    @endpoint
    def show(self) -> object:
        return self.kept

    @endpoint
    def forget(self) -> None:
        self.kept = None

    @endpoint
    def gradient(self, weight: torch.Tensor) -> torch.Tensor:
        """That of half the sum of squares."""
        leaf = weight.detach().requires_grad_()
        (leaf**2).sum().div(2).backward()
        assert leaf.grad is not None
        return leaf.grad

    @endpoint
    def make(self, *shape: int) -> torch.Tensor:
        made = torch.full(shape, float(current_rank().rank))
        self.made.append(made.data_ptr())
        return made

    @endpoint
    def make_several(self) -> dict[str, Any]:
        rank = current_rank().rank
        return {"x": torch.full((2, 3), float(rank)), "labels": (torch.tensor([rank]), torch.ones(2).t())}

    @endpoint
    def make_turned(self) -> dict[str, torch.Tensor]:
        """With the keys in another order on each worker."""
        names = ["x", "y"] if current_rank().rank == 0 else ["y", "x"]
        return {name: torch.ones(1) for name in names}

    @endpoint
    def when_exists(self, path: str) -> None:
        """Be busy until there is such a file."""
        while not os.path.exists(path):
            os.sched_yield()

    @endpoint
    def make_uneven(self) -> torch.Tensor:
        return torch.zeros(1 + current_rank().rank)

    @endpoint
    def make_picture(self) -> torch.Tensor:
        return torch.ones(1).as_subclass(Picture)

    @endpoint
    def make_nothing(self) -> None:
        pass

    @endpoint
    def fail_at(self, rank: int) -> torch.Tensor:
        if current_rank().rank == rank:
            raise ValueError("no data here")
        return torch.zeros(1)

    @endpoint
    def made_at(self) -> list[int]:
        return self.made

    @endpoint
    def waiting(self) -> int:
        """How many tensors wait for a program here."""
        return len(current.process().programs.gifts)

    @endpoint
    def maps(self) -> int:
        """How many mappings of a mesh's memory this process has."""
        return Path("/proc/self/maps").read_text().count("monarch-mesh")

    @endpoint
    def when_maps(self, count: int, port: Port[int]) -> None:
        """Tell once there are so many."""
        while (found := Path("/proc/self/maps").read_text().count("monarch-mesh")) != count:
            os.sched_yield()
        port.send(found)

    @endpoint
    def threads(self) -> tuple[int, int]:
        """Of this actor, and what a new thread has."""
        found: list[int] = []
        thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        return torch.get_num_threads(), found[0]

    @endpoint
    def pid(self) -> int:
        return os.getpid()


def stop(pid: int) -> None:
    """Have a process stand still, and wait until all of its threads do."""
    os.kill(pid, signal.SIGSTOP)
    while any(_runs(task) for task in Path(f"/proc/{pid}/task").glob("*/status")):
        os.sched_yield()


def _runs(task: Path) -> bool:
    try:
        return re.search(r"^State:\t[tT]", task.read_text(), re.MULTILINE) is None
    except (FileNotFoundError, ProcessLookupError):  # it was about to end
        return False


@pytest.fixture
def procs() -> ProcMesh:
    return this_host().spawn_procs({"data": 2}, name="crew")


@pytest.fixture
def service(procs: ProcMesh) -> Service:
    return procs.spawn("service", Service)


@pytest.fixture
def mesh(procs: ProcMesh) -> Iterator[Mesh]:
    with Mesh(procs=procs) as mesh:
        yield mesh


def values(reply: Any) -> list[Any]:
    found: ValueMesh[Any] = reply.get(WAIT)
    return found.values()


@monarch.remote
def lent() -> int:
    """How many messages are still to be read here."""
    from monarch.runtime.worker.exchange import of_mesh

    return sum(len(loans.lent) + len(loans.read_early) for loans in of_mesh.values())
