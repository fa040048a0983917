"""What `monarchc inspect` prints of a plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from monarch.compiler.plan.plan import Plan, ValueSpec
from monarch.compiler.types import TensorType


def summary(plan: Plan, graph: bool = True) -> dict[str, Any]:
    """A plan as a JSON value: sizes in bytes, times in seconds, shapes of one worker under "local"."""
    return {
        "name": plan.name,
        "hash": plan.hash,
        "mesh": dict(plan.mesh.dims),
        "workers": plan.mesh.workers,
        "inputs": [
            {**_value(plan, spec), "donated": donated} for spec, donated in zip(plan.inputs, plan.donated, strict=True)
        ],
        "outputs": [_value(plan, spec) for spec in plan.outputs],
        "constants": {label: str(TensorType(t.dtype, tuple(t.shape))) for label, t in plan.constants.items()},
        "slots": plan.slots,
        "ops": dict(Counter(instruction.op for instruction in plan.instructions).most_common()),
        "costs": plan.costs,
        **({"graph": plan.graph} if graph else {}),
    }


def _value(plan: Plan, spec: ValueSpec) -> dict[str, Any]:
    local = list(spec.type.local_shape(plan.mesh))
    return {"kind": spec.kind, "label": spec.label, "type": str(spec.type), "local": local}


def show(plan: Plan, graph: bool = True, console: Console | None = None) -> None:
    """Print a plan for people. What comes from the file is printed as it is, never as markup or control characters."""
    console = console or Console(highlight=False, soft_wrap=True)
    workers = "1 worker" if plan.mesh.workers == 1 else f"{plan.mesh.workers} workers"
    console.print(_text(plan.name, "bold"), _text(f"on {plan.mesh}: {workers}"))
    console.print(_text(f"hash {plan.hash}", "dim"))
    for title, lines in _tables(plan):
        console.print()
        console.print(_text(title, "bold"))
        for line in lines:
            console.print(_text(f"  {line}"))
    if graph and plan.graph:
        console.print()
        text = _text(plan.graph)
        text.highlight_regex(r"(?m)  # .*$", "dim")
        console.print(text)


def _tables(plan: Plan) -> Iterator[tuple[str, list[str]]]:
    if plan.inputs:
        yield "inputs", _value_table(plan, plan.inputs, plan.donated)
    if plan.outputs:
        yield "outputs", _value_table(plan, plan.outputs)
    if plan.constants:
        rows = [(label, TensorType(t.dtype, tuple(t.shape)), size(t.nbytes)) for label, t in plan.constants.items()]
        yield "constants", _table(rows, "<<>")
    if collectives := list(_collectives(plan.costs)):
        heading = ("mesh dim", "collective", "count", "tensors", "bytes a worker")
        yield "collectives in a step", _table([heading, *collectives], "<<>>>")
    counted = Counter(instruction.op for instruction in plan.instructions)
    totals: list[tuple[object, ...]] = [("instructions", len(plan.instructions)), ("different ops", len(counted))]
    peak = plan.costs.get("peak_bytes")
    if isinstance(peak, int | float) and _is_number(peak):
        totals.append(("peak memory of a worker", size(peak)))
    yield "in all", _table(totals, "<>")
    if seconds := list(_seconds(plan.costs)):
        yield "compiled in", _table(seconds, "<>")


def _value_table(plan: Plan, specs: tuple[ValueSpec, ...], donated: tuple[bool, ...] = ()) -> list[str]:
    rows = []
    for at, spec in enumerate(specs):
        local = spec.type.local_shape(plan.mesh)
        of_one = "" if local == spec.type.shape else f"a worker holds {list(local)}"
        rows.append((spec.kind, spec.label, spec.type, of_one, "replaced" if donated and donated[at] else ""))
    return _table(rows, "<<<<<")


# `costs` is free JSON: what has not the form that the compiler gives it is left out here, and printed by --json only.


def _collectives(costs: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    for mesh_dims, by_op in _items(costs.get("collectives")):
        for op, counts in _items(by_op):
            numbers = dict(_items(counts))
            if all(_is_number(numbers.get(key)) for key in ("count", "tensors", "bytes")):
                yield mesh_dims, op, numbers["count"], numbers["tensors"], size(numbers["bytes"])


def _seconds(costs: dict[str, Any]) -> Iterator[tuple[object, ...]]:
    passes = [(name, took) for name, took in _items(costs.get("seconds")) if _is_number(took)]
    yield from ((name, f"{took:.3f} s") for name, took in passes)
    if passes:
        yield "together", f"{sum(took for _, took in passes):.3f} s"


def _items(value: object) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _is_number(value: object) -> bool:
    return isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _table(rows: Sequence[tuple[object, ...]], align: str) -> list[str]:
    """Rows as lines, in columns aligned to the left ("<") or right (">"), and never cut to a terminal's width."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in cells
    ]


def _text(text: str, style: str = "") -> Text:
    """Text as it is: no markup, and nothing that a terminal would take for a command."""
    return Text("".join(c if c.isprintable() or c == "\n" else "\N{REPLACEMENT CHARACTER}" for c in text), style)


def size(count: float) -> str:
    """Bytes for people: `1.5 MiB`."""
    unit = 0
    while abs(count) >= 1024 and unit < 4:
        count, unit = count / 1024, unit + 1
    return f"{int(count)} B" if unit == 0 else f"{count:.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[unit]}"
