"""Meshes of workers, with named dims."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FunctionType
from typing import Any, TypeVar

from monarch.compiler.blocks import reading
from monarch.compiler.errors import DeviceMeshError, LayoutError, MonarchError
from monarch.compiler.execution.events import Span, heard, tell
from monarch.compiler.execution.executor import Executor, Handle, Hosts, Procs, Returned
from monarch.compiler.loading import load
from monarch.compiler.mesh import MeshAlgebra, MeshDimError, Shape, named_sizes
from monarch.compiler.types import MeshSpec
from monarch.language.layouts import LayoutLike
from monarch.language.source import shorten
from monarch.language.tensors.operations import operations
from monarch.language.tensors.workers import State, Workers

R = TypeVar("R")
T = TypeVar("T")

_PROGRAMS = 64
"""So many functions are remembered by `Mesh.execute`."""

_meshes: weakref.WeakValueDictionary[int, Mesh] = weakref.WeakValueDictionary()
"""The meshes that this process has made, in order, without views of them."""
_numbers = itertools.count()


def open_meshes() -> list[Mesh]:
    """The meshes of this process that can run programs; where there are none, those that are abstract."""
    found = [mesh for mesh in list(_meshes.values()) if not mesh.is_closed]
    if len(found) > 1:
        del found
        gc.collect()  # a mesh without references may only wait for the garbage collector
        found = [mesh for mesh in list(_meshes.values()) if not mesh.is_closed]
    return [mesh for mesh in found if not mesh.is_abstract] or found


_sizes: Mapping[str, int] = {}


@contextmanager
def mesh_sizes(sizes: Mapping[str, int]) -> Iterator[None]:
    """Meshes that are made within the block have these sizes, by dim name, whatever the program says: `monarchc
    compile --mesh` compiles for another size than a file runs on."""
    global _sizes
    before, _sizes = _sizes, sizes
    try:
        yield
    finally:
        _sizes = before


looked_at: dict[int, str] = {}
"""For each started mesh whose programs look for anomalies, by its number, for which ones."""


class Mesh(MeshAlgebra):
    """A grid of workers with a name for each dim.

        mesh = Mesh(data=4, model=2)
        mesh = Mesh(shape=(4, 2), mesh_dim_names=("data", "model"))
        mesh = Mesh(data=4, model=2, hosts=monarch.hosts(["node1:4242", "node2:4242"]))
        mesh = Mesh(procs=procs)

    Workers are numbered row-major (the last dim varies fastest), and start when something first runs on the mesh;
    `close` (or leaving a `with mesh:` block) ends them. They run on this machine, or in equal blocks on each of
    `hosts`, so that the first dims are those that cross from host to host; or in the processes of actors that are
    `procs`, in the same order, whose dims the mesh has if none are given.

    `rename`, `split` and `flatten` give meshes with other dims on the same workers, `slice` and `mesh["model"]` meshes
    of some of them (see `MeshAlgebra`). All that runs on a mesh runs on such a *part*, on its workers alone, and no new
    ones are started: programs, ops outside of them, per-worker code. The same part is the same object:
    `mesh.slice(data=0) is mesh.slice(data=0)`. A tensor is on one mesh. Programs on parts that share workers
    run one after the other, in the order of the calls, and others side by side.

    Raises LayoutError for dims that are none, and where `procs` are not as many as the dims' sizes multiply to.
    """

    def __init__(
        self,
        shape: Sequence[int] | None = None,
        mesh_dim_names: Sequence[str] | None = None,
        *,
        hosts: Hosts | int | None = None,  # a number is refused: it would be a dim of that name
        procs: Procs | int | None = None,
        **dims: int,
    ) -> None:
        if isinstance(procs, int) or (procs is not None and not hasattr(procs, "start")):
            raise LayoutError(
                f"procs={procs}: `procs` says in which processes the workers run",
                hint="pass the result of spawn_procs(); use mesh_dim_names for a mesh dim of that name.",
            )
        if hosts is not None and procs is not None:
            raise LayoutError("give one of hosts and procs: processes are on a host each already")
        if procs is not None and shape is None and not dims:
            dims = dict(procs.sizes)
        pairs = named_sizes(shape, mesh_dim_names, dims)
        if _sizes:
            pairs = tuple((name, _sizes.get(name, size)) for name, size in pairs)
        if isinstance(hosts, int):  # a mesh dim may be called so
            raise LayoutError(
                f"hosts={hosts}: `hosts` says on which hosts the workers run",
                hint="pass the result of monarch.hosts(). For a mesh dim of that name:\n"
                'Mesh(shape=(2, 8), mesh_dim_names=("hosts", "gpus")).',
            )
        if hosts is not None and not hasattr(hosts, "start"):
            raise LayoutError(
                f"hosts={hosts!r}: `hosts` says on which hosts the workers run",
                hint='pass the result of monarch.hosts(["node1:4242"], tls="certificates/controller").',
            )
        for name, size in pairs:
            if name in _MEANT and not isinstance(size, (int, float)):
                raise LayoutError(
                    f"mesh dim '{name}' has size {size!r}",
                    hint=f"{_MEANT[name]}; dims' sizes are whole numbers.",
                )
        spec = MeshSpec(pairs)
        if procs is not None and not _sizes and spec.workers != MeshSpec(tuple(procs.sizes.items())).workers:
            raise LayoutError(
                f"{spec} has {spec.workers} workers, and the processes are {dict(procs.sizes)}",
                hint="give dims whose sizes multiply to the number of processes, or none to have theirs.",
            )
        self._parts: dict[Shape, Mesh] = {}
        workers = Workers(spec, hosts if procs is None else procs)
        self._setup(workers.shape, None, workers)
        _meshes[next(_numbers)] = self

    def _setup(self, shape: Shape, root: Mesh | None, workers: Workers) -> None:
        self._shape = shape
        self._of = root  # none: then it is the one that was made
        self.spec = workers.spec if root is None else MeshSpec(tuple(shape.extent.items()))
        self._workers = workers
        self._part: Executor | None = None
        self._states: weakref.WeakSet[State] = weakref.WeakSet()
        self._twins: weakref.WeakSet[State] = weakref.WeakSet()
        self.pending: Any = None
        """The Recording of the ops outside of programs that have not run yet, or None."""
        self._programs: dict[Any, Callable[..., Any]] = {}

    @classmethod
    def abstract(
        cls, shape: Sequence[int] | None = None, mesh_dim_names: Sequence[str] | None = None, **dims: int
    ) -> Mesh:
        """A mesh with no workers, for compiling ahead of time."""
        mesh = cls(shape, mesh_dim_names, **dims)
        mesh._workers.abstract = True
        return mesh

    def _over(self, shape: Shape) -> Mesh:
        root = self._root
        if shape == root._shape:
            return root
        part = root._parts.get(shape)
        return root._parts.setdefault(shape, self._like(shape)) if part is None else part

    def _like(self, shape: Shape) -> Mesh:
        """A part that nobody else knows."""
        part = object.__new__(Mesh)
        part._setup(shape, self._root, self._workers)
        return part

    def _become(self, shape: Shape) -> None:
        """Consist of these of its workers from now on (see `placing.resizing`)."""
        made = self._workers
        self._shape = made.shape if shape == made.shape else shape
        self.spec, self._part = MeshSpec(tuple(shape.extent.items())), None

    @property
    def _root(self) -> Mesh:
        """The mesh that was made, which this is or is a part of."""
        return self if self._of is None else self._of

    @property
    def _family(self) -> list[Mesh]:
        """The mesh that was made, and all parts of it."""
        return [self._root, *self._root._parts.values()]

    @property
    def _is_whole(self) -> bool:
        """Whether it has all workers, with whatever dims."""
        return len(self) == self._workers.spec.workers

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def mesh_dim_names(self) -> tuple[str, ...]:
        """The names of the mesh dims, outermost first."""
        return self.spec.names

    @property
    def shape(self) -> tuple[int, ...]:
        """The size of each mesh dim, in the order of `mesh_dim_names`."""
        return tuple(size for _, size in self.spec.dims)

    @property
    def ndim(self) -> int:
        """The number of mesh dims."""
        return len(self.spec.dims)

    @property
    def is_abstract(self) -> bool:
        """Whether there are no workers behind this mesh: programs on it are compiled, and do not run."""
        return self._workers.abstract

    @property
    def host_count(self) -> int:
        """On how many hosts the workers are; 1 for processes of actors."""
        return len(set(self._hosts))

    @property
    def _hosts(self) -> list[int]:
        """The number of each worker's host, in order."""
        each = self._workers.spec.workers // len(getattr(self._workers.where, "addresses", [""]))
        return [rank // each for rank in self._shape.ndslice]

    @property
    def is_closed(self) -> bool:
        """Whether the workers have been ended, by `close` or the end of a `with` block."""
        return self._workers.closed

    @property
    def ranks(self) -> list[int]:
        """The numbers of the mesh's workers among those that were made together, in order."""
        return self._shape.ranks()

    def coordinates(self) -> list[dict[str, int]]:
        """The coordinates of the mesh's workers, in order."""
        return list(self.spec.coordinates())

    def to_table(self) -> str:
        """The workers' numbers, laid out by the mesh's dims: the last dim across, the others down."""
        names, shape = self.mesh_dim_names, self.shape
        across = shape[-1] if shape else 1
        heads = [*names[:-1], *(f"{names[-1]}={i}" for i in range(across))] if names else ["worker"]
        rows: list[list[str]] = [heads]
        points = self.coordinates()
        for start in range(0, len(points), across):
            lead = [str(points[start][name]) for name in names[:-1]]
            rows.append(lead + [str(rank) for rank in self.ranks[start : start + across]])
        widths = [max(len(row[i]) for row in rows) for i in range(len(heads))]
        lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])

    def __reduce__(self) -> Any:
        raise TypeError(f"{self!r} cannot be pickled: its workers are this process's. Another makes a Mesh of its own.")

    def __deepcopy__(self, memo: dict[int, Any]) -> Mesh:
        return self  # its workers are one: its copies, such as a model's attribute, are on the same

    def __repr__(self) -> str:
        dims = ", ".join(f"{name}={size}" for name, size in self.spec.dims)
        part = "" if self._is_whole else f"workers={self.ranks} of {self._workers.spec.workers}"
        inside = ", ".join(text for text in (dims, part) if text)
        return f"Mesh.abstract({inside})" if self.is_abstract else f"Mesh({inside})"

    def _repr_html_(self) -> str:
        """The grid of workers, for a notebook. Starts none."""
        notes = []
        if not self._is_whole:
            notes.append(f"part of {self._workers.spec.workers:,}")
        if self.is_abstract:
            notes.append("abstract: for compiling ahead of time")
        elif self.is_closed:
            notes.append("closed")
        elif self._workers.executor is None:
            notes.append("not started yet")
        return load("monarch.compiler.inspect.html:mesh_html")(self.spec, self.ranks, " · ".join(notes))

    def __getitem__(self, dims: str | Sequence[str]) -> Mesh:
        """The sub-mesh along one or several dims that holds worker 0: the first position along all the others."""
        if not isinstance(dims, Iterable):
            raise MeshDimError(
                f"mesh[{dims!r}]: a mesh is indexed by the names of dims",
                hint=f"the parts along a dim: mesh[{next(iter(self.mesh_dim_names), 'data')!r}]; those at a position: "
                f"mesh.slice({next(iter(self.mesh_dim_names), 'data')}={dims!r}).",
            )
        keep = (dims,) if isinstance(dims, str) else tuple(dims)
        for name in keep:
            self.extent.position(name)
        return self.slice(**{name: 0 for name in self.mesh_dim_names if name not in keep})

    # -- workers -------------------------------------------------------------------------------------------------

    @property
    def executor(self) -> Executor:
        """The executor that runs plans on this mesh's workers, which start now if they have not yet."""
        workers = self._workers
        whole = workers.executor
        if whole is None or workers.abstract:
            whole = workers.start()
        if self._shape is workers.shape:
            return whole
        if self._part is None or self._part.whole is not whole:
            self._part = whole.over(self._shape)
        return self._part

    @contextmanager
    def spending(self, kind: str, label: str) -> Iterator[None]:
        """Report the controller's work for the workers in a block (`events.Span`), if they run."""
        start = time.monotonic_ns()
        try:
            yield
        finally:
            if (executor := self._workers.executor) is not None and heard(Span):
                tell(Span(executor, kind, label, start, time.monotonic_ns(), -1))

    def fetch(self, handle: Handle, ask: Callable[[Executor], T]) -> T:
        """The executor's answer to what asks for a value, or waits for it. Where a step failed, state goes back to that
        of the last finished step first."""
        try:
            with operations.plainly():
                return ask(self.executor)
        except DeviceMeshError as error:
            self.recover()
            shorten(error)
            raise
        except KeyboardInterrupt:
            self.give_up(handle)
            raise

    def recover(self) -> None:
        """Have Python and all state be as the last step left them that did not fail. Waits for the workers. A failed
        step may have been for other parts of the mesh too."""
        with suppress(DeviceMeshError):  # the mesh is lost
            self.executor.undo()
        for mesh in self._family:
            for cell in list(mesh._states):
                if cell.handle is not None:
                    try:
                        cell.handle = mesh.executor.recover(cell.handle, wait=mesh is self)
                    except DeviceMeshError:
                        continue  # the failed step was to make it first, or the mesh is lost: reading it raises

    def settle(self) -> None:
        """Have all cells hold their newest handles, though a call was interrupted or a handler runs in one."""
        workers = self._workers
        executor = workers.executor
        if executor is not None and (executor.settle() or workers.given_up):
            workers.given_up = False
            try:
                self._root.recover()  # all parts may have been in them
            except BaseException as error:
                workers.given_up = True
                # Once more, while calls from before are waited for.
                if isinstance(error, KeyboardInterrupt) and executor.give_up(None):
                    self.settle()
                raise

    def bind(self) -> None:
        """As `settle`, waiting for nothing: where steps were given up, state goes back when the mesh is next used."""
        workers = self._workers
        if workers.executor is not None and workers.executor.settle():
            workers.given_up = True

    def give_up(self, handle: Handle) -> None:
        """After an interrupted wait for a value: unless the step that makes it is done, it has failed. Where the
        workers do not come to its end within a second, state goes back when the mesh is next used."""
        if self.executor.give_up(handle):
            self.settle()

    def keep(self, cells: Iterable[State]) -> None:
        """Note the replacements of steps: `_recover` takes them back after a failure."""
        for cell in cells:
            if not cell.kept:
                self._states.add(cell)
                cell.kept = True

    def share(self, cells: Iterable[State]) -> None:
        """Note cells that share one handle: the step numbers of all parameters are one value."""
        self._twins.update(cells)

    def separate(self, taken: Iterable[State], cells: Collection[State]) -> None:
        """Give cells that no step of `cells` updates a value of their own, where they share one that the step takes:
        the step number of a parameter that trains no more. Raises LayoutError for one that varies over the mesh."""
        known = set(cells) if self._twins else ()
        for cell in taken if known else ():
            handle = cell.handle
            others = [twin for twin in self._twins if twin.handle is handle and twin not in known]
            if others and handle is not None:
                read = reading(handle.type, self.spec)
                if read.refusal:
                    raise LayoutError(read.refusal, hint=read.hint)
                shards = self.executor.shards(handle, read.ranks)
                own = self.executor.put(shards[0] if len(shards) == 1 else read.whole(shards), handle.type)
                for twin in others:
                    twin.handle = own

    def name(self, states: Iterable[tuple[str, State]]) -> None:
        """Note what programs call their state: for errors."""
        self._workers.names.update((cell, label) for label, cell in states)

    def heal(self, give_up: bool = False, elsewhere: str = "") -> bool:
        """Have new workers take the places of those that have ended (see `placing.healing`); with `give_up` also where
        state is lost, and then True."""
        workers = self._workers
        if workers.executor is None or self.is_abstract:
            return False
        gave_up = workers.executor.heal(self._named_handles(), give_up, elsewhere)
        for mesh in self._family:
            if gave_up and mesh.pending is not None:
                operations.discard(mesh, DeviceMeshError("ops outside of programs were dropped: state has gone back"))
            mesh.recover()
        for mesh in self._family:
            for cell in list(mesh._states):
                cell.restored()
        return gave_up

    def _named_handles(self) -> list[tuple[str, Handle]]:
        """The state of all programs on it and its parts, as they call it."""
        names = self._workers.names
        states = [(names.get(cell, "a state"), cell) for mesh in self._family for cell in list(mesh._states)]
        return [(name, cell.handle) for name, cell in states if cell.handle is not None]

    def snapshots(self, every: int = 10, copies: int = 1) -> None:
        """Have values on this mesh, and on all parts of it, survive that no mesh dim replicates:

            mesh.snapshots(every=10)

        From now on each worker's blocks of such values are copied to `copies` other workers, on other hosts where
        there are several: once now, and again whenever `every` steps that replace state were called, in pieces between
        steps. Where a worker's death loses values, `heal_mesh` restores all of the last snapshot that is whole, and
        does again what was called since, from arguments that are kept until then: so it gives the same values as
        without a failure, and no step is lost. Values that are replicated are restored from replicas, without going
        back.

        A worker holds, for the last snapshot and one under way, twice what steps replace and, of what is not
        replicated, twice the copies. `every=0` ends that.

        Raises MonarchError where there are no `copies` other workers (or hosts), or too little memory for them.
        """
        if every < 0 or isinstance(every, bool):
            raise MonarchError(f"snapshots every {every} steps", hint="give a number of steps; 0 for none.")
        self.executor.snapshots(every, copies)
        self._workers.copies = copies if every else 0

    def check_replicas(self, every: int | None = None) -> None:
        """Find out whether workers that are to hold the same bits do, on this mesh and all parts of it:

            mesh.check_replicas(every=100)        # from now on, in the background
            mesh.check_replicas()                 # now, and wait for it

        Each worker adds up the bits of each value that the layouts replicate along some mesh dim: parameters, moments,
        buffers, whatever else a variable refers to. The sums are compared, not the values. With `every` that is done
        once now, and again whenever so many steps that replace state were called: between two steps, and nothing waits
        for it but the step behind it, for the time in which a worker reads its values once. `every=0` ends that.

        Raises ReplicaError, which names the worker and the tensors, where they differ; in the background, the next call
        of a program that comes behind the finding does. Where a block is on three workers or more, and most of them
        agree, those that do not count as lost, and `heal_mesh` restores what they held from the others. Raises
        MonarchError for an `every` that is no number of steps.
        """
        if every is not None and (every < 0 or isinstance(every, bool)):
            raise MonarchError(f"replicas are checked every {every} steps", hint="give a number of steps; 0 for none.")
        self.flush()
        names = self._workers.names

        def named() -> list[tuple[str, Handle]]:
            return [(label, cell.handle) for cell, label in list(names.items()) if cell.handle is not None]

        self.executor.check_replicas(every, named)

    @contextmanager
    def detect_anomaly(self, inf: bool = False) -> Iterator[None]:
        """Within the block a step fails that makes a NaN, on this mesh or any part of it, in a program or outside:

            with mesh.detect_anomaly():
                train_step(tokens, targets).item()

        The AnomalyError names the first op in the program's order, forward or backward, that makes one, with the worker
        and your line; or the input or state that has one. With `inf` infinities count too. The step is not applied.

        In the block programs are compiled anew, without generated kernels and memory limits, so that each op's result
        is looked at: they take several times as long, and more memory. Outside of it nothing is slower. Of a branch or
        a loop on values (`monarch.cond`, `scan`) the whole is named, and padding is not looked at.
        """
        workers, key = self._workers, self._workers.number
        self._flush_family()
        before, workers.anomaly = workers.anomaly, "inf" if inf else "nan"
        looked_at[key] = workers.anomaly
        try:
            yield
            self._flush_family()
        finally:
            workers.anomaly = before
            if before:
                looked_at[key] = before
            else:
                looked_at.pop(key, None)

    @property
    def _anomaly(self) -> str:
        """The anomaly that programs on it look for at present: "", "nan", or "inf"."""
        return self._workers.anomaly

    def _flush_family(self) -> None:
        """Run the ops recorded eagerly on this mesh and all parts of it."""
        for mesh in self._family:
            mesh.flush()

    def from_shards(self, shards: Returned, layout: LayoutLike | tuple[LayoutLike, ...]) -> Any:
        """Distributed tensors of results that actors in this mesh's processes have returned, and that stay where they
        are:

            mesh = Mesh(procs=procs)
            x = mesh.from_shards(loaders.next.shards(), "[@data, -]")
            x, y = mesh.from_shards(loaders.pair.shards(), ("[@data, -]", "[@data]"))

        Each actor's tensor is its worker's shard; where the layout replicates, all have to be equal, which is not
        checked. Tensors come nested as they were returned. A tuple of layouts has one for each tensor, in the order of
        torch's pytrees; one layout is for all. Waits for the actors. Raises what they raised, and LayoutError where
        the tensors differ in shape or dtype, or do not fit the layout.
        """
        return operations.adopt(self, shards, layout)

    def activate(self, *dims: str) -> AbstractContextManager[None]:
        """Write per-worker code in a block, in a program or outside: tensors that vary are each worker's own.

            with mesh.activate():
                x = torch.rand(3) + mesh.rank("data")      # [3] on each worker
                mean = monarch.reduce(x, "data", "avg")    # the same on all workers along "data"

        `dims` are the mesh dims along which it is per-worker code, all where none are named. Random numbers that are
        drawn in it are each worker's own; other tensors that it makes are the same on all workers until they meet one
        that varies. Raises LayoutError for an unknown mesh dim, and within per-worker code along the same one.
        """
        return operations.activate(self, dims)

    def rank(self, dim: str) -> Any:
        """Each worker's position along a mesh dim: an i64[] tensor that varies along it. Raises MeshDimError (a
        TypeError and a KeyError) for a dim that the mesh does not have."""
        self.extent.position(dim)
        return operations.position(self, dim)

    def execute(self, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Run a function on this mesh's workers, as a program: `mesh.execute(lambda x: x * 2, batch)`. Plain tensors
        among the arguments are placed on the mesh, replicated. Returns at once, as a program does.

        The last functions that were run are remembered, so that another call need not trace them again: a lambda
        without closure or defaults by its code, anything else as the object that it is.
        """
        key: Any = function
        if getattr(function, "__name__", "") == "<lambda>" and isinstance(function, FunctionType):
            if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__):
                key = function.__code__, id(function.__globals__)  # which the program keeps alive
        program = self._programs.pop(key, None) or operations.program(function, self)
        self._programs[key] = program
        while len(self._programs) > _PROGRAMS:
            del self._programs[next(iter(self._programs))]
        return program(*args, **kwargs)

    def flush(self, program: str = "") -> None:
        """Run the ops recorded eagerly on this mesh that have not run yet. Before the call of a `program`, a lost mesh
        fails that call alone, and the ops stay recorded."""
        if self.pending is not None:
            operations.flush(self, program)

    def close(self) -> None:
        """Stop the workers. Tensors on the mesh are lost, and those on all parts of it. Idempotent. Raises MonarchError
        for a part without some of the workers, which ends with the mesh that it is a part of."""
        self._refuse_part("closed")
        for mesh in self._family:
            mesh.pending = None
        self._workers.close()

    def _refuse_part(self, what: str) -> None:
        if self._of is not None and not self._is_whole:
            raise MonarchError(
                f"{self!r} cannot be {what}: it shares the workers of {self._root!r}",
                hint="close the mesh that was made, `with mesh:`, which ends all of its parts.",
            )

    def __enter__(self) -> Mesh:
        self._refuse_part("closed by a `with` block")
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


_MEANT = {
    "host": "did you mean hosts=? It says where the workers run",
    **dict.fromkeys(("proc", "processes"), "did you mean procs=? It says where the workers run"),
    **dict.fromkeys(("device", "device_type"), 'a program names its device: @monarch.program(target="cuda:90")'),
}
