"""Checks of what a plan's file says, one JSON value after the other. Without torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

from monarch.compiler.errors import LayoutError, PlanError, Source
from monarch.compiler.layout import ITEM_SIZES, Layout, MeshSpec

UNTRUSTED = "plan.save() does not write this: do not use the file, and compile the program again."


class Checks:
    """Reads JSON values of a file that errors call `name`. Raises PlanError for what is not as a plan has it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def fail(self, message: str) -> NoReturn:
        raise PlanError(f"{self.name} is not a plan that can be run: {message}", hint=UNTRUSTED)

    def integer(self, value: Any, what: str, low: int = 0, high: int = 2**63) -> int:
        """An int with low <= it < high."""
        if type(value) is not int or not low <= value < high:
            self.fail(f"{what} is {short(value)}, not a whole number from {low} to {high - 1}")
        return value

    def string(self, value: Any, what: str) -> str:
        if type(value) is not str:
            self.fail(f"{what} is {short(value)}, not a string")
        return value

    def items(self, value: Any, what: str, length: int | None = None) -> list[Any]:
        if type(value) is not list or (length is not None and len(value) != length):
            count = "" if length is None else f" of {length}"
            self.fail(f"{what} is {short(value)}, not a list{count}")
        return value

    def mapping(self, value: Any, what: str, keys: Sequence[str] | None = None) -> dict[str, Any]:
        if type(value) is not dict or (keys is not None and set(value) != set(keys)):
            named = "" if keys is None else f" with the keys {', '.join(keys)}"
            self.fail(f"{what} is {short(value)}, not an object{named}")
        return value

    def strings(self, value: Any, what: str) -> tuple[str, ...]:
        return tuple(self.string(entry, what) for entry in self.items(value, what))

    def text(self, data: bytes, member: str) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError:
            self.fail(f"its {member} is not text in UTF-8")

    def parts_of_type(self, value: Any, what: str) -> tuple[str, tuple[int, ...], Layout]:
        """The dtype's name, the shape and the layout of a type."""
        dtype, shape, shards, partial, varying = self.items(value, f"the type of {what}", 5)
        if not isinstance(dtype, str) or dtype not in ITEM_SIZES:
            self.fail(f"the dtype of {what} is {short(dtype)}")
        sizes = tuple(self.integer(size, f"a size of {what}") for size in self.items(shape, f"the shape of {what}"))
        layout = Layout(
            tuple(
                self.strings(names, f"the layout of {what}") for names in self.items(shards, f"the layout of {what}")
            ),
            tuple(
                (pair[0], pair[1])
                for entry in self.items(partial, f"the layout of {what}")
                if (pair := self.strings(self.items(entry, f"the layout of {what}", 2), f"the layout of {what}"))
            ),
            self.strings(varying, f"the layout of {what}"),
        )
        return dtype, sizes, layout

    def mesh(self, value: Any) -> MeshSpec:
        dims = []
        for entry in self.items(value, "the mesh"):
            name, size = self.items(entry, "a mesh dim", 2)
            dims.append((self.string(name, "a mesh dim's name"), self.integer(size, "a mesh dim's size", 1, 2**31)))
        try:
            return MeshSpec(tuple(dims))
        except LayoutError as error:
            self.fail(error.message)

    def sources(self, value: Any) -> tuple[Source, ...]:
        return tuple(self.source(entry) for entry in self.items(value, "the list of source lines"))

    def source(self, value: Any, inner: bool = True) -> Source:
        """A source line; an `inner` one may have been called from another."""
        file, *numbers, caller = self.items(value, "a source line", 5)
        line, column, end = (self.integer(number, "a source line's number") for number in numbers)
        if caller is not None and not inner:
            self.fail("a source line has more than one caller")
        outer = None if caller is None else self.source(caller, inner=False)
        return Source(self.string(file, "a source line's file"), line, column, end, outer)


def short(value: Any) -> str:
    """A value from a file for an error message: one line of some 60 characters."""
    kind = type(value)
    if kind is list or kind is dict:
        return f"a {'list' if kind is list else 'JSON object'} of {len(value)}"
    if kind is int and abs(value) >= 10**20:
        return "a number of more than 20 digits"
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
