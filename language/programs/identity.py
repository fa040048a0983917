"""Whether many objects are the same as before, asked in one go."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Iterable
from typing import Any

_HEAD, _EACH = tuple.__basicsize__, ctypes.sizeof(ctypes.c_void_p)


def addresses(values: tuple[Any, ...]) -> bytes:
    """The addresses of a tuple's objects, one after the other: behind its head a tuple holds just these. Two tuples
    that give the same have the same objects. It takes a nanosecond an object, and `id` or `is` for each some thirty."""
    return ctypes.string_at(id(values) + _HEAD, _EACH * len(values))


def addresses_of(idents: Iterable[int]) -> bytes:
    """What `addresses` gives of objects with these ids."""
    return array("Q", idents).tobytes()
