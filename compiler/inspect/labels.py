"""The names of a plan's inputs and instructions: from its report, else from its graph's text, else from their op."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from monarch.compiler.ops import OPS
from monarch.compiler.plan.plan import Plan

_INPUT = re.compile(r"\s*%\S+ = (input|state|constant|scalar|seed) ")
_CALL = re.compile(r"\s*%(\S+) = (.*)")


@dataclass(frozen=True)
class Label:
    """An instruction, for people. `line` is the user's, "train.py:12". Known from a report only are `module`, `sent`
    (bytes that a worker puts into a collective), `moved` (bytes that it reads and writes) and `estimate` (seconds; -1
    where there is none)."""

    name: str
    op: str
    type: str = ""
    line: str = ""
    module: str = ""
    sent: int = 0
    moved: int = 0
    estimate: float = -1.0
    is_collective: bool = False


def labels(plan: Plan) -> list[Label]:
    """One for each instruction, and one for a commit behind the last."""
    named = _from_report(plan) or _from_text(plan)
    found = []
    for number, instruction in enumerate(plan.instructions):
        line = ""
        if 0 <= instruction.source < len(plan.sources):
            source = plan.sources[instruction.source]
            line = f"{source.file.rsplit('/', 1)[-1]}:{source.line}"
        op = instruction.op
        known = named.get(number, Label(op, op))
        found.append(replace(known, line=line, is_collective=op in OPS and OPS[op].collective))
    return [*found, Label("commit", "commit", is_collective=True)]


def _from_report(plan: Plan) -> dict[int, Label]:
    if plan.report is None:
        return {}
    return {
        value.instruction: Label(
            value.name,
            value.op,
            ", ".join("-" if type_ is None else str(type_) for type_ in value.types),
            module=value.module,
            sent=value.sent,
            moved=value.moved,
            estimate=value.seconds,
        )
        for value in plan.report.values
        if value.instruction >= 0
    }


def _from_text(plan: Plan) -> dict[int, Label]:
    """A graph's calls stand in the order of the instructions, among which there is a commit."""
    lines = [line.partition("  # ")[0] for line in plan.graph.splitlines() if not _INPUT.match(line)]
    calls = [call for line in lines if (call := _CALL.fullmatch(line.rstrip()))]
    numbers = [number for number, instruction in enumerate(plan.instructions) if instruction.op != "commit"]
    if len(calls) != len(numbers):
        return {}
    found = {}
    for number, call in zip(numbers, calls, strict=True):
        text, _, type_ = call[2].rpartition(" : ")
        found[number] = Label(call[1], text.partition("(")[0].strip(), type_.strip())
    return found


def input_names(plan: Plan) -> list[str]:
    """The name of each of the plan's inputs: a parameter's name, a state's or a scalar's label, "seed".

    A parameter's name is that in the graph's text; its position where the text does not say, or a state is called so.
    """
    named = {int(at): name for name, at in re.findall(r"^\s*%(\w+) = input (\d+)\s", plan.graph, re.MULTILINE)}
    taken = {str(spec.label) for spec in plan.inputs if spec.kind in ("state", "scalar")}
    names = []
    for spec in plan.inputs:
        name = str(spec.label)
        if spec.kind == "input":
            better = named.get(int(spec.label), name)
            name = name if better in taken else better
        names.append("seed" if spec.kind == "seed" else name)
    return names


def schedule_text(facts: Any) -> str:
    """The pipeline's schedule in a plan's costs; "" where they have none that can be read."""
    if not isinstance(facts, dict) or not isinstance(facts.get("bubble"), (int, float)):
        return ""
    held = facts.get("held")
    text = (
        f"{facts.get('name')}: {facts.get('stages')} stages, {facts.get('microbatches')} microbatches, "
        f"{facts['bubble']:.1%} bubble"
    )
    if isinstance(held, list) and held:
        text += f"; activations of {', '.join(map(str, held))} microbatches at most, by mesh"
    barriers = facts.get("barriers")
    if isinstance(barriers, list) and barriers:
        where = [f"{op} (stage {stage})" for stage, op in barriers]
        more = f" and {len(where) - 4} more" * (len(where) > 4)
        text += f"; all {facts.get('microbatches')} wait for one another in {', '.join(where[:4])}{more}"
    return text
