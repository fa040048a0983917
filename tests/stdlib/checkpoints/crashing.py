"""A program that saves, and is killed at a chosen call of the file system: it, or one of its workers.

    python -m tests.stdlib.checkpoints.crashing FOLDER

reads lines "WHO NUMBER" (who is "controller" or "worker"), does each in a process of its own that saves twice to a path
in the folder and is killed by SIGKILL at that call of the second save, and prints a line for each: how many calls there
were in it by then, and whether the second `save` was told to be done.
"""

from __future__ import annotations

import mmap
import os
import signal
import sys
import threading
from pathlib import Path
from struct import Struct
from typing import Any

import torch

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import CheckpointError

CALLS = frozenset(
    "open mkdir rmdir unlink rename replace listdir scandir stat fsync ftruncate pwrite write flock".split()
)
_WORDS = Struct("=4q")  # armed; the number that kills, of controller or worker; the count; whether the save is done


def main(folder: Path) -> None:
    for line in sys.stdin:
        who, number = line.split()
        shared = mmap.mmap(-1, 4096)
        child = os.fork()
        if not child:
            os.dup2(2, 1)  # what is printed there is nobody's answer
            try:
                save_twice(folder / f"{who}-{number}", who, int(number), shared)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        _, _, count, done = _WORDS.unpack_from(shared)
        print(count, done, flush=True)


def save_twice(path: Path, who: str, number: int, shared: mmap.mmap) -> None:
    controller = os.getpid()

    def hook(frame: Any, event: str, function: Any) -> None:
        if event != "c_call" or function.__name__ not in CALLS or not shared[0]:
            return
        if (os.getpid() == controller) != (who == "controller"):
            return
        armed, kills, count, done = _WORDS.unpack_from(shared)
        if count == kills:
            os.kill(os.getpid(), signal.SIGKILL)
        _WORDS.pack_into(shared, 0, armed, kills, count + 1, done)

    threading.setprofile(hook)  # for the threads of workers too, which are forks of this process
    with Mesh(data=2) as mesh:
        first, second = (monarch.distribute(torch.arange(8.0) * each, mesh, "[@data]") for each in (1, 2))
        monarch.save({"x": first, "number": 1}, path).result()
        _WORDS.pack_into(shared, 0, 1, number, 0, 0)
        sys.setprofile(hook)
        try:
            monarch.save({"x": second, "number": 2}, path).result()
        except CheckpointError:  # a worker was killed
            return
        _, _, count, _ = _WORDS.unpack_from(shared)
        _WORDS.pack_into(shared, 0, 0, number, count, 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
