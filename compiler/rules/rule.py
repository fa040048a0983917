"""What a sharding rule says about one call of an op, and the placements that follow from it.

A rule names the *factors* that the op's iteration space is made of, and says which of them compose each dim of each
operand and result. `aten.mm` is `m k, k n -> m n`; viewing [B, T, D] as [B*T, D] is `b t d -> (b t) d`. Cutting the
iteration space into k equal blocks along one factor cuts every operand and result that has the factor, and leaves those
that lack it whole: an operand is then needed whole by every worker, and a result comes out as one summand a worker.
This is the idea of einsum, of einops' axes (Rogozhnikov, ICLR 2022), and of Shardy's op sharding rules.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from monarch.compiler.symbols import is_multiple
from monarch.compiler.types import Placement

Dim = tuple[str, ...]
"""The factors that compose one tensor dim, major first; () where the dim has size 1 or must stay whole."""
Dims = tuple[Dim, ...]

PARTIAL = "partial"
"""`Strategy.factor` of the strategies that pass a pending sum through."""


@dataclass(frozen=True)
class Strategy:
    """One way to place a call on one mesh dim: a placement for each tensor operand and each tensor result.

    `factor` is the factor that is sharded, "" where everything is replicated, "partial" where a pending sum passes on.
    """

    operands: tuple[Placement, ...]
    results: tuple[Placement, ...]
    factor: str


@dataclass(frozen=True)
class Rule:
    """The sharding rule of one call. Prints as `m k, k n -> m n`.

    `operands`    per tensor operand, per dim, the factors composing it
    `results`     per tensor result likewise; None for an output that the call does not make
    `sizes`       the size of each factor
    `whole`       factors that must not be sharded
    `reductions`  what sharding a factor makes of the results that lack it: partial "sum", "max", "min" or "prod". A
                  factor that some result lacks and that is not here is never sharded.
    `linear`      sets of operand indices: where exactly these operands are partial<sum> and the others are
                  replicated, every result is partial<sum>
    `addends`     operands that are added to a reduction (the bias of `addmm`): sharding a factor that such an operand
                  and a result lack takes the operand as partial<sum>, or it would be added once a worker
    `kept`        (factor, result) pairs: the result lacks the factor and does not depend on it, so that it is the same
                  on every worker where the factor is sharded
    `reason`      why every worker computes the whole call, where that is for want of a rule; else ""
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims | None, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    reductions: Mapping[str, str] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    addends: frozenset[int] = frozenset()
    kept: frozenset[tuple[str, int]] = frozenset()
    reason: str = ""

    def strategies(self, k: int) -> list[Strategy]:
        """All ways to place this call on a mesh dim of size `k`: replicated, a factor sharded, pending sums passed on.

        A factor can be sharded where `k` divides its size and it leads every dim that it is in: of `(b t)` only `b`
        cuts into contiguous blocks.
        """
        cache: dict[int, list[Strategy]] = self.__dict__.setdefault("_strategies", {})
        if k not in cache:
            cache[k] = self._strategies_of(k)
        return cache[k]

    def _strategies_of(self, k: int) -> list[Strategy]:
        found = [Strategy((None,) * len(self.operands), (None,) * len(self.results), "")]
        for factor, size in self.sizes.items():
            if size > 1 and factor not in self.whole and is_multiple(size, k):
                strategy = self._shard(factor)
                if strategy is not None:
                    found.append(strategy)
        for together in self.linear:
            operands = tuple("sum" if index in together else None for index in range(len(self.operands)))
            results = tuple(None if result is None else "sum" for result in self.results)
            found.append(Strategy(operands, results, PARTIAL))
        return found

    def _shard(self, factor: str) -> Strategy | None:
        """The placements where `factor` is sharded, or None where it cannot be."""
        operands: list[Placement] = []
        results: list[Placement] = []
        for dims in self.operands:
            at = self._position(factor, dims)
            if at is False:
                return None
            operands.append(at)
        partial = False
        for index, result in enumerate(self.results):
            at = None if result is None else self._position(factor, result)
            if at is False:
                return None
            if at is None and result is not None and (factor, index) not in self.kept:
                if factor not in self.reductions:
                    return None
                results.append(self.reductions[factor])
                partial = True
            else:
                results.append(at)
        if partial and self.addends:
            if self.reductions[factor] != "sum":
                return None
            for index in self.addends:
                if operands[index] is None:
                    operands[index] = "sum"
        return Strategy(tuple(operands), tuple(results), factor)

    def leads(self, factor: str) -> bool:
        """Whether the factor leads every dim that it is in, and is in no two dims of one tensor: then its padding is at
        the end of these dims."""
        tensors = (*self.operands, *self.results)
        return all(dims is None or self._position(factor, dims) is not False for dims in tensors)

    def leader(self, dim: Dim) -> str:
        """The factor that is outermost in a dim, "" where the dim has none."""
        return next((name for name in dim if self.sizes[name] != 1), dim[0] if dim else "")

    def inner(self, dim: Dim) -> int:
        """How many elements of a dim belong to one of its leader."""
        return math.prod(self.sizes[name] for name in dim if name != self.leader(dim))

    def resized(self, dims: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of a tensor with these dims where the factors that lead them have other sizes."""
        return tuple(
            sizes[leader] * self.inner(dim) if (leader := self.leader(dim)) in sizes else size
            for dim, size in zip(dims, shape, strict=True)
        )

    def _position(self, factor: str, dims: Dims) -> int | None | bool:
        """The dim that `factor` leads; None where the tensor lacks it; False where it cannot be cut along it."""
        at: int | None = None
        for index, dim in enumerate(dims):
            if factor in dim:
                leader = next((name for name in dim if self.sizes[name] != 1), factor)
                if at is not None or leader != factor:
                    return False
                at = index
        return at

    def __str__(self) -> str:
        operands = ", ".join(_tensor_text(dims) for dims in self.operands)
        results = ", ".join("-" if dims is None else _tensor_text(dims) for dims in self.results)
        text = f"{operands} -> {results}".strip()
        present = {name for dims in (*self.operands, *self.results) if dims for dim in dims for name in dim}
        whole = [name for name in self.sizes if name in self.whole and name in present]
        return f"{text}; whole {' '.join(whole)}" if whole else text


def _tensor_text(dims: Dims) -> str:
    if not dims:
        return "[]"
    return " ".join("_" if not dim else dim[0] if len(dim) == 1 else f"({' '.join(dim)})" for dim in dims)
