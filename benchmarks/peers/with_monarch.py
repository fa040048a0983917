"""The rows of `benchmarks.peers`, with a `monarch.actor`: ours, or PyTorch Monarch's, whichever this Python has.

The names are the same, so that one file measures both.
"""

from __future__ import annotations

import platform
import time
from functools import partial
from importlib import metadata

import torch
from serving import ACTORS, PROCESSES, SIZES, STARTED, Way, each, own_bytes, serve, together

from monarch.actor import Actor, endpoint, this_host
from monarch.rdma import RDMABuffer


class Echo(Actor):
    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}
        self.buffers: dict[int, RDMABuffer] = {}

    def tensor(self, size: int) -> torch.Tensor:
        if size not in self.tensors:
            self.tensors[size] = torch.ones(size, dtype=torch.uint8)
        return self.tensors[size]

    @endpoint
    async def echo(self, value: object) -> object:
        return value

    @endpoint
    async def last(self, tensor: torch.Tensor) -> int:
        return int(tensor[-1])

    @endpoint
    async def hand_over(self, other: Echo, size: int) -> int:
        return await other.last.call_one(self.tensor(size))

    @endpoint
    async def read(self, buffer: RDMABuffer, size: int) -> int:
        await buffer.read_into(self.tensor(size))
        return int(self.tensor(size)[-1])

    @endpoint
    async def lend(self, other: Echo, size: int) -> int:
        if size not in self.buffers:
            self.buffers[size] = RDMABuffer(self.tensor(size))
        return await other.read.call_one(self.buffers[size], size)

    @endpoint
    async def memory(self) -> int:
        return own_bytes()


def start(count: int, repetitions: int) -> float:
    """From spawning so many processes to the last one's first reply; their end is waited for, and not counted."""
    taken = 0.0
    for _ in range(repetitions):
        begin = time.perf_counter()
        procs = this_host().spawn_procs(per_host={"gpus": count})
        procs.spawn("echo", Echo).echo.call(1).get()
        taken += time.perf_counter() - begin
        procs.stop().get()
    return taken / repetitions


def main() -> None:
    two, eight = (this_host().spawn_procs(per_host={"gpus": count}).spawn("echo", Echo) for count in (2, 8))
    here, there = two.slice(gpus=0), two.slice(gpus=1)
    notes: dict[str, str] = {}
    many: list[Echo] = []

    def pipelined(count: int) -> None:
        for future in [here.echo.call_one(1) for _ in range(count)]:
            future.get()

    def broadcast(count: int) -> None:
        for _ in range(count):
            eight.echo.broadcast(1)
        eight.echo.call(1).get()

    def ask_many(count: int) -> float:
        if not many:
            procs = this_host().spawn_procs(per_host={"gpus": PROCESSES})
            first = procs.spawn("echo", Echo)
            before = sum(first.memory.call().get().values())
            many.extend(procs.spawn(f"echo{number}", Echo) for number in range(ACTORS // PROCESSES))
            for actors in many:
                actors.echo.call(1).get()
            each_one = (sum(first.memory.call().get().values()) - before) / ACTORS
            notes["many"] = f"{each_one / 1024:.0f} KiB an actor"

        def ask() -> None:
            for replies in [actors.echo.call(1) for actors in many]:
                replies.get()

        return each(ask)(count)

    ways: dict[str, Way | str] = {
        "call_one": each(lambda: here.echo.call_one(1).get()),
        "pipelined": together(pipelined),
        "call 2": each(lambda: two.echo.call(1).get()),
        "call 8": each(lambda: eight.echo.call(1).get()),
        "broadcast": together(broadcast),
        **{f"start {count}": partial(start, count) for count in STARTED},
        "many": ask_many,
    }
    for name, size in SIZES.items():
        ways[f"message {name}"] = each(lambda size=size: here.hand_over.call_one(there, size).get())
        ways[f"RDMABuffer {name}"] = each(lambda size=size: here.lend.call_one(there, size).get())
    two.echo.call(1).get()
    eight.echo.call(1).get()
    try:
        library = f"torchmonarch {metadata.version('torchmonarch')}"
    except metadata.PackageNotFoundError:
        library = f"monarchc {metadata.version('monarchc')}"
    serve(f"{library}, torch {torch.__version__}, Python {platform.python_version()}", ways, notes)


if __name__ == "__main__":
    main()
