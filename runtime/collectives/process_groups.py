"""Collectives over process groups of `torch.distributed`, for plans that choose them: Gloo on CPUs.

A process group moves bytes; sums are made here, from the group's first worker to its last, as everywhere. So a plan
gives the same bits whichever way its tensors go, on all workers and from run to run.

    all_reduce        small: all_gather, and everyone adds; else all_to_all of shares, each adds its own, all_gather
    reduce_scatter    all_to_all of blocks, and each adds its own

A group of workers has its process group made when a plan first needs it. In every step, before its first use, its
workers tell each other, over the mesh's own memory, which one they have; where they differ, for somebody failed an
earlier step, they make a new one. Gloo's rendezvous goes the same way, so there is no store that somebody else could
reach; `listening` says how it is known who is connected.

Failing. A worker that fails a step cuts the connections that it has used in it, so that peers that wait in Gloo, which
looks at no progress words, wake up. They look then who has failed, and fail with the same error as with the mesh's own
collectives. When the step has to be atomic, it commits over the mesh's own memory, as ever.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions, ProcessGroupGloo, Store

from monarch.compiler.plan import MonarchError
from monarch.compiler.plan.blocks import REDUCE
from monarch.runtime.collectives import listening
from monarch.runtime.collectives.meeting import Collective, Group, Tensors
from monarch.runtime.collectives.shares import add, copies, split
from monarch.runtime.signals import DEAD, LINE, STEP_BITS, Aborted

if TYPE_CHECKING:
    from monarch.runtime.collectives.collectives import Collectives

_CONNECT = timedelta(seconds=30)
_FOR_EVER = timedelta(days=365)  # who waits for a worker that fails is woken
_EXPLAIN_SECONDS = 5.0  # for the cause of a broken connection to be known here
_DIRECT_BYTES = 32 << 10
_ALIGN = 16  # bytes: any dtype may begin there
_JOINING = 4  # rounds: two things are told, each behind its length
_ATTEMPTS = 8


class ProcessGroups:
    """One worker's side of the collectives of plans that choose Gloo. `network` is None where all workers are on this
    host; `at` has the mesh's own collectives."""

    def __init__(self, at: Collectives, network: listening.Network | None) -> None:
        self._at = at
        self._network = network
        self._members: dict[tuple[str, ...], Membership] = {}

    def _member(self, mesh_dims: Sequence[str]) -> Membership:
        """Raises MonarchError where the group's workers may not listen for each other."""
        key = tuple(mesh_dims)
        if key not in self._members:
            address = listening.LOOPBACK
            if self._at.group(key).hosts and self._network is not None:
                address = self._network.address()
            self._members[key] = Membership(self._at, key, address)
        return self._members[key]

    def give_up(self, step: int) -> None:
        """End what this worker has used in a step that it has failed."""
        for member in self._members.values():
            if member.step == step:
                member.leave()

    def leave(self) -> None:
        for member in self._members.values():
            member.leave()

    # -- what plans call -------------------------------------------------------------------------------------------

    def all_reduce(self, mesh_dims: Sequence[str], reduction: str) -> Collective:
        member, op = self._member(mesh_dims), REDUCE[reduction]

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if member.size == 1:
                return copies(tensors)
            outs: list[Any] = [None] * len(tensors)
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                where = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
                rows = [tensors[i].reshape(-1) for i in where]
                total = self._reduced(member, op, torch.cat(rows) if len(rows) > 1 else rows[0])
                parts = total.split([row.numel() for row in rows])
                for i, part in zip(where, parts, strict=True):
                    outs[i] = (part.clone() if len(where) > 1 else part).view(tensors[i].shape)
            return outs

        return run

    def _reduced(self, member: Membership, op: Any, row: torch.Tensor) -> torch.Tensor:
        size, length = member.size, row.numel()
        if length == 0:
            return row.clone()
        if size == 2 or row.nbytes <= _DIRECT_BYTES:
            total = torch.empty_like(row)
            add(op, list(member.gathered(row).unbind()), total)
            return total
        share = -(-length // size)
        parts = list(row.split(share))
        parts += [row[:0]] * (size - len(parts))  # there may be nothing left for the last
        mine = parts[member.me].numel()
        summands = row.new_empty(size, mine)
        member.exchange(row, [part.nbytes for part in parts], summands, [mine * row.element_size()] * size)
        total = row.new_zeros(share)
        add(op, list(summands.unbind()), total[:mine])
        return member.gathered(total).view(-1)[:length]

    def all_gather(self, mesh_dims: Sequence[str], dims: Sequence[int]) -> Collective:
        member = self._member(mesh_dims)

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if member.size == 1:
                return copies(tensors)
            packing = _Packing(tensors)
            rows = member.gathered(packing.packed([tensors]))
            blocks = zip(*(packing.views(row) for row in rows.unbind()), strict=True)
            return [torch.cat(parts, dim) for parts, dim in zip(blocks, dims, strict=True)]

        return run

    def reduce_scatter(self, mesh_dims: Sequence[str], dims: Sequence[int], reduction: str) -> Collective:
        member, op = self._member(mesh_dims), REDUCE[reduction]

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if member.size == 1:
                return copies(tensors)
            outs = []
            for parts in _traded(member, tensors, dims):
                outs.append(torch.empty(parts[0].shape, dtype=parts[0].dtype))
                add(op, parts, outs[-1])
            return outs

        return run

    def all_to_all(
        self, mesh_dims: Sequence[str], source_dims: Sequence[int], target_dims: Sequence[int]
    ) -> Collective:
        member = self._member(mesh_dims)

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if member.size == 1:
                return copies(tensors)
            return [
                torch.cat(parts, dim)
                for parts, dim in zip(_traded(member, tensors, target_dims), source_dims, strict=True)
            ]

        return run

    def broadcast(self, mesh_dims: Sequence[str], root: int) -> Collective:
        member = self._member(mesh_dims)

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if member.size == 1:
                return copies(tensors)
            packing = _Packing(tensors)
            row = packing.packed([tensors]) if member.me == root else torch.empty(packing.size, dtype=torch.uint8)
            member.broadcast(row, root)
            return copies(packing.views(row))

        return run

    def permute(self, mesh_dims: Sequence[str], pairs: Sequence[Sequence[int]]) -> Collective:
        member = self._member(mesh_dims)
        targets = sorted(target for source, target in pairs if source == member.me)
        sources = [source for source, target in pairs if target == member.me]

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            packing = _Packing(tensors)
            took = torch.zeros(packing.size, dtype=torch.uint8)
            if member.size == 1 and sources:
                return copies(tensors)
            if member.size > 1 and packing.size:
                member.exchange(
                    packing.packed([tensors] * len(targets)) if targets else took[:0],
                    [packing.size * (j in targets) for j in range(member.size)],
                    took if sources else took[:0],
                    [packing.size * (j in sources) for j in range(member.size)],
                )
            return copies(packing.views(took))  # zeros, where nothing comes

        return run


class Membership:
    """This worker's place in the process group of the workers along some mesh dims."""

    def __init__(self, at: Collectives, mesh_dims: Sequence[str], address: str) -> None:
        self._at = at
        self._group: Group = at.group(mesh_dims)
        self._what = f"the process group over {', '.join(mesh_dims)}"
        self._say = at.all_gather(mesh_dims, [0])
        self._address = address
        self.size, self.me = self._group.size, self._group.me
        self.step = -1
        """The last one in which it was used."""
        self._number = 0  # of the process group: the same for all that are in it, 0 for none
        self._backend: Any = None
        self._connections: list[socket.socket] = []

    # -- moving bytes ----------------------------------------------------------------------------------------------

    def gathered(self, row: torch.Tensor) -> torch.Tensor:
        """Everyone's row, one after the other: of shape [workers, length]."""
        rows = row.new_empty(self.size, row.numel())
        options = AllgatherOptions()
        options.timeout = _FOR_EVER
        self._run(lambda gloo: gloo._allgather_base(_bytes(rows), _bytes(row), options), rows)
        return rows

    def exchange(self, given: torch.Tensor, lengths: list[int], took: torch.Tensor, from_each: list[int]) -> None:
        """Send each worker so many bytes of what is given, in order, and take so many from each."""
        options = AllToAllOptions()
        options.timeout = _FOR_EVER
        self._run(lambda gloo: gloo.alltoall_base(_bytes(took), _bytes(given), from_each, lengths, options), None)

    def broadcast(self, row: torch.Tensor, root: int) -> None:
        options = BroadcastOptions()
        options.rootRank, options.timeout = root, _FOR_EVER
        self._run(lambda gloo: gloo.broadcast([row], options), row)

    def _run(self, start: Callable[[Any], Any], moved: torch.Tensor | None) -> None:
        if moved is not None and moved.numel() == 0:
            return  # for everyone alike
        if self.step != self._at.step:
            self._agree()
        try:
            start(self._backend).wait()
        except RuntimeError as error:
            raise self._explained(error) from error

    # -- making and leaving ----------------------------------------------------------------------------------------

    def _agree(self) -> None:
        self.step = self._at.step
        numbers = self._say([torch.tensor([self._number])])[0].tolist()
        if self._number and all(number == self._number for number in numbers):
            self._at.skip_rounds(_JOINING)  # other groups may need them, and events have one number for all
            return
        self.leave()
        self._join()
        self._number = max(numbers) + 1

    def leave(self) -> None:
        """Cut all connections. Peers that wait in the process group wake up."""
        while self._connections:
            listening.cut(self._connections.pop())
        self._backend = None
        self._number = 0

    def _join(self) -> None:
        device, listener = _listen(self._address)
        try:
            own = listener.getsockname()[:2]
            store = _Rendezvous(self._tell_all, own)
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs have other names
            options._devices, options._threads, options._timeout = [device], 1, _CONNECT
            try:
                self._backend = ProcessGroupGloo(store, self.me, self.size, options)
            except Exception as error:
                raise store.failure or self._explained(error) from error
            self._connections = listening.connections(own, store.listeners)
            ends = [ends for each in self._connections if (ends := listening.ends_of(each)) is not None]
            told = [_ends(entry) for entry in self._tell_all(ends)]
            if (wrong := listening.stranger_among(told)) is not None:
                raise MonarchError(
                    f"{self._what} was not used: {wrong}",
                    hint="somebody else on this machine or network has connected to it. The next step tries again.",
                )
            listening.hear_nobody(listener)
        finally:
            listener.close()

    def _tell_all(self, what: Any) -> list[Any]:
        """What each of the group says, JSON, over the mesh's own memory."""
        text = torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8)
        lengths = self._say([torch.tensor([text.numel()])])[0].tolist()
        padded = text.new_zeros(max(lengths))
        padded[: text.numel()] = text
        rows = self._say([padded])[0].view(self.size, -1)
        return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]

    def _explained(self, error: Exception) -> Exception:
        """Gloo says that a connection has broken: why it has, once that is known here."""
        self._at.settle()
        words, line = self._at.signals.words, LINE * (1 + self._group.peers[0])
        until = time.monotonic() + _EXPLAIN_SECONDS

        def check(seen: int) -> None:
            if words[DEAD]:
                raise Aborted(words[DEAD] - 1, died=True)
            for peer in self._group.peers:
                progress = words[LINE * (1 + peer)]
                if progress & 1 and progress >> STEP_BITS == self.step:
                    raise Aborted(peer, died=False)
            if time.monotonic() > until:
                raise MonarchError(f"{self._what} broke: {error}")

        try:
            self._at.signals.wait(line, 1 << 62, check)
        except (Aborted, MonarchError) as found:
            return found
        raise AssertionError("no progress word grows so large")


class _Rendezvous(Store):
    """What Gloo's workers leave for each other: all at once, over the mesh's own memory."""

    def __init__(self, tell_all: Callable[[Any], list[Any]], listener: tuple[str, int]) -> None:
        super().__init__()
        self._tell_all = tell_all
        self._own: dict[str, str] = {}
        self._all: dict[str, str] | None = None
        self._listener = listener
        self.listeners: list[tuple[str, int]] = []
        """Of the group's workers, once they have met."""
        self.failure: Exception | None = None
        """What went wrong in here: what comes out of Gloo is another exception."""

    def set(self, key: str, value: Any) -> None:
        self._own[key] = bytes(value).hex()

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self._met()[key])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._met()

    def _met(self) -> dict[str, str]:
        if self._all is None:
            try:
                told = self._tell_all({"listener": self._listener, "values": self._own})
            except Exception as failure:
                self.failure = failure
                raise
            self.listeners = [(host, port) for host, port in (entry["listener"] for entry in told)]
            self._all = {key: value for entry in told for key, value in entry["values"].items()}
        return self._all


def _listen(address: str) -> tuple[Any, socket.socket]:
    """A device of Gloo's, and its listener: the only one that came with it."""
    for _ in range(_ATTEMPTS):
        before = listening.listeners()
        device = ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
        now = listening.listeners()
        made = [now.pop(inode) for inode in now.keys() - before.keys()]
        for other in (*before.values(), *now.values()):
            other.close()
        if len(made) == 1:
            return device, made[0]
        for other in made:  # another thread listens to something as well
            other.close()
    raise MonarchError(f"cannot tell where Gloo listens on {address}")


class _Packing:
    """Tensors of some shapes and dtypes, one after the other in a row of `size` bytes."""

    def __init__(self, like: Sequence[torch.Tensor]) -> None:
        self._like = like
        self._starts = []
        self.size = 0
        for tensor in like:
            self._starts.append(self.size)
            self.size += -(-tensor.nbytes // _ALIGN) * _ALIGN

    def views(self, row: torch.Tensor) -> list[torch.Tensor]:
        return [
            row[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            if tensor.nbytes
            else torch.empty(tensor.shape, dtype=tensor.dtype)
            for start, tensor in zip(self._starts, self._like, strict=True)
        ]

    def packed(self, rows: Sequence[Sequence[torch.Tensor]]) -> torch.Tensor:
        """Several such lists, one behind the other."""
        packed = torch.empty(len(rows) * self.size, dtype=torch.uint8)
        for at, tensors in enumerate(rows):
            for view, tensor in zip(self.views(packed[at * self.size : (at + 1) * self.size]), tensors, strict=True):
                view.copy_(tensor)
        return packed


def _traded(member: Membership, tensors: Sequence[torch.Tensor], dims: Sequence[int]) -> list[Tensors]:
    """For each tensor, cut along its dim into a block for each worker: the blocks that they have for this one."""
    blocks = split(tensors, dims, member.size)
    packing = _Packing([each[0] for each in blocks])
    given = packing.packed([[each[j] for each in blocks] for j in range(member.size)])
    took = torch.empty_like(given)
    sizes = [packing.size] * member.size
    if packing.size:
        member.exchange(given, sizes, took, sizes)
    received = [packing.views(row) for row in took.view(member.size, -1).unbind()]
    return [list(parts) for parts in zip(*received, strict=True)]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _ends(told: Any) -> list[listening.Ends]:
    return [((local[0], local[1]), (remote[0], remote[1])) for local, remote in told]


__all__ = ["ProcessGroups"]
