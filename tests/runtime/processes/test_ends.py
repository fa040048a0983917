"""Programs end within a bound, in whatever way and with whatever under way, and nothing of theirs is left."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from monarch.stdlib.jobs.local import is_alive, start_of
from tests import python

BOUND = 90.0
"""Seconds, on a loaded machine; what is given up here is so after half a second."""

PROGRAM = """
    import os, signal, sys, threading, time
    import torch, monarch
    import monarch.actor, monarch.job, monarch.telemetry
    from monarch.distributed import Mesh

    class Sleeper(monarch.actor.Actor):
        @monarch.actor.endpoint
        def sleep(self, seconds):
            time.sleep(seconds)

    def never(mesh):
        @monarch.program(mesh=mesh)
        def step(least: float):
            (x,) = monarch.while_loop(lambda x: x.sum() > least, lambda x: (x * 0.5,), (torch.ones(4),))
            return x.sum()
        assert step(1.0).item() == 1.0
        return step(-1.0)

    def sleeper(procs):
        actor = procs.spawn("sleeper", Sleeper)
        actor.sleep.call(0).get()
        return procs, actor, actor.sleep.call(3600)

    def save(name):
        mesh = Mesh(data=2)
        x = monarch.distribute(torch.ones(1000, 1000), mesh, "[@data, -]")
        return mesh, x, monarch.save({"x": x}, name)

    class Slow(torch.utils.data.Dataset):
        def __len__(self):
            return 100

        def __getitem__(self, at):
            time.sleep(3600 if at > 10 else 0)
            return torch.ones(4)

    def stream():
        mesh = Mesh(data=2)
        batches = iter(monarch.data.stream(Slow(), mesh, "[@data]", batch=2))
        next(batches)
        return mesh, batches
"""

WORK = {
    "a step": """
        kept = never(Mesh(data=2))
    """,
    "a thread that waits for a step": """
        kept = never(Mesh(data=2))
        threading.Thread(target=kept.item, daemon=True).start()
    """,
    "a save": """
        kept = save("checkpoint")
    """,
    "a save behind a step": """
        mesh = Mesh(data=2)
        kept = never(mesh), monarch.save({"x": monarch.distribute(torch.ones(8), mesh, "[@data]")}, "given-up")
    """,
    "a stream": """
        kept = stream()
    """,
    "a call of an actor": """
        kept = sleeper(monarch.actor.this_host().spawn_procs({"at": 2}))
    """,
    "a profile": """
        mesh = Mesh(data=2)
        profile = monarch.profile()
        profile.__enter__()
        kept = never(mesh)
    """,
    "telemetry": """
        config = monarch.telemetry.TelemetryConfig(prometheus="metrics.prom", export_interval=0.05)
        monarch.telemetry.start(config)
        kept = never(Mesh(data=2))
    """,
    "values that are logged": """
        monarch.log_to(lambda name, value, step: print(name, value, flush=True))
        kept = never(Mesh(data=2))
        monarch.log("there", 1.0)
        monarch.log("never", kept)
    """,
    "a writer that does not return": """
        monarch.log_to(lambda name, value, step: time.sleep(3600))
        monarch.log("there", 1.0)
    """,
    "a job": """
        job = monarch.job.ProcessJob({"trainers": 1})
        kept = sleeper(job.state(None).trainers.spawn_procs())
    """,
    "a mesh on a job's hosts": """
        job = monarch.job.ProcessJob({"trainers": 2})
        kept = never(Mesh(data=2, hosts=job.state(None).trainers))
    """,
    "the live page": """
        print(monarch.dashboard().url)
        kept = never(Mesh(data=2))
    """,
}

WAYS: dict[str, tuple[str, int | None]] = {
    "returns": ("", 0),
    "exits": ("sys.exit(3)", 3),
    "raises": ("raise RuntimeError('on purpose')", 1),
    "exits in a thread": ("threading.Thread(target=sys.exit, args=(3,)).start()", 0),
    "is told to end": ("signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM),
    "exits in a handler": ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(4)); signal.raise_signal(15)", 4),
    "is interrupted": ("signal.raise_signal(signal.SIGINT)", None),
    "is killed": ("signal.raise_signal(signal.SIGKILL)", -signal.SIGKILL),
}

GIVEN_UP = {
    "a save behind a step": "the program ends without the checkpoint",
    "values that are logged": "the program ends without 1 logged value, from 'never' at step 0 on",
    "a writer that does not return": "the program ends without 1 logged value, from 'there' at step 0 on",
}


def of(mark: str) -> Iterator[int]:
    """The processes that live and have this in their environment."""
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (process / "environ").read_bytes():
                yield int(process.name)


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("work", WORK)
def test_a_program_ends(work: str, way: str, tmp_path: Path) -> None:
    how, status = WAYS[way]
    code = textwrap.dedent(PROGRAM) + textwrap.dedent(WORK[work]) + f"print('begun', flush=True)\n{how}\n"
    mark = f"ENDS_{uuid.uuid4().hex}"
    bounds = {"MONARCH_EXIT_TIMEOUT": "500ms", "MONARCH_PROCESS_EXIT_TIMEOUT": "1s"}
    env = {**os.environ, **bounds, mark: "1"}
    done = python.run("-c", code, capture_output=True, text=True, timeout=BOUND, cwd=tmp_path, env=env)
    assert done.returncode == status if status is not None else done.returncode, done.stderr
    assert "begun" in done.stdout
    assert "on purpose" in done.stderr or way != "raises"
    if status is None or status >= 0:
        if work in GIVEN_UP:
            assert GIVEN_UP[work] in done.stderr
        if work == "a save":
            assert "the program ends without" in done.stderr or (tmp_path / "checkpoint" / ".metadata").exists()
        if work == "values that are logged":
            assert "there 1.0" in done.stdout
    until = time.monotonic() + BOUND
    while left := list(of(mark)):
        assert time.monotonic() < until, [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in left]
        time.sleep(0.02)


def test_rows_of_what_exit_handlers_do_are_exported(tmp_path: Path) -> None:
    """A handler that was registered before telemetry was loaded runs behind all that was registered since."""
    code = """
        import atexit
        import torch, monarch
        from monarch.distributed import Mesh

        def step():
            with Mesh(data=2) as mesh:
                monarch.log("late", (monarch.distribute(torch.ones(4), mesh) + 1).sum())

        atexit.register(step)
        import monarch.telemetry
        config = monarch.telemetry.TelemetryConfig(prometheus="metrics.prom", export_interval=3600)
        monarch.telemetry.start(config)
    """
    done = python.run("-c", textwrap.dedent(code), capture_output=True, text=True, timeout=BOUND, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "late" in (tmp_path / "metrics.prom").read_text()


def test_a_program_with_telemetry_dies_of_ctrl_c(tmp_path: Path) -> None:
    """Python forgets of what a program ends whose exit handlers import what makes named tuples, as pandas does."""
    code = """
        import signal
        import monarch, monarch.telemetry
        config = monarch.telemetry.TelemetryConfig(prometheus="metrics.prom", export_interval=3600)
        monarch.telemetry.start(config)
        monarch.log("loss", 1.0)
        signal.raise_signal(signal.SIGINT)
    """
    done = python.run("-c", textwrap.dedent(code), capture_output=True, text=True, timeout=BOUND, cwd=tmp_path)
    assert done.returncode == -signal.SIGINT, done.stderr
    assert "loss" in (tmp_path / "metrics.prom").read_text()


def test_a_host_whose_first_thread_has_ended_is_alive() -> None:
    """The kernel shows it as a zombie until its last thread ends, and it cannot be waited for until then."""
    code = "import ctypes, threading; threading.Thread(target=input).start(); ctypes.CDLL(None).syscall(60, 0)"
    with subprocess.Popen(["python3", "-c", code], stdin=subprocess.PIPE) as process:
        since = start_of(process.pid)
        while start_of(process.pid):
            time.sleep(0.001)
        assert is_alive(process.pid, since, process)
        process.communicate(b"\n")
        assert not is_alive(process.pid, since, process)
