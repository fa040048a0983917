"""All kinds of faults that can come in a step of training, each as a block around the step."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import monarch
from monarch.distributed import Mesh
from monarch.testing import chaos
from tests.chaos.training import Training

STEP_SECONDS = 0.01
"""Within this of a step's begin, and of a healing's, something happens that no place in the program sets off."""


@dataclass
class Scene:
    """A fault's surroundings: `healing` surrounds the first attempt to heal the mesh behind the step, `after` is done
    when the mesh is whole again. `points` are those of a step and of a healing, where an interrupt can come; over
    `links` the controller reaches its hosts."""

    training: Training
    chance: random.Random
    points: tuple[int, int]
    links: Sequence[chaos.Link] = ()
    healing: Callable[[], AbstractContextManager[object]] = nullcontext
    after: list[Callable[[], object]] = field(default_factory=list)
    timers: list[threading.Timer] = field(default_factory=list)

    @property
    def mesh(self) -> Mesh:
        return self.training.mesh

    def worker(self) -> int:
        return self.chance.randrange(self.training.workers)

    def instruction(self) -> int:
        return self.chance.randrange(self.training.instructions + 1)

    def soon(self, act: Callable[[], object]) -> None:
        """Within the time of a step."""
        timer = threading.Timer(self.chance.random() * STEP_SECONDS, act)
        self.timers.append(timer)
        timer.start()

    def kill_soon(self, *workers: int) -> None:
        """Within the time of a step, by a signal from outside."""
        pids = self.mesh.executor.worker_pids()  # type: ignore[attr-defined]
        for worker in workers:
            self.soon(partial(_kill, pids[worker]))


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


Block = Callable[[Scene], AbstractContextManager[object]]


@dataclass(frozen=True)
class Kind:
    name: str
    block: Block
    ends: bool
    """Whether the mesh is lost for certain."""
    across: bool
    """Whether it takes several hosts."""
    two: bool
    """Whether it ends two workers, of which one may keep the other's copies."""


KINDS: list[Kind] = []


def kind(
    name: str, ends: bool = False, across: bool = False, two: bool = False
) -> Callable[[Callable[[Scene], Iterator[None]]], None]:
    def enter(block: Callable[[Scene], Iterator[None]]) -> None:
        KINDS.append(Kind(name, contextmanager(block), ends, across, two))

    return enter


@kind("a worker is killed at an instruction", ends=True)
def _(scene: Scene) -> Iterator[None]:
    chaos.kill(scene.mesh, scene.worker(), scene.instruction())
    yield


@kind("a worker is killed at any time", ends=True)
def _(scene: Scene) -> Iterator[None]:
    scene.kill_soon(scene.worker())
    yield


@kind("two workers are killed", ends=True, two=True)
def _(scene: Scene) -> Iterator[None]:
    first = scene.worker()
    scene.kill_soon(first, scene.training.apart_from(first))
    yield


@kind("a worker is killed, and another while the mesh is healed", ends=True, two=True)
def _(scene: Scene) -> Iterator[None]:
    first = scene.worker()
    chaos.kill(scene.mesh, first, scene.instruction())
    second = scene.training.apart_from(first)
    pid = scene.mesh.executor.worker_pids()[second]  # type: ignore[attr-defined]

    @contextmanager
    def healing() -> Iterator[None]:
        timer = threading.Timer(scene.chance.random() * 10 * STEP_SECONDS, _kill, (pid,))
        timer.start()
        try:
            yield
        finally:
            timer.join()
        while pid in scene.mesh.executor.worker_pids():  # type: ignore[attr-defined]
            scene.training.touch()  # it was killed when the mesh was whole again: that is noticed here, and healed anew

    scene.healing = healing
    yield


@kind("a worker is killed, and Ctrl-C while the mesh is healed", ends=True)
def _(scene: Scene) -> Iterator[None]:
    chaos.kill(scene.mesh, scene.worker(), scene.instruction())
    scene.healing = lambda: chaos.interrupt(scene.chance.randrange(scene.points[1]))
    yield


@kind("a worker is killed, and the controller's disk is full while the mesh is healed", ends=True)
def _(scene: Scene) -> Iterator[None]:
    chaos.kill(scene.mesh, scene.worker(), scene.instruction())
    scene.healing = lambda: chaos.limited("file size", scene.chance.choice([0, 100, 10_000]))
    yield


@kind("a worker is killed, and the controller can open no file while the mesh is healed", ends=True)
def _(scene: Scene) -> Iterator[None]:
    chaos.kill(scene.mesh, scene.worker(), scene.instruction())
    scene.healing = lambda: chaos.limited("files", scene.chance.randrange(4))
    yield


@kind("a worker is stopped for a while")
def _(scene: Scene) -> Iterator[None]:
    chaos.stop(scene.mesh, scene.worker(), scene.chance.random() * 0.2, scene.instruction())
    yield


@kind("a worker is slow")
def _(scene: Scene) -> Iterator[None]:
    chaos.slow(scene.mesh, scene.worker(), 0.0005)
    yield


@kind("an instruction fails")
def _(scene: Scene) -> Iterator[None]:
    chaos.fail(scene.mesh, scene.worker(), scene.instruction())
    yield


@kind("a worker has no memory left")
def _(scene: Scene) -> Iterator[None]:
    worker = scene.worker()
    chaos.limit(scene.mesh, worker, "memory", scene.chance.choice([0, 1 << 12, 1 << 16, 1 << 20]))
    scene.after.append(lambda: chaos.limit(scene.mesh, worker, "memory", None))
    yield


@kind("a worker's disk is full")
def _(scene: Scene) -> Iterator[None]:
    worker = scene.worker()
    chaos.limit(scene.mesh, worker, "file size", scene.chance.choice([0, 100, 100_000]))
    scene.after.append(lambda: chaos.limit(scene.mesh, worker, "file size", None))
    yield
    scene.training.large.full_tensor()


@kind("a worker can open no file")
def _(scene: Scene) -> Iterator[None]:
    worker = scene.worker()
    chaos.limit(scene.mesh, worker, "files", 0)
    scene.after.append(lambda: chaos.limit(scene.mesh, worker, "files", None))
    yield
    scene.training.large.full_tensor()


@kind("Ctrl-C in a step")
def _(scene: Scene) -> Iterator[None]:
    with chaos.interrupt(scene.chance.randrange(scene.points[0])):
        yield


@kind("a signal's handler that reads the state")
def _(scene: Scene) -> Iterator[None]:
    with chaos.interrupt(scene.chance.randrange(scene.points[0]), lambda: scene.training.state()):
        yield


@kind("a worker is killed, and Ctrl-C", ends=True)
def _(scene: Scene) -> Iterator[None]:
    scene.kill_soon(scene.worker())  # and not in the step, which the interrupt may keep from being taken
    with chaos.interrupt(scene.chance.randrange(scene.points[0])):
        yield


@kind("a bit changes in a worker's memory", ends=True)
def _(scene: Scene) -> Iterator[None]:
    chaos.flip(scene.mesh, scene.worker(), scene.training.done, scene.chance.randrange(64))
    yield
    scene.mesh.check_replicas()


@kind("a link between hosts is cut", ends=True, across=True)
def _(scene: Scene) -> Iterator[None]:
    chaos.cut(scene.mesh, scene.worker(), scene.instruction())
    yield


@kind("a message between hosts is corrupted", ends=True, across=True)
def _(scene: Scene) -> Iterator[None]:
    chaos.garble(scene.mesh, scene.worker(), scene.instruction())
    yield


@kind("messages between hosts come late", across=True)
def _(scene: Scene) -> Iterator[None]:
    chaos.delay(scene.mesh, scene.worker(), 0.002)
    yield


@kind("messages come late, and a worker is killed", ends=True, across=True)
def _(scene: Scene) -> Iterator[None]:
    first = scene.worker()
    chaos.delay(scene.mesh, first, 0.002)
    chaos.kill(scene.mesh, scene.worker(), scene.instruction())
    yield


@kind("the controller's connection to a host is cut", across=True)
def _(scene: Scene) -> Iterator[None]:
    scene.soon(scene.chance.choice(scene.links).cut)
    yield


@kind("the controller's connection to a host is forgotten by a device in between", across=True)
def _(scene: Scene) -> Iterator[None]:
    scene.soon(scene.chance.choice(scene.links).forget)
    yield


@kind("a worker is killed, and the controller's connection to a host is cut", ends=True, across=True)
def _(scene: Scene) -> Iterator[None]:
    chaos.kill(scene.mesh, scene.worker(), scene.instruction())
    scene.soon(scene.chance.choice(scene.links).cut)
    yield


@kind(
    "a worker is killed, and the controller's connection to a host is cut while the mesh is healed",
    ends=True,
    across=True,
)
def _(scene: Scene) -> Iterator[None]:
    chaos.kill(scene.mesh, scene.worker(), scene.instruction())
    link = scene.chance.choice(scene.links)

    @contextmanager
    def healing() -> Iterator[None]:
        timer = threading.Timer(scene.chance.random() * 10 * STEP_SECONDS, link.cut)
        timer.start()
        try:
            yield
        finally:
            timer.join()

    scene.healing = healing
    yield


def heal(
    mesh: Mesh,
    around: Callable[[], AbstractContextManager[object]],
    policy: Literal["respawn", "shrink"] = "respawn",
    tries: int = 5,
) -> None:
    """Heal the mesh, the first time with a fault."""
    for attempt in range(tries):
        try:
            with around() if attempt == 0 else nullcontext():
                monarch.heal_mesh(mesh, policy)
            return
        except (KeyboardInterrupt, OSError, MemoryError, monarch.MonarchError):
            if attempt == tries - 1:
                raise
