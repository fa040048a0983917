"""The default page of `monarchc inspect`: about the plan, and where to look further."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.console import Console

from monarch.compiler.cli.screen import amount, count, duration, heading, line, pairs, plain, size, table
from monarch.compiler.cli.sections.memory import limits_of
from monarch.compiler.cost.cluster import cluster_of
from monarch.compiler.inspect.costs import costs_by
from monarch.compiler.inspect.estimate import estimate
from monarch.compiler.inspect.graphs import graphs_of, sentence
from monarch.compiler.inspect.labels import input_names, schedule_text
from monarch.compiler.inspect.stages import estimated_bubble, stage_times
from monarch.compiler.inspect.values import computed, further_results, kind_of, local_bytes, transfers_of
from monarch.compiler.inspect.verdicts import verdicts
from monarch.compiler.plan import Plan, TensorType, ValueSpec
from monarch.compiler.plan.report import PHASES, peak

_SHOWN = 12
_WIDE = 118
_MARKS = {"good": "✓", "note": "!", "bad": "✗"}


def data(plan: Plan) -> dict[str, Any]:
    """Name, hash, mesh, inputs, outputs and constants, and the compiler's estimates."""
    tensors, stages = zip(input_names(plan), plan.inputs, plan.donated, strict=True), stage_times(plan)
    return {
        "name": plan.name,
        "hash": plan.hash,
        "mesh": dict(plan.mesh.dims),
        "workers": plan.mesh.workers,
        "target": plan.target,
        "backend": plan.collectives,
        "inputs": [
            {"kind": spec.kind, "name": name, **_type(plan, spec), "donated": donated}
            for name, spec, donated in tensors
        ],
        "outputs": [{"kind": spec.kind, "name": str(spec.label), **_type(plan, spec)} for spec in plan.outputs],
        "constants": {label: str(TensorType(t.dtype, tuple(t.shape))) for label, t in plan.constants.items()},
        "instructions": len(plan.instructions) + sum(len(part.plan.instructions) for part in plan.parts),
        "costs": plan.costs,
        **({"parts": _parts(plan), "transfers": transfers_of(plan)} if plan.parts else {}),
        **({"stages": [asdict(each) for each in stages], "bubble": estimated_bubble(plan)} if stages else {}),
        **({"cuda_graphs": graphs_of(plan)} if plan.cuda_graphs else {}),
        **({"phases": _phases(plan), "verdicts": _verdicts(plan)} if plan.report is not None else {}),
    }


def _verdicts(plan: Plan) -> list[dict[str, str]]:
    return [asdict(verdict) for verdict in verdicts(plan, estimate(plan, cluster_of(plan.target)))]


def _type(plan: Plan, spec: ValueSpec) -> dict[str, Any]:
    mesh = plan.parts[spec.part].plan.mesh if plan.parts else plan.mesh
    where = {"part": plan.parts[spec.part].name} if plan.parts else {}
    local = list(spec.type.local_shape(mesh))
    return {"type": str(spec.type), "local": local, "bytes": local_bytes(spec.type, mesh), **where}


def _parts(plan: Plan) -> dict[str, dict[str, Any]]:
    """The part of each mesh of a program of several."""
    return {
        part.name: {
            "mesh": dict(part.plan.mesh.dims),
            "workers": part.place.ranks(),
            "instructions": len(part.plan.instructions),
            **({"peak_bytes": peak(part.plan)[0]} if part.plan.report is not None else {}),
        }
        for part in plan.parts
    }


def _phases(plan: Plan) -> dict[str, dict[str, float]]:
    """Ops, flops, bytes sent and estimated seconds of a worker by phase."""
    found: dict[str, dict[str, float]] = {}
    for phase in PHASES:
        if values := [value for value in computed(plan) if value.phase == phase]:
            found[phase] = {
                "ops": len(values) - len(further_results(plan, values)),
                "collectives": sum(each.count for value in values for each in value.collectives),
                "flops": sum(value.flops for value in values),
                "sent": sum(value.sent for value in values),
                "seconds": sum(value.seconds for value in values),
            }
    return found


def show(out: Console, plan: Plan) -> None:
    found = data(plan)
    workers = count(plan.mesh.workers, "worker")
    line(out, plain(plan.name, "bold"), f"on {plan.mesh}: {workers}, for {plan.made_for}")
    line(out, plain(f"hash {plan.hash}", "dim"))
    _interface(out, plan, found)
    for title, note, lines in _layouts_found(plan.costs):
        heading(out, title, note)
        for text in lines:
            line(out, plain(f"  {text}"))
    if "phases" in found:
        _by_phase(out, found["phases"], plan.target)
    if collectives := _collectives(plan.costs):
        heading(out, "collectives in a step")
        table(out, ["mesh dim", "collective", ">count", ">tensors", ">bytes a worker"], collectives)
    if plan.parts:
        _several(out, found)
    if plan.cuda_graphs:
        _graphs(out, found["cuda_graphs"])
    heading(out, "in all")
    totals = [("instructions", f"{found['instructions']:,}")]
    if _is_number(plan.costs.get("peak_bytes")):
        limit, _ = limits_of(plan)
        most = "" if limit is None else f" of at most {size(limit)}"
        totals.append(("peak memory of a worker", size(plan.costs["peak_bytes"]) + most))
    if seconds := _seconds(plan.costs):
        totals.append(("compiled in", duration(sum(took for _, took in seconds))))
    pairs(out, totals)
    if found.get("verdicts"):
        heading(out, "in words")
        for each in found["verdicts"]:
            line(out, plain(f"  {_MARKS[each['state']]} {each['text']}"))
            if each["do"]:
                line(out, plain(f"    {each['do']}", "dim"))
    if plan.report is not None:
        out.print()
        line(out, plain(f"  more: {_more(plan)}", "dim"))


def _more(plan: Plan) -> str:
    """Options that lead somewhere: with the line that costs most, and a worker of this mesh."""
    row = next((each for each in costs_by(plan, "line") if "line" in each), None)
    why = "" if row is None else f"--why {row['file'].rsplit('/', 1)[-1]}:{row['line']} "
    at = "".join(f"--worker {name}=0 " for name in plan.mesh.names[:1])
    return f"--by line {why}--comms --kernels --memory --survives {at}--html p.html"


def _several(out: Console, found: dict[str, Any]) -> None:
    """The meshes of a program of several, and the transfers between them."""
    if schedule := schedule_text(found["costs"].get("schedule")):
        heading(out, "schedule", schedule)
        _timetable(out, found["costs"]["schedule"])
    if stages := found.get("stages"):
        _stages(out, stages, found["bubble"])
    heading(out, "meshes")
    rows = [
        (
            plain(name, "bold"),
            f"mesh<{', '.join(f'{dim}={length}' for dim, length in each['mesh'].items())}>",
            _ranks(each["workers"]),
            f"{each['instructions']:,}",
            size(each["peak_bytes"]) if "peak_bytes" in each else "",
        )
        for name, each in found["parts"].items()
    ]
    table(out, ["", "~", "~workers", ">instructions", ">peak of a worker"], rows)
    if found["transfers"]:
        heading(out, "transfers in a step", "the bytes that all workers receive")
        moved = [
            (each["name"], f"{each['from']} -> {each['to']}", each["sent"], each["received"], size(each["bytes"]))
            for each in found["transfers"]
        ]
        table(out, ["~", "~", "~sent as", "~received as", ">bytes"], moved[:_SHOWN])
        if len(moved) > _SHOWN:
            line(out, plain(f"  and {len(moved) - _SHOWN:,} more", "dim"))


def _timetable(out: Console, facts: dict[str, Any]) -> None:
    """The actions of each group of workers over time; the beginning of them, where they are wide."""
    lines = facts.get("timetable")
    for text in lines if isinstance(lines, list) else ():
        cut = str(text) if len(str(text)) <= _WIDE else f"{str(text)[: _WIDE - 2]} …"
        line(out, plain(f"  {cut}"))


def _stages(out: Console, stages: list[dict[str, Any]], bubble: float | None) -> None:
    most = max(each["forward"] + each["backward"] for each in stages)
    said = "" if bubble is None else f"; with these times the bubble is {bubble:.1%}"
    heading(out, "stages", f"what each takes of a worker in a step, estimated{said}")
    rows = [
        (
            plain(f"stage {each['stage']}", "bold"),
            each["part"],
            duration(each["forward"]),
            duration(each["backward"]),
            f"{(each['forward'] + each['backward']) / most:.0%}" if most else "",
        )
        for each in stages
    ]
    table(out, ["", "~on", ">forward", ">backward", ">of the slowest"], rows)
    line(out, plain("  more: --by stage", "dim"))


def _ranks(ranks: list[int]) -> str:
    """The workers of a part, by their numbers: `0-3`, `0, 2, 4`."""
    if len(ranks) > 1 and ranks == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:4]))
    return shown if len(ranks) <= 4 else f"{shown}, …"


def _graphs(out: Console, found: dict[str, Any]) -> None:
    heading(out, "CUDA graphs", sentence(found))
    rows = [
        (f"graph {number}", f"{each['ops']:,}", " to ".join(dict.fromkeys(filter(None, (each["from"], each["to"])))))
        for number, each in enumerate(found["graphs"], 1)
    ]
    table(out, ["", ">ops", "~lines"], rows[:_SHOWN])
    if found["between"]:
        line(out, plain("  between them", "dim"))
        between = [
            (each["op"], f"{each['count']:,}", each["where"], each["why"])
            for each in sorted(found["between"], key=lambda each: -each["count"])
        ]
        table(out, ["~", ">", "~", "~"], between[:_SHOWN])


def _interface(out: Console, plan: Plan, found: dict[str, Any]) -> None:
    taken = [(entry, spec.type) for entry, spec in zip(found["inputs"], plan.inputs, strict=True)]
    inputs = [each for each in taken if each[0]["kind"] != "state"]
    if inputs:
        heading(out, "inputs")
        table(out, ["", "~", "~", "~"], [_row(*each) for each in inputs])
    if states := [each for each in taken if each[0]["kind"] == "state"]:
        held: dict[str, int] = {}
        for entry, _ in states:
            held[entry.get("part", "")] = held.get(entry.get("part", ""), 0) + entry["bytes"]
        each = ", ".join(f"{size(total)} a worker{f' of {part}' if part else ''}" for part, total in held.items())
        heading(out, "state", f"{count(len(states), 'tensor')}, {each}")
        if len(states) <= _SHOWN:
            table(out, ["~", "~", "~"], [_row(*each)[1:] for each in states])
        else:
            _summed(out, states)
    given = zip(found["outputs"], plan.outputs, strict=True)
    if outputs := [(entry, spec.type) for entry, spec in given if entry["kind"] == "return"]:
        heading(out, "results")
        table(out, ["", "~", "~", "~"], [_row(*each) for each in outputs])
    replaced = sum(1 for entry in found["inputs"] if entry["donated"])
    made = sum(1 for entry in found["outputs"] if entry["kind"] == "state") - replaced
    if replaced or made:
        texts = [f"replaces {count(replaced, 'state')}"] if replaced else []
        texts += [f"makes {made} anew"] if made > 0 else []
        line(out, plain(f"  the step {' and '.join(texts)}", "dim"))
    if found["constants"]:
        heading(out, "constants")
        table(out, ["~", "~"], list(found["constants"].items())[:_SHOWN])


def _summed(out: Console, states: list[tuple[dict[str, Any], TensorType]]) -> None:
    """Many states: by kind and layout."""
    groups: dict[tuple[str, str], list[int]] = {}
    for entry, type_ in states:
        shards = ", ".join(type_.layout.mesh_dims)
        key = (kind_of(entry["name"]), f"cut over {shards}" if shards else "whole on every worker")
        groups.setdefault(key, []).append(entry["bytes"])
    table(
        out,
        ["", "", ">", ">"],
        [(kind, lies, count(len(held), "tensor"), size(sum(held))) for (kind, lies), held in groups.items()],
    )


def _row(entry: dict[str, Any], type_: TensorType) -> tuple[object, ...]:
    local = entry["local"]
    notes = [] if local == list(type_.shape) else [f"a worker holds {local}"]
    notes += [f"on {entry['part']}"] if "part" in entry else []
    return (
        entry["kind"],
        plain(entry["name"], "bold"),
        entry["type"],
        ", ".join(notes),
    )


def _by_phase(out: Console, phases: dict[str, dict[str, float]], target: str) -> None:
    heading(out, "a step of one worker", f"seconds are estimates for {target}")
    table(
        out,
        ["", ">ops", ">collectives", ">flops", ">bytes sent", ">estimated"],
        [
            (
                phase,
                f"{row['ops']:,}",
                f"{row['collectives']:,}",
                amount(row["flops"]),
                size(row["sent"]),
                duration(row["seconds"]),
            )
            for phase, row in phases.items()
        ],
    )


# `costs` is free JSON: entries of another form than the compiler's are left out here, and printed by --json only.


def _collectives(costs: dict[str, Any]) -> list[tuple[object, ...]]:
    found: list[tuple[object, ...]] = []
    for mesh_dims, by_op in _items(costs.get("collectives")):
        for op, counts in _items(by_op):
            numbers = dict(_items(counts))
            if all(_is_number(numbers.get(key)) for key in ("count", "tensors", "bytes")):
                found.append(
                    (mesh_dims, op, f"{numbers['count']:,}", f"{numbers['tensors']:,}", size(numbers["bytes"]))
                )
    return found


def _layouts_found(costs: dict[str, Any]) -> list[tuple[str, str, list[str]]]:
    """The layouts that a search chose and why, and the estimate of each candidate."""
    found = costs.get("layouts")
    if not isinstance(found, dict):
        return []
    why, candidates = found.get("why"), found.get("candidates")
    if not isinstance(why, list) or not isinstance(candidates, list):
        return []
    lines = [str(each) for each in why]
    for each in candidates:
        name, seconds, peak_bytes = (each.get(key) for key in ("name", "seconds", "peak_bytes"))
        if _is_number(seconds) and _is_number(peak_bytes):
            lines.append(f"{name}: {duration(seconds)} a step, {size(peak_bytes)} a worker")
    return [("layouts", f"{found.get('chosen')}, for {found.get('machine')}", lines)]


def _seconds(costs: dict[str, Any]) -> list[tuple[str, float]]:
    return [(name, took) for name, took in _items(costs.get("seconds")) if _is_number(took)]


def _items(value: object) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)
