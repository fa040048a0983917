"""Python programs as processes of their own, each ready in milliseconds: like `subprocess` with an interpreter, which
would first import torch for two seconds.

    done = python.run("-c", "import monarch; ...", capture_output=True, text=True, timeout=60)
    process = python.Popen("train.py", "--steps", "3", stdout=subprocess.PIPE, cwd=folder)

A server, started by the first call in a process of tests, has imported what most programs import. It forks a process
for each program, which runs it as `__main__` with its own arguments, environment, folder and standard files, and ends
as an interpreter does: threads, exit handlers, finalizers, status. A test needs a real one (`subprocess`) for other
options of the interpreter, for variables that are read when it or torch starts (PYTHONHASHSEED, OMP_NUM_THREADS), and
where it tests what is imported.

    tests → server      a file with the request (JSON), standard input, output and error, and a pipe for the answer
    server → tests      by that pipe: the process's number, and when it has ended, its status
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import inspect
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
IMPORTED = (
    "cloudpickle",
    "pytest",
    "monarch.actor",
    "monarch.compiler.cli.hosts",
    "monarch.compiler.pipeline",
    "monarch.distributed",
    "monarch.language",
    "monarch.runtime.actors.processes.serving",
    "monarch.runtime.worker.loop",
    "monarch.stdlib",
    "torch._dynamo",
    "torch.distributed.tensor",
)
"""What programs import, and what torch imports when it is used."""

NUMBER = struct.Struct("i")
CLONE_NEWNET, PR_SET_PDEATHSIG = 0x40000000, 1


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` of a program: "-c" and its text, "-m" and a module, or a file, and its arguments.

    With the name of a network namespace, `network`, it runs there. It is no child of this process: it ends with the
    server, and so with this process, whatever becomes of its own parent."""

    def __init__(self, *program: object, network: str | None = None, **options: Any) -> None:
        self._network = network
        super().__init__([sys.executable, *map(str, program)], **options)

    def _execute_child(self, *given: Any) -> None:
        names = list(inspect.signature(subprocess.Popen._execute_child).parameters)[1:]  # type: ignore[attr-defined]
        options = dict(zip(names, given, strict=True))
        assert not options["pass_fds"] and not options["shell"] and options["preexec_fn"] is None
        request = {
            "program": options["args"][1:],
            "folder": os.fspath(options["cwd"] or os.getcwd()),
            "environment": dict(os.environ if options["env"] is None else options["env"]),
            "session": options["start_new_session"],
            "network": self._network,
        }
        asked = (options["p2cread"], options["c2pwrite"], options["errwrite"])
        files = [number if number >= 0 else own for own, number in enumerate(asked)]
        self._answer, answer = os.pipe()
        try:
            _server().send(request, [*files, answer])
        finally:
            os.close(answer)
            ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
            self._close_pipe_fds(*(options[name] for name in ends))  # type: ignore[attr-defined]
        self._child_created = True
        self.pid = self._number()

    def _number(self) -> int:
        read = os.read(self._answer, NUMBER.size)
        assert read, "the server of tests/python.py has ended"
        (number,) = NUMBER.unpack(read)
        return number

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if wait_flags & os.WNOHANG and not select.select([self._answer], [], [], 0)[0]:
            return 0, 0
        status = self._number()
        os.close(self._answer)
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(False):  # type: ignore[attr-defined]
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid:
                    self._handle_exitstatus(status)  # type: ignore[attr-defined]
            finally:
                self._waitpid_lock.release()  # type: ignore[attr-defined]
        return self.returncode


def run(
    *program: object,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of a program."""
    if capture_output:
        options.update(stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    if input is not None:
        options["stdin"] = subprocess.PIPE
    with Popen(*program, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        done.check_returncode()
    return done


class _Server:
    def __init__(self) -> None:
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            path = os.pathsep.join([str(ROOT / ".src"), str(ROOT)])
            subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": path},
                cwd=ROOT,
                start_new_session=True,
            )

    @property
    def is_ours(self) -> bool:
        return self._owner == os.getpid()

    def send(self, request: dict[str, Any], files: list[int]) -> None:
        text = os.memfd_create("request")
        try:
            os.write(text, json.dumps(request).encode())
            with self._lock:
                socket.send_fds(self._control, [b"run"], [text, *files])
        finally:
            os.close(text)


_running: list[_Server] = []


def _server() -> _Server:
    if not _running or not _running[-1].is_ours:
        _running.append(_Server())
    return _running[-1]


# -- in the server ---------------------------------------------------------------------------------------------------


def serve(control: socket.socket, tests: int) -> dict[str, Any] | None:
    """Fork what is asked for until the tests have ended; in a forked process, gives what it is to run."""
    woken, wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    watch = os.pidfd_open(tests)
    poll = select.poll()
    for file in (woken, watch, control.fileno()):
        poll.register(file, select.POLLIN)
    answers: dict[int, int] = {}
    while True:
        ready = {file for file, _ in poll.poll()}
        if woken in ready:
            with suppress(BlockingIOError):
                os.read(woken, 4096)
            _reap(answers)
        if control.fileno() in ready:
            packet, files, _, _ = socket.recv_fds(control, 16, 5)
            if not packet:
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                control.close()
                for file in (woken, wakeup, watch, *answers.values()):
                    os.close(file)
                return _become(files)
            text, *standard, answer = files
            for file in (text, *standard):
                os.close(file)
            answers[pid] = answer
            _answer(answer, pid)
        elif watch in ready:
            return None


def _reap(answers: dict[int, int]) -> None:
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            answer = answers.pop(ended[0])
            _answer(answer, ended[1])
            os.close(answer)


def _answer(answer: int, number: int) -> None:
    with suppress(BrokenPipeError):  # nobody waits for the process
        os.write(answer, NUMBER.pack(number))


def _become(files: list[int]) -> dict[str, Any]:
    """In a process just forked: have the files, folder and environment that it was asked for."""
    text, *standard, answer = files
    os.close(answer)
    for own, number in enumerate(standard):
        os.dup2(number, own)
        os.close(number)
    with os.fdopen(text) as file:
        file.seek(0)
        request: dict[str, Any] = json.load(file)
    if request["session"]:
        os.setsid()
    if request["network"]:
        _enter(request["network"])
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    return request


def _enter(network: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{network}") as there:
        if libc.setns(there.fileno(), CLONE_NEWNET) or libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter {network}")


def main(request: dict[str, Any], path: list[str]) -> None:
    """Be the program; `path` is where an interpreter looks for modules after the program's folder and PYTHONPATH."""
    what, *arguments = request["program"]
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(module).update(__builtins__=__builtins__, __annotations__={})
    first = ""
    if what == "-c":
        text, *arguments = arguments
        code = compile(text, "<string>", "exec", dont_inherit=True)
    elif what == "-m":
        name, *arguments = arguments
        first = os.getcwd()
    else:
        first = str(Path(what).resolve().parent)
        code = compile(Path(what).read_bytes(), what, "exec", dont_inherit=True)
        module.__file__ = what
    sys.argv = [what, *arguments]
    sys.orig_argv = [sys.executable, *request["program"]]
    sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *path]
    try:
        if what == "-m":
            runpy._run_module_as_main(name)  # type: ignore[attr-defined]
        else:
            exec(code, vars(module))
    except (SystemExit, KeyboardInterrupt):  # of which the interpreter makes a status
        raise
    except BaseException as error:
        trace = error.__traceback__ and error.__traceback__.tb_next  # without this function
        sys.excepthook(type(error), error.with_traceback(trace), trace)
        raise SystemExit(1) from None


if __name__ == "__main__":
    given = os.environ["PYTHONPATH"].split(os.pathsep)
    sys.path[:] = sys.path[1:]
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # a collection would write to all pages that the programs share
    request = serve(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    if request is not None:
        main(request, sys.path[len(given) :])
