"""Values that were freed, but that another worker may still need: one that is in an earlier step, where it may die.

A worker that comes to a step without collectives does not wait for the others, and so runs ahead. Where a slower worker
dies in that step, healing gives the step again to all, with the values that it reads. So a worker that frees values
keeps them until all workers have finished the commands before. At most `FREED_BYTES` of them: beyond that the worker
waits for the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Protocol

import torch

FREED_BYTES = 64 << 20
"""So much memory a worker holds at most for others that are behind it, beside the values that are in use."""


class Ahead(Protocol):
    """What of `collectives.Meetings` is needed here."""

    def passed(self, command: int, ranks: Iterable[int] | None = None) -> bool: ...

    def await_passed(self, command: int, ranks: Iterable[int] | None = None) -> bool: ...


class Freed:
    """The values that one worker has freed, by the command that freed them."""

    def __init__(self) -> None:
        self._kept: deque[tuple[int, dict[int, torch.Tensor], int]] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._kept)

    def keep(self, command: int, values: dict[int, torch.Tensor], ahead: Ahead) -> None:
        """A command frees values, by handle. Waits where others are so far behind that they would be too many; not
        longer than until a worker dies."""
        if ahead.passed(command):
            self._kept.clear()
            self._bytes = 0
            return
        size = sum([value.nbytes for value in values.values()])
        self._kept.append((command, values, size))
        self._bytes += size
        while self._bytes > FREED_BYTES and ahead.await_passed(self._kept[0][0]):
            self._drop_oldest()

    def let_go(self, ahead: Ahead) -> None:
        """Let go of what nobody needs any more."""
        while self._kept and ahead.passed(self._kept[0][0]):
            self._drop_oldest()

    def take(self) -> dict[int, torch.Tensor]:
        """All that is still kept, which is given up here."""
        taken = {handle: value for _, values, _ in self._kept for handle, value in values.items()}
        self._kept.clear()
        self._bytes = 0
        return taken

    def _drop_oldest(self) -> None:
        self._bytes -= self._kept.popleft()[2]
