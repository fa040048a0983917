"""A training step in four stages and eight microbatches (1F1B) over four workers of one thread: its time against
`torch.distributed.pipelining` over four processes, the CPU time of all workers against the same model with the same
microbatches on one worker, and what starting a step over four meshes takes of the controller, against one.

All sides train the same model from the same seed on the same batch with SGD, and take turns.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import monarch
from benchmarks.measure import Row, interleaved, seconds, table
from monarch.distributed import Mesh
from monarch.stdlib.pipeline import pipeline

STAGES, MICROBATCHES, ROWS = 4, 8, 32
"""`ROWS` are those of a microbatch."""
TARGETS = {64: 0.8, 512: 1.0}
"""By width: at most this share of torch.distributed.pipelining's time. At 64 a step waits for communication."""
LAYERS = 4
RATE = 0.01

Run = Callable[[int], float]
"""Take so many steps, and give the seconds that they took."""


def make_stages(width: int) -> list[nn.Module]:
    torch.manual_seed(0)

    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return [nn.Sequential(*[block() for _ in range(LAYERS)]) for _ in range(STAGES)]


def batch(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(MICROBATCHES * ROWS, width), torch.randn(MICROBATCHES * ROWS, width)


# -- torch.distributed.pipelining -----------------------------------------------------------------------------------


def torch_process(rank: int, port: int, width: int, pipe: Connection) -> None:
    """One of its processes: takes as many steps as `pipe` says and answers (seconds, last loss), until it says 0."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=STAGES)
    module = make_stages(width)[rank]
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    stage = PipelineStage(module, rank, STAGES, torch.device("cpu"))
    schedule = Schedule1F1B(stage, n_microbatches=MICROBATCHES, loss_fn=F.mse_loss)
    x, y = batch(width)
    while steps := pipe.recv():
        losses: list[torch.Tensor] = []
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            optimizer.zero_grad()
            losses.clear()
            if rank == 0:
                schedule.step(x)
            elif rank == STAGES - 1:
                schedule.step(target=y, losses=losses)
            else:
                schedule.step()
            optimizer.step()
        dist.barrier()
        pipe.send((time.perf_counter() - start, sum(loss.item() for loss in losses) / MICROBATCHES))
    dist.destroy_process_group()


@contextmanager
def torchs(width: int) -> Iterator[tuple[Run, list[float]]]:
    """Four processes of it; the list takes the last loss of each run."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(STAGES):
        here, there = spawn.Pipe()
        process = spawn.Process(target=torch_process, args=(rank, store.port, width, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    losses: list[float] = []

    def run(steps: int) -> float:
        for pipe in pipes:
            pipe.send(steps)
        answers = [pipe.recv() for pipe in pipes]
        losses.append(answers[-1][1])
        return max(took for took, _ in answers)

    try:
        yield run, losses
        for pipe in pipes:
            pipe.send(0)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(10)
            process.kill()


# -- Monarch --------------------------------------------------------------------------------------------------------


def make_step(mesh: Mesh, width: int) -> Any:
    """A training step of a new model in as many stages as the mesh has workers: a program of (x, y) that gives the
    loss."""
    stages = make_stages(width)
    model = [nn.Sequential(*stages)] if len(mesh) == 1 else stages
    pipe = pipeline(model, mesh, microbatches=MICROBATCHES, schedule="1f1b", layouts={})
    optimizer = torch.optim.SGD(pipe.parameters(), lr=RATE)

    @monarch.program
    def train_step(x, y):  # type: ignore[no-untyped-def]
        optimizer.zero_grad()
        loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
        optimizer.step()
        return loss

    return train_step


@contextmanager
def ours(width: int, workers: int = STAGES) -> Iterator[tuple[Run, list[float], Any]]:
    """The training over so many workers: steps, losses, and what starts one step without waiting for it."""
    with Mesh(pipe=workers) as mesh:
        train_step, (x, y) = make_step(mesh, width), batch(width)
        losses: list[float] = []

        def run(steps: int) -> float:
            start = time.perf_counter()
            for _ in range(steps):
                loss = train_step(x, y)
            losses.append(loss.item())
            return time.perf_counter() - start

        yield run, losses, lambda: train_step(x, y)


def cpu_seconds() -> float:
    """The CPU time that the processes below this one have taken so far."""
    ticks, below = 0, [os.getpid()]
    while below:
        for task in Path(f"/proc/{below.pop()}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks += int(fields[11]) + int(fields[12])
                below.append(child)
    return ticks / os.sysconf("SC_CLK_TCK")


def cpu_of(run: Run, steps: int) -> float:
    before = cpu_seconds()
    run(steps)
    return (cpu_seconds() - before) / steps


# -- the comparisons ------------------------------------------------------------------------------------------------


def against_torch(width: int, steps: int, repetitions: int) -> Row:
    """Raises RuntimeError where the two do not train alike: then their times cannot be compared."""
    with ours(width) as (run, losses, _), torchs(width) as (run_torch, torch_losses):
        mine, other = interleaved(lambda: run(steps) / steps, lambda: run_torch(steps) / steps, repetitions, warm=2)
    apart = max(abs(a - b) for a, b in zip(losses, torch_losses, strict=True))
    if apart > 1e-4:
        raise RuntimeError(f"the losses of the two sides are apart: {losses} and {torch_losses}")
    name = f"pipeline, 1f1b, {STAGES} stages, {MICROBATCHES} microbatches, width {width}"
    against = f"torch.distributed.pipelining, gloo, {STAGES} processes"
    return Row(name, mine, other, against, TARGETS[width], f"losses differ by {apart:.0e}")


def against_one(width: int, steps: int, repetitions: int) -> list[Row]:
    """CPU time, and the start of a step, over four workers against one."""
    with ours(width) as (run, _, start), ours(width, 1) as (run_one, _, start_one):
        mine, other = interleaved(lambda: cpu_of(run, steps), lambda: cpu_of(run_one, steps), repetitions, warm=2)
        cpu = Row(f"pipeline, CPU time of all workers, width {width}", mine, other, "one worker", 1.08)

        def starting(call: Callable[[], Any], wait: Run) -> float:
            found = seconds(call, 4)
            wait(1)  # the next begins with workers that have nothing to do
            return found

        mine, other = interleaved(
            lambda: starting(start, run), lambda: starting(start_one, run_one), 4 * repetitions, warm=2
        )
        return [cpu, Row(f"pipeline, starting a step over {STAGES} meshes", mine, other, "over one mesh", 2)]


def rows() -> list[Row]:
    return [against_torch(64, 20, 8), against_torch(512, 3, 6), *against_one(512, 4, 6)]


if __name__ == "__main__":
    print(table(rows()))
