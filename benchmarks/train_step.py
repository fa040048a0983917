"""Training steps of the library's models over 2 and 4 workers, against PyTorch's DistributedDataParallel (DDP) and
`fully_shard` (FSDP2) over as many processes.

Both sides train the same model from the same seed on the same batches with the same AdamW, one thread a worker, and
take turns, some steps at a time, so that whatever else the machine does falls on both. Against FSDP2 the mixture's
experts are parallel here (`expert_parallel`), and all other parameters fully sharded.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed import fsdp

import monarch
from benchmarks import measure
from benchmarks.measure import Row, interleaved, table
from monarch.distributed import Mesh
from monarch.stdlib.data import batches, corpus
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.models.llama import Llama
from monarch.stdlib.models.moe import MixtureOfExperts
from monarch.stdlib.parallel import combine, data_parallel, expert_parallel, fully_shard

SEQUENCE = 128
WORKERS = 2

MODELS: dict[str, Callable[[], torch.nn.Module]] = {
    "gpt": lambda: GPT(sequence=SEQUENCE),
    "llama": lambda: Llama(groups=2),
    # Without a bound on an expert's tokens, so that what a token gets does not depend on who computes it.
    "mixture": lambda: MixtureOfExperts(layers=2, room=None),
}


@dataclass(frozen=True)
class Training:
    """Which model is trained on how many workers with how many rows in all, against what ("DDP" or "FSDP2"), and the
    aim: at most this share of the other's time."""

    model: str
    workers: int
    batch: int
    against: str
    target: float
    kernels: str = "auto"

    @property
    def name(self) -> str:
        model = "" if self.model == "gpt" else f"{self.model}, "
        return f"train_step, {model}batch {self.batch}, data={self.workers}" + (
            ", no kernels" if self.kernels == "off" else ""
        )


Run = Callable[[int], float]
"""Take so many steps, and give the seconds that they took."""


def make_model(model: str = "gpt") -> Any:
    torch.manual_seed(0)
    return MODELS[model]()


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)


def loss_of(model: torch.nn.Module, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def endless(batch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return batches(corpus(1 << 20), batch=batch, sequence=SEQUENCE, steps=1 << 30)


# -- PyTorch's own --------------------------------------------------------------------------------------------------


def sharded(model: torch.nn.Module) -> torch.nn.Module:
    """The model with each of its blocks, and then the rest, fully sharded: as PyTorch's documentation has it."""
    for block in model.blocks:  # type: ignore[union-attr]
        fsdp.fully_shard(block)
    fsdp.fully_shard(model)
    return model


def process(rank: int, port: int, training: Training, pipe: Connection) -> None:
    """One of PyTorch's processes: takes as many steps as `pipe` says and answers (seconds, loss), until it says 0."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=training.workers)
    model = make_model(training.model)
    model = sharded(model) if training.against == "FSDP2" else torch.nn.parallel.DistributedDataParallel(model)
    optimizer = make_optimizer(model)
    data = endless(training.batch)
    while steps := pipe.recv():
        mine = [tuple(part.chunk(training.workers)[rank] for part in next(data)) for _ in range(steps)]
        dist.barrier()
        start = time.perf_counter()
        for tokens, targets in mine:
            optimizer.zero_grad()
            loss = loss_of(model, tokens, targets)
            loss.backward()
            optimizer.step()
        dist.all_reduce(loss.detach_())
        pipe.send((time.perf_counter() - start, loss.item() / training.workers))
    dist.destroy_process_group()


@contextmanager
def theirs(training: Training) -> Iterator[tuple[Run, list[float]]]:
    """Processes that train with DDP or FSDP2; the list takes the last loss of each run."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spawn = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for rank in range(training.workers):
        here, there = spawn.Pipe()
        started = spawn.Process(target=process, args=(rank, store.port, training, there), daemon=True)
        started.start()
        there.close()
        pipes.append(here)
        processes.append(started)
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
        for started in processes:
            started.join(10)
            started.kill()


# -- Monarch --------------------------------------------------------------------------------------------------------


def layouts_of(model: torch.nn.Module, mesh: Mesh, against: str) -> Any:
    """What the other side does, as layouts."""
    if against == "DDP":
        return data_parallel(model)
    if not isinstance(model, MixtureOfExperts):
        return fully_shard(model, mesh, "data")
    experts = expert_parallel(model, mesh, "data")
    rest = {name: each for name, each in fully_shard(model, mesh, "data").items() if experts[name].is_replicated}
    return combine(experts, rest)


def make_step(mesh: Mesh, model: str = "gpt", against: str = "DDP", **options: Any) -> Any:
    """A training step of a new model on a mesh: a program of (tokens, targets) with these options, that gives the
    loss."""
    module = make_model(model)
    module = monarch.module_to_mesh(module, mesh, layouts=layouts_of(module, mesh, against))
    optimizer = make_optimizer(module)

    @monarch.program(**options)
    def train_step(tokens, targets):  # type: ignore[no-untyped-def]
        tokens, targets = monarch.layout(tokens, "[@data, -]"), monarch.layout(targets, "[@data, -]")
        optimizer.zero_grad()
        loss = loss_of(module, tokens, targets)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


@contextmanager
def ours(
    batch: int, kernels: str = "auto", model: str = "gpt", workers: int = WORKERS, against: str = "DDP"
) -> Iterator[tuple[Run, list[float]]]:
    """The same training as a program on a mesh; `kernels` as MONARCH_KERNELS."""
    with measure.kernels(kernels), Mesh(data=workers) as mesh:
        train_step, data = make_step(mesh, model, against), endless(batch)
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


def row(training: Training, steps: int, repetitions: int) -> Row:
    """Raises RuntimeError where the two do not train alike: then their times cannot be compared.

    Kernels round otherwise than ATen does, no worse; AdamW makes full steps of gradients that are rounding errors
    alone, so the losses agree closely at first, and later only about."""
    mine = ours(training.batch, training.kernels, training.model, training.workers, training.against)
    with mine as (run_ours, our_losses), theirs(training) as (run_theirs, their_losses):
        our_seconds, their_seconds = interleaved(
            lambda: run_ours(steps) / steps,
            lambda: run_theirs(steps) / steps,
            repetitions,
            warm=2,
        )
    apart = [abs(a - b) for a, b in zip(our_losses, their_losses, strict=True)]
    if apart[0] > 1e-3 or max(apart) > 0.1 * min(their_losses):
        raise RuntimeError(f"the losses of the two sides are apart: {our_losses} and {their_losses}")
    against = f"{training.against}, gloo, {training.workers} processes"
    note = f"losses differ by {apart[0]:.0e} after {steps} steps"
    return Row(training.name, our_seconds, their_seconds, against, training.target, note)


GPT_OVER_TWO = [
    Training("gpt", 2, 16, "DDP", 0.95),
    Training("gpt", 2, 16, "DDP", 1.1, "off"),
    Training("gpt", 2, 2, "DDP", 0.6),
    Training("gpt", 2, 2, "DDP", 0.8, "off"),
]
"""The demo's model. With a row for each worker communication weighs; with eight the libraries' products do."""


def rows() -> list[Row]:
    others = [
        Training(model, workers, workers * each, against, 0.8 if each == 1 else 1.0)
        for model in MODELS
        for workers in (2, 4)
        for against in ("DDP", "FSDP2")
        for each in (1, 8)
        if (model, workers, against) != ("gpt", 2, "DDP")
    ]
    return [row(training, 20 if training.batch == training.workers else 5, 10) for training in [*GPT_OVER_TWO, *others]]


if __name__ == "__main__":
    print(table(rows()))
