"""Guards: what must still be so in Python for a trace to say what a program does at this call.

A guard is a place and an expectation. Places are reached as the program reaches them, from its function, the globals
that its code names and its arguments: so guards hold nothing of the user's alive, and a `Guards` whose objects are gone
is dead. Plain values are expected to be equal and of the same type, other objects to be the same; of a container the
entries are expected, and it may be another container with the same ones. A tensor at a *moving* place may be any of the
same type: the program reads the one that is there.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from monarch.compiler.errors import ArgumentWritten, Source
from monarch.language.programs import containers, native
from monarch.language.programs.checks import Found, compile_check
from monarch.language.programs.classify import OPAQUE, kind_of
from monarch.language.programs.containers import HAS_CLASS, Own
from monarch.language.programs.entered import Entered
from monarch.language.programs.held import PLAIN, Attributes, Contents, Held, Slots
from monarch.language.programs.kinds import ASKED, CLASS_MACHINERY, TOLD, Class, Function, Names, Tensor
from monarch.language.programs.nodes import MODULE, Aliases, Key, Live, Node, Path, Spot
from monarch.language.programs.own import INTERNAL
from monarch.language.programs.settings import Set
from monarch.language.programs.snapshot import Snapshot
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor, Ref

_CHANGEABLE = (list, dict, set, collections.deque)
"""Containers of which it matters whether two places have the same one."""
_MOST_AGAIN = 10_000
"""So many places are looked into whose tuple (a partial, a bound method) another place has too."""
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_OFTEN = 3
"""After so many checks that hold, they become one function."""


@dataclass(frozen=True)
class Moving:
    """A tensor that may be another of the same type at each call."""

    dtype: torch.dtype
    shape: torch.Size
    views: tuple[Any, ...]
    read: frozenset[str]
    """The attributes that the program may read: it has none of these."""

    __name__ = "moving"

    @staticmethod
    def like(tensor: DistributedTensor, ref: Ref, entered: Entered) -> Moving:
        return Moving(tensor.dtype, tensor.shape, views_of(ref), frozenset(entered.attributes - INTERNAL))

    def __call__(self, value: Any) -> bool:
        return (
            type(value) is DistributedTensor
            and value.dtype is self.dtype
            and value.shape == self.shape
            and not value.requires_grad
            and views_of(value._ref) == self.views
            and self.read.isdisjoint(value.__dict__)
        )


def views_of(ref: Ref) -> tuple[Any, ...]:
    """How a tensor reads its storage, from the outermost view to the storage itself."""
    if ref.parent is None:
        return ()
    return (ref.view, tuple(ref.fake.shape), *views_of(ref.parent))


def _is_distributed(value: Any) -> bool:
    return type(value) is DistributedTensor


def _weakly(value: Any) -> Any:
    """A weak reference to the object that a method is bound to, where it allows any."""
    try:
        return weakref.ref(value)
    except TypeError:
        return value


class Seen(NamedTuple):
    """What stands at a place now; without a position, an object that has another shape than it had."""

    path: Path
    node: Node
    position: int | None
    holder: Any
    value: Any
    is_expected: bool


class Guards:
    """The expectations of one trace."""

    def __init__(
        self,
        snapshot: Snapshot,
        entered: Entered,
        roots: list[tuple[Path, Any]],
        free: Mapping[tuple[int, Any], Callable[[Any], bool]],
        moving: set[Path],
        written: set[tuple[int, Any]],
        states: set[int],
    ) -> None:
        """`roots` are the function and the arguments that are looked into (as ("argument", number)); `free` has the
        entries, by their object's id and key, that a program reads at each call, and what each has to be; `moving` the
        places where tensors were seen to change; `written` the entries that the trace gave another tensor; `states` the
        cells, by id, that the graph reads."""
        self._snapshot = snapshot
        self._states = states
        self._written = written
        self.entered = entered
        self._library = entered.library
        entered.note_imports()
        self.unproven: tuple[str, Source | None] | None = entered.unknown
        self.dead = False
        self._fast: Callable[[list[Any]], Found | None] | None = None
        self._is_long = False
        """Whether native code shall look at most places, and has not been built when `_fast` was written."""
        self._checked = 0
        self._used: set[Spot] = set()
        self.states: list[Spot] = []
        """The places of the tensors that the graph reads."""
        self._which: list[Any] | None = None
        """Where arguments stand in Python too, if code may have asked which objects they are."""
        self._told_anyway = False
        """Whether distributed arguments are read as what the program closes over is, and so need no more guards."""
        self._by_parts = False
        """Whether some of them are compared by their parts, as tuples are."""
        self._free = free
        self._moving = moving
        if snapshot.full:
            self._say("more Python objects than can be looked at", None)
        self._build(roots)
        for first, *others in self._places.values():
            self._aliases.cells += [(first, spot) for spot in others]
        self._check_codes()
        self._library.classes(
            {
                held.holder if isinstance(held, Class) else type(held.holder)
                for held in snapshot.held.values()
                if isinstance(held, (Attributes, Slots, Class, Own))
            }
        )

    # -- building ------------------------------------------------------------------------------------------------

    def _say(self, what: str, source: Source | None) -> None:
        if self.unproven is None:
            self.unproven = what, source

    def _build(self, roots: list[tuple[Path, Any]]) -> None:
        self.nodes: list[Node] = []
        self._known = self.entered.reads.within(self._snapshot.held)
        self._untold = {key for key in TOLD if key[1:] not in self.entered.attributes}
        self.node_of: dict[int, int] = {}
        self.spot_of: dict[int, Spot] = {}
        self._places: dict[int, list[Spot]] = {}
        self._watched: dict[int, weakref.ref[Any] | None] = {}
        self._codes: set[int] = set()
        self._aliases = Aliases()
        self._namespaces = sum(isinstance(held.holder, SimpleNamespace) for held in self._snapshot.held.values())
        of_dicts = [held for held in self._snapshot.held.values() if isinstance(held, (containers.Mapping, Own))]
        keys = (key for held in of_dicts for key in held.before[0])
        self._keyed = {type(key() if isinstance(key, weakref.ref) else key) for key in keys}
        """The classes of keys, of which a look-up asks which they are."""
        queue: list[tuple[Held, Path, Spot | None, Any]] = []
        self._values: set[Spot] = set()
        for path, value in roots:
            held = self._snapshot.held.get(id(value))
            if held is not None:
                root = path[1] if path[0] == "argument" else _weakly(value) if path[0] == "self" else value
                queue.append((held, path, None, root))
            elif kind_of(value) == OPAQUE:
                self._say(f"an argument is a {type(value).__name__}, whose state Python does not show", None)
        for held in list(self._snapshot.held.values()):
            if isinstance(held, Names) and isinstance(held.holder, dict):
                name = held.holder.get("__name__", "globals")
                queue.append((held, (name,), None, held.holder))
            elif isinstance(held, Set):
                queue.append((held, (min(held.holder.names),), None, held.holder))
        at = 0
        while at < len(queue):
            held, path, spot, root = queue[at]
            at += 1
            if held.ident in self.node_of and spot not in self._values:
                continue
            self._node(held, path, spot, root, queue)

    def _node(self, held: Held, path: Path, parent: Spot | None, root: Any, queue: list[Any]) -> None:
        number = len(self.nodes)
        self.node_of.setdefault(held.ident, number)
        keys, values = self._read(held)
        shown = [key if type(key) in PLAIN else Key(key) for key in keys]
        node = Node(type(held), type(held.holder), path, parent, root, shown, len(held.before[0]))
        node.is_weak = parent is None and type(root) is weakref.ref and root is not held.holder
        self.nodes.append(node)
        if isinstance(held, (Attributes, Slots)) and not self._reads_all(held):
            names = self._names(held)
            node.absent = frozenset(names.difference(held.before[0]))
            node.others = [key for key in held.before[0] if key not in names]
        if isinstance(held, Attributes):
            node.is_ordered = self._reads_all(held)
        if isinstance(held, Tensor):
            node.reads_grad = self.entered.reads_grad
        if isinstance(held, Names):
            node.length = len(vars(held.holder)) if self.entered.computes and held.is_users_own else 0
        if isinstance(held, Class):
            node.absent = frozenset(self.entered.attributes.difference(held.before[0], CLASS_MACHINERY))
            hidden = len(CLASS_MACHINERY.intersection(vars(held.holder)))
            node.others = sorted(set(held.before[0]).difference(keys, TOLD))
            node.length = len(held.before[0]) - len(TOLD) + hidden
        if isinstance(held, Function):
            node.length = len(held.before[0])
            self._codes.add(id(held.holder.__code__))
        for position, (key, value) in enumerate(zip(keys, values, strict=True)):
            node.ids.append(id(value))
            if type(key) not in PLAIN:
                self._watch(node, key)
            self._expect(node, (number, position), held, key, value, queue)
        kind = held.holder if isinstance(held, Class) else type(held.holder) if isinstance(held, HAS_CLASS) else object
        meta: type = type(kind)
        for base in (*kind.__mro__, *meta.__mro__):
            inner = self._snapshot.held.get(id(base))
            if inner is not None:
                queue.append((inner, (base.__qualname__,), None, weakref.ref(base)))

    def _reads_all(self, held: Held) -> bool:
        """Whether the program may have read any attribute of an object: C code shows namespaces, and compares two."""
        if self.entered.computes or not isinstance(held.holder, SimpleNamespace):
            return self.entered.computes
        return self.entered.shows or (self.entered.compares and self._namespaces > 1)

    def _names(self, held: Held) -> set[str]:
        """The names by which the program may have read or set the attributes of an instance."""
        found = self._known.names(held)
        return self.entered.attributes if found is None else found

    def _read(self, held: Held) -> Contents:
        """The keys of an object that the program may have read, and their values."""
        keys, values = held.before
        if isinstance(held, (Attributes, Slots)) and not self._reads_all(held):
            names = self._names(held)
            pairs = [pair for pair in zip(keys, values, strict=True) if pair[0] in names]
        elif isinstance(held, Class):
            names = self.entered.attributes.union(("__match_args__",), TOLD).difference(self._untold)
            if "_FIELDS" in names:  # what the functions of `dataclasses` call it
                names.add("__dataclass_fields__")
            pairs = [pair for pair in zip(keys, values, strict=True) if pair[0] in names or callable(pair[1])]
        elif isinstance(held, Function):
            pairs = [pair for pair in zip(keys, values, strict=True) if pair[0] not in self._untold]
        else:
            pairs = [pair for pair in zip(keys, values, strict=True) if type(pair[0]) is not str or pair[0] != "_ref"]
        return [key for key, _ in pairs], [value for _, value in pairs]

    def _expect(self, node: Node, spot: Spot, held: Held, key: Any, value: Any, queue: list[Any]) -> None:
        position = spot[1]
        path, free = (*node.path, node.keys[position]), self._free.get((id(held.holder), key))
        if type(value) in PLAIN:
            node.plain[position] = value
            if free is not None:
                node.special[position] = free
            return
        first = self.spot_of.setdefault(id(value), spot)
        if free is not None:
            node.special[position] = free
            return
        inner = self._snapshot.held.get(id(value))
        kind = kind_of(value)
        if inner is None or isinstance(kind, str):
            asked = kind == OPAQUE or (isinstance(value, _LOCKS) and "locked" in self.entered.attributes)
            if asked and not (isinstance(held, Names) and held.is_librarys):
                name = next((step for step in reversed(path) if isinstance(step, str)), "")
                what = f"'{name}' is a {type(value).__name__}, whose state Python does not show"
                self._say(what, self.entered.line(name))
            self._watch(node, value)
            return
        if isinstance(inner, Tensor):
            ref = dict(zip(*inner.before, strict=True)).get("_ref")
            if ref is not None:
                self._places.setdefault(id(ref.cell), []).append(spot)
            if ref is None:
                pass
            elif isinstance(held, Tensor) and key == "grad":
                # Whether there is one is all that Python can ask, unless the program reads it.
                node.special[position] = (
                    Moving.like(value, ref, self.entered) if id(ref.cell) in self._states else _is_distributed
                )
            elif (
                not value.requires_grad
                and (path in self._moving or (id(held.holder), key) in self._written)
                and self.entered.attributes.isdisjoint(set(inner.before[0]).difference(ASKED, INTERNAL))
            ):
                node.special[position] = Moving.like(value, ref, self.entered)
            if position in node.special:  # another tensor will be there: nothing of this one is expected
                if first is not spot:
                    self._aliases.same.append((first, spot))
                elif isinstance(node.special[position], Moving):
                    self._aliases.apart.append(spot)
                return
            self._aliases.tensors.add(id(value))
            self._watch(node, value)
        elif inner.by_identity and not self._may_be_another(held, key, value):
            self._watch(node, value)
        else:
            node.special[position] = _same_type(type(value))
            identified = self.entered.identifies and not (type(value) is tuple and not value)  # there is one ()
            changeable = isinstance(value, _CHANGEABLE) or inner.by_identity
            if (changeable or identified) and not (node.kind is Attributes and key in MODULE):
                if first is spot:
                    self._aliases.apart.append(spot)
                else:
                    self._aliases.same.append((first, spot))
            elif first is not spot and len(self._values) < _MOST_AGAIN:
                self._values.add(spot)  # another place has the same tuple now, and either may get another one
            elif first is not spot:
                self._say("too many places that share their tuples", None)
        queue.append((inner, path, spot, None))

    def _may_be_another(self, held: Held, key: Any, value: Any) -> bool:
        """Whether another object of its class will do too: the program puts one there that it has made, and never asks
        which it is."""
        by_identity = getattr(type(value), "__eq__", None) is object.__eq__
        asks = self.entered.identifies or (by_identity and (self.entered.compares or type(value) in self._keyed))
        return (id(held.holder), key) in self._written and not asks

    def _watch(self, node: Node, value: Any) -> None:
        """Be dead as soon as this object is gone; keep it where it cannot be watched."""
        if id(value) in self._watched:
            return
        try:
            self._watched[id(value)] = weakref.ref(value, self._die)
        except TypeError:
            self._watched[id(value)] = None
            node.kept.append(value)

    def _die(self, gone: Any) -> None:
        self.dead = True

    def _check_codes(self) -> None:
        """Each closure that was entered is one that is known, or was made by code that was entered."""
        for code in self.entered.codes:
            if code.co_freevars and id(code) not in self._codes and not self.entered.made_by(code):
                self._say(
                    f"{code.co_name}() was called, and where it comes from is unknown",
                    Source(code.co_filename, code.co_firstlineno),
                )

    def tell_arguments(self, leaves: list[Any], written: bool) -> None:
        """Expect the arguments where they are now, if the program may have asked which objects they are. Raises
        ArgumentWritten for a tensor that the program reaches by another way too: in a trace they are two, unless
        arguments are read as what it closes over is (`written`), and then the other guards know where they are."""
        if not self.entered.asks_which:
            return
        self._told_anyway = written
        places = {self.nodes[number].ids[at]: (number, at) for number, at in self._aliases.apart}
        self._which = self._places_of(leaves, places)
        for number, (leaf, place) in enumerate(zip(leaves, self._which, strict=False)):
            kind = kind_of(leaf)
            self._by_parts = self._by_parts or not (kind is None or isinstance(kind, str) or kind.by_identity)
            if place and isinstance(leaf, torch.Tensor) and self.entered.identifies:
                raise ArgumentWritten(
                    f"argument {number} of the program is a tensor that it reads from Python too, and it asks by 'is' "
                    "or 'id' which tensor it has",
                    hint="pass a copy, x.clone(), or have the program read it from Python alone.",
                    source=user_source(),
                )

    def _places_of(self, arguments: list[Any], places: dict[int, Spot]) -> list[Any]:
        if self._told_anyway:
            arguments = [None if type(each) is DistributedTensor else each for each in arguments[:-1]]
        watched = self._watched
        return [id(each) if id(each) in watched else places.get(id(each)) for each in arguments]

    def entry(self, holder: Any, key: str) -> Spot | None:
        """Where an entry of a dict is, if the dict is looked into."""
        number = self.node_of.get(id(holder))
        return None if number is None else (number, self.nodes[number].keys.index(key))

    def close(self) -> None:
        """Let go of what only building needed."""
        del (
            self._snapshot,
            self.entered,
            self._values,
            self._states,
            self._places,
            self._written,
            self._codes,
            self._known,
        )
        self.spot_of, self.node_of = {}, {}

    def expects(self, tensors: list[Any]) -> bool:
        """Whether one of these is a tensor that the program reads from Python."""
        return not self._aliases.tensors.isdisjoint(map(id, tensors))

    # -- checking ------------------------------------------------------------------------------------------------

    def use(self, spot: Spot | None) -> None:
        """Have checks give what is at a place."""
        if spot is not None:
            self._used.add(spot)

    def keep_apart(self, spot: Spot) -> None:
        """Expect a container at a place that no other place has."""
        self._aliases.apart.append(spot)

    def use_apart(self) -> list[Spot]:
        """The places of all containers that can change, which checks give from now on."""
        self._used.update(self._aliases.apart)
        return self._aliases.apart

    def check(self, arguments: list[Any]) -> Found | None:
        """The values at the places in use, and the states; None where one guard does not hold."""
        if self.dead or not self._library.holds():
            return None
        if self._which is not None and not self._by_parts and self._places_of(arguments, {}) != self._which:
            return None
        if self._fast is not None:
            if self._is_long and native.built() is not None:
                self._write_fast()
            found = self._fast(arguments)
            if found is not None:
                return None if self.dead else found
        found = self.check_each(arguments)
        if found is None:
            return None
        live, _ = found
        if self._by_parts:  # which is rare, and checked here alone
            places = {id(live[spot]): spot for spot in self._aliases.apart}
            return found if self._places_of(arguments, places) == self._which else None
        self._checked += 1
        if self._checked == _OFTEN:
            self._write_fast()
        return None if self.dead else found

    def check_each(self, arguments: list[Any]) -> Found | None:
        """The same object by object, of Python's objects alone."""
        live: Live = {}
        for number, node in enumerate(self.nodes):
            values = node.read_now(node.holder(live, arguments))
            if values is None or node.mismatch(values) is not None:
                return None
            for position, value in enumerate(values):
                live[number, position] = value
        return (live, [live[spot] for spot in self.states]) if self._aliases.hold(live) else None

    def written(self, is_native: bool) -> Callable[[list[Any]], Found | None]:
        """`check_each` as a function written for it, with native code for most of it if that is wanted and built."""
        return compile_check(self.nodes, self._used, self.states, self._aliases, is_native)

    def _write_fast(self) -> None:
        is_long = sum(map(native.can_look, self.nodes)) >= native.WORTH
        is_native = is_long and native.built() is not None
        self._is_long = is_long and not is_native
        self._fast = self.written(is_native)

    def places(self, arguments: list[Any]) -> Iterator[Seen]:
        """All places as they are now, but those within objects that have another shape, which stand for them."""
        live: Live = {}
        for number, node in enumerate(self.nodes):
            if node.parent is not None and node.parent not in live:  # within what has another shape now
                continue
            holder = node.holder(live, arguments)
            values = node.read_now(holder)
            if values is None:
                yield Seen(node.path, node, None, holder, None, False)
                continue
            other = node.mismatch(values)
            for position, value in enumerate(values):
                path = (*node.path, node.keys[position])
                yield Seen(path, node, position, holder, value, position != other)
                if position == other:
                    other = node.mismatch(values, position + 1)
                live[number, position] = value


def _same_type(kind: type) -> Callable[[Any], bool]:
    def same_type(value: Any) -> bool:
        return type(value) is kind

    return same_type
