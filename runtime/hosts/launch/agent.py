"""`monarch host` in a process of its own, which ends with the process that started it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from monarch.runtime.hosts.launch.folder import private_folder
from monarch.runtime.hosts.launch.launcher import Credentials

# The child asks to be killed with its parent, and looks whether it is too late to ask.
PROGRAM = """\
import os
from monarch.runtime.processes.warm import die_with_parent
die_with_parent()
if os.getppid() == {parent}:
    from monarch.compiler.cli.hosts import main
    main()
"""
SERVING = re.compile(r"monarch host: serving on (\S+) ")
LINES = 30
"""Of its last output, to say how it ended."""
PATIENCE = 10.0
"""Seconds for an agent that was asked to end."""


class AgentEnded(Exception):
    """An agent ended, or did not serve in time; the text says how."""


class AgentProcess:
    """An agent that listens on `machine`, an address of this one, on a free port, with these modules imported. `show`
    gets its lines of output.

    Raises nothing: `serving` has the outcome.
    """

    def __init__(
        self,
        machine: str,
        credentials: Credentials,
        imports: Sequence[str] = (),
        show: Callable[[str], None] | None = None,
    ) -> None:
        self._lines: deque[str] = deque(maxlen=LINES)
        self._show = show
        self._changed = threading.Condition()
        self._process: subprocess.Popen[str] | None = None
        self._address = ""
        self._ended = ""
        self._undo = ExitStack()
        self.folder = self._undo.enter_context(private_folder())
        host = f"[{machine}]" if ":" in machine else machine
        command = [sys.executable, "-P", "-c", PROGRAM.format(parent=os.getpid())]
        command += [f"--import={name}" for name in imports]
        command += ["host", "--listen", f"{host}:0", *self._written(credentials)]
        # "With its parent" means the thread that started it, to the kernel: this one lasts as long as the agent.
        self._thread = threading.Thread(target=self._run, args=(command,), name="monarch-agent", daemon=True)
        self._thread.start()

    def _written(self, credentials: Credentials) -> list[str]:
        """The credentials as files that nobody else can read, and the arguments that name them."""
        for name, data in (credentials.files or {"token": credentials.token.encode()}).items():
            path = self.folder / name
            path.touch(mode=0o600)
            path.write_bytes(data)
        if credentials.files:
            return ["--tls", str(self.folder)]
        return ["--token-file", str(self.folder / "token"), "--trusted-network"]

    def _run(self, command: list[str]) -> None:
        try:
            process = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            )
        except OSError as error:
            self._finish(f"its agent cannot be started: {error}")
            return
        with self._changed:
            self._process = process
            self._changed.notify_all()
        assert process.stdout is not None
        for line in process.stdout:
            found = SERVING.search(line)
            with self._changed:
                self._lines.append(line)
                if found and not self._address:
                    self._address = found[1]
                    self._changed.notify_all()
            if self._show is not None:
                self._show(line)
        status = process.wait()
        how = f"signal {-status}" if status < 0 else f"status {status}"
        self._finish(f"its agent ended with {how}\n{''.join(self._lines)}".strip())

    def _finish(self, how: str) -> None:
        self._undo.close()
        with self._changed:
            self._ended = how
            self._changed.notify_all()

    def serving(self, timeout: float) -> str:
        """Where it listens, once it does. Raises AgentEnded."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._address, timeout)
            if self._ended or not self._address:
                raise AgentEnded(self._ended or f"its agent did not serve within {timeout:g} s")
            return self._address

    def process(self) -> subprocess.Popen[str] | None:
        """The process, once it has been started; None where it could not be."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._process is not None)
            return self._process

    def ended(self) -> str:
        """How the agent ended, with its last output; "" while it runs."""
        with self._changed:
            return self._ended

    def wait(self) -> str:
        """Wait until it has ended; how it did."""
        self._thread.join()
        return self._ended

    def end(self) -> None:
        """End it in order, or else kill it. Idempotent."""
        process = self.process()
        if process is not None:
            process.terminate()
            self._thread.join(PATIENCE)
            process.kill()
        self._thread.join()
