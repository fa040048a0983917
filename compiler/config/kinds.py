"""The kinds of settings' values, and their text: `"30s"`, `"2 GiB"`, `1`, `"passes,plan"`.

A kind reads a given value: text (all that the environment has) or a Python value. It raises TypeError for another type,
and ValueError for a value that is not allowed; `Setting` adds the name and `form`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from datetime import timedelta
from pathlib import Path
from typing import Generic, TypeVar

from monarch.compiler.errors import MonarchError
from monarch.compiler.sizes import format_bytes, parse_bytes

T = TypeVar("T")


class Kind(Generic[T]):
    """`form` says how values are written, after "it has to be"."""

    form: str

    def read(self, given: object) -> T:
        """The setting's value for a given one. Raises TypeError and ValueError."""
        raise NotImplementedError

    def show(self, value: T) -> object:
        """The value as users see it, and as JSON and TOML can hold it; `read` takes it back."""
        return value


class Choice(Kind[str]):
    """One of a few words."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.form = _listed(words, "or")

    def read(self, given: object) -> str:
        if not isinstance(given, str):
            raise TypeError
        if given not in self.words:
            raise ValueError
        return given


class Words(Kind[frozenset[str]]):
    """Any of a few words: text with commas between them, or a list of them."""

    def __init__(self, *words: str) -> None:
        self.words = words
        self.form = f"any of {_listed(words, 'and')}, with commas between them"

    def read(self, given: object) -> frozenset[str]:
        if isinstance(given, str):
            given = given.split(",")
        if not isinstance(given, Iterable):
            raise TypeError
        words = list(given)
        if not all(isinstance(word, str) for word in words):
            raise TypeError
        found = frozenset(word.strip() for word in words if word.strip())
        if not found <= set(self.words):
            raise ValueError
        return found

    def show(self, value: frozenset[str]) -> str:
        return ",".join(word for word in self.words if word in value)


class Flag(Kind[bool]):
    """True or False; as text `1` or `0`, and the usual words for them."""

    form = "True or False (in the environment 1 or 0)"
    _TEXT = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)

    def read(self, given: object) -> bool:
        if isinstance(given, str) and given.lower() in self._TEXT:
            return self._TEXT[given.lower()]
        if not isinstance(given, bool):
            raise TypeError
        return given


class Count(Kind[int]):
    """A whole number within bounds, both included."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.form = f"a whole number from {least:,} to {most:,}"

    def read(self, given: object) -> int:
        if isinstance(given, str) and re.fullmatch(r"[0-9]{1,18}", given.strip(), re.ASCII):
            given = int(given)
        if isinstance(given, bool) or not isinstance(given, int):
            raise TypeError
        if not self.least <= given <= self.most:
            raise ValueError
        return given


class Size(Kind[int]):
    """Bytes within bounds: a number, or text as `parse_bytes` takes it."""

    def __init__(self, least: int, most: int) -> None:
        self.least, self.most = least, most
        bounds = f"from {format_bytes(least)} to {format_bytes(most)}"
        self.form = f'a number of bytes or text such as "2 GiB", {bounds}'

    def read(self, given: object) -> int:
        if isinstance(given, bool) or not isinstance(given, str | int):
            raise TypeError
        try:
            size = 0 if given in (0, "0") else parse_bytes(given)
        except MonarchError:
            raise TypeError if isinstance(given, str) else ValueError from None
        if not self.least <= size <= self.most:
            raise ValueError
        return size


_UNITS = {"us": 1, "µs": 1, "ms": 1_000, "s": 10**6, "m": 60 * 10**6, "h": 3600 * 10**6, "d": 86400 * 10**6}
_DURATION = re.compile(r"(?:\s*[0-9]{1,9}(?:\.[0-9]{1,6})?\s*(?:us|µs|ms|s|m|h|d))+\s*", re.ASCII | re.IGNORECASE)
_PART = re.compile(r"([0-9.]+)\s*([a-zµ]+)", re.IGNORECASE)


class Duration(Kind[float]):
    """Seconds within bounds, given as text with units ("30s", "1h 30m", "500ms") or as a `timedelta`.

    A plain number has no unit, and is refused. Values are counted in microseconds, and shown in the largest units.
    """

    def __init__(self, least: str, most: str) -> None:
        self.least, self.most = _microseconds(least), _microseconds(most)
        self.form = f'text such as "30s", "5m" or "500ms", from {least} to {most}'

    def read(self, given: object) -> float:
        if isinstance(given, timedelta):
            count = given // timedelta(microseconds=1)
        elif isinstance(given, str) and _DURATION.fullmatch(given):
            count = _microseconds(given)
        else:
            raise TypeError
        if not self.least <= count <= self.most:
            raise ValueError
        return count / 10**6

    def show(self, value: float) -> str:
        rest, parts = round(value * 10**6), []
        for unit in ("d", "h", "m", "s", "ms", "us"):
            count, rest = divmod(rest, _UNITS[unit])
            if count:
                parts.append(f"{count}{unit}")
        return " ".join(parts) or "0s"


def _microseconds(text: str) -> int:
    return round(sum(float(count) * _UNITS[unit.lower()] for count, unit in _PART.findall(text)))


class Text(Kind[str]):
    """Any text; the place that uses it checks it."""

    def __init__(self, form: str) -> None:
        self.form = form

    def read(self, given: object) -> str:
        if not isinstance(given, str):
            raise TypeError
        return given


class TextOrNone(Kind[str | None]):
    """Text, or a path, or None."""

    def __init__(self, form: str) -> None:
        self.form = f"{form}, or None"

    def read(self, given: object) -> str | None:
        if given is None:
            return None
        if not isinstance(given, str | os.PathLike):
            raise TypeError
        return os.fspath(given) or None


class FolderOrNone(Kind[Path | None]):
    """A folder's path, or None; a leading `~` is the user's home."""

    form = "the path of a folder, or None"

    def read(self, given: object) -> Path | None:
        if given is None or given == "":
            return None
        if not isinstance(given, str | os.PathLike):
            raise TypeError
        return Path(given).expanduser()

    def show(self, value: Path | None) -> str | None:
        return None if value is None else str(value)


def _listed(words: tuple[str, ...], last: str) -> str:
    return f"{', '.join(words[:-1])} {last} {words[-1]}"
