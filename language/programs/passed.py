"""Lists and dicts among a program's arguments. The traced function is given others that are like them; what it changes
there, each call changes in its caller's."""

from __future__ import annotations

import collections
from collections.abc import Container, Iterator
from typing import Any

from torch.utils import _pytree as pytree

from monarch.compiler.errors import ProgramError
from monarch.language.programs.containers import Defaulting, Deque, Mapping, Sequence
from monarch.language.programs.held import Contents, Held
from monarch.language.source import user_source

_KINDS: dict[type, type[Held]] = {
    list: Sequence,
    dict: Mapping,
    collections.OrderedDict: Mapping,
    collections.defaultdict: Defaulting,
    collections.deque: Deque,
}


def containers_in(args: Any, kwargs: Any) -> list[Any]:
    """The lists and dicts among the arguments, wherever they stand, in an order that their structure fixes."""
    return [node for node in _nodes((*args, *kwargs.values())) if type(node) in _KINDS]


def repeated(args: Any, kwargs: Any) -> tuple[tuple[int, int], ...]:
    """Which of them, by number, are the very object that an earlier one is."""
    found = containers_in(args, kwargs)
    if len({*map(id, found)}) == len(found):
        return ()
    first: dict[int, int] = {}
    pairs = [(number, first.setdefault(id(each), number)) for number, each in enumerate(found)]
    return tuple([pair for pair in pairs if pair[0] != pair[1]])


def _nodes(value: Any) -> Iterator[Any]:
    """Whatever holds others, from the outside in. (What holds itself has been refused.)"""
    kind = type(value)
    if kind is tuple or kind in _KINDS:
        children: Any = value.values() if isinstance(value, dict) else value
    elif kind in pytree.SUPPORTED_NODES or pytree.is_namedtuple_class(kind):
        children = _children(value)
    else:
        return
    yield value
    for child in children:
        yield from _nodes(child)


def _children(value: Any) -> list[Any]:
    return pytree.tree_leaves(value, is_leaf=lambda each: each is not value)


class Passed:
    """The containers of one call, and those that the traced function is given for them."""

    def __init__(self, args: Any, kwargs: Any, made: tuple[Any, Any], one: bool) -> None:
        """`made` is the traced function's; a container that the caller passes twice is one there too, if `one`."""
        self.args, self.kwargs = made
        if one and repeated(args, kwargs):
            known: dict[int, Any] = {}
            self.args, self.kwargs = _joined(self.args, args, known), _joined(self.kwargs, kwargs, known)
        self.theirs = containers_in(args, kwargs)
        self.ours = containers_in(self.args, self.kwargs)
        self._before = [_KINDS[type(each)](each) for each in self.theirs]
        self.noted = [_KINDS[type(each)](each) for each in self.ours]
        others = [node for node in _nodes((*self.args, *self.kwargs.values())) if type(node) not in _KINDS]
        self._others = [(node, _children(node)) for node in others if type(node) is not tuple]

    def changes(self) -> list[tuple[int, Held, Contents]]:
        """Those that the function has changed, by number, with what they hold now. Raises ProgramError where it has
        changed one of another class."""
        for node, before in self._others:
            children = _children(node)
            if len(children) != len(before) or any(a is not b for a, b in zip(children, before, strict=True)):
                raise ProgramError(
                    f"the program changes a {type(node).__name__} that is among its arguments",
                    hint="its caller would not see the change: return the new attribute, or pass a dict.",
                    source=user_source(),
                )
        found: dict[int, tuple[int, Held, Contents]] = {}
        for number, held in enumerate(self.noted):
            now = held.changed()
            if now is not None:
                found.setdefault(held.ident, (number, held, now))
        return [*found.values()]

    def give_back(self) -> None:
        """Have the caller's containers hold what they held before the trace."""
        for held in self._before:
            held.restore()

    def has(self, value: Any) -> bool:
        """Whether this is a container that the function was given."""
        return any(each is value for each in self.ours)

    def check_apart(self, name: str, reached: Container[int], own: list[tuple[Held, Contents]], asked: bool) -> None:
        """Raise ProgramError for one that the program also reads from Python (`reached`, by id), where it changes it in
        either way (`own` are its other changes), or has asked which it is: in the trace they are two. Not where it puts
        another into that place, or the same one."""
        changed, replaced = {held.ident for held, _ in own}, set()
        for held, now in own:
            after = dict(zip(*now, strict=True))
            replaced |= {id(was) for key, was in zip(*held.before, strict=True) if after.get(key) is not was}
        for theirs, held in zip(self.theirs, self.noted, strict=True):
            if (
                id(theirs) in reached
                and id(theirs) not in replaced
                and (asked or id(theirs) in changed or held.changed() is not None)
            ):
                raise also_read(name, theirs)

    def contents(self, number: int) -> tuple[Contents, Contents]:
        """What one of the caller's held before the trace, and what it is to hold, once what the function put into its
        own has been replaced by what the caller may see."""
        ours, theirs = self.noted[number], self._before[number]
        before, given = dict(zip(*ours.before, strict=True)), dict(zip(*theirs.before, strict=True))
        keys, values = ours.read(ours.holder)
        stay = [key in before and before[key] is value for key, value in zip(keys, values, strict=True)]
        now = [given[key] if same else value for key, value, same in zip(keys, values, stay, strict=True)]
        return theirs.before, (keys, now)


def also_read(name: str, value: Any) -> ProgramError:
    kind = type(value).__name__
    return ProgramError(
        f"a {kind} among the arguments of '{name}' is one that it also reads from Python, and changes (or asks for)",
        hint="have it read that in one way: take it from the arguments, or pass a copy, copy.deepcopy(...).",
        source=user_source(),
    )


def _joined(made: Any, given: Any, known: dict[int, Any]) -> Any:
    """`made`, which is like `given`, with one container wherever `given` has one."""
    if type(given) is tuple:
        return tuple([_joined(ours, theirs, known) for ours, theirs in zip(made, given, strict=True)])
    if type(given) not in _KINDS:
        return made
    found = known.setdefault(id(given), made)
    if found is made:
        for key in made if isinstance(made, dict) else range(len(made)):
            made[key] = _joined(made[key], given[key], known)
    return found
