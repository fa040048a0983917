"""Lists that a program appends to and never reads, such as a history of losses: while the program is traced a
`GrowingList` stands for such a list, so that one trace serves all lengths."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from torch.utils import _pytree as pytree

from monarch.language.programs.held import Contents, Held


class ReadsList(Exception):
    """The program reads a list for which a GrowingList stands."""


class GrowingList:
    """What stands for a list, and takes what is appended to it. All else that a list can do raises ReadsList, and says
    `refuse` before: the program may handle the error."""

    def __init__(self, refuse: Callable[[], None]) -> None:
        object.__setattr__(self, "_refuse", refuse)
        object.__setattr__(self, "_appended", [])

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What `isinstance` is told."""
        return list

    def append(self, value: Any) -> None:
        self._appended.append(value)

    def extend(self, values: Iterable[Any]) -> None:
        self._appended.extend(values)

    def __iadd__(self, values: Iterable[Any]) -> GrowingList:  # type: ignore[misc]
        self._appended.extend(values)
        return self

    def __getattr__(self, name: str) -> Any:
        self._read()

    def _read(self, *operands: Any) -> NoReturn:
        self._refuse()
        raise ReadsList(f"the program reads a {GrowingList.__name__}")

    __bool__ = __len__ = __iter__ = __getitem__ = __setitem__ = __delitem__ = __contains__ = __reversed__ = _read
    __add__ = __radd__ = __mul__ = __rmul__ = __imul__ = _read
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _read
    __repr__ = __str__ = __format__ = __hash__ = __reduce_ex__ = __sizeof__ = __dir__ = __setattr__ = _read


# PyTorch looks into lists by their exact type, and would take it for a leaf.
pytree.register_pytree_node(GrowingList, lambda stand_in: stand_in._read(), lambda values, context: [*values])


class Growing(Held):
    """What a GrowingList has been given."""

    @classmethod
    def read(cls, holder: Any) -> Contents:
        values = list(holder._appended)
        return list(range(len(values))), values

    @classmethod
    def fill(cls, holder: Any, keys: list[Any], values: list[Any]) -> None:
        holder._appended[:] = values


@dataclass(slots=True)
class Growth:
    """What one call appends to a list."""

    to: list[Any]
    values: list[Any]
    at: int = field(init=False)

    def __post_init__(self) -> None:
        self.at = len(self.to)

    def make(self) -> None:
        """Append it. To do it again changes nothing."""
        if not self._is_there():
            self.at = len(self.to)
            self.to.extend(self.values)

    def undoing(self, given_up: Sequence[Any]) -> Callable[[], None]:
        return self.undo

    def undo(self) -> None:
        """Take it away, where it is still there. What was appended since stays."""
        if self._is_there():
            del self.to[self.at : self.at + len(self.values)]

    def _is_there(self) -> bool:
        there = self.to[self.at : self.at + len(self.values)]
        return len(there) == len(self.values) and all(map(operator.is_, there, self.values))
