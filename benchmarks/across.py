"""Two workers on two hosts: all_reduce over the tcp transport against gloo's, which crosses the same loopback; and
what a compiled step sends besides its tensors.

The hosts are two agents of this machine, so that nothing but TCP joins their workers.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import monarch
from benchmarks.all_reduce import WORKERS, Gloo, plan_of
from benchmarks.measure import Row, interleaved, seconds, table
from monarch.compiler.plan import MeshSpec, Plan

SIZES = ((1 << 10, 100), (64 << 10, 50), (1 << 20, 20), (16 << 20, 4))
REPETITIONS = 15
STEPS = 10
MONARCH = str(Path(sys.executable).with_name("monarch"))


class Hosts:
    """Two host agents on loopback, attached."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        token = Path(self._folder.name) / "token"
        token.touch(0o600)
        token.write_text(secrets.token_hex(32))
        command = [MONARCH, "host", "--listen", "127.0.0.1:0", "--token-file", str(token)]
        cores = sorted(os.sched_getaffinity(0))
        self._agents = []
        for number in range(2):
            # As hosts of their own, each with a core: a worker computes in one thread, as gloo's processes do.
            os.sched_setaffinity(0, {cores[number % len(cores)]})
            agent = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
            self._agents.append(agent)
        os.sched_setaffinity(0, cores)
        addresses = []
        for agent in self._agents:
            assert agent.stdout is not None
            addresses.append(agent.stdout.readline().split(" on ")[1].split()[0])
        self.attached = monarch.hosts(addresses, token=token, transports=["tcp"])

    def close(self) -> None:
        self.attached.close()
        for agent in self._agents:
            agent.terminate()
            agent.wait()
        self._folder.cleanup()


class Ours:
    """A worker on each host. A step of `count` all_reduces is timed from the controller, its start and end included."""

    def __init__(self, hosts: Hosts) -> None:
        self.executor: Any = hosts.attached.start(MeshSpec.of(w=WORKERS))
        for pid in self.executor.worker_pids():  # and may run where gloo's may
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), os.sched_getaffinity(0))
        self._plans: dict[tuple[int, int], tuple[Any, Plan]] = {}

    def measure(self, size: int, count: int) -> float:
        if (size, count) not in self._plans:
            plan = plan_of(self.executor.mesh, size // 4, count)
            self._plans[size, count] = self.executor.put(torch.randn(WORKERS, size // 4), plan.inputs[0].type), plan
        value, plan = self._plans[size, count]
        return seconds(lambda: self.executor.wait(self.executor.run(plan, [value])[0])) / count

    def control_messages(self, size: int, count: int) -> int:
        """How many handshakes, registrations and the like the workers send each other in some steps."""
        connection = self.executor.connection
        before = connection.link_messages()
        for _ in range(STEPS):
            self.measure(size, count)
        return int(connection.link_messages()) - before

    def close(self) -> None:
        self.executor.close()


def rows() -> list[Row]:
    hosts = Hosts()
    ours, gloo = Ours(hosts), Gloo()
    try:
        found = []
        for size, count in SIZES:
            mine, other = interleaved(
                lambda size=size, count=count: ours.measure(size, count),  # type: ignore[misc]
                lambda size=size, count=count: gloo.measure(size, count),  # type: ignore[misc]
                REPETITIONS,
                warm=3,
            )
            name = f"{size >> 10} KiB" if size < 1 << 20 else f"{size >> 20} MiB"
            note = f"{ours.control_messages(size, count)} control messages in {STEPS} steps"
            found.append(Row(f"all_reduce of {name}, 2 hosts over TCP", mine, other, "gloo, 2 processes", None, note))
        return found
    finally:
        gloo.close()
        ours.close()
        hosts.close()


if __name__ == "__main__":
    print(table(rows()))
