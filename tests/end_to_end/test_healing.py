"""Training while workers are killed ends with the bits of training in peace."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import DeviceMeshError, LostError
from monarch.testing import chaos
from tests.sample import is_full

pytestmark = pytest.mark.sample(1, of="kernels")

CALLS = 24
BATCHES = [(torch.randn(8, 8), torch.randint(4, (8,))) for _ in range(CALLS // 2)]


class Training:
    """A model with random numbers, an optimizer with state, two programs, and what they leave in Python."""

    def __init__(self, mesh: Mesh, layouts: dict[str, Any] | None) -> None:
        torch.manual_seed(0)
        self.mesh = mesh
        self.model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))
        monarch.module_to_mesh(self.model, mesh, layouts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.average = monarch.distribute(torch.zeros(()), mesh, "[]")

        @monarch.program(mesh=mesh)
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            return loss

        @monarch.program(mesh=mesh)
        def follow(loss: torch.Tensor) -> torch.Tensor:
            self.average = self.average * 0.9 + loss.detach() * 0.1
            return self.average

        self.programs: tuple[Any, Any] = step, follow

    def call(self, number: int, results: list[Any]) -> Any:
        """The call of this number: of the two programs in turns."""
        step, follow = self.programs
        return follow(results[number - 1]) if number % 2 else step(*BATCHES[number // 2])

    def eager(self, number: int, results: list[Any]) -> Any:
        self.optimizer.zero_grad()
        x, y = BATCHES[number // 2]
        x, y = monarch.distribute(x, self.mesh, "[@data, -]"), monarch.distribute(y, self.mesh, "[@data]")
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def left(self) -> list[torch.Tensor]:
        moments = [each for entries in self.optimizer.state.values() for each in entries.values()]
        values: list[Any] = [*self.model.state_dict().values(), *moments, self.average]
        return [value.full_tensor() if hasattr(value, "full_tensor") else value for value in values]


def train(
    dims: dict[str, int],
    layouts: dict[str, Any],
    seed: int | None = None,
    late: int = 0,
    eager: bool = False,
    every: int = 0,
) -> tuple[list[float], list[torch.Tensor], int]:
    """What was read, what is left, and how often the mesh was healed. Values are read so many calls late."""
    chance, heals = random.Random(seed), 0
    timers: list[threading.Timer] = []
    kills = set() if seed is None else set(chance.sample(range(1, CALLS), 4))
    with Mesh(**dims) as mesh:
        training = Training(mesh, layouts)
        call: Callable[[int, list[Any]], Any] = training.eager if eager else training.call
        torch.manual_seed(7)
        if every and seed is not None:
            mesh.snapshots(every)
        results: list[Any] = []
        read: list[float] = []
        while len(read) < CALLS:
            try:
                if len(results) in kills and (not every or heals == len(timers)):  # one copy survives one loss
                    kills.remove(len(results))
                    victim = chance.choice(mesh.executor.worker_pids())  # type: ignore[attr-defined]
                    timers.append(threading.Timer(chance.choice([0, 1, 2, 4]) / 1000, _kill, (victim,)))
                    timers[-1].start()
                if len(results) < CALLS:
                    results.append(call(len(results), results))
                while len(read) < len(results) and (len(results) - len(read) > late or len(results) == CALLS):
                    read.append(results[len(read)].item())
            except DeviceMeshError:
                assert monarch.heal_mesh(mesh) is mesh
                heals += 1
                good = len(read)
                with suppress(DeviceMeshError):  # the first that is not applied
                    while good < len(results):
                        results[good].wait()
                        good += 1
                del results[good:]
        for timer in timers:
            timer.join()
        while every and heals < len(timers):  # nothing was called since the last kill
            try:
                monarch.distribute(torch.zeros(()), mesh, "[]").full_tensor()
            except DeviceMeshError:
                monarch.heal_mesh(mesh)
                heals += 1
        return read, training.left(), heals


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


WAYS: dict[str, tuple[dict[str, int], dict[str, Any], int, bool, int]] = {
    "data": ({"data": 4}, {"*": None}, 0, False, 0),
    "data, read late": ({"data": 4}, {"*": None}, 6, False, 0),
    "data and model": ({"data": 2, "model": 2}, {"*.weight": "[@model, -]"}, 5, False, 0),
    "eager": ({"data": 2}, {"*": None}, 0, True, 0),
    "fully sharded": ({"data": 4}, {"*.weight": "[@data, -]"}, 0, False, 3),
    "fully sharded, read late": ({"data": 2, "model": 2}, {"*.weight": "[@data, @model]"}, 6, False, 4),
    "fully sharded, eager": ({"data": 2}, {"*.weight": "[@data, -]"}, 0, True, 2),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
def test_training_ends_with_the_same_bits(way: str) -> None:
    dims, layouts, late, eager, every = WAYS[way]
    read, left, heals = train(dims, layouts, late=late, eager=eager)
    assert heals == 0
    again, kept, heals = train(dims, layouts, list(WAYS).index(way), late, eager, every)
    assert heals and again == read and all(map(torch.equal, left, kept))


def test_what_is_fully_sharded_is_refused_with_its_names() -> None:
    with Mesh(data=2) as mesh:
        training = Training(mesh, {"*.weight": "[@data, -]"})
        training.call(0, []).item()
        os.kill(mesh.executor.worker_pids()[1], signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(DeviceMeshError):
            while True:
                training.call(0, [])
        with pytest.raises(LostError) as info:
            monarch.heal_mesh(mesh)
        assert "0.weight: f32[16@data, 8]" in info.value.hint and "adamw.exp_avg[0.weight]" in info.value.hint


class Mixed:
    """State in all layouts that a mesh of two dims has, and the program that replaces it."""

    LAYOUTS = ("[-, -]", "[@data, -]", "[-, @model]", "[@data, @model]", "[@(model,data), -]")

    def __init__(self, mesh: Mesh) -> None:
        self.states = [monarch.distribute(torch.ones(8, 8), mesh, layout) for layout in self.LAYOUTS]

        @monarch.program(mesh=mesh)
        def step(x: torch.Tensor) -> torch.Tensor:
            for state in self.states:
                state.mul_(2)
            return x + 1

        self.step: Any = step


LOST = {(0,): {3, 4}, (1,): {3, 4}, (2,): {3, 4}, (3,): {3, 4}, (0, 2): {2, 3, 4}, (2, 3): {1, 3, 4}, (0, 3): {3, 4}}


@pytest.mark.sample(3)
@pytest.mark.parametrize("dead", LOST)
def test_what_is_lost_is_what_was_foretold(dead: tuple[int, ...]) -> None:
    with Mesh(data=2, model=2) as mesh:
        mixed = Mixed(mesh)
        survival = mixed.step.survives(torch.ones(2))
        mixed.step(torch.ones(2)).wait()
        pids = mesh.executor.worker_pids()  # type: ignore[attr-defined]
        for rank in dead:
            os.kill(pids[rank], signal.SIGKILL)
        with pytest.raises(DeviceMeshError):
            while True:
                mixed.step(torch.ones(2)).wait()
        with pytest.raises(LostError) as info:
            monarch.heal_mesh(mesh)
        named = sorted(line for line in info.value.hint.splitlines() if ": f32" in line)
        assert [line.partition(":")[0] for line in named] == [f"  self.states.{at}" for at in sorted(LOST[dead])]
        assert set(named) <= set(str(survival).splitlines())
        foretold = survival.lost("1 worker" if len(dead) == 1 else "2 workers")
        assert {f"self.states.{at}" for at in LOST[dead]} <= set(foretold)
        assert len(dead) > 1 or len(foretold) == len(named)


@pytest.mark.sample(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [1, 1000])
def test_an_interrupt_at_any_point_leaves_a_snapshot_and_the_steps_behind_it(every: int) -> None:
    """Calls are interrupted, at one point after the other; state is then what it was when a worker's death took it."""
    with Mesh(data=2) as mesh:
        training = Training(mesh, {"*.weight": "[@data, -]"})
        for _ in range(3):
            training.call(0, []).item()
        mesh.snapshots(every)
        with chaos.interrupt(-1) as points:
            training.call(0, []).item()
        stride = 3 if is_full() else 97
        for number, at in enumerate(range(0, points.passed, stride)):
            with suppress(KeyboardInterrupt), chaos.interrupt(at):
                training.call(0, []).item()
            if number % 5 == 4:
                before = training.left()
                _kill(mesh.executor.worker_pids()[number % 2])  # type: ignore[attr-defined]
                with pytest.raises(DeviceMeshError):
                    while True:
                        monarch.distribute(torch.zeros(2), mesh, "[-]").wait()
                monarch.heal_mesh(mesh)
                assert all(map(torch.equal, before, training.left())), at


@pytest.mark.sample()
@pytest.mark.parametrize("when", ["read", "heal"])
@pytest.mark.parametrize("eager", [False, True])
def test_a_pending_sum_outlives_a_worker_that_dies_behind_the_commit(eager: bool, when: str) -> None:
    """The loss lies in parts on all workers. One ends when the step has committed, and before it has told so."""
    read = []
    for dies in (False, True):
        with Mesh(data=2) as mesh:
            training = Training(mesh, {"*": None})
            training.call(0, []).item()
            loss = training.eager(2, []) if eager else None  # recorded, and not run yet
            if dies:
                chaos.kill(mesh, 1, 1 << 30)
            if loss is None:
                loss = training.call(2, [])
            mesh.flush()
            if dies and when == "heal":
                with pytest.raises(DeviceMeshError):
                    while True:
                        monarch.distribute(torch.zeros(()), mesh, "[]").full_tensor()
                monarch.heal_mesh(mesh)
            read.append([loss.item(), *((training.call(3, [0, 0, loss]).item(),) if when == "heal" else ())])
    assert read[0] == read[1]
