"""Timing two things against each other, fairly: repetitions take turns, so that what else the machine does hits
both."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Row:
    """Ours against another's: seconds of each (one for each repetition, in pairs), the ratio aimed at (None where there
    is no aim), and what else there is to say."""

    name: str
    ours: tuple[float, ...]
    other: tuple[float, ...]
    against: str
    target: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        return statistics.median(self.ours) / statistics.median(self.other)

    @property
    def spread(self) -> tuple[float, float]:
        """The lower and upper quartile of the pairs' ratios."""
        ratios = sorted(a / b for a, b in zip(self.ours, self.other, strict=True))
        if len(ratios) < 2:
            return ratios[0], ratios[0]
        quartiles = statistics.quantiles(ratios, n=4, method="inclusive")
        return quartiles[0], quartiles[2]


def seconds(call: Callable[[], object], count: int = 1) -> float:
    """How long `count` calls take, divided by `count`."""
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def interleaved(
    ours: Callable[[], float], other: Callable[[], float], repetitions: int, warm: int = 1
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Call two measurements (each gives seconds) in turns, who goes first alternating; the first `warm` do not
    count."""
    pairs: list[tuple[float, float]] = []
    for repetition in range(warm + repetitions):
        if repetition % 2:
            b, a = other(), ours()
        else:
            a, b = ours(), other()
        if repetition >= warm:
            pairs.append((a, b))
    return tuple(a for a, _ in pairs), tuple(b for _, b in pairs)


def duration(value: float) -> str:
    """Seconds, as people write them."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-9:.3g} ns"


HEAD = ("what", "ours", "other", "ratio (quartiles)", "target", "against", "note")


def cells(row: Row) -> tuple[str, ...]:
    low, high = row.spread
    target = "" if row.target is None else f"<= {row.target:g}"
    if row.target is not None and row.ratio > row.target:
        target += " missed"
    return (
        row.name,
        duration(statistics.median(row.ours)),
        duration(statistics.median(row.other)),
        f"{row.ratio:.3g} ({low:.3g} to {high:.3g})",
        target,
        row.against,
        row.note,
    )


def table(rows: Iterable[Row]) -> str:
    """The rows as a Markdown table."""
    lines: list[Sequence[str]] = [HEAD, *(cells(row) for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEAD))]
    text = [" | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    text.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in text)


@contextmanager
def kernels(when: str) -> Iterator[None]:
    """Within the block programs are compiled with MONARCH_KERNELS so."""
    before = os.environ.get("MONARCH_KERNELS")
    os.environ["MONARCH_KERNELS"] = when
    try:
        yield
    finally:
        del os.environ["MONARCH_KERNELS"]
        if before is not None:
            os.environ["MONARCH_KERNELS"] = before
