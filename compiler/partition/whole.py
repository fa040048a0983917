"""Ops that run whole for want of a sharding rule: a warning of the gathers for them, once for each op and line."""

from __future__ import annotations

import math
import warnings

from torch import fx

from monarch.compiler.errors import PerformanceWarning, RuleError, Source
from monarch.compiler.graph import Graph, provenance
from monarch.compiler.rules import Call, Rule, fits, tensor_operands
from monarch.compiler.rules.call import called_op, op_name
from monarch.compiler.sizes import format_bytes
from monarch.compiler.symbols import examples
from monarch.compiler.types import TensorType

_announced: dict[tuple[str, Source | None], None] = {}
"""The last ops and lines that this process has been told of: programs that are made anew without end have new lines."""
REMEMBERED = 1024


def mark_gathered(node: fx.Node, rule: Rule, operands: frozenset[int]) -> None:
    """Note on a node that runs whole which of its operands were gathered or reduced for it, and say so in the graph."""
    if not operands:
        return
    before: frozenset[int] = node.meta.get("gathered", frozenset())
    node.meta["gathered"] = before | operands
    node.meta["why"] = f"every worker computes all of it, with {_gathered_text(node)} gathered: {rule.reason}"


def announce(graph: Graph, strict: bool) -> int:
    """Say which ops of a partitioned graph run whole though operands of theirs are sharded: a PerformanceWarning, once
    for each op and line. With `strict` the first of them is a RuleError. Gives how many there are."""
    found = [node for node in graph.calls if "gathered" in node.meta]
    for node in found:
        name, source = op_name(called_op(node)), provenance(node).source
        message = f"{name} runs whole on every worker, with {_gathered_text(node)} gathered for each call"
        hint = _way_out(node, strict)
        if strict:
            raise RuleError(message, hint=hint, source=source)
        if (name, source) in _announced:
            continue
        _announced[name, source] = None
        while len(_announced) > REMEMBERED:
            del _announced[next(iter(_announced))]
        text = "\n  ".join([message, *hint.splitlines()])
        file, number = (source.file, source.line) if source else (graph.name, 0)
        warnings.warn_explicit(text, PerformanceWarning, file, number)
    return len(found)


def _gathered_text(node: fx.Node) -> str:
    operands = tensor_operands(node)
    types: list[TensorType] = [operands[at].meta["type"] for at in node.meta["gathered"]]
    return format_bytes(sum(math.prod(examples(type_.shape)) * type_.dtype.itemsize for type_ in types))


def _way_out(node: fx.Node, strict: bool) -> str:
    op = called_op(node)
    packet = op_name(op).rsplit(".", 1)[0]
    # Users need not know the meaning of torch's own ops: a rule that fits and does not hold gives wrong numbers.
    suggestion = None if op.namespace in ("aten", "prims") else suggested_line(Call.of(node, _global_shape))
    lines = []
    reason = node.meta.get("why", "").partition(" gathered: ")[2]
    if reason.startswith("its sharding rule"):
        lines.append(f"I{reason[1:]}.")
    if suggestion is not None:
        lines += [
            "If it computes each entry of dim 0 from the same entry of its operands alone, this rule shards it:",
            f'    monarch.sharding_rule("{packet}", "{suggestion}")',
        ]
    if strict:
        lines.append("Leave out strict=True to run the whole op on every worker, or give it replicated operands.")
    return "\n".join(lines)


def suggested_line(call: Call) -> str | None:
    """A sharding rule's text that fits this call and shards the first dim of all operands and results that have it;
    None where there is none.

    Only a reader who knows the op knows whether it holds."""
    sizes = {shape[0] for shape in call.results if shape}
    if len(sizes) != 1 or (size := sizes.pop()) < 2 or not any(shape and shape[0] == size for shape in call.shapes):
        return None

    def text(shape: tuple[int, ...] | None) -> str:
        if shape is None:
            return "-"
        first = ["n" if shape and shape[0] == size else "_"][: len(shape)]
        return " ".join([*first, *["_"] * (len(shape) - 1)]) or "[]"

    found = f"{', '.join(map(text, call.shapes))} -> {', '.join(map(text, call.results))}"
    return found if fits(found, call) else None


def _global_shape(node: fx.Node) -> object:
    type_ = node.meta["type"]
    if isinstance(type_, TensorType):
        return type_.shape
    return tuple(() if part is None else part.shape for part in type_)
