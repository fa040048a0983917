"""Agents end with the process that launched them, however that ends."""

from __future__ import annotations

import os
import select
import signal
import subprocess

import pytest

from tests import python

LAUNCH = """
import os, signal, sys
import monarch.launch
hosts = monarch.launch.local(1)
print(*(info.pid for info in hosts._attached.attached.tree.hosts), flush=True)
sys.stdin.readline()
"""


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", ["its end", "SIGKILL"])
def test_agents_end_with_their_launcher(how: str) -> None:
    process = python.Popen("-c", LAUNCH, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    with process:
        agent = os.pidfd_open(int(process.stdout.readline()))
        if how == "SIGKILL":
            process.send_signal(signal.SIGKILL)
        else:
            process.stdin.write("\n")
            process.stdin.flush()
        assert process.wait(60) == (-signal.SIGKILL if how == "SIGKILL" else 0)
        with os.fdopen(agent):
            assert select.select([agent], [], [], 60)[0], "an agent outlived its launcher"
