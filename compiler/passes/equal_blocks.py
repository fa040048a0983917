"""Which nodes of a graph belong to which block of a deep model, and whether two blocks are equal.

A model's blocks are the entries of one `nn.ModuleList`, "blocks" with "blocks.0", "blocks.1", ... A node belongs to the
block in whose module it was traced, or whose state it is; nodes between modules belong to the block whose values they
read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import Graph, args_of, provenance

Block = list[fx.Node]
"""The nodes of a block in their order in the graph. A node's place in this list is its *position*; nodes of equal
blocks at equal positions are *twins*."""

STREAM: dict[Any, int] = {ops.random: 4, ops.sample: 3}
"""The argument that is the number of a draw's stream of random numbers: each block has its own."""

POSITION, OWNERS = "at", "whose"
"""In a node's meta while blocks are folded: its position; and its op with, for each argument that is a list, whose
values are in it (`fold.Fold`)."""

_COMPARED_APART = frozenset(("type", "provenance", "why", "reason", "named", "label", POSITION, OWNERS))
"""Keys of a node's meta that may differ from its twin's, or are compared by themselves."""

_NUMBER = re.compile(r"(?<![^.\[])(\d+)(?![^.\]])")
"""A number between dots in a path of modules."""


def list_of_most_blocks(graph: Graph, least: int) -> str | None:
    """The path of the module list with the most blocks; None unless these are at least so many, numbered from 0."""
    numbers: dict[str, set[int]] = {}
    for path in {provenance(node).module for node in graph.calls}:
        for match in _NUMBER.finditer(path):
            if match.start():
                numbers.setdefault(path[: match.start() - 1], set()).add(int(match[1]))
    path, found = max(numbers.items(), key=lambda each: len(each[1]), default=("", set()))
    return path if len(found) >= least and found == set(range(len(found))) else None


class Paths:
    """Paths of modules and labels of states under one list of blocks: "blocks.3.norm" is of block 3."""

    def __init__(self, path: str) -> None:
        self._form = re.compile(rf"(.*?(?<![^.\[]){re.escape(path)}\.)(\d+)((?:[.\]].*)?)")
        self._parts: dict[str, tuple[str, int, str] | None] = {}

    def _split(self, path: str) -> tuple[str, int, str] | None:
        """The text before the block's number, the number, and the text behind it; None where there is none."""
        if path not in self._parts:
            match = self._form.fullmatch(path)
            self._parts[path] = match and (match[1], int(match[2]), match[3])
        return self._parts[path]

    def block(self, path: str) -> int | None:
        """The number of a path's block."""
        found = self._split(path)
        return None if found is None else found[1]

    def moved(self, path: str, by: int) -> str:
        """The path of the same thing, so many blocks further on."""
        found = self._split(path)
        return path if found is None else f"{found[0]}{found[1] + by}{found[2]}"


def blocks_of_nodes(graph: Graph, paths: Paths) -> dict[fx.Node, int]:
    """For each node of a block the block's number: by its module or state; else by its operands; and for one that reads
    no block's values by its only readers."""
    found: dict[fx.Node, int] = {}
    modules = {provenance(node).module for node in graph.calls}
    last = max(number for path in modules if (number := paths.block(path)) is not None)
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            number = paths.block(str(node.meta["label"])) if node.meta["kind"] == "state" else None
        elif node.op == "output":
            continue
        else:
            number = paths.block(provenance(node).module)
            if number is None:
                number = _block_of_reader({each: found[each] for each in node.all_input_nodes if each in found}, last)
        if number is not None:
            found[node] = number
    for node in reversed(graph.fx.nodes):
        if node not in found and node.users:
            readers = {found.get(user) for user in node.users}
            if len(readers) == 1 and (only := readers.pop()) is not None:
                found[node] = only
    return found


def _block_of_reader(read: Mapping[fx.Node, int], last: int) -> int | None:
    """The block of a node that reads values of these blocks: that of the value written last. Values of the first and
    the last block say least, for all may read them; and what reads values of many blocks belongs to the end."""
    if len(read) < 2:
        return next(iter(read.values()), None)
    middle = {node: number for node, number in read.items() if 0 < number < last} or read
    if max(middle.values()) - min(middle.values()) > 1:
        return last
    return middle[max(middle)]  # fx compares nodes by their places


class Comparison:
    """Whether nodes do the same in two blocks.

    `same`       whether an operand in the one block stands for an operand in the other
    `renamed`    the path in the other block, by that in the one
    `constants`  the graph's
    """

    def __init__(
        self,
        same: Callable[[fx.Node, fx.Node], bool],
        renamed: Callable[[str], str],
        constants: Mapping[str, torch.Tensor],
    ) -> None:
        self._same, self._renamed, self._constants = same, renamed, constants

    def equal(self, one: Sequence[fx.Node], other: Sequence[fx.Node]) -> bool:
        """Whether all nodes of a block do what their twins do."""
        return len(one) == len(other) and all(map(self.twins, one, other))

    def twins(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether two nodes do the same: but for their names, and which stream of random numbers they draw from."""
        mine, theirs = one.meta, other.meta
        if mine["type"] is not theirs["type"] and mine["type"] != theirs["type"]:
            return False
        if _rest(mine) != _rest(theirs):
            return False
        if one.op == "placeholder":
            return other.op == "placeholder" and self._same_input(mine, theirs)
        return one.target is other.target and self._same_provenance(one, other) and self._same_arguments(one, other)

    def _same_input(self, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
        """Inputs themselves have no twins: they are nobody's. `kind` is equal."""
        if mine["kind"] == "constant":
            return torch.equal(self._constants[mine["label"]], self._constants[theirs["label"]])
        return bool(mine["kind"] == "state" and self._renamed(mine["label"]) == theirs["label"])

    def _same_provenance(self, one: fx.Node, other: fx.Node) -> bool:
        a, b = provenance(one), provenance(other)
        if a is b:
            return True
        same_line = a.source is b.source or a.source == b.source
        return same_line and a.backward == b.backward and self._renamed(a.module) == b.module

    def _same_arguments(self, one: fx.Node, other: fx.Node) -> bool:
        mine, theirs = args_of(one), args_of(other)
        if (stream := stream_of(one)) is not None:
            mine, theirs = ((*each[:stream], *each[stream + 1 :]) for each in (mine, theirs))
        if not self._same_values(mine, theirs):
            return False
        if not one.kwargs and not other.kwargs:
            return True
        return one.kwargs.keys() == other.kwargs.keys() and all(
            self._same_value(value, other.kwargs[key]) for key, value in one.kwargs.items()
        )

    def _same_values(self, mine: Sequence[Any], theirs: Sequence[Any]) -> bool:
        return len(mine) == len(theirs) and all(map(self._same_value, mine, theirs))

    def _same_value(self, x: Any, y: Any) -> bool:
        kind = type(x)
        if kind is fx.Node:
            return type(y) is fx.Node and self._same(x, y)
        if isinstance(x, (list, tuple)):
            return isinstance(y, (list, tuple)) and self._same_values(x, y)
        if kind is float:
            return type(y) is float and repr(x) == repr(y)  # nan is nan, and 0.0 is not -0.0
        return kind is type(y) and bool(x == y)


def _rest(meta: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a node's meta that has to be equal to its twin's."""
    if meta.keys() <= _COMPARED_APART:
        return {}
    return {key: value for key, value in meta.items() if key not in _COMPARED_APART}


def stream_of(node: fx.Node) -> int | None:
    """Which argument of a draw is the number of its stream; None for other nodes."""
    return STREAM.get(node.target) if isinstance(node.target, ops.MonarchOp) else None
