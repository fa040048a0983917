"""all_reduce through windows. Every algorithm adds from the group's first worker to its last."""

from __future__ import annotations

from typing import Any

import torch

from monarch.runtime.collectives.chain import Results, reduce_in_chain
from monarch.runtime.collectives.cost import chain_is_faster, direct_is_faster
from monarch.runtime.collectives.meeting import Group, Meetings, Tensors
from monarch.runtime.collectives.shares import add, held, part_of, whole_lanes, write_but
from monarch.runtime.shared.blocks import Flat
from monarch.runtime.shared.window import AREAS


def reduce_small(at: Meetings, group: Group, op: Any, tensor: torch.Tensor) -> torch.Tensor:
    area = at.next_area()
    shape, dtype, view = tensor.shape, tensor.dtype, at.window.view
    base = at.base(at.rank, area)
    mine = view(base, shape, dtype)
    mine.copy_(tensor)
    at.share(group.hosts, base, tensor.nbytes)
    at.meet(group)
    # A dense input is as good as its copy in the window, and nearer.
    own = tensor if tensor.is_contiguous() else mine
    parts = [own if rank == at.rank else view(at.base(rank, area), shape, dtype) for rank in group.ranks]
    total = op(parts[0], parts[1])
    for part in parts[2:]:
        op(total, part, out=total)
    at.read(group.peers, area, hosts=group.hosts)
    return total


def reduce_list(at: Meetings, group: Group, op: Any, tensors: Tensors) -> Tensors:
    source = Flat(tensors)
    size = source.length * tensors[0].element_size()
    if size == 0:
        return [tensor.clone() for tensor in tensors]
    if direct_is_faster(group, size, at.area):
        total = reduce_small(at, group, op, torch.cat(source.rows))
        pieces = total.split([row.numel() for row in source.rows])
        # Each a buffer of its own: one that lives on would keep all of them.
        return [piece.clone().view(tensor.shape) for piece, tensor in zip(pieces, tensors, strict=True)]
    outs = [torch.empty(tensor.shape, dtype=tensor.dtype) for tensor in tensors]
    target = Flat(outs)
    if group.size == 2:
        (reduce_far if group.hosts else reduce_direct)(at, group, op, source, target)
    elif chain_is_faster(group, size):
        reduce_in_chain(at, group, op, source, Results(group, target))
    else:
        reduce_shared(at, group, op, source, target)
    return outs


def reduce_direct(at: Meetings, group: Group, op: Any, source: Flat, target: Flat) -> None:
    """Two workers: each writes all it has, and adds."""
    dtype = source.rows[0].dtype
    (peer,) = group.peers
    first = group.me == 0
    step = at.area // dtype.itemsize
    for low in range(0, source.length, step):
        high = min(low + step, source.length)
        area = at.next_area()
        base = at.base(at.rank, area)
        mine = at.window.view(base, (high - low,), dtype)
        for row, start, end in source.spans(low, high):
            mine[start:end].copy_(row)
        at.share(group.hosts, base, (high - low) * dtype.itemsize)
        at.meet(group)
        theirs = at.window.view(at.base(peer, area), (high - low,), dtype)
        for (row, start, end), (out, _, _) in zip(source.spans(low, high), target.spans(low, high), strict=True):
            other = theirs[start:end]
            op(row, other, out=out) if first else op(other, row, out=out)
        at.read(group.peers, area, hosts=group.hosts)


def reduce_far(at: Meetings, group: Group, op: Any, source: Flat, target: Flat) -> None:
    """Two workers on two hosts: as `reduce_direct`, and while a chunk is on its way the one before is added. All areas
    take turns, so that a chunk need not wait for the news that an earlier one has been read."""
    dtype = source.rows[0].dtype
    (peer,) = group.peers
    first = group.me == 0
    step = at.area // dtype.itemsize
    chunks = [(low, min(low + step, source.length)) for low in range(0, source.length, step)]
    sent = 0  # the event of the chunk before
    for now in range(len(chunks) + 1):
        before, hosts = sent, group.hosts if now < len(chunks) else ()
        if now < len(chunks):
            low, high = chunks[now]
            at.reclaim(now % AREAS)
            base = at.base(at.rank, now % AREAS)
            mine = at.window.view(base, (high - low,), dtype)
            for row, start, end in source.spans(low, high):
                mine[start:end].copy_(row)
            at.share(hosts, base, (high - low) * dtype.itemsize)
        sent = at.arrive(hosts)
        if now > 0:
            low, high = chunks[now - 1]
            at.until(group.peers, before, group)
            theirs = at.window.view(at.base(peer, (now - 1) % AREAS), (high - low,), dtype)
            for (row, start, end), (out, _, _) in zip(source.spans(low, high), target.spans(low, high), strict=True):
                other = theirs[start:end]
                op(row, other, out=out) if first else op(other, row, out=out)
        at.read((), hosts=group.hosts)
        at.lend((now - 1) % AREAS, group.peers)


def reduce_shared(at: Meetings, group: Group, op: Any, source: Flat, target: Flat) -> None:
    """More workers: each reduces its share of a chunk, and reads the others' results.

    Three stages a chunk (write the inputs; reduce one's share; read the results) with a meeting after the first and
    the second. Chunks overlap, so that a round does stage 1 of one, 2 of the one before and 3 of the one before
    that. Inputs go through areas 0 and 1, results through 2 and 3.
    """
    dtype = source.rows[0].dtype
    view, ranks, me, k = at.window.view, group.ranks, group.me, group.size
    share = whole_lanes(at.area // dtype.itemsize // k, source.length, k)
    chunks = [(low, min(low + share * k, source.length)) for low in range(0, source.length, share * k)]

    for area in range(AREAS):
        at.reclaim(area)
    for now in range(len(chunks) + 2):
        if now < len(chunks):
            low, high = chunks[now]
            base = at.base(at.rank, now % 2)
            write_but(at, chunks[now], part_of(chunks[now], me, share), base, source, dtype)
            for j, rank in enumerate(ranks if group.hosts else ()):
                first, last = part_of(chunks[now], j, share)
                offset = base + (first - low) * dtype.itemsize
                at.share(group.host_of[rank], offset, (last - first) * dtype.itemsize)
        if 0 <= now - 1 < len(chunks):
            chunk = chunks[now - 1]
            low, high = part_of(chunk, me, share)
            if low < high:
                base = at.base(at.rank, 2 + now % 2)
                result = view(base, (high - low,), dtype)
                add(op, held(at, group, chunk, low, high, (now - 1) % 2, source, dtype), result)
                at.share(group.hosts, base, (high - low) * dtype.itemsize)
                for out, start, end in target.spans(low, high):
                    out.copy_(result[start:end])
        if now >= 2:
            for j, rank in enumerate(ranks):
                low, high = part_of(chunks[now - 2], j, share)
                if j != me and low < high:
                    result = view(at.base(rank, 2 + (now - 1) % 2), (high - low,), dtype)
                    for out, start, end in target.spans(low, high):
                        out.copy_(result[start:end])
        if now <= len(chunks):
            at.meet(group)
            at.read(group.peers, hosts=group.hosts)
    # The last results are read after the last meeting: note that, and which workers read which areas of ours.
    at.read(group.peers, *range(AREAS), hosts=group.hosts)
