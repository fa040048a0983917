"""What telemetry costs when it is on: a training step, a call of one op, and an actor's message, with it and without.

On and off take turns. Rows are made and kept as always; nobody asks for them meanwhile.
"""

from __future__ import annotations

import torch

import monarch
from benchmarks.measure import Row, interleaved, seconds, table
from benchmarks.train_step import ours
from monarch.actor import Actor, endpoint, shutdown_context, this_host
from monarch.distributed import Mesh

STEPS = 5
CALLS = 200
REPETITIONS = 10
TARGET = 1.03
"""Of the time that a training step takes without telemetry."""


class Echo(Actor):
    """Answers."""

    @endpoint
    def say(self, word: int) -> int:
        return word


def rows() -> list[Row]:
    return [step(), call(), message()]


def step() -> Row:
    with ours(16) as (run, _):

        def recorded() -> float:
            monarch.telemetry.start()
            took = run(STEPS) / STEPS
            monarch.telemetry.stop()
            return took

        on, off = interleaved(recorded, lambda: run(STEPS) / STEPS, REPETITIONS, warm=2)
    return Row("train_step with telemetry, batch 16, data=2", on, off, "without", TARGET)


def call() -> Row:
    """The least that a step can be: nothing hides what an event costs."""
    with Mesh(w=2) as mesh:
        x = monarch.distribute(torch.randn(4, 4), mesh, "[-, -]")

        @monarch.program
        def once(x: torch.Tensor) -> torch.Tensor:
            return (x @ x).sum()

        def called() -> float:
            return seconds(lambda: once(x).item(), CALLS)

        def recorded() -> float:
            monarch.telemetry.start()
            took = called()
            monarch.telemetry.stop()
            return took

        on, off = interleaved(recorded, called, REPETITIONS, warm=2)
    return Row("a program of one op, its value read, with telemetry", on, off, "without")


def message() -> Row:
    plain = this_host().spawn_procs(name="plain").spawn("echo", Echo)
    monarch.telemetry.start()
    recorded = this_host().spawn_procs(name="recorded").spawn("echo", Echo)
    on, off = interleaved(
        lambda: seconds(lambda: recorded.say.call_one(1).get(), CALLS),
        lambda: seconds(lambda: plain.say.call_one(1).get(), CALLS),
        REPETITIONS,
        warm=2,
    )
    monarch.telemetry.stop()
    shutdown_context().get()
    return Row("call_one of an actor that telemetry records", on, off, "of one that it does not")


if __name__ == "__main__":
    print(table(rows()))
