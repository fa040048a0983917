"""The controller's side of the warm parent: one for the whole process, started when the first mesh is made."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from monarch.compiler.plan import MeshSpec, MonarchError
from monarch.runtime.processes.importing import refuse_while_importing
from monarch.runtime.processes.output import flush_streams, open_standard_files
from monarch.runtime.processes.roles import WORKER, WORKER_ACROSS_HOSTS
from monarch.runtime.processes.warm import FILES_A_PACKET, PACKET_BYTES, fresh, run

_END_SECONDS = 10.0
_CLOSE_SECONDS = 1.0
_LOOK_SECONDS = 0.002

Packet = dict[str, Any]


class Inbox(Protocol):
    """The target of messages about a mesh: a deque that its owner empties, or a function that is called at once, in
    whichever thread happens to read."""

    def append(self, packet: Packet, /) -> None: ...


def drop(queue: deque[Any], item: object) -> None:
    """Take the first of a queue out, if it is still this: a signal's handler may have acted on it meanwhile."""
    _ = queue.popleft() if queue and queue[0] is item else None


class WarmParent:
    """A process that forks others on request. `alive` turns false when it has gone."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.alive = True
        self.ops = registered_ops()
        self._inboxes: dict[int, Inbox] = {}
        self._packets: deque[bytes] = deque()
        """Messages that were read, and not handed out yet."""
        self._number = -1
        self._fresh: subprocess.Popen[bytes] | None = None
        open_standard_files()
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        controller = os.getpid()
        flush_streams()
        if can_fork():
            with warnings.catch_warnings():
                # Other threads are no danger: the child runs no code but ours, and replaces no lock that they may hold.
                warnings.simplefilter("ignore", DeprecationWarning)
                self.pid = os.fork()
            if self.pid == 0:
                run(theirs.fileno(), controller, WORKER)
        else:
            command = fresh(theirs.fileno(), controller, WORKER)
            self._fresh = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            self.pid = self._fresh.pid
        theirs.close()

    @property
    def meshes(self) -> set[int]:
        """The numbers of those whose workers it is asked for, or runs."""
        return set(self._inboxes)

    def number(self) -> int:
        """A number for a mesh."""
        with self.lock:
            self._number += 1
            return self._number

    def start(
        self,
        number: int,
        mesh: MeshSpec,
        ranks: Sequence[int],
        memory: int,
        sockets: list[socket.socket],
        threads: int,
        across: dict[str, Any] | None,
        settings: dict[str, Any],
        first: int = 0,
    ) -> None:
        """Fork workers for `ranks` of the mesh with this number, whose first command has the number `first`. Each
        worker gets one of `sockets`. `memory` is not used where the mesh has workers, which these join."""
        name = WORKER if across is None else WORKER_ACROSS_HOSTS
        given = {"dims": mesh.dims, "threads": threads, "across": across, "settings": settings, "first": first}
        files = [(end.fileno(),) for end in sockets]
        self.fork(number, name, ranks, memory, files, deque(), given, mesh.workers)

    def fork(
        self,
        number: int,
        name: str,
        ranks: Sequence[int],
        shared: int,
        files: Sequence[tuple[int, ...]],
        inbox: Inbox,
        given: dict[str, Any],
        workers: int = 0,
    ) -> None:
        """Fork processes for the role `name`, these ranks of the mesh with this number, whose messages go to `inbox`.
        They join the processes of a mesh that has some, and its inbox gets their messages.

        All of them get the file `shared`, which is the memory of a mesh of `workers` where that is not 0, and what is
        `given` as JSON; each gets as many `files` of its own."""
        with self.lock:
            joins = number in self._inboxes
            batch = (FILES_A_PACKET - 1) // len(files[0])
            request = {"do": "fork", "mesh": number, "role": name, "workers": workers, "given": given}
            try:
                self._inboxes.setdefault(number, inbox)
                for first in range(0, len(ranks), batch):
                    request["ranks"] = list(ranks[first : first + batch])
                    handed = [shared, *(fd for own in files[first : first + batch] for fd in own)]
                    socket.send_fds(self.channel, [json.dumps(request).encode()], handed)
            except BaseException:
                if not joins:  # no inbox gets messages about the forked processes
                    self.ask_to_stop(number)
                    self.forget(number)
                raise

    def fileno(self) -> int:
        """The socket on which the warm parent speaks: readable when `read` has something to do."""
        return self.channel.fileno()

    def read(self, seconds: float = 0.0) -> bool:
        """Hand out the next message, about whichever mesh. False where none came."""
        with self.lock:
            if not self._packets:
                if not self.alive or not self._readable(seconds):
                    return False
                with suppress(ConnectionError):
                    # In one call, so that no signal's handler comes between a packet's leaving the socket and this.
                    self._packets.extend(map(self.channel.recv, (PACKET_BYTES,)))
            if not self._packets or not self._packets[0]:
                self.alive = False
                return False
            packet = self._packets[0]
            message = json.loads(packet)
            if message["mesh"] in self._inboxes:
                self._inboxes[message["mesh"]].append(message)
            drop(self._packets, packet)
            return True

    def messages(self, mesh: int, seconds: float = 0.0) -> deque[Packet]:
        """The messages about the mesh; a caller that has acted on one drops it. Waits up to `seconds` where there are
        none."""
        with self.lock:
            inbox = self._inboxes[mesh]
            assert isinstance(inbox, deque)
            while self.read(0.0 if inbox else seconds):
                pass
            if not inbox:
                self.go_on()
            return inbox

    def ask_to_stop(self, mesh: int) -> None:
        """Have the mesh's processes killed, without waiting: its inbox hears of it."""
        with self.lock, suppress(OSError):
            self.channel.send(json.dumps({"do": "stop", "mesh": mesh}).encode())

    def forget(self, mesh: int) -> None:
        with self.lock:
            self._inboxes.pop(mesh, None)

    def _readable(self, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self.channel, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    def stop(self, mesh: int) -> None:
        """Kill the mesh's workers, and wait until they are gone. A warm parent that is itself stopped (SIGSTOP) is
        killed, and all its workers with it."""
        with self.lock:
            if mesh not in self._inboxes:
                return
            self.ask_to_stop(mesh)
            deadline = time.monotonic() + _END_SECONDS
            try:
                while self.alive and time.monotonic() < deadline:
                    messages = self.messages(mesh, _CLOSE_SECONDS)
                    if any(message["is"] == "stopped" for message in messages):
                        break
                    if not messages and self.is_stopped:
                        self._kill()
                    messages.clear()
            finally:
                self._inboxes.pop(mesh, None)

    def wait_ended(self, mesh: int) -> None:
        """`stop` has waited."""

    def close(self) -> None:
        """End the process, and with it all workers that it still has. It is killed where it does not end at once: it
        may have been stopped."""
        # Closing this end would not do: children of this process that others have forked hold copies of it.
        with suppress(OSError):
            self.channel.shutdown(socket.SHUT_RDWR)
        with self.lock:
            self.alive = False
            self.channel.close()
            if not self._ended(_CLOSE_SECONDS):
                self._kill()

    def drop(self) -> None:
        """In a forked child of the controller: the process is not this one's, and neither is its socket."""
        self.alive = False
        self.channel.close()

    def go_on(self) -> None:
        """Continue a warm parent that a signal has stopped: it would fork nothing, and tell of no death."""
        if self.alive and self._state() == "T":
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGCONT)

    def _kill(self) -> None:
        if not self._ended(0):
            os.kill(self.pid, signal.SIGKILL)
            self._ended(_END_SECONDS)

    def _ended(self, seconds: float) -> bool:
        """Whether the process has ended; waits for it up to `seconds`."""
        deadline = time.monotonic() + seconds
        while True:
            try:
                if self._fresh is not None:
                    gone = self._fresh.poll() is not None
                else:
                    gone = os.waitpid(self.pid, os.WNOHANG)[0] == self.pid
            except ChildProcessError:  # somebody else has waited for it
                return True
            if gone or time.monotonic() >= deadline:
                return gone
            time.sleep(_LOOK_SECONDS)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal (SIGSTOP) or a debugger holds it."""
        return self._state() in ("T", "t")

    def _state(self) -> str:
        """The state that Linux shows for the process, such as "S"; "" where there is none."""
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return ""

    @property
    def idle(self) -> bool:
        return not self._inboxes

    @property
    def runs(self) -> bool:
        """Whether it runs, and is not stopped; its messages may still be waiting to be read."""
        if not self.alive or self.is_stopped:
            return False
        poll = select.poll()
        poll.register(self.channel, 0)  # to hear of its end alone
        return not poll.poll(0)


def how_ended(status: int) -> str:
    """The meaning of an exit status (negative: a signal), as the rest of a sentence."""
    if status >= 0:
        return f"exited with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"was killed by signal {-status}"


def registered_ops() -> int:
    """A hash of the ops that torch knows: workers forked before one was registered do not have it."""
    return hash(tuple(torch._C._dispatch_get_all_op_names()))


def can_fork() -> bool:
    """Not with CUDA's driver loaded (`torch.cuda.is_available()` does so), whose state does not survive a fork, nor
    with Ray, which aborts or stops the child."""
    return hasattr(os, "fork") and not _has_cuda_driver() and "ray._raylet" not in sys.modules


def _has_cuda_driver() -> bool:
    try:
        return "/libcuda.so" in Path("/proc/self/maps").read_text()
    except OSError:
        return torch.cuda.is_initialized()


_lock = threading.Lock()
_all: list[WarmParent] = []  # the newest last
_owner = 0


def warm_parent() -> WarmParent:
    """The warm parent of this process; a new one where there is none, it has died or is stopped, or ops have been
    registered since. Raises MonarchError where a module must not start processes (see `importing`), and where a
    limit of the system is reached."""
    global _owner
    refuse_while_importing(1)  # an actor's process may have a mesh of its own, that of a module too
    with _lock:
        if _owner != os.getpid():  # the first here, or a fork of a process that had one: that one's is not ours
            _owner = os.getpid()
            _all.clear()
        if _all and _all[-1].runs and _all[-1].ops == registered_ops():
            return _all[-1]
        for old in [old for old in _all if old.idle]:
            old.close()
            _all.remove(old)
        try:
            _all.append(WarmParent())
        except OSError as error:
            raise MonarchError(
                f"cannot start a process for the workers: {error}",
                hint="A limit is reached: on processes (ulimit -u), open files (ulimit -n) or memory.",
            ) from error
        return _all[-1]


def at_exit() -> None:
    """End the processes: `import monarch` registers it, so that handlers of the program, which run before, can use
    their meshes. A forked child of this process has inherited the handler, and leaves the processes alone."""
    if os.getpid() == _owner:
        for warm in _all:
            warm.close()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()
    while _all:
        _all.pop().drop()


os.register_at_fork(after_in_child=_after_fork)


__all__ = ["WarmParent", "at_exit", "can_fork", "drop", "how_ended", "registered_ops", "warm_parent"]
