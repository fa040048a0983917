"""Registered memory at its owner: the regions, the peers that may reach them, and writes of words.

Numbers are never used twice within an endpoint, and keys are random, so a dropped region is never taken for another
one.
"""

from __future__ import annotations

import hmac
import itertools
import secrets
import threading

from monarch.runtime.shared import futex
from monarch.runtime.transport import buffers
from monarch.runtime.transport.interface import AccessRefused, Memory, Region
from monarch.runtime.transport.plug import Owned

WORD = 8
_MOST = 1 << 63


class Regions:
    """All regions of one endpoint."""

    def __init__(self) -> None:
        self._owned: dict[int, Owned] = {}
        self._words: dict[int, memoryview] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._owned)

    def add(self, memory: Memory, file: int | None = None, offset: int = 0) -> Owned:
        """Take memory in. Raises MonarchError where it is not contiguous, or the file does not hold it."""
        device = buffers.device_of(memory)
        if device == "cpu":
            view = buffers.view_of(memory)
            address, size, writable = buffers.address_of(view), view.nbytes, not view.readonly
        else:
            view = None
            address, size = buffers.device_range(memory)
            writable = True
        if file is not None:
            buffers.check_file(file, offset, size)
        owned = Owned(
            number=next(self._numbers),
            key=secrets.token_bytes(16),
            memory=memory,
            view=view,
            address=address,
            size=size,
            writable=writable,
            file=file,
            offset=offset,
            device=device,
        )
        with self._lock:
            self._owned[owned.number] = owned
            if view is not None and address % WORD == 0 and size >= WORD and writable:
                self._words[owned.number] = view[: size // WORD * WORD].cast("q")
        return owned

    def remove(self, owned: Owned) -> None:
        with self._lock:
            self._owned.pop(owned.number, None)
            self._words.pop(owned.number, None)

    def find(self, number: int) -> Owned | None:
        return self._owned.get(number)

    def all(self) -> list[Owned]:
        with self._lock:
            return list(self._owned.values())

    def checked(self, number: int, key: bytes, offset: int, size: int, write: bool) -> Owned:
        """The region, if the key is its key and the range is inside. Raises AccessRefused."""
        owned = self._owned.get(number)
        if owned is None or owned.dropped:
            raise AccessRefused(
                f"there is no region {number}, or it was dropped",
                hint="Its owner has to keep it registered for as long as others use it.",
            )
        if not hmac.compare_digest(owned.key, key):
            raise AccessRefused(f"the key is not that of region {number}")
        if offset + size > owned.size:
            raise AccessRefused(
                f"bytes {offset} to {offset + size} are out of the bounds of region {number}, which has {owned.size}"
            )
        if write and not owned.writable:
            raise AccessRefused(f"region {number} cannot be written: its memory is read-only")
        return owned

    # -- words -----------------------------------------------------------------------------------------------------

    def has_words(self, number: int) -> bool:
        """Whether its memory is aligned to 8 bytes, and can be written."""
        return number in self._words

    def word(self, number: int, key: bytes, offset: int) -> Owned:
        """The region of a word at `offset`. Raises AccessRefused where there can be no word."""
        owned = self.checked(number, key, offset, WORD, write=True)
        if number not in self._words or offset % WORD:
            raise AccessRefused(
                f"there is no word at byte {offset} of region {number}: words are aligned to 8 bytes, in host memory"
            )
        return owned

    def store(self, owned: Owned, offset: int, value: int) -> None:
        """Set a word that `word` has checked, after all that this thread has written before it, and wake its
        sleepers."""
        words = self._words.get(owned.number)
        if words is None or owned.dropped:
            return
        if not futex.ORDERED:
            futex.fence()
        words[offset >> 3] = value
        futex.fence()
        futex.wake(owned.address + offset)

    def wake(self, owned: Owned, offset: int) -> None:
        futex.wake(owned.address + offset)

    def fetch_add(self, owned: Owned, offset: int, value: int) -> int:
        """On the I/O thread only: that is what makes it atomic."""
        words = self._words[owned.number]
        old = words[offset >> 3]
        self.store(owned, offset, (old + value + _MOST) % (2 * _MOST) - _MOST)
        return old

    def compare_swap(self, owned: Owned, offset: int, expected: int, desired: int) -> int:
        """On the I/O thread only."""
        old = self._words[owned.number][offset >> 3]
        if old == expected:
            self.store(owned, offset, desired)
        return old


def region_of(owned: Owned) -> Region:
    return Region(owned.number, owned.key.hex(), owned.size, owned.details)
