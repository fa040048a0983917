"""A training step of the demo's GPT under memory limits, against the same step without one.

Both are trained on the same batches, in turns, on two workers of one thread; their losses have to be the same to the
bit. What a worker holds at most is measured by `monarch.profile`, and has to be what the plan says.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

import monarch
from benchmarks.measure import Row, interleaved, table
from benchmarks.train_step import WORKERS, endless, make_step
from monarch.compiler.sizes import format_bytes
from monarch.distributed import Mesh

BATCH = 16
PARTS = (0.75, 0.5, 0.4)
"""Limits: what is there before the step, and this part of what the step adds to it without a limit."""


@dataclass
class Training:
    """A step that can be taken again and again, and what is known of it."""

    step: Any
    data: Iterator[tuple[torch.Tensor, torch.Tensor]]
    losses: list[float]

    def take(self, steps: int) -> float:
        """Seconds for each of so many steps."""
        batches = [next(self.data) for _ in range(steps)]
        start = time.perf_counter()
        for batch in batches:
            loss = self.step(*batch)
        self.losses.append(loss.item())
        return (time.perf_counter() - start) / steps

    @property
    def plan(self) -> Any:
        return self.step.compile(*next(endless(BATCH)))

    def measured(self) -> int:
        """The most that a worker holds in a step, in bytes."""
        with monarch.profile() as profile:
            self.take(1)
        steps = [step for trace in profile.traces for step in trace.steps if step.worker == WORKERS - 1]
        return max(span.held for step in steps for span in step.spans)


@contextmanager
def training(limit: int | None = None) -> Iterator[Training]:
    with Mesh(data=WORKERS) as mesh:
        made = Training(make_step(mesh, memory_limit=limit), endless(BATCH), [])
        made.take(2)
        yield made


def row(limit: int, steps: int = 4, repetitions: int = 8) -> Row:
    """Raises RuntimeError where the losses differ, or a worker holds what its plan does not say."""
    with training() as free, training(limit) as limited:
        mine, other = interleaved(lambda: limited.take(steps), lambda: free.take(steps), repetitions)
        if limited.losses != free.losses:
            raise RuntimeError(f"the losses differ: {limited.losses} and {free.losses}")
        plan, held, before = limited.plan, limited.measured(), free.measured()
    if held != plan.costs["peak_bytes"] or held > limit:
        raise RuntimeError(f"a worker holds {held:,} bytes; its plan says {plan.costs['peak_bytes']:,} of {limit:,}")
    done = plan.costs["recomputed"]
    note = (
        f"holds {format_bytes(held)} rather than {format_bytes(before)};"
        f" {done['calls']} ops again, estimated at {done['seconds'] * 1e3:.1f} ms"
    )
    name = f"train_step in {format_bytes(limit)}, batch {BATCH}, data={WORKERS}"
    return Row(name, mine, other, "the same without a limit", note=note)


def rows() -> list[Row]:
    with training() as free:
        plan, most = free.plan, free.measured()
    start = sum(value.allocates for value in plan.report.values if value.instruction < 0)
    return [row(int(start + part * (most - start))) for part in PARTS]


if __name__ == "__main__":
    print(table(rows()))
