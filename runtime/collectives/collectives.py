"""Every collective of a plan, as one worker runs it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from monarch.compiler.blocks import REDUCE
from monarch.compiler.loading import load
from monarch.compiler.plan import MeshSpec, Plan
from monarch.runtime.collectives.chain import Results, reduce_in_chain
from monarch.runtime.collectives.cost import chain_scatters_faster, direct_is_faster
from monarch.runtime.collectives.meeting import Collective, Group, Meetings, Tensors
from monarch.runtime.collectives.reduce import reduce_list, reduce_small
from monarch.runtime.collectives.shares import add, copies, split
from monarch.runtime.collectives.transfers import Transfers
from monarch.runtime.shared.blocks import Flat, Piece, rounds
from monarch.runtime.shared.signals import Aborted
from monarch.runtime.shared.window import ALIGN

if TYPE_CHECKING:
    from monarch.runtime.collectives.listening import Network
    from monarch.runtime.collectives.process_groups import ProcessGroups
    from monarch.runtime.collectives.streamed import Streamed


class Collectives:
    """One worker's side of every collective of the plans that run on all workers of its mesh, or on some of them.

    `mesh` has the dims of these workers, and `ranks` their numbers, in order. `at` has this worker's rounds, whichever
    plans they are of."""

    def __init__(
        self,
        at: Meetings,
        mesh: MeshSpec,
        ranks: Sequence[int] | None = None,
        network: Network | None = None,
        joint: Sequence[int] | None = None,
        committing: Sequence[int] | None = None,
    ) -> None:
        """`joint` are the workers of all parts of the plans, where these are of several, and `committing` those of them
        with which these commit."""
        self.at = at
        self.joint = joint
        self._committing = committing or joint
        self.mesh = mesh
        self.ranks = range(mesh.workers) if ranks is None else ranks
        self._network = network
        self.me = self.ranks.index(at.rank)
        """This worker's place among them."""
        self._groups: dict[tuple[str, ...], Group] = {}
        self._backends: dict[str, ProcessGroups | Streamed] = {}

    def over(
        self,
        mesh: MeshSpec,
        ranks: Sequence[int],
        joint: Sequence[int] | None = None,
        committing: Sequence[int] | None = None,
    ) -> Collectives:
        """Those of plans that run on some of the workers, or of a part of plans whose parts run on `joint`, and that
        commits with `committing`."""
        return Collectives(self.at, mesh, ranks, self._network, joint, committing)

    def transfers(self, plan: Plan, part: int, ranks: Sequence[Sequence[int]]) -> Transfers:
        """The transfers that a part of a plan sends and receives. `ranks` are the workers of each part."""
        return Transfers(self.at, plan, part, ranks)

    def group(self, mesh_dims: Sequence[str]) -> Group:
        """This worker's group along some mesh dims."""
        key = tuple(mesh_dims)
        if key not in self._groups:
            ranks = tuple([self.ranks[place] for place in self.mesh.group(self.me, key)])
            self._groups[key] = Group(ranks, self.at.rank, self.at.mirror)
        return self._groups[key]

    def name_of(self, rank: int) -> str:
        """ "data=0, model=1"."""
        point = self.mesh.point(self.ranks.index(rank))
        return ", ".join(f"{name}={at}" for name, at in zip(self.mesh.names, point, strict=True))

    def look(self) -> None:
        """Raises Aborted where another worker has failed this step, or one has died."""
        self.at.look(self.ranks if self.joint is None else self.joint)

    def by(self, backend: str) -> Collectives | ProcessGroups | Streamed:
        """The collectives of plans that choose `backend`. Raises MonarchError where this worker cannot use it."""
        if backend == "monarch":
            return self
        if backend not in self._backends:
            self._backends[backend] = made = self._process_groups() if backend == "gloo" else self._streamed()
            self.at.leaving.append(made.give_up)
        return self._backends[backend]

    def _process_groups(self) -> ProcessGroups:
        return load("monarch.runtime.collectives.process_groups:ProcessGroups")(self, self._network)

    def _streamed(self) -> Streamed:
        library = load("monarch.runtime.collectives.nccl:Nccl")()
        return load("monarch.runtime.collectives.streamed:Streamed")(self, self._network, library)

    def close(self) -> None:
        for backend in self._backends.values():
            backend.leave()

    def commit(self) -> Callable[[], None]:
        at, mirror = self.at, self.at.mirror
        everyone = tuple(self.ranks if self._committing is None else self._committing)
        stages: list[Group | None] = [Group(everyone, at.rank, mirror)]
        if mirror is not None:  # on each host, then one worker of each host, then on each host again
            on: dict[tuple[int, ...], list[int]] = {}
            for rank in everyone:
                on.setdefault(mirror.hosts_of((rank,)), []).append(rank)
            own, firsts = Group(tuple(on[()]), at.rank, None), tuple(ranks[0] for ranks in on.values())
            stages = [own, Group(firsts, at.rank, mirror) if at.rank in firsts else None, own]

        def run() -> None:
            step = at.step
            if self.joint is not None:
                at.join()
            try:
                for group in stages:
                    if group is not None and group.size > 1:
                        at.meet(group)
                    else:
                        at.skip_meeting()
            except Aborted as aborted:
                # Somebody may have seen that all have come before somebody died, and this worker only that one did.
                if not aborted.died or not at.verdict(step):
                    raise
            at.read(())

        return run

    def all_reduce(self, mesh_dims: Sequence[str], reduction: str) -> Collective:
        at, group, op = self.at, self.group(mesh_dims), REDUCE[reduction]

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if group.size == 1:
                return copies(tensors)
            if len(tensors) == 1 and direct_is_faster(group, tensors[0].nbytes, at.area):
                return [reduce_small(at, group, op, tensors[0])]
            outs: list[Any] = [None] * len(tensors)
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                where = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
                results = reduce_list(at, group, op, [tensors[i] for i in where])
                for i, result in zip(where, results, strict=True):
                    outs[i] = result
            return outs

        return at.announcing(run)

    def all_gather(self, mesh_dims: Sequence[str], dims: Sequence[int]) -> Collective:
        at, group = self.at, self.group(mesh_dims)
        plan = _Rounds(at.area)

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if group.size == 1:
                return copies(tensors)
            view = at.window.view
            outs: list[Any] = [None] * len(tensors)
            targets: list[Any] = [None] * len(tensors)
            for pieces in plan.of(tensors):
                area = at.next_area()
                base = at.base(at.rank, area)
                for piece in pieces:
                    tensor = tensors[piece.tensor]
                    view(base + piece.offset, piece.shape, tensor.dtype).copy_(piece.of(tensor))
                at.share(group.hosts, base, plan.size(pieces, tensors))
                at.meet(group)
                for piece in pieces:
                    i, tensor = piece.tensor, tensors[piece.tensor]
                    parts = [
                        piece.of(tensor)
                        if rank == at.rank
                        else view(at.base(rank, area) + piece.offset, piece.shape, tensor.dtype)
                        for rank in group.ranks
                    ]
                    if piece.index is None:
                        outs[i] = torch.cat(parts, dims[i])
                        continue
                    if outs[i] is None:
                        outs[i], targets[i] = _blocks(tensor, dims[i], group.size)
                    for target, part in zip(targets[i], parts, strict=True):
                        piece.of(target).copy_(part)
                at.read(group.peers, area, hosts=group.hosts)
            return [
                _blocks(tensor, dim, group.size)[0] if out is None else out
                for out, tensor, dim in zip(outs, tensors, dims, strict=True)
            ]

        return at.announcing(run)

    def reduce_scatter(self, mesh_dims: Sequence[str], dims: Sequence[int], reduction: str) -> Collective:
        at, group = self.at, self.group(mesh_dims)
        op: Callable[..., Any] = REDUCE[reduction]
        slot = at.area // group.size // ALIGN * ALIGN
        plan = _Rounds(slot)

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if group.size == 1:
                return copies(tensors)
            sources = split(tensors, dims, group.size)
            outs = [torch.empty(blocks[0].shape, dtype=blocks[0].dtype) for blocks in sources]
            if chain_scatters_faster(group, sum(tensor.nbytes for tensor in tensors)):
                for dtype in dict.fromkeys(out.dtype for out in outs):
                    where = [i for i, out in enumerate(outs) if out.dtype == dtype and out.numel()]
                    if where:
                        source = Flat([sources[i][j] for j in range(group.size) for i in where])
                        target = Flat([outs[i] for i in where])
                        reduce_in_chain(at, group, op, source, Results(group, target, target.length))
                return outs
            for pieces, area in self._send_blocks(group, plan, sources, slot):
                for piece in pieces:
                    own = piece.of(sources[piece.tensor][group.me])
                    parts = self._received(group, piece, area, slot, own)
                    out = piece.of(outs[piece.tensor])
                    add(op, parts, out)
                at.read(group.peers, area, hosts=group.hosts)
            return outs

        return at.announcing(run)

    def all_to_all(
        self, mesh_dims: Sequence[str], source_dims: Sequence[int], target_dims: Sequence[int]
    ) -> Collective:
        at, group = self.at, self.group(mesh_dims)
        slot = at.area // group.size // ALIGN * ALIGN
        plan = _Rounds(slot)

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if group.size == 1:
                return copies(tensors)
            sources = split(tensors, target_dims, group.size)
            made = [_blocks(blocks[0], dim, group.size) for blocks, dim in zip(sources, source_dims, strict=True)]
            for pieces, area in self._send_blocks(group, plan, sources, slot):
                for piece in pieces:
                    own = piece.of(sources[piece.tensor][group.me])
                    parts = self._received(group, piece, area, slot, own)
                    for target, part in zip(made[piece.tensor][1], parts, strict=True):
                        piece.of(target).copy_(part)
                at.read(group.peers, area, hosts=group.hosts)
            return [out for out, _ in made]

        return at.announcing(run)

    def _send_blocks(
        self, group: Group, plan: _Rounds, sources: Sequence[Sequence[torch.Tensor]], slot: int
    ) -> Iterator[tuple[list[Piece], int]]:
        """Rounds in which block j of each tensor is written for worker j. The caller reads, and says so."""
        at = self.at
        for pieces in plan.of([blocks[0] for blocks in sources]):
            area = at.next_area()
            base = at.base(at.rank, area)
            for piece in pieces:
                for j, block in enumerate(sources[piece.tensor]):
                    if j != group.me:
                        place = at.window.view(base + j * slot + piece.offset, piece.shape, block.dtype)
                        place.copy_(piece.of(block))
            if group.hosts:
                size = plan.size(pieces, [blocks[0] for blocks in sources])
                for j, rank in enumerate(group.ranks):
                    at.share(group.host_of[rank], base + j * slot, size)
            at.meet(group)
            yield pieces, area

    def _received(self, group: Group, piece: Piece, area: int, slot: int, own: torch.Tensor) -> Tensors:
        """The blocks that the group wrote for this worker, its own among them."""
        at, offset = self.at, group.me * slot + piece.offset
        return [
            own if rank == at.rank else at.window.view(at.base(rank, area) + offset, piece.shape, own.dtype)
            for rank in group.ranks
        ]

    def broadcast(self, mesh_dims: Sequence[str], root: int) -> Collective:
        group = self.group(mesh_dims)
        return self._deliver(group, {j: root for j in range(group.size) if j != root}, keep=root)

    def permute(self, mesh_dims: Sequence[str], pairs: Sequence[Sequence[int]]) -> Collective:
        return self._deliver(self.group(mesh_dims), {target: source for source, target in pairs}, keep=None)

    def _deliver(self, group: Group, source_of: dict[int, int], keep: int | None) -> Collective:
        """Each target gets its source's tensors; `keep` keeps its own, and all others get zeros."""
        at, me = self.at, group.me
        plan = _Rounds(at.area)
        source = source_of.get(me)
        readers = [group.ranks[target] for target, source in source_of.items() if source == me and target != me]
        far = () if at.mirror is None else at.mirror.hosts_of(readers)
        origin = () if source is None else group.host_of.get(group.ranks[source], ())

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            own = me == keep or source == me
            fill = torch.zeros if source is None else torch.empty
            outs = [tensor.clone() if own else fill(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
            for pieces in plan.of(tensors):
                area = at.next_area()
                if readers:
                    base = at.base(at.rank, area)
                    for piece in pieces:
                        tensor = tensors[piece.tensor]
                        at.window.view(base + piece.offset, piece.shape, tensor.dtype).copy_(piece.of(tensor))
                    at.share(far, base, plan.size(pieces, tensors))
                fetch = not own and source is not None
                at.came([group.ranks[source]] if fetch and source is not None else [], far)
                if fetch and source is not None:
                    base = at.base(group.ranks[source], area)
                    for piece in pieces:
                        part = at.window.view(base + piece.offset, piece.shape, tensors[piece.tensor].dtype)
                        piece.of(outs[piece.tensor]).copy_(part)
                at.read(readers, area, hosts=origin)
            return outs

        return at.announcing(run)


class _Rounds:
    """The rounds of one collective, which depend on shapes only: worked out once for the shapes of a plan."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._key: tuple[Any, ...] = ()
        self._rounds: list[list[Piece]] = []

    def of(self, tensors: Sequence[torch.Tensor]) -> list[list[Piece]]:
        key = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        if key != self._key:
            shapes = [tuple(tensor.shape) for tensor in tensors]
            self._rounds = rounds(shapes, [tensor.element_size() for tensor in tensors], self.limit)
            self._key = key
        return self._rounds

    @staticmethod
    def size(pieces: Sequence[Piece], tensors: Sequence[torch.Tensor]) -> int:
        """The bytes that a round takes of an area."""
        last = pieces[-1]
        return last.offset + math.prod(last.shape) * tensors[last.tensor].element_size()


def _blocks(block: torch.Tensor, dim: int, count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """An empty tensor of `count` blocks like `block` along `dim`, and views of the blocks."""
    shape = list(block.shape)
    shape[dim] *= count
    whole = torch.empty(shape, dtype=block.dtype)
    length = block.shape[dim]
    return whole, [whole.narrow(dim, j * length, length) for j in range(count)]
