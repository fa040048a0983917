"""Unfold what passes made of a folded graph (`fold.py`): copy what became of a block for each block that was skipped.

Here blocks count from FIRST, which is 0; the skipped ones are 1 to n, and LAST is n + 1. A copy in block k reads what
FIRST reads, k blocks further on:

    %c = aten.mm(%b, %w3)           # FIRST, where %b is BEFORE's
    %d = aten.mm(%c, %w44)          # LAST
    -->
    %c = aten.mm(%b, %w3)
    %c4 = aten.mm(%c, %w4)
    %c5 = aten.mm(%c4, %w5)         # and so on
    %d = aten.mm(%c43, %w44)

That is right where FIRST and LAST became equal: LAST reads of FIRST the values that FIRST reads of BEFORE, and so would
a block between them. Everything else raises Unfit.

**Order.** Nodes of a block need not stand together: its forward ops, backward ops and updates are apart. A *run* is a
stretch of nodes of one role. Where a run of LAST has its twin, a run of FIRST with the same positions, somewhere in
front of it, then all from the twin up to it is one *period*, and the period behind it is the next block's. So the
period that begins there is written for each block from 1 to n + 1 instead of once:

    ... [FIRST forward] [LAST forward] ...          -->   0 [1 2 3 ... n+1]
    ... [LAST backward] [FIRST backward] ...        -->   n+1 [n ... 2 1 0]
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx
from torch.fx.node import map_arg

from monarch.compiler.graph import Graph, Provenance, args_of, provenance
from monarch.compiler.passes.equal_blocks import OWNERS, POSITION, Block, Comparison, stream_of
from monarch.compiler.passes.fold import BEFORE, BEHIND, FIRST, LAST, Fold, Unfit

_NAME = re.compile(r"%(\w+)")


def unfold(fold: Fold, made: Graph) -> Graph | None:
    """The whole graph, as the passes would have made it that made `made` of `fold.folded`; None where the blocks have
    not become equal."""
    try:
        return _Unfolding(fold, made).run()
    except Unfit:
        return None


@dataclass
class _Run:
    """Nodes that follow one another and belong to one block, or to none: then `role` is None. `positions` are theirs in
    their block, as the passes have left it."""

    role: int | None
    nodes: Block = field(default_factory=list)
    positions: list[int] = field(default_factory=list)


class _Unfolding:
    def __init__(self, fold: Fold, made: Graph) -> None:
        self.fold, self.made = fold, made
        self.new = made.empty_like()
        self.end = len(fold.skipped) + 1
        """LAST's number."""
        self.blocks: list[Block] = [[], [], [], []]
        """The nodes of `made` that the block of each role has."""
        self.place: dict[fx.Node, tuple[int, int]] = {}
        """For each of these its role and position."""
        self.runs = self.split()
        self.values: dict[fx.Node, fx.Node] = {}
        """For each node of `made` its node in the new graph: for copies in skipped blocks see `written`."""
        self.written: list[dict[int, fx.Node]] = [{} for _ in range(self.end + 1)]
        """The new graph's nodes of each block from FIRST to LAST, by position."""
        self.names = _Names(fold)
        self._provenance: dict[tuple[int, int], Provenance] = {}
        self._streams: dict[int, Mapping[int, int]] = {}

    def split(self) -> list[_Run]:
        runs: list[_Run] = []
        for node in self.made.fx.nodes:
            role = provenance(node).block
            if not runs or runs[-1].role != role:
                runs.append(_Run(role))
            runs[-1].nodes.append(node)
            if role is not None:
                position = len(self.blocks[role])
                runs[-1].positions.append(position)
                self.place[node] = role, position
                self.blocks[role].append(node)
        return runs

    def run(self) -> Graph:
        self.check_equal()
        starts = {(run.role, tuple(run.positions)): at for at, run in enumerate(self.runs)}
        at, repeated = 0, set[tuple[int, ...]]()
        while at < len(self.runs):
            run = self.runs[at]
            period = [] if tuple(run.positions) in repeated else self.period(at, starts)
            if period:
                self.write_for_each_block(period)
                repeated.update(tuple(each.positions) for each in period)
                at += len(period)
            else:
                self.write_run(run, self.end if run.role == LAST else 0)
                at += 1
        if any(len(block) != len(self.blocks[FIRST]) for block in self.written):
            raise Unfit
        return self.new

    # -- checks -------------------------------------------------------------------------------------------------------

    def check_equal(self) -> None:
        """Raise Unfit unless LAST has the same nodes as FIRST, and their neighbours the same operands."""
        before, first, last, behind = self.blocks
        by = self.fold.last - self.fold.first

        def same(one: fx.Node, other: fx.Node) -> bool:
            if one not in self.place:
                return one is other
            role, position = self.place[one]
            return role != BEHIND and self.place.get(other) == (role + 1, position)

        comparison = Comparison(same, lambda path: self.fold.paths.moved(path, by), self.made.constants)
        if not comparison.equal(first, last):
            raise Unfit
        for one, other in zip(first, last, strict=True):
            if one.meta.get(POSITION) != other.meta.get(POSITION):
                raise Unfit
            if (at := stream_of(one)) is not None and self.streams(by)[args_of(one)[at]] != args_of(other)[at]:
                raise Unfit
        for neighbour in (before, behind):
            if len(neighbour) != len(first) or not all(map(_give_the_same, neighbour, first)):
                raise Unfit

    def period(self, at: int, starts: Mapping[tuple[int | None, tuple[int, ...]], int]) -> list[_Run]:
        """The runs from this one on that are written once for each block: as many as there are from its twin up to it.
        None of them where it has no twin in front of it. `starts` are the runs' places."""
        run = self.runs[at]
        if run.role not in (FIRST, LAST):
            return []
        twin = FIRST + LAST - run.role
        start = starts.get((twin, tuple(run.positions)), at)
        period = self.runs[at : 2 * at - start] if start < at else []
        for earlier, later in zip(self.runs[start:at], period, strict=False):
            if earlier.role is None or later.role not in (FIRST, LAST) or earlier.positions != later.positions:
                raise Unfit
            if later.role - earlier.role != run.role - twin:
                raise Unfit
        return period

    # -- writing ------------------------------------------------------------------------------------------------------

    def write_for_each_block(self, period: Sequence[_Run]) -> None:
        """Write a period for its block, and for all on this side of its twin's."""
        role = period[0].role
        assert role is not None
        for number in range(1, self.end + 1) if role == LAST else range(self.end - 1, -1, -1):
            for run in period:
                assert run.role is not None
                self.write_run(run, number + run.role - role)

    def write_run(self, run: _Run, number: int) -> None:
        """Write a run; one of FIRST or LAST as it is in block `number`."""
        if run.role not in (FIRST, LAST):
            for node in run.nodes:
                self.write_outside(node)
            return
        like = self.blocks[LAST if number == self.end else FIRST]
        for position in run.positions:
            self.write_in_block(like[position], number)

    def write_outside(self, node: fx.Node) -> None:
        """A node that is neither FIRST's nor LAST's. Of these it may read its neighbour's values, and those in the
        lists that the traced graph had: any other might stand for a skipped block's."""
        if node.op == "output":
            self.new.output(*self.results())
            return
        target, owners = node.meta.get(OWNERS, (None, {}))
        if owners and target is not node.target:
            raise Unfit
        role = self.role(node)

        def single(value: fx.Node) -> fx.Node:
            of = self.role(value)
            if of in (FIRST, LAST) and (role, of) not in ((BEFORE, FIRST), (BEHIND, LAST)):
                raise Unfit
            return self.values[value]

        if node.op == "placeholder":
            copy = self.new.append_copy(node, self.values)
        else:
            args: Any = tuple(
                [
                    self.whole_list(entry, owners[at]) if at in owners else map_arg(entry, single)
                    for at, entry in enumerate(args_of(node))
                ]
            )
            kwargs: Any = map_arg(node.kwargs, single) if node.kwargs else {}
            copy = self.new.append(node.target, args, kwargs, node.name)
            copy.meta.update(node.meta)
        self.unmark(copy)
        self.values[node] = copy

    def role(self, node: fx.Node) -> int | None:
        return self.place[node][0] if node in self.place else None

    def whole_list(self, entries: Sequence[Any], owners: Sequence[int | None]) -> list[Any]:
        """A list with the values of all blocks that it had in the traced graph."""
        if len(entries) != len(owners):
            raise Unfit
        found = []
        for entry, owner in zip(entries, owners, strict=True):
            role = self.role(entry) if isinstance(entry, fx.Node) else None
            if owner is None:
                if role in (FIRST, LAST):
                    raise Unfit
                found.append(self.values[entry] if isinstance(entry, fx.Node) else entry)
            elif role != (LAST if owner == self.fold.last else FIRST):
                raise Unfit
            else:
                found.append(self.value(owner - self.fold.first, self.place[entry][1]))
        return found

    def value(self, number: int, position: int) -> fx.Node:
        if position not in self.written[number]:
            raise Unfit
        return self.written[number][position]

    def write_in_block(self, node: fx.Node, number: int) -> None:
        """A node of FIRST as it is in block `number`; of LAST, where that is LAST."""
        own, position = self.place[node]
        skipped = 0 < number < self.end

        def read(value: fx.Node) -> fx.Node:
            place = self.place.get(value)
            if place is not None and 0 <= (beside := number + place[0] - own) <= self.end:
                return self.value(beside, place[1])
            return self.values[value]

        name = self.names.of(node.name, number) if skipped else node.name
        if node.op == "placeholder":
            copy = self.new.append_placeholder(name)
        else:
            args: Any = map_arg(self.drawing(node, number) if skipped else node.args, read)
            kwargs: Any = map_arg(node.kwargs, read) if node.kwargs else {}
            copy = self.new.append(node.target, args, kwargs, name)
        copy.meta.update(node.meta)
        if skipped:
            self.rename(node, copy, number)
        else:
            self.unmark(copy)
            self.values[node] = copy
        self.written[number][position] = copy

    # -- what nodes carry ---------------------------------------------------------------------------------------------

    def unmark(self, copy: fx.Node) -> None:
        """Take from a node what folding has put there."""
        meta = copy.meta
        meta.pop(POSITION, None)
        meta.pop(OWNERS, None)
        if provenance(copy).block is not None:
            if copy.op == "placeholder":
                del meta["provenance"]
            else:
                meta["provenance"] = self.provenance(provenance(copy), 0)

    def rename(self, node: fx.Node, copy: fx.Node, number: int) -> None:
        """Let a copy of one of FIRST's nodes carry the paths and names of a skipped block."""
        meta = copy.meta
        position = meta.pop(POSITION, None)
        meta.pop(OWNERS, None)
        if node.op == "placeholder":
            del meta["provenance"]
            meta["label"] = self.fold.blocks[self.fold.first + number][position].meta["label"]
        else:
            meta["provenance"] = self.provenance(provenance(node), number)
        for key in ("why", "reason"):
            if (text := meta.get(key)) and "%" in text:
                meta[key] = _NAME.sub(lambda match: f"%{self.names.of(match[1], number)}", text)

    def provenance(self, of: Provenance, by: int) -> Provenance:
        """A provenance so many blocks further on, with no role. Nodes of one line share it."""
        key = id(of), by
        if key not in self._provenance:
            self._provenance[key] = replace(of, module=self.fold.paths.moved(of.module, by), block=None)
        return self._provenance[key]

    def drawing(self, node: fx.Node, number: int) -> tuple[Any, ...]:
        """A call's arguments, with the stream of random numbers that belongs to a block."""
        args = args_of(node)
        if (at := stream_of(node)) is None:
            return args
        return (*args[:at], self.streams(number)[args[at]], *args[at + 1 :])

    def streams(self, number: int) -> Mapping[int, int]:
        """The streams of a block, by FIRST's."""
        if number not in self._streams:
            first, block = (self.fold.blocks[self.fold.first + by] for by in (0, number))
            self._streams[number] = {
                args_of(one)[at]: args_of(other)[at]
                for one, other in zip(first, block, strict=True)
                if (at := stream_of(one)) is not None
            }
        return self._streams[number]

    # -- results ------------------------------------------------------------------------------------------------------

    def results(self) -> tuple[list[fx.Node | None], dict[str, fx.Node]]:
        fold = self.fold
        if any(each is not None and self.role(each) in (FIRST, LAST) for each in self.made.returns):
            raise Unfit
        updates = {label: self.update(label, fold.paths.block(label)) for label in fold.graph.updates}
        return [each and self.values[each] for each in self.made.returns], updates

    def update(self, label: str, number: int | None) -> fx.Node:
        """The new value of a state, which may be a block's."""
        fold, updates = self.fold, self.made.updates
        if number is not None and fold.first <= number <= fold.last:
            like = [updates.get(fold.paths.moved(label, to - number)) for to in (fold.first, fold.last)]
            return self.update_in_block(number - fold.first, *like)
        beside = {fold.first - 1: FIRST, fold.last + 1: LAST}.get(-1 if number is None else number)
        if label not in updates or self.role(updates[label]) not in (None, BEFORE, BEHIND, beside):
            raise Unfit
        return self.values[updates[label]]

    def update_in_block(self, number: int, first: fx.Node | None, last: fx.Node | None) -> fx.Node:
        """The new value of a block's state, from those of FIRST and LAST: values of their blocks, or of blocks next to
        these."""
        if first not in self.place or last not in self.place:
            raise Unfit
        role, position = self.place[first]
        if self.place[last] != (role + 1, position):
            raise Unfit
        beside = number + role - FIRST
        if 0 <= beside <= self.end:
            return self.value(beside, position)
        return self.values[first if number == 0 else last]


def _give_the_same(one: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes are results of the same op with the same type."""
    return (one.target is other.target or one.op == "placeholder") and one.meta["type"] == other.meta["type"]


class _Names:
    """The names of values in skipped blocks: those of the traced graph, with those that passes have added."""

    def __init__(self, fold: Fold) -> None:
        self._fold = fold
        self._traced = {node.name: position for position, node in enumerate(fold.blocks[fold.first])}
        self._parts: dict[str, tuple[int, str]] = {}

    def of(self, name: str, number: int) -> str:
        """The name in block `number` of the value that is called so in FIRST."""
        if name not in self._parts:
            known = name
            while known and known not in self._traced:
                known = known.rpartition("_")[0]
            self._parts[name] = self._traced.get(known, -1), name[len(known) :] if known else name
        position, added = self._parts[name]
        if position < 0:
            return name
        return self._fold.blocks[self._fold.first + number][position].name + added
