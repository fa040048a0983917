"""What was measured of several libraries in turns, as the lines of a table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.measure import duration

OURS = "ours"


@dataclass(frozen=True)
class Asked:
    """A row of the table."""

    what: str
    """As the libraries' processes call it."""
    title: str
    count: int
    """Calls in a round."""
    rounds: int
    aims: Mapping[str, float] = field(default_factory=dict)
    """By library: how many times as fast as it ours is to be."""
    seconds: float = 30.0
    """How long a round of one library may take."""
    warm: int = 1
    """How many rounds before do not count."""


@dataclass
class Measured:
    """What came of it: seconds by library and round, why there are none, and what else was said."""

    asked: Asked
    seconds: dict[str, list[float]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower quartile, the median and the upper one."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def times_as_fast(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """By round, how many times as fast ours is."""
    return [other / own for own, other in zip(ours, theirs, strict=True)]


def head(libraries: Sequence[str]) -> list[str]:
    return ["what", *libraries, *(f"× {library}" for library in libraries if library != OURS)]


def cells(measured: Measured, libraries: Sequence[str]) -> list[str]:
    """A line of the table: medians and quartiles of each library, then of how many times as fast ours is."""
    found = [measured.asked.title]
    for library in libraries:
        times = measured.seconds.get(library)
        if library in measured.failed or not times:
            found.append("none")
            continue
        low, middle, high = map(duration, quartiles(times))
        note = measured.notes.get(library)
        found.append(f"{middle} ({low} to {high}){f', {note}' if note else ''}")
    ours = measured.seconds.get(OURS)
    for library in libraries:
        if library == OURS:
            continue
        times = measured.seconds.get(library)
        if not ours or not times or {library, OURS} & measured.failed.keys():
            found.append("")
            continue
        low, middle, high = quartiles(times_as_fast(ours, times))
        aim = measured.asked.aims.get(library)
        aimed = "" if aim is None else f", aim {aim:g}{' missed' if middle < aim else ''}"
        found.append(f"{middle:.3g} ({low:.3g} to {high:.3g}){aimed}")
    return found


def failures(measured: Sequence[Measured]) -> list[str]:
    """A line for each measurement that there is none of, and why."""
    return [f"{row.asked.title}, {library}: {why}" for row in measured for library, why in row.failed.items()]
