"""What actors cost: calls and their replies, tensors handed from actor to actor, to programs and from them, starting
processes, many actors.

Calls are measured against a bare ping-pong of 32 bytes over a socketpair with one forked process (`dispatch.PingPong`).
A tensor goes from one actor to another, which looks at its last element, and back comes that: the other side is one
`clone` of it, in one process. Shards go to actors in the processes of a program's workers, and from them: the other
side is a call without tensors. Starting is timed to the first replies, with torch imported and the warm parent, which
the first processes of a program wait for, running.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import torch

import monarch
from benchmarks.dispatch import PingPong
from benchmarks.measure import Row, interleaved, seconds, table
from monarch.actor import Actor, Channel, ProcMesh, endpoint, send, shutdown_context, this_host
from monarch.distributed import Mesh

COUNT = 300
REPETITIONS = 15
ACTORS = 1000
PROCESSES = 8


class Echo(Actor):
    """Answers at once."""

    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}

    @endpoint
    def echo(self, value: object) -> object:
        return value

    @endpoint
    def last(self, tensor: torch.Tensor) -> float:
        return float(tensor[-1])

    @endpoint
    def make(self, length: int) -> torch.Tensor:
        """The same at every call."""
        if length not in self.tensors:
            self.tensors[length] = torch.ones(length)
        return self.tensors[length]

    @endpoint
    def hand_over(self, other: Echo, size: int) -> float:
        if size not in self.tensors:
            self.tensors[size] = torch.ones(size // 4)
        return other.last.call_one(self.tensors[size]).get()

    @endpoint
    def processor_seconds(self) -> float:
        """Since this process was forked."""
        return time.process_time()

    @endpoint
    def memory(self) -> int:
        """What this process has of its own, in bytes."""
        lines = Path(f"/proc/{os.getpid()}/smaps_rollup").read_text().splitlines()[1:]
        fields = {name: int(value) for name, value, *_ in map(str.split, lines)}
        return 1024 * (fields["Private_Clean:"] + fields["Private_Dirty:"])


def spawn(count: int) -> ProcMesh:
    return this_host().spawn_procs(per_host={"gpus": count})


def calls() -> list[Row]:
    actors = {count: spawn(count).spawn("echo", Echo) for count in (2, 8)}
    one = actors[2].slice(gpus=0)
    pingpong = PingPong(1)

    def pipelined() -> None:
        for _ in range(COUNT):
            last = one.echo.call_one(1)
        last.get()

    def broadcast() -> None:
        for _ in range(COUNT):
            actors[8].echo.broadcast(1)
        actors[8].echo.call(1).get()

    try:
        ways = (
            ("call_one, waited for", lambda: seconds(lambda: one.echo.call_one(1).get(), COUNT)),
            ("call_one, pipelined", lambda: seconds(pipelined) / COUNT),
            ("call on 2 actors", lambda: seconds(lambda: actors[2].echo.call(1).get(), COUNT)),
            ("call on 8 actors", lambda: seconds(lambda: actors[8].echo.call(1).get(), COUNT)),
            ("broadcast to 8 actors", lambda: seconds(broadcast) / COUNT),
        )
        return [
            Row(f"actors: {name}", *interleaved(ours, pingpong.seconds, REPETITIONS, 2), pingpong.name)
            for name, ours in ways
        ]
    finally:
        pingpong.close()
        shutdown_context().get()


def tensors() -> list[Row]:
    actors = spawn(2).spawn("echo", Echo)
    here, there = actors.slice(gpus=0), actors.slice(gpus=1)
    found = []
    for size, count in ((1 << 20, 50), (64 << 20, 3)):
        tensor = torch.ones(size // 4)

        def ours(size: int = size, count: int = count) -> float:
            return seconds(lambda: here.hand_over.call_one(there, size).get(), count)

        def other(tensor: torch.Tensor = tensor, count: int = count) -> float:
            return seconds(tensor.clone, count)

        name = f"actors: {size >> 20} MiB from actor to actor"
        found.append(Row(name, *interleaved(ours, other, REPETITIONS, 2), "clone in one process"))
    shutdown_context().get()
    return found


def programs() -> list[Row]:
    procs = spawn(2)
    actors = procs.spawn("echo", Echo)
    found = []
    with Mesh(procs=procs) as mesh:
        x = monarch.distribute(torch.ones(32 << 20), mesh, "[@gpus]")

        def without() -> float:
            return seconds(lambda: actors.echo.call(1).get(), COUNT)

        def to_actors() -> float:
            return seconds(lambda: actors.last.call(x).get(), COUNT)

        def from_actors() -> float:
            return seconds(lambda: mesh.from_shards(actors.make.shards(1 << 24), "[@gpus]").wait(), COUNT)

        for name, ours in (("to 2 actors", to_actors), ("from 2 actors", from_actors)):
            times = interleaved(ours, without, REPETITIONS, 2)
            found.append(Row(f"actors: 64 MiB shards {name}", *times, "call on 2 actors"))
    shutdown_context().get()
    return found


def starts() -> list[Row]:
    found = []
    spawn(1).spawn("echo", Echo).echo.call(0).get()
    for count in (2, 8, 32):
        times, used, own = [], 0.0, 0
        for _ in range(5):
            begin = time.perf_counter()
            procs = spawn(count)
            echo = procs.spawn("echo", Echo)
            used += sum(echo.processor_seconds.call().get().values())
            times.append(time.perf_counter() - begin)
            own += sum(echo.memory.call().get().values())
            procs.stop().get()
        note = f"{200 * used / count:.1f} ms of a processor and {own / 5 / count / 2**20:.1f} MiB private, a process"
        found.append(
            Row(f"actors: {count} processes to their first replies", tuple(times), (1.0,) * 5, "1 s", 1.0, note)
        )
    shutdown_context().get()
    return found


def many() -> list[Row]:
    procs = spawn(PROCESSES)
    empty = procs.spawn("echo", Echo)
    before = sum(empty.memory.call().get().values())
    meshes = [procs.spawn("echo", Echo) for _ in range(ACTORS // PROCESSES)]
    port, receiver = Channel[object].open()

    def ask() -> None:
        for mesh in meshes:
            send(mesh.echo, (1,), {}, port)
        for _ in range(ACTORS):
            receiver.recv().get()

    ask()
    after = sum(empty.memory.call().get().values())
    times = tuple(seconds(ask) for _ in range(5))
    shutdown_context().get()
    note = f"{(after - before) / ACTORS / 1024:.0f} KiB an actor"
    return [Row(f"actors: {ACTORS} in {PROCESSES} processes answer", times, (1.0,) * 5, "1 s", 1.0, note)]


def rows() -> list[Row]:
    return [*calls(), *tensors(), *programs(), *starts(), *many()]


if __name__ == "__main__":
    print(table(rows()))
