"""What measuring a step costs: the training step of `train_step`, within `monarch.profile` and outside, in turns.

The trace is taken and not written; starting and ending it is outside of what is timed.
"""

from __future__ import annotations

import monarch
from benchmarks.measure import Row, interleaved, table
from benchmarks.train_step import Run, ours

TARGETS = {16: 1.05, 2: 1.15}
"""Global batch size: at most this share of the time that the step takes where it is not measured."""


def row(batch: int, steps: int, repetitions: int, target: float) -> Row:
    spans = 0
    with ours(batch) as (run, _):

        def traced(run: Run = run) -> float:
            nonlocal spans
            with monarch.profile() as profile:
                took = run(steps)
            spans = len(profile.trace.steps[-1].spans)
            return took / steps

        mine, other = interleaved(traced, lambda: run(steps) / steps, repetitions, warm=2)
    note = f"{spans} instructions a step"
    return Row(f"train_step measured, batch {batch}, data=2", mine, other, "not measured", target, note)


def rows() -> list[Row]:
    return [
        row(batch=16, steps=5, repetitions=10, target=TARGETS[16]),
        row(batch=2, steps=20, repetitions=10, target=TARGETS[2]),
    ]


if __name__ == "__main__":
    print(table(rows()))
