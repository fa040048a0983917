"""Equal blocks, as the layers of a deep model are: passes run on a graph with few of them, and what became of one is
written for the others.

A traced graph of blocks 0, 1, ..., n is *folded* to one of eight:

    0   1   2   t   u   n-2   n-1   n

Those between t and u are left out; where t read the next of them it reads u, and where u read the last of them it reads
t. All of them have to do the same: the same ops with the same types on values of their own, of their neighbours, and of
what is no block's. The blocks at both ends may differ. Where a list has a value of each block, t's stands there for
those that are left out.

The passes then work on this graph as on any. What became of t and u is compared: where they differ in nothing but whose
values they read, a block between them is one that reads, of its neighbours, what u reads of t and t of u, and the graph
is *unfolded*: one such block is written for each that was left out, in the order in which t and u stand. Where anything
does not fit, there is no folded or no unfolded graph, and the passes run on the whole. The partitioner checks that more
blocks would have led to no other choice of layouts (`partition/steady.py`).

Passes tell us which block a node belongs to by handing on its provenance (`Provenance.block`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from monarch.compiler import ops
from monarch.compiler.graph import Graph, args_of, provenance

ENDS = 2
"""So many blocks at each end may become other than those between: what is in front of the first and behind the last is
felt as far."""
LEAST = 16
"""With fewer blocks most would stay, and little is won."""

BEFORE, FIRST, LAST, BEHIND = range(4)
"""The blocks that stay between those at the ends: 2, t, u, n-2."""

_STREAM: dict[Any, int] = {ops.random: 4, ops.sample: 3}
"""The argument that is the number of a draw's stream: each block has its own."""
_AT, _WHOSE = "at", "whose"
"""In the meta of a node, while blocks are folded: its number among those of its block; and whose values are in its
lists, with its op."""
_OWN = frozenset(("type", "provenance", "why", "reason", "named", "label", _AT, _WHOSE))
"""What of a node's meta is its own, or compared by itself."""
_NUMBERED = re.compile(r"(?<![^.\[])(\d+)(?![^.\]])")
_NAME = re.compile(r"%(\w+)")

Block = list[fx.Node]


class _Unfit(Exception):
    """The blocks are not equal, or have not become so."""


def fold(graph: Graph) -> Fold | None:
    """How to fold a traced graph; None where it has not enough equal blocks."""
    if graph.regions or graph.fragments or (stem := _stem_of(graph)) is None:
        return None
    try:
        return Fold(graph, _Paths(stem))
    except _Unfit:
        return None


class _Paths:
    """Paths of modules and labels of states, as those of a block: "blocks.3.norm" is number 3's of "blocks"."""

    def __init__(self, stem: str) -> None:
        self._form = re.compile(rf"(.*?(?<![^.\[]){re.escape(stem)}\.)(\d+)((?:[.\]].*)?)")
        self._parts: dict[str, tuple[str, int, str] | None] = {}

    def parts(self, path: str) -> tuple[str, int, str] | None:
        """What stands before the number, the number, and what stands behind; None where it is no block's."""
        if path not in self._parts:
            match = self._form.fullmatch(path)
            self._parts[path] = match and (match[1], int(match[2]), match[3])
        return self._parts[path]

    def number(self, path: str) -> int | None:
        found = self.parts(path)
        return None if found is None else found[1]

    def of(self, path: str, by: int) -> str:
        """The path of what is `by` blocks further on."""
        found = self.parts(path)
        return path if found is None else f"{found[0]}{found[1] + by}{found[2]}"


def _stem_of(graph: Graph) -> str | None:
    """The path of the list with the most blocks, if these are enough and numbered from 0."""
    numbers: dict[str, set[int]] = {}
    for path in {provenance(node).module for node in graph.calls}:
        for match in _NUMBERED.finditer(path):
            if match.start():
                numbers.setdefault(path[: match.start() - 1], set()).add(int(match[1]))
    stem, found = max(numbers.items(), key=lambda each: len(each[1]), default=("", set()))
    return stem if len(found) >= LEAST and found == set(range(len(found))) else None


class Fold:
    """A graph whose equal blocks are folded.

    `graph`       with all blocks
    `reduced`     with eight of them
    `stands_for`  for those that stand for several (`Provenance.block`), how many these are
    """

    def __init__(self, graph: Graph, paths: _Paths) -> None:
        self.graph, self._paths = graph, paths
        self._number = _numbers(graph, paths)
        self._at: dict[fx.Node, int] = {}
        count = 1 + max(self._number.values())
        self._blocks: list[Block] = [[] for _ in range(count)]
        for node in graph.fx.nodes:
            if (number := self._number.get(node)) is not None:
                self._at[node] = len(self._blocks[number])
                self._blocks[number].append(node)
        self._first, self._last = ENDS + 1, count - ENDS - 2
        self._left_out = range(self._first + 1, self._last)
        for number in range(self._first + 1, self._last + 1):
            self._compare(number)
        self.reduced = self._reduce()
        self.stands_for: dict[int | None, int] = {FIRST: 1 + len(self._left_out)}

    # -- the traced blocks ------------------------------------------------------------------------------------------

    def _compare(self, number: int) -> None:
        """Raise _Unfit unless a block is as the first one."""
        by, first, block = number - self._first, self._blocks[self._first], self._blocks[number]
        if len(first) != len(block):
            raise _Unfit
        number_of, at = self._number, self._at

        def same(one: fx.Node, other: fx.Node) -> bool:
            numbered = number_of.get(one)
            if numbered is None or abs(numbered - self._first) > 1:
                return one is other
            return number_of.get(other) == numbered + by and at[one] == at[other]

        for one, other in zip(first, block, strict=True):
            if not _alike(one, other, same, lambda path: self._paths.of(path, by), self.graph.constants):
                raise _Unfit

    # -- folding ----------------------------------------------------------------------------------------------------

    def _reduce(self) -> Graph:
        graph, left_out = self.graph, self._left_out
        made = graph.empty_like()
        kept = {self._first - 1: BEFORE, self._first: FIRST, self._last: LAST, self._last + 1: BEHIND}
        values: dict[fx.Node, fx.Node] = {}
        for node in graph.fx.nodes:
            number = self._number.get(node, -1)
            if number in left_out:
                continue
            if node.op == "output":
                made.output(*self._results(values))
                continue
            if any(self._number.get(each) in left_out for each in node.all_input_nodes):
                copy = made.append(node.target, *self._arguments(node, values), node.name)
                copy.meta = dict(node.meta)
            else:
                copy = made.append_copy(node, values)
                copy.meta = dict(copy.meta)
            if number in kept:
                copy.meta["provenance"] = replace(provenance(node), block=kept[number])
                copy.meta[_AT] = self._at[node]
            if kept.get(number) not in (FIRST, LAST) and (whose := self._lists_of(node)):
                copy.meta[_WHOSE] = node.target, whose
            values[node] = copy
        return made

    def _arguments(self, node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> tuple[Any, Any]:
        """The arguments of a call that reads blocks that are left out."""
        first, last = self._first, self._last
        beside = {last: (last - 1, first), first: (first + 1, last)}.get(self._number.get(node, -1))

        def kept(value: fx.Node, listed: bool) -> fx.Node:
            found = self._number.get(value)
            if found in self._left_out:
                if beside is None and not listed or beside is not None and found != beside[0]:
                    raise _Unfit
                value = self._blocks[first if beside is None else beside[1]][self._at[value]]
            if value not in values:
                raise _Unfit
            return values[value]

        def argument(entry: Any, listed: bool = False) -> Any:
            if isinstance(entry, fx.Node):
                return kept(entry, listed)
            if isinstance(entry, (list, tuple)):
                return [argument(each, True) for each in entry]
            return entry

        return tuple(map(argument, args_of(node))), {key: argument(each) for key, each in node.kwargs.items()}

    def _lists_of(self, node: fx.Node) -> dict[int, tuple[int | None, ...]]:
        """For each argument that is a list with values of t, u, or a block between them: whose they are."""
        found = {}
        between = range(self._first, self._last + 1)
        for at, entry in enumerate(args_of(node)):
            if isinstance(entry, (list, tuple)) and any(self._number.get(each) in between for each in _nodes_of(entry)):
                numbers = [self._number.get(each) if isinstance(each, fx.Node) else None for each in entry]
                found[at] = tuple([number if number in between else None for number in numbers])
        return found

    def _results(self, values: Mapping[fx.Node, fx.Node]) -> tuple[list[fx.Node | None], dict[str, fx.Node]]:
        returns = self.graph.returns
        if any(self._number.get(each) in self._left_out for each in returns if each is not None):
            raise _Unfit
        updates = {
            label: values[node]
            for label, node in self.graph.updates.items()
            if self._number.get(node) not in self._left_out
        }
        return [each and values[each] for each in returns], updates

    # -- unfolding --------------------------------------------------------------------------------------------------

    def unfold(self, made: Graph) -> Graph | None:
        """The whole graph as the passes have it that made `made` of the reduced one; None where the blocks have not
        become equal."""
        try:
            return _Unfolding(self, made).run()
        except _Unfit:
            return None


def _nodes_of(entry: Sequence[Any]) -> list[fx.Node]:
    return [each for each in entry if isinstance(each, fx.Node)]


def _numbers(graph: Graph, paths: _Paths) -> dict[fx.Node, int]:
    """For each node the block that it belongs to: that of its module or state; otherwise that of what it reads, of
    several the one written last; and for what reads no block's values that of its only readers."""
    found: dict[fx.Node, int] = {}
    modules = {provenance(node).module for node in graph.calls}
    last = max(number for path in modules if (number := paths.number(path)) is not None)
    for node in graph.fx.nodes:
        if node.op == "placeholder":
            number = paths.number(str(node.meta["label"])) if node.meta["kind"] == "state" else None
        elif node.op == "output":
            continue
        else:
            number = paths.number(provenance(node).module)
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
    """The block of what reads values of these. What is read of the ends may be read by all, and says least; and what
    reads of many blocks is none of theirs: it is counted to the end."""
    if len(read) < 2:
        return next(iter(read.values()), None)
    middle = {node: number for node, number in read.items() if 0 < number < last} or read
    if max(middle.values()) - min(middle.values()) > 1:
        return last
    return middle[max(middle)]  # fx compares nodes by their places


def _alike(
    one: fx.Node,
    other: fx.Node,
    same: Callable[[fx.Node, fx.Node], bool],
    renamed: Callable[[str], str],
    constants: Mapping[str, torch.Tensor],
) -> bool:
    """Whether two nodes do the same to values that are the `same`; `renamed` gives the path that the other's has to
    be."""
    if one.target is not other.target and one.op != "placeholder":
        return False
    mine, theirs = one.meta, other.meta
    if mine["type"] != theirs["type"] or _shared(mine) != _shared(theirs):
        return False
    if one.op == "placeholder":
        return other.op == "placeholder" and _same_input(one, other, renamed, constants)
    a, b = provenance(one), provenance(other)
    if a is not b and (a.backward != b.backward or a.source != b.source or renamed(a.module) != b.module):
        return False

    def equal(x: Any, y: Any) -> bool:
        if isinstance(x, fx.Node):
            return isinstance(y, fx.Node) and same(x, y)
        if isinstance(x, (list, tuple)):
            return isinstance(y, (list, tuple)) and len(x) == len(y) and all(map(equal, x, y))
        if isinstance(x, float):
            return type(x) is type(y) and repr(x) == repr(y)
        return type(x) is type(y) and bool(x == y)

    xs, ys = args_of(one), args_of(other)
    if (stream := _STREAM.get(one.target)) is not None:
        xs, ys = ((*each[:stream], *each[stream + 1 :]) for each in (xs, ys))
    if len(xs) != len(ys) or not all(map(equal, xs, ys)):
        return False
    return one.kwargs.keys() == other.kwargs.keys() and all(
        equal(x, other.kwargs[key]) for key, x in one.kwargs.items()
    )


def _shared(meta: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in meta.items() if key not in _OWN}


def _same_input(
    one: fx.Node, other: fx.Node, renamed: Callable[[str], str], constants: Mapping[str, torch.Tensor]
) -> bool:
    mine, theirs = one.meta["label"], other.meta["label"]
    if one.meta["kind"] == "constant":
        return torch.equal(constants[mine], constants[theirs])
    return bool(one.meta["kind"] == "state" and renamed(mine) == theirs)


@dataclass
class _Run:
    """Nodes that follow one another and belong to one block; `mark` is -1 for all others. `numbers` are those of the
    nodes in their block."""

    mark: int
    nodes: Block = field(default_factory=list)
    numbers: list[int] = field(default_factory=list)


class _Unfolding:
    def __init__(self, fold: Fold, made: Graph) -> None:
        self.fold, self.made = fold, made
        self.count = len(fold._left_out)
        self.marked: list[Block] = [[], [], [], []]
        self.place: dict[fx.Node, tuple[int, int]] = {}
        """For each node of these four blocks which it is, and its number among the block's."""
        self.runs: list[_Run] = []
        for node in made.fx.nodes:
            block = provenance(node).block
            mark = -1 if block is None else block
            if not self.runs or self.runs[-1].mark != mark:
                self.runs.append(_Run(mark))
            self.runs[-1].nodes.append(node)
            if block is not None:
                self.runs[-1].numbers.append(len(self.marked[block]))
                self.place[node] = block, len(self.marked[block])
                self.marked[block].append(node)
        self.stands = {(run.mark, tuple(run.numbers)): at for at, run in enumerate(self.runs)}
        """Where each run stands among all."""
        self.new = made.empty_like()
        self.values: dict[fx.Node, fx.Node] = {}
        """What each node of `made` has become."""
        self.written: list[dict[int, fx.Node]] = [{} for _ in range(self.count + 2)]
        """The nodes of t, of the blocks behind it, and of u, by their numbers in their block."""
        self._traced = {node.name: at for at, node in enumerate(fold._blocks[fold._first])}
        self._stems: dict[str, tuple[int, str]] = {}
        self._streams: dict[int, Mapping[int, int]] = {}

    def run(self) -> Graph:
        self.compare()
        at, repeated = 0, set[tuple[int, ...]]()
        while at < len(self.runs):
            run = self.runs[at]
            period = [] if tuple(run.numbers) in repeated else self.period(at)
            if not period:
                self.write_run(run, 0 if run.mark == FIRST else self.count + 1)
                at += 1
                continue
            numbers = range(1, self.count + 2) if run.mark == LAST else range(self.count, -1, -1)
            for number in numbers:
                for each in period:
                    self.write_run(each, number + each.mark - run.mark)
            repeated.update(tuple(each.numbers) for each in period)
            at += len(period)
        if any(len(block) != len(self.marked[FIRST]) for block in self.written):
            raise _Unfit
        return self.new

    # -- what became of the blocks ----------------------------------------------------------------------------------

    def compare(self) -> None:
        """Raise _Unfit unless u has become what t has, and what they read of their neighbours is so too."""
        before, first, last, behind = self.marked
        if len({*map(len, self.marked)}) != 1:
            raise _Unfit
        paths, place, by = self.fold._paths, self.place, self.fold._last - self.fold._first

        def same(one: fx.Node, other: fx.Node) -> bool:
            mark, at = place.get(one, (None, 0))
            if mark is None or mark == BEHIND:
                return one is other and mark is None
            return place.get(other) == (mark + 1, at)

        for one, other in zip(first, last, strict=True):
            if not _alike(one, other, same, lambda path: paths.of(path, by), self.made.constants):
                raise _Unfit
            if one.meta.get(_AT) != other.meta.get(_AT):
                raise _Unfit
            if (at := _STREAM.get(one.target)) is not None and self.streams(by)[args_of(one)[at]] != args_of(other)[at]:
                raise _Unfit
        for ends, own in ((before, first), (behind, last)):
            for one, other in zip(ends, own, strict=True):
                if one.target is not other.target and one.op != "placeholder" or one.meta["type"] != other.meta["type"]:
                    raise _Unfit

    def period(self, at: int) -> list[_Run]:
        """The runs that are written once for each block from this one on: as many as there are from the run of t that
        is as this one of u, or the run of u that is as this one of t. None of them where that comes later."""
        run = self.runs[at]
        other = FIRST + LAST - run.mark
        start = self.stands.get((other, tuple(run.numbers)), at) if other in (FIRST, LAST) else at
        period = self.runs[at : 2 * at - start] if start < at else []
        for earlier, later in zip(self.runs[start:at], period, strict=False):
            step = later.mark - earlier.mark
            if later.mark not in (FIRST, LAST) or step != run.mark - other or earlier.numbers != later.numbers:
                raise _Unfit
        return period

    # -- writing ----------------------------------------------------------------------------------------------------

    def write_run(self, run: _Run, number: int) -> None:
        """A run as it is in the block that is `number` behind t."""
        like = self.marked[LAST if number == self.count + 1 else FIRST]
        for node in run.nodes:
            if run.mark in (FIRST, LAST):
                self.write_block(like[self.place[node][1]], number)
            else:
                self.write(node)

    def write(self, node: fx.Node) -> None:
        """A node that is neither t's nor u's. Of these it may read its neighbour's values, and those in the lists that
        the traced graph had: any other may have come to stand for a block's that was left out."""
        if node.op == "output":
            self.new.output(*self.results())
            return
        target, whose = node.meta.get(_WHOSE, (None, {}))
        mark = provenance(node).block
        if whose and target is not node.target:
            raise _Unfit

        def single(value: fx.Node) -> fx.Node:
            of = self.mark(value)
            if of in (FIRST, LAST) and (mark, of) not in ((BEFORE, FIRST), (BEHIND, LAST)):
                raise _Unfit
            return self.values[value]

        if not whose and all(self.mark(each) is None for each in node.all_input_nodes):
            self.values[node] = self.copied(node, self.new.append_copy(node, self.values))
            return
        args = [
            self.listed(entry, whose[at]) if at in whose else map_arg(entry, single)
            for at, entry in enumerate(args_of(node))
        ]
        kwargs: Any = map_arg(node.kwargs, single)
        self.values[node] = self.copied(node, self.new.append(node.target, tuple(args), kwargs, node.name))

    def mark(self, node: fx.Node) -> int | None:
        return self.place[node][0] if node in self.place else None

    def listed(self, entry: Sequence[Any], whose: Sequence[int | None]) -> list[Any]:
        """A list with the values of the blocks that it had traced."""
        found = []
        if len(entry) != len(whose):
            raise _Unfit
        for each, number in zip(entry, whose, strict=True):
            mark = self.mark(each) if isinstance(each, fx.Node) else None
            if number is None:
                if mark in (FIRST, LAST):
                    raise _Unfit
                found.append(self.values[each] if isinstance(each, fx.Node) else each)
            elif mark != (LAST if number == self.fold._last else FIRST):
                raise _Unfit
            else:
                found.append(self.value(number - self.fold._first, self.place[each][1]))
        return found

    def copied(self, node: fx.Node, copy: fx.Node) -> fx.Node:
        copy.meta = {key: value for key, value in node.meta.items() if key not in (_AT, _WHOSE)}
        if provenance(node).block is not None:
            copy.meta["provenance"] = replace(provenance(node), block=None)
            if node.op == "placeholder":
                del copy.meta["provenance"]
        return copy

    def value(self, number: int, at: int) -> fx.Node:
        if at not in self.written[number]:
            raise _Unfit
        return self.written[number][at]

    def write_block(self, node: fx.Node, number: int) -> None:
        """A node of t as it is in the block that is `number` behind it; one of u, where that is u."""
        mark, at = self.place[node]

        def read(value: fx.Node) -> fx.Node:
            of, place = self.place.get(value, (None, 0))
            beside = number if of is None else number + of - mark
            if of is None or not 0 <= beside < len(self.written):
                return self.values[value]
            return self.value(beside, place)

        if number in (0, self.count + 1):
            name, args = node.name, node.args
        else:
            name, args = self.name(node.name, number), self.drawing(node, number)
        if node.op == "placeholder":
            copy = self.new.fx.placeholder(name)
        else:
            kwargs: Any = map_arg(node.kwargs, read) if node.kwargs else {}
            mapped: Any = map_arg(args, read)
            copy = self.new.append(node.target, mapped, kwargs, name)
        self.copied(node, copy)
        if number in (0, self.count + 1):
            self.values[node] = copy
        else:
            self.rename(node, copy, number)
        self.written[number][at] = copy

    def rename(self, node: fx.Node, copy: fx.Node, by: int) -> None:
        """Let a copy of one of t's nodes carry the paths of its own block."""
        of, paths, meta = provenance(node), self.fold._paths, copy.meta
        if node.op == "placeholder":
            meta["label"] = self.fold._blocks[self.fold._first + by][node.meta[_AT]].meta["label"]
        else:
            meta["provenance"] = replace(of, module=paths.of(of.module, by), block=None)
        for key in ("why", "reason"):
            if text := meta.get(key):
                meta[key] = _NAME.sub(lambda match: f"%{self.name(match[1], by)}", text)

    def drawing(self, node: fx.Node, by: int) -> tuple[Any, ...]:
        """A call's arguments, with the stream of random numbers that belongs to a block."""
        args = args_of(node)
        if (at := _STREAM.get(node.target)) is None:
            return args
        return (*args[:at], self.streams(by)[args[at]], *args[at + 1 :])

    def streams(self, by: int) -> Mapping[int, int]:
        """The streams of a block, by those of t."""
        if by not in self._streams:
            first, block = (self.fold._blocks[self.fold._first + number] for number in (0, by))
            self._streams[by] = {
                args_of(one)[_STREAM[one.target]]: args_of(other)[_STREAM[one.target]]
                for one, other in zip(first, block, strict=True)
                if one.target in _STREAM
            }
        return self._streams[by]

    def name(self, name: str, by: int) -> str:
        """What one of t's values is called in another block: what it was called there, with what passes have added."""
        if name not in self._stems:
            known = name
            while known and known not in self._traced:
                known = known.rpartition("_")[0]
            self._stems[name] = self._traced.get(known, -1), name[len(known) :] if known else name
        at, rest = self._stems[name]
        if at < 0:
            return name
        return self.fold._blocks[self.fold._first + by][at].name + rest

    def results(self) -> tuple[list[fx.Node | None], dict[str, fx.Node]]:
        paths, updates = self.fold._paths, self.made.updates
        first, last = self.fold._first, self.fold._last
        found: dict[str, fx.Node] = {}
        for label in self.fold.graph.updates:
            number = paths.number(label)
            if number is not None and first <= number <= last:
                like = [updates.get(paths.of(label, to - number)) for to in (first, last)]
                found[label] = self.update(number - first, *like)
                continue
            beside = {first - 1: FIRST, last + 1: LAST}.get(-1 if number is None else number)
            if label not in updates or self.mark(updates[label]) not in (None, BEFORE, BEHIND, beside):
                raise _Unfit
            found[label] = self.values[updates[label]]
        if any(each is not None and self.mark(each) in (FIRST, LAST) for each in self.made.returns):
            raise _Unfit
        return [each and self.values[each] for each in self.made.returns], found

    def update(self, number: int, first: fx.Node | None, last: fx.Node | None) -> fx.Node:
        """What a state of the block becomes that is `number` behind t, from what those of t and of u become: values of
        their blocks, or of the neighbours of these."""
        if first not in self.place or last not in self.place:
            raise _Unfit
        mark, at = self.place[first]
        if self.place[last] != (mark + 1, at):
            raise _Unfit
        beside = number + mark - FIRST
        if 0 <= beside < len(self.written):
            return self.value(beside, at)
        return self.values[first if number == 0 else last]
