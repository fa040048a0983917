"""The warm parent: a process that has torch loaded and does nothing but fork processes, watch them, and end them.

It is forked from the controller when the first mesh is made, and kept for later ones; forking from it takes
milliseconds and shares all memory that is not written. It has one thread and runs no torch operations, so there is
nothing in it that a fork could break. Where libraries have started threads in it, it begins anew (`run`) or ends them.

Packets on its socket (JSON; files ride along):

    controller → warm   {"do": "fork", "mesh": 3, "ranks": [0, 1], "role": "module:function", "workers": 8, "given": {}}
                        and with it a file for all of them, and for each rank as many of its own; where `workers` is
                        not 0, the first file is the memory of a mesh of so many
                        {"do": "stop", "mesh": 3}
    warm → controller   {"is": "started", "mesh": 3, "rank": 0, "pid": 7}
                        {"is": "exited", "mesh": 3, "rank": 0, "status": -9, "log": "its last lines"}
                        {"is": "exited", "mesh": 3, "rank": 0, "how": "could not be started: ..."}
                        {"is": "stopped", "mesh": 3}

Nothing outlives the controller. The warm parent watches it through a pidfd (an inherited copy of a socket in some other
child of the controller's would hide the end of file), kills the workers and ends; should the warm parent itself be
killed, the kernel kills the workers (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import stat
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NoReturn

from monarch.runtime.processes import importing
from monarch.runtime.processes.output import Output, renew_streams
from monarch.runtime.processes.roles import Forked, before, role
from monarch.runtime.shared.window import Geometry, Window

PACKET_BYTES = 64 << 10
FILES_A_PACKET = 200  # the kernel's limit is 253

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8


@dataclass
class _Mesh:
    window: Window | None
    rank_of: dict[int, int] = field(default_factory=dict)
    stopping: bool = False


class Warm:
    def __init__(self, control: socket.socket, controller: int) -> None:
        self._control = control
        self._controller = controller
        self._meshes: dict[int, _Mesh] = {}
        self._output = Output()

    def serve(self) -> None:
        """Until the controller closes its end, or is gone."""
        wakeup, self._wakeup = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self._control, select.POLLIN)
        poll.register(wakeup, select.POLLIN)
        watch = -1
        with suppress(OSError, AttributeError):
            watch = os.pidfd_open(self._controller)
            poll.register(watch, select.POLLIN)
        self._own = [
            wakeup,
            self._wakeup,
            self._control.fileno(),
            *([watch] if watch >= 0 else []),
            *self._output.files,
        ]
        printing: dict[int, int] = {}
        try:
            while True:
                for fd in printing:
                    poll.unregister(fd)
                printing = self._output.waits_for()
                for fd, event in printing.items():
                    poll.register(fd, event)
                # Where there are no pidfds, a look now and then.
                ready = {fd for fd, _ in poll.poll(None if watch >= 0 else 1000)}
                if watch in ready or (watch < 0 and os.getppid() != self._controller):
                    return
                if ready & printing.keys():
                    self._output.move()
                if wakeup in ready:
                    with suppress(BlockingIOError):
                        os.read(wakeup, 4096)
                    self._reap()
                if self._control.fileno() in ready and not self.receive():
                    return
        finally:
            for mesh in self._meshes.values():
                _kill(mesh.rank_of)
            self._output.move()

    def receive(self) -> bool:
        """Carry out the controller's next request; False where it has gone."""
        try:
            packet, files, flags, _ = socket.recv_fds(self._control, PACKET_BYTES, FILES_A_PACKET + 1)
        except ConnectionError:
            return False
        if packet:
            self._do(json.loads(packet), files, "" if not flags & socket.MSG_CTRUNC else os.strerror(errno.EMFILE))
        return bool(packet)

    def _do(self, request: dict[str, Any], files: list[int], missing: str) -> None:
        """`missing` says why files of the request did not come."""
        if request["do"] == "fork":
            self._fork(request, files, missing)
            return
        mesh = self._meshes.get(request["mesh"])
        if mesh is None:  # it was stopped before, or never started
            self._tell({"is": "stopped", "mesh": request["mesh"]})
            return
        mesh.stopping = True
        _kill(mesh.rank_of)
        self._reap()

    def _fork(self, request: dict[str, Any], files: list[int], missing: str) -> None:
        """Fork processes for some ranks; a mesh of many comes in several requests. Those that a limit of the system
        keeps from being forked count as ended, and all others live on."""
        number, left = request["mesh"], deque(request["ranks"])
        try:
            if missing:
                raise OSError(errno.EMFILE, missing)
            self._fork_all(request, files, left)
        except OSError as error:
            self._failed(number, left, error.strerror or str(error))
        finally:
            window = self._meshes[number].window
            for fd in files:
                if window is None or fd != window.file:
                    os.close(fd)

    def _fork_all(self, request: dict[str, Any], files: list[int], left: deque[int]) -> None:
        """Fork a process for each rank that is `left`, and take it from there."""
        start = role(request["role"])  # its module is imported once, rather than in each of them
        before(request["role"])
        number, workers = request["mesh"], request["workers"]
        if number not in self._meshes:
            self._meshes[number] = _Mesh(Window(Geometry.of(workers), files[0], files[0]) if workers else None)
        mesh = self._meshes[number]
        if workers and mesh.window is None:
            raise OSError(errno.ECANCELED, "others of the mesh could not be started")
        shared = files[0] if mesh.window is None else mesh.window.file
        each = (len(files) - 1) // len(left)
        parent = os.getpid()
        for old in [pid for pid, rank in mesh.rank_of.items() if rank in left]:  # given up, as one that is stopped
            os.kill(old, signal.SIGKILL)
            os.waitpid(old, 0)
            self._output.take(old)
            del mesh.rank_of[old]
        for at in range(1, len(files), each):
            rank, own = left[0], files[at : at + each]
            pid = plain_fork()
            if pid == 0:
                forked = Forked(rank, shared, mesh.window, own, request["given"])
                self._become(start, forked, [fd for fd in files if fd not in (shared, *own)], parent)
            mesh.rank_of[pid] = left.popleft()
            if mesh.window is not None:
                self._output.watch(pid)
            self._tell({"is": "started", "mesh": number, "rank": rank, "pid": pid})

    def _failed(self, number: int, ranks: Iterable[int], why: str) -> None:
        """Processes cannot be started: they count as ended. All others live on."""
        mesh = self._meshes.setdefault(number, _Mesh(None))
        for rank in ranks:
            if mesh.window is not None:
                mesh.window.mark_dead(rank)
            self._tell({"is": "exited", "mesh": number, "rank": rank, "how": f"could not be started: {why}"})

    def _become(self, start: Callable[[Forked], None], forked: Forked, others: list[int], parent: int) -> NoReturn:
        try:
            self._become_child(others, parent, prints=forked.window is not None)
            start(forked)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(1)

    def _become_child(self, others: list[int], parent: int, prints: bool) -> None:
        """In a process just forked: die with the parent, and drop the parent's files. Whether its output is kept:
        actors have files of their own."""
        die_with_parent()
        if os.getppid() != parent:  # it died before that was said
            os._exit(0)
        importing.started()
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        if prints:
            self._output.become()
        for other in (*others, *self._own):
            os.close(other)

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                pid = 0
            if pid == 0:
                break
            for number, mesh in self._meshes.items():
                rank = mesh.rank_of.pop(pid, None)
                if rank is not None:
                    if mesh.window is not None and not mesh.stopping:
                        mesh.window.mark_dead(rank)
                    code = os.waitstatus_to_exitcode(status)
                    last = {"log": log} if (log := self._output.take(pid)) else {}
                    self._tell({"is": "exited", "mesh": number, "rank": rank, "status": code} | last)
        for number in [number for number, mesh in self._meshes.items() if mesh.stopping and not mesh.rank_of]:
            window = self._meshes.pop(number).window
            if window is not None:
                os.close(window.file)
            self._tell({"is": "stopped", "mesh": number})

    def _tell(self, message: dict[str, Any]) -> None:
        with suppress(ConnectionError):  # the controller's end is noticed by the loop
            self._control.send(json.dumps(message).encode())


def plain_fork() -> int:
    """`os.fork` for a process with one thread, without the handlers that libraries have registered with the system:
    those of gRPC count on threads that a forked process no longer has, and abort it."""
    plain = getattr(_calls, "_Fork", None)  # the GNU C library's, from 2.34 on
    if plain is None:
        return os.fork()
    _calls.PyOS_BeforeFork()
    pid: int = plain()
    if pid == 0:
        _calls.PyOS_AfterFork_Child()
        return 0
    number = ctypes.get_errno()
    _calls.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, os.strerror(number))
    return pid


_calls = ctypes.PyDLL(None, use_errno=True)  # with the interpreter's lock held
_prctl: Any = getattr(_calls, "prctl", None)  # Linux's


def die_with_parent() -> None:
    if _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _kill(pids: dict[int, int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def keep_freed_memory() -> None:
    """Have malloc keep freed memory. A step allocates the memory that the last one freed, and pages that go back to the
    system between the two cost more to get again than most ops take. One arena, since a worker computes in one
    thread."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # the GNU C library's
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, 1)
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, -1)


def run(control: int, controller: int, expected: str) -> NoReturn:
    """Be the warm parent, in a process that has just been forked; see `main`.

    A library may have started its threads anew in it, as gRPC does unless that is switched off before it is loaded.
    Processes forked from here would have that library without its threads: a fresh interpreter takes its place."""
    try:
        _end_imports()
        if _threads() > 1:
            os.set_inheritable(control, True)
            command = fresh(control, controller, expected)
            os.execv(command[0], command)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    main(control, controller, expected)


def _end_imports() -> None:
    """The controller is in the middle of importing some modules: no thread here goes on with that, and an import of
    them would wait for it for ever. Their content by now is all that they have here."""
    locks: dict[str, object] = getattr(importlib._bootstrap, "_module_locks", {})
    for name in list(locks):  # and not all modules, whose pages would be copied here for being looked at
        module = sys.modules.get(name)
        spec: Any = vars(module).get("__spec__") if isinstance(module, ModuleType) else None
        if getattr(spec, "_initializing", False):
            spec._initializing = False  # by which importlib knows that the module's lock is to be waited for
    locks.clear()


def fresh(control: int, controller: int, expected: str) -> list[str]:
    """The command of a fresh interpreter that is the warm parent: slower, for torch is loaded anew."""
    code = (
        "import sys; sys.path[:] = sys.argv[4:]; from monarch.runtime.processes.importing import started; "
        f"started({importing.above()}); from monarch.runtime.processes.warm import main; "
        "main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])"
    )
    return [sys.executable, "-c", code, str(control), str(controller), expected, *sys.path]


def _threads() -> int:
    """How many this process has, those of libraries too."""
    try:
        return len(os.listdir("/proc/self/task"))
    except OSError:
        return 1


def _end_threads() -> None:
    """Those that NumPy's OpenBLAS starts when it is loaded. It ends them before any fork but a plain one, and starts
    others when it needs them; a process that was forked plainly would wait for them for ever."""
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)


def main(control: int, controller: int, expected: str) -> NoReturn:
    """Be the warm parent, in a process that has one thread, or in a fresh interpreter. `expected` is the role that most
    processes will have."""
    status = 1
    try:
        os.setsid()  # Ctrl-C is the controller's alone
        signal.signal(signal.SIGINT, lambda *_: None)  # what it starts would inherit that it is ignored
        for name in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM):
            signal.signal(name, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _close_all_but(control)
        keep_freed_memory()
        renew_streams()
        gc.disable()  # before anything is imported: a collection would write to all pages that are shared
        role(expected)  # imported here, once, rather than in every process
        if _threads() > 1:
            _end_threads()
        gc.freeze()
        Warm(socket.socket(fileno=control), controller).serve()
        status = 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


def _close_all_but(control: int) -> None:
    """Files that the controller has open are none of the workers' business: a pipe that they kept open would not end.
    But the user's Python objects, such as sockets and the handlers of a log, are there still, and would write into the
    file that gets the number next, or close it: files that have a name stay open, and /dev/null replaces all others."""
    null, nowhere = os.open(os.devnull, os.O_RDONLY), os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 0)
    for number, stream in ((1, sys.__stdout__), (2, sys.__stderr__)):
        if stream is None:  # what has the number is a file of the program's
            os.dup2(nowhere, number)
    for taken in map(int, os.listdir("/proc/self/fd")):
        if taken > 2 and taken != control and _is_foreign(taken):
            try:
                os.dup2(null, taken, inheritable=False)
            except OSError:  # above the limit on open files by now: nothing gets the number again
                os.close(taken)
    os.close(nowhere)


def _is_foreign(file: int) -> bool:
    """Whether an open file is a socket, a pipe, shared memory or a device: neither a file in a folder nor /dev/null."""
    try:
        about = os.fstat(file)
    except OSError:  # the one by which they were listed
        return False
    named = stat.S_ISREG(about.st_mode) and about.st_nlink
    return not named and about.st_rdev != os.stat(os.devnull).st_rdev
