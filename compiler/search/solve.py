"""One integer program: for each kind one of its choices, so that a step costs the least and a worker holds no more than
it may.

    minimise    Σ x[kind, choice] · computing  +  Σ e[value, source, target] · moving
    subject to  Σ x[kind, ·] = 1
                Σ e[value, ·, target]  ≥  Σ x[reader, the choices that want the value at target]     for each reader
                e[value, source, ·]    ≤  Σ x[maker, the choices that leave it at source]
                state + kept ≤ limit,  state + gradients ≤ limit

x is 0 or 1, and e with it. That each delivery names both of its ends keeps the relaxation tight, as in facility
location (Balinski, "Integer programming: methods, uses, computations", 1965), so that branching is rare. HiGHS solves
it (Huangfu and Hall, "Parallelizing the dual revised simplex method", 2018).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from monarch.compiler.search.problem import Choice, Place, Problem

SCALE = 1e6
"""Costs are in microseconds and bytes in MB, for a solver's tolerances are absolute."""


GAP = 1e-4
"""An answer is the best there is where none can cost less by more than this part of it."""


@dataclass(frozen=True)
class Solution:
    """What each kind does. `exact` where nothing costs less, and False where time was up."""

    chosen: Mapping[int, Choice]
    exact: bool


@dataclass
class _Program:
    """A program under construction: columns and sparse rows."""

    cost: list[float] = field(default_factory=list)
    integer: list[bool] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def column(self, cost: float, integer: bool = False) -> int:
        self.cost.append(cost)
        self.integer.append(integer)
        return len(self.cost) - 1

    def row(self, entries: Mapping[int, float], lower: float, upper: float) -> None:
        self.columns += entries.keys()
        self.values += entries.values()
        self.starts.append(len(self.columns))
        self.lower.append(lower)
        self.upper.append(upper)


def solve(
    problem: Problem,
    options: Mapping[int, Sequence[Choice]],
    limit: float | None,
    seconds: float,
    start: Mapping[int, Choice] | None = None,
) -> Solution | None:
    """The cheapest of these choices of each kind (those of a kind with another leader are the leader's). None where
    nothing fits `limit`, or nothing that does was found in `seconds` of processor time. `start` is an answer to improve
    on."""
    program = _Program()
    x: dict[int, list[int]] = {}
    for number, choices in options.items():
        if problem.kinds[number].leader == number:
            x[number] = [program.column(problem.computing(number, choice) * SCALE, True) for choice in choices]
            program.row(dict.fromkeys(x[number], 1.0), 1.0, 1.0)
    for kind in problem.kinds:
        x[kind.number] = x[kind.leader]

    def wanting(reader: tuple[int, int | None]) -> dict[Place, list[int]]:
        found: dict[Place, list[int]] = {}
        number, _ = reader
        for column, choice in zip(x[number], options[problem.kinds[number].leader], strict=True):
            found.setdefault(problem.wanted(reader, choice), []).append(column)
        return found

    for each in problem.deliveries:
        sources: dict[Place, list[int]] = {}
        for column, choice in zip(x[each.source], options[problem.kinds[each.source].leader], strict=True):
            sources.setdefault(problem.place(choice, each.result), []).append(column)
        wants = [wanting(reader) for reader in each.readers]
        targets = list(dict.fromkeys(place for want in wants for place in want))
        if len(sources) == 1 and targets == list(sources):
            continue
        given: dict[Place, list[int]] = {source: [] for source in sources}
        for target in targets:
            brought = []
            for source in sources:
                cost = problem.delivering(each, source, target)
                if cost < math.inf:
                    e = program.column(cost * SCALE)
                    brought.append(e)
                    given[source].append(e)
            for want in {tuple(want[target]) for want in wants if target in want}:
                program.row(dict.fromkeys(brought, 1.0) | _less(want), 0.0, math.inf)
        for source, columns in sources.items():
            for e in given[source]:
                program.row({e: 1.0} | _less(columns), -math.inf, 0.0)
    if limit is not None:
        _limit(problem, program, options, x, wanting, limit)
    known = (
        {
            column: float(choice == start[number])
            for number, columns in x.items()
            for column, choice in zip(columns, options[problem.kinds[number].leader], strict=True)
        }
        if start is not None
        else {}
    )
    values, exact = _run(program, known, seconds)
    if values is None:
        return None
    picked: dict[int, Choice] = {}
    for number, columns in x.items():
        if problem.kinds[number].leader == number:
            taken = max(range(len(columns)), key=[values[column] for column in columns].__getitem__)
            picked[number] = options[number][taken]
    return Solution({kind.number: picked[kind.leader] for kind in problem.kinds}, exact)


def _less(columns: Sequence[int]) -> dict[int, float]:
    return dict.fromkeys(columns, -1.0)


def _limit(
    problem: Problem,
    program: _Program,
    options: Mapping[int, Sequence[Choice]],
    x: Mapping[int, list[int]],
    wanting: Any,
    limit: float,
) -> None:
    """The rows for memory, in MB."""
    state: dict[int, float] = {}
    gradients: dict[int, float] = {}
    for kind in problem.kinds:
        for column, choice in zip(x[kind.number], options[kind.leader], strict=True):
            held, more = problem.state_bytes(kind.number, choice), problem.gradient_bytes(kind.number, choice)
            if held:
                state[column] = state.get(column, 0.0) + held / SCALE
            if more:
                gradients[column] = gradients.get(column, 0.0) + more / SCALE
    kept: dict[int, float] = {}
    for deliveries in problem.kept.values():
        held_as: dict[tuple[int, float], int] = {}
        for each in deliveries:
            for reader in each.readers:
                for place, columns in wanting(reader).items():
                    parts = problem.parts(place)
                    nbytes = len(each.sources) * problem.nbytes(each.source, each.result) / parts
                    k = held_as.setdefault((parts, nbytes), -1)
                    if k < 0:
                        k = held_as[parts, nbytes] = program.column(0.0)
                        kept[k] = nbytes / SCALE
                    program.row({k: 1.0} | _less(columns), 0.0, math.inf)
    program.row(state | kept, -math.inf, limit / SCALE)
    program.row(
        {c: state.get(c, 0.0) + gradients.get(c, 0.0) for c in state.keys() | gradients.keys()},
        -math.inf,
        limit / SCALE,
    )


def _run(program: _Program, known: Mapping[int, float], seconds: float) -> tuple[Sequence[float] | None, bool]:
    """The columns' values, None where there are none, and whether the solver came to its end. Time is the processor's,
    so that an answer does not depend on what else the machine does."""
    import highspy
    import numpy as np

    class Quiet(highspy.Highs):
        def enableCallbacks(self) -> None:  # the first thing that it does, which would print its version
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()

    highs = Quiet()
    for option, value in (("output_flag", False), ("threads", 1), ("mip_rel_gap", GAP)):
        highs.setOptionValue(option, value)
    columns, lp = len(program.cost), highspy.HighsLp()
    lp.num_col_, lp.num_row_ = columns, len(program.lower)
    lp.col_cost_ = np.array(program.cost)
    lp.col_lower_, lp.col_upper_ = np.zeros(columns), np.ones(columns)
    lp.row_lower_, lp.row_upper_ = np.array(program.lower), np.array(program.upper)
    lp.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    lp.a_matrix_.start_ = np.array(program.starts)
    lp.a_matrix_.index_ = np.array(program.columns)
    lp.a_matrix_.value_ = np.array(program.values)
    kinds = {True: highspy.HighsVarType.kInteger, False: highspy.HighsVarType.kContinuous}
    lp.integrality_ = [kinds[integer] for integer in program.integer]
    highs.passModel(lp)
    if known:
        highs.setSolution(len(known), np.array([*known], dtype=np.int32), np.array([*known.values()]))
    end = time.process_time() + seconds

    def stop(event: Any) -> None:
        if time.process_time() > end:
            event.interrupt()

    highs.cbMipInterrupt.subscribe(stop)
    highs.cbSimplexInterrupt.subscribe(stop)
    highs.run()
    status = highs.getModelStatus()
    if highs.getInfo().primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
        return None, status == highspy.HighsModelStatus.kInfeasible
    return highs.getSolution().col_value, status == highspy.HighsModelStatus.kOptimal
