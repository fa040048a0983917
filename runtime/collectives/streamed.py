"""The collectives of plans that choose NCCL: each is started where it stands, and waited for later.

    all_reduce        of a copy, several tensors of a dtype as one work
    all_gather        of bytes; blocks are put in their places once they are there
    reduce_scatter    of the blocks of all tensors of a dtype, one behind the other
    all_to_all        of bytes, and so are broadcast and permute

Sums are the library's own: in whichever order it adds, so their last bits may differ from those of Monarch's own
collectives, and from one number of workers to another; all workers have the same. What it does not know is done with
what it does: int16 is summed as int32, which wraps alike; a sum of bools is their maximum, a product their minimum.

What a start gives keeps the tensors that it moves until it is waited for (`OverlapCollectives` has their slots kept as
long), because the library reads them from a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceCoalescedOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceOp,
    ReduceScatterOptions,
)

from monarch.compiler.plan import MonarchError
from monarch.runtime.collectives.communicator import Communicator, Watch
from monarch.runtime.collectives.listening import LOOPBACK, Network
from monarch.runtime.collectives.meeting import Tensors
from monarch.runtime.collectives.nccl import Library
from monarch.runtime.collectives.packing import Packing
from monarch.runtime.collectives.shares import copies, split

if TYPE_CHECKING:
    from monarch.runtime.collectives.collectives import Collectives

_OPS = {"sum": ReduceOp.SUM, "max": ReduceOp.MAX, "min": ReduceOp.MIN, "prod": ReduceOp.PRODUCT}
_OF_BOOLS = {"sum": ReduceOp.MAX, "max": ReduceOp.MAX, "min": ReduceOp.MIN, "prod": ReduceOp.MIN}


@dataclass
class Pending:
    """A collective that was started: `results` makes its results of the tensors that the works have moved, behind
    them."""

    communicator: Communicator
    results: Callable[[], Tensors]
    works: list[Any] = field(default_factory=list)
    held: Sequence[Any] = ()


Start = Callable[[Sequence[torch.Tensor]], Pending]


class Streamed:
    """One worker's side of them. `network` is None where all workers are on this host; `collectives` are
    the mesh's own."""

    def __init__(self, collectives: Collectives, network: Network | None, library: Library) -> None:
        self._collectives = collectives
        self._network = network
        self._library = library
        self.watch = Watch()
        self._communicators: dict[tuple[str, ...], Communicator] = {}
        self._address: str | None = None

    def _communicator(self, mesh_dims: Sequence[str]) -> Communicator:
        """Raises MonarchError where the group's workers may not listen for each other."""
        key = tuple(mesh_dims)
        if key not in self._communicators:
            group = self._collectives.group(key)
            if group.size > 1:
                self._listen(bool(group.hosts))
            self._communicators[key] = Communicator(self._collectives, key, self._library, self.watch)
        return self._communicators[key]

    def _listen(self, across: bool) -> None:
        """Settings are made once for a mesh. With TLS no group crosses hosts, and those of one host use loopback."""
        if across and self._network is not None:
            self._network.address(self._library.name)  # raises
        if self._address is None:
            self._address = LOOPBACK
            several = len(self._collectives.at.here) < self._collectives.at.workers
            if self._network is not None and several and not self._network.tls:
                self._address = self._network.address(self._library.name)
            self._library.listen_on(self._address)

    # -- steps -----------------------------------------------------------------------------------------------------

    def wait(self) -> Callable[[Pending], Tensors]:
        def run(pending: Pending) -> Tensors:
            for work in pending.works:
                pending.communicator.wait(work)
            return pending.results()

        return run

    def finish(self) -> None:
        """Wait until all works are over. Raises Aborted, or the works' error, where one has failed."""
        for communicator in self._communicators.values():
            communicator.finish()
        self.watch.no_more()

    def give_up(self, step: int) -> None:
        """End what this worker has used in a step that it has failed."""
        for communicator in self._communicators.values():
            if communicator.step == step:
                communicator.leave()

    def leave(self) -> None:
        self.watch.stop()
        for communicator in self._communicators.values():
            communicator.leave()

    # -- what plans call -------------------------------------------------------------------------------------------

    def all_reduce(self, mesh_dims: Sequence[str], reduction: str) -> Start:
        communicator = self._communicator(mesh_dims)

        def start(tensors: Sequence[torch.Tensor]) -> Pending:
            outs = copies(tensors)
            pending = Pending(communicator, lambda: outs, held=tensors)
            if communicator.size == 1:
                return pending
            wires = [_wire(out) for out in outs]
            for where in _alike(tensors):  # and not of their wires: a sum of bools is no sum of bytes
                rows = [wires[i] for i in where]
                operation = _operation(tensors[where[0]], reduction)
                pending.works.append(communicator.start(rows[0].device, partial(_sum, rows, operation)))
            pending.results = lambda: [_unwired(wire, out) for wire, out in zip(wires, outs, strict=True)]
            return pending

        return start

    def all_gather(self, mesh_dims: Sequence[str], dims: Sequence[int]) -> Start:
        communicator = self._communicator(mesh_dims)

        def start(tensors: Sequence[torch.Tensor]) -> Pending:
            if communicator.size == 1:
                return _done(communicator, tensors)
            packing = Packing(tensors)
            given = packing.packed([tensors])
            took = given.new_empty(communicator.size, packing.size)

            def results() -> Tensors:
                blocks = zip(*(packing.views(row) for row in took.unbind()), strict=True)
                return [torch.cat(parts, dim) for parts, dim in zip(blocks, dims, strict=True)]

            pending = Pending(communicator, results, held=(given, tensors))
            if packing.size:
                pending.works.append(
                    communicator.start(
                        given.device, lambda group: group._allgather_base(took.view(-1), given, AllgatherOptions())
                    )
                )
            return pending

        return start

    def reduce_scatter(self, mesh_dims: Sequence[str], dims: Sequence[int], reduction: str) -> Start:
        communicator = self._communicator(mesh_dims)

        def start(tensors: Sequence[torch.Tensor]) -> Pending:
            if communicator.size == 1:
                return _done(communicator, tensors)
            blocks = split(tensors, dims, communicator.size)
            outs: list[Any] = [each[0].new_empty(each[0].shape) for each in blocks]
            pending = Pending(communicator, lambda: outs, held=[])
            parts: list[tuple[list[int], torch.Tensor]] = []
            for where in _alike(tensors):
                given = torch.cat([blocks[i][j].reshape(-1) for j in range(communicator.size) for i in where])
                wire = _wire(given)
                took = wire.new_empty(wire.numel() // communicator.size)
                operation = _operation(given, reduction)
                if took.numel():
                    pending.works.append(communicator.start(wire.device, partial(_scatter, wire, took, operation)))
                parts.append((where, took))
                pending.held = [*pending.held, wire]

            def results() -> Tensors:
                for where, took in parts:
                    rows = took.split([outs[i].numel() for i in where])
                    for i, row in zip(where, rows, strict=True):
                        outs[i].view(-1).copy_(row.view(torch.bool) if outs[i].dtype == torch.bool else row)
                return outs

            pending.results = results
            return pending

        return start

    def all_to_all(self, mesh_dims: Sequence[str], source_dims: Sequence[int], target_dims: Sequence[int]) -> Start:
        communicator = self._communicator(mesh_dims)

        def start(tensors: Sequence[torch.Tensor]) -> Pending:
            if communicator.size == 1:
                return _done(communicator, tensors)
            blocks = split(tensors, target_dims, communicator.size)
            packing = Packing([each[0] for each in blocks])
            given = packing.packed([[each[j] for each in blocks] for j in range(communicator.size)])
            took = torch.empty_like(given)

            def results() -> Tensors:
                received = zip(*(packing.views(row) for row in took.view(communicator.size, -1).unbind()), strict=True)
                return [torch.cat(parts, dim) for parts, dim in zip(received, source_dims, strict=True)]

            sizes = [packing.size] * communicator.size
            return _exchange(communicator, packing.size > 0, given, sizes, took, sizes, results)

        return start

    def broadcast(self, mesh_dims: Sequence[str], root: int) -> Start:
        communicator = self._communicator(mesh_dims)

        def start(tensors: Sequence[torch.Tensor]) -> Pending:
            if communicator.size == 1:
                return _done(communicator, tensors)
            packing = Packing(tensors)
            row = packing.packed([tensors])  # the root's own, and on others memory of the same size
            pending = Pending(communicator, lambda: copies(packing.views(row)), held=(row,))
            options = BroadcastOptions()
            options.rootRank = root
            if packing.size:
                pending.works.append(communicator.start(row.device, lambda group: group.broadcast([row], options)))
            return pending

        return start

    def permute(self, mesh_dims: Sequence[str], pairs: Sequence[Sequence[int]]) -> Start:
        communicator = self._communicator(mesh_dims)
        targets = sorted(target for source, target in pairs if source == communicator.me)
        sources = [source for source, target in pairs if target == communicator.me]

        def start(tensors: Sequence[torch.Tensor]) -> Pending:
            if communicator.size == 1:
                return _done(communicator, tensors if sources else [torch.zeros_like(tensor) for tensor in tensors])
            packing = Packing(tensors)
            given = packing.packed([tensors] * len(targets))
            took = given.new_zeros(packing.size)  # and zeros they stay, where nothing comes
            return _exchange(
                communicator,
                packing.size > 0,
                given,
                [packing.size * (j in targets) for j in range(communicator.size)],
                took if sources else took[:0],
                [packing.size * (j in sources) for j in range(communicator.size)],
                lambda: copies(packing.views(took)),
            )

        return start


def _done(communicator: Communicator, tensors: Sequence[torch.Tensor]) -> Pending:
    """A group of one."""
    outs = copies(tensors)
    return Pending(communicator, lambda: outs)


def _exchange(
    communicator: Communicator,
    moves: bool,
    given: torch.Tensor,
    lengths: list[int],
    took: torch.Tensor,
    from_each: list[int],
    results: Callable[[], Tensors],
) -> Pending:
    """Send each worker so many bytes of `given`, in order, and take so many from each."""
    pending = Pending(communicator, results, held=(given, took))
    if moves:  # for all alike: a worker with nothing to move takes part too
        options = AllToAllOptions()
        pending.works.append(
            communicator.start(
                given.device, lambda group: group.alltoall_base(took, given, from_each, lengths, options)
            )
        )
    return pending


def _sum(rows: list[torch.Tensor], operation: Any, group: Any) -> Any:
    if len(rows) == 1:
        options = AllreduceOptions()
        options.reduceOp = operation
        return group.allreduce(rows, options)
    several = AllreduceCoalescedOptions()
    several.reduceOp = operation
    return group.allreduce_coalesced(rows, several)


def _scatter(given: torch.Tensor, took: torch.Tensor, operation: Any, group: Any) -> Any:
    options = ReduceScatterOptions()
    options.reduceOp = operation
    return group._reduce_scatter_base(took, given, options)


def _alike(tensors: Sequence[torch.Tensor]) -> Iterable[list[int]]:
    """The places of tensors of one dtype, for each dtype, without empty ones."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        if where := [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype and tensor.numel()]:
            yield where


def _operation(tensor: torch.Tensor, reduction: str) -> Any:
    if tensor.is_complex() and reduction != "sum":
        raise MonarchError(
            f"process groups cannot make the {reduction} of {tensor.dtype}",
            hint='Compile the program without collectives="nccl".',
        )
    return (_OF_BOOLS if tensor.dtype == torch.bool else _OPS)[reduction]


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as the library reduces it; memory is shared where the dtype can be."""
    if tensor.dtype == torch.bool:
        return tensor.view(torch.uint8)
    return tensor.to(torch.int32) if tensor.dtype == torch.int16 else tensor


def _unwired(wire: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return wire.to(torch.int16) if out.dtype == torch.int16 else out
