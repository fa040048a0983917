"""all_reduce between two workers: ours against gloo's, timed inside the workers; and the same bytes through a memcpy.

Each side runs a number of all_reduces in a row in two processes of one thread. The time is the slower process's, from a
common start to its own end.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.measure import Row, duration, interleaved, seconds, table
from monarch.compiler.plan import Instruction, Layout, MeshSpec, Plan, Slot, TensorType, ValueSpec
from monarch.runtime.controller.executor import start_local

WORKERS = 2
SIZES = ((1 << 10, 200, 0.05), (64 << 10, 100, None), (1 << 20, 20, None), (16 << 20, 4, 0.25))
REPETITIONS = 15


def plan_of(mesh: MeshSpec, elements: int, count: int) -> Plan:
    """`count` all_reduces of a worker's own row, each with the buffer of the one before it freed."""
    type_ = TensorType(torch.float32, (WORKERS, elements), Layout((("w",), ())))
    instructions = []
    for at in range(count):
        made = 1 + 2 * at
        instructions.append(Instruction("all_reduce", ([Slot(0)], ["w"], "sum"), {}, made))
        free = (made, made + 1) if at < count - 1 else (made,)
        instructions.append(Instruction("getitem", (Slot(made), 0), {}, made + 1, free))
    last = ValueSpec("return", 0, type_, 2 * count)
    first = ValueSpec("input", 0, type_, 0)
    return Plan("all_reduce", mesh, (first,), (last,), tuple(instructions), 1 + 2 * count, (False,))


class Ours:
    """A mesh of two workers. A step of `count` all_reduces is timed from the controller, its start and end included."""

    def __init__(self) -> None:
        self.executor = start_local(MeshSpec.of(w=WORKERS))
        self._plans: dict[tuple[int, int], tuple[Any, Plan]] = {}

    def measure(self, size: int, count: int) -> float:
        if (size, count) not in self._plans:
            plan = plan_of(self.executor.mesh, size // 4, count)
            self._plans[size, count] = self.executor.put(torch.randn(WORKERS, size // 4), plan.inputs[0].type), plan
        value, plan = self._plans[size, count]
        return seconds(lambda: self.executor.wait(self.executor.run(plan, [value])[0])) / count

    def close(self) -> None:
        self.executor.close()


def _gloo_worker(rank: int, store: str, pipe: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORKERS)
    try:
        while (request := pipe.recv()) is not None:
            size, count = request
            value = torch.randn(size // 4)
            dist.barrier()
            start = time.perf_counter()
            for _ in range(count):
                dist.all_reduce(value)
            pipe.send((time.perf_counter() - start) / count)
    finally:
        dist.destroy_process_group()


class Gloo:
    """Two processes in a gloo group on this host."""

    def __init__(self) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._folder = tempfile.TemporaryDirectory()
        context = mp.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(WORKERS):
            here, there = context.Pipe()
            process = context.Process(target=_gloo_worker, args=(rank, f"{self._folder.name}/store", there))
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def measure(self, size: int, count: int) -> float:
        for pipe in self._pipes:
            pipe.send((size, count))
        return max(float(pipe.recv()) for pipe in self._pipes)

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def copy_seconds(size: int) -> float:
    """A memcpy of `size` bytes in one thread (median)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        source, target = torch.randn(size // 4), torch.empty(size // 4)
        return statistics.median(seconds(lambda: target.copy_(source)) for _ in range(50))
    finally:
        torch.set_num_threads(threads)


def rows() -> list[Row]:
    ours, gloo = Ours(), Gloo()
    try:
        found = []
        for size, count, target in SIZES:
            mine, other = interleaved(
                lambda size=size, count=count: ours.measure(size, count),  # type: ignore[misc]
                lambda size=size, count=count: gloo.measure(size, count),  # type: ignore[misc]
                REPETITIONS,
                warm=3,
            )
            name = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
            copy = copy_seconds(size)
            rate = size / statistics.median(mine) / 1e9
            note = f"{rate:.2g} GB/s a worker; memcpy takes {duration(copy)}, {size / copy / 1e9:.3g} GB/s"
            found.append(Row(f"all_reduce of {name}, 2 workers", mine, other, "gloo, 2 processes", target, note))
        return found
    finally:
        ours.close()
        gloo.close()


if __name__ == "__main__":
    print(table(rows()))
