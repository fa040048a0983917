"""Collectives through windows: each worker writes its own, all read their peers'.

A collective is a sequence of *rounds*. In a round a worker writes what its peers need into one of its areas, says so
(its progress word reaches the round's *arrive* event), waits for those whose areas it reads, reads, and says that it
has read (*done*). Rounds alternate between areas, so one wait a round is enough: before it writes an area again, a
worker looks whether those that read it last are done, which they nearly always are.

With more than four workers in a group not everyone looks at everyone: the group's first worker waits for all and then
lets them go (*release*), which takes 2k wake-ups for k workers rather than k².

Failure. A worker that fails in a step marks its progress word and then stands still until all others have finished or
given up the step, so its word cannot pass a number that a peer still waits for. Peers that see the mark give up too,
and so on. A worker that reached a number before it failed counts as having reached it: a "commit" that one worker
passes is passed by all.

Reductions go from the group's first worker to its last, in the tensors' own dtype, whatever the algorithm: the same
bits on all workers, from run to run, and as the reference executor computes them.

Bytes that a worker moves in an all_reduce of n bytes over k workers:
    direct             writes n, reads k n, writes n           one round; small tensors, and k = 2
    scatter, gather    writes n, reads 2 n, writes n           three rounds, overlapped in longer ones; the rest
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from monarch.compiler.plan import MeshSpec
from monarch.compiler.plan.blocks import REDUCE
from monarch.runtime import futex, signals
from monarch.runtime.blocks import Flat, Piece, rounds
from monarch.runtime.mirror import Mirror
from monarch.runtime.signals import LINE, STEP_BITS, Aborted, TimedSignals
from monarch.runtime.window import ALIGN, AREAS, Window

Tensors = list[torch.Tensor]
Collective = Callable[[Sequence[torch.Tensor]], Tensors]

_EVENTS = 6  # of a round: arrive, release, done, which count by 2
_LEAD_ABOVE = 4
_LANE = 64  # elements
_DIRECT_BYTES = 32 << 10  # above this, more than two workers share the additions rather than each doing all of them


class Group:
    """The workers of one collective, and this worker's place among them.

    `hosts` are the other hosts that some of them are on, and `host_of` gives each rank's if it is another. Where there
    are any, everyone looks at everyone: a word from the leader would say nothing of the bytes that others have sent.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, mirror: Mirror | None) -> None:
        self.ranks = ranks
        self.size = len(ranks)
        self.me = ranks.index(rank)
        self.peers = tuple(peer for peer in ranks if peer != rank)
        self.leader = ranks[0]
        self.leads = rank == self.leader
        self.hosts: tuple[int, ...] = () if mirror is None else mirror.hosts_of(ranks)
        self.host_of = {} if mirror is None else {peer: mirror.hosts_of((peer,)) for peer in ranks}
        self.direct = self.size <= _LEAD_ABOVE or bool(self.hosts)


class Collectives:
    """One worker's side of every collective of its mesh."""

    def __init__(self, mesh: MeshSpec, rank: int, window: Window, mirror: Mirror | None = None) -> None:
        self.mesh = mesh
        self.rank = rank
        self.window = window
        self.signals = window.signals()
        self.mirror = mirror
        self.area = window.geometry.area
        self._here = range(mesh.workers) if mirror is None else mirror.here
        self._at = 0
        self._area = 0
        self._readers: list[tuple[tuple[int, ...], int]] = [((), 0)] * AREAS
        self._groups: dict[tuple[str, ...], Group] = {}

    # -- steps -----------------------------------------------------------------------------------------------------

    def begin(self, step: int) -> None:
        self._at = step << STEP_BITS
        self._area = step % 2  # not where the last step left off: if it failed, that is not the same place everywhere

    def fail(self, step: int) -> None:
        """Give up the step: tell the peers, and wait until each of them has finished or given it up as well."""
        words = self.signals.words
        if self._at >> STEP_BITS != step:  # it failed before it began
            self.begin(step)
        self.signals.store(LINE * (1 + self.rank), self._at | 1)
        if self.mirror is not None:
            self._fail_across(self.mirror, step)
        for rank in self._here:
            if rank == self.rank:
                continue
            line = signals.line_of(rank)

            def check(seen: int, line: int = line) -> None:
                progress = words[line]
                over = progress >> STEP_BITS > step or (progress & 1 and progress >> STEP_BITS == step)
                if over or words[signals.DEAD]:
                    raise _Ended

            try:
                self.signals.wait(line + signals.DONE, step + 1, check)
            except _Ended:
                pass
        self.signals.store(LINE * (1 + self.rank), (step + 1) << STEP_BITS)

    def _fail_across(self, mirror: Mirror, step: int) -> None:
        """The part of `fail` that concerns other hosts. How far workers there are, this one does not see: the hosts
        tell the controller when all of theirs are over with the step, and it releases those that stand still."""
        mirror.drop()
        mirror.tell(mirror.others, self._at | 1)
        line = signals.line_of(self.rank)
        self.signals.words[line + signals.OVER] = step + 1
        futex.fence()
        futex.wake(self.signals.address + 8 * (line + signals.DONE))  # who looks for commands' ends looks here
        words = self.signals.words

        def check(seen: int) -> None:
            if words[signals.DEAD]:
                raise _Ended

        try:
            self.signals.wait(signals.RELEASED, step + 1, check)
        except _Ended:
            pass

    def time_waits(self, clock: Callable[[], int]) -> Callable[[], int]:
        """From here on count the time spent waiting for peers; gives what tells it."""
        self.signals = timed = TimedSignals(self.window.signals(), clock)
        return lambda: timed.waited

    def time_no_waits(self) -> None:
        self.signals = self.window.signals()

    # -- rounds ----------------------------------------------------------------------------------------------------

    def _next_area(self, span: int = 2) -> int:
        """The number of the area for the next round, once nobody reads it any more; `span` says how many take turns."""
        area = self._area = (self._area + 1) % span
        self._reclaim(area)
        return area

    def _reclaim(self, area: int) -> None:
        readers, event = self._readers[area]
        words = self.signals.words
        for rank in readers:
            if words[LINE * (1 + rank)] < event:
                self._wait_reader(rank, event)

    def _wait_reader(self, rank: int, event: int) -> None:
        self._settle()
        words = self.signals.words
        line = signals.line_of(rank)

        def check(seen: int) -> None:
            if words[signals.DEAD]:
                raise Aborted(words[signals.DEAD] - 1, died=True)
            if seen & 1 and seen >> STEP_BITS == event >> STEP_BITS:
                raise _Ended  # it failed, and reads no more

        try:
            self.signals.wait(line, event, check)
        except _Ended:
            pass

    def _meet(self, group: Group) -> None:
        """Say that this worker has come, and wait until the whole group has."""
        self._at = arrive = self._at + 2
        store, words = self.signals.store, self.signals.words
        store(LINE * (1 + self.rank), arrive)
        if group.hosts and self.mirror is not None:
            self.mirror.tell(group.hosts, arrive)
        wait = self.signals.wait_for_peer
        self._at = release = arrive + 2
        if group.direct or group.leads:
            for rank in group.peers:
                if words[LINE * (1 + rank)] < arrive:
                    self._await(wait, rank, arrive, group.peers)
            if not group.direct:
                store(LINE * (1 + self.rank), release)
        elif words[LINE * (1 + group.leader)] < release:
            self._await(wait, group.leader, release, group.peers)

    def _await(self, wait: Callable[[int, int, Sequence[int]], None], rank: int, event: int, group: Any) -> None:
        self._settle()
        try:
            wait(rank, event, group)
        except Aborted:
            self._at = self.signals.words[LINE * (1 + self.rank)]  # what was said stands
            raise

    def _came(self, sources: Sequence[int], hosts: Sequence[int] = ()) -> None:
        """Say that this worker has come, also to those other `hosts`, and wait for `sources` alone."""
        self._at = arrive = self._at + 2
        self.signals.store(LINE * (1 + self.rank), arrive)
        if hosts and self.mirror is not None:
            self.mirror.tell(hosts, arrive)
        for rank in sources:
            self._await(self.signals.wait_for_peer, rank, arrive, (rank,))
        self._at = arrive + 2

    def _read(self, readers: Sequence[int], *areas: int, hosts: Sequence[int] = ()) -> None:
        """Say that this worker has read what it needs of the round, of workers on `hosts` among others; `readers` read
        `areas` of its own."""
        self._at = done = self._at + 2
        self.signals.store(LINE * (1 + self.rank), done)
        if hosts and self.mirror is not None:
            self.mirror.owe(hosts)
        for area in areas:
            self._readers[area] = (tuple(readers), done)

    def _settle(self) -> None:
        if self.mirror is not None:
            self.mirror.settle(self.signals.words[LINE * (1 + self.rank)])

    def _settled(self, run: Collective) -> Collective:
        """A collective that, at its end, tells other hosts how far this worker is: who writes there again need not wait
        until it says something next."""
        if self.mirror is None:
            return run

        def settled(tensors: Sequence[torch.Tensor]) -> Tensors:
            outs = run(tensors)
            self._settle()
            return outs

        return settled

    def _share(self, hosts: Sequence[int], offset: int, size: int) -> None:
        """What was written there is read on those other hosts."""
        if hosts and size and self.mirror is not None:
            self.mirror.write(hosts, offset, size)

    def group(self, mesh_dims: Sequence[str]) -> Group:
        key = tuple(mesh_dims)
        if key not in self._groups:
            self._groups[key] = Group(self.mesh.group(self.rank, key), self.rank, self.mirror)
        return self._groups[key]

    def _base(self, rank: int, area: int) -> int:
        return self.window.geometry.area_of(rank, area)

    # -- the collectives -------------------------------------------------------------------------------------------

    def commit(self) -> Callable[[], None]:
        stages: list[Group | None] = [self.group(self.mesh.names)]
        if self.mirror is not None:  # on each host, then one worker of each host, then on each host again
            own = Group(tuple(self._here), self.rank, None)
            firsts = tuple(range(0, self.mesh.workers, len(self._here)))
            stages = [own, Group(firsts, self.rank, self.mirror) if self.rank in firsts else None, own]

        def run() -> None:
            for group in stages:
                if group is not None and group.size > 1:
                    self._meet(group)
                else:
                    self._at += 4
            self._read(())

        return run

    def all_reduce(self, mesh_dims: Sequence[str], reduction: str) -> Collective:
        group, op = self.group(mesh_dims), REDUCE[reduction]

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if group.size == 1:
                return _copies(tensors)
            if len(tensors) == 1 and 0 < tensors[0].nbytes <= (self.area if group.size == 2 else _DIRECT_BYTES):
                return [self._reduce_small(group, op, tensors[0])]
            outs: list[Any] = [None] * len(tensors)
            for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
                where = [i for i, tensor in enumerate(tensors) if tensor.dtype == dtype]
                results = self._reduce_list(group, op, [tensors[i] for i in where])
                for i, result in zip(where, results, strict=True):
                    outs[i] = result
            return outs

        return self._settled(run)

    def _reduce_small(self, group: Group, op: Any, tensor: torch.Tensor) -> torch.Tensor:
        area = self._next_area()
        shape, dtype, view = tensor.shape, tensor.dtype, self.window.view
        base = self._base(self.rank, area)
        mine = view(base, shape, dtype)
        mine.copy_(tensor)
        self._share(group.hosts, base, tensor.nbytes)
        self._meet(group)
        # A dense input is as good as its copy in the window, and nearer.
        own = tensor if tensor.is_contiguous() else mine
        parts = [own if rank == self.rank else view(self._base(rank, area), shape, dtype) for rank in group.ranks]
        total = op(parts[0], parts[1])
        for part in parts[2:]:
            op(total, part, out=total)
        self._read(group.peers, area, hosts=group.hosts)
        return total

    def _reduce_list(self, group: Group, op: Any, tensors: Tensors) -> Tensors:
        source = Flat(tensors)
        size = source.length * tensors[0].element_size()
        if size == 0:
            return [tensor.clone() for tensor in tensors]
        if size <= (self.area if group.size == 2 else _DIRECT_BYTES):
            total = self._reduce_small(group, op, torch.cat(source.rows))
            pieces = total.split([row.numel() for row in source.rows])
            return [piece.view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
        outs = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
        target = Flat(outs)
        if group.size == 2:
            self._reduce_direct(group, op, source, target)
        else:
            self._reduce_shared(group, op, source, target)
        return outs

    def _reduce_direct(self, group: Group, op: Any, source: Flat, target: Flat) -> None:
        """Two workers: each writes all it has, and adds."""
        dtype = source.rows[0].dtype
        (peer,) = group.peers
        first = group.me == 0
        step = self.area // dtype.itemsize
        for low in range(0, source.length, step):
            high = min(low + step, source.length)
            area = self._next_area()
            base = self._base(self.rank, area)
            mine = self.window.view(base, (high - low,), dtype)
            for row, start, end in source.spans(low, high):
                mine[start:end].copy_(row)
            self._share(group.hosts, base, (high - low) * dtype.itemsize)
            self._meet(group)
            theirs = self.window.view(self._base(peer, area), (high - low,), dtype)
            for (row, start, end), (out, _, _) in zip(source.spans(low, high), target.spans(low, high), strict=True):
                other = theirs[start:end]
                op(row, other, out=out) if first else op(other, row, out=out)
            self._read(group.peers, area, hosts=group.hosts)

    def _reduce_shared(self, group: Group, op: Any, source: Flat, target: Flat) -> None:
        """More workers: each reduces its share of a chunk, and reads the others' results.

        Three stages a chunk (write the inputs; reduce one's share; read the results) with a meeting after the first and
        the second. Chunks overlap, so that a round does stage 1 of one, 2 of the one before and 3 of the one before
        that. Inputs go through areas 0 and 1, results through 2 and 3.
        """
        dtype = source.rows[0].dtype
        view, ranks, me, k = self.window.view, group.ranks, group.me, group.size
        share = _share(source.length, k, self.area // dtype.itemsize)
        chunks = [(low, min(low + share * k, source.length)) for low in range(0, source.length, share * k)]

        def part(chunk: tuple[int, int], j: int) -> tuple[int, int]:
            low, high = chunk
            return min(low + j * share, high), min(low + (j + 1) * share, high)

        for area in range(AREAS):
            self._reclaim(area)
        for now in range(len(chunks) + 2):
            if now < len(chunks):
                low, high = chunks[now]
                base = self._base(self.rank, now % 2)
                mine = view(base, (high - low,), dtype)
                own_low, own_high = part(chunks[now], me)
                for first, last in ((low, own_low), (own_high, high)):
                    for row, start, end in source.spans(first, last):
                        mine[first - low + start : first - low + end].copy_(row)
                for j, rank in enumerate(ranks if group.hosts else ()):
                    first, last = part(chunks[now], j)
                    at = base + (first - low) * dtype.itemsize
                    self._share(group.host_of[rank], at, (last - first) * dtype.itemsize)
            if 0 <= now - 1 < len(chunks):
                chunk = chunks[now - 1]
                low, high = part(chunk, me)
                if low < high:
                    base = self._base(self.rank, 2 + now % 2)
                    result = view(base, (high - low,), dtype)
                    parts = self._shares(group, chunk, low, high, (now - 1) % 2, source, dtype)
                    op(parts[0], parts[1], out=result)
                    for summand in parts[2:]:
                        op(result, summand, out=result)
                    self._share(group.hosts, base, (high - low) * dtype.itemsize)
                    for out, start, end in target.spans(low, high):
                        out.copy_(result[start:end])
            if now >= 2:
                for j, rank in enumerate(ranks):
                    low, high = part(chunks[now - 2], j)
                    if j != me and low < high:
                        result = view(self._base(rank, 2 + (now - 1) % 2), (high - low,), dtype)
                        for out, start, end in target.spans(low, high):
                            out.copy_(result[start:end])
            if now <= len(chunks):
                self._meet(group)
                self._read(group.peers, hosts=group.hosts)
        # The last results are read after the last meeting: say so, and remember who reads what of ours.
        self._read(group.peers, *range(AREAS), hosts=group.hosts)

    def _shares(
        self, group: Group, chunk: tuple[int, int], low: int, high: int, area: int, source: Flat, dtype: torch.dtype
    ) -> Tensors:
        """What each of the group holds of elements `low` to `high`."""
        parts = []
        for rank in group.ranks:
            if rank != self.rank:
                base = self._base(rank, area) + (low - chunk[0]) * dtype.itemsize
                parts.append(self.window.view(base, (high - low,), dtype))
            else:
                spans = [row for row, _, _ in source.spans(low, high)]
                parts.append(spans[0] if len(spans) == 1 else torch.cat(spans))
        return parts

    def all_gather(self, mesh_dims: Sequence[str], dims: Sequence[int]) -> Collective:
        group, plan = self.group(mesh_dims), _Rounds(self.area)

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if group.size == 1:
                return _copies(tensors)
            view = self.window.view
            outs: list[Any] = [None] * len(tensors)
            targets: list[Any] = [None] * len(tensors)
            for pieces in plan.of(tensors):
                area = self._next_area()
                base = self._base(self.rank, area)
                for piece in pieces:
                    tensor = tensors[piece.tensor]
                    view(base + piece.offset, piece.shape, tensor.dtype).copy_(piece.of(tensor))
                self._share(group.hosts, base, plan.size(pieces, tensors))
                self._meet(group)
                for piece in pieces:
                    i, tensor = piece.tensor, tensors[piece.tensor]
                    parts = [
                        piece.of(tensor)
                        if rank == self.rank
                        else view(self._base(rank, area) + piece.offset, piece.shape, tensor.dtype)
                        for rank in group.ranks
                    ]
                    if piece.index is None:
                        outs[i] = torch.cat(parts, dims[i])
                        continue
                    if outs[i] is None:
                        outs[i], targets[i] = _blocks(tensor, dims[i], group.size)
                    for target, part in zip(targets[i], parts, strict=True):
                        piece.of(target).copy_(part)
                self._read(group.peers, area, hosts=group.hosts)
            return [
                _blocks(tensor, dim, group.size)[0] if out is None else out
                for out, tensor, dim in zip(outs, tensors, dims, strict=True)
            ]

        return self._settled(run)

    def reduce_scatter(self, mesh_dims: Sequence[str], dims: Sequence[int], reduction: str) -> Collective:
        group = self.group(mesh_dims)
        op: Callable[..., Any] = REDUCE[reduction]
        slot = self.area // group.size // ALIGN * ALIGN
        plan = _Rounds(slot)

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if group.size == 1:
                return _copies(tensors)
            sources = _split(tensors, dims, group.size)
            outs = [torch.empty(blocks[0].shape, dtype=blocks[0].dtype) for blocks in sources]
            for pieces, area in self._send_blocks(group, plan, sources, slot):
                for piece in pieces:
                    own = piece.of(sources[piece.tensor][group.me])
                    parts = self._received(group, piece, area, slot, own)
                    out = piece.of(outs[piece.tensor])
                    op(parts[0], parts[1], out=out)
                    for part in parts[2:]:
                        op(out, part, out=out)
                self._read(group.peers, area, hosts=group.hosts)
            return outs

        return self._settled(run)

    def all_to_all(
        self, mesh_dims: Sequence[str], source_dims: Sequence[int], target_dims: Sequence[int]
    ) -> Collective:
        group = self.group(mesh_dims)
        slot = self.area // group.size // ALIGN * ALIGN
        plan = _Rounds(slot)

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            if group.size == 1:
                return _copies(tensors)
            sources = _split(tensors, target_dims, group.size)
            made = [_blocks(blocks[0], dim, group.size) for blocks, dim in zip(sources, source_dims, strict=True)]
            for pieces, area in self._send_blocks(group, plan, sources, slot):
                for piece in pieces:
                    own = piece.of(sources[piece.tensor][group.me])
                    parts = self._received(group, piece, area, slot, own)
                    for target, part in zip(made[piece.tensor][1], parts, strict=True):
                        piece.of(target).copy_(part)
                self._read(group.peers, area, hosts=group.hosts)
            return [out for out, _ in made]

        return self._settled(run)

    def _send_blocks(
        self, group: Group, plan: _Rounds, sources: Sequence[Sequence[torch.Tensor]], slot: int
    ) -> Iterator[tuple[list[Piece], int]]:
        """Rounds in which block j of each tensor is written for worker j. The caller reads, and says so."""
        for pieces in plan.of([blocks[0] for blocks in sources]):
            area = self._next_area()
            base = self._base(self.rank, area)
            for piece in pieces:
                for j, block in enumerate(sources[piece.tensor]):
                    if j != group.me:
                        place = self.window.view(base + j * slot + piece.offset, piece.shape, block.dtype)
                        place.copy_(piece.of(block))
            if group.hosts:
                size = plan.size(pieces, [blocks[0] for blocks in sources])
                for j, rank in enumerate(group.ranks):
                    self._share(group.host_of[rank], base + j * slot, size)
            self._meet(group)
            yield pieces, area

    def _received(self, group: Group, piece: Piece, area: int, slot: int, own: torch.Tensor) -> Tensors:
        """The blocks that the group wrote for this worker, its own among them."""
        offset = group.me * slot + piece.offset
        return [
            own if rank == self.rank else self.window.view(self._base(rank, area) + offset, piece.shape, own.dtype)
            for rank in group.ranks
        ]

    def broadcast(self, mesh_dims: Sequence[str], root: int) -> Collective:
        group = self.group(mesh_dims)
        return self._deliver(group, {j: root for j in range(group.size) if j != root}, keep=root)

    def permute(self, mesh_dims: Sequence[str], pairs: Sequence[Sequence[int]]) -> Collective:
        return self._deliver(self.group(mesh_dims), {target: source for source, target in pairs}, keep=None)

    def _deliver(self, group: Group, source_of: dict[int, int], keep: int | None) -> Collective:
        """Each target gets its source's tensors; `keep` keeps its own, and all others get zeros."""
        me, plan = group.me, _Rounds(self.area)
        source = source_of.get(me)
        readers = [group.ranks[target] for target, source in source_of.items() if source == me and target != me]
        far = () if self.mirror is None else self.mirror.hosts_of(readers)
        origin = () if source is None else group.host_of.get(group.ranks[source], ())

        def run(tensors: Sequence[torch.Tensor]) -> Tensors:
            own = me == keep or source == me
            fill = torch.zeros if source is None else torch.empty
            outs = [tensor.clone() if own else fill(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
            for pieces in plan.of(tensors):
                area = self._next_area()
                if readers:
                    base = self._base(self.rank, area)
                    for piece in pieces:
                        tensor = tensors[piece.tensor]
                        self.window.view(base + piece.offset, piece.shape, tensor.dtype).copy_(piece.of(tensor))
                    self._share(far, base, plan.size(pieces, tensors))
                fetch = not own and source is not None
                self._came([group.ranks[source]] if fetch and source is not None else [], far)
                if fetch and source is not None:
                    base = self._base(group.ranks[source], area)
                    for piece in pieces:
                        part = self.window.view(base + piece.offset, piece.shape, tensors[piece.tensor].dtype)
                        piece.of(outs[piece.tensor]).copy_(part)
                self._read(readers, area, hosts=origin)
            return outs

        return self._settled(run)


class _Ended(Exception):
    """The worker that was waited for will not come any more, and need not."""


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


def _copies(tensors: Sequence[torch.Tensor]) -> Tensors:
    """A group of one: the same values, in buffers of their own, for a plan may write a collective's result in place."""
    return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


def _share(length: int, k: int, room: int) -> int:
    """How many elements of a chunk each of `k` workers reduces, where a chunk has at most `room`: whole cache lines if
    that can be, and short rows are spread over everyone."""
    most = room // k
    most = most // _LANE * _LANE or most
    return min(most, -(-length // (k * _LANE)) * _LANE)


def _split(tensors: Sequence[torch.Tensor], dims: Sequence[int], count: int) -> list[Sequence[torch.Tensor]]:
    """Each tensor's `count` equal blocks along its dim."""
    for tensor, dim in zip(tensors, dims, strict=True):
        if tensor.shape[dim] % count:
            raise ValueError(f"dim {dim} of a tensor of shape {list(tensor.shape)} has no {count} equal blocks")
    return [tensor.chunk(count, dim) for tensor, dim in zip(tensors, dims, strict=True)]


def _blocks(block: torch.Tensor, dim: int, count: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """An empty tensor of `count` blocks like `block` along `dim`, and views of the blocks."""
    shape = list(block.shape)
    shape[dim] *= count
    whole = torch.empty(shape, dtype=block.dtype)
    length = block.shape[dim]
    return whole, [whole.narrow(dim, j * length, length) for j in range(count)]
