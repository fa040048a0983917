"""A long cable: `wire.py NEAR FAR` makes two network devices of these names, and carries frames between them.

It reads lines "DELAY LOSS", seconds and a probability, and answers each with "ready" once it is in force, and once
before, when the devices are there. They go when it ends: when its input is closed, or it is killed.
"""

from __future__ import annotations

import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

SET_NAME = 0x400454CA  # TUNSETIFF
ETHERNET, NO_HEADER = 0x0002, 0x1000  # IFF_TAP, IFF_NO_PI
FRAMES = 10_000  # on their way at most, each way; more are lost, as in a switch


def device(name: str) -> int:
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, SET_NAME, struct.pack("16sH", name.encode(), ETHERNET | NO_HEADER))
    return end


def carry(ends: tuple[int, int]) -> None:
    under_way: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}  # by where they come out
    chance = random.Random(1)
    delay = loss = 0.0
    while True:
        due = min((frames[0][0] for frames in under_way.values() if frames), default=None)
        wait = None if due is None else max(0.0, due - time.monotonic())
        readable, _, _ = select.select([0, *ends], [], [], wait)
        if 0 in readable:
            line = os.read(0, 1000)
            if not line:
                return
            delay, loss = map(float, line.split())
            os.write(1, b"ready\n")
        for end in ends:
            frames = under_way[ends[end == ends[0]]]
            for _ in range(64 if end in readable else 0):
                try:
                    frame = os.read(end, 65536)
                except (BlockingIOError, OSError):  # nothing more, or the device is not up
                    break
                if chance.random() >= loss and len(frames) < FRAMES:
                    frames.append((time.monotonic() + delay, frame))
        now = time.monotonic()
        for end, frames in under_way.items():
            while frames and frames[0][0] <= now:
                try:
                    os.write(end, frames.popleft()[1])
                except OSError:
                    pass  # the device is down: the frame is lost


if __name__ == "__main__":
    both = (device(sys.argv[1]), device(sys.argv[2]))
    os.write(1, b"ready\n")
    carry(both)
