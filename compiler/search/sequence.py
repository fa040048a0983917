"""The search: one mesh dim after the other, then all together.

A *sequence* solves one program a mesh dim, and later dims see what earlier ones chose. Each dim alone likes to shard
the batch, which costs least while nothing else does, and the last ones are left with what the batch no longer divides
into. So further sequences begin with one mesh dim that must not shard inputs. The *joint* program then lets each kind
choose among all that it did in any of these, on all dims at once: it costs no more than any of them. At last each dim
is solved once more around the others.

Where there are few choices in all, the joint program has every one, and its answer is the best there is.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from monarch.compiler.rules import Strategy
from monarch.compiler.search.problem import Choice, Problem
from monarch.compiler.search.solve import solve

FEW = 300
"""Choices of all kinds together that the joint program takes without a sequence."""

MANY = 100
ROUNDS = 1
PATIENCE = 1.0
"""Seconds of processor time for one program of MANY kinds; fewer have four times as many."""


@dataclass
class Search:
    """A search in progress: `limit` is what a worker may hold, in bytes, and `seconds` of processor time are left.

    `exact` says whether each program was solved to its end, `spent` how much of that time it took."""

    problem: Problem
    limit: float | None
    seconds: float
    exact: bool = True
    spent: float = 0.0
    found: list[Mapping[int, Choice]] = field(default_factory=list)

    def run(self) -> Mapping[int, Choice] | None:
        """The cheapest that was found; None where nothing fits."""
        problem = self.problem
        every = {
            kind.number: problem.choices(kind.number, [problem.strategies(kind.number, at) for at in self.dims])
            for kind in problem.kinds
        }
        if sum(map(len, every.values())) <= FEW or len(self.dims) == 1:
            return self.solved(every)
        self.keep(self.sequence(self.dims))
        for apart in self.dims:
            self.keep(self.sequence([apart, *(at for at in self.dims if at != apart)], apart))
        best = self.joint()
        for _ in range(ROUNDS if best is not None else 0):
            before = problem.cost(best)  # type: ignore[arg-type]
            for at in self.dims:
                self.keep(self.around(best, at))  # type: ignore[arg-type]
            best = self.joint()
            if best is None or problem.cost(best) >= before * (1 - 1e-6):
                break
        return best

    @property
    def dims(self) -> range:
        return range(len(self.problem.mesh_dims))

    def keep(self, chosen: Mapping[int, Choice] | None) -> None:
        if chosen is not None:
            self.found.append(chosen)

    def solved(
        self, options: Mapping[int, Sequence[Choice]], times: int = 1, start: Mapping[int, Choice] | None = None
    ) -> Mapping[int, Choice] | None:
        limit = None if self.limit is None else self.limit * times
        before = time.process_time()
        patience = PATIENCE if len(self.problem.kinds) > MANY else 4 * PATIENCE
        solution = solve(self.problem, options, limit, min(patience, max(0.0, self.seconds)), start)
        took = time.process_time() - before
        self.seconds, self.spent = self.seconds - took, self.spent + took
        if solution is None:
            return None
        self.exact &= solution.exact
        return solution.chosen

    def sequence(self, order: Sequence[int], apart: int = -1) -> Mapping[int, Choice] | None:
        """One mesh dim after the other; along those to come all is replicated as yet, and each of them may divide by
        its size what a worker holds."""
        problem = self.problem
        chosen: Mapping[int, Choice] = {
            kind.number: tuple(problem.strategies(kind.number, at)[0] for at in self.dims) for kind in problem.kinds
        }
        for number, at in enumerate(order):
            options = self.options_around(chosen, at, without_inputs=at == apart)
            found = self.solved(options, math.prod(self.problem.sizes[later] for later in order[number + 1 :]), chosen)
            if found is None:
                return None
            chosen = found
        return chosen

    def around(self, chosen: Mapping[int, Choice], at: int) -> Mapping[int, Choice] | None:
        """The best on one mesh dim where the others are as `chosen` says."""
        return self.solved(self.options_around(chosen, at), start=chosen)

    def options_around(
        self, chosen: Mapping[int, Choice], at: int, without_inputs: bool = False
    ) -> dict[int, list[Choice]]:
        problem, found = self.problem, dict[int, list[Choice]]()
        for kind in problem.kinds:
            strategies: Sequence[Strategy] = problem.strategies(kind.number, at)
            if without_inputs and kind.node.op == "placeholder" and kind.node.meta["kind"] == "input":
                strategies = strategies[:1]
            options = [[each] for each in chosen[kind.number]]
            options[at] = list(strategies)
            found[kind.number] = problem.choices(kind.number, options)
        return found

    def joint(self) -> Mapping[int, Choice] | None:
        if not self.found:
            return None
        options = {
            kind.number: list(dict.fromkeys(chosen[kind.number] for chosen in self.found))
            for kind in self.problem.kinds
        }
        start = min(self.found, key=self.problem.cost)
        best = self.solved(options, start=start) or start
        self.keep(best)
        return best
