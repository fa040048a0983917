"""The plans of the parts of a graph of several meshes, put together as one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from monarch.compiler.graph import Graph, provenance, tensor_type
from monarch.compiler.passes.cut import receives_of, sends_of
from monarch.compiler.plan.file import hash_of
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.plan import Instruction, Part, Plan, ValueSpec
from monarch.compiler.plan.transfers import Transfer, moved_bytes, routes


def join_parts(
    graph: Graph, plans: Sequence[Plan], options: CompileOptions, values: Mapping[str, int] | None = None
) -> Plan:
    """The plan of a graph whose fragments have been lowered to these plans, for these `values` of its named sizes."""
    names = list(graph.fragments)
    transfers = _transfers(graph)
    if values is not None:
        transfers = tuple(
            [replace(each, sent=each.sent.at(values), received=each.received.at(values)) for each in transfers]
        )
    plans = _committing([replace(plan, hash="") for plan in plans])
    inputs, donated = _inputs(graph, plans)
    outputs = _outputs(graph, names, plans)
    parts = tuple(
        Part(
            name,
            graph.parts[name],
            replace(
                plan,
                inputs=tuple(spec for spec in inputs if spec.part == number),
                outputs=tuple(spec for spec in outputs if spec.part == number),
            ),
        )
        for number, (name, plan) in enumerate(zip(names, plans, strict=True))
    )
    plan = Plan(
        name=graph.name,
        mesh=graph.mesh,
        inputs=inputs,
        outputs=outputs,
        instructions=(),
        slots=0,
        donated=donated,
        options=options,
        graph=str(graph),
        parts=parts,
        transfers=transfers,
        costs=_costs(names, plans, transfers) | ({"schedule": graph.schedule} if graph.schedule else {}),
    )
    return replace(plan, hash=hash_of(plan))


def _transfers(graph: Graph) -> tuple[Transfer, ...]:
    """The transfers by number."""
    names = list(graph.fragments)
    sent = {
        number: (names.index(name), value)
        for name, part in graph.fragments.items()
        for number, value in sends_of(part).items()
    }
    received = {
        number: (names.index(name), node)
        for name, part in graph.fragments.items()
        for number, node in receives_of(part).items()
    }
    found: list[Transfer] = []
    for number in sorted(sent):
        (source, value), (target, node) = sent[number], received[number]
        types = tensor_type(value), tensor_type(node)
        found.append(Transfer(source, target, *types, node.name, provenance(node).source))
    return tuple(found)


def _committing(plans: Sequence[Plan]) -> list[Plan]:
    """The plans, each with a commit if one of them has: a step is certain for all or for none."""
    commit = Instruction("commit", (), {}, -1)
    if not any(instruction.op == "commit" for plan in plans for instruction in plan.instructions):
        return list(plans)
    return [
        plan
        if any(instruction.op == "commit" for instruction in plan.instructions)
        else replace(plan, instructions=(*plan.instructions, commit))
        for plan in plans
    ]


def _inputs(graph: Graph, plans: Sequence[Plan]) -> tuple[tuple[ValueSpec, ...], tuple[bool, ...]]:
    """The inputs of the parts in the order of the program's, and which a step may overwrite. An input of several parts
    is there once for each."""
    known = {
        (number, spec.kind, spec.label): (spec, donated)
        for number, plan in enumerate(plans)
        for spec, donated in zip(plan.inputs, plan.donated, strict=True)
    }
    found = [
        (replace(spec, part=number), donated)
        for node in graph.placeholders
        for number in range(len(plans))
        if (entry := known.get((number, node.meta["kind"], node.meta["label"]))) is not None
        for spec, donated in [entry]
    ]
    return tuple(spec for spec, _ in found), tuple(donated for _, donated in found)


def _outputs(graph: Graph, names: list[str], plans: Sequence[Plan]) -> tuple[ValueSpec, ...]:
    """The program's results, in order, then every state that it changes or makes."""
    returned = [iter([spec for spec in plan.outputs if spec.kind == "return"]) for plan in plans]
    states = [{spec.label: spec for spec in plan.outputs if spec.kind == "state"} for plan in plans]
    found: list[ValueSpec] = []
    for label, node in enumerate(node for node in graph.returns if node is not None):
        part = names.index(node.meta["mesh"])
        found.append(replace(next(returned[part]), label=label, part=part))
    for name, node in graph.updates.items():
        part = names.index(node.meta["mesh"])
        found.append(replace(states[part][name], part=part))
    return tuple(found)


def _costs(names: list[str], plans: Sequence[Plan], transfers: Sequence[Transfer]) -> dict[str, Any]:
    """The costs of the parts together: ops, collectives by part and mesh dim, the bytes that go from part to part, the
    peak of the fullest worker, and the calls made again on all; and by part its own costs."""
    moved: dict[str, dict[str, int]] = {}
    for transfer in transfers:
        entry = moved.setdefault(f"{names[transfer.source]} -> {names[transfer.target]}", {"count": 0, "bytes": 0})
        source, target = plans[transfer.source].mesh, plans[transfer.target].mesh
        found = routes(transfer.sent, source, transfer.received, target)
        entry["count"] += 1
        entry["bytes"] += moved_bytes(found, transfer.sent.dtype.itemsize)
    together: dict[str, Any] = {}
    if all("peak_bytes" in plan.costs for plan in plans):
        together["peak_bytes"] = max(plan.costs["peak_bytes"] for plan in plans)
    if again := [plan.costs["recomputed"] for plan in plans if "recomputed" in plan.costs]:
        together["recomputed"] = {
            "without": max(each["without"] for each in again),
            "calls": sum(each["calls"] for each in again),
            "seconds": sum(each["seconds"] for each in again),
        }
    if whole := sum(plan.costs.get("whole", 0) for plan in plans):
        together["whole"] = whole
    return together | {
        "ops": sum(plan.costs["ops"] for plan in plans),
        "collectives": {
            f"{name}.{dims}": entry
            for name, plan in zip(names, plans, strict=True)
            for dims, entry in plan.costs["collectives"].items()
        },
        "transfers": moved,
        "parts": {name: plan.costs for name, plan in zip(names, plans, strict=True)},
    }
