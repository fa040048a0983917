"""The agent of a host: it starts processes on request, and reports their ends and their output. On the program's host
that is the root, the process that the program runs in: the processes that it spawns end with it, at exit or before. On
others see `agent`.

A process is forked by the warm parent. Its socket is made, and listened on, before the fork, so that it can be sent
messages at once.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import TYPE_CHECKING, Any

from monarch.compiler.config import Settings, setting_of, settings
from monarch.compiler.execution import watching
from monarch.compiler.execution.events import Status, heard, tell
from monarch.compiler.mesh import Shape
from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.errors import MeshFailure
from monarch.runtime.actors.messages.address import name_of, new_address
from monarch.runtime.actors.messages.message import EMPTY, Payload
from monarch.runtime.actors.messages.network import Across
from monarch.runtime.actors.messages.protocol import (
    CONTROLLER,
    ENDED,
    FORK,
    LEAVE,
    LOG,
    OUTPUT_OPTIONS,
    STOP_PROCS,
    UNFIT,
    Head,
    ReplyTo,
)
from monarch.runtime.actors.messages.router import listen
from monarch.runtime.actors.processes import current
from monarch.runtime.actors.processes.attached import OtherHosts
from monarch.runtime.actors.processes.exits import exit_now, interrupt_main
from monarch.runtime.actors.processes.group import Death, ProcMeshSpec
from monarch.runtime.actors.processes.logs import Received
from monarch.runtime.actors.processes.output import HOLD_SECONDS, Output, Source
from monarch.runtime.actors.processes.ownership import EndProcess
from monarch.runtime.actors.processes.process import Process
from monarch.runtime.actors.telemetry.collecting import Collector
from monarch.runtime.future import Future
from monarch.runtime.processes.parent import WarmParent, how_ended, warm_parent
from monarch.runtime.processes.roles import ACTORS
from monarch.runtime.shared import signals

if TYPE_CHECKING:
    from monarch.runtime.hosts.attached import AttachedHosts

_CHUNK = 64 << 10
_WARM_SECONDS = 1.0
_LOG_SECONDS = 1.0
"""How many seconds handlers may take for the records of actors, when the program ends."""
_LIMIT = (
    "A limit is reached: on open files (ulimit -n), of which each process takes a few, or on\nprocesses (ulimit -u)."
)


@dataclass
class _Running:
    """A group of processes that were started here."""

    group: ProcMeshSpec
    warm: WarmParent
    alive: set[int]
    last: dict[int, deque[str]]
    output: Output
    """The lines of theirs that wait to be printed."""
    number: int = -1
    pipes: dict[int, tuple[int, Source]] = field(default_factory=dict)
    """By file: the rank that writes it, and the bytes that have come."""
    stopping: bool = False
    stops: list[ReplyTo] = field(default_factory=list)
    unfit: dict[int, bytes] = field(default_factory=dict)
    """The errors of the bootstrap, by rank: a pickled ActorError."""
    late: float | None = None
    """How many seconds those that are killed had to end."""


class Host:
    """Starts, watches and ends the processes of a host."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.across: Across | None = None
        """The data that processes started here need to reach those on other hosts."""
        self.other_hosts: set[str] = set()
        """The agents that hear from here which processes end."""
        self._lock = threading.RLock()
        self._groups: dict[str, _Running] = {}
        self._starting: dict[str, list[tuple[ReplyTo | None, str, float | None]]] = {}
        """By group that is still starting: how it was stopped meanwhile."""
        self._warms: list[WarmParent] = []
        self._output = Output()
        self._controllers: dict[str, Any] = {}
        self._making = threading.Lock()
        process.handle(FORK, self._on_fork)
        process.handle(STOP_PROCS, self._on_stop)
        process.handle(ENDED, self._on_ended)
        process.handle(CONTROLLER, self._on_controller)
        process.handle(UNFIT, self._on_unfit)
        process.handle(OUTPUT_OPTIONS, self._on_output_options)
        self.collector = Collector(process, self._recorded)

    # -- starting ------------------------------------------------------------------------------------------------------

    def _on_fork(self, sender: str, head: Head, payload: Payload) -> None:
        """A process asks for others."""
        answer = self._forked(head[2], payload.decode)

        def reply() -> None:
            error = answer.exception()
            self._process.reply(head[1], error is None, error)

        answer.when_done(reply)

    def start(self, group: ProcMeshSpec) -> Future[None]:
        """Start the processes of a group that belong here. They can be sent messages as soon as the group exists."""
        return self._forked(group.id, lambda: group)

    def _forked(self, number: str, group: Callable[[], ProcMeshSpec]) -> Future[None]:
        """Start a group's processes in a thread of its own: the I/O thread does not wait for a warm parent, and Ctrl-C
        ends the wait for it, and not the start. A group that is stopped while it starts stops as soon as it has
        started."""
        answer: Future[None] = Future.pending()

        def fork() -> None:
            try:
                self.fork(group())
            except Exception as error:
                answer.fail(error)
            else:
                answer.resolve(lambda: None)
            finally:
                with self._lock:
                    stops = self._starting.pop(number)
                for stop in stops:
                    self.stop(number, *stop)

        with self._lock:
            self._starting[number] = []
        try:
            threading.Thread(target=fork, name="monarch fork", daemon=True).start()
        except RuntimeError as error:
            del self._starting[number]
            answer.fail(MonarchError(f"cannot start processes: {error}", hint=_LIMIT))
        return answer

    def fork(self, group: ProcMeshSpec) -> None:
        """Start those processes of a group that are to be here, in the thread that calls."""
        ranks = group.ranks_on(self._process.address)
        count = len(ranks)
        group = replace(group, threads=max(1, signals.cores() // count))
        boot = os.memfd_create("monarch-group", os.MFD_CLOEXEC)
        listeners: list[socket.socket] = []
        read: list[int] = []
        write: list[int] = []
        try:
            os.write(boot, pickle.dumps((group, self.across)))
            for rank in ranks:
                listeners.append(listen(group.addresses[rank]))
                for _ in range(2):
                    ours, theirs = os.pipe2(os.O_CLOEXEC)
                    os.set_blocking(ours, False)
                    read.append(ours)
                    write.append(theirs)
            warm = warm_parent()
            kept = setting_of(group.settings, Settings.tail_log_lines)
            running = _Running(group, warm, set(ranks), {rank: deque(maxlen=kept) for rank in ranks}, self._output)
            with self._lock:
                self._groups[group.id] = running
                for at, fd in enumerate(read):
                    self._watch(running, ranks[at // 2], fd, error=bool(at % 2))
                if warm not in self._warms:
                    self._warms.append(warm)
                    self._process.router.watch(warm.fileno(), lambda _: self._read(warm))
                    self._process.router.soon(lambda: self._look_at(warm))
                files = [(listeners[at].fileno(), write[2 * at], write[2 * at + 1]) for at in range(count)]
                running.number = warm.number()
                warm.fork(running.number, ACTORS, ranks, boot, files, _Inbox(self, running), {})
        except OSError as error:
            for fd in read:
                self._process.router.forget(fd)
                os.close(fd)
            self._groups.pop(group.id, None)
            gone = isinstance(error, ConnectionError)
            raise MonarchError(
                f"cannot start {count} processes: {'the process that forks them has ended' if gone else error}",
                hint="Try again: a new one is started." if gone else _LIMIT,
            ) from error
        finally:
            os.close(boot)
            for listener in listeners:
                listener.close()
            for fd in write:
                os.close(fd)
        if group.owner[0] in self._process.dead:  # stopped before they had started
            self.stop(group.id, None, "the process of its owner has ended")

    def places(self) -> list[tuple[str, str]]:
        """The processes that run here, by address, and their names."""
        with self._lock:
            groups = [(running.group, sorted(running.alive)) for running in self._groups.values()]
        return [(group.addresses[rank], group.place(rank)) for group, ranks in groups for rank in ranks]

    def _recorded(self) -> list[str]:
        """The processes here that record what happens in them."""
        with self._lock:
            groups = [running for running in self._groups.values() if running.group.recorded is not None]
            return [running.group.addresses[rank] for running in groups for rank in running.alive]

    # -- their output --------------------------------------------------------------------------------------------------

    def _watch(self, running: _Running, rank: int, fd: int, error: bool) -> None:
        group = running.group
        source = Source(group.name, group.place(rank)[len(group.name) + 1 :], error, running.last[rank])
        running.pipes[fd] = rank, source
        self._process.router.watch(fd, lambda _: self._hear(running, fd, source))

    def _hear(self, running: _Running, fd: int, source: Source) -> None:
        self._listen(running, fd, source)

    def _listen(self, running: _Running, fd: int, source: Source) -> bool:
        """Read some of a process' output; whether there was any. In the I/O thread."""
        try:
            data = os.read(fd, _CHUNK)
        except BlockingIOError:
            return False
        now, output = monotonic(), running.output
        held = output.due is not None
        output.read(source, data, now)
        if not data:
            self._process.router.forget(fd)
            os.close(fd)
            del running.pipes[fd]
        if not held and output.due is not None:
            self._process.router.later(output.due - now, lambda: self._print(output))
        return bool(data)

    def _on_output_options(self, sender: str, head: Head, payload: Payload) -> None:
        _, group, reply, shown, seconds = head
        with self._lock:
            running = self._groups.get(group)
        if running is not None:
            self._print(running.output)
            running.output = Output(HOLD_SECONDS if seconds is None else seconds, seconds is not None)
            if not shown:
                running.output = Output(None)
        self._process.reply(reply, True, None)

    def _print(self, output: Output) -> None:
        for error, line in output.take():
            self._process.write(error, line)

    def print(self) -> None:
        """Print the lines that wait."""
        with self._lock:
            outputs = {id(running.output): running.output for running in self._groups.values()}
        for output in [self._output, *outputs.values()]:
            self._print(output)

    # -- how they end --------------------------------------------------------------------------------------------------

    def _read(self, warm: WarmParent) -> None:
        while warm.read():
            pass
        if not warm.alive:
            self._process.router.forget(warm.fileno())
            self._warms.remove(warm)
            for running in [running for running in self._groups.values() if running.warm is warm]:
                for rank in sorted(running.alive):
                    self.exited(running, rank, -signal.SIGKILL)

    def _look_at(self, warm: WarmParent) -> None:
        """Have a warm parent that a signal has stopped go on, now and then: it starts and ends nothing, and tells of no
        end. In the I/O thread."""
        if warm in self._warms and warm.alive:
            warm.go_on()
            self._process.router.later(_WARM_SECONDS, lambda: self._look_at(warm))

    def exited(self, running: _Running, rank: int, status: int | None, how: str = "") -> None:
        """A process has ended; how, where that is more than its status. In the I/O thread."""
        group = running.group
        if rank not in running.alive:
            return
        for fd, (_, source) in [(fd, pipe) for fd, pipe in running.pipes.items() if pipe[0] == rank]:
            while self._listen(running, fd, source):
                pass
        self._print(running.output)
        with self._lock:
            running.alive.discard(rank)
            expected = running.stopping
        if not how:
            how = "was stopped" if expected or status is None else how_ended(status)
        if expected and running.late is not None:
            how = f"was killed, because it had not ended {running.late:g} s after the request to end"
        log = tuple(running.last[rank])
        unfit = running.unfit.get(rank)
        self.tell(Death(group.addresses[rank], group.name, rank, how, status, log, expected, unfit))
        if not running.alive:
            self._ended(running)

    def tell(self, death: Death, lost: bool = False) -> None:
        """Tell everybody that a process has ended; its last messages may be `lost`. In the I/O thread."""
        self._on_ended(self._process.address, (ENDED, death.address, lost), Payload.of(death))

    def _on_ended(self, sender: str, head: Head, payload: Payload) -> None:
        """A process has ended, here or elsewhere: pass it on, and end the meshes that its actors owned."""
        if heard(Status):
            ended: Death = payload.decode()
            name, status = f"{ended.name}[{ended.rank}]", "Stopped" if ended.expected else "Failed"
            tell(Status("process", ended.address, ended.rank, name, status, "", ended.reason))
        with self._lock:
            here = [running.group.addresses[rank] for running in self._groups.values() for rank in running.alive]
            owned = [running.group.id for running in self._groups.values() if running.group.owner[0] == head[1]]
        self._process.on_ended(sender, head, payload)
        for address in [*here, *(self.other_hosts - {sender})]:
            self._process.router.send(address, head, payload)
        for group in owned:
            death: Death = payload.decode()
            self.stop(group, None, f"its owner's process {death.name}[{death.rank}] {death.reason}")

    def _on_unfit(self, sender: str, head: Head, payload: Payload) -> None:
        """The bootstrap of a process raised: it ends once this is known."""
        with self._lock:
            running = self._groups.get(head[1])
        if running is not None:
            running.unfit[head[2]] = payload.decode()
        self._process.reply(head[3], True, None)

    def _ended(self, running: _Running) -> None:
        """The last process of a group has ended."""
        with self._lock:
            self._groups.pop(running.group.id, None)
            running.stopping = True
            stops, running.stops = running.stops, []
        running.warm.ask_to_stop(running.number)
        running.warm.forget(running.number)
        for reply in stops:
            self._process.reply(reply, True, None)

    # -- stopping ------------------------------------------------------------------------------------------------------

    def _on_stop(self, sender: str, head: Head, payload: Payload) -> None:
        self.stop(head[1], head[2], head[3], head[4])

    def stop(self, group: str, reply: ReplyTo | None, reason: str, seconds: float | None = None) -> None:
        """End processes, once their actors have ended; `reply` gets the answer then. Processes that take longer than
        `seconds`, or than the setting as it was when they were spawned, are killed."""
        with self._lock:
            if group in self._starting:
                self._starting[group].append((reply, reason, seconds))
                return
            running = self._groups.get(group)
            if running is not None:
                if reply is not None:
                    running.stops.append(reply)
                if running.stopping:
                    return
                running.stopping = True
                spawned = setting_of(running.group.settings, Settings.process_exit_timeout)
                most = spawned if seconds is None else seconds
                self._process.router.later(most, lambda: self._kill(running, most))
        if running is None:
            if reply is not None:
                self._process.reply(reply, True, None)
            return
        for rank in sorted(running.alive):
            self._process.router.send(running.group.addresses[rank], (LEAVE, reason, most), EMPTY)

    def _kill(self, running: _Running, seconds: float) -> None:
        """End those processes of a group that have not ended in time. In the I/O thread."""
        if running.alive:
            running.late = seconds
            running.warm.ask_to_stop(running.number)

    def kill(self) -> None:
        """End all processes that are left, now."""
        for running in list(self._groups.values()):
            running.warm.ask_to_stop(running.number)

    def has(self, name: str) -> bool:
        """Whether a process by that name runs here."""
        with self._lock:
            groups = list(self._groups.values())
        return any(name_of(running.group.addresses[rank]) == name for running in groups for rank in list(running.alive))

    def end(self) -> None:
        """Likewise, and hear of nothing any more. In the I/O thread."""
        self.collector.close()
        with self._lock:
            groups = list(self._groups.values())
            self._groups.clear()
        for warm in self._warms:
            self._process.router.forget(warm.fileno())
        for running in groups:
            running.warm.ask_to_stop(running.number)
            running.warm.forget(running.number)
            for rank in list(running.alive):
                self._process.ports.lost(running.group.addresses[rank], "the processes of this host are ended")
            for fd in running.pipes:
                self._process.router.forget(fd)
                os.close(fd)
            running.pipes.clear()

    # -- controllers ---------------------------------------------------------------------------------------------------

    def _on_controller(self, sender: str, head: Head, payload: Payload) -> None:
        def make() -> None:
            try:
                with self._making:
                    mesh = self._controllers.get(head[1])
                    if mesh is None:
                        cls, args, kwargs = payload.decode()
                        mesh = self._controllers[head[1]] = self._process.this_proc().spawn(
                            head[1], cls, *args, **kwargs
                        )
            except Exception as error:
                self._process.raise_at(head[2], error, f"get_or_spawn_controller('{head[1]}')")
            else:
                self._process.reply(head[2], True, mesh)

        threading.Thread(target=make, name="monarch controller", daemon=True).start()


class _Inbox:
    """The warm parent's messages about a group, in whichever thread reads them."""

    def __init__(self, host: Host, running: _Running) -> None:
        self._host = host
        self._running = running

    def append(self, packet: dict[str, Any]) -> None:
        if packet["is"] == "exited":
            rank, status, how = packet["rank"], packet.get("status"), packet.get("how", "")
            self._host._process.router.soon(lambda: self._host.exited(self._running, rank, status, how))


# -- the root ----------------------------------------------------------------------------------------------------------


class Root(Process):
    """The process that the program runs in."""

    def __init__(self) -> None:
        address = new_address()
        shape = Shape.unity()
        group = ProcMeshSpec(
            address, "root", (address,), address, (address,), shape, (address, ""), None, None, (), "", ()
        )
        super().__init__(group, 0, listen(address))
        import torch

        self.threads = torch.get_num_threads()
        self.ready.set()
        self.host: Host = Host(self)
        self.other_hosts = OtherHosts(self)
        self._logs = Received(lambda line: self.write(True, line))
        self.handle(LOG, lambda sender, head, payload: self._logs.take(payload))
        self._empty = threading.Event()
        self._ending = threading.Lock()
        self._ended = False
        self._failed = threading.Lock()
        """Held from the first failure on that ends the program."""

    def unreached(self, address: str, why: str) -> None:
        if address in self.host.other_hosts:
            self.other_hosts.lost(address, f"is out of reach: the connection to its host is lost: {why}")
        else:
            super().unreached(address, why)

    def on_ended(self, sender: str, head: Head, payload: Payload) -> None:
        self.other_hosts.ended(head[1])
        super().on_ended(sender, head, payload)

    def agents_on(self, attached: AttachedHosts) -> tuple[str, ...]:
        return self.other_hosts.attach(attached)

    def agents_there(self, attached: AttachedHosts) -> tuple[str, ...]:
        return self.other_hosts.agents_there(attached)

    def attached_with(self, agents: tuple[str, ...]) -> AttachedHosts | None:
        return self.other_hosts.attached_with(agents)

    def places_elsewhere(self) -> list[tuple[str, str]]:
        return [place for place in self.other_hosts.places() if place[0] not in self.dead]

    def write(self, error: bool, line: str) -> None:
        file = sys.stderr if error else sys.stdout
        with suppress(ValueError, OSError):  # a closed file: there is nobody to read it
            print(line, file=file, flush=True)

    def unhandled(self, failure: MeshFailure) -> None:
        """Nobody has dealt with a failure: that is the end of the program, unless the user's hook thinks otherwise."""
        self.host.print()
        try:
            fault_hook(failure)
        except SystemExit as exit:
            code = exit.code if isinstance(exit.code, int) else 1
            if isinstance(exit.code, str):
                print(exit.code, file=sys.stderr)
        except BaseException:
            sys.excepthook(*sys.exc_info())
            code = 1
        else:
            return
        if not self._failed.acquire(blocking=False):
            return  # another failure is ending the program: a second interrupt would cut its `finally` blocks short
        interrupt_main(code, settings.fault_exit_timeout)
        self.shutdown("the program failed")
        exit_now(code)

    def empty(self) -> None:
        self._empty.set()

    def shutdown(self, reason: str) -> None:
        """Stop all that the program has spawned, the newest first, and wait until it has ended."""
        with self._ending:
            if self._ended:
                return
            self._ended = True
            self.supervision(EndProcess(reason))
            self._empty.wait(settings.process_exit_timeout)
            self.programs.end()
            self.host.kill()
            self.other_hosts.close()
            self.host.print()
            self._logs.end(_LOG_SECONDS)
            self.router.close()
            current.end(self)


def _exit_hook(failure: MeshFailure) -> None:
    """Print the failure and end the program with status 1, by SystemExit: the default of `fault_hook`."""
    print(f"Unhandled failure of {failure.report()}", file=sys.stderr, flush=True)
    raise SystemExit(1)


fault_hook: Callable[[MeshFailure], object] = _exit_hook
"""Called, in a thread of its own, with a failure that no owner dealt with. SystemExit, or any other exception, ends the
program; if it returns, the program goes on."""


def start_root() -> Process:
    """Make this process the root. The processes that it spawns are stopped at exit, before the warm parent goes."""
    warm_parent()
    root = Root()
    root.router.start()
    root.watch()
    watching.begin()
    return root


def at_exit() -> None:
    """Stop all that the program has spawned: `import monarch` registers it."""
    root = current.started()
    if isinstance(root, Root):
        root.shutdown("the program ended")


def shutdown_context() -> Future[None]:
    """Stop all meshes that this program has spawned, and wait for it: `shutdown_context().get()`. Later ones start
    anew. Without it the same happens at exit."""
    future: Future[None] = Future.pending()
    root = current.started()

    def shut() -> None:
        if isinstance(root, Root):
            root.shutdown("shutdown_context() was called")
        future.resolve(lambda: None)

    threading.Thread(target=shut, name="monarch shutdown", daemon=True).start()
    return future


__all__ = ["Host", "Root", "fault_hook", "shutdown_context", "start_root"]
