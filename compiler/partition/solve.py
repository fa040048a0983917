"""Choose one alternative for every variable so that the sum of costs between them is least.

Variable elimination (Bertele and Brioschi 1972; "bucket elimination", Dechter 1999): a variable leaves by minimising
over it a table of the variables that it shares costs with. Training graphs are ladders (the backward pass mirrors
the forward one), so with the variable of the smallest table first the tables stay small and the result is the exact
optimum. Where a table would grow past `limit` entries, one variable is fixed at its locally best alternative
instead: then, and only then, the result is a heuristic one (`exact` says which).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from monarch.compiler.alike import Memo

Table = npt.NDArray[np.float64]


@dataclass
class _Factor:
    scope: tuple[int, ...]  # ascending
    table: Table  # one axis a variable of the scope


@dataclass(frozen=True)
class Bucket:
    """A variable that left: the costs that it had with `scope`, the variables that it left a table to (last axis: its
    own)."""

    variable: int
    scope: tuple[int, ...]
    total: Table


@dataclass
class CostNetwork:
    """Variables with costs of their own and costs between pairs of them.

    `keep`     whether `solve` leaves its tables, in the order in which variables left, in `buckets`, and the variables
               that it fixed in `fixed`: what `margins` reads
    """

    limit: int = 300_000
    exact: bool = True
    keep: bool = False
    buckets: list[Bucket] = field(default_factory=list)
    fixed: set[int] = field(default_factory=set)
    _sizes: list[int] = field(default_factory=list)
    factors: list[_Factor] = field(default_factory=list)
    _own: Memo[Table] = field(default_factory=lambda: Memo(1 << 16))
    _made: Memo[tuple[Table, Table]] = field(default_factory=lambda: Memo(1 << 16))

    @property
    def variables(self) -> int:
        """How many there are."""
        return len(self._sizes)

    def variable(self, costs: list[float]) -> int:
        """A new variable with the given cost for each of its alternatives."""
        self._sizes.append(len(costs))
        number = len(self._sizes) - 1
        self.own(number, costs)
        return number

    def own(self, number: int, costs: list[float]) -> None:
        """Add costs[i] where a variable takes alternative i."""
        own = tuple(costs)
        table = self._own.get(own)
        if table is None:
            table = self._own.keep(own, np.asarray(costs, dtype=np.float64))
        self.factors.append(_Factor((number,), table))

    def pair(self, a: int, b: int, costs: Table) -> None:
        """Add costs[i, j] where variable `a` takes alternative i and `b` takes j. They may be one variable."""
        if a == b:
            self.factors.append(_Factor((a,), self._made_of(costs, "diagonal", np.diagonal)))
            return
        if a > b:
            a, b, costs = b, a, self._made_of(costs, "transposed", np.transpose)
        self.factors.append(_Factor((a, b), costs))

    def cost(self, choice: list[int]) -> float:
        """The cost of a choice."""
        return float(sum(factor.table[tuple([choice[v] for v in factor.scope])] for factor in self.factors))

    def solve(self) -> list[int]:
        """The alternative that each variable takes."""
        touching: list[list[_Factor]] = [[] for _ in self._sizes]
        for factor in map(self._without_fixed, self._once()):
            for v in factor.scope:
                touching[v].append(factor)
        alive = {v for v, size in enumerate(self._sizes) if size > 1}
        choice = [0] * len(self._sizes)
        undo: list[tuple[int, tuple[int, ...], npt.NDArray[np.intp]]] = []
        scopes: dict[int, tuple[int, ...]] = {}
        alike: Memo[tuple[list[_Factor], Table, npt.NDArray[np.intp], Table]] = Memo(1 << 16)
        """The messages of variables that touch the same tables, as those of equal layers do; and these tables."""

        def scope_of(v: int) -> tuple[int, ...]:
            if v not in scopes:
                scopes[v] = tuple(sorted({u for factor in touching[v] for u in factor.scope} - {v}))
            return scopes[v]

        def size_of(v: int) -> int:
            return self._sizes[v] * math.prod(self._sizes[u] for u in scope_of(v))

        def replace(old: list[_Factor], new: _Factor | None) -> None:
            for factor in old:
                for u in factor.scope:
                    touching[u] = [other for other in touching[u] if other is not factor]
                    scopes.pop(u, None)
            if new is not None:
                for u in new.scope:
                    touching[u].append(new)
                    scopes.pop(u, None)

        heap = [(size_of(v), v) for v in alive]
        heapq.heapify(heap)
        while alive:
            size, v = heapq.heappop(heap)
            if v not in alive:
                continue
            now = size_of(v)
            if now != size:
                heapq.heappush(heap, (now, v))
                continue
            if size > self.limit:
                self.exact = False
                heapq.heappush(heap, (size, v))  # another one is fixed, perhaps
                v = max(alive, key=lambda u: (len(scope_of(u)), -u))
                neighbours = scope_of(v)
                choice[v] = self._locally_best(v, touching[v])
                self.fixed.add(v)
                for factor in list(touching[v]):
                    rest = tuple(u for u in factor.scope if u != v)
                    table = np.take(factor.table, choice[v], axis=factor.scope.index(v))
                    replace([factor], _Factor(rest, table) if rest else None)
            else:
                neighbours = scope_of(v)
                factors, axes = touching[v], (*neighbours, v)
                key = tuple([(id(factor.table), *map(axes.index, factor.scope)) for factor in factors])
                if (found := alike.get(key)) is None:
                    total = self._sum(factors, axes)
                    found = alike.keep(key, (factors, total, total.argmin(axis=-1), total.min(axis=-1)))
                _, total, best, least = found
                if self.keep:
                    self.buckets.append(Bucket(v, neighbours, total))
                undo.append((v, neighbours, best))
                replace(factors, _Factor(neighbours, least) if neighbours else None)
            alive.discard(v)
            for u in neighbours:
                heapq.heappush(heap, (size_of(u), u))
        for v, scope, best in reversed(undo):
            choice[v] = int(best[tuple([choice[u] for u in scope])])
        return choice

    def around(self, choice: list[int], v: int) -> list[float]:
        """The cost of each alternative of `v` where every other variable has its value in `choice`."""
        costs = np.zeros(self._sizes[v])
        for factor in self.factors:
            if v in factor.scope:
                costs += factor.table[tuple(slice(None) if u == v else choice[u] for u in factor.scope)]
        return [float(cost) for cost in costs]

    def _once(self) -> list[_Factor]:
        """The factors, of which one stands for all that give the same variables the same table."""
        found: dict[tuple[tuple[int, ...], int], list[_Factor]] = {}
        for factor in self.factors:
            found.setdefault((factor.scope, id(factor.table)), []).append(factor)
        return [self._times(equal[0], len(equal)) for equal in found.values()]

    def _times(self, factor: _Factor, count: int) -> _Factor:
        if count == 1:
            return factor
        return _Factor(factor.scope, self._made_of(factor.table, ("times", count), lambda table: table * count))

    def _without_fixed(self, factor: _Factor) -> _Factor:
        """The factor over those of its variables that have a choice."""
        free = tuple([v for v in factor.scope if self._sizes[v] > 1])
        if len(free) == len(factor.scope):
            return factor
        sizes = tuple([self._sizes[v] for v in free])
        return _Factor(free, self._made_of(factor.table, sizes, lambda table: table.reshape(sizes)))

    def _made_of(self, table: Table, how: object, make: Callable[[Table], Table]) -> Table:
        """A table that is made of another: one for all that are made of it so, as equal layers share tables."""
        key = id(table), how
        return (self._made.get(key) or self._made.keep(key, (table, make(table))))[1]

    def _sum(self, factors: list[_Factor], axes: tuple[int, ...]) -> Table:
        total = np.zeros([self._sizes[v] for v in axes])
        for factor in factors:
            order = sorted(factor.scope, key=axes.index)
            table = factor.table.transpose([factor.scope.index(v) for v in order])
            total = total + table.reshape([self._sizes[v] if v in order else 1 for v in axes])
        return total

    def _locally_best(self, v: int, factors: list[_Factor]) -> int:
        costs = np.zeros(self._sizes[v])
        for factor in factors:
            axis = factor.scope.index(v)
            costs += factor.table.min(axis=tuple(a for a in range(factor.table.ndim) if a != axis))
        return int(costs.argmin())
