"""Memory of large tensors that are filled at once: values that arrive from other workers, or from files."""

from __future__ import annotations

import ctypes
import mmap
import sys
import weakref
from collections import deque
from collections.abc import Sequence
from math import prod

import torch

_FREE, _HUGEPAGE = 8, 14  # of madvise
_HUGE = 2 << 20
_spare: deque[mmap.mmap] = deque(maxlen=1024)
"""Memory of large blocks that are gone, for the next ones. The system may take it back while it is here."""


def new_block(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor whose elements are still to be filled, all at once. Filling new memory can take several times as long as
    the copying, so large blocks are in huge pages, where the kernel has some, and in memory of blocks that are gone."""
    size = prod(shape) * dtype.itemsize
    if size < _HUGE:
        return torch.empty(tuple(shape), dtype=dtype)
    region = _taken(size)
    if region is None:
        region = mmap.mmap(-1, size, **_PRIVATE)
        _advise(region, _HUGEPAGE)
    held = (ctypes.c_char * size).from_buffer(region)
    weakref.finalize(held, _give_back, region).atexit = False
    return torch.frombuffer(held, dtype=dtype).view(tuple(shape))


_PRIVATE: dict[str, int] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if sys.platform != "win32" else {}


def _taken(size: int) -> mmap.mmap | None:
    for region in list(_spare):
        if len(region) == size:
            try:
                _spare.remove(region)
            except ValueError:
                continue  # another thread has it
            return region
    return None


def _give_back(region: mmap.mmap) -> None:
    _advise(region, _FREE)
    _spare.append(region)


def _advise(region: mmap.mmap, what: int) -> None:
    if sys.platform == "linux":
        try:
            region.madvise(what)
        except OSError:
            pass  # a kernel without it: slower, and no more
