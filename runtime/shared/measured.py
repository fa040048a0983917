"""Measurements of workers: the memory into which each of them writes its own, and which the controller maps too.

Nothing is sent, and the steps that ran are known also where a worker died, or the mesh is closed while it is traced.
The memory is a ring of 8-byte words behind words of its own, two of which count all words ever written: up to where the
ring is being written, and up to where it has been. A record ends with its length, so that it is read from the newest
back, as far as the ring has room: a long run keeps its last steps, and a third word counts all of them.

    step       kind, number, start, end, plan, failed, then (instruction, start, end, held, waited) of each span
    other      kind, number, start, end

Times are CLOCK_MONOTONIC's, in nanoseconds: one clock for all processes of a host.
"""

from __future__ import annotations

import time

import torch

from monarch.compiler.config import settings

clock = time.monotonic_ns

WRITING, WRITTEN, STEPS, HEAD = range(4)
"""Words at the start of a worker's buffer, and how many."""


def buffer_words(workers: int) -> int:
    """The size of each worker's buffer: the setting `trace_memory` on all of them, 32 MiB at most and 1 MiB at least on
    one. Pages are taken when they are first written."""
    return max(1 << 20, min(32 << 20, settings.trace_memory // workers)) // 8


def records(buffer: torch.Tensor) -> list[list[int]]:
    """The records that a buffer still holds, oldest first. It may be written meanwhile: a copy is looked at."""
    written = int(buffer[WRITTEN])
    room = len(buffer) - HEAD
    words = buffer[HEAD : HEAD + min(written, room)].clone()
    oldest = max(0, int(buffer[WRITING]) - room)  # records written meanwhile have overwritten the oldest
    found: list[list[int]] = []
    end = written
    while end > oldest:
        length = int(words[(end - 1) % room])
        if not 1 < length <= end - oldest:
            break
        start = (end - length) % room
        row = words[start : start + length].tolist()
        row += words[: length - len(row)].tolist()
        found.append(row[:-1])
        end -= length
    return found[::-1]


def measured_part(memory: memoryview) -> memoryview:
    """Of a buffer's bytes those that have been written."""
    words = memory.cast("q")
    return memory[: 8 * (HEAD + min(words[WRITTEN], len(words) - HEAD))]
