"""Reductions over several hosts as a chain: sums go from host to host, and from the last one to the workers that want
them.

Each worker has a share of what is reduced, as long as those of the group's other workers on its host. On the first host
it adds up what they hold of the share, in the group's order; on the next host the worker with the same share goes on
from there, and so on. The last host has the result, and sends it to the others: in an all_reduce to all of them, in a
reduce_scatter to the host of the worker that it is for. So every element is added from the
group's first worker to its last, as all algorithms here do, and between two hosts go n bytes there and n back, however
many workers they have: what a two-level all_reduce (reduce_scatter on each host, all_reduce between hosts, all_gather
on each host) moves as well. With one worker a host it is a ring that starts at the first worker.

Chunks follow each other through the chain. In tick t host p works on chunk t - p:

    it writes what it holds of the chunk for the workers beside it       areas 0 and 1, in turn
    it waits for the sums of the host before, which were made in tick t - 1
    it adds, and sends on (from the last host: the results)              areas 2 and 3, in turn
    it reads the results that the last host made in tick t - 1
"""

from __future__ import annotations

from typing import Any

import torch

from monarch.runtime.collectives.meeting import Group, Meetings
from monarch.runtime.collectives.shares import add, held, part_of, whole_lanes, write_but
from monarch.runtime.shared.blocks import Flat

_CHUNK_BYTES = 256 << 10  # at least, so that messages are worth sending
_CHUNKS = 8  # where there is enough for them


class Results:
    """The places of a worker's results: all of them, or its own of equal blocks, one a worker."""

    def __init__(self, group: Group, target: Flat, block: int | None = None) -> None:
        self._group = group
        self._target = target
        self._block = block
        self._first = 0 if block is None else group.me * block

    def part(self, low: int, high: int) -> tuple[int, int]:
        """Which of the elements `low` to `high` this worker wants."""
        first = min(max(low, self._first), high)
        return first, max(first, min(high, self._first + self._target.length))

    def put(self, values: torch.Tensor, low: int, first: int, last: int) -> None:
        """Take elements `first` to `last` from values that begin with element `low`."""
        for out, start, end in self._target.spans(first - self._first, last - self._first):
            out.copy_(values[first - low + start : first - low + end])

    def hosts(self, low: int, high: int) -> tuple[int, ...]:
        """The other hosts on which some of the elements are wanted."""
        group = self._group
        if self._block is None or low >= high:
            return group.hosts if low < high else ()
        wanted = group.ranks[low // self._block : (high - 1) // self._block + 1]
        return tuple(sorted({host for rank in wanted for host in group.host_of[rank]}))


def reduce_in_chain(at: Meetings, group: Group, op: Any, source: Flat, results: Results) -> None:
    """`group.by_host` must not be empty."""
    dtype = source.rows[0].dtype
    hosts = group.by_host
    here = next(p for p, ranks in enumerate(hosts) if at.rank in ranks)
    own = Group(hosts[here], at.rank, None)
    last = len(hosts) - 1
    share = _share(source.length, own.size, at.area // dtype.itemsize, dtype.itemsize)
    length = share * own.size
    chunks = [(low, min(low + length, source.length)) for low in range(0, source.length, length)]

    onward = () if here == last else group.host_of[hosts[here + 1][0]]
    readers = group.peers if here == last else (hosts[here + 1][own.me],)
    before = None if here == 0 else hosts[here - 1][own.me]
    back = set(() if before is None else group.host_of[before]) | set(group.host_of[hosts[last][0]])

    made = 0  # the event at which the sums of the tick before were there
    for tick in range(len(chunks) + len(hosts)):
        now = tick - here
        if 0 <= now < len(chunks):
            low, high = part_of(chunks[now], own.me, share)
            if own.size == 1:
                at.skip_meeting()
            else:
                at.reclaim(tick % 2)
                write_but(at, chunks[now], (low, high), at.base(at.rank, tick % 2), source, dtype)
                at.meet(own)
            summands = held(at, own, chunks[now], low, high, tick % 2, source, dtype)
            if before is not None:
                at.until((before,), made, group)
                summands.insert(0, at.window.view(at.base(before, 2 + (tick - 1) % 2), (high - low,), dtype))
            at.reclaim(2 + tick % 2)
            base = at.base(at.rank, 2 + tick % 2)
            total = at.window.view(base, (high - low,), dtype)
            add(op, summands, total)
            if here == last:
                onward = results.hosts(low, high)
                if (wanted := results.part(low, high))[0] < wanted[1]:
                    results.put(total, low, *wanted)
            at.share(onward, base, (high - low) * dtype.itemsize)
            sent = at.arrive(onward)
        else:
            at.skip_meeting()
            sent = at.arrive(())
        ready = tick - len(hosts)
        if ready >= 0:
            for j, rank in enumerate(hosts[last]):
                low, high = part_of(chunks[ready], j, share)
                first, end = results.part(low, high)
                if rank != at.rank and first < end:
                    at.until((rank,), made, group)
                    total = at.window.view(at.base(rank, 2 + (tick - 1) % 2), (high - low,), dtype)
                    results.put(total, low, first, end)
        made = sent
        at.read(own.peers, tick % 2, hosts=tuple(back))
        at.lend(2 + (tick - 1) % 2, readers)


def _share(length: int, workers: int, room: int, itemsize: int) -> int:
    """How many elements of a chunk each worker of a host reduces: chunks of an area at most, and so many of them that
    hosts work at the same time."""
    chunk = max(_CHUNK_BYTES // itemsize, -(-length // _CHUNKS))
    return max(1, whole_lanes(min(chunk, room) // workers, length, workers))
