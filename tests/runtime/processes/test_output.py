"""What workers print is passed on, and an error about a dead one shows its end."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from monarch.compiler.plan import DeviceMeshError, MeshSpec
from monarch.runtime.processes.output import LAST_BYTES, LAST_LINES
from tests.runtime.building import whole
from tests.runtime.collectives.loopback import executor_on


def run(script: str, **options: object) -> subprocess.CompletedProcess[str]:
    """A process that has an Output, `output`, and the function `child`, which forks one that prints to it."""
    head = """
        import os, signal, sys
        from monarch.runtime.processes.output import Output, renew_streams
        output = Output()
        renew_streams()
        def child(does):
            pid = os.fork()
            if pid == 0:
                output.become()
                does()
                os.kill(os.getpid(), signal.SIGKILL)
            output.watch(pid)
            while os.waitpid(pid, os.WNOHANG) == (0, 0):
                output.move()  # or it would wait for room
            return pid
    """
    command = [sys.executable, "-c", textwrap.dedent(head) + textwrap.dedent(script)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]
    assert ran.returncode == 0, ran.stderr
    return ran


def test_output_is_passed_on_and_its_end_kept_for_each_process() -> None:
    ran = run("""
        def speak():
            print("from python")
            os.write(2, b"from c++\\n")
        first, second = child(speak), child(lambda: print("another"))
        said = sorted(output.take(first).splitlines())  # between the two files there is no order
        sys.stderr.write(repr((said, output.take(second), output.take(second))))
    """)
    assert ran.stdout == "from python\nanother\n"
    assert ran.stderr == "from c++\n" + repr((["from c++", "from python"], "another", ""))


def test_only_the_last_lines_are_kept_and_all_are_passed_on() -> None:
    ran = run("""
        many = child(lambda: [print(number) for number in range(1000)])
        last = output.take(many)
        long = child(lambda: print("x" * 20000))
        sys.stderr.write(repr((last, len(output.take(long)))))
    """)
    assert ran.stdout == "".join(f"{number}\n" for number in range(1000)) + "x" * 20000 + "\n"
    last = "\n".join(map(str, range(1000 - LAST_LINES, 1000)))
    assert ran.stderr == repr((last, LAST_BYTES - 1))


def test_a_target_that_takes_nothing_blocks_nobody() -> None:
    """Standard output is a pipe that is full: the rest waits until it is read."""
    ran = run("""
        reading, writing = os.pipe()
        kept = os.dup(1)
        os.dup2(writing, 1)
        os.set_blocking(writing, False)
        filled = 0
        try:
            while True:
                filled += os.write(writing, b"." * 4096)
        except BlockingIOError:
            pass
        os.set_blocking(writing, True)
        last = output.take(child(lambda: print("late")))
        waits = output.waits_for()
        while filled:
            filled -= len(os.read(reading, filled))
        output.move()
        sys.stderr.write(repr((last, 1 in waits, os.read(reading, 100))))
    """)
    assert ran.stderr == repr(("late", True, b"late\n"))


@pytest.mark.parametrize("where", ["local", "hosts"])
def test_the_error_of_a_worker_that_crashes_shows_its_last_lines(where: str) -> None:
    with executor_on(where, MeshSpec.of(a=2)) as executor:
        executor.wait(executor.put(torch.zeros(2), whole((2,))))
        os.kill(executor.worker_pids()[1], signal.SIGABRT)
        with pytest.raises(DeviceMeshError, match="was killed by SIGABRT") as info:
            while True:
                executor.wait(executor.put(torch.zeros(2), whole((2,))))
        for error in (info.value, pickle.loads(pickle.dumps(info.value))):
            assert "Extension modules" in error.log  # the end of what a crash of Python's prints
            assert "the worker's last lines:" in error.hint and error.log.splitlines()[-1] in error.hint


def test_processes_start_and_print_in_a_program_without_standard_files(tmp_path: Path) -> None:
    """What the program opens first has their numbers, and is not printed into."""
    (tmp_path / "program.py").write_text(
        textwrap.dedent(
            """
            files = [open(name, "w") for name in ("zero", "one")]
            from monarch.actor import Actor, endpoint, this_host
            from monarch.distributed import Mesh
            import monarch, os, sys, torch

            assert [file.fileno() for file in files] == [0, 1] and sys.stdout is None

            class Printer(Actor):
                @endpoint
                def say(self) -> int:
                    print("hello", flush=True)
                    os.write(2, b"and hello")
                    return 1

            mesh = Mesh(data=2)
            x = monarch.distribute(torch.ones(4), mesh, "[@data]")
            said = this_host().spawn_procs().spawn("printer", Printer).say.call_one().get(30)
            files[1].write(f"{x.sum().item()} {said}")
            """
        )
    )
    command = ["sh", "-c", 'exec "$0" program.py <&- >&- 2>&-', sys.executable]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, timeout=60)
    assert done.returncode == 0
    assert (tmp_path / "one").read_text() == "4.0 1" and not (tmp_path / "zero").read_text()
