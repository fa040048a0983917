"""Small results in shared memory, which a controller on the same host reads without a command.

For each step that has small replicated results the controller numbers a block, and worker 0 copies them into it before
it counts the step as finished. Block n is where block n - BLOCKS was: a value whose block a later step has taken is
fetched by a command, as a large one is. A result is a word and its bytes; the word says which result stands there.
"""

from __future__ import annotations

import ctypes

import torch

from monarch.compiler.plan import Plan, TensorType
from monarch.runtime.shared.window import BLOCK_BYTES, BLOCKS, RESULTS_BYTES, Window

_WORD = 8


def small_results(plan: Plan) -> tuple[tuple[int, int, TensorType], ...]:
    """The results that are copied: number of the output, offset in the step's block, and type. Those that are
    replicated, in order, as far as they fit."""
    found: list[tuple[int, int, TensorType]] = []
    offset = 0
    for number, spec in enumerate(plan.outputs):
        size = _WORD + -(-spec.type.nbytes // _WORD) * _WORD
        if spec.kind == "return" and spec.type.layout.is_replicated and offset + size <= BLOCK_BYTES:
            found.append((number, offset, spec.type))
            offset += size
    return tuple(found)


class Results:
    """The blocks of one mesh, as seen by one process. Places count bytes from block 0, over all blocks there were."""

    def __init__(self, window: Window) -> None:
        start = window.geometry.results
        self._words = window.bytes[start : start + RESULTS_BYTES].cast("q")
        self._address = window.address + start

    def write(self, place: int, type_: TensorType, value: object) -> None:
        """Copy a result, unless it is not what its type says, or on a GPU: then it is fetched as it is."""
        if not isinstance(value, torch.Tensor) or value.device.type != "cpu":
            return
        if value.shape == type_.shape and value.dtype is type_.dtype:
            row, at = value.resolve_conj().resolve_neg().contiguous(), place % RESULTS_BYTES
            ctypes.memmove(self._address + at + _WORD, row.data_ptr(), row.nbytes)
            self._words[at // _WORD] = 1 + place

    def read(self, place: int, type_: TensorType) -> torch.Tensor | None:
        """A result of a step that worker 0 has finished. None where it has not been copied, or another stands there;
        it is for the caller to know that no other was written meanwhile (`lasts`)."""
        at = place % RESULTS_BYTES
        if self._words[at // _WORD] != 1 + place:
            return None
        value = torch.empty(type_.shape, dtype=type_.dtype)
        ctypes.memmove(value.data_ptr(), self._address + at + _WORD, value.nbytes)
        return value


def lasts(place: int, blocks: int) -> bool:
    """Whether a result stays where it is until more than `blocks` blocks have been numbered."""
    return blocks - place // BLOCK_BYTES <= BLOCKS
