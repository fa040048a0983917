"""How much more the best whole program costs for each alternative of each variable: min-marginals.

Elimination (`solve`) passes tables up a tree: the bucket of a variable gives its table to the bucket of the variable of
its scope that leaves next. One pass back down gives each bucket the cost of everything outside it, and with that the
cost of the best whole assignment for each of its entries (bucket-tree elimination: Kask, Dechter, Larrosa and Dechter,
"Unifying tree decompositions for reasoning in graphical models", Artificial Intelligence 166, 2005). It costs as much
as the elimination itself.
"""

from __future__ import annotations

import numpy as np

from monarch.compiler.partition.solve import CostNetwork, Table

NOISE = 1e-9
"""Of the whole cost: the largest difference that rounding in the sums can make."""


def margins(network: CostNetwork, choice: list[int], sizes: list[int]) -> list[list[float]]:
    """For each variable and alternative, the least cost of an assignment with it, less that of `choice`.

    `network` is solved, with `keep`. Where elimination was not exact, this holds among the assignments in which the
    other fixed variables are as they are (and of a fixed variable, among those that differ from `choice` in it alone):
    the true number may be less.
    """
    order = {bucket.variable: at for at, bucket in enumerate(network.buckets)}
    beliefs: list[Table] = [np.zeros(0)] * len(network.buckets)
    scopes: list[tuple[int, ...]] = [()] * len(network.buckets)
    found = [[0.0] * size for size in sizes]
    for at in range(len(network.buckets) - 1, -1, -1):
        bucket = network.buckets[at]
        scope = tuple(v for v in bucket.scope if v not in network.fixed)
        own = bucket.total[tuple(choice[v] if v in network.fixed else slice(None) for v in bucket.scope)]
        if scope:
            parent = min(order[v] for v in scope)
            above = (*scopes[parent], network.buckets[parent].variable)
            own = own + _outside(beliefs[parent], above, own.min(axis=-1), scope)[..., None]
        beliefs[at], scopes[at] = own, scope
        best = own.min(axis=tuple(range(own.ndim - 1)))
        found[bucket.variable] = _differences(best, float(best.min()))
    for v in network.fixed:
        costs = np.asarray(network.around(choice, v))
        found[v] = _differences(costs, float(costs[choice[v]]))
    return found


def _outside(belief: Table, above: tuple[int, ...], message: Table, scope: tuple[int, ...]) -> Table:
    """The least cost outside a bucket, for each entry of its `scope`: `belief`, over the variables `above`, has the
    bucket's own `message` in it."""
    least = belief.min(axis=tuple(i for i, v in enumerate(above) if v not in scope))
    kept = [v for v in above if v in scope]
    least = least.transpose([kept.index(v) for v in scope])
    forbidden = np.isinf(message)  # the bucket itself forbids these: the cost outside does not matter
    return np.where(forbidden, 0.0, least - np.where(forbidden, 0.0, message))


def _differences(costs: Table, base: float) -> list[float]:
    extra = costs - base
    extra[np.abs(extra) <= NOISE * max(1.0, abs(base))] = 0.0
    return [round(float(each), 3) for each in extra]
