"""What a program remembers of its calls: by signature, the traces that later calls may fit, and their plans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from monarch.language.programs.call import ProgramCall
from monarch.language.programs.named import Specialised
from monarch.language.programs.nodes import Live, Path
from monarch.language.programs.recorded import Trace
from monarch.language.programs.signature import without_ints
from monarch.language.programs.stand_ins import KnownPlaces, Place, moved, needless
from monarch.language.programs.variant import Compiled, Variant
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.mesh import Mesh

SIGNATURES, PLANS, VARIANTS = 256, 64, 8
"""How many signatures a program remembers, and of each how many plans and traces: those that were used last."""


class Remembered(NamedTuple):
    """How much of one signature a program remembers: `traces` that later calls may fit, and the `plans` they share."""

    traces: int
    plans: int


FAMILIES, MEMBERS = 64, 8
"""How many signatures with names a program remembers, and how many traces of each."""


class Entry:
    """What a program knows of one signature."""

    def __init__(self) -> None:
        self.variants: list[Variant] = []
        self.compiled: list[Compiled] = []
        self.moving: set[Path] = set()
        self.stand_ins = KnownPlaces()
        self.written = False
        """Whether the program changes tensors among its arguments in place."""
        self.again: dict[Path | None, int] = {}
        """How often the program was traced again for what is at a place."""

    def compare(self, leaves: list[Any], varying: set[tuple[str, str]]) -> tuple[Path | None, Path | None, list[Place]]:
        """Why no trace fits a call: the first place that is not as expected, a place whose tensor may be another and
        does not fit either, and the places that are to have stand-ins. Notes which tensors move, and adds to the
        hyperparameters that are known to vary."""
        last = self.variants[0]
        self.stand_ins.give_up(self.needless)
        tensors, places, place = moved(last.guards, leaves, self.stand_ins)
        stuck = next((path for path in tensors if path in self.moving), None)
        for variant in self.variants[1:]:  # the last call had other places, perhaps
            others = moved(variant.guards, leaves, self.stand_ins)
            tensors += others.tensors
            places += others.places
        self.moving.update(tensors)
        for path in (place or (), *(each.path for each in places if each.type is float)):
            for length in range(len(path)):
                if (hyperparameter := last.trace.fixed.get(path[: length + 1])) is not None:
                    varying.add(hyperparameter)
                    place = place or path
                    places = [each for each in places if each.path != path]
        self.stand_ins.moving.update(each.path for each in places)
        return place, stuck, places

    @property
    def needless(self) -> set[Path]:
        """The places for which stand-ins do not help."""
        return needless([(each.trace.stand_ins.paths, each.trace.pinned) for each in self.variants])


class MovingInts:
    """Which ints among a program's arguments are inputs. An int becomes one when its value changes between two calls,
    and stays one unless its traces need the value."""

    def __init__(self) -> None:
        self.numbers: frozenset[int] = frozenset()
        """The ints that are inputs, by number among the arguments' leaves."""
        self._first: dict[int, int] = {}
        """The first value of each int, by number."""
        self.given_up: set[int] = set()
        """Those that were inputs, or would have been."""

    def note(self, leaves: list[Any]) -> bool:
        """Note the ints of a call that no trace is known for. Gives whether some of them are inputs from now on."""
        before = self.numbers
        for number, leaf in enumerate(leaves):
            if type(leaf) is int and number not in self.given_up and self._first.setdefault(number, leaf) != leaf:
                self.numbers |= {number}
        return self.numbers != before

    def give_up(self, numbers: Iterable[int]) -> None:
        """Make these no inputs any more."""
        self.given_up.update(numbers)
        self.numbers -= self.given_up


class Families:
    """The traces of a program that serve all values of its named sizes, under conditions, by signature."""

    def __init__(self) -> None:
        self._known: dict[Any, list[Variant]] = {}

    def find(self, call: ProgramCall) -> tuple[Variant, tuple[Live, list[Cell], dict[str, float]]] | None:
        """A trace that serves a call's sizes, with a plan for them, and what the call reads."""
        values = call.values
        for variant in self._known.get(call.family, ()):
            template, scope = variant.compiled.template, variant.trace.scope
            if template is None or scope is None or not (scope.holds(values) and template.scope.holds(values)):
                continue
            found = variant.holds(call.leaves)
            if found is not None:
                return variant.at(variant.compiled.at(values)), found
        return None

    def compiled(self, call: ProgramCall, trace: Trace) -> Compiled | None:
        """The plan of an earlier trace with this graph, for a call's sizes."""
        for variant in self._known.get(call.family, ()):
            known = variant.compiled
            if known.template is not None and known.serves(trace) and known.template.scope.holds(call.values):
                return known.at(call.values)
        return None

    def keep(self, key: Any, variant: Variant) -> None:
        """Remember a trace."""
        known = self._known.pop(key, [])
        while len(self._known) >= FAMILIES:
            del self._known[next(iter(self._known))]
        alive = [each for each in known if not each.guards.dead]
        self._known[key] = [variant, *alive[: MEMBERS - 1]]

    def __iter__(self) -> Iterator[Variant]:
        return (variant for known in self._known.values() for variant in known)


class Memory:
    """What a program has learnt from its calls."""

    def __init__(self, mesh: Mesh | None) -> None:
        self.varying: set[tuple[str, str]] = set()
        self.ints = MovingInts()
        self.specialised = Specialised()
        self.forget(mesh)

    def forget(self, mesh: Mesh | None) -> None:
        """Begin anew, with the mesh that the program is given, if any."""
        self.entries: dict[Any, Entry] = {}
        self.last: tuple[Any, Entry] = None, Entry()
        """The signature that was called last, which is compared without its hash."""
        self.families = Families()
        self.resolved = mesh
        self.only: Mesh | None = None
        """The only mesh of the process when the program needed one: kept until it is closed."""
        self.lengthened = 0
        """How many traces have given a list or dict among the arguments another length."""
        self.others: set[Mesh] = set()
        """The meshes of traces of several: what was recorded on them outside of programs runs before a call."""

    def entry(self, key: Any) -> Entry:
        """The entry of a signature that is called for the first time. It has the plans of calls that differ in ints
        alone, and the traces of those whose ints were inputs."""
        entry, joined = Entry(), without_ints(key, self.ints.given_up)
        if key[-1] or self.ints.numbers:
            alike = [self.entries[other] for other in reversed(self.entries) if other[:-1] == key[:-1]]
            entry.compiled = [*dict.fromkeys(plan for each in alike for plan in each.compiled[:VARIANTS])][:VARIANTS]
        if joined in self.entries:
            entry.variants, entry.written = [*self.entries[joined].variants], self.entries[joined].written
        return entry
