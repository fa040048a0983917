"""What a step costs beyond its work: calling a compiled plan of one op on two workers, against a bare ping-pong.

The ping-pong is what it takes to ask two processes that wait as most programs do: the controller sends 32 bytes to each
of two forked processes over a socketpair, and reads 32 bytes back from each. Who waits sleeps in the read. The two are
kept on another core than the controller, where there is one, as workers are that compute beside it: Linux, left alone,
at times puts all three on one core for minutes, and then nobody has to wake a core, which takes most of the time.
"""

from __future__ import annotations

import os
import socket
import warnings
from collections.abc import Callable
from typing import Any

import torch

import monarch
from benchmarks.measure import Row, interleaved, seconds, table
from monarch.compiler.plan import Instruction, MeshSpec, Plan, Slot, TensorType, ValueSpec
from monarch.distributed import Mesh
from monarch.language.errors import TracedAgainWarning
from monarch.runtime.controller.executor import start_local

WORKERS = 2
COUNT = 300
CALLS = 100  # few enough that the controller waits for no step of before
TRACED = 5
REPETITIONS = 25


def plan_of(mesh: MeshSpec) -> Plan:
    type_ = TensorType(torch.float32, (4, 4))
    return Plan(
        "one_op",
        mesh,
        (ValueSpec("input", 0, type_, 0),),
        (ValueSpec("return", 0, type_, 1),),
        (Instruction("aten.mm.default", (Slot(0), Slot(0)), {}, 1, (0,)),),
        2,
        (False,),
    )


class PingPong:
    """Sockets to processes that answer, on other cores than the first, which the controller has meanwhile."""

    def __init__(self, processes: int = WORKERS) -> None:
        self.name = f"ping-pong, {processes} process{'es' * (processes > 1)} on another core"
        self._ends: list[socket.socket] = []
        self._pids: list[int] = []
        self._cores = os.sched_getaffinity(0)
        self._own = {min(self._cores)}
        for _ in range(processes):
            here, there = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                os.sched_setaffinity(0, self._cores - self._own or self._own)
                for end in (here, *self._ends):
                    end.close()
                while data := there.recv(64):
                    there.send(data)
                os._exit(0)
            there.close()
            self._ends.append(here)
            self._pids.append(pid)

    def seconds(self) -> float:
        """How long it takes until all have answered."""
        os.sched_setaffinity(0, self._own)  # of this thread alone
        try:
            return seconds(self._once, COUNT)
        finally:
            os.sched_setaffinity(0, self._cores)

    def _once(self) -> None:
        for end in self._ends:
            end.send(b"0123456789abcdef0123456789abcdef")
        for end in self._ends:
            end.recv(64)

    def close(self) -> None:
        for end in self._ends:
            end.close()
        for pid in self._pids:
            os.waitpid(pid, 0)


def rows() -> list[Row]:
    executor = start_local(MeshSpec.of(w=WORKERS))
    pingpong = PingPong()
    try:
        plan = plan_of(executor.mesh)
        x = executor.put(torch.randn(4, 4), plan.inputs[0].type)

        def waited() -> None:
            executor.wait(executor.run(plan, [x])[0])

        def pipelined() -> float:
            def steps() -> None:
                for _ in range(COUNT):
                    last = executor.run(plan, [x])[0]
                executor.wait(last)

            return seconds(steps) / COUNT

        ours, bare = interleaved(lambda: seconds(waited, COUNT), pingpong.seconds, REPETITIONS, 3)
        found = [Row("dispatch of one op, waited for", ours, bare, pingpong.name, 5.0)]
        ours, bare = interleaved(pipelined, pingpong.seconds, REPETITIONS, 3)
        found.append(Row("dispatch of one op, pipelined", ours, bare, pingpong.name, 2.0))
        return [*found, *rows_of_programs(pingpong)]
    finally:
        pingpong.close()
        executor.close()


def rows_of_programs(pingpong: PingPong) -> list[Row]:
    """What users see: a `@monarch.program` called and its value read, and called only."""
    with Mesh(w=WORKERS) as mesh:
        x = monarch.distribute(torch.randn(4, 4), mesh, "[-, -]")

        @monarch.program
        def step(x: torch.Tensor) -> torch.Tensor:
            return (x @ x).sum()

        @monarch.program
        def partial(x: torch.Tensor) -> torch.Tensor:
            return (x * 2).sum()

        sharded = monarch.distribute(torch.randn(4, 4), mesh, "[@w, -]")
        found = []
        for what, program, value in (("its value", step, x), ("its partial sum", partial, sharded)):
            read, bare = interleaved(
                lambda program=program, value=value: seconds(lambda: program(value).item(), COUNT),
                pingpong.seconds,
                REPETITIONS,
                3,
            )
            found.append(Row(f"a program called, and {what} read by item()", read, bare, pingpong.name, 3.0))
        only, bare = interleaved(lambda: called(step, x), pingpong.seconds, REPETITIONS, 3)
        found.append(Row("a program called, and not waited for", only, bare, pingpong.name, 1.0))
        return [*found, *rows_of_effects(step, x)]


class Kept:
    """What programs write in Python."""

    def __init__(self, mean: torch.Tensor) -> None:
        self.mean, self.last = mean, mean
        self.seen: dict[str, torch.Tensor] = {}
        self.steps = 0
        self.history: list[torch.Tensor] = []


def rows_of_effects(step: Callable[[Any], Any], x: torch.Tensor) -> list[Row]:
    """Programs that write Python: each call sets attributes and entries anew, adds to a count and appends to a list. A
    program that also reads the list is traced at each call."""
    kept, read = Kept(step(x)), Kept(step(x))

    @monarch.program
    def writing(x: torch.Tensor) -> torch.Tensor:
        found = (x @ x).sum()
        kept.mean = 0.9 * kept.mean + 0.1 * found
        kept.last, kept.seen["twice"] = found, found * 2
        return found

    @monarch.program
    def appending(x: torch.Tensor) -> torch.Tensor:
        found = (x @ x).sum()
        kept.steps += 1
        kept.history.append(found)
        return found

    @monarch.program
    def reading(x: torch.Tensor) -> torch.Tensor:
        found = (x @ x).sum()
        read.history.append(found)
        read.steps = len(read.history)
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TracedAgainWarning)
        wrote, bare = interleaved(lambda: called(writing, x), lambda: called(step, x), REPETITIONS, 3)
        grew, same = interleaved(lambda: called(appending, x), lambda: called(step, x), REPETITIONS, 3)
        traced, alone = interleaved(lambda: called(reading, x, TRACED), lambda: called(step, x), TRACED, 1)
    name = "a program that writes nothing"
    return [
        Row("a program called that writes two attributes and an entry", wrote, bare, name),
        Row("a program called that counts and appends to a list", grew, same, name),
        Row("a program called that reads the list too, traced each time", traced, alone, name),
    ]


def called(program: Callable[[Any], Any], x: torch.Tensor, times: int = CALLS) -> float:
    """Seconds for a call that is not waited for."""

    def steps() -> None:
        for _ in range(times):
            program(x)

    took = seconds(steps) / times
    program(x).item()
    return took


if __name__ == "__main__":
    print(table(rows()))
