"""`monarch apply`, `exec`, `shell` and `kill`: jobs of files, and commands on their hosts."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import select
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.compiler.cli.hosts import main
from monarch.job import LocalJob, job_load
from monarch.stdlib.jobs.commands import execute
from monarch.stdlib.jobs.local import start_of
from tests import python
from tests.compiler.cli.test_hosts import command

SECONDS = 120.0
JOBS = """
from monarch.compiler.cli.hosts import main
from monarch.job import LocalJob, ProcessJob

two = ProcessJob({"trainers": 2, "loaders": 1})

def one():
    return ProcessJob({"hosts": 1})

def here():
    return LocalJob(["first", "second"])
"""


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "jobs.py").write_text(JOBS)
    yield tmp_path
    if (tmp_path / ".monarch" / "job_state.pkl").exists():
        job_load(tmp_path / ".monarch" / "job_state.pkl").kill()


def monarch(folder: Path, *arguments: str, given: str = "") -> tuple[int, str, str]:
    done = python.run(
        *command(*arguments),
        cwd=folder,
        env={**os.environ, "SHELL": "/bin/sh", "PS1": "$ "},  # what a terminal shows is one shell's, whoever runs this
        input=given,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    return done.returncode, done.stdout, done.stderr


def sorted_lines(text: str) -> list[str]:
    return sorted(text.splitlines())


def test_a_job_of_processes_is_applied_runs_commands_and_is_killed(folder: Path) -> None:
    status, out, err = monarch(folder, "apply", "jobs.py")
    assert (status, err) == (0, "")
    assert out.splitlines()[:2] == ["trainers: 2 hosts", "loaders: 1 host"]
    assert "The job is applied, and .monarch/job_state.pkl remembers it." in out
    assert "The job runs already" in monarch(folder, "apply", "jobs.py:two")[1]

    # One rank: the first, its output as it is, its status; options of the command are its own.
    told = 'printf "%s/%s %s" $MONARCH_RANK_hosts $MONARCH_SIZE_hosts "$*"; echo error >&2; pwd >&2; exit 3'
    assert monarch(folder, "exec", "bash", "-c", told, "-", "--mesh", "--debug") == (
        3,
        "0/2 --mesh --debug",
        f"error\n{folder}\n",
    )
    # Several: whole lines, each with its rank, also the last, which has no end.
    each = "printf 'one\\n%s %s' $MONARCH_RANK_hosts $MONARCH_RANK_gpus; exit $MONARCH_RANK_hosts"
    status, out, err = monarch(folder, "exec", "--all", "--per-host", "gpus=2", "bash", "-c", each)
    ranks = [("trainers", 0, 0), ("trainers", 0, 1), ("trainers", 1, 0), ("trainers", 1, 1)]
    ranks += [("loaders", 0, 0), ("loaders", 0, 1)]
    assert (status, err) == (1, "")
    assert sorted_lines(out) == sorted(
        f"[{mesh} hosts={host} gpus={gpu}] {line}" for mesh, host, gpu in ranks for line in ("one", f"{host} {gpu}")
    )
    assert len(monarch(folder, "exec", "--mesh", "trainers", "echo", "x")[1].splitlines()) == 2
    chosen = "--mesh", "trainers", "--per-host", "gpus=2", "--point", "hosts=1,gpus=1"
    assert monarch(folder, "exec", *chosen, "sh", "-c", each) == (1, "one\n1 1", "")

    assert monarch(folder, "shell", "--point", "hosts=1", given="exit 4\n")[0] == 4

    hosts = [pid for pid, _ in job_load(folder / ".monarch/job_state.pkl")._started]  # type: ignore[attr-defined]
    assert len(hosts) == 3 and all(map(start_of, hosts))
    assert monarch(folder, "kill")[::2] == (0, "")
    assert not any(map(start_of, hosts))
    for again in ("kill", "exec"):
        status, out, err = monarch(folder, again, *["true"] * (again == "exec"))
        assert status == 2 and "no job is applied: there is no .monarch/job_state.pkl" in err
        assert "monarch apply FILE.py:JOB" in err


def test_a_local_job_runs_scripts_and_has_a_file_of_its_own(folder: Path) -> None:
    (folder / "run.sh").write_text('echo "$NAME $1"\nkill -9 $$\n')
    assert monarch(folder, "apply", "jobs.py:here()", "--state", "mine")[0] == 0
    assert not (folder / ".monarch").exists()
    asked = "exec", "--state", "mine", "-e", "NAME=some"
    assert monarch(folder, *asked, "--script", "run.sh", "word") == (137, "some word\n", "")
    status, out, _ = monarch(folder, *asked, "--all", "--kill", "--script", "-", given="echo $NAME")
    assert (status, sorted_lines(out)) == (0, ["[first] some", "[second] some"])
    assert not (folder / "mine").exists()


def test_what_cannot_be_run_is_refused_before_any_command_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    LocalJob(["first", "second"]).state(folder / ".monarch" / "job_state.pkl")
    monkeypatch.chdir(folder)
    for wrong, why in (
        (["nothing-like-it"], "nothing-like-it cannot be started on first: "),
        (["--workdir", "/nowhere", "true"], "true cannot be started on first: "),
        (["--mesh", "others", "true"], "the job has no mesh 'others': it has first, second"),
        (["--mesh", "first", "--all", "true"], "--all is every mesh, and --mesh is one"),
        (["--point", "gpus=2", "--per-host", "gpus=2", "true"], "position 2 is outside 'gpus', which has size 2"),
        (["--point", "rows=0", "true"], "unknown mesh dim 'rows'"),
        (["--per-host", "4", "true"], "--per-host 4: '4' is not DIM=N"),
        (["--point", "gpus=-1", "true"], "--point gpus=-1: 'gpus=-1' is not DIM=N"),
        (["--env", "X", "true"], "--env X: it is not NAME=VALUE"),
        (["--script", "no.sh"], "--script no.sh: No such file or directory"),
        ([], "there is no command to run"),
    ):
        monkeypatch.setattr(sys, "argv", ["monarch", "exec", *wrong])
        with pytest.raises(SystemExit, match="2"):
            main()
        out, err = capsys.readouterr()
        assert out == "" and why in err, wrong


def test_a_command_runs_where_a_loop_runs_already(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """As in a notebook."""

    async def cell() -> int:
        job = LocalJob(["first"]).state(folder / ".monarch" / "job_state.pkl")
        return execute({"first": job.first}, ["sh", "-c", "echo here; exit 3"])

    assert asyncio.run(cell()) == 3
    assert "here" in capfd.readouterr().out


def test_a_job_whose_hosts_have_ended_is_to_be_applied_again(folder: Path) -> None:
    assert monarch(folder, "apply", "jobs.py:one()")[0] == 0
    started = job_load(folder / ".monarch/job_state.pkl")._started  # type: ignore[attr-defined]
    with open(os.pidfd_open(started[0][0]), "rb") as host:
        signal.pidfd_send_signal(host.fileno(), signal.SIGKILL)
        assert select.select([host], [], [], SECONDS)[0]
    status, _, err = monarch(folder, "exec", "true")
    assert status == 2 and "the job that .monarch/job_state.pkl remembers has ended" in err
    status, out, err = monarch(folder, "apply", "jobs.py:one()")
    assert status == 0 and "The job is applied" in out and "has ended, or differs: killing it" in err
    assert monarch(folder, "exec", "echo", "there") == (0, "there\n", "")


def test_control_c_ends_the_command_too(folder: Path) -> None:
    assert monarch(folder, "apply", "jobs.py:here()")[0] == 0
    waits = "trap 'echo ended > ended; exit' TERM; echo begun; while :; do sleep 0.05; done"
    running = python.Popen(
        *command("exec", "bash", "-c", waits),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert running.stdout is not None and running.stdout.readline() == "begun\n"
    running.send_signal(signal.SIGINT)
    assert running.wait(SECONDS) != 0
    running.stdout.close()
    assert (folder / "ended").read_text() == "ended\n"


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("jobs", "jobs names no job"),
        ("none.py:job", "there is no file none.py"),
        ("jobs.py:job", "'job' of jobs.py is not there\n  its jobs are two."),
        ("jobs.py:here", "'here' of jobs.py is no job, but function"),
        ("empty.py", "empty.py has no jobs at its top level\n  make one at its top level"),
        ("raises.py", "ValueError: no luck, raised while importing raises.py"),
    ],
)
def test_a_file_without_the_job_says_what_there_is(folder: Path, spec: str, why: str) -> None:
    (folder / "empty.py").write_text("")
    (folder / "raises.py").write_text("raise ValueError('no luck')")
    status, out, err = monarch(folder, "apply", spec)
    assert (status, out) == (2, "") and why in err


def test_a_shell_has_this_terminal(folder: Path) -> None:
    assert monarch(folder, "apply", "jobs.py:here()")[0] == 0
    ours, theirs = pty.openpty()
    fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 33, 101, 0, 0))
    before = termios.tcgetattr(theirs)
    environment = {**os.environ, "SHELL": "/bin/sh", "TERM": "xterm-test", "PS1": "$ "}
    with python.Popen(
        *command("shell", "-e", "MONARCH_TEST=given"),
        cwd=folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
    ) as process:
        said = b""

        def heard(typed: str, *awaited: str) -> None:
            nonlocal said
            os.write(ours, typed.encode())
            for text in awaited:
                while text.encode() not in said:
                    assert select.select([ours], [], [], SECONDS)[0], said
                    said += os.read(ours, 4096)
                said = said.split(text.encode(), 1)[1]

        try:
            heard("", "$ ")
            heard('stty size; echo "$TERM.$MONARCH_TEST."; pwd\n', "33 101", "xterm-test.given.", str(folder), "$ ")
            heard("trap 'echo resi''zed' WINCH\n", "$ ")
            fcntl.ioctl(ours, termios.TIOCSWINSZ, struct.pack("HHHH", 20, 60, 0, 0))
            process.send_signal(signal.SIGWINCH)
            heard("while [ \"$(stty size)\" != '20 60' ]; do :; done; echo no''w\n", "now")
            # What is to be interrupted has begun, for it says what the terminal has shown: only then has the shell made
            # it the terminal's. No shell: a shell may lose a ^C that comes while it starts a program.
            heard("cat\n", "cat")
            heard("again\n", "again", "again")
            heard("\x03", "$ ")
            os.write(ours, b"exit 7\n")
            assert process.wait(SECONDS) == 7
        finally:
            process.kill()
    assert termios.tcgetattr(theirs) == before
    os.close(ours)
    os.close(theirs)


def test_a_shell_reads_what_is_no_terminal_to_its_end(folder: Path) -> None:
    assert monarch(folder, "apply", "jobs.py:here()")[0] == 0
    status, out, err = monarch(folder, "shell", "--mesh", "second", given="echo $((6 * 7))\nexit 3\n")
    # The terminal there may show what is typed before the shell shows that it is ready.
    assert (status, err) == (3, "") and re.search(r"^(\$ )?42$", out, re.MULTILINE)
    status, _, err = monarch(folder, "shell", "--mesh", "third")
    assert status == 2 and "the job has no mesh 'third': it has first, second" in err


def test_a_shell_that_takes_the_terminal_late_still_learns_that_its_input_has_ended(folder: Path) -> None:
    """bash drops an end of input that was typed before it began; the last line here has no end."""
    LocalJob(["first"]).state(folder / ".monarch" / "job_state.pkl")
    own = {"SHELL": shutil.which("bash") or "", "HOME": str(folder), "PS1": "$ "}
    asked = python.Popen(
        *command("shell"),
        cwd=folder,
        env={**os.environ, **own},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    out, _ = asked.communicate(b"cat; (exit $((6 * 7)))", SECONDS)
    assert asked.returncode == 42, out
