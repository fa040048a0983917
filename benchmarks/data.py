"""Batches onto a mesh of two workers: `monarch.data.stream` against `torch.utils.data.DataLoader` and
`monarch.distribute`, shuffled, from the same memory map; and what a training step pays for its data."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

import monarch
from benchmarks.measure import Row, interleaved, table
from monarch.distributed import Mesh

ROWS, BATCH = 4096, 64
SHAPES = {"images": ((3, 64, 64), np.float32), "tokens": ((1024,), np.int64)}
WORKERS = (0, 2)
REPETITIONS = 5
STEPS = 40


class Rows(Dataset[torch.Tensor]):
    """Rows of a memory map, as people write such a data set."""

    def __init__(self, path: Path) -> None:
        self.rows = np.load(path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.from_numpy(self.rows[row].copy())


def a_batch(made: Callable[[], Iterable[Any]]) -> float:
    """Seconds for each batch of an epoch, until all workers have them."""
    start, count, last = time.perf_counter(), 0, None
    for batch in made():
        last, count = batch, count + 1
    assert last is not None
    last.wait()
    return (time.perf_counter() - start) / count


def loaded(loader: DataLoader[torch.Tensor], mesh: Mesh) -> Iterator[Any]:
    for batch in loader:
        yield monarch.distribute(batch, mesh, ["data"] + [None] * (batch.ndim - 1))


def streamed(rows: np.ndarray, mesh: Mesh) -> float:
    return a_batch(lambda: monarch.data.stream(rows, mesh, "[@data]", batch=BATCH, shuffle=1))


def processor_seconds(mesh: Mesh) -> float:
    """Of this process and the workers, so far."""
    ticks = 0
    for worker in mesh.executor.worker_pids():
        fields = Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def step_rows(path: Path, mesh: Mesh) -> list[Row]:
    """A step on streamed batches against one on a batch that is on the mesh already."""
    weight = monarch.distribute(torch.randn(3 * 64 * 64, 256) / 100, mesh).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=1e-6)

    @monarch.program(mesh=mesh)
    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (x.flatten(1) @ weight).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    there = next(batches := monarch.data.stream(np.load(path, mmap_mode="r"), mesh, "[@data]", batch=BATCH))
    batches.close()
    waited: list[float] = []
    processor: dict[str, list[float]] = {"streamed": [], "there": []}

    def steps(take: Callable[[], Any], what: str = "there") -> float:
        start, before = time.perf_counter(), processor_seconds(mesh)
        for _ in range(STEPS):
            train_step(take()).item()
        processor[what].append((processor_seconds(mesh) - before) / STEPS)
        return (time.perf_counter() - start) / STEPS

    def with_data() -> float:
        rows = np.load(path, mmap_mode="r")
        with monarch.data.stream(rows, mesh, "[@data]", batch=BATCH, shuffle=1, epochs=None) as batches:
            train_step(next(batches)).item()
            before = batches.waited
            found = steps(lambda: next(batches), "streamed")
            waited.append((batches.waited - before) / STEPS)
        return found

    ours, other = interleaved(with_data, lambda: steps(lambda: there), REPETITIONS)
    streamed, alone = (median(each) * 1e3 for each in processor.values())
    note = (
        f"a step waits {median(waited) * 1e6:.0f} µs for its batch; all processes take {streamed:.1f} ms of processor "
        f"time a step, and {alone:.1f} ms without the stream"
    )
    return [Row("a training step on streamed images", ours, other, "the same batch each time, on the mesh", 1.1, note)]


def rows() -> list[Row]:
    found = []
    with tempfile.TemporaryDirectory() as folder, Mesh(data=2) as mesh:
        for name, (shape, dtype) in SHAPES.items():
            path = Path(folder) / f"{name}.npy"
            np.save(path, np.random.default_rng(0).integers(0, 100, (ROWS, *shape)).astype(dtype))
            source = np.load(path, mmap_mode="r")
            for workers in WORKERS:
                loader = DataLoader(Rows(path), BATCH, shuffle=True, num_workers=workers)
                size = BATCH * source[0].nbytes / 2**20
                ours, other = interleaved(
                    partial(streamed, source, mesh), partial(a_batch, partial(loaded, loader, mesh)), REPETITIONS
                )
                each = f"{1 / median(ours):,.0f} against {1 / median(other):,.0f} batches/s"
                against = f"DataLoader, {workers} workers, and distribute"
                found.append(Row(f"a batch of {name}, {size:.1f} MiB, to 2 workers", ours, other, against, 1.0, each))
        found += step_rows(Path(folder) / "images.npy", mesh)
    return found


if __name__ == "__main__":
    print(table(rows()))
