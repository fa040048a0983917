"""What a call changes in Python, how it is taken back, and the values from which it makes what it puts there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.execution.executor import Handle, TakeBack
from monarch.language.programs import containers, kinds
from monarch.language.programs.growing import Growing, Growth
from monarch.language.programs.held import MISSING, Contents, Held, same_entries
from monarch.language.programs.nodes import Live
from monarch.language.programs.passed import containers_in
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.history import Ending
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.tensor import Ref


@dataclass
class Outcome:
    """The values of one call from which it makes what it puts into Python."""

    mesh: Mesh
    arguments: list[Any]
    live: Live
    scalars: Mapping[str, float]
    handles: Mapping[int, Handle]
    """The handles that the plan made, by the number of the tensor that the trace left behind."""
    meshes: Mapping[int, Mesh] = field(default_factory=dict)
    """Where those are, in a program of several meshes."""
    given: tuple[Any, Any] = ((), {})
    """The call's arguments as the caller has them, positional ones and others."""
    end: Ending | None = None
    """Where the history of what it returns and leaves ends."""
    made: dict[Any, Any] = field(default_factory=dict)

    def look(self) -> None:
        """Note the arguments before lists and dicts among them change."""
        self.own, self.passed = pytree.tree_leaves(self.given), containers_in(*self.given)

    @cached_property
    def own(self) -> list[Any]:
        """The arguments, flat, each the caller's very object."""
        return pytree.tree_leaves(self.given)

    @cached_property
    def passed(self) -> list[Any]:
        """The lists and dicts among the arguments."""
        return containers_in(*self.given)

    def ref(self, number: int, fake: torch.Tensor) -> Any:
        """The storage of a tensor that this call has made, which looks like `fake`."""
        found = self.made.get(number)
        if found is None:
            handle = self.handles[number]
            found = self.made[number] = Ref(Cell(self.meshes.get(number, self.mesh), handle.type, handle), fake)
        return found


@dataclass(slots=True)
class Change:
    """One object's new contents, and those that they replace: of some keys, or all of them, in order."""

    kind: type[Held]
    holder: Any
    before: Contents
    after: Contents
    whole: bool

    @staticmethod
    def since(held: Held) -> Change | None:
        """What has changed since an object was noted."""
        now = None if isinstance(held, (kinds.Array, Growing)) else held.changed()
        if now is None:
            return None
        before, after = dict(zip(*held.before, strict=True)), dict(zip(*now, strict=True))
        if in_order(type(held), list(before), list(after)):
            return Change(type(held), held.holder, held.before, now, True)
        keys = [key for key in {**before, **after} if before.get(key, MISSING) is not after.get(key, MISSING)]
        was, new = ([entries.get(key, MISSING) for key in keys] for entries in (before, after))
        return Change(type(held), held.holder, (keys, was), (keys, new), False)

    def make(self) -> None:
        """Have the object hold the new contents. To do it again changes nothing."""
        if self.whole:
            self.kind.fill(self.holder, *self.after)
            return
        for key, value in zip(*self.after, strict=True):
            self.kind.put(self.holder, key, value)

    def undoing(self, given_up: Sequence[Any]) -> Callable[[], None]:
        return self._undo

    def _undo(self) -> None:
        """Have the object hold what it held before, where it still holds what it was given. What was appended to a
        list since stays."""
        if not self.whole:
            for key, was, value in zip(*self.before, self.after[1], strict=True):
                if self.kind.get(self.holder, key) is value:
                    self.kind.put(self.holder, key, was)
            return
        keys, now = self.kind.read(self.holder)
        count = len(self.after[1]) if issubclass(self.kind, containers.Sequence) else len(now)
        if same_entries((keys[:count], now[:count]), self.after):
            values = [*self.before[1], *now[count:]]
            self.kind.fill(self.holder, self.before[0] + keys[count:], values)


def in_order(kind: type[Held], before: list[Any], after: list[Any]) -> bool:
    """Whether new contents of these keys are put as a whole, so that their order is that of the trace."""
    if issubclass(kind, (containers.Sequence, containers.Members, containers.Own)):
        return True
    stay = len(before) <= len(after) and all(a is b for a, b in zip(before, after, strict=False))
    return issubclass(kind, containers.Mapping) and not stay


@dataclass(slots=True)
class Gradients:
    """The gradients of leaves, as one change: the new ones, and those that they replace."""

    leaves: list[Any]
    before: list[Any]
    after: list[Any]

    def make(self) -> None:
        """Give the leaves their new gradients. To do it again changes nothing."""
        for leaf, gradient in zip(self.leaves, self.after, strict=True):
            leaf.grad = gradient

    def undoing(self, given_up: Sequence[Any]) -> Callable[[], None] | None:
        """A function that gives leaves the gradients back that they had, or none, where they still have those that they
        were given. Keeps none of these alive that replaces none: the program may drop it, for the workers to free."""
        if len(given_up) == len(self.leaves) and all(was is None for was in self.before):
            return None
        lost = {id(leaf) for leaf in given_up}
        replaced, first = [], []
        for leaf, was, gradient in zip(self.leaves, self.before, self.after, strict=True):
            if was is not None:
                replaced.append((leaf, was, gradient))
            elif gradient is not None and id(leaf) not in lost:
                first.append((leaf, weakref.ref(gradient)))

        def undo() -> None:
            for leaf, was, gradient in replaced:
                if leaf.grad is gradient:
                    leaf.grad = was
            for leaf, new in first:
                if leaf.grad is not None and leaf.grad is new():
                    leaf.grad = None

        return undo


def undoing(changes: Sequence[Change | Gradients | Growth], given_up: Sequence[Any] = ()) -> TakeBack | None:
    """A function that takes one step's changes back. The gradients of leaves that are `given_up`, which the call
    dropped before the step, cannot come back: the failed ones stay, and say why they have no value."""
    kept = [undo for change in changes if (undo := change.undoing(given_up)) is not None]

    def undo_all(dropped: bool) -> None:
        for undo in reversed(kept):
            undo()

    return undo_all if kept else None
