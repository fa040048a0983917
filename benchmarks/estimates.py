"""What the compiler estimates for a step against what the step takes: ten programs of several kinds, over 2, 4 and 8
workers of this machine.

The estimates are those of `monarchc sweep --machine FILE.toml`, for the file that `monarch doctor --measure FILE.toml`
writes here. The programs take turns, some steps at a time, so that whatever else the machine does falls on all of them.
Two figures sum the table up: how many of the pairs of programs the estimates put in another order than the
measurements, and the median of the estimates' errors.
"""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import monarch
from benchmarks import pipeline
from benchmarks.measure import duration, seconds
from monarch.compiler.cli.measure import measure as describe
from monarch.compiler.cost.cluster import Cluster, load_cluster
from monarch.compiler.inspect.estimate import estimate
from monarch.compiler.pipeline import compile_graph
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.models.llama import Llama
from monarch.stdlib.models.moe import MixtureOfExperts
from monarch.stdlib.models.vit import ViT
from monarch.stdlib.parallel import data_parallel, expert_parallel, fully_shard, tensor_parallel

SEQUENCE = 128
WORDS = 256

Layouts = Callable[[nn.Module, Mesh], Any]


@dataclass(frozen=True)
class Case:
    """A program: what it is, its mesh, and what makes (program, arguments) on that."""

    name: str
    dims: dict[str, int]
    make: Callable[[Mesh], tuple[Any, tuple[torch.Tensor, ...]]]


@dataclass(frozen=True)
class Compared:
    """Seconds of one step: as estimated, and the median of those measured."""

    name: str
    workers: int
    estimated: float
    measured: float

    @property
    def ratio(self) -> float:
        return self.estimated / self.measured

    @property
    def error(self) -> float:
        """How far the estimate is off, as a share of what was measured."""
        return abs(self.ratio - 1)


def text(model: Callable[[], nn.Module], layouts: Layouts, rows: int) -> Callable[[Mesh], Any]:
    """A training step of a language model, with AdamW, of so many rows in all."""

    def make(mesh: Mesh) -> tuple[Any, tuple[torch.Tensor, ...]]:
        tokens = torch.randint(WORDS, (rows, SEQUENCE + 1))
        return _training(
            model(), mesh, layouts, lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        ), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    return make


def images(layouts: Layouts, rows: int) -> Callable[[Mesh], Any]:
    """A training step of a vision transformer."""

    def make(mesh: Mesh) -> tuple[Any, tuple[torch.Tensor, ...]]:
        return _training(ViT(), mesh, layouts, F.cross_entropy), (
            torch.randn(rows, 3, 32, 32),
            torch.randint(10, (rows,)),
        )

    return make


def _training(module: nn.Module, mesh: Mesh, layouts: Layouts, loss_of: Callable[..., torch.Tensor]) -> Any:
    module = monarch.module_to_mesh(module, mesh, layouts=layouts(module, mesh))
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)
    batch = "@data" if "data" in mesh.spec.sizes else "-"

    @monarch.program
    def train_step(inputs, targets):  # type: ignore[no-untyped-def]
        inputs = monarch.layout(inputs, f"[{batch}{', -' * (inputs.ndim - 1)}]")
        targets = monarch.layout(targets, f"[{batch}{', -' * (targets.ndim - 1)}]")
        optimizer.zero_grad()
        loss = loss_of(module(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def traffic(mesh: Mesh) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """Pointwise ops over 64 MiB a worker, each of which the next needs whole."""
    x = monarch.distribute(torch.randn(len(mesh) * 4096, 4096), mesh, "[@data, -]")

    @monarch.program
    def pointwise(x):  # type: ignore[no-untyped-def]
        for _ in range(4):
            x = x - x.sum(1, keepdim=True)
        return x.sum()

    return pointwise, (x,)


def exchange(mesh: Mesh) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A tensor of 16 MiB that changes from rows to columns and back, and is gathered."""
    x = monarch.distribute(torch.randn(2048, 2048), mesh, "[@data, -]")

    @monarch.program
    def turned(x):  # type: ignore[no-untyped-def]
        for _ in range(4):
            x = monarch.layout(monarch.layout(x, "[-, @data]"), "[@data, -]")
        return monarch.layout(x, "[-, -]").sum()

    return turned, (x,)


def stages(mesh: Mesh) -> tuple[Any, tuple[torch.Tensor, ...]]:
    """A training step in as many stages as there are workers."""
    return pipeline.make_step(mesh, 256), pipeline.batch(256)


def _data(module: nn.Module, mesh: Mesh) -> Any:
    return data_parallel(module)


def _sharded(module: nn.Module, mesh: Mesh) -> Any:
    return fully_shard(module, mesh, "data")


def _tensor(module: nn.Module, mesh: Mesh) -> Any:
    return tensor_parallel(module, mesh, "model")


def _experts(module: nn.Module, mesh: Mesh) -> Any:
    return expert_parallel(module, mesh, "data")


CASES = (
    Case("GPT, data parallel, 16 rows", {"data": 2}, text(lambda: GPT(sequence=SEQUENCE), _data, 16)),
    Case("GPT, data parallel, 2 rows", {"data": 2}, text(lambda: GPT(sequence=SEQUENCE), _data, 2)),
    Case("GPT, tensor parallel, 8 rows", {"model": 2}, text(lambda: GPT(sequence=SEQUENCE), _tensor, 8)),
    Case("Llama, fully sharded, 16 rows", {"data": 4}, text(lambda: Llama(groups=2), _sharded, 16)),
    Case(
        "Llama, data and tensor parallel, 8 rows",
        {"data": 2, "model": 2},
        text(lambda: Llama(groups=2), _tensor, 8),
    ),
    Case(
        "mixture, expert parallel, 8 rows",
        {"data": 4},
        text(lambda: MixtureOfExperts(layers=2), _experts, 8),
    ),
    Case("pipeline of four stages, 1F1B, width 256", {"pipe": 4}, stages),
    Case("ViT, fully sharded, 64 images", {"data": 8}, images(_sharded, 64)),
    Case("pointwise over 64 MiB a worker", {"data": 2}, traffic),
    Case("16 MiB from rows to columns", {"data": 4}, exchange),
)


HEAD = ("program", "workers", "estimated", "measured", "ratio")


def measure(repetitions: int = 7, cases: Sequence[Case] = CASES) -> list[Compared]:
    """Each program's estimate, and the median of its steps."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as meshes:
        path = Path(folder) / "machine.toml"
        describe(path)
        cluster = load_cluster(str(path))
        running = [meshes.enter_context(_running(case, cluster)) for case in cases]
        times: list[list[float]] = [[] for _ in cases]
        for _ in range(repetitions):
            for found, (_, run) in zip(times, running, strict=True):
                found.append(run())
    return [
        Compared(case.name, math.prod(case.dims.values()), estimated, statistics.median(found))
        for case, (estimated, _), found in zip(cases, running, times, strict=True)
    ]


@contextmanager
def _running(case: Case, cluster: Cluster) -> Iterator[tuple[float, Callable[[], float]]]:
    """A program that has run: the seconds estimated for a step, and what takes some steps and gives the seconds of
    one."""
    torch.manual_seed(0)
    with Mesh(**case.dims) as mesh:
        program, arguments = case.make(mesh)
        program(*arguments).item()  # makes the optimizer's state; later calls share the second's plan
        program(*arguments).item()
        plan = compile_graph(program.trace(*arguments).graph, program.options, report=True, cluster=cluster)
        steps = max(2, round(0.3 / seconds(lambda: program(*arguments).item())))

        def run() -> float:
            start = time.perf_counter()
            for _ in range(steps):
                last = program(*arguments)
            last.item()
            return (time.perf_counter() - start) / steps

        yield estimate(plan, cluster).seconds, run


def in_another_order(compared: Sequence[Compared]) -> tuple[int, int]:
    """How many pairs of programs the estimates put in another order than the measurements, and how many pairs there
    are."""
    pairs = list(combinations(compared, 2))
    return sum((a.estimated - b.estimated) * (a.measured - b.measured) < 0 for a, b in pairs), len(pairs)


def tables(compared: Sequence[Compared]) -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """As (title, head, lines)."""
    swapped, pairs = in_another_order(compared)
    tau = 1 - 2 * swapped / pairs
    error = statistics.median(each.error for each in compared)
    title = (
        f"Estimates against measured steps: {swapped} of {pairs} pairs in another order (Kendall's tau {tau:.2f}), "
        f"median error {error:.0%}"
    )
    lines = [
        (each.name, str(each.workers), duration(each.estimated), duration(each.measured), f"{each.ratio:.2f}")
        for each in sorted(compared, key=lambda each: each.measured)
    ]
    return [(title, HEAD, lines)]


if __name__ == "__main__":
    for title, head, lines in tables(measure()):
        print(title)
        for line in [head, *lines]:
            print(" | ".join(line))
