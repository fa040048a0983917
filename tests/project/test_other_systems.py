"""What needs no workers runs on systems that are not Linux: tested by hiding what Linux alone has, or not Windows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import torch
import monarch
from monarch.distributed import Mesh

mesh = Mesh(data=2, model=2)
weight = monarch.distribute(torch.randn(8, 8), mesh, "[-, @model]")


@monarch.program(mesh=mesh)
def step(x: "f32[4@data, 8]"):
    return torch.relu(x @ weight).sum()
"""

ELSEWHERE = """
import ctypes, importlib.abc, os, signal, socket, sys
import lark, numpy, rich, torch, torch.distributed.tensor, typer  # these have other files on other systems

MODULES = {"fcntl", "grp", "pwd", "resource", "termios"}
NAMES = {
    os: "MFD_CLOEXEC O_CLOEXEC eventfd fork memfd_create pidfd_open register_at_fork sched_getaffinity",
    socket: "AF_UNIX SCM_RIGHTS SOCK_CLOEXEC SOCK_SEQPACKET",
    signal: "SIGCHLD SIGCONT SIGKILL SIGSTOP SIGUSR1",
}


class Hidden(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name in MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def library(name, *options, **named):
    if name is None:  # the C library of the process, where futexes are
        raise TypeError("no such library")
    return found(name, *options, **named)


for name in MODULES:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, Hidden())
for module, names in NAMES.items():
    for name in names.split():
        delattr(module, name)
found, ctypes.CDLL = ctypes.CDLL, library

import monarch
from monarch.compiler.cli import main

for command in (["compile", "train.py:step", "-o", "step.mplan"], ["inspect", "step.mplan"], ["check", "train.py"]):
    sys.argv = ["monarchc", *command]
    try:
        main()
    except SystemExit as end:
        if end.code:
            raise
"""


def test_programs_are_compiled_inspected_and_checked_without_what_linux_has(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "elsewhere.py").write_text(ELSEWHERE)
    command = [sys.executable, "elsewhere.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=150)
    assert result.returncode == 0, result.stderr
    assert "wrote step.mplan" in result.stdout and "0 errors, 0 warnings in 1 file" in result.stdout
    assert "step on mesh<data=2, model=2>: 4 workers" in result.stdout
