"""Meshes of hosts and of processes. They are references, as meshes of actors are: plain data, passed in messages and
pickled."""

from __future__ import annotations

import inspect
import logging
import math
import os
import pickle
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, cast

import cloudpickle

from monarch.compiler.config import for_spawned, settings
from monarch.compiler.execution.events import Spawned, heard, tell
from monarch.compiler.execution.executor import Executor
from monarch.compiler.execution.factories import executor_for
from monarch.compiler.mesh import MeshAlgebra, MeshShapeError, Point, Shape
from monarch.compiler.plan import MeshSpec, MonarchError
from monarch.runtime.actors import classes
from monarch.runtime.actors.actor import Actor
from monarch.runtime.actors.actor_mesh import ActorMesh
from monarch.runtime.actors.endpoint import ActorInterface
from monarch.runtime.actors.errors import MeshFailure
from monarch.runtime.actors.messages.address import host_of, new_address, port_of
from monarch.runtime.actors.messages.message import EMPTY, Payload
from monarch.runtime.actors.messages.protocol import (
    CONTROLLER,
    FORK,
    LOG_OPTIONS,
    OUTPUT_OPTIONS,
    READY,
    SPAWN,
    SPAWNED,
    STACKS,
    STOP_PROCS,
    ReplyTo,
)
from monarch.runtime.actors.owned import Owned, done, own_end
from monarch.runtime.actors.processes import current, logs
from monarch.runtime.actors.processes.binding import bindings
from monarch.runtime.actors.processes.group import ProcMeshSpec
from monarch.runtime.actors.processes.ownership import PlaceEnded
from monarch.runtime.actors.processes.ports import All, One, failing
from monarch.runtime.actors.telemetry import recording
from monarch.runtime.actors.values import ValueMesh
from monarch.runtime.future import Future
from monarch.runtime.processes.importing import refuse_while_importing

if TYPE_CHECKING:
    from typing import Self

    from monarch.runtime.actors.processes.identity import Instance
    from monarch.runtime.actors.processes.process import Process
    from monarch.runtime.hosts.attached import AttachedHosts
    from monarch.runtime.hosts.launch.launcher import LaunchedHosts

P = ParamSpec("P")
A = TypeVar("A", bound=Actor)

active: ContextVar[ProcMesh | None] = ContextVar("monarch processes", default=None)
"""The processes in which `monarch.remote` functions run."""


class HostMesh(MeshAlgebra):
    """Hosts, on which processes are spawned and the workers of programs run.

        hosts = monarch.hosts(["node1:4242", "node2:4242"])     # {'hosts': 2}; this_host() is this one, {}
        procs = hosts.spawn_procs(per_host={"gpus": 8})         # processes, for actors
        mesh = Mesh(data=16, hosts=hosts)                       # workers, for programs

    In the program that attached them, leaving a `with hosts:` block, `close`, or the end of this process ends what runs
    on them for it; the hosts stay. Sent in a message, a host mesh is a reference, which can spawn processes.
    """

    def __init__(
        self,
        shape: Shape,
        agents: tuple[str, ...] | None = None,
        attached: AttachedHosts | LaunchedHosts | None = None,
        command: tuple[str, ...] = (),
    ) -> None:
        """`agents` are those of all base ranks, `attached` how the program reaches them. An agent is made on attached
        hosts, or on this one if there are none, when the first processes are spawned. `command` starts these."""
        self._shape = shape
        self._known = agents
        self._attached = attached
        self._command = command
        self._ended = ""
        """The call that ended its use."""

    @property
    def _agents(self) -> tuple[str, ...]:
        """Raises MonarchError where an agent cannot be made or reached."""
        if self._known is None:
            process, attached = current.process(), self._attached
            self._known = (_own_host(process),) if attached is None else process.agents_on(attached.attached)
        return self._known

    def _reached(self) -> tuple[str, ...]:
        """How each of all base ranks is reached: see `addresses`."""
        if self._attached is not None:
            return self._attached.addresses
        ports = (port_of(agent) if host_of(agent) else None for agent in self._known or ("",))
        return tuple(f"{port[0]}:{port[1]}" if port else "" for port in ports)

    @property
    def addresses(self) -> tuple[str, ...]:
        """The address of each host, as `monarch.hosts` got it; of the program's own, one that is empty."""
        reached = self._reached()
        return tuple(reached[base] for base in self._shape.ndslice)

    def start(self, mesh: MeshSpec) -> Executor:
        """Start a program's workers on these hosts, equal blocks of them in order: `Mesh(..., hosts=hosts)` calls this.

        Raises MonarchError where they cannot be started, for a part of the attached hosts, and where hosts that another
        process attached were sent here.
        """
        self._usable()
        if self._command:
            raise MonarchError(
                f"cannot run a program on {self!r}: its workers are forked, and not started with {self._command[0]}",
                hint="use the hosts without with_python_executable, or Mesh(procs=...) with processes spawned there.",
            )
        if self._attached is not None:
            if self._shape.ranks() != list(range(len(self._attached.addresses))):
                raise MonarchError(
                    f"cannot run a program on {self!r}: it is a part of {len(self._attached.addresses)} attached hosts",
                    hint="attach those hosts by themselves: monarch.hosts([...]).",
                )
            return self._attached.start(mesh)
        process = current.started()
        if self._known is not None and (process is None or self._known != (_own_host(process),)):
            raise MonarchError(
                f"cannot run a program on {self!r}: this process did not attach these hosts",
                hint="make the mesh in the process that called monarch.hosts, or attach the hosts here too.",
            )
        return executor_for(mesh)

    def join(self, address: str) -> None:
        """Attach another host, on which `monarch host` runs with the same token or certificates of the same authority:

            hosts = monarch.hosts(["node1:4242", "node2:4242"], room=2)
            mesh = Mesh(data=16, hosts=hosts)         # 4 workers for each of the hosts that there may be
            monarch.resize_mesh(mesh, data=8)         # those of the first two
            ...
            hosts.join("node3:4242")
            monarch.resize_mesh(mesh, data=12)

        Behind it, workers by which `monarch.resize_mesh` has a mesh grow run on hosts that have joined, where they
        shared another. This host mesh keeps its shape: actors are spawned on the hosts that it has. From any thread;
        returns when the host is attached. Raises MonarchError where it cannot be, and for hosts that this process did
        not attach; then nothing has changed.
        """
        self._usable()
        if self._attached is None:
            raise MonarchError(f"{self!r} takes no hosts", hint="attach them here: monarch.hosts([...], room=1).")
        self._attached.attached.join(address)

    def close(self) -> None:
        """End what runs on attached hosts for this process, and let them go. Idempotent. Raises MonarchError for a part
        of them."""
        if self._attached is not None:
            if len(self) != len(self._attached.addresses):
                raise MonarchError(f"{self!r} is a part of {len(self._attached.addresses)} hosts: close the whole mesh")
            self._attached.close()

    def stop(self) -> Future[None]:
        """Stop the processes that this one has spawned on these hosts, in order and with `__cleanup__`, and let the
        hosts go, which stay for others. A future of the end; then this mesh cannot be used any more.

        Raises RuntimeError for a slice, for a mesh that was sent here, and after `stop` or `shutdown`.
        """
        return self._let_go("stop", None if self._attached is None else self._attached.close)

    def shutdown(self) -> Future[None]:
        """Stop these processes, and end the attached hosts themselves, for every program that uses them: `monarch host`
        ends on each as soon as it has let this program go. Raises as `stop`, and RuntimeError for the program's own
        host."""
        if self._attached is None and not self._ended and self._own():
            raise RuntimeError("the program's own host ends with the program: use stop(), or shutdown_context()")
        return self._let_go("shutdown", None if self._attached is None else self._attached.end)

    def _own(self) -> bool:
        """Whether this is the host that this process runs on."""
        return self._known is None or self._known == (_own_host(current.process()),)

    def _let_go(self, what: str, hosts: Callable[[], None] | None) -> Future[None]:
        self._usable()
        if hosts is None and not self._own():
            raise RuntimeError(f"{self!r} was sent here: {what}() is for the process that attached the hosts")
        attached = self._attached
        if attached is not None and len(self) != len(attached.addresses):
            raise RuntimeError(f"{self!r} is a part of {len(attached.addresses)} hosts: {what}() the whole")
        process = current.started()
        self._ended = what
        future: Future[None] = Future.pending()
        reason, seconds = f"{what}() of its hosts", settings.process_exit_timeout

        def end() -> None:
            try:
                if process is not None:
                    agents = self._agents if attached is None else process.agents_there(attached.attached)
                    for stopped in [mesh._stop(reason, seconds) for mesh in process.spawned_on(agents)]:
                        stopped.get()
                if hosts is not None:
                    hosts()
            except Exception as error:  # whoever waits gets it
                future.fail(error)
            else:
                future.resolve(lambda: None)

        threading.Thread(target=end, name="monarch hosts end", daemon=True).start()
        return future

    def _usable(self) -> None:
        if self._ended:
            raise RuntimeError(f"{self._ended}() of these hosts was called: they cannot be used any more")

    async def __aenter__(self) -> Self:
        self._usable()
        return self

    async def __aexit__(self, *exception: object) -> None:
        """`shutdown`, unless that or `stop` was called in the block."""
        if not self._ended:
            await self.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def spawn_procs(
        self,
        per_host: Mapping[str, int] | None = None,
        bootstrap: Callable[[], None | Awaitable[None]] | None = None,
        name: str = "procs",
        proc_bind: Sequence[Mapping[str, str]] | None = None,
        bootstrap_command: Sequence[str] | Callable[[Point], Sequence[str]] | None = None,
    ) -> ProcMesh:
        """Start processes, on each host a grid of these dims: `this_host().spawn_procs(per_host={"gpus": 8})`.

        Returns once they can be sent messages, which is at once on this host. `bootstrap` is called in each process
        before there is any actor but its own; its error ends the process. They end with the actor, or program, that
        spawned them. `proc_bind` has for each process of a host on which CPUs it runs, and from which NUMA nodes its
        memory comes: `[{"cpus": "0-3"}, {"cpunodebind": "1", "membind": "1"}]`; where a host does not have that, a
        process ends as if its bootstrap had raised.

        `bootstrap_command` starts them anew rather than forked, which takes seconds: the words of a command to which an
        interpreter's arguments are appended, `["numactl", "--membind=0", "python3"]`, or a function that gives them for
        a process's place. It has to become an interpreter, in the same process, of the same Python with the same
        Monarch. `with_python_executable` sets it for all that is spawned.

        Raises MonarchError where a limit of the system is reached, SupervisionError where a host is lost,
        MeshShapeError for a dim that counts the hosts already, ValueError for a `proc_bind` or a `bootstrap_command`
        that makes no sense.
        """
        refuse_while_importing(0)
        dims = dict(per_host or {})
        self._usable()
        if twice := dims.keys() & self.extent.keys():
            raise MeshShapeError(f"the dim '{min(twice)}' counts the hosts: give the dims of each host other names")
        shape = Shape.of({**self.extent, **dims})
        instance = current.context().actor_instance
        process = instance._process
        agents = tuple(self._agents[base] for base in self._shape.ndslice)
        each = len(shape) // len(agents)
        bound = bindings(proc_bind, each)
        if callable(bootstrap_command):
            commands = tuple(tuple(bootstrap_command(Point(rank, shape.extent))) for rank in range(len(shape)))
        else:
            commands = (tuple(bootstrap_command or self._command),)
        if isinstance(bootstrap_command, str) or (bootstrap_command is not None and not all(commands)):
            raise ValueError(f"bootstrap_command={bootstrap_command!r}: a command is a list of words, as ['python3']")
        group = ProcMeshSpec(
            id=process.new_id(),
            name=name,
            hosts=agents,
            root=process.group.root,
            addresses=tuple(new_address(host_of(agent)) for agent in agents for _ in range(each)),
            shape=shape,
            owner=instance.owner,
            bootstrap=None if bootstrap is None else cloudpickle.dumps(bootstrap),
            slow_calls=process.slow_calls,
            path=tuple(sys.path),
            folder=os.getcwd(),
            environ=_environment(process, agents),
            settings=tuple(for_spawned().items()),
            levels=logs.levels(),
            bindings=bound,
            commands=commands,
            recorded=recording.bounds(),
        )
        mesh = ProcMesh(group, shape)
        if heard(Spawned):
            tell(Spawned("processes", group.id, name, _dims_of(shape), len(shape)))
        try:
            _start(process, group)
            process.owns(instance.actor_id, mesh, processes=True)
        except BaseException:  # Ctrl-C too: nobody else has the mesh, to stop it
            mesh._have_stopped(process, range(len(shape)), "not all of them could be started")
            raise
        return mesh

    @property
    def initialized(self) -> Future[bool]:
        """A future of True: a mesh's hosts are there from its start."""
        self._usable()
        made: Future[bool] = Future.pending()
        made.resolve(lambda: True)
        return made

    def with_python_executable(self, path: str | os.PathLike[str]) -> HostMesh:
        """The same hosts, on which processes are spawned with this interpreter, anew: see `spawn_procs`."""
        return HostMesh(self._shape, self._known, self._attached, (os.fspath(path),))

    def _over(self, shape: Shape) -> HostMesh:
        return HostMesh(shape, self._known, self._attached, self._command)

    def _describe(self, base: int) -> str:
        return self._reached()[base] or os.uname().nodename

    def __reduce__(self) -> tuple[type[HostMesh], tuple[Shape, tuple[str, ...], None, tuple[str, ...]]]:
        return HostMesh, (self._shape, self._agents, None, self._command)

    def __repr__(self) -> str:
        dims = f"{self.extent}: " if self.extent else ""
        return f"HostMesh({dims}{', '.join(address or 'this host' for address in self.addresses)})"


class ProcMesh(Owned):
    """Processes, in which actors can be spawned."""

    def __init__(self, group: ProcMeshSpec, shape: Shape) -> None:
        self._group = group
        self._shape = shape
        self._id = group.id
        self._name = group.name
        self._addresses = group.addresses
        self._origin: tuple[Instance, bytes] | None = None
        """The origin of these processes, as actors spawned in them see it."""

    @property
    def name(self) -> str:
        """The name that it was spawned with."""
        return self._name

    @property
    def id(self) -> str:
        """The `mesh_id` of a `MeshFailure` of these processes."""
        return self._id

    @property
    def host_mesh(self) -> HostMesh:
        """The host that they run on, or a mesh of several: with its own dims, unless this is a slice."""
        group = self._group
        hosts = tuple(dict.fromkeys(group.host_of(base) for base in self._shape.ndslice))
        if len(hosts) == 1:
            return HostMesh(Shape.unity(), hosts)
        dims: dict[str, int] = {}
        for label, size in group.shape.extent.items():
            if hosts == group.hosts and math.prod(dims.values()) < len(hosts):
                dims[label] = size
        return HostMesh(Shape.of(dims or {"hosts": len(hosts)}), hosts)

    def spawn(self, name: str, actor_class: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> A:
        """An actor of this class in each process, made there from these arguments. Returns at once.

        The result is an `ActorMesh`, which has the endpoints of the class. An error of the constructor is a failure of
        the mesh: its owner, the actor or program that calls this, gets it. Raises ValueError for a class that cannot be
        an actor's, TypeError for arguments that it does not take, SupervisionError where a process has ended.
        """
        cls = cast("type[A]", actor_class)
        ActorInterface.of(cast("type", cls))
        try:
            inspect.signature(cls).bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{cls.__qualname__}{inspect.signature(cls)}: {error}") from None
        instance = current.context().actor_instance
        process = instance._process
        members = self._members()
        actor_id = process.new_id()
        agents = tuple(dict.fromkeys(map(self._group.host_of, self._shape.ndslice)))
        mesh: ActorMesh[A] = ActorMesh(actor_id, name, cls, tuple(members), Shape.of(self.extent), agents)
        for address in members:
            if address in process.dead:
                raise process.lost(address, f"{name}.__init__")
        classes.renew(cls)
        if self._origin is None or self._origin[0] is not instance:
            self._origin = instance, instance.originates(self)
        payload = Payload.of((mesh, self._origin[1], args, kwargs), members)
        process.owns(instance.actor_id, mesh, processes=False)
        if heard(Spawned):
            tell(Spawned("actors", actor_id, name, _dims_of(mesh._shape), len(members)))
        gone = mesh._audience.send(process, lambda rank: (SPAWN, actor_id, None, rank, name, instance.owner), payload)
        for rank in gone:  # of whose end nobody has told this process, which may be younger
            process.supervision(PlaceEnded(actor_id, rank, MeshFailure(actor_id, name, rank, "its process is gone")))
        return cast(A, mesh)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Within the block `monarch.remote` functions run in these processes: `with procs.activate(): …`."""
        before = active.set(self)
        try:
            yield
        finally:
            active.reset(before)

    def start(self, mesh: MeshSpec) -> Executor:
        """Have a program's workers run in these processes: `monarch.distributed.Mesh(procs=procs)` calls this."""
        return current.process().executor(mesh, self._group, tuple(self._shape.ndslice), self.initialized)

    def stop(self, reason: str = "it was stopped") -> Future[None]:
        """End the processes, their actors first. A future of the end; processes that do not end in time (the setting
        `process_exit_timeout`, as it is here and now) are killed.

        Raises RuntimeError for the process that the program runs in, and for a slice. In one of these processes the
        future is an error at once, RuntimeError, for code that waits there would wait for its own end.
        """
        return self._stop(reason, settings.process_exit_timeout)

    def _stop(self, reason: str, seconds: float) -> Future[None]:
        self._whole()
        process = current.process()
        if self._addresses == (process.group.root,):
            raise RuntimeError("this is the process that the program runs in: use shutdown_context()")
        hosts = self._group.hosts
        waiting: All[None] = All(Shape.of({"hosts": len(hosts)}), hosts)
        port = process.ports.open(waiting)
        for place, host in enumerate(hosts):
            head = STOP_PROCS, self._id, (process.address, port, place), reason, seconds
            if not process.router.send(host, head, EMPTY):
                process.ports.reply(port, place, True, lambda: None)  # they have ended with their host
        if process.address in self._addresses:
            waiting.future.fail(own_end(self._name, "processes"))
        return done(waiting.future, None)

    def _have_stopped(self, process: Process, ranks: Sequence[int], reason: str) -> None:
        for host in self._group.hosts:
            process.router.send(host, (STOP_PROCS, self._id, None, reason, settings.process_exit_timeout), EMPTY)

    @property
    def initialized(self) -> Future[bool]:
        """A future of True that is done once all processes run, and `bootstrap` is through; ActorError where that
        raised."""
        dead, members = current.process().dead, self._members()

        def why() -> Exception | None:
            unfit = [death.unfit for death in map(dead.get, members) if death is not None and death.unfit is not None]
            return pickle.loads(unfit[0]) if unfit else None

        return done(self._ask_each(READY, f"{self._name}.initialized"), True, why)

    async def logging_option(
        self, stream_to_client: bool = False, aggregate_window_sec: float | None = None, level: int = logging.INFO
    ) -> None:
        """Which output and log records of these processes come to the program: `await procs.logging_option(…)`.

        `stream_to_client`      False: nothing, but for the last lines in the report of how a process ended
        `aggregate_window_sec`  a line is printed once in so many seconds, with how often it was written; else equal
                                lines of several processes are joined if they come together
        `level`                 of their root logger: from which level on they log, where a logger has none of its own

        Returns when that holds. Raises ValueError for a value that is not allowed, RuntimeError for a slice.
        """
        self._whole()
        if aggregate_window_sec is not None and not stream_to_client:
            raise ValueError("aggregate_window_sec is for printed output: it needs stream_to_client=True")
        if aggregate_window_sec is not None and not 0 <= aggregate_window_sec < math.inf:
            raise ValueError(f"aggregate_window_sec={aggregate_window_sec!r}: it has to be a number of seconds from 0")
        if not isinstance(level, int) or not 0 <= level <= 255:
            raise ValueError(f"level={level!r}: a level of the module logging is from 0 to 255")
        members, name = self._members(), self._name

        def head(place: int, reply: ReplyTo) -> tuple[Any, ...]:
            if place < len(members):
                return LOG_OPTIONS, reply, level, stream_to_client
            return OUTPUT_OPTIONS, self._id, reply, stream_to_client, aggregate_window_sec

        everybody = [*members, *self._group.hosts]
        await _ask_several(Shape.of({"asked": len(everybody)}), everybody, head, name)

    def stacks(self) -> Future[ValueMesh[str]]:
        """The stacks of these processes' threads and tasks now, as text."""
        return self._ask_each(STACKS)

    def _ask_each(self, kind: int, what: str = "") -> Future[ValueMesh[Any]]:
        """Ask the processes themselves; `what`, where that is reported if it takes long."""
        return _ask_several(self._shape, self._members(), lambda place, reply: (kind, reply), self._name, what)

    def _over(self, shape: Shape) -> ProcMesh:
        return ProcMesh(self._group, shape)

    def _describe(self, base: int) -> str:
        return f"{self._name}[{base}]"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ProcMesh) and (self._id, self._shape) == (other._id, other._shape)

    def __hash__(self) -> int:
        return hash((self._id, self._shape))

    def __reduce__(self) -> tuple[type[ProcMesh], tuple[ProcMeshSpec, Shape]]:
        plain = replace(self._group, bootstrap=None, path=(), environ=(), settings=(), levels=(), commands=())
        return ProcMesh, (plain, self._shape)

    def __repr__(self) -> str:
        return f"ProcMesh('{self._name}', {self.extent})"


def _dims_of(shape: Shape) -> str:
    """The dims of a mesh, as text: "hosts=2, gpus=8"."""
    return ", ".join(f"{dim}={size}" for dim, size in shape.extent.items())


def _start(process: Process, group: ProcMeshSpec) -> None:
    """Have the processes of a group started, and wait until they can be sent messages."""
    payload = Payload.of(group)
    if any(map(host_of, group.hosts)):
        process.router.send(group.root, (SPAWNED,), payload)
    asked: list[Future[Any]] = []
    for host in group.hosts:
        if process.host is not None and host == process.address:
            asked.append(process.host.start(group))
        else:
            asked.append(_ask(process, host, lambda reply: (FORK, reply, group.id), payload))
    for answer in asked:
        answer.get()


def _environment(process: Process, agents: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """The part of this process's environment that spawned ones get: all of it on the program's own host, between
    processes of that host, and anywhere else the variables that the user names, for the way there may be in clear."""
    if not any(map(host_of, (process.address, *agents))):
        return tuple(os.environ.items())
    named = {name.strip() for name in settings.environment.split(",")}
    return tuple((name, value) for name, value in os.environ.items() if name in named)


def _own_host(process: Process) -> str:
    return process.group.host_of(process.rank)


def this_host() -> HostMesh:
    """The host that this process runs on. Its extent is `{}`. Starts nothing by itself."""
    process = current.started()
    return HostMesh(Shape.unity(), None if process is None else (_own_host(process),))


def this_proc() -> ProcMesh:
    """The process that this is. Its extent is `{}`."""
    return current.process().this_proc()


def get_or_spawn_controller(name: str, cls: Callable[P, A], *args: P.args, **kwargs: P.kwargs) -> Future[A]:
    """A future of the one actor by that name in the whole job. The first to ask has it made, in the first process, and
    it lasts as long as the program."""
    process = current.process()
    payload = Payload.of((cls, args, kwargs))
    return _ask(process, process.group.root, lambda reply: (CONTROLLER, name, reply), payload)


def _ask_several(
    shape: Shape, addresses: Sequence[str], head: Callable[[int, ReplyTo], tuple[Any, ...]], name: str, what: str = ""
) -> Future[ValueMesh[Any]]:
    """Ask processes, one for each place of a shape."""
    process = current.process()
    waiting: All[Any] = All(shape, addresses, what)
    port = process.ports.open(waiting)
    for place, address in enumerate(addresses):
        if not process.router.send(address, head(place, (process.address, port, place)), EMPTY):
            process.ports.reply(port, place, False, failing(process.lost(address, name)))
    return waiting.future


def _ask(process: Process, address: str, head: Callable[[ReplyTo], tuple[Any, ...]], payload: Payload) -> Future[Any]:
    """Ask a process itself."""
    waiting: One[Any] = One(address)
    port = process.ports.open(waiting)
    if not process.router.send(address, head((process.address, port, 0)), payload):
        process.ports.reply(port, 0, False, failing(process.lost(address, "process")))
    return waiting.future
