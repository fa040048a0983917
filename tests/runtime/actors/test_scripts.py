"""Programs with actors: what is printed, and how they end. Each in a process of its own."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import threading

import pytest

import monarch.config
from monarch.actor import (
    Actor,
    SupervisionError,
    endpoint,
    shutdown_context,
    this_host,
)
from tests import python
from tests.runtime.actors.conftest import WAIT
from tests.runtime.actors.test_lifetimes import Worker, wait_until_gone

PROGRAM = """
import os, sys, threading
import monarch.actor
from monarch.actor import Actor, endpoint, this_host, this_proc

class OwnError(Exception):
    def __init__(self, code):
        super().__init__(f"code {code}")
        self.code = code
    def __reduce__(self):
        return OwnError, (self.code,)

class Worker(Actor):
    @endpoint
    def raise_own(self):
        raise OwnError(3)
    @endpoint
    def say(self, text):
        print(text, flush=True)
    @endpoint
    def pid(self):
        return os.getpid()
    @endpoint
    def wait(self):
        threading.Event().wait()
    @endpoint
    def fail(self):
        raise ValueError("as told")
    def __cleanup__(self, exc):
        print("cleaned up", flush=True)

def main():
    procs = this_host().spawn_procs(per_host={"gpus": 4}, name="crew")
    workers = procs.spawn("workers", Worker)
    print(*workers.pid.call().get().values(), flush=True)
"""


def run(body: str, send: int | None = None) -> tuple[subprocess.CompletedProcess[str], list[int]]:
    """Run a program; gives what it said, and the numbers of its workers."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    code = f"{PROGRAM}{lines}\nif __name__ == '__main__':\n    main()\n"
    program = python.Popen("-c", code, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)
    assert program.stdout is not None
    first = program.stdout.readline()
    if send is not None:
        program.send_signal(send)
    out, err = (said.decode() for said in program.communicate(timeout=WAIT))
    return subprocess.CompletedProcess(code, program.returncode, out, err), [int(pid) for pid in first.split()]


def times(line: str, out: str) -> int:
    """How many workers said a line: how many of them are put together depends on when they say it."""
    found = re.findall(rf"^\[crew (?:× (\d+)|gpus=\d)\] {line}$", out, re.MULTILINE)
    return sum(int(count or 1) for count in found)


def test_output_has_a_prefix_and_equal_lines_come_once() -> None:
    done, pids = run(
        "workers.say.call('hello').get()\nworkers.slice(gpus=2).say.call_one('just me').get()\nprocs.stop().get()"
    )
    assert done.returncode == 0, done.stderr
    assert times("hello", done.stdout) == times("cleaned up", done.stdout) == 4
    assert "[crew gpus=2] just me\n" in done.stdout
    wait_until_gone(pids)


def test_an_exception_that_the_script_defines_is_that_at_the_caller() -> None:
    done, pids = run(
        "try:\n    workers.raise_own.call().get()\nexcept monarch.actor.ActorError as error:\n"
        "    print(isinstance(error.exception, OwnError), error.exception.code)"
    )
    assert done.returncode == 0 and "True 3\n" in done.stdout, (done.stdout, done.stderr)
    wait_until_gone(pids)


def test_at_exit_everything_is_stopped() -> None:
    done, pids = run("")
    assert done.returncode == 0 and times("cleaned up", done.stdout) == 4, (done.stdout, done.stderr)
    wait_until_gone(pids)


def test_an_unhandled_failure_stops_the_program() -> None:
    done, pids = run("workers.slice(gpus=1).fail.broadcast()\nthreading.Event().wait()")
    assert done.returncode == 1
    assert "workers[1]" in done.stderr and "ValueError: as told" in done.stderr
    wait_until_gone(pids)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "waits", ["threading.Event().wait()", "import time; time.sleep(1000)", "workers.wait.call().get()"]
)
def test_an_unhandled_failure_interrupts_the_main_thread(waits: str) -> None:
    """So that what it has to put away is put away, and the program ends with status 1."""
    done, pids = run(
        "import atexit\natexit.register(print, 'at exit', flush=True)\n"
        f"workers.slice(gpus=1).fail.broadcast()\ntry:\n    {waits}\nfinally:\n    print('finally', flush=True)"
    )
    assert done.returncode == 1, done.stderr
    assert "finally" in done.stdout and "at exit" in done.stdout
    assert "ValueError: as told" in done.stderr and "KeyboardInterrupt" not in done.stderr
    wait_until_gone(pids)


def test_several_unhandled_failures_interrupt_the_main_thread_once() -> None:
    """Or else the second would cut short what runs because of the first."""
    done, pids = run(
        "def hook(failure):\n    heard.release()\n    raise SystemExit(1)\n"
        "monarch.actor.unhandled_fault_hook, heard = hook, threading.Semaphore(0)\n"
        "workers.fail.broadcast()\ntry:\n    threading.Event().wait()\n"
        "finally:\n    [heard.acquire() for _ in range(4)]\n    threading.Event().wait(0.2)\n"
        "    print('finally', flush=True)"
    )
    assert done.returncode == 1 and "finally" in done.stdout, (done.stdout, done.stderr)
    wait_until_gone(pids)


def test_a_main_thread_that_takes_no_interrupt_ends_all_the_same() -> None:
    done, pids = run(
        "monarch.config.configure(fault_exit_timeout='0s')\nworkers.slice(gpus=1).fail.broadcast()\n"
        "while True:\n    try:\n        threading.Event().wait()\n    except KeyboardInterrupt:\n        pass"
    )
    assert done.returncode == 1
    wait_until_gone(pids)


@pytest.mark.parametrize("how", ["loop", "wait", "constructor", "async"])
def test_an_actor_that_does_not_stop_counts_as_ended_after_a_while(how: str, capfd: pytest.CaptureFixture[str]) -> None:
    class Stuck(Actor):
        def __init__(self) -> None:
            if how == "constructor":
                threading.Event().wait()

        @endpoint
        def call(self) -> None:
            while how == "loop":
                pass
            threading.Event().wait()

    class StuckAsync(Actor):
        @endpoint
        async def call(self) -> None:
            await asyncio.Event().wait()

    with monarch.config.configured(stop_actor_timeout="100ms"):
        procs = this_host().spawn_procs(name="crew")
    stuck = procs.spawn("stuck", StuckAsync if how == "async" else Stuck)
    call = stuck.call.call_one()
    stuck.stop("enough").get(WAIT)
    with pytest.raises(SupervisionError):
        stuck.call.call_one().get(WAIT)
    assert procs.spawn("other", Worker, "other").pid.call_one().get(WAIT)  # the process lives on
    with pytest.raises(SupervisionError, match="it had not stopped"):
        call.get(WAIT)
    shutdown_context().get(WAIT)
    said = capfd.readouterr().err
    assert "[crew] monarch: 'stuck' did not stop within 0.1 s" in said


def test_processes_that_are_stopped_run_exit_handlers_of_their_own() -> None:
    done, pids = run(
        "import atexit, weakref\natexit.register(print, 'the program ends', flush=True)\n"
        "def register():\n    import atexit, weakref, tempfile, sys, time\n"
        "    atexit.register(print, 'an exit handler', flush=True)\n"
        "    sys.kept = type('Kept', (), {})()\n    weakref.finalize(sys.kept, print, 'a finalizer', flush=True)\n"
        "    def write(*logged):\n        time.sleep(0.01)\n        print('logged', *logged, flush=True)\n"
        "    monarch.log_to(write)\n    for value in range(20):\n        monarch.log('rows', value)\n"
        "with procs.activate():\n    monarch.remote(register).call().get()\nprocs.stop().get()"
    )
    assert done.returncode == 0, done.stderr
    assert times("an exit handler", done.stdout) == times("a finalizer", done.stdout) == 4
    assert times("logged rows 19.0 19", done.stdout) == 4
    assert done.stdout.count("the program ends") == 1


def test_the_hook_decides_what_an_unhandled_failure_does() -> None:
    done, pids = run(
        "def hook(failure):\n    print('hook', failure.mesh_name, flush=True)\n    raise SystemExit(5)\n"
        "monarch.actor.unhandled_fault_hook = hook\n"
        "workers.slice(gpus=1).fail.broadcast()\nthreading.Event().wait()"
    )
    assert done.returncode == 5 and "hook workers" in done.stdout
    wait_until_gone(pids)


def test_nothing_is_left_when_the_root_is_killed() -> None:
    done, pids = run("threading.Event().wait()", send=signal.SIGKILL)
    assert done.returncode == -9
    wait_until_gone(pids)


def test_ctrl_c_is_the_programs_alone() -> None:
    done, pids = run("threading.Event().wait()", send=signal.SIGINT)
    assert done.returncode == -signal.SIGINT and done.stderr.count("KeyboardInterrupt") == 1, done.stderr
    assert times("cleaned up", done.stdout) == 4
    wait_until_gone(pids)
