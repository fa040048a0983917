"""Equal microbatches of a pipeline's step get equal layouts.

Those between the first and the last do the same to other rows: the choice for one of them is that for all. So the
search for layouts weighs three microbatches however many there are. The first and the last may differ: the first has no
gradients to add to, and the last makes those that the optimizer takes.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from monarch.compiler.graph import provenance


def alike(calls: Iterable[fx.Node]) -> dict[fx.Node, fx.Node]:
    """The calls of the microbatches between the first and the last, each with the one of the first such microbatch that
    does the same in the same order: where a batch does not divide, microbatches of two sizes are alike among each
    other."""
    of: dict[int, list[fx.Node]] = {}
    for node in calls:
        if (microbatch := provenance(node).microbatch) is not None:
            of.setdefault(microbatch, []).append(node)
    firsts: dict[object, list[fx.Node]] = {}
    found: dict[fx.Node, fx.Node] = {}
    for number in sorted(of)[1:-1]:
        first = firsts.setdefault(tuple([(node.target, node.meta["type"]) for node in of[number]]), of[number])
        found.update(zip(of[number], first, strict=True))
    return found
