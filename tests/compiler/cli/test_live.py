"""`monarch top` and `monarch dashboard` find a running program of this user, and read what it does."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import python
from tests.compiler.cli.test_hosts import command

PROGRAM = """
import sys
import torch, monarch
from monarch.distributed import Mesh

def main():
    mesh = Mesh(data=2)
    x = monarch.distribute(torch.ones(4), mesh, "[@data]")

    @monarch.program
    def train_step(x):
        return x.sum()

    print(train_step(x).item(), flush=True)
    sys.stdin.readline()

main()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """A folder for sockets that no other program has."""
    return {**os.environ, "TMPDIR": str(tmp_path), "MONARCH_LIVE": "1"}


@pytest.fixture
def program(environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    running = python.Popen("-c", PROGRAM, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert running.stdout is not None and running.stdin is not None
    assert running.stdout.readline() == "4.0\n"
    yield running
    if running.poll() is None:
        running.stdin.close()
        running.wait(60)
    running.stdout.close()


def monarch(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    return python.run(*command(*arguments), capture_output=True, text=True, timeout=120, env=environment)


def test_a_program_is_shown_as_text_as_json_and_as_a_page(
    program: subprocess.Popen[str], environment: dict[str, str]
) -> None:
    pid = str(program.pid)
    shown = monarch(environment, "top", "--once", pid)
    assert shown.returncode == 0, shown.stderr
    assert f"process {pid}" in shown.stdout and re.search(r"mesh<data=2> +train_step +1 ", shown.stdout)
    seen = json.loads(monarch(environment, "top", "--json", pid).stdout)
    assert seen["meshes"][0]["program"] == "train_step" and seen["program"]["pid"] == program.pid

    serving = python.Popen(
        *command("dashboard", pid), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    assert serving.stdout is not None and serving.stderr is not None
    assert serving.stdout.readline() == f"process {pid} is shown at\n"
    url = serving.stdout.readline().strip()
    address, token = url.split("?token=")
    with urllib.request.urlopen(url) as answer:
        assert "<title>Monarch</title>" in answer.read().decode()
    for what, found in (("snapshot", "train_step"), ("stacks", "worker 1")):
        request = urllib.request.Request(address + what, headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(request) as answer:
            assert found in answer.read().decode()
    serving.send_signal(signal.SIGINT)
    assert serving.wait(60) == 0, serving.stderr.read()
    serving.stdout.close()
    serving.stderr.close()

    assert program.stdin is not None
    program.stdin.close()
    assert program.wait(60) == 0
    gone = monarch(environment, "top", "--once", pid)
    assert gone.returncode == 2 and re.search("can(not)? be seen", gone.stderr) and "MONARCH_LIVE=1" in gone.stderr
