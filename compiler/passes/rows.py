"""Whether a model computes each row of a batch from itself alone: only then do microbatches give what the batch does.

Known from the sharding rules: the dim with the rows leads to a factor, which has to lead a dim of every result.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

from monarch.compiler import ops
from monarch.compiler.errors import ProgramError
from monarch.compiler.graph import Graph, args_of, provenance
from monarch.compiler.rules import rule_for, tensor_operands
from monarch.compiler.rules.call import op_name
from monarch.compiler.tape import Task
from monarch.compiler.types import TensorType

Rows = int | None
"""The dim of a value that has the rows; None for a value that has none."""


def check_rows(graph: Graph) -> None:
    """Raise ProgramError, with the line, for an op of a model's forward pass that mixes the rows of a microbatch, or of
    which no rule says that it does not. `node.meta["task"]` says which ops these are."""
    rows = FollowedRows()
    for node in graph.calls:
        rows.follow(node)


class FollowedRows:
    """Where the rows of the first microbatch are in the values of a model, from op to op."""

    def __init__(self) -> None:
        self._found: dict[fx.Node, Rows | tuple[Rows, ...]] = {}

    def dim_of(self, node: fx.Node) -> Rows:
        """The dim of a value that has the rows."""
        found = self._found.get(node)
        return None if isinstance(found, tuple) else found

    def follow(self, node: fx.Node) -> None:
        """Follow the rows through the next op. Raises ProgramError for one of the model that mixes them."""
        task: Task | None = node.meta.get("task")
        found = self._found
        if task is None or task.microbatch or provenance(node).backward:
            return
        if not task.by_rows:
            found[node] = 0  # rows of the batch, which the model takes
        elif node.target is operator.getitem:
            several, at = args_of(node)
            rows = found.get(several)
            found[node] = rows[at] if isinstance(rows, tuple) else None
        elif node.target is ops.transfer:
            found[node] = found.get(node.all_input_nodes[0])
        else:
            found[node] = _rows_of(node, [found.get(each) for each in tensor_operands(node)])


def _rows_of(node: fx.Node, operands: list[Any]) -> Rows | tuple[Rows, ...]:
    first = next((at for at, dim in enumerate(operands) if dim is not None), None)
    if first is None:
        return None
    if node.target in ops.WITH_REGIONS:
        raise _mixed(node)
    type_ = tensor_operands(node)[first].meta["type"]
    if type_.shape[operands[first]] == 1:
        return None  # one row: nothing to mix
    rule = rule_for(node, _shape_of)
    factor = rule.leader(rule.operands[first][operands[first]])
    strategy = next((each for each in rule.strategies(1) if factor and each.factor == factor), None)
    if strategy is None:
        raise _mixed(node)
    for dim, placed in zip(operands, strategy.operands, strict=True):
        if dim is not None and dim != placed:
            raise _mixed(node)
    if any(isinstance(placed, str) for placed in strategy.results):
        raise _mixed(node)
    results: list[Any] = list(strategy.results)
    return results[0] if isinstance(node.meta["type"], TensorType) else tuple(results)


def _shape_of(node: fx.Node) -> Any:
    type_ = node.meta["type"]
    return type_.shape if isinstance(type_, TensorType) else tuple(each.shape if each else () for each in type_)


def _mixed(node: fx.Node) -> ProgramError:
    return ProgramError(
        f"{op_name(node.target)} mixes the rows of a batch, or has no rule that says that it does not",
        hint="in microbatches it would see some of them, and give other numbers than for the batch. All microbatches\n"
        "can wait for a call of PyTorch's that gives a new tensor: write it so, not in place and not in a function of\n"
        "its own. Or say pipeline(…, mixes_rows=True), where each microbatch is mixed by itself; or take\n"
        "microbatches=1.",
        source=provenance(node).source,
    )
