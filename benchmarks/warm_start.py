"""How soon the first step of the demo's training has run in a new process, over one that only imports torch.

Everything that is kept on disk is there: built kernels, and for the first row the plan, which `monarchc compile` would
have written. Each start is a process of its own, timed from outside, from asking the system for it to the line that it
prints; processes that import torch take turns with them, and their time is taken off.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.measure import Row, duration, interleaved, table

TARGET = 0.5
"""Seconds over importing torch, from a plan's file."""
BATCH = 16
REPETITIONS = 9


def _by_torch() -> None:
    import torch  # noqa: F401

    print("done", flush=True)


def _from_plan(path: str) -> None:
    """As `monarchc run step.mplan --fill zeros` does it."""
    import torch  # noqa: F401

    from monarch.compiler.cli.entry import collect_rarely

    collect_rarely()
    from monarch.compiler.cli.feed import feed
    from monarch.compiler.cli.run import run_steps
    from monarch.compiler.execution.factories import executor_for
    from monarch.compiler.plan import Plan

    plan = Plan.load(path, report=False)
    executor = executor_for(plan.mesh)
    fed = feed(plan, {}, {}, "zeros")
    run_steps(executor, plan, fed, 1)
    print("done", flush=True)
    print(statistics.median(run_steps(executor, plan, fed, 1)[1][0] for _ in range(5)), flush=True)
    executor.close()


def _from_python(_: str) -> None:
    """As a script does it, which makes its model, and whose program is traced and compiled at its first call."""
    import torch

    from benchmarks.train_step import SEQUENCE, make_step
    from monarch.distributed import Mesh

    with Mesh(data=2) as mesh:
        step = make_step(mesh)
        tokens, targets = torch.randint(256, (2, BATCH, SEQUENCE))
        step(tokens, targets).item()
        print("done", flush=True)


def _write_plan(path: str) -> None:
    """The plan of the first call, and its kernels."""
    import torch

    from benchmarks.train_step import SEQUENCE, make_step
    from monarch.distributed import Mesh

    tokens, targets = torch.randint(256, (2, BATCH, SEQUENCE))
    make_step(Mesh.abstract(data=2)).compile(tokens, targets).save(path)


def start(side: str, path: str, cache: str) -> tuple[float, list[str]]:
    """Seconds until a new process prints its first line; and the lines after that."""
    root = Path(__file__).resolve().parent.parent
    folders = os.pathsep.join([str(root / ".src"), str(root)])
    env = {**os.environ, "PYTHONPATH": folders, "MONARCH_CACHE": cache, "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "benchmarks.warm_start", side, path]
    begin = time.perf_counter()
    with subprocess.Popen(command, env=env, cwd=root, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first = process.stdout.readline()
        took = time.perf_counter() - begin
        rest = process.stdout.read().split()
    if process.returncode or first != "done\n":
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return took, rest


def rows() -> list[Row]:
    """The ratio of the first is to half a second."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        path, cache = str(Path(folder, "step.mplan")), str(Path(folder, "cache"))
        _write_plan(path)
        for side, what, target in (("plan", "from a plan's file", 1.0), ("python", "from Python", None)):
            over, step = _over_torch(side, path, cache)
            note = "over importing torch" + (f"; {duration(step)} of it are the step's own" if step else "")
            against = duration(TARGET)
            found.append(Row(f"warm start, {what}", over, (TARGET,) * len(over), against, target, note))
    return found


def _over_torch(side: str, path: str, cache: str) -> tuple[tuple[float, ...], float]:
    steps: list[float] = []

    def ours() -> float:
        took, rest = start(side, path, cache)
        steps.extend(map(float, rest))
        return took

    mine, torches = interleaved(ours, lambda: start("torch", path, cache)[0], REPETITIONS)
    return tuple(a - b for a, b in zip(mine, torches, strict=True)), statistics.median(steps) if steps else 0.0


SIDES = {"plan": _from_plan, "python": _from_python}

if __name__ == "__main__":
    if not sys.argv[1:]:
        print(table(rows()))
    elif sys.argv[1] == "torch":
        _by_torch()
    else:
        SIDES[sys.argv[1]](sys.argv[2])
