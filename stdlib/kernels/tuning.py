"""Choosing among prebuilt variants of a kernel by measured times. Measuring needs a GPU, and is the runtime's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from monarch.compiler.errors import MonarchError

Choice = TypeVar("Choice")


def fastest(variants: Sequence[Choice], measure: Callable[[Choice], float], *, rounds: int = 3) -> Choice:
    """The variant with the lowest median time; of equals the one listed first, so that all workers choose alike.

    `measure(variant)` gives seconds, or infinity for a variant that does not run here (too much shared memory, say).
    After each round those that took more than 1.5 times the best, then 1.25, then 1.125… are measured no further, so
    that most of the time goes to telling the good ones apart. Raises MonarchError where none runs, or a time is no
    time.
    """
    times: list[list[float]] = [[] for _ in variants]
    running = list(range(len(variants)))
    for round_number in range(rounds):
        for index in running:
            seconds = measure(variants[index])
            if not seconds > 0:
                raise MonarchError(f"variant {variants[index]} was measured to take {seconds} seconds")
            times[index].append(seconds)
        medians = {index: statistics.median(times[index]) for index in running}
        best = min(medians.values(), default=math.inf)
        if best == math.inf:
            raise MonarchError(f"none of the {len(variants)} variants of the kernel runs on this device")
        running = [index for index in running if medians[index] <= best * (1 + 0.5 ** (round_number + 1))]
    return variants[min(running, key=lambda index: (statistics.median(times[index]), index))]
