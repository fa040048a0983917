"""What a worker's death costs: the demo's GPT on four workers, one of which is killed in the middle of training.

From the SIGKILL to the end of the next step, with `heal_mesh`, against starting the script again from a checkpoint: a
new process that makes the model, loads the checkpoint, compiles and takes the step. And what it costs to be able to
heal, where nothing fails.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import monarch
from benchmarks.measure import Row, interleaved, table
from benchmarks.train_step import endless, loss_of, make_model, make_optimizer
from monarch.distributed import Mesh
from monarch.stdlib.parallel import data_parallel, fully_shard

WORKERS, BATCH, STEPS, REPETITIONS = 4, 16, 5, 5
TOLD_SECONDS = 0.3

Step = Callable[..., Any]


@contextmanager
def training(checkpoint: Path | None = None, sharded: bool = False) -> Iterator[tuple[Mesh, Step, Any]]:
    """A mesh, a training step on it, and the model; from a checkpoint, if there is one."""
    model = make_model()
    if checkpoint is not None:
        model.load_state_dict(torch.load(checkpoint))
    with Mesh(data=WORKERS) as mesh:
        layouts = fully_shard(model, mesh, "data") if sharded else data_parallel(model)
        model = monarch.module_to_mesh(model, mesh, layouts=layouts)
        optimizer = make_optimizer(model)

        @monarch.program
        def step(tokens, targets):  # type: ignore[no-untyped-def]
            tokens, targets = monarch.layout(tokens, "[@data, -]"), monarch.layout(targets, "[@data, -]")
            optimizer.zero_grad()
            loss = loss_of(model, tokens, targets)
            loss.backward()
            optimizer.step()
            return loss

        yield mesh, step, model


def death() -> Row:
    """Healing against starting again."""
    data = endless(BATCH)
    with training() as (mesh, step, model), tempfile.TemporaryDirectory() as folder:
        for _ in range(3):
            step(*next(data)).item()
        checkpoint = Path(folder) / "model.pt"
        torch.save({name: value.full_tensor() for name, value in model.state_dict().items()}, checkpoint)

        def healed() -> float:
            batch = next(data)
            start = kill(mesh)
            try:
                while True:
                    step(*batch).item()
            except monarch.exceptions.DeviceMeshError:
                monarch.heal_mesh(mesh)
                step(*batch).item()
            return time.perf_counter() - start

        def restarted() -> float:
            start = time.perf_counter()
            subprocess.run([sys.executable, "-m", "benchmarks.faults", str(checkpoint)], check=True)
            return time.perf_counter() - start

        ours, other = interleaved(healed, restarted, REPETITIONS)
    return Row(f"SIGKILL to the next step, data={WORKERS}", ours, other, "a new process from a checkpoint", 1 / 3)


def told() -> Row:
    """From the SIGKILL to the error, in the middle of steps."""
    data = endless(BATCH)
    with training() as (mesh, step, _):
        step(*next(data)).item()

        def measured() -> float:
            start = kill(mesh)
            try:
                while True:
                    step(*next(data)).item()
            except monarch.exceptions.DeviceMeshError:
                seconds = time.perf_counter() - start
            monarch.heal_mesh(mesh)
            step(*next(data)).item()
            return seconds

        ours, other = interleaved(measured, lambda: TOLD_SECONDS, 2 * REPETITIONS)
    return Row("SIGKILL to the error", ours, other, "its bound", 1.0)


def able() -> Row:
    """Steps where nothing fails, against steps of a mesh that could not be healed: it forgets handles and batches."""
    with training() as (_, step, _), training() as (other, forgetful, _):
        executor: Any = other.executor
        executor._handles.add = executor._placed.keep = lambda *_: None
        ours, others = interleaved(timed(step), timed(forgetful), 2 * REPETITIONS, warm=2)
    return Row(f"a step, data={WORKERS}", ours, others, "one that could not be healed", 1.03)


def snapshots(every: int) -> Row:
    """Steps with snapshots of weights and moments that are fully sharded, against steps without."""
    with training(sharded=True) as (mesh, step, _), training(sharded=True) as (_, without, _):
        step(*next(endless(BATCH))).item()
        mesh.snapshots(every)
        ours, others = interleaved(timed(step, 2 * every), timed(without, 2 * every), REPETITIONS, warm=1)
    return Row(f"a step, fully sharded, snapshots every {every} steps", ours, others, "without snapshots")


def checks(every: int) -> Row:
    """Steps whose replicas are compared, against steps without: all weights and moments are replicated."""
    with training() as (mesh, step, _), training() as (_, without, _):
        step(*next(endless(BATCH))).item()
        mesh.check_replicas(every=every)
        steps = max(every, STEPS)
        ours, others = interleaved(timed(step, steps), timed(without, steps), 2 * REPETITIONS, warm=1)
    return Row(f"a step, data={WORKERS}, replicas checked every {every} steps", ours, others, "without checks")


def kill(mesh: Mesh) -> float:
    """Kill a worker; gives when."""
    executor: Any = mesh.executor
    pid = executor.worker_pids()[1]
    start = time.perf_counter()
    os.kill(pid, signal.SIGKILL)
    return start


def timed(step: Step, steps: int = STEPS) -> Callable[[], float]:
    data = endless(BATCH)

    def run() -> float:
        mine = [next(data) for _ in range(steps)]
        start = time.perf_counter()
        for batch in mine:
            loss = step(*batch)
        loss.item()
        return (time.perf_counter() - start) / steps

    return run


def rows() -> list[Row]:
    return [death(), told(), able(), snapshots(10), checks(1), checks(10)]


if __name__ == "__main__":
    if len(sys.argv) > 1:
        with training(Path(sys.argv[1])) as (_, first, _):
            first(*next(endless(BATCH))).item()
    else:
        print(table(rows()))
