"""`monarch doctor`: how it prints, and a run on this machine."""

from __future__ import annotations

import io
import json
import re
import subprocess
from dataclasses import replace

from rich.console import Console

from monarch.compiler.cli.doctor import show, toolchain
from monarch.runtime.hosts.doctor.facts import Facts, Measured
from monarch.runtime.hosts.doctor.findings import sections
from monarch.runtime.transport import plug
from tests import python
from tests.runtime.hosts.doctor.facts import CONNECTX, FACTS, LIMITS, MACHINE

SHOWN = """\
machine: Linux 6.1, x86_64, Python 3.11
  ✓ cores          8
  ✓ memory         60.0 GiB free of 64.0 GiB
  ✓ shared memory  all memory (/dev/shm is not used)
  ! open files     1,024 at most: enough for small meshes, not for hundreds of
                   workers or hosts
                   → ulimit -n 65536, before Monarch is started (a service:
                     LimitNOFILE=65536).
  ✓ locked memory  no limit

packages
  ✓ installed      monarchc 1.0, torch 1.0, grpcio 1.0, protobuf 1.0,
                   cryptography 1.0, cloudpickle 1.0, numpy 1.0, triton 1.0, ray
                   1.0

kernels
  ✓ C++ compiler   g++ 12.2.0 (/usr/bin/g++)
  ✓ Triton         3.6.0
  ✓ cache          /home/me/.cache/monarch/kernels (3 kernels, 29.3 KiB)

GPUs
  – GPUs           none

RDMA
  ✓ mlx5_0         port 1 active, InfiniBand, 100 Gb/sec (4X EDR)

transports: 64 MiB from one process of this machine to another
  ✓ shm            writes 9.0 GiB/s, reads 8.0 GiB/s
  ✗ tcp            the other process ended
  ✓ a plain copy   10.0 GiB/s

listening
  ✓ TLS            certificates in /home/me/node1 for node1, valid until
                   2029-01-01
"""


def shown(facts: Facts, width: int) -> str:
    out = io.StringIO()
    show(Console(file=out, width=width, no_color=True, highlight=False, markup=False), sections(facts))
    return out.getvalue()


def test_findings_are_shown_with_what_to_do_below_them() -> None:
    facts = replace(
        FACTS,
        machine=replace(MACHINE, rdma=(CONNECTX,), limits=replace(LIMITS, open_files=(1024, 524288))),
        transports=(FACTS.transports[0], Measured("tcp", missing="the other process ended")),
    )
    assert shown(facts, 80) == SHOWN


def test_what_a_machine_says_of_itself_cannot_command_the_terminal() -> None:
    text = shown(replace(FACTS, machine=replace(MACHINE, gpus_seen=("\x1b[2Jgpu",))), 80)
    assert "\x1b" not in text and "[2Jgpu" in text


def test_no_line_is_wider_than_the_screen() -> None:
    facts = replace(
        FACTS, machine=replace(MACHINE, gpus_seen=("NVIDIA H100",) * 8, rdma_missing="pyverbs: " + "why " * 60)
    )
    for width in (72, 80, 120):
        assert max(map(len, shown(facts, width).splitlines())) <= width


def test_this_machines_compiler_is_tried() -> None:
    tools = toolchain()
    assert bool(tools.compiler) and not tools.compiler_error and not tools.cache_error


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = ["-c", "from monarch.compiler.cli.hosts import main; main()", "doctor", *arguments]
    return python.run(*command, capture_output=True, text=True, timeout=120, env={"PATH": "/usr/bin:/bin"})


def test_a_run_on_this_machine() -> None:
    done = run()
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert re.search(r"✓ tcp +writes [\d.]+ [MG]iB/s, reads [\d.]+ [MG]iB/s\n", done.stdout)
    assert re.search(r"– TLS +no certificates named", done.stdout)


def test_a_run_as_json() -> None:
    done = run("--json")
    assert done.returncode == 0, done.stdout + done.stderr
    said = json.loads(done.stdout)
    assert [each["transport"] for each in said["facts"]["transports"]] == list(plug.TRANSPORTS)
    assert said["facts"]["machine"]["versions"]["torch"]
    assert [section["title"] for section in said["sections"]][0] == "machine"
    assert {finding["state"] for section in said["sections"] for finding in section["findings"]} <= {
        "good", "absent", "lacking",
    }  # fmt: skip
