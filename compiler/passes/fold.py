"""Fold the equal blocks of a deep model to a few, so that passes need not look at each.

A pass that looks only at the neighbours of each op treats equal blocks equally. So passes run on a graph with eight of
them, and the result of one is copied for those that were left out (`unfold.py`). Of 48 blocks:

    traced      0 1 2 3 4 5 6 ... 42 43 44 45 46 47
    folded      0 1 2 3 44 45 46 47                         `fold`: 4 to 43 are skipped
    passes      0'1'2'3'44'45'46'47'
    unfolded    0'1'2'3'4'5'6'... 42'43'44'45'46'47'        `unfold`: a copy of 3' for each skipped block

Where a block that stays read its skipped neighbour, it reads the block that now stands there:

    %h4  = aten.mm(%h3, %w3)         # block 3 is FIRST
    %h5  = aten.mm(%h4, %w4)         # skipped, and so on
    %h45 = aten.mm(%h44, %w44)       # block 44 is LAST
    -->
    %h4  = aten.mm(%h3, %w3)
    %h45 = aten.mm(%h4, %w44)

The blocks from FIRST to LAST have to be *equal*: the same ops with the same types, on values of the block itself, of
the blocks next to it, and of no block. Those in front of FIRST and behind LAST may differ: passes treat nodes near the
rest of the program in other ways. Where a list has a value of each block (the gradients that are clipped), FIRST's
stands there for those of skipped blocks. Where anything does not fit, nothing is folded, and the passes run on the
whole graph. The partitioner checks that more blocks would have led to no other choice of layouts
(`partition/steady.py`).

Passes hand on which block a node belongs to with its provenance (`Provenance.block`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from monarch.compiler.graph import Graph, args_of, provenance
from monarch.compiler.passes.equal_blocks import (
    OWNERS,
    POSITION,
    Block,
    Comparison,
    Paths,
    blocks_of_nodes,
    list_of_most_blocks,
)

ENDS = 2
"""So many blocks at each end may become other than those between: passes look so far from the rest of the program."""
LEAST = 16
"""With fewer blocks most would stay, and little is won."""

BEFORE, FIRST, LAST, BEHIND = range(4)
"""The roles of the blocks that stay between those at the ends (`Provenance.block`): 2, 3, 44 and 45 of 48."""


class Unfit(Exception):
    """The blocks are not equal, or have not become so."""


def fold(graph: Graph) -> Fold | None:
    """A traced graph, folded; None where it has not enough equal blocks."""
    if graph.regions or graph.fragments or (path := list_of_most_blocks(graph, LEAST)) is None:
        return None
    try:
        return Fold(graph, Paths(path))
    except Unfit:
        return None


class Fold:
    """A graph whose equal blocks are folded.

    `graph`       with all blocks
    `folded`      with eight of them
    `blocks`      the nodes of `graph` that each block has
    `positions`   for each of these its position in its block
    `first`       the number of the block that is FIRST in `folded`, `last` of the one that is LAST; between them are
    `skipped`     the blocks that are left out
    `stands_for`  for the role that stands for several blocks, how many these are
    """

    def __init__(self, graph: Graph, paths: Paths) -> None:
        self.graph, self.paths = graph, paths
        self._block_of = blocks_of_nodes(graph, paths)
        count = 1 + max(self._block_of.values())
        self.blocks: list[Block] = [[] for _ in range(count)]
        self.positions: dict[fx.Node, int] = {}
        for node in graph.fx.nodes:
            if (number := self._block_of.get(node)) is not None:
                self.positions[node] = len(self.blocks[number])
                self.blocks[number].append(node)
        self.first, self.last = ENDS + 1, count - ENDS - 2
        self.skipped = range(self.first + 1, self.last)
        self._roles = {self.first - 1: BEFORE, self.first: FIRST, self.last: LAST, self.last + 1: BEHIND}
        self._check_equal()
        self.folded = self._fold()
        self.stands_for: dict[int | None, int] = {FIRST: 1 + len(self.skipped)}

    # -- are the blocks equal? ----------------------------------------------------------------------------------------

    def _check_equal(self) -> None:
        """Raise Unfit unless all blocks from `first` to `last` do the same, and change the same states."""
        updates: list[dict[str, fx.Node]] = [{} for _ in self.blocks]
        for label, node in self.graph.updates.items():
            if (number := self.paths.block(label)) is not None and number < len(updates):
                updates[number][self.paths.moved(label, -number)] = node
        for number in range(self.first + 1, self.last + 1):
            if not self._comparison(number).equal(self.blocks[self.first], self.blocks[number]):
                raise Unfit
            if not self._equal_updates(number, updates[self.first], updates[number]):
                raise Unfit

    def _comparison(self, number: int) -> Comparison:
        """Compares the block FIRST with another one."""
        moved: dict[str, str] = {}

        def renamed(path: str) -> str:
            if path not in moved:
                moved[path] = self.paths.moved(path, number - self.first)
            return moved[path]

        return Comparison(lambda one, other: self._same(number, one, other), renamed, self.graph.constants)

    def _same(self, number: int, one: fx.Node, other: fx.Node) -> bool:
        """Whether an operand of FIRST stands for this operand of block `number`."""
        of = self._block_of.get(one)
        if of is None or not -1 <= of - self.first <= 1:
            return one is other
        return self._block_of.get(other) == of + number - self.first and self.positions[one] == self.positions[other]

    def _equal_updates(self, number: int, mine: Mapping[str, fx.Node], theirs: Mapping[str, fx.Node]) -> bool:
        return mine.keys() == theirs.keys() and all(
            self._same(number, node, theirs[label]) for label, node in mine.items()
        )

    # -- folding ------------------------------------------------------------------------------------------------------

    def _fold(self) -> Graph:
        made = self.graph.empty_like()
        values: dict[fx.Node, fx.Node] = {}
        """For each node that stays its copy in the folded graph."""
        for node in self.graph.fx.nodes:
            number = self._block_of.get(node, -1)
            if number in self.skipped:
                continue
            if node.op == "output":
                made.output(*self._results(values))
                continue
            if any(self._block_of.get(each) in self.skipped for each in node.all_input_nodes):
                copy = made.append(node.target, *self._arguments(node, values), node.name)
                copy.meta.update(node.meta)
            else:
                copy = made.append_copy(node, values)
            self._mark(node, copy, self._roles.get(number))
            values[node] = copy
        return made

    def _mark(self, node: fx.Node, copy: fx.Node, role: int | None) -> None:
        """Note what unfolding will have to know of a node."""
        if role is not None:
            copy.meta["provenance"] = replace(provenance(node), block=role)
            copy.meta[POSITION] = self.positions[node]
        if role not in (FIRST, LAST) and (owners := self._owners(node)):
            copy.meta[OWNERS] = node.target, owners

    def _arguments(self, node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments of a call that reads skipped blocks: FIRST and LAST read each other for a skipped neighbour,
        and a list of another node has FIRST's value for each block that is skipped."""
        number = self._block_of.get(node, -1)
        beside = {self.last: (self.last - 1, self.first), self.first: (self.first + 1, self.last)}.get(number)

        def standing(value: fx.Node, in_list: bool) -> fx.Node:
            of = self._block_of.get(value)
            if of in self.skipped:
                if beside is None and not in_list or beside is not None and of != beside[0]:
                    raise Unfit
                value = self.blocks[self.first if beside is None else beside[1]][self.positions[value]]
            if value not in values:
                raise Unfit
            return values[value]

        def argument(entry: Any, in_list: bool = False) -> Any:
            if isinstance(entry, fx.Node):
                return standing(entry, in_list)
            if isinstance(entry, (list, tuple)):
                return [argument(each, True) for each in entry]
            return entry

        return tuple(map(argument, args_of(node))), {key: argument(each) for key, each in node.kwargs.items()}

    def _owners(self, node: fx.Node) -> dict[int, tuple[int | None, ...]]:
        """For each argument that is a list with values of blocks from FIRST to LAST: which block each entry is of, None
        for those that are of no such block."""
        found: dict[int, tuple[int | None, ...]] = {}
        equal = range(self.first, self.last + 1)

        def owner(entry: Any) -> int | None:
            number = self._block_of.get(entry) if isinstance(entry, fx.Node) else None
            return number if number in equal else None

        for at, entry in enumerate(args_of(node)):
            if isinstance(entry, (list, tuple)) and any(number is not None for number in map(owner, entry)):
                found[at] = tuple(map(owner, entry))
        return found

    def _results(self, values: Mapping[fx.Node, fx.Node]) -> tuple[list[fx.Node | None], dict[str, fx.Node]]:
        def is_skipped(node: fx.Node | None) -> bool:
            return node is not None and self._block_of.get(node) in self.skipped

        returns: Sequence[fx.Node | None] = self.graph.returns
        if any(map(is_skipped, returns)):
            raise Unfit
        updates = {label: values[node] for label, node in self.graph.updates.items() if not is_skipped(node)}
        return [each and values[each] for each in returns], updates
