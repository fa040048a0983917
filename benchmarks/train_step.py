"""One training step of the demo's GPT over two workers, against PyTorch's DistributedDataParallel over two processes.

Both sides train the same model from the same seed on the same batches with the same AdamW, one thread a worker, and
take turns, some steps at a time, so that whatever else the machine does falls on both.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

import monarch
from benchmarks import measure
from benchmarks.measure import Row, interleaved, table
from monarch.distributed import Mesh
from monarch.stdlib.data import batches, corpus
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.parallel import data_parallel

SEQUENCE = 128
WORKERS = 2
TARGETS = {16: 0.95, 2: 0.6}
"""Global batch size: at most this share of DDP's time, with generated kernels."""
WITHOUT = {16: 1.1, 2: 0.8}
"""The same without them."""

Run = Callable[[int], float]
"""Take so many steps, and give the seconds that they took."""


def make_model() -> GPT:
    torch.manual_seed(0)
    return GPT(sequence=SEQUENCE)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def endless(batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return batches(corpus(1 << 20), batch=batch, sequence=SEQUENCE, steps=1 << 30)


# -- DistributedDataParallel ----------------------------------------------------------------------------------------


def ddp_process(rank: int, port: int, batch: int, pipe: Connection) -> None:
    """One of DDP's processes: takes as many steps as `pipe` says and answers (seconds, loss), until it says 0."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORKERS)
    model = torch.nn.parallel.DistributedDataParallel(make_model())
    optimizer = make_optimizer(model)
    data = endless(batch)
    while steps := pipe.recv():
        mine = [tuple(part.chunk(WORKERS)[rank] for part in next(data)) for _ in range(steps)]
        dist.barrier()
        start = time.perf_counter()
        for tokens, targets in mine:
            optimizer.zero_grad()
            loss = loss_of(model, tokens, targets)
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss.detach_())
        pipe.send((time.perf_counter() - start, loss.item() / WORKERS))
    dist.destroy_process_group()


@contextmanager
def ddp(batch: int) -> Iterator[tuple[Run, list[float]]]:
    """Two processes that train with DDP; the list takes the last loss of each run."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(WORKERS):
        here, there = spawn.Pipe()
        process = spawn.Process(target=ddp_process, args=(rank, store.port, batch, there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    losses: list[float] = []

    def run(steps: int) -> float:
        for pipe in pipes:
            pipe.send(steps)
        answers = [pipe.recv() for pipe in pipes]
        losses.append(answers[0][1])
        return max(seconds for seconds, _ in answers)

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


def make_step(mesh: Mesh, **options: Any) -> Any:
    """A training step of a new model on a mesh: a program of (tokens, targets) with these options, that gives the
    loss."""
    model = make_model()
    model = monarch.module_to_mesh(model, mesh, layouts=data_parallel(model))
    optimizer = make_optimizer(model)

    @monarch.program(**options)
    def train_step(tokens, targets):  # type: ignore[no-untyped-def]
        tokens, targets = monarch.layout(tokens, "[@data, -]"), monarch.layout(targets, "[@data, -]")
        optimizer.zero_grad()
        loss = loss_of(model, tokens, targets)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


@contextmanager
def ours(batch: int, kernels: str = "auto") -> Iterator[tuple[Run, list[float]]]:
    """The same training as a program on a mesh of two workers; `kernels` as MONARCH_KERNELS."""
    with measure.kernels(kernels), Mesh(data=WORKERS) as mesh:
        train_step, data = make_step(mesh), endless(batch)
        losses: list[float] = []

        def run(steps: int) -> float:
            mine = [next(data) for _ in range(steps)]
            start = time.perf_counter()
            for tokens, targets in mine:
                loss = train_step(tokens, targets)
            losses.append(loss.item())
            return time.perf_counter() - start

        yield run, losses


# -- the comparison -------------------------------------------------------------------------------------------------


def row(batch: int, steps: int, repetitions: int, kernels: str) -> Row:
    """Raises RuntimeError where the two do not train alike: then their times cannot be compared.

    Kernels round otherwise than ATen does, no worse; AdamW makes full steps of gradients that are rounding errors
    alone, so the losses agree closely at first, and later only about."""
    with ours(batch, kernels) as (run_ours, our_losses), ddp(batch) as (run_ddp, ddp_losses):
        mine, other = interleaved(
            lambda: run_ours(steps) / steps,
            lambda: run_ddp(steps) / steps,
            repetitions,
            warm=2,
        )
    apart = [abs(a - b) for a, b in zip(our_losses, ddp_losses, strict=True)]
    if apart[0] > 1e-3 or max(apart) > 0.1 * min(ddp_losses):
        raise RuntimeError(f"the losses of the two sides are apart: {our_losses} and {ddp_losses}")
    name = f"train_step, batch {batch}, data=2" + (", no kernels" if kernels == "off" else "")
    note = f"losses differ by {apart[0]:.0e} after {steps} steps"
    target = WITHOUT[batch] if kernels == "off" else TARGETS[batch]
    return Row(name, mine, other, "DDP, gloo, 2 processes", target, note)


def rows() -> list[Row]:
    sizes = {16: 5, 2: 20}
    return [row(batch, steps, 10, kernels) for batch, steps in sizes.items() for kernels in ("auto", "off")]


if __name__ == "__main__":
    print(table(rows()))
