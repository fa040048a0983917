"""`monarch host` and `monarch ca`."""

from __future__ import annotations

import os
import queue
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from monarch.compiler.cli.hosts import main
from monarch.runtime.control.message import Message
from monarch.runtime.control.security import Security
from monarch.runtime.control.tree import HostTree
from tests import python

ROOT = Path(__file__).parents[3]
SECONDS = 60.0
TOKEN = "0123456789abcdef0123456789abcdef"


def command(*arguments: str) -> list[str]:
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT / '.src')!r}]\n"
        "from monarch.compiler.cli.hosts import main; sys.argv[0] = 'monarch'; main()"
    )
    return ["-c", code, *arguments]


@dataclass(frozen=True)
class Result:
    status: int
    out: str
    err: str


Monarch = Callable[..., Result]


@pytest.fixture
def monarch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Monarch:
    """`monarch` with some arguments, in this process."""

    def call(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["monarch", *arguments])
        with pytest.raises(SystemExit) as exit:
            main()
        out, err = capsys.readouterr()
        return Result(int(exit.value.code or 0), out, err)

    return call


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    pipe = subprocess.PIPE
    with python.Popen(*command("host", *arguments), stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    path.chmod(0o600)
    return path


def test_certificates_made_by_one_command_serve_a_host_and_a_controller(monarch: Monarch, tmp_path: Path) -> None:
    made = monarch("ca", str(tmp_path / "ca"))
    assert made.status == 0, made.err
    assert "controller: for monarch.hosts(" in made.out and "this-host: for monarch host --tls" in made.out
    again = monarch("ca", str(tmp_path / "ca"))
    assert again.status == 2 and "already" in again.err
    options = ("--tls", str(tmp_path / "ca" / "this-host"), "--advertise", "localhost")
    with serving("--listen", "127.0.0.1:0", *options) as (process, line):
        found = re.fullmatch(r"monarch host: serving on (127\.0\.0\.1:\d+) \(TLS\), \d+ cores", line)
        assert found, line
        tree = HostTree([found[1]], Security.tls(tmp_path / "ca" / "controller"))
        assert tree.hosts[0].pid == process.pid
        assert (tree.hosts[0].data_bind, tree.hosts[0].advertise) == ("127.0.0.1", "localhost")
        tree.close()


@pytest.mark.sample(1)
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_host_ends_cleanly_and_with_it_what_runs_on_it(token: Path, how: signal.Signals) -> None:
    with serving("--listen", "127.0.0.1:0", "--token-file", str(token)) as (process, line):
        (address,) = re.findall(r"serving on (\S+) \(token\)", line)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert children  # the process that workers are forked from
        watch = [os.pidfd_open(int(child)) for child in children]
        poll = select.poll()
        for fd in watch:
            poll.register(fd, select.POLLIN)
        tree = HostTree([address], Security.token(TOKEN))
        lost: queue.SimpleQueue[str] = queue.SimpleQueue()
        tree.subscribe(0, lambda message: None, lambda host, reason: lost.put(reason))
        process.send_signal(how)
        assert "the host was ended" in lost.get(timeout=SECONDS)
        out, err = process.communicate(timeout=SECONDS)
        assert process.returncode == 0 and out == "monarch host: ended\n", err
        for _ in watch:
            ((fd, _),) = poll.poll(SECONDS * 1000)[:1]
            poll.unregister(fd)
            os.close(fd)
        tree.close()


def test_what_is_refused_is_printed(token: Path) -> None:
    with serving("--listen", "127.0.0.1:0", "--token-file", str(token)) as (process, line):
        (address,) = re.findall(r"serving on (\S+) \(token\)", line)
        with pytest.raises(Exception, match="the token is not this host's"):
            HostTree([address], Security.token("some other token altogether"))
        tree = HostTree([address], Security.token(TOKEN))
        tree.send(Message("hello"))
        tree.close()
        process.terminate()
        _, err = process.communicate(timeout=SECONDS)
        assert "WARNING: ipv4:127.0.0.1:" in err and "refused: the token is not this host's" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--listen", "127.0.0.1:0"), "neither was given"),
        (("--listen", "127.0.0.1:0", "--tls", "x", "--token-file", "y"), "not both"),
        (("--listen", "127.0.0.1:0", "--tls", "/no/such/folder"), "has to hold ca.pem"),
        (("--listen", "127.0.0.1:0", "--token-file", "/no/such/file"), "cannot be read"),
        (("--listen", "127.0.0.1", "--token-file", "TOKEN"), "no address of a host"),
        (("--listen", "192.0.2.1:0", "--token-file", "TOKEN"), "no loopback address"),
        (("--listen", "0.0.0.0:0", "--token-file", "TOKEN", "--trusted-network"), "--data-bind"),
        (("--listen", "127.0.0.1:0", "--data-bind", "10.0.0.1", "--token-file", "TOKEN"), "10.0.0.1:0 is no loopback"),
        (("--listen", "127.0.0.1:0", "--data-bind", "fd00::1", "--token-file", "TOKEN"), "is no loopback address"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_served_is_said_at_once(
    monarch: Monarch, token: Path, arguments: tuple[str, ...], says: str
) -> None:
    found = monarch("host", *(str(token) if each == "TOKEN" else each for each in arguments))
    assert found.status == 2 and says in found.err and found.out == ""


def test_the_version_and_the_commands(monarch: Monarch) -> None:
    assert monarch("--version").out.startswith("monarch ")
    listed = monarch("--help").out
    assert "host" in listed and "ca" in listed
