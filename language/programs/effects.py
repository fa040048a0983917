"""What a trace leaves in Python: attributes, entries, variables and gradients that it has set, to be set anew at each
call, with the tensors and numbers of that call."""

from __future__ import annotations

import collections
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from monarch.compiler.errors import ProgramError
from monarch.compiler.symbols import is_named
from monarch.compiler.tape import Expr, Value, evaluate
from monarch.language.errors import branch_error
from monarch.language.programs import containers, kinds
from monarch.language.programs.changes import Change, Gradients, Outcome, in_order
from monarch.language.programs.classify import CONSTANT, is_made_of_python, is_users_class, kind_of
from monarch.language.programs.growing import Growing, Growth
from monarch.language.programs.guards import Guards
from monarch.language.programs.held import MISSING, PLAIN, Attributes, Contents, Held, Slots
from monarch.language.programs.nodes import Spot
from monarch.language.programs.passed import Passed
from monarch.language.recorder.recording import Recording
from monarch.language.recorder.scalar_int import NUMBERS, ScalarInt
from monarch.language.source import user_source
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.history import Ending, ended
from monarch.language.tensors.tensor import DistributedTensor, Ref

_ENTRIES = (containers.Mapping, containers.Sequence, containers.Members, containers.Own)


def _is_symbol(value: Any) -> bool:
    return isinstance(value, (DistributedTensor, *NUMBERS))


Make = Callable[[Outcome], Any]


class Specialise(Exception):
    """A program cannot be traced for all values of its named sizes: why."""


class CannotRepeat(Exception):
    """The trace left something in Python that cannot be made again."""


_CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque, collections.OrderedDict, collections.defaultdict)


_MADE_BY = (collections.OrderedDict, dict, list, SimpleNamespace, object)
"""The classes of C whose `__new__` makes an object of Python's."""


def _itself(value: Any, outcome: Outcome) -> Any:
    return value


def _passed(number: int, outcome: Outcome) -> Any:
    """A container among the arguments."""
    return outcome.passed[number]


def _entry(number: int, key: Any, outcome: Outcome) -> Any:
    """What such a container holds, as the caller put it there."""
    return outcome.passed[number][key]


@dataclass(frozen=True)
class Alias:
    """A result that is another one, by its number."""

    number: int


def _is_container(value: Any) -> bool:
    """Whether another call can make a container like it, with entries of its own."""
    return type(value) in _CONTAINERS or (isinstance(value, tuple) and hasattr(value, "_fields"))


@dataclass(frozen=True)
class _Step:
    """One object's new contents: some keys' new values (none: the key is taken away), or all of them, in order."""

    node: int
    kind: type[Held]
    keys: list[Any]
    made_keys: list[Make]
    """What makes the keys, where some are not plain values."""
    values: list[Make]
    whole: bool
    names: tuple[str, ...]
    """The keys that are names."""

    @property
    def is_gradient(self) -> bool:
        """Whether it gives a tensor another gradient, and nothing else."""
        return self.kind is kinds.Tensor and self.keys == ["grad"] and not self.whole


class Effects:
    """What a trace has changed, as steps that a later call repeats."""

    def __init__(
        self,
        guards: Guards,
        recording: Recording,
        symbols: list[Any],
        arguments: list[Any],
        passed: Passed,
        end: Ending,
    ) -> None:
        self.end = end
        """Where the history of what the traced call returns and leaves ends."""
        self.ends = False
        """Whether an object that it returns or leaves has one."""
        self.steps: list[_Step] = []
        self.passed: list[_Step] = []
        """Those of lists and dicts among the arguments, which are known by their numbers."""
        self.lengthens = False
        """Whether one of these has more or fewer entries afterwards."""
        self.growth: list[tuple[Spot, list[Make]]] = []
        """What each call appends to lists that the program does not read, by the list's place."""
        self._gradients: list[tuple[int, Make]] = []
        """Of these, the gradients: by the leaf's node, what makes each. They are made and put in one go."""
        self._others: list[_Step] | None = None
        self.cells: dict[int, Cell] = {}
        """The cells, made by the trace, of the tensors that it leaves in Python."""
        self.cannot: tuple[str, str] | None = None
        """Why a later call cannot repeat the changes, and the name under which the trace left the culprit."""
        self._guards = guards
        self._recording = recording
        self._symbols = {id(symbol): number for number, symbol in enumerate(symbols) if _is_symbol(symbol)}
        self._inputs = {id(symbol._ref): n for n, symbol in enumerate(symbols) if isinstance(symbol, DistributedTensor)}
        self._arguments = arguments
        self._left: dict[int, Any] = {}
        self._keep: list[Any] = [(symbols, passed)]
        self._refs: dict[int, Spot] = {}
        self._memo: dict[int, Make] = {}
        self._alone: dict[Make, Make] = {}
        """What makes the objects that are left at one place only, without looking whether they are made already."""
        for held in guards._snapshot.held.values():
            if isinstance(held, kinds.Tensor):
                ref = dict(zip(*held.before, strict=True)).get("_ref")
                spot = guards.spot_of.get(id(held.holder))
                if ref is not None and spot is not None and id(ref) not in self._inputs:
                    self._refs.setdefault(id(ref), spot)
        for number, (ours, theirs) in enumerate(zip(passed.ours, passed.theirs, strict=True)):
            self._memo[id(ours)] = partial(_passed, number)
            self._left[id(ours)] = theirs
            for key, entry in zip(*passed.noted[number].before, strict=True):
                if isinstance(entry, DistributedTensor) and id(entry) in self._symbols:
                    self._memo.setdefault(id(entry), partial(_entry, number, key))
                    self._left.setdefault(id(entry), theirs[key])

    # -- from a trace --------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of what only the traced call needed."""
        for step in (*self.steps, *self.passed):
            step.values[:] = [self._alone.get(make, make) for make in step.values]
        self._others = None
        del self._guards, self._recording, self._arguments, self._alone, self.end
        self._memo, self._left, self._refs, self.cells, self._keep = {}, {}, {}, {}, []

    def add(self, held: Held, now: Contents, among_arguments: int | None = None) -> None:
        """Note that an object holds something else after the trace; of the containers among the arguments, which."""
        number = self._guards.node_of.get(held.ident)
        before = dict(zip(*held.before, strict=True))
        after = dict(zip(*now, strict=True))
        changed = next((key for key, value in after.items() if before.get(key, MISSING) is not value), "")
        name = str(changed) if type(changed) in PLAIN else type(changed).__name__  # a tensor's text is its value
        try:
            if among_arguments is not None:
                self.passed.append(self._step(among_arguments, type(held), before, after))
                self.lengthens = self.lengthens or len(before) != len(after)
                return
            spot = self._guards.spot_of.get(held.ident)
            if isinstance(held, Growing) and spot is not None:
                self._guards.use(spot)
                self.growth.append((spot, [self._make(value) for value in now[1]]))
                return
            if number is None:
                raise CannotRepeat("changes something that it does not name")
            if type(held.holder).__module__ == "threading":
                raise CannotRepeat(f"changes a {type(held.holder).__name__}, for which threads may wait")
            step = self._step(number, type(held), before, after)
            self._guards.use(self._guards.nodes[number].parent)
            self.steps.append(step)
        except CannotRepeat as reason:
            self.cannot = self.cannot or (str(reason), name)

    def _step(self, number: int, kind: type[Held], before: dict[Any, Any], after: dict[Any, Any]) -> _Step:
        whole = in_order(kind, list(before), list(after))
        puts = {} if whole else {key: MISSING for key in before if key not in after}
        puts |= {key: value for key, value in after.items() if whole or before.get(key, MISSING) is not value}
        values = [self._make(value) for value in puts.values()]
        plain = all(type(key) in PLAIN for key in puts)
        keys, made_keys = ([*puts], []) if plain else ([], [self._make(key) for key in puts])
        names = tuple(key for key, value in after.items() if type(key) is str and before.get(key) is not value)
        return _Step(number, kind, keys, made_keys, values, whole, names)

    def keeps(self, value: Any) -> bool:
        """Whether Python holds a tensor or container behind the call, or what a tensor is a view of: its result is
        that very object, or another view, and no copy."""
        number = self._symbols.get(id(value))
        if number is not None or isinstance(value, NUMBERS):
            return number is not None and isinstance(self._arguments[number], DistributedTensor)
        if isinstance(value, DistributedTensor) and id(value) not in self._memo:
            ref = value._ref
            while ref.parent is not None and id(ref) not in self._refs and id(ref) not in self._inputs:
                ref = ref.parent
            number = self._inputs.get(id(ref))
            if number is not None:
                return isinstance(self._arguments[number], DistributedTensor)
            # What cannot be looked into may hold any tensor: such a call, which is traced, returns the very objects.
            known = id(ref) in self._refs or id(ref.cell) in self.cells
            return known or self.cannot is not None and any(made() is ref.cell for made, _ in self._recording.made)
        if isinstance(value, DistributedTensor) or _is_container(value):
            return id(value) in self._memo or id(value) in self._guards.spot_of
        return False

    def concretize_returned(self, leaves: list[Any]) -> None:
        """Have the traced call return the objects that it leaves."""
        for number, leaf in kinds.tensors_first(leaves):
            if not isinstance(leaf, (Value, Expr, Alias)):
                leaves[number] = self._concrete(leaf, returned=True)
        self._left.clear()
        del self._keep[1:]  # a tensor with its history would keep all that autograd has saved

    def returned(self, leaves: list[Any]) -> dict[int, Make]:
        """How another call finds or makes the objects among a program's results that are not tensors or plain."""
        found: dict[int, Make] = {}
        for number, leaf in kinds.tensors_first(leaves):
            if type(leaf) not in PLAIN and not isinstance(leaf, (Value, Expr, Alias)) and not is_named(leaf):
                try:
                    found[number] = self._make(leaf, returned=True)
                except CannotRepeat as reason:
                    self.cannot = self.cannot or (f"{reason} and returns it", "")
        return found

    def _make(self, value: Any, returned: bool = False) -> Make:
        known = self._memo.get(id(value))
        if known is None:
            known = self._memo[id(value)] = self._make_new(value, returned)
        else:
            self._alone.pop(known, None)
        return known

    def _make_new(self, value: Any, returned: bool) -> Make:
        if type(value) in PLAIN:
            return lambda outcome: value
        if isinstance(value, (torch.SymInt, torch.SymBool)):
            raise Specialise("it leaves a named size in Python")
        if isinstance(value, NUMBERS):
            expr = value.expr if isinstance(value, ScalarInt) else value.node.expr
            return lambda outcome: evaluate(expr, outcome.scalars)
        number = self._symbols.get(id(value))
        if number is not None:
            return lambda outcome: outcome.own[number]
        if isinstance(value, Ref):
            return self._once(self._ref(value))
        spot = self._guards.spot_of.get(id(value))
        if spot is not None:
            self._guards.use(spot)
            return lambda outcome: outcome.live[spot]
        if isinstance(value, DistributedTensor):
            taken = self._inputs.get(id(value._ref))
            if taken is not None:
                return lambda outcome: outcome.own[taken].detach()
            return self._once(self._tensor(value, cut=not returned and value.grad_fn is not None))
        if isinstance(value, torch.Tensor):
            kept = value.detach().clone()
            return self._once(lambda outcome: kept.clone())
        if _is_container(value):
            return self._once(self._container(value, returned))
        if kind_of(value) == CONSTANT:
            return lambda outcome: value
        if is_made_of_python(value) and not self._makes_class(type(value)):
            return self._object(value, returned)
        raise CannotRepeat(f"makes an object of type {type(value).__name__}")

    def _once(self, make: Make) -> Make:
        """One object a call, wherever it is left."""
        key = object()

        def once(outcome: Outcome) -> Any:
            found = outcome.made.get(key)
            if found is None:
                found = outcome.made[key] = make(outcome)
            return found

        self._alone[once] = make
        return once

    def _tensor(self, value: DistributedTensor, cut: bool) -> Make:
        make = self._ref(value._ref)
        looking = DistributedTensor.looking(value._ref.fake, value.requires_grad and value.is_leaf)
        parameter = getattr(value, "_is_param", False)
        ends = value.grad_fn is not None
        self.ends = self.ends or ends

        def tensor(outcome: Outcome) -> DistributedTensor:
            ref = make(outcome)
            made: Any = ended(outcome.end, looking, ref) if ends and outcome.end is not None else looking(ref)
            if cut:
                ref.cell.cut = True
            if parameter:
                made._is_param = True
            return made

        return tensor

    def _ref(self, ref: Ref) -> Make:
        spot = self._refs.get(id(ref))
        if spot is not None:
            self._guards.use(spot)
            return lambda outcome: outcome.live[spot]._ref
        number = self._inputs.get(id(ref))
        if number is not None and isinstance(self._arguments[number], DistributedTensor):
            return lambda outcome: outcome.own[number]._ref
        if ref.parent is not None:
            parent, fake, view = self._ref(ref.parent), ref.fake, ref.view
            place = None if ref.place is None else self._tensor(ref.place, False)

            def viewed(outcome: Outcome) -> Ref:
                above = parent(outcome)
                return Ref(above.cell, fake, above, view, place=None if place is None else place(outcome))

            return viewed
        cell = ref.cell
        if id(cell) in self._recording.input_cells:
            raise ProgramError(
                "the program leaves a view of an argument in Python that is a plain tensor",
                hint="leave a copy of the view: x[0].clone().",
                source=user_source(),
            )
        if cell.recording is not self._recording:
            raise CannotRepeat("keeps a tensor from elsewhere")
        self.cells[id(cell)] = cell
        ident, fake = id(cell), ref.fake
        return lambda outcome: outcome.ref(ident, fake)

    # -- what the traced call itself leaves ----------------------------------------------------------------------

    def concretize(self, held: Held, now: Contents, returned: bool = False) -> None:
        """Give an object the arguments and numbers of this call for those that stood for them, and tensors without
        the history that autograd has of them."""
        keys, values = now
        before = dict(zip(*held.before, strict=True))
        if isinstance(held, Growing):
            held.fill(held.holder, keys, [self._concrete(value, returned) for value in values])
            return
        if isinstance(held, (containers.Sequence, containers.Members, containers.Own)):
            concrete = [self._concrete(value, returned) for value in values]
            if any(a is not b for a, b in zip(concrete, values, strict=True)):
                if not isinstance(held.holder, tuple):
                    held.holder.clear()
                held.fill(held.holder, keys, concrete)
            return
        if isinstance(held, containers.Mapping) and any(isinstance(key, NUMBERS) for key in keys):
            held.fill(held.holder, *([self._concrete(each, returned) for each in both] for both in now))
            return
        for key, value in zip(keys, values, strict=True):
            if before.get(key, MISSING) is not value and (new := self._concrete(value, returned)) is not value:
                held.put(held.holder, key, new)

    def _concrete(self, value: Any, returned: bool = False) -> Any:
        if type(value) in PLAIN or isinstance(value, Ref):
            return value
        known = self._left.get(id(value))
        if known is None:
            known = self._left[id(value)] = self._make_concrete(value, returned)
            self._keep.append(value)
        return known

    def _make_concrete(self, value: Any, returned: bool) -> Any:
        number = self._symbols.get(id(value))
        if isinstance(value, ScalarInt):
            return value.hint
        if isinstance(value, torch.SymFloat):
            if value.node.hint is None:
                raise branch_error(user_source())
            return value.node.hint
        if number is not None:
            return self._arguments[number]
        if isinstance(value, DistributedTensor):
            number = self._inputs.get(id(value._ref))
            if number is not None:
                return self._arguments[number].detach()
            ref = self._of_own(value._ref)
            if ref is not None or value.grad_fn is not None:
                if ref is None:
                    ref = value._ref
                    ref.cell.cut = ref.cell.cut or not returned  # `h`, where `h.detach()` is what is left
                if value.grad_fn is not None:
                    made: DistributedTensor = ended(self.end, DistributedTensor, ref.fake, ref)
                    return made
                return DistributedTensor(ref.fake, ref)
            return value
        kind = kind_of(value)
        if id(value) in self._guards._snapshot.held or kind is None or isinstance(kind, str):
            return value
        self._left[id(value)] = value
        if isinstance(value, tuple):
            entries = [self._concrete(entry, returned) for entry in value]
            if all(a is b for a, b in zip(entries, value, strict=True)):
                return value
            return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
        if issubclass(
            kind, (containers.Mapping, containers.Sequence, containers.Members, containers.Own, Attributes, Slots)
        ):
            empty = kind.__new__(kind)
            empty.holder, empty.before = value, ([], [])
            self.concretize(empty, kind.read(value), returned)
        return value

    def _of_own(self, ref: Ref) -> Ref | None:
        """For a view of a distributed argument the same view of the caller's own."""
        number = self._inputs.get(id(ref))
        if number is not None:
            own = self._arguments[number]
            return own._ref if isinstance(own, DistributedTensor) else None
        above = None if ref.parent is None else self._of_own(ref.parent)
        return None if above is None else Ref(above.cell, ref.fake, above, ref.view, place=ref.place)

    # -- templates -----------------------------------------------------------------------------------------------

    def _container(self, value: Any, returned: bool) -> Make:
        kind = type(value)
        if isinstance(value, dict):
            pairs = [(self._make(key, returned), self._make(entry, returned)) for key, entry in value.items()]
            factory = getattr(value, "default_factory", None)

            def mapping(outcome: Outcome) -> Any:
                made: Any = kind(factory) if kind is collections.defaultdict else kind()
                for key, entry in pairs:
                    made[key(outcome)] = entry(outcome)
                return made

            return mapping
        entries = [self._make(entry, returned) for entry in value]
        if hasattr(value, "_fields"):
            return lambda outcome: kind._make(entry(outcome) for entry in entries)
        length = value.maxlen if isinstance(value, collections.deque) else None
        if length is not None:
            return lambda outcome: collections.deque((entry(outcome) for entry in entries), length)
        return lambda outcome: kind(entry(outcome) for entry in entries)

    def _makes_class(self, kind: type) -> bool:
        """Whether the program may have made an object's class, and makes another at each call."""
        return is_users_class(kind) and id(kind) not in self._guards._snapshot.held

    def _object(self, value: Any, returned: bool) -> Make:
        """What makes an object whose class is Python's, with what it holds: what its `__init__` has done besides is
        among the other changes of the trace."""
        kind, key = type(value), object()
        held: Any = kind_of(value)
        base: Any = next(each for each in _MADE_BY if issubclass(kind, each))
        keys, values = held.read(value)
        made_keys: list[Make] = []
        made: list[Make] = []

        def make(outcome: Outcome) -> Any:
            found = outcome.made.get(key)
            if found is None:
                found = outcome.made[key] = base.__new__(kind)  # before what it holds, which may lead back to it
                held.fill(found, [each(outcome) for each in made_keys], [each(outcome) for each in made])
            return found

        self._memo[id(value)] = make
        try:
            made_keys += [
                partial(_itself, each) if isinstance(each, containers.Attribute) else self._make(each) for each in keys
            ]
            made += [partial(_itself, each) if each is MISSING else self._make(each, returned) for each in values]
        except CannotRepeat:
            del self._memo[id(value)]
            raise
        return make

    def replaced(self) -> list[tuple[int, int]]:
        """The gradients that a call makes anew or drops, as (node of the leaf, position)."""
        found = []
        for step in self.steps:
            if step.kind is kinds.Tensor:
                node = self._guards.nodes[step.node]
                if "grad" in step.names:
                    found.append((step.node, node.keys.index("grad")))
        return found

    # -- at a call -----------------------------------------------------------------------------------------------

    def repeat(self, guards: Guards, outcome: Outcome) -> list[Change | Gradients | Growth]:
        """The trace's changes in Python, with the values that this call has made. Changes nothing yet."""
        if self.passed:
            outcome.look()
        changes: list[Change | Gradients | Growth] = []
        nodes, live, arguments = guards.nodes, outcome.live, outcome.arguments
        if self._others is None:
            self._gradients = [(step.node, step.values[0]) for step in self.steps if step.is_gradient]
            self._others = [step for step in self.steps if not step.is_gradient]
        if self._gradients:
            leaves = [nodes[node].holder(live, arguments) for node, _ in self._gradients]
            had = [leaf.grad for leaf in leaves]
            changes.append(Gradients(leaves, had, [make(outcome) for _, make in self._gradients]))
        found = [(step, nodes[step.node].holder(live, arguments)) for step in self._others]
        found += [(step, outcome.passed[step.node]) for step in self.passed]
        for step, holder in found:
            keys = [make(outcome) for make in step.made_keys] if step.made_keys else step.keys
            values = [make(outcome) for make in step.values]
            before = step.kind.read(holder) if step.whole else (keys, [step.kind.get(holder, key) for key in keys])
            changes.append(Change(step.kind, holder, before, (keys, values), step.whole))
        for spot, values in self.growth:
            changes.append(Growth(live[spot], [make(outcome) for make in values]))
        return changes


def rebound(changes: list[tuple[Held, Contents]], met: Container[int]) -> set[tuple[int, Any]]:
    """The entries, by object and key, that held a tensor and hold another, or an object and hold one of its class that
    the program has made: it was not `met` before."""
    found: set[tuple[int, Any]] = set()
    for held, (keys, values) in changes:
        before = dict(zip(*held.before, strict=True))
        for key, value in zip(keys, values, strict=True):
            was = before.get(key)
            if was is value or type(was) is not type(value):
                continue
            if isinstance(value, DistributedTensor) or (id(value) not in met and is_made_of_python(value)):
                found.add((id(held.holder), key))
    return found
