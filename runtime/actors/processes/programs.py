"""Programs on processes of actors: workers that run in them, and the connections that drive those.

The controller of a mesh sends each process the mesh's memory and a socket (WORK); a thread there is the worker from
then on (`worker.loop`). It ends when the mesh is closed or lost, and says so (WORKED); the process and its actors
live on. When the process ends, the controller sees that as for any process, and the mesh is lost.
"""

from __future__ import annotations

import errno
import gc
import os
import socket
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.execution.executor import Executor
from monarch.compiler.mesh import Shape
from monarch.compiler.plan import MeshSpec, MonarchError, TensorType
from monarch.runtime.actors.errors import ActorError, SupervisionError
from monarch.runtime.actors.messages.address import host_of
from monarch.runtime.actors.messages.message import EMPTY, Files, Payload
from monarch.runtime.actors.messages.protocol import DROP, WORK, WORKED, Head
from monarch.runtime.actors.processes.group import Death, ProcMeshSpec
from monarch.runtime.actors.processes.ports import All, failing
from monarch.runtime.controller.connection import ActorProcesses
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.controller.local import LocalConnection
from monarch.runtime.processes.roles import WORKER_BESIDE_ACTORS, WORKER_BESIDE_ACTORS_ACROSS_HOSTS, role
from monarch.runtime.shared.window import Geometry, Window
from monarch.runtime.worker.exchange import Gifts, Loan, Loans

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.process import Process
    from monarch.runtime.future import Future

_END_SECONDS = 10.0
"""How long a worker may take for its command when its mesh is closed."""


class Programs:
    """This process's part in programs."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self.driven: dict[str, WorkersInProcesses] = {}
        """The meshes that are driven from here, by name."""
        self.gifts = Gifts()
        self._running: dict[threading.Thread, tuple[str, Window]] = {}
        """The threads of workers here: the connections that drive them, and their mesh's memory."""
        self._ending = False
        self._numbers = count()
        self._dropped: list[tuple[int, Sequence[str]]] = []
        process.handle(WORK, self._on_work)
        process.handle(WORKED, self._on_worked)
        process.handle(DROP, self._on_drop)

    def died(self, death: Death) -> None:
        """A process has ended."""
        self.gifts.gone(death.address)
        for controller, window in list(self._running.values()):
            if controller == death.address:  # its children may keep the worker's socket open
                window.mark_dead(0)
        for mesh in list(self.driven.values()):
            mesh.died(death)

    # -- workers that run here -----------------------------------------------------------------------------------------

    def _on_work(self, sender: str, head: Head, payload: Payload) -> None:
        name = f"worker {head[3]}"
        threading.Thread(target=self._work, args=(sender, head, payload.files), name=name, daemon=True).start()

    def _work(self, controller: str, head: Head, files: Files | None) -> None:
        _, mesh, reply, rank, dims, across, owner = head
        spec = MeshSpec(dims)
        try:
            if files is None or len(files.fds) < 2:
                raise OSError(errno.EMFILE, "its files did not come: too many are open (ulimit -n)")
            window = Window(Geometry.of(spec.workers), files.fds[0], files.fds[0])
        except OSError as error:
            self._process.router.send(controller, (WORKED, mesh, rank, None), EMPTY)
            self._process.raise_at(reply, error, "starting a worker")
            return
        memory, end = files.take()
        up = socket.socket(fileno=end)
        torch.set_num_threads(self._process.threads)  # this thread's
        actors = _Actors(Loans(mesh), self.gifts, owner)  # there before any message that refers to it
        self._running[threading.current_thread()] = controller, window
        self._process.reply(reply, True, os.getpid())
        how = self._serve(actors, spec, rank, window, up, across)
        os.close(memory)
        del window, self._running[threading.current_thread()]
        gc.collect()  # a worker's objects refer to each other
        if self._ending and how is None:
            how = "was stopped with the program's actors"
        self._process.router.send(controller, (WORKED, mesh, rank, how), EMPTY)

    def end(self) -> None:
        """End the workers that run here, and wait for it: torch cannot be used while the interpreter ends."""
        self._ending = True
        for thread, (_, window) in list(self._running.items()):
            window.mark_dead(0)
            thread.join(_END_SECONDS)

    def _serve(
        self,
        actors: _Actors,
        spec: MeshSpec,
        rank: int,
        window: Window,
        up: socket.socket,
        across: dict[str, Any] | None,
    ) -> str | None:
        try:
            work = role(WORKER_BESIDE_ACTORS if across is None else WORKER_BESIDE_ACTORS_ACROSS_HOSTS)
            work(actors, spec, rank, window, up, across)
        except BaseException as error:
            traceback.print_exc()
            sys.stderr.flush()
            window.mark_dead(rank)
            return f"ended of {type(error).__name__}: {error}"
        finally:
            actors.loans.end()
        return None

    def _on_worked(self, sender: str, head: Head, payload: Payload) -> None:
        _, mesh, rank, how = head
        if mesh in self.driven:
            self.driven[mesh].ended(rank, how)

    # -- what actors return for programs -------------------------------------------------------------------------------

    def give(self, caller: str, number: int, value: object) -> Any:
        """Keep what an actor returned until its caller's mesh adopts it: the same, with a type for each tensor. Raises
        TypeError, and LayoutError for a dtype that meshes do not have."""
        tensors: list[torch.Tensor] = []
        try:
            tensors, described = _described(value)
        finally:
            self.gifts.give(caller, number, tensors)
        return described

    def give_nothing(self, caller: str, number: int) -> None:
        """The call failed here."""
        self.gifts.give(caller, number, [])

    def number(self) -> int:
        """For a call whose replies stay where they are. Unwanted replies of earlier ones are dropped now."""
        while self._dropped:
            number, addresses = self._dropped.pop()
            for address in addresses:
                self._process.router.send(address, (DROP, number), EMPTY)
        return next(self._numbers)

    def drop(self, number: int, addresses: Sequence[str]) -> None:
        """Nothing refers to the reply any more. From a finalizer, in any thread: so the message is not sent now."""
        self._dropped.append((number, addresses))

    def _on_drop(self, sender: str, head: Head, payload: Payload) -> None:
        self.gifts.drop(sender, head[1])


def _described(value: object) -> tuple[list[torch.Tensor], Any]:
    """The tensors in what an actor returned, and the same with their types."""
    leaves, tree = pytree.tree_flatten(value)
    for leaf in leaves or [None]:
        if not isinstance(leaf, torch.Tensor):
            raise TypeError(f"a program takes tensors, and this endpoint returned a {type(leaf).__name__}")
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            raise TypeError(
                f"a program's workers take plain tensors, and this endpoint returned a {type(leaf).__name__}: return "
                f"what it holds, x.full_tensor() or x.as_subclass(torch.Tensor)"
            )
        if leaf.device.type != "cpu" or leaf.layout is not torch.strided or leaf.is_quantized:
            raise TypeError(
                f"a program's workers take dense CPU tensors, and this endpoint returned a"
                f" {leaf.layout} one on {leaf.device}"
            )
    tensors = [leaf.detach().resolve_conj().resolve_neg().contiguous() for leaf in leaves]
    return tensors, pytree.tree_unflatten([TensorType(tensor.dtype, tuple(tensor.shape)) for tensor in tensors], tree)


class _Actors:
    """`worker.state.Actors`: those of this process, for one worker."""

    def __init__(self, loans: Loans, gifts: Gifts, owner: str) -> None:
        self.loans = loans
        self.gifts = gifts
        self._owner = owner

    def lend(self, token: int, loans: Sequence[Loan | str], messages: int) -> None:
        self.loans.lend(token, loans, messages)

    def adopt(self, token: int) -> list[torch.Tensor]:
        return self.gifts.adopt(self._owner, token)


class WorkersInProcesses:
    """`processes.workers.Processes`: workers of one mesh, in processes of actors on this host. `where` has these by
    rank, and `owner` is the process that drives the mesh."""

    alive = True  # each process' end is reported

    def __init__(self, process: Process, name: str, where: Mapping[int, str], owner: str) -> None:
        self._process = process
        self._name = name
        self._where = where
        self._owner = owner
        self._changed = threading.Condition()
        self._told: deque[dict[str, Any]] = deque()
        self._ranks: Sequence[int] = ()
        self._working: set[int] = set()
        self._window: Window | None = None

    def number(self) -> int:
        return 0

    def start(
        self,
        number: int,
        mesh: MeshSpec,
        ranks: Sequence[int],
        memory: int,
        sockets: list[socket.socket],
        threads: int,
        across: dict[str, Any] | None,
        settings: dict[str, Any],  # the processes have their spawner's
        first: int = 0,  # no worker joins others: such a mesh is not healed
    ) -> None:
        process = self._process
        self._window = Window(Geometry.of(mesh.workers), memory)
        self._ranks, self._working = ranks, set(ranks)
        process.programs.driven[self._name] = self
        members = [self._where[rank] for rank in ranks]
        waiting: All[int] = All(Shape.of({"workers": len(ranks)}), members)
        port = process.ports.open(waiting)
        for place, (rank, end) in enumerate(zip(ranks, sockets, strict=True)):
            payload = Payload(EMPTY.data)
            payload.files = Files.copies([memory, end.fileno()])
            head = WORK, self._name, (process.address, port, place), rank, mesh.dims, across, self._owner
            if not process.router.send(members[place], head, payload):
                self.ended(rank, None)
                process.ports.reply(port, place, False, failing(process.lost(members[place], "worker")))
        try:
            pids = waiting.future.get().values()
        except (ActorError, SupervisionError) as error:
            self.stop(0)
            raise _not_started(mesh, error) from None
        with self._changed:
            self._told.extend(
                {"is": "started", "rank": rank, "pid": pid} for rank, pid in zip(ranks, pids, strict=True)
            )

    def messages(self, mesh: int, seconds: float = 0.0) -> deque[dict[str, Any]]:
        with self._changed:
            if seconds:
                self._changed.wait_for(lambda: self._told, seconds)
            return self._told

    def stop(self, mesh: int) -> None:
        if self._window is not None:
            self._window.mark_dead(self._ranks[0])

    def wait_ended(self, mesh: int) -> None:
        with self._changed:
            if not self._process.router.closed:  # or else the processes have been stopped with it
                self._changed.wait_for(lambda: not self._working, _END_SECONDS)

    def died(self, death: Death) -> None:
        """A process has ended. In the I/O thread."""
        for rank, address in self._where.items():
            if address == death.address:
                self.ended(rank, f"is gone: its process {death.name}[{death.rank}] {death.reason}")

    def ended(self, rank: int, how: str | None) -> None:
        """A worker has ended, and how, if it was not told to."""
        with self._changed:
            if rank not in self._working:
                return
            self._working.discard(rank)
            if how is not None:
                self._told.append({"is": "exited", "rank": rank, "how": how})
                if self._window is not None:
                    self._window.mark_dead(rank)
            if not self._working:
                self._process.programs.driven.pop(self._name, None)
            self._changed.notify_all()


def _not_started(mesh: MeshSpec, error: ActorError | SupervisionError) -> MonarchError:
    why: BaseException = error.exception if isinstance(error, ActorError) else error
    return MonarchError(f"cannot start the workers of {mesh}: {why}")


def executor_in(
    process: Process, mesh: MeshSpec, group: ProcMeshSpec, ranks: Sequence[int], bootstrapped: Future[bool]
) -> Executor:
    """Start a worker for each place of a mesh in one of these processes, in order, once all are `bootstrapped`: all on
    this process' host, or as many on each of the hosts that the program has attached together. Raises MonarchError."""
    if len(ranks) != mesh.workers:
        raise MonarchError(f"{mesh} has {mesh.workers} workers, and there are {len(ranks)} processes for them")
    try:
        bootstrapped.get()
    except (ActorError, SupervisionError) as error:
        raise _not_started(mesh, error) from None
    addresses = tuple(group.addresses[rank] for rank in ranks)
    actor_processes = ActorProcesses(process.new_id(), addresses, process.address)
    here = host_of(process.address)
    if all(host_of(address) == here for address in addresses):
        return MeshExecutor(mesh, partial(_connect, process, actor_processes))
    hosts = [group.host_of(rank) for rank in ranks]
    agents = tuple(dict.fromkeys(hosts))
    attached = process.attached_with(agents)
    each = len(ranks) // len(agents)
    if attached is None or hosts != [agent for agent in agents for _ in range(each)]:
        raise MonarchError(
            f"{mesh} cannot run on these processes, which are on {len(agents)} hosts",
            hint="a mesh runs on one host, or, if the program itself makes it, on all that monarch.hosts() has "
            "attached\ntogether, in their order, and on equally many processes of each.",
        )
    return attached.start(mesh, actor_processes)


def _connect(
    process: Process, actor_processes: ActorProcesses, mesh: MeshSpec, lost: Callable[[], None]
) -> LocalConnection:
    where = dict(enumerate(actor_processes.processes))
    return LocalConnection(
        mesh, lost, actor_processes, WorkersInProcesses(process, actor_processes.name, where, actor_processes.owner)
    )
