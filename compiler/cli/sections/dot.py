"""`--dot`: the partitioned graph in Graphviz's language, clustered by module."""

from __future__ import annotations

import json
from typing import Any

from monarch.compiler.cli.screen import clean, size
from monarch.compiler.inspect.values import report_of, types_text
from monarch.compiler.plan import Plan, ReportedValue

_COLORS = {"input": "lightblue", "state": "palegreen", "constant": "lightgrey"}


def data(plan: Plan) -> str:
    return text(plan)


def text(plan: Plan) -> str:
    """A digraph: an edge for each value that another reads, named by its type; collectives are ellipses. The parts of
    an op's results are drawn as the op."""
    values = report_of(plan).values
    whole = {number: number for number in range(len(values))}
    for number, value in enumerate(values):
        if value.op == "getitem" and value.reads:
            whole[number] = whole[value.reads[0]]
    modules: dict[str, Any] = {}
    for number, value in enumerate(values):
        if whole[number] == number:
            inner = modules
            for part in value.module.split(".") if value.module else ():
                inner = inner.setdefault(part, {})
            inner.setdefault("", []).append(number)
    lines = [f"digraph {_quoted(plan.name)} {{", "  rankdir=TB; node [shape=box, fontname=monospace, fontsize=10];"]
    lines += _cluster(modules, "", values, 1)
    for number, value in enumerate(values):
        if whole[number] == number:
            for operand in value.reads:
                lines.append(f"  v{whole[operand]} -> v{number} [label={_quoted(types_text(values[operand]))}];")
    return "\n".join([*lines, "}"])


def _cluster(modules: dict[str, Any], path: str, values: tuple[ReportedValue, ...], depth: int) -> list[str]:
    indent = "  " * depth
    lines = [f"{indent}v{number} {_node(values[number])};" for number in modules.get("", ())]
    for name, inner in modules.items():
        if name:
            whole = f"{path}.{name}" if path else name
            lines.append(f"{indent}subgraph {_quoted(f'cluster_{whole}')} {{ label={_quoted(whole)};")
            lines += _cluster(inner, whole, values, depth + 1)
            lines.append(f"{indent}}}")
    return lines


def _node(value: ReportedValue) -> str:
    label = f"%{value.name}\n{value.op}"
    if value.mesh_dims:
        label += f" over {','.join(value.mesh_dims)}\n{size(value.sent)}"
        return f"[label={_quoted(label)}, shape=ellipse, style=filled, fillcolor=orange]"
    color = _COLORS.get(value.op)
    return f"[label={_quoted(label)}{f', style=filled, fillcolor={color}' if color else ''}]"


def _quoted(text: str) -> str:
    """A string of Graphviz's: quotes and backslashes escaped, as JSON does."""
    return json.dumps(clean(text), ensure_ascii=False)
