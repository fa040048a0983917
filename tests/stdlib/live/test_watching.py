"""What a watch notes, and what a snapshot says of it."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import monarch
from monarch.actor import Actor, MeshFailure, endpoint, shutdown_context, this_host, this_proc
from monarch.compiler.errors import DeviceMeshError
from monarch.compiler.execution.events import Failure, Fault, Span, Status, heard, tell
from monarch.compiler.types import MeshSpec
from monarch.distributed import Mesh
from monarch.runtime.actors.processes.faults import MOST
from monarch.stdlib.live.watching import POINTS, Watch


class Executor:
    """Something on which steps are called."""

    def __init__(self, **sizes: int) -> None:
        self.mesh = MeshSpec.of(**sizes)


class Worker(Actor):
    """Waits until somebody says so, and fails."""

    @endpoint
    def wait(self) -> None:
        raise SystemExit("no disk")


class Owner(Actor):
    """Owns actors that fail, and deals with that."""

    def __init__(self) -> None:
        self.told = 0

    @endpoint
    async def have_fail(self, count: int) -> int:
        for at in range(count):
            this_proc().spawn(f"failing{at}", Worker).wait.broadcast()
        while self.told < count:
            await asyncio.sleep(0.001)
        return self.told

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.told += 1
        return True


@pytest.fixture
def watch() -> Iterator[Watch]:
    gc.collect()  # meshes of tests before
    made = Watch()
    yield made
    made.close()


def used(seen: dict[str, Any]) -> list[Any]:
    """The meshes that this test has run programs on: others may be left from tests before it in the process."""
    return [mesh for mesh in seen["meshes"] if mesh["program"]]


def _memory(seen: dict[str, Any]) -> list[int]:
    return [size for mesh in used(seen) for size in mesh["memory"]]


def run(executor: Executor, program: str, at: int = 0) -> None:
    tell(Span(executor, "run", program, at, at + 1, 1))  # type: ignore[arg-type]


def test_steps_are_counted_by_mesh_and_second(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr("monarch.stdlib.live.watching.time.monotonic", lambda: now)
    small, large = Executor(data=2), Executor(data=2, model=4)
    for second, steps in ((1000.0, 3), (1001.2, 5), (1003.9, 1)):
        now = second
        for _ in range(steps):
            run(small, "train")
    run(large, "generate")
    tell(Span(small, "fetch", "loss", 1, 2, 3))  # type: ignore[arg-type]  # is no step
    now = 1005.0
    meshes = used(watch.snapshot())
    assert [(mesh["name"], mesh["steps"], mesh["program"]) for mesh in meshes] == [
        ("mesh<data=2>", 9, "train"),
        ("mesh<data=2, model=4>", 1, "generate"),
    ]
    assert meshes[0]["rates"] == [3, 5, 0, 1, 0] and meshes[0]["rate"] == 9 / 5
    assert meshes[1]["shape"] == {"data": 2, "model": 4}
    now = 1500.0
    assert used(watch.snapshot())[0]["rates"] == [0] * 120


def test_curves_keep_their_shape_and_their_last_point(watch: Watch) -> None:
    for step in range(5000):
        monarch.log("loss", 5000.0 - step, step)
    monarch.log("nothing", float("nan"))
    watch._log.flush()
    seen = watch.snapshot()["logs"]
    assert POINTS / 2 <= len(seen["loss"]) <= POINTS + 1
    assert seen["loss"][0] == (0, 5000.0) and seen["loss"][-1] == (4999, 1.0)
    assert all(value == 5000.0 - step for step, value in seen["loss"])
    assert seen["nothing"] == [(0, None)]
    json.dumps(seen, allow_nan=False)


def test_failures_of_meshes_actors_and_processes_are_noted_the_newest_first(watch: Watch) -> None:
    tell(Failure(MeshSpec.of(data=2), DeviceMeshError("worker 1 was killed", hint="heal it")))
    tell(Fault("trainers[1]", "train raised:\nTraceback\nValueError: no data", "trainers[1]: train raised: …"))
    tell(Status("process", "address", 0, "procs[0]", "Failed", "", "was killed by signal 9"))
    tell(Status("process", "address", 1, "procs[1]", "Stopped"))
    assert watch.snapshot()["failed"] == 3
    noted = [(each["what"], each["summary"]) for each in watch.snapshot()["failures"]]
    assert noted == [
        ("procs[0]", "was killed by signal 9"),
        ("trainers[1]", "ValueError: no data"),
        ("mesh<data=2>", "worker 1 was killed"),
    ]
    assert "heal it" in watch.snapshot()["failures"][2]["text"]


def test_failures_that_an_owner_elsewhere_deals_with_are_noted_and_of_very_many_the_number(watch: Watch) -> None:
    many = 2 * MOST + 5
    owner = this_host().spawn_procs().spawn("owner", Owner)
    assert owner.have_fail.call_one(many).get(30) == many
    shutdown_context().get()  # what was held back is sent before a process ends
    seen = watch.snapshot()
    assert seen["failed"] == many and len(seen["failures"]) == 50
    assert {each["summary"] for each in seen["failures"]} == {"SystemExit: no disk"}
    assert {each["what"] for each in seen["failures"]} <= {f"failing{at}[0]" for at in range(many)}


def test_a_closed_watch_costs_nothing() -> None:
    made = Watch()
    assert heard(Span)
    made.close()
    made.close()
    assert not heard(Span) and not heard(Fault)


def test_workers_actors_and_their_failures_are_seen(watch: Watch, monkeypatch: pytest.MonkeyPatch) -> None:
    """In processes: what they hold, what they do, where they are, and that they are gone."""
    monkeypatch.setattr(monarch.actor, "unhandled_fault_hook", lambda failure: None)
    mesh = Mesh(data=2)
    x = monarch.distribute(torch.ones(4), mesh, "[@data]")

    @monarch.program
    def total(x: torch.Tensor) -> torch.Tensor:
        return x.sum()

    assert total(x).item() == 4.0
    workers = this_host().spawn_procs(per_host={"gpus": 2}).spawn("workers", Worker)
    workers.initialized.get()

    seen: dict[str, Any] = watch.snapshot()
    # Who has answered may not have noted yet that it is done, nor the mesh which processes its workers are.
    while any(actor["running"] for each in seen["processes"] for actor in each["actors"]) or len(_memory(seen)) < 2:
        seen = watch.snapshot()
    (shown,) = used(seen)
    assert (shown["program"], shown["steps"], shown["running"], shown["queue"]) == ("total", 1, True, 0)
    assert len(shown["memory"]) == 2 and min(shown["memory"]) > 1 << 20
    processes = {each["name"]: each for each in seen["processes"]}
    assert set(processes) >= {"procs gpus=0", "procs gpus=1"}  # and what other tests have left
    assert processes["procs gpus=1"]["answers"] and processes["procs gpus=1"]["memory"] > 1 << 20
    (actor,) = processes["procs gpus=1"]["actors"]
    assert actor == {"name": "workers[1]", "class_name": f"{__name__}.Worker", "queued": 0, "running": []}
    assert seen["failures"] == []

    with ThreadPoolExecutor() as threads:  # who asks is no part of the answer
        stacks = threads.submit(watch.stacks).result()
    assert {"program", "procs gpus=0", "procs gpus=1"} < set(stacks)
    assert "test_workers_actors_and_their_failures" in stacks["program"]
    assert sum(who.startswith("mesh<data=2> worker") and "worker" in text for who, text in stacks.items()) >= 2

    with pytest.raises(monarch.actor.SupervisionError):
        workers.slice(gpus=0).wait.call_one().get()
    assert [each["summary"] for each in watch.snapshot()["failures"]] == ["SystemExit: no disk"]
    del x
    mesh.close()
    shutdown_context().get()
    seen = watch.snapshot()
    assert [each["running"] for each in used(seen)] == [False] and seen["processes"] == []
