"""Why each layer has its layouts, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from monarch.compiler.search.layouts import FoundLayouts
from monarch.compiler.search.problem import FORWARD, Choice, Kind, Problem
from monarch.compiler.sizes import format_bytes
from monarch.compiler.states import StateKey
from monarch.compiler.types import is_partial

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def reasons(problem: Problem, chosen: Mapping[int, Choice] | None, layouts: FoundLayouts) -> Iterator[str]:
    """A line for each input, for each kind of parameter, and for each layout of values between layers; without `chosen`
    the layouts alone."""
    for position, layout in layouts.inputs.items():
        yield f"input {position} {layout}"
    for kind in problem.kinds:
        if not kind.is_state or kind.fixed is not None or StateKey.of(str(kind.node.meta["label"])).role:
            continue
        label = str(kind.node.meta["label"])
        if label not in layouts.states:
            continue
        name = _NUMBER.sub("*", label) if len(kind.nodes) > 1 else label
        times = f" ({len(kind.nodes)})" if len(kind.nodes) > 1 else ""
        why = [] if chosen is None else _why(problem, chosen, kind)
        yield f"{name}{times} {layouts.states[label]}" + (f": {'; '.join(why)}" if why else "")
    between: dict[tuple[str, str], int] = {}
    types = {node.name: str(node.meta["type"]) for kind in problem.kinds for node in kind.nodes}
    for name, laid in layouts.values.items():
        between[types[name], str(laid)] = between.get((types[name], str(laid)), 0) + 1
    for (type_, text), count in between.items():
        yield f"{count} value{'s' * (count > 1)} {type_} between layers: {text}"


def _why(problem: Problem, chosen: Mapping[int, Choice], kind: Kind) -> list[str]:
    """What each mesh dim does with a parameter where it is first computed with."""
    used = _first_use(problem, kind)
    if used is None:
        return []
    reader, position = used
    said: dict[str, list[str]] = {}
    own, choice = problem.place(chosen[kind.number], 0), chosen[reader.number]
    for at, name in enumerate(problem.mesh_dims):
        strategy = choice[at]
        taken, given = strategy.operands[position], strategy.results[0]
        if own[at] is not None and taken is None:
            saved = problem.nbytes(kind.number, 0) * (1 - 1 / problem.sizes[at])
            text = f"stored in shards over %, which saves up to {format_bytes(saved)} of each, and gathered for its use"
            said.setdefault(text, []).append(name)
        elif isinstance(taken, int) and is_partial(given):
            said.setdefault("each worker along % computes a summand of the results", []).append(name)
        elif isinstance(taken, int):
            said.setdefault("each worker along % computes a block of the results", []).append(name)
        elif strategy.factor:
            said.setdefault("replicated along %, which shards its input: its gradient is summed", []).append(name)
    return [text.replace("%", " and ".join(names)) for text, names in said.items()]


def _first_use(problem: Problem, kind: Kind) -> tuple[Kind, int] | None:
    """The kind of the forward pass that computes with a parameter, and as which operand, behind what only shows it."""
    shown = {kind.number}
    for reader in problem.kinds:
        for read in reader.reads:
            if read.source in shown and read.position is not None and reader.phase == FORWARD:
                if not reader.is_weight:
                    return reader, read.position
                shown.add(reader.number)
    return None
