"""Training that is killed again and again, and started anew from its last checkpoint.

    python -m tests.healing.killed FOLDER SEED KILLS

runs it so often in a process of its own, which is killed by SIGKILL somewhere in or behind a random step, and then to
the end. FOLDER/last is its checkpoint.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

import monarch
from monarch.distributed import Mesh

ROWS, BATCH, EPOCHS, EVERY = 24, 4, 3, 2


def rows_of(mesh: Mesh | None) -> Any:
    """The stream of all epochs."""
    return monarch.data.stream(torch.arange(ROWS), mesh, mesh and "[@data]", batch=BATCH, shuffle=5, epochs=EPOCHS)


def train(folder: Path, told: int) -> None:
    """Counts how often each row was in a step, and in which one last; a byte is written to `told` behind each step."""
    with Mesh(data=2) as mesh, rows_of(mesh) as stream:
        index = monarch.distribute(torch.arange(ROWS), mesh, "[@data]")
        seen, last = (monarch.distribute(torch.zeros(ROWS, dtype=torch.int64), mesh, "[@data]") for _ in range(2))

        @monarch.program(mesh=mesh)
        def step(batch: torch.Tensor, number: torch.Tensor) -> None:
            there = (index[:, None] == batch[None, :]).any(1)
            seen.add_(there)
            last.copy_(torch.where(there, number, last))

        state = {"seen": seen, "last": last, "stream": stream, "step": 0}
        if (folder / "last").exists():
            monarch.load(folder / "last", into=state)
        saving: list[Any] = []
        for batch in stream:
            number = int(state["step"]) + 1  # type: ignore[call-overload]
            step(batch, torch.tensor(number))
            state["step"] = number
            if number % EVERY == 0:
                for former in saving:
                    former.result()
                saving = [monarch.save(state, folder / "last")]
            os.write(told, b".")
        for former in saving:
            former.result()
        monarch.save(state, folder / "last").result()


def run(folder: Path, chance: random.Random, kill: bool) -> None:
    """One process; killed, some milliseconds behind a step."""
    ours, theirs = os.pipe()
    child = os.fork()
    if not child:
        try:
            os.close(ours)
            train(folder, theirs)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)
    os.close(theirs)
    steps = chance.randrange(1, 9) if kill else 10**9
    while steps and os.read(ours, 1):
        steps -= 1
    if kill:
        threading.Event().wait(0.01 * chance.random())
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    os.close(ours)
    assert kill or status == 0


if __name__ == "__main__":
    chance = random.Random(int(sys.argv[2]))
    for kill in [True] * int(sys.argv[3]) + [False]:
        run(Path(sys.argv[1]), chance, kill)
