"""The cheapest layouts of a program: found by the search, and compared with the usual ones by compiling both.

What is searched for costs what `Problem` says. What is chosen costs what the compiler's own estimate says
(`inspect.estimate`), and holds what the plan holds: the best of the search's answers, of the program as it is written,
and of the presets, so that it is never worse than any of these. Where an answer does not fit the memory, it is compiled
once more with values computed again rather than kept, and searched for once more with less memory; the cheaper one
counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from monarch.compiler.cost.cluster import Cluster
from monarch.compiler.errors import LayoutError, MonarchError
from monarch.compiler.graph import Graph
from monarch.compiler.inspect.estimate import Estimate, estimate
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.search.layouts import FoundLayouts, layouts_of
from monarch.compiler.search.prepare import prepare
from monarch.compiler.search.presets import usual
from monarch.compiler.search.problem import Choice, Problem
from monarch.compiler.search.sequence import Search
from monarch.compiler.search.why import reasons
from monarch.compiler.sizes import format_bytes
from monarch.compiler.states import StateKey
from monarch.compiler.types import Layout

FOUND, WRITTEN = "layouts found", "layouts as written"

SECONDS = 20.0
"""How long the solver may take, in processor time."""

LARGE = 1000
"""Ops of a program that takes seconds to compile: of such each answer is compiled once, with layouts between layers,
and usual layouts that do not fit are compiled with values computed again only where they would be the cheapest."""


@dataclass(frozen=True)
class Candidate:
    """Layouts of a program, and the estimate for them; `estimate` is None where they cannot be compiled, and `error`
    says why. `recomputed` is how many ops are computed again to fit."""

    name: str
    layouts: FoundLayouts
    estimate: Estimate | None
    error: str = ""
    recomputed: int = 0


@dataclass(frozen=True)
class Answer:
    """What was found for one program, cluster and limit.

    `chosen`      the cheapest candidate that fits
    `candidates`  all that were compiled: the program's own layouts, presets by their names, and what was found
    `options`     with which the chosen one is to be compiled
    `limit`       the bytes that a worker may hold; None where nobody has said
    `seconds`     how long it took, with compiling
    `solving`     how much of that was the solver's, in processor time
    `exact`       whether the solver came to its end everywhere: if not, what it had when its time was up is taken
    `why`         in words, a line for each kind of layer
    """

    chosen: Candidate
    candidates: tuple[Candidate, ...]
    options: CompileOptions
    limit: int | None
    seconds: float
    solving: float
    exact: bool
    why: tuple[str, ...]

    @property
    def findings(self) -> tuple[str, ...]:
        """`why`, and what is computed again for the limit."""
        again = self.chosen.recomputed
        return (*self.why, *([f"{again} op{'s' * (again > 1)} computed again rather than kept"] if again else []))

    @property
    def data(self) -> dict[str, Any]:
        """What was found, as a JSON value: layouts by name, position and value, and what each candidate comes to."""
        laid = self.chosen.layouts
        return {
            "chosen": self.chosen.name,
            "parameters": {label: str(each) for label, each in laid.states.items() if not StateKey.of(label).role},
            "inputs": {str(position): str(layout) for position, layout in laid.inputs.items()},
            "values": {name: str(layout) for name, layout in laid.values.items()},
            "candidates": [
                {
                    "name": each.name,
                    "seconds": None if each.estimate is None else each.estimate.seconds,
                    "peak_bytes": None if each.estimate is None else each.estimate.peak,
                    "error": each.error,
                }
                for each in self.candidates
            ],
            "limit": self.limit,
            "recomputed": self.chosen.recomputed,
            "why": list(self.why),
            "seconds": self.seconds,
            "solving": self.solving,
            "exact": self.exact,
        }


def find_layouts(
    graph: Graph,
    cluster: Cluster,
    options: CompileOptions | None = None,
    *,
    bound: frozenset[str | int] = frozenset(),
    presets: Mapping[str, FoundLayouts] | None = None,
    seconds: float = SECONDS,
) -> Answer:
    """The cheapest layouts for a traced graph on a cluster, where a worker has at most the bytes of the options'
    memory limit, or the cluster's memory.

    Parameters and what optimizers keep for them are laid out anew, whatever layouts they have, and so are inputs that
    are not sharded; what is sharded otherwise, `layout()`s and the `bound` (states' labels, inputs' positions) stay.
    Raises LayoutError where nothing fits, and MonarchError for a graph whose layouts cannot be searched.
    """
    start = time.monotonic()
    options, cluster = options or CompileOptions(), cluster.shared(graph.mesh.workers)
    limit = options.memory_limit or cluster.memory
    options = replace(options, memory_limit=None)
    compiler = _Compiler(graph, cluster, options, limit)
    free = _freed(graph, bound)
    problem = Problem(prepare(free), cluster, bound)
    few = sum(1 for _ in graph.calls) < LARGE
    people = {WRITTEN: FoundLayouts(), **usual(problem), **(presets or {})}
    candidates = [compiler.candidate(name, layouts, limited=few) for name, layouts in people.items()]
    searches: list[Search] = []

    def searched(most: float | None, seconds: float) -> Mapping[int, Choice] | None:
        searches.append(Search(problem, most, seconds))
        return searches[-1].run()

    chosen = searched(limit, seconds)
    answers: list[tuple[Candidate, Mapping[int, Choice]]] = []
    for _ in range(2):
        if chosen is None:
            chosen = searched(None, seconds / 2)
        if chosen is None:
            break
        found = [compiler.candidate(FOUND, layouts_of(problem, chosen, graph, values=True))]
        if few:
            found.append(compiler.candidate(FOUND, layouts_of(problem, chosen, graph, values=False)))
        best = min(found, key=compiler.order)
        answers.append((best, chosen))
        if limit is None or best.estimate is None or (compiler.fits(best) and not best.recomputed):
            break
        held = best.estimate.peak if not best.recomputed else compiler.peaks[best.layouts.key]
        chosen = searched(0.95 * limit * min(1.0, problem.memory(chosen) / held), seconds / 2)
        if chosen is None:
            break
    if answers:
        best, choice = min(answers, key=lambda answer: compiler.order(answer[0]))
        candidates.append(best)
    for number, each in enumerate(candidates):
        if not compiler.fits(each) and compiler.is_cheaper(each, candidates):
            candidates[number] = compiler.candidate(each.name, each.layouts)
    taken = min(candidates, key=compiler.order)
    if taken.estimate is None:
        raise LayoutError(f"no layouts of '{graph.name}' can be compiled: {taken.error}")
    if not compiler.fits(taken):
        raise _too_small(graph, candidates, limit or 0)
    why = [*reasons(problem, choice if taken.name == FOUND else None, taken.layouts)]
    if taken.name != FOUND:
        why.append(f"nothing was found that costs less: {taken.name}")
    options = replace(options, target=cluster.target, memory_limit=limit if taken.recomputed else None)
    return Answer(
        chosen=taken,
        candidates=tuple(candidates),
        options=options,
        limit=limit,
        seconds=time.monotonic() - start,
        solving=sum(each.spent for each in searches),
        exact=all(each.exact for each in searches),
        why=tuple(why),
    )


class _Compiler:
    """Candidates of one program. `peaks` holds what those that do not fit hold if nothing is computed again."""

    def __init__(self, graph: Graph, cluster: Cluster, options: CompileOptions, limit: int | None) -> None:
        self.graph, self.cluster, self.options, self.limit = graph, cluster, options, limit
        self.peaks: dict[object, int] = {}
        self._known: dict[object, Candidate] = {}

    def candidate(self, name: str, layouts: FoundLayouts, limited: bool = True) -> Candidate:
        """What layouts come to; with `limited` so that they fit, if they can."""
        known = self._known.get(layouts.key)
        if known is None:
            known = self._known[layouts.key] = self._compiled(layouts)
        if limited and known.estimate is not None and not self.fits(known) and layouts.key not in self.peaks:
            known = self._known[layouts.key] = self._limited(known, known.estimate.peak)
        return replace(known, name=name)

    def is_cheaper(self, candidate: Candidate, others: Sequence[Candidate]) -> bool:
        """Whether a candidate takes less time than all others that fit: to compute values again takes more."""
        found = candidate.estimate
        fitting = [each.estimate.seconds for each in others if each.estimate is not None and self.fits(each)]
        return found is not None and found.seconds < min(fitting, default=math.inf)

    def _compiled(self, layouts: FoundLayouts) -> Candidate:
        try:
            return Candidate("", layouts, self._estimate(layouts.on(self.graph), self.options)[0])
        except MonarchError as error:
            return Candidate("", layouts, None, error.message)

    def _limited(self, candidate: Candidate, peak: int) -> Candidate:
        """With values computed again, where the limit can be kept so."""
        self.peaks[candidate.layouts.key] = peak
        options = replace(self.options, memory_limit=self.limit)
        try:
            less, calls = self._estimate(candidate.layouts.on(self.graph), options)
        except MonarchError:
            return candidate
        return replace(candidate, estimate=less, recomputed=calls)

    def _estimate(self, graph: Graph, options: CompileOptions) -> tuple[Estimate, int]:
        target = replace(options, target=self.cluster.target)
        plan = compile_graph(graph, target, report=True, cluster=self.cluster, binaries=False)
        return estimate(plan, self.cluster), plan.costs.get("recomputed", {}).get("calls", 0)

    def fits(self, candidate: Candidate) -> bool:
        found = candidate.estimate
        return found is not None and (self.limit is None or found.peak <= self.limit)

    def order(self, candidate: Candidate) -> tuple[bool, bool, float]:
        """Those that fit first, the cheapest first; of those that do not, the smallest."""
        found = candidate.estimate
        if found is None:
            return True, True, 0.0
        fits = self.fits(candidate)
        return False, not fits, found.seconds if fits else float(found.peak)


def _freed(graph: Graph, bound: frozenset[str | int]) -> Graph:
    """The graph with parameters replicated, but for the bound ones: the search takes what is replicated as free."""
    graph = graph.copy()
    for node in graph.placeholders:
        if node.meta["kind"] == "state" and node.meta["label"] not in bound:
            type_ = node.meta["type"]
            node.meta["type"] = type_.with_layout(Layout.replicated(type_.ndim))
    return graph


def _too_small(graph: Graph, candidates: list[Candidate], limit: int) -> LayoutError:
    held, name = min((each.estimate.peak, each.name) for each in candidates if each.estimate is not None)
    return LayoutError(
        f"no layouts of '{graph.name}' that were found fit {format_bytes(limit)} a worker",
        hint=f"with the smallest ({name}) a worker holds {format_bytes(held)}: {format_bytes(held - limit)} are "
        "missing, also with values recomputed rather than kept.\n"
        f"A limit of {format_bytes(held)} would do; more workers, or a smaller batch, hold less each.",
    )
