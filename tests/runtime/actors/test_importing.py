"""Modules that start processes while they are imported."""

from __future__ import annotations

from pathlib import Path

from tests import python

FIRST = """
import time
from monarch.actor import Actor, ActorError, endpoint, this_host

class Before(Actor):
    @endpoint
    def one(self):
        return 1

before = this_host().spawn_procs(per_host={"procs": 1}).spawn("before", Before)
assert before.one.call_one().get() == 1
"""
CREW = """
import os
from monarch.actor import Actor, endpoint, this_host

class Loader(Actor):
    @endpoint
    def pid(self):
        return os.getpid()

open(os.environ["NOTES"], "a").write("x")
loaders = this_host().spawn_procs(per_host={"data": 2}).spawn("loaders", Loader)
pids = loaders.pid.call().get()
"""


def test_a_module_that_starts_actors_when_it_is_imported_does_not_do_so_in_their_processes(tmp_path: Path) -> None:
    """What starts the processes is there before the module: they import it themselves, and each would start others."""
    (tmp_path / "crew.py").write_text(CREW)
    notes = tmp_path / "notes"
    done = python.run(
        "-c",
        FIRST + "import crew\n",
        cwd=tmp_path,
        env={"NOTES": str(notes), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    assert "crew.py:11: error: the module crew starts processes while it is imported" in done.stderr
    assert "start them in a function that the program calls" in done.stderr
    assert len(notes.read_text()) <= 3  # the program's, and those of its two processes
