"""How workers give blocks of values to each other between steps: where some have lost theirs, and for snapshots."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monarch.runtime.shared import wire
from monarch.runtime.shared.signals import Aborted
from monarch.runtime.shared.wire import Report
from monarch.runtime.worker.loaded import describe
from monarch.runtime.worker.messages import Message, Missing


def move(
    step: int,
    body: Sequence[int],
    rank: int,
    permute: Callable[[list[tuple[int, int]]], Callable[[list[torch.Tensor]], Any]],
    held: Callable[[int, tuple[int, int]], torch.Tensor | Missing | None],
    keep: Callable[[int, tuple[int, int], torch.Tensor], None],
) -> list[Message]:
    """Move blocks from worker to worker, as a COPY says. `held` gives a value's block for a pair of source and target,
    and `keep` takes it there. Each is checked by a checksum that its source sends along, and has the same strides at
    its target: PyTorch's sums depend on the strides of their operands."""
    numbers = iter(body)
    pairs = [(next(numbers), next(numbers)) for _ in range(next(numbers))]
    gives = next((pair for pair in pairs if pair[0] == rank), None)
    gets = next((pair for pair in pairs if pair[1] == rank), None)
    handles: list[int] = []
    blocks: list[torch.Tensor] = []
    try:
        for handle in numbers:
            code, ndim = next(numbers), next(numbers)
            shape = [next(numbers) for _ in range(ndim)]
            block = torch.empty(shape, dtype=wire.DTYPE_LIST[code])
            if gives is not None:
                value = held(handle, gives)
                if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (block.shape, block.dtype):
                    raise RuntimeError(f"value {handle} is not here as it was to be copied")
                block = value.cpu()
            handles.append(handle)
            blocks.append(block)
        notes = torch.tensor([note for block in blocks for note in (checksum(block), *_strides(block))])
        *copies, told = permute(pairs)([*blocks, notes])
        if gets is not None:
            notes_of = iter(told.tolist())
            for handle, copied in zip(handles, copies, strict=True):
                if next(notes_of) != checksum(copied):
                    raise RuntimeError(f"value {handle} did not arrive as it was sent")
                strides = [next(notes_of) for _ in copied.shape]
                block = torch.empty_strided(copied.shape, strides, dtype=copied.dtype).copy_(copied)
                keep(handle, gets, block)
    except Aborted as aborted:
        return [Report("aborted", rank, step, error=str(aborted))]
    except RuntimeError as error:
        return [Report("failed", rank, step, describe(error), "".join(traceback.format_exception(error)))]
    return []


def checksum(tensor: torch.Tensor) -> int:
    """Of the bytes of a tensor's elements, in order."""
    return zlib.crc32(memoryview(wire.raw(tensor).numpy()))  # type: ignore[arg-type]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides of a tensor without gaps whose dims are in the order of this one's."""
    return torch.empty_like(tensor).stride()
