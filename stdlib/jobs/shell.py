"""A terminal on a host: `monarch.job.shell(host)` and `monarch shell`.

    this process    write.broadcast(keys)  →  the actor on the host
                    resize.broadcast(...)  →  a pseudoterminal, behind which a shell runs
                    output … status        ←  read.call_one()

All of it goes the way of actors' calls, so only a program that has attached the host gets a shell there. What the shell
writes is read there when it is asked for, so that no output piles up on the way.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import select
import signal
import struct
import sys
import termios
import threading
import tty
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from monarch.compiler.errors import MonarchError
from monarch.runtime.actors.actor import Actor
from monarch.runtime.actors.debugging.stacks import quiet_seconds
from monarch.runtime.actors.endpoint import concurrent_endpoint, endpoint
from monarch.runtime.actors.meshes import HostMesh

_CHUNK = 1 << 16
_PASTED = 1 << 20
"""How many typed bytes wait for a program there to read them; more are dropped."""
_END_SECONDS = 2.0
_END_OF_INPUT = b"\x04"
_END_AGAIN_SECONDS = 0.1
_NAMES = ("TERM", "COLORTERM", "LANG")
"""The terminal's kind and size, in these variables."""
# An actor's process ignores ^C, which a program would inherit. A process without a terminal that leads its session gets
# the first one that it opens.
_SHELL = 'exec "${SHELL:-/bin/sh}" <"$0" >"$0" 2>&1'
_START = f"""
import os, signal, sys
for each in (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
    signal.signal(each, signal.SIG_DFL)
os.execv("/bin/sh", ["sh", "-c", {_SHELL!r}, sys.argv[1]])
"""


class Terminal(Actor):
    """A shell in a session of its own, behind a pseudoterminal."""

    def __init__(self, size: tuple[int, int], env: Mapping[str, str], folder: str | None, wanted: str) -> None:
        self._size, self._env = size, dict(env)
        self._folder = folder or (wanted if Path(wanted).is_dir() else None)
        self._master = self._there = -1
        self._typed = bytearray()
        self._again: asyncio.TimerHandle | None = None

    @endpoint
    async def start(self) -> str:
        """Start it. Gives why it cannot be started, or ""."""
        # Both stay open: the shell has the other side only later, and the terminal would be closed until then.
        self._master, self._there = pty.openpty()
        os.set_blocking(self._master, False)
        self._resize(self._size)
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", "-c", _START, os.ttyname(self._there)),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **self._env},
                cwd=self._folder,
                start_new_session=True,
            )
        except OSError as error:
            return str(error)
        self._ended = asyncio.ensure_future(self._process.wait())
        return ""

    @concurrent_endpoint  # which is cancelled when the actor is stopped
    async def read(self, within: float) -> bytes | int:
        """Its next output, b"" where there is none for so many seconds; after the last of it the shell's status, as a
        shell has it."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        until = loop.time() + within

        def tell(ended: asyncio.Future[int]) -> None:
            news.set()

        self._ended.add_done_callback(tell)
        loop.add_reader(self._master, news.set)
        try:
            while True:
                over = self._ended.done()  # before the look, so that nothing that it wrote is missed
                with suppress(BlockingIOError):
                    return os.read(self._master, _CHUNK)
                if over:
                    status = self._ended.result()
                    return status if status >= 0 else 128 - status
                if loop.time() >= until:
                    return b""
                with suppress(TimeoutError):
                    await asyncio.wait_for(news.wait(), until - loop.time())
                news.clear()
        finally:
            loop.remove_reader(self._master)
            self._ended.remove_done_callback(tell)

    @endpoint
    async def write(self, typed: bytes) -> None:
        """Type it."""
        self._typed += typed[: max(0, _PASTED - len(self._typed))]
        self._type()

    @endpoint
    async def end_input(self) -> None:
        """Type the end of input until the shell ends: a shell that makes the terminal its own, as bash does when it
        starts, loses one that it has not read, and a program that it runs may have read another."""
        self._end_input()

    def _end_input(self) -> None:
        if not self._ended.done():
            if not self._typed:
                self._typed += _END_OF_INPUT
                self._type()
            self._again = asyncio.get_running_loop().call_later(_END_AGAIN_SECONDS, self._end_input)

    def _type(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            del self._typed[: os.write(self._master, self._typed)]
        except BlockingIOError:
            pass
        if self._typed:
            loop.add_writer(self._master, self._type)
        else:
            loop.remove_writer(self._master)

    @endpoint
    async def resize(self, size: tuple[int, int]) -> None:
        """Give the terminal so many rows and columns; programs there hear of it."""
        self._resize(size)

    def _resize(self, size: tuple[int, int]) -> None:
        fcntl.ioctl(self._master, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))

    async def __cleanup__(self, exc: Exception | None) -> None:
        if self._master < 0:
            return
        if self._again is not None:
            self._again.cancel()
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._master)
        loop.remove_writer(self._master)
        os.close(self._master)
        os.close(self._there)
        process = getattr(self, "_process", None)
        for end in (signal.SIGHUP, signal.SIGKILL):
            if process is None or process.returncode is not None:
                return
            with suppress(ProcessLookupError):
                os.killpg(process.pid, end)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _END_SECONDS)


def shell(host: HostMesh, *, env: Mapping[str, str] | None = None, workdir: str | None = None) -> int:
    """Run a shell on a host in this terminal: $SHELL there, or sh. Gives its status, 128 and the signal's number where
    a signal has ended it.

    `env`      is added to the environment on the host
    `workdir`  where it starts; this folder, where the host has it

    Everything typed goes there, ^C too; its terminal has this one's size, also after that changes. Where the input of
    this process is no terminal, it is read to its end. Called by the main thread. Raises MonarchError for a mesh of
    several hosts and where no shell can be started, SupervisionError where the host is lost; this terminal is then as
    it was.
    """
    if len(host) != 1:
        raise MonarchError(
            f"a shell runs on one host, and this mesh has {len(host)}", hint="take one: hosts.slice(hosts=0)."
        )
    return asyncio.run(_shell(host, dict(env or {}), workdir))


async def _shell(host: HostMesh, env: Mapping[str, str], folder: str | None) -> int:
    about = {name: value for name, value in os.environ.items() if name in _NAMES}
    procs = host.spawn_procs(name="shell")
    try:
        there = procs.spawn("terminal", Terminal, _size(), {**about, **env}, folder, str(Path.cwd()))
        if why := await there.start.call_one():
            raise MonarchError(f"no shell can be started there: {why}")
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGWINCH, lambda: there.resize.broadcast(_size()))
        out = sys.stdout.buffer
        try:
            with _typed(
                lambda keys: loop.call_soon_threadsafe(there.write.broadcast, keys),
                lambda: loop.call_soon_threadsafe(there.end_input.broadcast),
            ):
                while not isinstance(said := await there.read.call_one(quiet_seconds()), int):
                    out.write(said)
                    out.flush()
                return said
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)
    finally:
        await procs.stop("its shell has ended")


def _size() -> tuple[int, int]:
    """The rows and columns of this terminal."""
    with suppress(OSError, ValueError):
        columns, rows = os.get_terminal_size(sys.stdin.fileno())
        return rows, columns
    return 24, 80


@contextmanager
def _typed(take: Callable[[bytes], object], over: Callable[[], object]) -> Iterator[None]:
    """Within the block `take` gets the keys typed here, one by one, from a thread, and `over` is called at its end."""
    keys = sys.stdin.fileno()
    ends, end = os.pipe()

    def read() -> None:
        last = b"\n"
        while ends not in (ready := select.select([keys, ends], [], [])[0]) and ready:
            if not (text := os.read(keys, _CHUNK)):
                if not last.endswith(b"\n"):
                    take(b"\n")  # of a line that has no end yet, a shell would not take the end of input
                over()
                return
            take(last := text)

    reader = threading.Thread(target=read, name="shell-input")
    before = termios.tcgetattr(keys) if os.isatty(keys) else None
    if before is not None:
        tty.setraw(keys)
    reader.start()
    try:
        yield
    finally:
        os.write(end, b".")
        reader.join()
        os.close(ends)
        os.close(end)
        if before is not None:
            termios.tcsetattr(keys, termios.TCSANOW, before)
