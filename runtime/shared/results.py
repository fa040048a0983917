"""Small results in shared memory, which a controller on the same host reads without a command.

The controller gives each step with small results a *place*: so many bytes, at the same place in an area of each
worker's. A worker copies its blocks of them there before it commits the step, or, where there is no commit or the step
makes them behind it, before it counts the step as finished; of what several workers hold only the first of them copies.
So they outlive a worker that dies. Places count all bytes that were ever given; an area has the last of them, and a
value whose place a later step has taken is fetched by a command, as a large one is. A result is a word and its bytes;
the word says which result stands there.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cached_property

import torch

from monarch.compiler.blocks import holders
from monarch.compiler.plan import Plan
from monarch.runtime.shared.window import RESULTS_BYTES, Window

_WORD = 8
MOST_BYTES = 4 << 10
"""So many bytes of a step's results are copied."""


@dataclass(frozen=True)
class Small:
    """A result that is copied: the number of the output, its offset in the step's place, the shape and dtype of each
    worker's block, and the workers that copy it."""

    output: int
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    workers: frozenset[int]

    @cached_property
    def nbytes(self) -> int:
        """How many bytes each worker copies."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """How many bytes the step's results take up to here."""
        return self.offset + _WORD + -(-self.nbytes // _WORD) * _WORD


def small_results(plan: Plan) -> tuple[Small, ...]:
    """The results that are copied, the smallest first, as far as they fit: the plan's outputs, and pending sums that it
    makes otherwise, such as a loss outside programs. Of a plan of several parts: ask for each part's."""
    found: list[Small] = []
    if plan.parts:
        return ()
    wanted = [(at, each) for at, each in enumerate(plan.outputs) if each.kind == "return" or each.type.layout.partial]
    for number, spec in sorted(wanted, key=lambda each: math.prod(each[1].type.local_shape(plan.mesh))):
        offset = found[-1].end if found else 0
        workers = frozenset(holders(spec.type, plan.mesh))
        small = Small(number, offset, spec.type.local_shape(plan.mesh), spec.type.dtype, workers)
        if small.end > MOST_BYTES:
            break
        found.append(small)
    return tuple(found)


# `ctypes.memmove` gives up the interpreter's lock, and makes a number of its result.
_copy = ctypes.PYFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(("memmove", ctypes.PyDLL(None)))


class Places:
    """The places of one mesh's results, as the controller gives them."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, size: int) -> int:
        """A new place of so many bytes, in one piece."""
        place = self._next
        if place % RESULTS_BYTES + size > RESULTS_BYTES:
            place += RESULTS_BYTES - place % RESULTS_BYTES
        self._next = place + size
        return place

    def has(self, place: int) -> bool:
        """Whether no other step got the bytes of a place since."""
        return self._next - place <= RESULTS_BYTES


class Results:
    """The area of one worker: in the mesh's shared memory, or, without an address, the bytes that another host has
    sent."""

    def __init__(self, area: memoryview, address: int = 0) -> None:
        self._bytes = area
        self._words = area.cast("q")
        self._address = address

    @staticmethod
    def at(window: Window, rank: int) -> Results:
        """A worker's area in shared memory."""
        start = window.geometry.results_of(rank)
        return Results(window.bytes[start : start + RESULTS_BYTES], window.address + start)

    def contents(self) -> bytes:
        """The area as it is now."""
        return bytes(self._bytes)

    def write(self, place: int, small: Small, value: object) -> None:
        """Copy a result, unless it is not what its type says, or on a GPU: then it is fetched as it is."""
        at, word = place % RESULTS_BYTES, 0
        if (
            isinstance(value, torch.Tensor)
            and value.is_cpu
            and value.dtype is small.dtype
            and value.shape == small.shape
        ):
            plain = value.is_contiguous() and not value.is_conj() and not value.is_neg()
            row = value if plain else value.resolve_conj().resolve_neg().contiguous()
            _copy(self._address + at + _WORD, row.data_ptr(), small.nbytes)
            word = 1 + place
        self._words[at // _WORD] = word

    def read(self, place: int, small: Small) -> torch.Tensor | None:
        """This worker's block of a result of a step that it has finished. None where it has not copied it, or another
        one is in its place; the caller has to know that no other was written meanwhile (`Places.has`)."""
        at = place % RESULTS_BYTES
        if self._words[at // _WORD] != 1 + place:
            return None
        if not small.nbytes:
            return torch.empty(small.shape, dtype=small.dtype)
        at += _WORD
        row = torch.frombuffer(bytearray(self._bytes[at : at + small.nbytes]), dtype=small.dtype)
        return row.view(small.shape)  # all of which is quicker than to have PyTorch allocate so little
