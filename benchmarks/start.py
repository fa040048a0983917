"""How long a mesh takes to start: from asking for it to every worker's first matmul, with torch already imported.

The first mesh of a process also forks the warm parent, so each start is timed in a process of its own. Memory is read
from /proc/PID/smaps_rollup after the matmul: `Pss` counts a page that n processes share as 1/n of it, and the private
pages are what a worker would give back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import Row, table

REPETITIONS = 5
MESHES = ((8, 0.25), (64, 1.0))


@dataclass(frozen=True)
class Start:
    """Seconds to import torch and to the first result; MiB a worker (mean)."""

    torch: float
    first: float
    pss: float
    private: float


def start_once(workers: int) -> Start:
    """Start a mesh in a fresh process."""
    root = Path(__file__).resolve().parent.parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root / ".src"), str(root)])}
    command = [sys.executable, "-m", "benchmarks.start", str(workers)]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=True)
    return Start(**json.loads(done.stdout))


def _measure(workers: int) -> Start:
    import time

    begin = time.perf_counter()
    import torch

    imported = time.perf_counter()
    from benchmarks.dispatch import plan_of
    from monarch.compiler.plan import MeshSpec
    from monarch.runtime.controller.executor import MeshExecutor

    ready = time.perf_counter()
    with MeshExecutor(MeshSpec.of(w=workers)) as executor:
        (handle,) = executor.run(plan_of(executor.mesh), [torch.ones(4, 4)])
        executor.shards(handle)
        first = time.perf_counter() - ready
        memory = [_memory(pid) for pid in executor.worker_pids()]
    pss, private = (sum(column) / len(memory) / 1024 for column in zip(*memory, strict=True))
    return Start(imported - begin, first, pss, private)


def _memory(pid: int) -> tuple[int, int]:
    """Pss and private memory of a process, in KiB."""
    fields = {}
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
        name, value, *_ = line.split()
        fields[name] = int(value)
    return fields["Pss:"], fields["Private_Clean:"] + fields["Private_Dirty:"]


def rows() -> list[Row]:
    """The ratio is to one second: the aims are seconds over importing torch."""
    samples: dict[int, list[Start]] = {workers: [] for workers, _ in MESHES}
    for _ in range(REPETITIONS):
        for workers, _ in MESHES:
            samples[workers].append(start_once(workers))
    found = []
    for workers, target in MESHES:
        starts = samples[workers]
        middle = sorted(starts, key=lambda start: start.first)[len(starts) // 2]
        note = (
            f"importing torch takes {middle.torch:.2f} s; {middle.pss:.1f} MiB a worker (PSS), "
            f"{middle.private:.1f} MiB private"
        )
        firsts = tuple(start.first for start in starts)
        found.append(
            Row(f"start of {workers} workers to first matmul", firsts, (1.0,) * len(starts), "1 s", target, note)
        )
    return found


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(_measure(int(sys.argv[1])).__dict__))
    else:
        print(table(rows()))
