"""Whether Python code that a program has run would do the same if it were run once more."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils import _pytree as pytree

from monarch.language.programs.classify import OPAQUE, kind_of
from monarch.language.programs.entered import Entered
from monarch.language.programs.guards import Guards
from monarch.language.programs.held import MISSING, Contents, Held, same_entries
from monarch.language.programs.nodes import Path
from monarch.language.programs.settings import Set, Setting
from monarch.language.programs.snapshot import Snapshot
from monarch.language.tensors.tensor import DistributedTensor

_NOTES = ("_opt_called", ".__dynamo_disable")
"""What PyTorch notes: that an optimizer's step was taken, for a warning, and what is not to be compiled."""


@dataclass(eq=False)
class SeenObjects:
    """What Python holds that a program can have read: of each object what has changed since the trace met it."""

    held: list[Held]
    now: dict[int, Contents | None]
    codes: int
    """How many of the user's functions were entered."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SeenObjects) or self.codes != other.codes or self.now.keys() != other.now.keys():
            return False
        return all(
            mine is theirs or (mine is not None and theirs is not None and same_entries(mine, theirs))
            for mine, theirs in zip(self.now.values(), other.now.values(), strict=True)
        )


def _is_of_region(value: Any) -> bool:
    return isinstance(value, DistributedTensor) and bool(getattr(value._ref.cell.recording, "inside", ""))


class Repeatable:
    """Looks at the Python of a program that is being traced."""

    def __init__(self, snapshot: Snapshot, entered: Entered, roots: list[tuple[Path, Any]]) -> None:
        self._snapshot = snapshot
        self._entered = entered
        self._roots = roots

    def seen(self, *reached: Any) -> SeenObjects | None:
        """What Python holds now of what the program has met, and of what can be `reached` from objects that it may have
        made; None where an object of that does not show its state. Where two of these are equal, what ran in
        between has changed nothing: run again it does the same, as far as guards say the same of a program."""
        met, own = self._snapshot.held, Snapshot()
        for each in reached:
            if id(each) not in met:
                own.visit(each)
        made = {ident: held for ident, held in own.held.items() if ident not in met}
        if own.full or any(kind_of(value) == OPAQUE for held in made.values() for value in held.before[1]):
            return None
        now = {ident: held.changed() for ident, held in met.items()} | {i: held.before for i, held in made.items()}
        return SeenObjects([*met.values(), *made.values()], now, len(self._entered.codes))

    def changes(self) -> dict[int, Contents | None]:
        """What has changed by now of each object that the program has met."""
        return {ident: held.changed() for ident, held in self._snapshot.held.items()}

    def bound_since(self, before: dict[int, Contents | None]) -> str | None:
        """A name or key under which Python holds something else than it did then, if there is one: but for tensors that
        a branch or a loop has made, of which there is more to say."""
        for ident, held in self._snapshot.held.items():
            now, was = held.changed(), before.get(ident)
            if now is None and was is None:
                continue
            now, was = now or held.before, was or held.before
            if same_entries(now, was):
                continue
            values, old = dict(zip(*now, strict=True)), dict(zip(*was, strict=True))
            for key in {**old, **values}:
                value = values.get(key, MISSING)
                if value is old.get(key, MISSING) or key in _NOTES:
                    continue
                if not any(map(_is_of_region, pytree.tree_leaves(value))):
                    return key if isinstance(key, str) else f"{type(held.holder).__name__}[{key!r:.40}]"
        return None

    def read(self, what: str, read: Callable[[], str]) -> str:
        """What `read` gives, which each call of the program compares: what code reads in it is not looked at."""
        watching = sys.gettrace()
        sys.settrace(None)
        try:
            self._snapshot.note(Set(setting := Setting(frozenset((what,)), read)))
            return str(setting.get())
        finally:
            sys.settrace(watching)

    @contextmanager
    def undone(self) -> Iterator[None]:
        """Run something that is no part of the program: what it changes of what the program has met, comes back."""
        watching = sys.gettrace()
        before: list[Any] = []
        try:
            sys.settrace(None)
            before = [(held, held.changed()) for held in self._snapshot.held.values()]
            yield
        finally:
            for held, contents in before:
                now = held.changed()
                if now is not None and (contents is None or not same_entries(now, contents)):
                    held.fill(held.holder, *(contents or held.before))
            sys.settrace(watching)

    def proves(self) -> bool:
        """Whether guards can follow all that the program has read so far."""
        guards = Guards(self._snapshot, self._entered, self._roots, {}, set(), set(), set())
        return guards.unproven is None
