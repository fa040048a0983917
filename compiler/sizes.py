"""Bytes and seconds as people write and read them: "2 GiB", "512MB", 1073741824; "1.5 ms"."""

from __future__ import annotations

import re

from monarch.compiler.errors import MonarchError

UNITS = {"": 1, "b": 1} | {
    f"{letter}{suffix}".lower(): base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("", 1024), ("iB", 1024), ("B", 1000))
}


def parse_bytes(size: str | int, what: str = "the memory limit") -> int:
    """A number of bytes, at least 1: "2 GiB" (1024³ bytes each), "2GB" (1000³), "2G" (as GiB), or a plain number.

    Raises MonarchError for anything else; `what` is what the error calls it.
    """
    match = re.fullmatch(r"\s*([0-9]+)(\.[0-9]+)?\s*([A-Za-z]*)\s*", str(size), re.ASCII)
    if isinstance(size, bool) or not isinstance(size, str | int) or match is None or match[3].lower() not in UNITS:
        hint = 'write it as "2 GiB", "512 MiB", or a number of bytes.'
        raise MonarchError(f"{what} is {size!r}, not a number of bytes", hint=hint)
    unit = UNITS[match[3].lower()]
    count = int(match[1]) * unit + int(float(match[2] or 0) * unit)
    if count < 1:
        raise MonarchError(f"{what} is {size!r}, and has to be at least one byte")
    return count


def format_bytes(count: float) -> str:
    """`1.5 MiB`."""
    unit = 0
    while abs(count) >= 1024 and unit < 4:
        count, unit = count / 1024, unit + 1
    return f"{int(count)} B" if unit == 0 else f"{count:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"


def format_seconds(seconds: float) -> str:
    """`1.5 ms`."""
    for limit, unit, factor in ((1e-3, "µs", 1e6), (1.0, "ms", 1e3)):
        if seconds < limit:
            return f"{seconds * factor:.3g} {unit}" if seconds else "0 s"
    return f"{seconds:.3g} s"
