"""The memory in which a worker's steps put what only they read: one piece, for all plans that the worker has loaded.

Steps run one after the other, and nothing in it outlives one, so plans share it: it is as large as the largest of them
needs. Its pages are taken when they are first written.
"""

from __future__ import annotations

import math
import mmap
import resource
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from monarch.compiler.plan import ArenaRange, Instruction, Plan, Source
from monarch.runtime.shared.memory import available_bytes, mebibytes


class NoRoomError(MemoryError):
    """This worker cannot have the memory that a plan's arena needs. `hint` says what to do, and `source` is the user's
    line whose op makes the largest value there."""

    def __init__(self, plan: Plan, why: OSError) -> None:
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit == resource.RLIM_INFINITY:
            left = available_bytes()
            has = why.strerror if left is None else f"the machine has {mebibytes(left)} left"
            more = "run fewer workers on this machine"
        else:
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            has = f"the worker has {mebibytes(max(0, limit - taken))} left of its limit, {mebibytes(limit)}"
            more = "raise the limit (ulimit -v)"
        made = sorted(_made(plan), key=lambda each: each[0])
        self.source = made[-1][2] if made else None
        largest = f"{made[-1][1].op} makes the largest value, of {mebibytes(made[-1][0])}: " if made else ""
        super().__init__(f"plan '{plan.name}' needs {mebibytes(plan.arena)} for its ops' results, and {has}")
        self.hint = f"{largest}shard it, make the batch smaller, or\n{more}. Each call tries again."


def _made(plan: Plan) -> Iterator[tuple[int, Instruction, Source | None]]:
    """The bytes of each value in a plan's arena, what makes it, and the user's line."""
    for each in plan.instructions:
        source = plan.sources[each.source] if each.source >= 0 else None
        for region in filter(None, each.regions):
            yield math.prod(region.shape) * region.dtype.itemsize, each, source
    for function in plan.functions.values():
        yield from _made(function)


class Arena:
    """`size` bytes; none at first. Each tensor in it has a storage of its own, of its own bytes only."""

    def __init__(self, size: int = 0) -> None:
        self.size = size
        self._memory = _mapped(size)

    def fit(self, size: int) -> bool:
        """Have room for so many bytes, or give all back if it is 0. Gives whether the memory is another one now, so
        that tensors in it have to be asked for again. Raises OSError where there is none, and leaves all as it was."""
        if self.size >= size > 0 or self.size == size:
            return False
        self._memory = _mapped(size)
        self.size = size
        return True

    def at(self, region: ArenaRange) -> torch.Tensor:
        """The tensor at this place."""
        assert self._memory is not None
        count = math.prod(region.shape)
        return torch.frombuffer(self._memory, dtype=region.dtype, count=count, offset=region.offset).view(region.shape)


class SubArena:
    """The part of the arena from a byte on: that of a plan's function."""

    def __init__(self, arena: Arena | SubArena, start: int) -> None:
        self._arena = arena
        self._start = start

    def at(self, region: ArenaRange) -> torch.Tensor:
        """The tensor at this place."""
        return self._arena.at(region._replace(offset=self._start + region.offset))


def _mapped(size: int) -> mmap.mmap | None:
    if not size:
        return None
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory
