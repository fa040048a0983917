"""Whether a model computes each row of a batch from itself alone: only then do microbatches give the batch's results.

Known from the sharding rules: the dim with the rows leads to a factor, which has to lead a dim of every result.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from enum import Enum
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.errors import ProgramError, Source
from monarch.compiler.graph import Graph, args_of, provenance
from monarch.compiler.rules import rule_for, tensor_operands
from monarch.compiler.rules.call import argument, op_name
from monarch.compiler.rules.losses import MEAN
from monarch.compiler.rules.rule import Dim, Rule
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

    def __init__(self, backward: bool = False) -> None:
        """With `backward` also in gradients, which a model may compute in its forward pass."""
        self._backward = backward
        self._found: dict[fx.Node, Rows | tuple[Rows, ...]] = {}
        self._numbered: dict[fx.Node, frozenset[int]] = {}
        """Of values without rows, the dims along which they follow from a count: `torch.arange(x.shape[0])`."""
        self._exact: dict[fx.Node, int] = {}
        """Of those, the dim along which each entry is its own number: 0, 1, 2, …"""
        self._same: dict[fx.Node, Same] = {}
        """Of values without rows: `torch.ones(n)`, `x[None].expand(n, -1)`. Which entry is taken along such a dim does
        not matter: `transformers` numbers rows so, where a mask is the same for all."""
        self._count: int | None = None
        """How many rows there are, from the first value that the model takes them from."""
        self.by_number: list[RowNumbers] = []
        """For each op that takes rows by their numbers its error, unless the numbers count the rows."""

    def dim_of(self, node: fx.Node) -> Rows:
        """The dim of a value that has the rows."""
        found = self._found.get(node)
        return None if isinstance(found, tuple) else found

    def note(self, node: fx.Node, dim: Rows) -> None:
        """Note the dim of a value that has the rows."""
        self._found[node] = dim

    def counted_along(self, node: fx.Node) -> frozenset[int]:
        """The dims of a value without rows along which it follows from a count."""
        return self._numbered.get(node, _NONE)

    def follow(self, node: fx.Node) -> None:
        """Follow the rows through the next op. Raises ProgramError for one of the model that mixes them."""
        task: Task | None = node.meta.get("task")
        found = self._found
        backward = provenance(node).backward
        if (backward and not self._backward) or (task is None and not backward) or (task and task.microbatch):
            return
        by_rows = task is None or task.by_rows
        if node.target is ops.transfer and (by_rows or node.all_input_nodes[0] in found):
            before = node.all_input_nodes[0]
            found[node] = found.get(before)
            self._numbered[node] = self._numbered.get(before, _NONE)
            self._same[node] = self._same.get(before, {})
        elif not by_rows:
            if not backward:
                found[node] = 0  # rows of the batch, which the model takes
        elif node.target is operator.getitem:
            several, at = args_of(node)
            rows = found.get(several)
            found[node] = rows[at] if isinstance(rows, tuple) else None
        else:
            operands = tensor_operands(node)
            own: list[Any] = [found.get(each) for each in operands]
            numbered = [self._numbered.get(each, _NONE) for each in operands]
            taken = self._taken_by_number(node)
            same = [self._same_along(node, each) for each in operands]
            if self._count is None:
                self._count = next(
                    (e.meta["type"].shape[0] for e, dim in zip(operands, own, strict=True) if dim == 0), None
                )
            found[node] = self._rows_of(node, own, numbered, same) if taken is None else taken
            if found[node] is None:
                if dims := _numbered_of(node, numbered, same):
                    self._numbered[node] = dims
                    self._note_exact(node, dims)
                self._same[node] = _same_of(node, same)

    def _rows_of(
        self, node: fx.Node, operands: list[Any], numbered: list[frozenset[int]], same: list[Same]
    ) -> Rows | tuple[Rows, ...]:
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
        for at, (dim, placed) in enumerate(zip(operands, strategy.operands, strict=True)):
            if dim is not None and dim != placed:
                raise _mixed(node)
            if dim is None and isinstance(placed, int) and placed in numbered[at]:
                size = tensor_operands(node)[at].meta["type"].shape[placed]
                if not self._is_same_by_row(size, same[at].get(placed)):
                    raise row_numbers(op_name(node.target), provenance(node).source)
        if any(isinstance(placed, str) for placed in strategy.results):
            raise _mixed(node)
        results: list[Any] = list(strategy.results)
        if isinstance(node.meta["type"], TensorType):
            if self._regroups(type_.shape[operands[first]], node.meta["type"].shape[results[0]]):
                raise _mixed(node)
        return results[0] if isinstance(node.meta["type"], TensorType) else tuple(results)

    def _regroups(self, before: int, after: int) -> bool:
        """Whether a call makes of a dim with rows one whose entries have several rows each, as `x.view(-1, 2, 6)` does,
        or the other way round."""
        rows = self._count
        return rows is not None and before != after and bool(before % rows or after % rows)

    def _is_same_by_row(self, size: int, again: int | None) -> bool:
        """Whether a dim of so many entries, several of which belong to each row, has the same for all rows."""
        if again is None or not self._count or size % self._count:
            return False
        return size // self._count % again == 0

    def _same_along(self, node: fx.Node, operand: fx.Node) -> Same:
        """The dims of an operand along which it does not matter for a call which entry it takes."""
        every = dict.fromkeys(range(len(operand.meta["type"].shape)), 1)
        if node.target is torch.ops.aten.index.Tensor:
            value, entries = args_of(node)
            same = self._same.get(value, {})
            if operand is not value and all(same.get(at) == 1 for at, each in enumerate(entries) if each is operand):
                return every
        ones = {dim: 1 for dim in every if operand.meta["type"].shape[dim] == 1}
        return {**self._same.get(operand, {}), **ones}

    def _note_exact(self, node: fx.Node, dims: frozenset[int]) -> None:
        """Note a value that numbers its entries along a dim, `torch.arange(n)` or a view of it."""
        name = op_name(node.target).split(".")[1]
        exact = name == "arange" and argument(node, "start", 0) == 0 and argument(node, "step", 1) == 1
        if name in _SAME_NUMBERS:
            before = node.all_input_nodes[0]
            exact = before in self._exact and len(dims) == 1
            exact = exact and before.meta["type"].shape[self._exact[before]] == node.meta["type"].shape[min(dims)]
        if exact:
            self._exact[node] = min(dims)

    def _taken_by_number(self, node: fx.Node) -> Rows:
        """The dim of the result that has the rows where an op takes each by its number, `x[torch.arange(len(x)), at]`:
        each row is taken for itself. None for all else."""
        if node.target is not torch.ops.aten.index.Tensor:
            return None
        value, entries = args_of(node)
        rows = self._found.get(value)
        if not isinstance(rows, int) or rows >= len(entries) or entries[rows] not in self._exact:
            return None
        numbers = entries[rows]
        along = self._exact[numbers]
        if numbers.meta["type"].shape[along] != value.meta["type"].shape[rows]:
            return None
        behind = len(numbers.meta["type"].shape) - along  # tensors of indices are broadcast, so dims count from the end
        for at, each in enumerate(entries):
            if each is None or at == rows:
                continue
            place = len(each.meta["type"].shape) - behind
            if self._found.get(each) not in (None, place) or place in self._numbered.get(each, _NONE):
                return None
        places = [at for at, each in enumerate(entries) if each is not None]
        together = places == list(range(places[0], places[-1] + 1))
        broadcast = max(len(entries[at].meta["type"].shape) for at in places)
        self.by_number.append(row_numbers(op_name(node.target), provenance(node).source))
        return (places[0] if together else 0) + broadcast - behind


_NONE: frozenset[int] = frozenset()
Same = dict[int, int]
"""For a dim of a value, that it has the same entries again and again, so many at a time: 1 where all are the same."""
_SAME_NUMBERS = frozenset(("view", "unsqueeze", "expand", "clone", "alias", "detach", "_to_copy", "reshape"))
"""Ops that give their operand's numbers, in another shape or dtype."""
_FILLED = frozenset(("full", "ones", "zeros", "empty", "new_full", "new_ones", "new_zeros", "new_empty", "expand"))
"""Ops whose result is the same along dims that come from no operand's."""
_COUNTS = {"arange": {0}, "linspace": {0}, "logspace": {0}, "eye": {0, 1}}


def _numbered_of(node: fx.Node, operands: list[frozenset[int]], same: list[Same]) -> frozenset[int]:
    """The dims of a value along which it follows from a count."""
    name = op_name(node.target).split(".")[1:2]
    if name and name[0] in _COUNTS:
        return frozenset(_COUNTS[name[0]])
    operands = [frozenset(at for at in own if also.get(at) != 1) for own, also in zip(operands, same, strict=True)]
    if not any(operands) or not isinstance(node.meta["type"], TensorType) or node.target in ops.WITH_REGIONS:
        return _NONE
    rule = rule_for(node, _shape_of)
    factors = {each for dims, own in zip(rule.operands, operands, strict=True) for at in own for each in dims[at]}
    return frozenset(at for at, dim in enumerate(rule.results[0] or ()) if factors & set(dim))


def _same_of(node: fx.Node, operands: list[Same]) -> Same:
    """The dims of a value that have the same entries again and again, as the operands have: where an op computes one
    entry apart from the others, from equal ones it computes equal ones."""
    name = op_name(node.target).split(".")
    if name[0] != "aten" or not isinstance(node.meta["type"], TensorType):
        return {}
    if name[1] == "repeat":
        ((shape, same),) = zip([_shape_of(each) for each in node.all_input_nodes], operands, strict=True)
        more = len(_shape_of(node)) - len(shape)
        return {**dict.fromkeys(range(more), 1), **{at + more: same.get(at, size) for at, size in enumerate(shape)}}
    rule = rule_for(node, _shape_of)
    apart = {each.factor: each.results[0] for each in rule.strategies(1)}
    by_factor: dict[str, bool] = {}  # whether no operand differs along it
    for dims, same in zip(rule.operands, operands, strict=True):
        for at, dim in enumerate(dims):
            for factor, inner in _inner(rule, dim):
                is_same = at in same and inner % same[at] == 0
                by_factor[factor] = by_factor.get(factor, True) and is_same
    found: Same = {}
    for at, dim in enumerate(rule.results[0] or ()):
        if apart.get(rule.leader(dim)) == at:
            for factor, inner in _inner(rule, dim):
                if not by_factor.get(factor, name[1] in _FILLED):
                    break
                found[at] = inner
    return found


def _inner(rule: Rule, dim: Dim) -> Iterator[tuple[str, int]]:
    """The factors of a dim, the outermost first, each with how many entries belong to one of its own."""
    for at, factor in enumerate(dim):
        if rule.sizes[factor] > 1:
            yield factor, math.prod(rule.sizes[each] for each in dim[at + 1 :])


class RowNumbers(ProgramError):
    """A model computes with the numbers of a batch's rows, which microbatches would have of their own."""


def row_numbers(name: str, source: Source | None) -> RowNumbers:
    return RowNumbers(
        f"{name} takes the rows of a batch with a count of them, such as torch.arange",
        hint="each microbatch has rows of its own, and would count them from 0. Give the numbers with the\n"
        "batch, as an argument of pipe.step; or say pipeline(…, mixes_rows=True), where each microbatch counts "
        "its own.",
        source=source,
    )


class Way(Enum):
    """How a value follows from the rows of a batch."""

    SUM = "a sum of what each row gives"
    MORE = "such a sum, and what no row gives"
    OTHER = "in another way"


def way_of_loss(nodes: Iterable[fx.Node], known: Callable[[fx.Node], Rows], loss: fx.Node) -> Way | None:
    """How a loss follows from rows, by the rules: a value of rows that is reduced over them is a sum, and so is a
    linear function of sums. None where it follows from no row. `nodes` are its calls, in order, and `known` has for
    other values the dim with rows."""
    found: dict[fx.Node, Any] = {}

    def of(node: fx.Node) -> Any:
        return found[node] if node in found else known(node)

    for node in nodes:
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            several, at = args_of(node)
            ways = of(several)
            found[node] = ways[at] if isinstance(ways, tuple) else ways
        elif node.target is ops.transfer:
            found[node] = of(node.all_input_nodes[0])
        else:
            found[node] = _way_of(node, [of(each) for each in tensor_operands(node)])
    way = of(loss)
    return way if way is None or isinstance(way, Way) else Way.OTHER


def _way_of(node: fx.Node, operands: list[Any]) -> Any:
    if all(way is None for way in operands):
        return None
    if Way.OTHER in operands or node.target in ops.WITH_REGIONS:
        return Way.OTHER
    rule = rule_for(node, _shape_of)
    sums = {at for at, way in enumerate(operands) if isinstance(way, Way)}
    if sums:
        linear = [together for together in rule.linear if sums <= together]
        if any(isinstance(way, int) for way in operands) or not (linear or node.target in _PLUS_NUMBER):
            return Way.OTHER
        alone = sums in linear and Way.MORE not in operands
        return Way.SUM if alone else Way.MORE
    first = next(at for at, way in enumerate(operands) if way is not None)
    factor = rule.leader(rule.operands[first][operands[first]])
    if factor in rule.whole and _is_mean_of_rows(node):
        rule = replace(rule, whole=rule.whole - {factor}, reductions={**rule.reductions, factor: "sum"})
    strategy = next((each for each in rule.strategies(1) if factor and each.factor == factor), None)
    if strategy is None:
        return Way.OTHER
    if any(way is not None and way != placed for way, placed in zip(operands, strategy.operands, strict=True)):
        return Way.OTHER
    ways: list[Any] = [
        placed if not isinstance(placed, str) else Way.SUM if placed == "sum" else Way.OTHER
        for placed in strategy.results
    ]
    return ways[0] if isinstance(node.meta["type"], TensorType) else tuple(ways)


_PLUS_NUMBER = frozenset(
    (torch.ops.aten.add.Tensor, torch.ops.aten.sub.Tensor, torch.ops.aten.add.Scalar, torch.ops.aten.sub.Scalar)
)
"""With one operand they add a number."""


def _is_mean_of_rows(node: fx.Node) -> bool:
    """Whether a call is a loss that its rule takes whole because it divides by the elements that there are. Of
    `nll_loss`, whose mean is over the targets that count, a step makes a sum before (`stdlib/pipeline/losses.py`)."""
    return argument(node, "reduction") == MEAN and "nll_loss" not in op_name(node.target)


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
