"""Saving and loading 1 GiB on four workers, against `torch.distributed.checkpoint` in four processes of gloo, in turns:
the same tensors, fully sharded, and files that are synced to disk. And what the disk itself takes for as many bytes,
and what a step costs beside a save."""

from __future__ import annotations

import mmap
import multiprocessing as mp
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import monarch
from benchmarks.measure import Row, duration, interleaved, seconds, table
from monarch.distributed import Mesh

WORKERS, TENSORS, SIDE = 4, 16, 4096
REPETITIONS = 5
TARGET = 0.7
COLD = 3
"""So many loads do not count: the first reads the disk, and the next ones too get new memory from the system."""


def _gloo_worker(rank: int, store: str, folder: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORKERS)
    mesh = init_device_mesh("cpu", (WORKERS,))
    torch.manual_seed(rank)
    state = {f"w{at}": distribute_tensor(torch.randn(SIDE, SIDE), mesh, [Shard(0)]) for at in range(TENSORS)}
    try:
        while (what := pipe.recv()) is not None:
            dist.barrier()
            start = time.perf_counter()
            (dcp.save if what == "save" else dcp.load)(state, checkpoint_id=folder)
            pipe.send(time.perf_counter() - start)
    finally:
        dist.destroy_process_group()


class Gloo:
    """Four processes that hold a shard of each tensor."""

    def __init__(self, folder: Path) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._folder = folder / "theirs"
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(WORKERS):
            here, there = context.Pipe()
            arguments = rank, str(folder / "store"), str(self._folder), there
            process = context.Process(target=_gloo_worker, args=arguments)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def measure(self, what: str) -> float:
        if what == "save":
            shutil.rmtree(self._folder, ignore_errors=True)
        for pipe in self._pipes:
            pipe.send(what)
        return max(float(pipe.recv()) for pipe in self._pipes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()


class Ours:
    """Four workers that do, and a program that replaces every tensor."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "ours"
        self.mesh = mesh = Mesh(data=WORKERS)
        self.state = {
            f"w{at}": monarch.distribute(torch.randn(SIDE, SIDE), mesh, "[@data, -]") for at in range(TENSORS)
        }
        tensors = list(self.state.values())

        @monarch.program(mesh=mesh)
        def step() -> torch.Tensor:
            for tensor in tensors:
                tensor.mul_(0.999)
            return tensors[0][0, 0]

        self.step = step

    def save(self) -> float:
        shutil.rmtree(self._folder, ignore_errors=True)
        return seconds(lambda: monarch.save(self.state, self._folder).result())

    def load(self) -> float:
        return seconds(lambda: monarch.load(self._folder, into=self.state))

    def step_alone(self) -> float:
        return seconds(lambda: self.step().item())

    def step_beside(self) -> float:
        shutil.rmtree(self._folder, ignore_errors=True)
        start = time.perf_counter()
        saving = monarch.save(self.state, self._folder)
        self.calls.append(time.perf_counter() - start)
        taken = seconds(lambda: self.step().item())
        saving.result()
        return taken

    calls: list[float] = []


def disk(folder: Path) -> float:
    """Seconds in which as many bytes are written by one process, directly and through the cache, whichever is
    faster, and synced."""
    found = []
    part = mmap.mmap(-1, 4 << 20)
    part.write(os.urandom(len(part)))
    for way in (os.O_DIRECT, 0):
        fd = os.open(folder / "plain", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | way)
        start = time.perf_counter()
        for _ in range(TENSORS * SIDE * SIDE * 4 // len(part)):
            os.write(fd, part)
        os.fsync(fd)
        found.append(time.perf_counter() - start)
        os.close(fd)
        (folder / "plain").unlink()
    return min(found)


def forget(folder: Path) -> None:
    """Have the system's cache of files hold none of a folder's. What is not written yet stays."""
    for file in folder.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def rows() -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="monarch-bench-") as name:
        folder = Path(name)
        gloo, ours = Gloo(folder), Ours(folder)
        try:
            size = TENSORS * SIDE * SIDE * 4 >> 20
            against = f"DCP, gloo, {WORKERS} processes"
            saved = interleaved(ours.save, lambda: gloo.measure("save"), REPETITIONS)
            plain = f"the disk alone takes {duration(statistics.median(disk(folder) for _ in range(REPETITIONS)))}"
            loaded = interleaved(ours.load, lambda: gloo.measure("load"), REPETITIONS, warm=COLD)

            def cold(load: Callable[[], float]) -> Callable[[], float]:
                def measured() -> float:
                    forget(folder)
                    return load()

                return measured

            read = interleaved(cold(ours.load), cold(lambda: gloo.measure("load")), REPETITIONS)
            steps = interleaved(ours.step_beside, ours.step_alone, REPETITIONS)
            note = f"saving {size} MiB; the call of save returns in {duration(statistics.median(ours.calls))}"
            return [
                Row(f"saving {size} MiB, {WORKERS} workers", *saved, against, TARGET, plain),
                Row(f"loading {size} MiB, {WORKERS} workers", *loaded, against, TARGET),
                Row(f"loading {size} MiB from the disk, {WORKERS} workers", *read, against, TARGET),
                Row("a step that replaces all that is being saved", *steps, "the same with no save", None, note),
            ]
        finally:
            gloo.close()
            ours.mesh.close()


if __name__ == "__main__":
    print(table(rows()))
