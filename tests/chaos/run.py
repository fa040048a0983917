"""Training in which a fault of a random kind comes every few steps, compared with the same without faults."""

from __future__ import annotations

import os
import random
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

import monarch
from monarch import HostMesh
from monarch.distributed import Mesh
from monarch.exceptions import DeviceMeshError, MonarchError
from monarch.testing import chaos
from tests.chaos.faults import KINDS, Kind, Scene, heal
from tests.chaos.training import DIMS, Training, batches

EVERY = 3
"""A fault comes every so many steps."""

Policy = Literal["respawn", "shrink"]
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Outcome:
    """What came of a fault: how it was told, in how many seconds from a worker's death (where none died, from the
    step's begin), and in how many the mesh was healed; None where the step just went on, or nothing was to be
    healed."""

    kind: str
    error: str = ""
    told: float | None = None
    healed: float | None = None


def train(
    seed: int,
    kinds: Sequence[Kind],
    hosts: HostMesh | None = None,
    small: bool = False,
    policy: Policy = "respawn",
    redundant: bool = False,
    links: Sequence[chaos.Link] = (),
) -> list[Outcome]:
    """Train with these faults, one after the other, on hosts that are attached over `links`; a mesh that shrinks grows
    again before the next one. Raises AssertionError, with the fault, where a step that was done is not applied or one
    that failed is, and where a number differs from that of training in peace: in any bit, or where meshes shrink, by
    more than rounding makes of it."""
    exactly = policy == "respawn"
    given = batches(EVERY * len(kinds) + 2)
    with Mesh(**DIMS) as mesh:
        calm = Training(mesh, small, redundant)
        calm.prepare(given[0])
        losses = [_step(calm, given, number) for number in range(len(given))]
        expected = calm.state()
    with Mesh(**DIMS, hosts=hosts) as mesh:
        training = Training(mesh, small, redundant)
        step_points = training.prepare(given[0])
        chance = random.Random(seed)
        points = step_points, _healing_points(training)
        done, outcomes = 0, []
        while done < len(given):
            at, which = divmod(done, EVERY)
            if which == 1 and len(outcomes) == at < len(kinds):
                scene = Scene(training, random.Random(chance.random()), points, links)
                outcomes.append(_suffer(kinds[at], scene, given, done, losses[done], policy))
                done = training.applied()
            else:
                if which == 0:
                    monarch.resize_mesh(mesh, **DIMS)
                assert _same(_step(training, given, done), losses[done], exactly), outcomes[-1:]
                done += 1
        assert training.applied() == len(given)
        for mine, theirs in zip(training.state(), expected, strict=True):
            assert torch.equal(mine, theirs) if exactly else torch.allclose(mine, theirs, 1e-2, 1e-3), outcomes
    return outcomes


def _step(training: Training, given: Sequence[Batch], number: int) -> float:
    torch.manual_seed(number)  # an interrupted call may have drawn a number, as in any program
    loss: float = training.step(*given[number]).item()
    return loss


def _same(loss: float, expected: float, exactly: bool) -> bool:
    return loss == expected if exactly else abs(loss - expected) < 1e-2


def _suffer(kind: Kind, scene: Scene, given: Sequence[Batch], number: int, loss: float, policy: Policy) -> Outcome:
    """Take a step in which a fault comes, and have the mesh whole behind it."""
    training, start, error = scene.training, time.monotonic(), None
    what = f"step {number}: {kind.name}"
    deaths = Deaths(scene.mesh.executor.worker_pids())  # type: ignore[attr-defined]
    try:
        with kind.block(scene):
            assert _same(_step(training, given, number), loss, policy == "respawn"), what
    except (DeviceMeshError, MonarchError, KeyboardInterrupt) as raised:
        error = raised
    said = isinstance(error, DeviceMeshError) and error.program == "step"  # by its own call, or its result
    for timer in scene.timers:
        timer.join()
    while kind.ends and not (isinstance(error, DeviceMeshError) and error.mesh_lost):
        try:  # the step was done when the worker ended
            training.touch()
        except DeviceMeshError as raised:
            error = raised
    told, healed = time.monotonic() - (deaths.end() or start), None
    if isinstance(error, DeviceMeshError) and error.mesh_lost:
        start = time.monotonic()
        heal(scene.mesh, scene.healing, policy)
        healed = time.monotonic() - start
    for lift in scene.after:
        lift()
    applied = training.applied()
    assert applied in (number, number + 1), what
    if said:
        assert applied == number, f"{what}: the step that is said to have failed is applied"
    return Outcome(kind.name, "" if error is None else type(error).__name__, error and told, healed)


class Deaths:
    """When the first of some processes ends, from now on."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._files = [os.pidfd_open(pid) for pid in pids]
        self._stop = os.eventfd(0)
        self._first: float | None = None
        self._thread = threading.Thread(target=self._watch, name="deaths", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        select.select([*self._files, self._stop], [], [])
        now = time.monotonic()
        if select.select(self._files, [], [], 0)[0]:
            self._first = now

    def end(self) -> float | None:
        """By the monotonic clock; None where none has."""
        os.eventfd_write(self._stop, 1)
        self._thread.join()
        for file in (*self._files, self._stop):
            os.close(file)
        return self._first


def _healing_points(training: Training) -> int:
    """How many points a healing comes to."""
    chaos.kill(training.mesh, 0)
    try:
        while True:
            training.touch()
    except DeviceMeshError:
        with chaos.interrupt(-1) as points:
            monarch.heal_mesh(training.mesh)
    return points.passed


def choose(seed: int, faults: int, across: bool, alone: bool = False) -> list[Kind]:
    """So many kinds in random order, each as often as any other; where `alone`, without those that end two workers."""
    kinds = [kind for kind in KINDS if (across or not kind.across) and not (alone and kind.two)]
    chance = random.Random(seed)
    chance.shuffle(kinds)
    chosen = [kinds[at % len(kinds)] for at in range(faults)]
    chance.shuffle(chosen)
    return chosen
