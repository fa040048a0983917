"""A library's process: asked for one measurement after the other, each within a time, and ended with all it started."""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic

_SET_CHILD_SUBREAPER = 36
_END_SECONDS = 20.0


class Failed(Exception):
    """There is no answer, and why."""


class Peer:
    """Started when it is first asked, and anew after it failed to answer. `log` takes what it prints."""

    def __init__(
        self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path, start_seconds: float = 90.0
    ) -> None:
        self.name = name
        self.versions = ""
        self._command = command
        self._environ = environ
        self._log = log
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = -1
        self._read = b""

    def start(self) -> None:
        """Raises Failed."""
        self._read = b""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environ,
                cwd="/",
                start_new_session=True,  # ^C is for this process, which then ends them in order
            )
        self._ended = os.pidfd_open(self._process.pid)
        self.versions = str(self._answer(self._start_seconds)["versions"])

    def measure(self, what: str, count: int, seconds: float) -> tuple[float, str]:
        """Seconds, and what was said of them. Raises Failed."""
        if self._process is None:
            self.start()
        assert self._process is not None and self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            self._process.stdin.write(json.dumps({"what": what, "count": count}).encode() + b"\n")
            self._process.stdin.flush()
        answer = self._answer(seconds)
        if "error" in answer:
            raise Failed(str(answer["error"]))
        return float(str(answer["seconds"])), str(answer["note"])

    def _answer(self, seconds: float) -> dict[str, object]:
        process = self._process
        assert process is not None and process.stdout is not None
        deadline = monotonic() + seconds
        while b"\n" not in self._read:
            # What it has started may keep its output open.
            ready, _, _ = select.select([process.stdout, self._ended], [], [], max(0.0, deadline - monotonic()))
            if process.stdout in ready and (data := os.read(process.stdout.fileno(), 1 << 16)):
                self._read += data
                continue
            self.close(kill=True)
            if not ready:
                raise Failed(f"no answer within {seconds:g} s")
            lines = self._log.read_text(errors="replace").strip().splitlines()[-1:] or ["it printed nothing"]
            raise Failed(f"its process ended with status {process.returncode}: {lines[0][:300]}")
        line, _, self._read = self._read.partition(b"\n")
        answer: dict[str, object] = json.loads(line)
        return answer

    def close(self, kill: bool = False) -> None:
        """End it, in order unless it is to be killed, and then whatever it started and left."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None and process.stdout is not None
        left = descendants(process.pid)
        with suppress(BrokenPipeError):
            process.stdin.close()
        if not kill:
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()
        os.close(self._ended)
        end(left)


def adopt() -> None:
    """Have processes whose parents end become children of this one, so that none is lost sight of."""
    if ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
        raise OSError("prctl(PR_SET_CHILD_SUBREAPER)")


def descendants(pid: int) -> dict[int, str]:
    """The processes that a process has started, and that these have: when each began, by its number."""
    children: dict[int, list[tuple[int, str]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (found := _stat(int(entry.name))) is not None:
            parent, began = found
            children.setdefault(parent, []).append((int(entry.name), began))
    result: dict[int, str] = {}
    waiting = [pid]
    while waiting:
        for child, began in children.get(waiting.pop(), ()):
            result[child] = began
            waiting.append(child)
    return result


def _stat(pid: int) -> tuple[int, str] | None:
    """A process' parent, and when it began."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return int(fields[1]), fields[19]


def end(processes: Mapping[int, str]) -> None:
    """Kill those of these that are still there, and wait for those that are this process' own."""
    for pid, began in processes.items():
        found = _stat(pid)
        if found is not None and found[1] == began:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    for pid in processes:
        with suppress(ChildProcessError):  # another's, which it waits for itself
            os.waitpid(pid, 0)
