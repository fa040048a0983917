"""The shape of the trees along which hosts get messages, the control plane's and the actors': a host that has several
below it splits them evenly among a bounded number of them, and each of these is the first of its part and has the rest
below it."""

from __future__ import annotations


def split(count: int, most: int) -> list[tuple[int, int]]:
    """`count` numbers as at most `most` ranges of sizes that differ by at most one."""
    parts = min(count, most)
    return [(part * count // parts, (part + 1) * count // parts) for part in range(parts)]
