"""Collectives over process groups of `torch.distributed`, for plans that choose them: Gloo on CPUs.

A process group moves bytes; sums are made here, from the group's first worker to its last, as everywhere. So a plan
gives the same bits whichever way its tensors go, on all workers and from run to run.

    all_reduce        small: all_gather, and everyone adds; else all_to_all of shares, each adds its own, all_gather
    reduce_scatter    all_to_all of blocks, and each adds its own

A group of workers has its process group made when a plan first needs it (`membership`, `gloo`); `listening` checks
which processes are connected.

Failing. A worker that fails a step cuts the connections that it has used in it, so that peers that wait in Gloo wake
up at once; what breaks no connection they see when they next look up. They look then who has failed, and fail with the
same error as with the mesh's own collectives. Steps commit over the mesh's own memory, as ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from monarch.compiler.blocks import REDUCE
from monarch.runtime.collectives.gloo import GlooMembership
from monarch.runtime.collectives.listening import LOOPBACK, Network
from monarch.runtime.collectives.meeting import Collective, Tensors
from monarch.runtime.collectives.packing import Packing
from monarch.runtime.collectives.shares import add, copies, split

if TYPE_CHECKING:
    from monarch.runtime.collectives.collectives import Collectives

_DIRECT_BYTES = 32 << 10  # up to this one round for all is worth more than additions shared out


class ProcessGroups:
    """One worker's side of the collectives of plans that choose Gloo. `network` is None where all workers are on this
    host; `collectives` are the mesh's own."""

    def __init__(self, collectives: Collectives, network: Network | None) -> None:
        self._collectives = collectives
        self._network = network
        self._members: dict[tuple[str, ...], GlooMembership] = {}

    def _member(self, mesh_dims: Sequence[str]) -> GlooMembership:
        """Raises MonarchError where the group's workers may not listen for each other."""
        key = tuple(mesh_dims)
        if key not in self._members:
            address = LOOPBACK
            if self._collectives.group(key).hosts and self._network is not None:
                address = self._network.address("Gloo")
            self._members[key] = GlooMembership(self._collectives, key, address)
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

    def _reduced(self, member: GlooMembership, op: Any, row: torch.Tensor) -> torch.Tensor:
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
        whole = member.gathered(total).view(-1)
        return whole if whole.numel() == length else whole[:length].clone()  # no result keeps more than its own

    def all_gather(self, mesh_dims: Sequence[str], dims: Sequence[int]) -> Collective:
        member = self._member(mesh_dims)

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if member.size == 1:
                return copies(tensors)
            packing = Packing(tensors)
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
            packing = Packing(tensors)
            row = packing.packed([tensors]) if member.me == root else torch.empty(packing.size, dtype=torch.uint8)
            member.broadcast(row, root)
            return copies(packing.views(row))

        return run

    def permute(self, mesh_dims: Sequence[str], pairs: Sequence[Sequence[int]]) -> Collective:
        member = self._member(mesh_dims)
        targets = sorted(target for source, target in pairs if source == member.me)
        sources = [source for source, target in pairs if target == member.me]

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            packing = Packing(tensors)
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


def _traded(member: GlooMembership, tensors: Sequence[torch.Tensor], dims: Sequence[int]) -> list[Tensors]:
    """For each tensor, cut along its dim into a block for each worker: the blocks that they have for this one."""
    blocks = split(tensors, dims, member.size)
    packing = Packing([each[0] for each in blocks])
    given = packing.packed([[each[j] for each in blocks] for j in range(member.size)])
    took = torch.empty_like(given)
    sizes = [packing.size] * member.size
    if packing.size:
        member.exchange(given, sizes, took, sizes)
    received = [packing.views(row) for row in took.view(member.size, -1).unbind()]
    return [list(parts) for parts in zip(*received, strict=True)]
