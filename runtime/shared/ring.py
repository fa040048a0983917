"""Commands in shared memory: one writer, and every worker reads all of them.

A record is its length (8 bytes, with itself, a multiple of 8) and its body; a length of 0 sends the reader back to the
start. The writer publishes records by moving the mesh's head word, so its cost does not depend on the number of
workers. Room is reused once every worker has finished the commands that it held.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable

from monarch.runtime.shared import signals
from monarch.runtime.shared.signals import Signals

_HEADER = 8
_LENGTH = struct.Struct("q")
_BACK = _LENGTH.pack(0)


class Full(Exception):
    """No room until the command with this number has been finished by all workers."""

    def __init__(self, sequence: int) -> None:
        super().__init__(sequence)
        self.sequence = sequence


class Space:
    """The free part of a circular buffer: pure bookkeeping, in bytes counted from the start of time.

    Blocks do not wrap around; a block is given back once its command is finished, oldest first.
    """

    def __init__(self, size: int, restart: bool) -> None:
        self.size = size
        self.restart = restart  # from offset 0 whenever nothing is in use, so as to touch few pages
        self.head = 0
        self.tail = 0
        self.touched = 0  # how far into the buffer blocks have reached
        self._blocks: deque[tuple[int, int]] = deque()  # (command, end)

    def reserve(self, size: int, finished: int) -> int:
        """Where to put `size` bytes (the position modulo `self.size` is the offset). `finished` is the number of
        commands that all workers have finished. Raises Full where there is no room yet."""
        blocks = self._blocks
        while blocks and blocks[0][0] < finished:
            self.tail = blocks.popleft()[1]
        at = self.head
        if not blocks:
            if self.restart:
                at += -at % self.size
            self.tail = at
        if at % self.size + size > self.size:
            at += self.size - at % self.size
        if at + size - self.tail > self.size:
            assert blocks, f"{size} bytes never fit into {self.size}"
            raise Full(blocks[0][0])
        return at

    def take(self, at: int, size: int, command: int) -> None:
        """Note that `command` uses these bytes. Commands come in order; to note one again changes nothing."""
        end, reached = at + size, at % self.size + size
        self.head = end if end > self.head else self.head
        self.touched = reached if reached > self.touched else self.touched
        if not self._blocks or self._blocks[-1][0] < command:
            self._blocks.append((command, end))

    def in_use(self, finished: int) -> bool:
        return bool(self._blocks) and self._blocks[-1][0] >= finished


def record_size(body: int) -> int:
    """The bytes of the ring that a record with a body of so many bytes takes."""
    return (_HEADER + body + 7) & -8


Room = tuple[int, int, memoryview, bytes, memoryview, bytes]
"""Where in a ring a record is to go: its position and size; `turn` and `back`, where `turn[:] = back` sends readers
back to the start, if it is to go there; `view` and `record`, where `view[:] = record` writes it."""


class RingWriter:
    def __init__(self, memory: memoryview, signals_: Signals) -> None:
        self.memory = memory
        self.space = Space(len(memory), restart=False)
        self._signals = signals_
        self._nothing = memory[:0]

    def room(self, body: bytes, finished: int) -> Room:
        """The place for a record, and the bytes to write there. Writes nothing; raises Full."""
        space, memory, length = self.space, self.memory, len(body)
        size, before, ring = record_size(length), space.head, space.size
        # Room for the length word that sends readers back to the start is always there: sizes are multiples of 8.
        at = space.reserve(size, finished)
        turn, back = self._nothing, b""
        if at != before and before % ring:
            turn, back = memory[before % ring : before % ring + _HEADER], _BACK
        offset = at % ring
        view = memory[offset : offset + _HEADER + length]
        return at, size, turn, back, view, _LENGTH.pack(size) + body

    def write(self, body: bytes, command: int, finished: int) -> None:
        """Append a record; workers see it after `publish`. Raises Full."""
        at, size, turn, back, view, record = self.room(body, finished)
        turn[:], view[:] = back, record
        self.space.take(at, size, command)

    def publish(self) -> None:
        head = self.space.head
        if head > self._signals.words[signals.HEAD]:
            self._signals.advance(signals.HEAD, head)


class RingReader:
    def __init__(self, memory: memoryview, signals_: Signals) -> None:
        self.memory = memory
        self._signals = signals_
        self._at = 0

    def read(self, idle: Callable[[int], None]) -> bytearray:
        """The next record's body: waits for one. `idle(seen)` is called before each sleep."""
        at, memory, words = self._at, self.memory, self._signals.words
        ring = len(memory)
        if words[signals.HEAD] <= at:
            self._signals.wait(signals.HEAD, at + 1, idle)
        offset = at % ring
        (size,) = _LENGTH.unpack_from(memory, offset)
        if size == 0:
            at += ring - offset
            offset = 0
            (size,) = _LENGTH.unpack_from(memory, 0)
        self._at = at + size
        return bytearray(memory[offset + _HEADER : offset + size])
