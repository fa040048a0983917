"""Values that were freed, but that another worker may still need: one that is in an earlier step, where it may die.

A worker that comes to a step without collectives does not wait for the others, and so runs ahead. Where a slower worker
dies in that step, healing gives the step again to all, with the values that it reads. So a worker that frees values
keeps them until all workers have finished the commands before. At most `FREED_BYTES` of them: beyond that the worker
waits for the others.

To look how far all workers are costs as much as a small command, so where little is kept this is not done each time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

import torch

FREED_BYTES = 64 << 20
"""So much memory a worker holds at most for others that are behind it, beside the values that are in use."""
_LITTLE_BYTES = 64 << 10
_LOOK_EVERY = 16  # values kept


class Ahead(Protocol):
    """The part of `collectives.meeting.Meetings` that this module needs."""

    def passed(self, command: int, ranks: Iterable[int] | None = None) -> bool: ...

    def await_passed(self, command: int, ranks: Iterable[int] | None = None) -> bool: ...


class Freed:
    """The values that one worker has freed, by the command that freed them."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, dict[int, torch.Tensor], int]] = deque()
        self._bytes = 0
        self._look_at = _LOOK_EVERY
        self.many = False
        """Whether so much is kept that it is to be let go as soon as that can be."""

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, command: int, values: dict[int, torch.Tensor], ahead: Ahead) -> None:
        """A command frees values, by handle. Waits where others are so far behind that they would be too many; not
        longer than until a worker dies."""
        size = 0
        for value in values.values():
            size += value.nbytes
        self._kept.append((command, values, size))
        self._bytes += size
        if self._bytes > _LITTLE_BYTES or len(self._kept) >= self._look_at:
            self.let_go(ahead)
            while self._bytes > FREED_BYTES and ahead.await_passed(self._kept[0][0]):
                self._drop_oldest()
            self.many = self._bytes > _LITTLE_BYTES

    def let_go(self, ahead: Ahead) -> None:
        """Free the values that no other worker needs any more."""
        if self._kept and ahead.passed(self._kept[-1][0]):
            self._kept.clear()
            self._bytes = 0
        while self._kept and ahead.passed(self._kept[0][0]):
            self._drop_oldest()
        self.many = self._bytes > _LITTLE_BYTES
        self._look_at = len(self._kept) + _LOOK_EVERY

    def take(self) -> dict[int, torch.Tensor]:
        """All values that are still kept; this object gives them up."""
        taken = {handle: value for _, values, _ in self._kept for handle, value in values.items()}
        self._kept.clear()
        self._bytes, self._look_at, self.many = 0, _LOOK_EVERY, False
        return taken

    def _drop_oldest(self) -> None:
        self._bytes -= self._kept.popleft()[2]
