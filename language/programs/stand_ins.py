"""Stand-ins for numbers that change from call to call, such as a count that a program adds to, and for lists that it
appends to and never reads: with these at their places, one trace serves all numbers and lengths.

A place gets a stand-in once its number has changed, or its list has grown, between two calls, and so does an int among
the arguments. Where the program needs a number's value (as a size, a key or text), the trace is valid for that value
alone; after `_PINNED` such traces, and none that serves other values, the place keeps its number.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any, NamedTuple, cast

from monarch.compiler.tape import Expr, evaluate
from monarch.language.programs import containers, kinds
from monarch.language.programs.growing import Growing, GrowingList, Growth
from monarch.language.programs.guards import Guards, Seen
from monarch.language.programs.held import Attributes, Held, Slots
from monarch.language.programs.nodes import Live, Node, Path, Spot
from monarch.language.programs.snapshot import Snapshot
from monarch.language.recorder.recording import Recording
from monarch.language.recorder.scalar import Scalar
from monarch.language.recorder.scalar_int import ScalarInt
from monarch.language.tensors.tensor import DistributedTensor

_KINDS: tuple[type[Held], ...] = (
    Attributes,
    Slots,
    containers.Mapping,
    containers.Sequence,
    kinds.Function,
    kinds.Names,
)
"""The kinds of objects that can hold a stand-in."""
_PINNED = 3


class NotSymbolic(Exception):
    """A stand-in has got to where nothing follows it."""


class Place(NamedTuple):
    """Where a number or a list stands now. An argument has no holder."""

    path: Path
    kind: type[Held]
    holder: Any
    key: Any
    type: type


@dataclass
class KnownPlaces:
    """What is known of such places for the calls of one signature."""

    moving: set[Path] = field(default_factory=set)
    plain: set[Path] = field(default_factory=set)
    """Places at which a trace could not go on with a stand-in."""

    def give_up(self, paths: Set[Path]) -> None:
        """Give these places no stand-ins any more."""
        self.plain |= paths
        self.moving -= paths


def needless(traces: Sequence[tuple[Set[Path], Set[Path]]]) -> set[Path]:
    """The places for which stand-ins do not help. Of each trace that is remembered, these are the places that had
    stand-ins, and those of which it is valid for one value alone."""
    times = Counter(path for _, pinned in traces for path in pinned)
    free = {path for paths, pinned in traces for path in paths - pinned}
    return {path for path, count in times.items() if count >= _PINNED and path not in free}


class Moved(NamedTuple):
    """How Python differs from what a trace expects."""

    tensors: list[Path]
    """The places at which there is another tensor."""
    places: list[Place]
    """Those of numbers that change and of lists that grow, which may take stand-ins."""
    other: Path | None
    """The first of the other places that are not as expected."""


def moved(guards: Guards, arguments: list[Any], known: KnownPlaces) -> Moved:
    """Compare what stands at the places of guards now with what they expect."""
    tensors: list[Path] = []
    places: list[Place] = []
    other: Path | None = None
    holders: dict[int, Any] = {}
    for seen in guards.places(arguments):
        holders[id(seen.node)] = seen.holder
        number, at = seen.node.parent or (0, 0)
        node = guards.nodes[number]
        if _has_grown(seen, known) and _takes_stand_ins(node):
            places.append(Place(seen.path, node.kind, holders[id(node)], node.keys[at], list))
        elif seen.position is not None and _changes(seen, known):
            places.append(
                Place(seen.path, seen.node.kind, seen.holder, seen.node.keys[seen.position], type(seen.value))
            )
        elif not seen.is_expected and type(seen.value) is DistributedTensor:
            tensors.append(seen.path)
        elif not seen.is_expected:
            other = other or seen.path
    return Moved(tensors, places, other)


def _changes(seen: Seen, known: KnownPlaces) -> bool:
    """Whether a place takes a stand-in, and has another number than in the last trace or had a stand-in before."""
    node, kind = seen.node, type(seen.value)
    if kind not in (int, float, list) or not _takes_stand_ins(node) or seen.path in known.plain:
        return False
    return seen.path in known.moving or (not seen.is_expected and kind is type(node.plain.get(seen.position or 0)))


def _takes_stand_ins(node: Node) -> bool:
    return node.kind in _KINDS and (node.kind is not containers.Sequence or node.type is list)


def _has_grown(seen: Seen, known: KnownPlaces) -> bool:
    """Whether a list has more entries than in the last trace."""
    node = seen.node
    if seen.position is not None or node.type is not list or type(seen.holder) is not list or node.parent is None:
        return False
    return len(seen.holder) > node.length and seen.path not in known.plain


class StandIns:
    """The stand-ins of one trace, and where they stand."""

    def __init__(self, recording: Recording, snapshot: Snapshot) -> None:
        self._recording: Recording | None = recording
        self._snapshot = snapshot
        self._plain: dict[int, Any] = {}
        """The number or list for which each stand-in stands, by the stand-in's id."""
        self._symbols: dict[str, tuple[Place, Any]] = {}
        self._floats: dict[Expr, Scalar] = {}
        self._put: list[tuple[Place, Any, Any]] = []
        """Where each was put, with the number or list for which it stands."""
        self._cells: dict[int, str] = {}
        """The labels of variables that functions close over, by the id of their cells."""
        self.free: dict[tuple[int, Any], Callable[[Any], bool]] = {}
        """What is expected at the symbols' places, by the object's id and key."""
        self.spots: dict[str, Spot] = {}
        """Where a later call finds each number."""
        self.derived: list[tuple[str, Expr]] = []
        """The floats that each call computes of whole numbers before its step, by label."""
        self.values: dict[str, Any] = {}
        """All of these numbers now."""
        self._grown: list[Growth] = []

    def argument(self, label: str, number: int, value: int) -> ScalarInt:
        """What stands for an int that is the argument with this number."""
        symbol = ScalarInt(Expr("scalar", (label, "i64")), value, self)
        self._symbols[label] = Place(("argument", number), Held, None, None, int), symbol
        self._plain[id(symbol)] = self.values[label] = value
        return symbol

    def put(self, places: list[Place], passes: bool) -> set[Path]:
        """Have stand-ins at these places, and in what is noted of their objects; for lists only where no list or dict
        `passes` as an argument. Gives the paths of the places that have one."""
        recording = self._recording
        assert recording is not None
        taken: set[Path] = set()
        for place in sorted(places, key=lambda place: str(place.path)):
            held = self._held(place)
            if held is None or place.key not in held.before[0] or (isinstance(held, kinds.Names) and held.is_librarys):
                continue
            at = held.before[0].index(place.key)
            value = held.before[1][at]
            cell = _cell(place.holder, place.key)
            if id(cell) in self._cells:
                held.before[1][at] = self._symbols[self._cells[id(cell)]][1]
                taken.add(place.path)
                continue
            if type(value) is not place.type:
                continue
            label, number = f"number{len(self._symbols)}", cast("Any", value)
            if place.type is list:
                if passes or self._stands_twice(number):
                    continue
                symbol: Any = GrowingList(self.refuse)
                self._snapshot.held.pop(id(number), None)  # a long one is not looked through
                self._snapshot.note(Growing(symbol))
            elif place.type is int:
                symbol = ScalarInt(Expr("scalar", (label, "i64")), number, self)
            else:
                symbol = recording.scalar(label, number)
            self._plain[id(symbol)] = value
            self._symbols[label] = place, symbol
            if place.type is not list:
                self.values[label] = value
            if cell is not None:
                self._cells[id(cell)] = label
            self._put.append((place, symbol, value))
            held.before[1][at] = symbol
            place.kind.put(place.holder, place.key, symbol)
            taken.add(place.path)
        return taken

    def guard(self, expr: Expr, value: Any) -> None:
        """Note what has to hold for the trace to be valid at a later call."""
        if self._recording is not None:  # or the trace has ended, and left a symbol where nothing follows it
            self._recording.guard(expr, value)

    def refuse(self) -> None:
        """Note that code asks what a stand-in cannot answer."""
        if self._recording is not None:
            self._recording.needs_values = True

    def as_float(self, expr: Expr, value: float) -> Scalar:
        """The float that an expression of whole numbers is at each call: an input, which the call computes."""
        found = self._floats.get(expr)
        if found is None:
            assert self._recording is not None, "a symbol is asked for after its trace"
            label = f"number{len(self._symbols)}_{len(self.derived)}"
            found = self._floats[expr] = self._recording.scalar(label, value)
            self.derived.append((label, expr))
            self.values[label] = value
        return found

    def find(self) -> None:
        """Note where the symbols stand in all that the trace has met. Raises NotSymbolic for one that stands elsewhere,
        in an object that was met after the program had changed it."""
        for held, key in self._standing() if self._plain else ():
            value = dict(zip(*held.before, strict=True))[key]
            place = next(place for place, symbol in self._symbols.values() if symbol is value)
            here = held.holder is place.holder and type(held) is place.kind and key == place.key
            if not here and id(_cell(held.holder, key)) not in self._cells:
                raise NotSymbolic(str(key))
            self.free[id(held.holder), key] = _CHECKS[place.type]
        for value in self._plain.values():
            if id(value) in self._snapshot.held and type(value) is list:
                raise NotSymbolic("a list that another place has too")

    def follow(self, guards: Guards) -> None:
        """Find the places among those of guards. A number that is at none of them the program cannot have read."""
        for label, (place, _) in self._symbols.items():
            held = None if place.holder is None else self._held(place)
            number = None if held is None else guards.node_of.get(held.ident)
            if number is None or place.key not in guards.nodes[number].keys:
                continue
            spot = number, guards.nodes[number].keys.index(place.key)
            if place.type is list:
                guards.keep_apart(spot)
            else:
                self.spots[label] = spot

    def settle(self) -> None:
        """Give all places that still have their symbols the numbers for which these stand. To do it again changes
        nothing."""
        for held, key in self._standing() if self._plain else ():
            at = held.before[0].index(key)
            held.before[1][at] = self._plain[id(held.before[1][at])]
        for place, symbol, value in self._put:
            if place.kind.get(place.holder, place.key) is symbol:
                place.kind.put(place.holder, place.key, value)

    def grow(self) -> list[Growth]:
        """Give lists what was appended to their stand-ins."""
        for place, symbol in self._symbols.values():
            if place.type is list and symbol._appended:
                self._grown.append(Growth(self._plain[id(symbol)], [*symbol._appended]))
                self._grown[-1].make()
        return [*self._grown]

    def take_back(self) -> None:
        """Put all back to what it was before the trace. To do it again changes nothing."""
        self.settle()
        for growth in reversed(self._grown):
            growth.undo()

    def release(self) -> None:
        """Let go of what only the traced call needed."""
        self.values, self._grown, self._put = {}, [], []

    def close(self) -> None:
        """Let go of what only the trace needed, but for what `pinned` asks."""
        self._symbols = {label: (place._replace(holder=None), None) for label, (place, _) in self._symbols.items()}
        self._plain, self._cells, self._floats, self.free = {}, {}, {}, {}
        self._recording = None
        del self._snapshot

    def read(self, live: Live, scalars: dict[str, Any]) -> None:
        """Add the numbers of a call to the values of its symbols."""
        for label, spot in self.spots.items():
            scalars[label] = live[spot]
        for label, expr in self.derived:
            scalars[label] = evaluate(expr, scalars)

    @property
    def paths(self) -> set[Path]:
        """The places that have stand-ins."""
        return {place.path for place, _ in self._symbols.values()}

    def pinned(self, conditions: Iterable[tuple[Expr, Any]]) -> set[Path]:
        """The places of which a trace under these conditions is valid for one value alone."""
        derived = dict(self.derived)
        found: set[Path] = set()
        rest: list[Any] = [expr for expr, expected in conditions if type(expected) is not bool]
        while rest:
            expr = rest.pop()
            if not isinstance(expr, Expr):
                continue
            if expr.op != "scalar":
                rest += expr.args
            elif expr.args[0] in derived:
                rest.append(derived[expr.args[0]])
            elif expr.args[0] in self._symbols:
                found.add(self._symbols[expr.args[0]][0].path)
        return found

    def _stands_twice(self, value: Any) -> bool:
        found = (each for held in self._snapshot.held.values() for each in held.before[1] if each is value)
        return next(found, None) is not None and next(found, None) is not None

    def _standing(self) -> Iterator[tuple[Held, Any]]:
        for held in self._snapshot.held.values():
            for key, value in zip(*held.before, strict=True):
                if id(value) in self._plain:
                    yield held, key

    def _held(self, place: Place) -> Held | None:
        """The note of a place's object."""
        if place.kind is kinds.Names:
            self._snapshot.names(place.holder, (place.key,), ())
            return self._snapshot.held.get(kinds.Names(place.holder).ident)
        self._snapshot.visit(place.holder)
        return self._snapshot.held.get(id(place.holder))


def _cell(holder: Any, key: Any) -> Any:
    """The cell of a variable that a function closes over, which other functions may share."""
    if not isinstance(holder, FunctionType) or key not in holder.__code__.co_freevars:
        return None
    return (holder.__closure__ or ())[holder.__code__.co_freevars.index(key)]


def _is_list(value: Any) -> bool:
    return type(value) is list


def _is_int(value: Any) -> bool:
    return type(value) is int


def _is_float(value: Any) -> bool:
    return type(value) is float


_CHECKS = {int: _is_int, float: _is_float, list: _is_list}


def are_floats(value: Any) -> bool:
    """Whether it is a float, or has several."""
    return type(value) is float or (type(value) in (tuple, list) and all(type(entry) is float for entry in value))
