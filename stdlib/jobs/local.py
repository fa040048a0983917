"""Jobs on this machine: its own host, or processes that each are one."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Any

from monarch.compiler.config import settings
from monarch.compiler.errors import MonarchError
from monarch.runtime.actors.hosts import hosts as attach_hosts
from monarch.runtime.actors.meshes import this_host
from monarch.stdlib.jobs.arguments import meshes_of
from monarch.stdlib.jobs.job import JobState, JobTrait

COMMAND = "from monarch.compiler.cli.hosts import main; main()"
"""Arguments with which Python runs `monarch`."""
_WATCH = """\
import os, signal, threading

def watch():
    if not os.read({watched}, 1):
        os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=watch, daemon=True).start()
"""
"""And before it, to end with the program, in whatever way that ends: then this pipe comes to its end, in which there is
a byte for each host that is to outlive the program."""
_SERVING = re.compile(r"^monarch host: serving on (\S+) ", re.MULTILINE)
_LOOK_SECONDS = 0.02
_END_SECONDS = 10.0
_LAST_BYTES = 4096


class LocalJob(JobTrait):
    """This machine, as every mesh that is asked for: to run locally what else runs on a cluster."""

    def __init__(self, hosts: Sequence[str] = ("hosts",)) -> None:
        super().__init__()
        self._names = tuple(hosts)

    def can_run(self, spec: JobTrait) -> bool:
        return isinstance(spec, LocalJob) and spec._names == self._names

    def _create(self, client_script: str | None) -> None:
        pass

    def _state(self) -> JobState:
        return JobState({name: this_host() for name in self._names})

    def _kill(self) -> None:
        pass


class ProcessJob(JobTrait):
    """Hosts on this machine, each a process, so many for each mesh: to try out programs over several.

        state = ProcessJob({"trainers": 2, "loaders": 1}).state()
        procs = state.trainers.spawn_procs(per_host={"gpus": 2})

    They listen on loopback, and prove their identity with a token that is made for them. `env` is added to this
    program's environment. Raises ValueError for a job without meshes, or a number of hosts that cannot be meant.
    """

    def __init__(self, meshes: Mapping[str, int], env: Mapping[str, str] | None = None) -> None:
        super().__init__()
        self._meshes = meshes_of("ProcessJob", meshes)
        self._env = dict(env or {})
        self._folder = ""
        """The token, and the files of the hosts' output."""
        self._started: list[tuple[int, str]] = []
        """The process id of each, and when it was started, by the kernel's count."""
        self._children: dict[int, subprocess.Popen[bytes]] = {}
        """Those that this program has started."""
        self._lifeline = -1
        """The end of a pipe that only this program has: with it end the hosts that read from the other end."""

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_children": {}, "_lifeline": -1}

    def _create(self, client_script: str | None) -> None:
        folder = Path(tempfile.mkdtemp(prefix="monarch-job-"))
        self._folder = str(folder)
        token = folder / "token"
        token.touch(mode=0o600)
        token.write_text(token_hex(32))
        watched, self._lifeline = os.pipe2(os.O_CLOEXEC)
        command = [sys.executable, "-P", "-c", _WATCH.format(watched=watched) + COMMAND]
        command += ["host", "--listen", "127.0.0.1:0", "--token-file", str(token)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **self._env}
        try:
            for number in range(sum(self._meshes.values())):
                with (folder / f"host{number}").open("w") as said:
                    process = subprocess.Popen(
                        command,
                        env=env,
                        stdin=subprocess.DEVNULL,
                        stdout=said,
                        stderr=said,
                        start_new_session=True,
                        pass_fds=[watched],
                    )
                self._children[process.pid] = process
                self._started.append((process.pid, start_of(process.pid)))
        except BaseException:
            self._kill()
            raise
        finally:
            os.close(watched)

    def _outlive(self) -> None:
        self._let_go(b"." * len(self._children))

    def _let_go(self, said: bytes = b"") -> None:
        """Let the hosts know that they outlive this program, each by a byte, or end with it."""
        lifeline, self._lifeline = self._lifeline, -1
        if lifeline >= 0:
            with suppress(BrokenPipeError):  # they have ended
                os.write(lifeline, said)
            os.close(lifeline)

    def _state(self) -> JobState:
        deadline = time.monotonic() + settings.host_spawn_ready_timeout
        addresses = [self._serving(number, deadline) for number in range(len(self._started))]
        token, meshes = Path(self._folder) / "token", {}
        for name, count in self._meshes.items():
            mine, addresses = addresses[:count], addresses[count:]
            meshes[name] = attach_hosts(mine, token=token)
        return JobState(meshes)

    def _serving(self, number: int, deadline: float) -> str:
        """Where a host listens, once it does."""
        said = Path(self._folder) / f"host{number}"
        while True:
            alive = self._alive(number)
            text = said.read_text(errors="replace") if said.exists() else ""
            if found := _SERVING.search(text):
                return found[1]
            if not alive or time.monotonic() >= deadline:
                how = "did not serve in time" if alive else "has ended"
                raise MonarchError(f"host {number} of the job {how}", hint=text[-_LAST_BYTES:].strip())
            time.sleep(_LOOK_SECONDS)

    def can_run(self, spec: JobTrait) -> bool:
        same = isinstance(spec, ProcessJob) and (spec._meshes, spec._env) == (self._meshes, self._env)
        return same and self.active and all(self._alive(number) for number in range(len(self._started)))

    def _alive(self, number: int) -> bool:
        pid, since = self._started[number]
        return is_alive(pid, since, self._children.get(pid))

    def _kill(self) -> None:
        numbers = range(len(self._started))
        for end in (signal.SIGTERM, signal.SIGKILL):
            left = [number for number in numbers if self._alive(number)]
            for number in left:
                with suppress(ProcessLookupError):
                    os.kill(self._started[number][0], end)
            deadline = time.monotonic() + _END_SECONDS
            while any(map(self._alive, left)) and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
        self._let_go()
        self._started = []
        shutil.rmtree(self._folder, ignore_errors=True)


def is_alive(pid: int, since: str, child: subprocess.Popen[bytes] | None) -> bool:
    """Whether the process that was started then lives; `child` is it where this process has started it."""
    if child is not None:  # the kernel shows a process whose first thread has ended as one that has
        return child.poll() is None
    return since != "" and start_of(pid) == since


def start_of(pid: int) -> str:
    """When a process was started, which no other by that number was; "" where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in ("Z", "X") else fields[19]
