"""What the parts of one plan send each other, through windows.

Each worker that sends puts its blocks, in the order that `Plan.routes` gives them, into two slots of its window that no
collective uses, and those who read copy them from there. Transfers larger than a slot go in pieces. All pieces of a
plan are numbered: piece p of transfer k is number G(k) + p, where G(k) counts those of the transfers before it, as many
as its largest sender has; so all workers know every number without counting rounds. A piece lies in the slot of its
number's parity. A worker raises two words, which begin with the step's number as its progress does:

    sent    the last piece that it has put into its window
    took    the last piece that it has read, of whichever workers

`recv` waits for the senders' words; `send` waits for those who read what was in the slot before, which has a lower
number or is of an earlier step. Whoever waits so waits for something earlier in the one order of the plan's transfers,
so no parts wait in a circle.

What parts send that do nothing else (`Plan.senders`) a thread of the worker sends, through slots and words of its own
(`sending`). The other parts wait before they commit until all of it has been sent: a worker that fails in such a part
says so before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import torch

from monarch.compiler.plan import Plan
from monarch.compiler.plan.transfers import Route
from monarch.runtime.collectives.meeting import Meetings
from monarch.runtime.collectives.sending import FIRST_SLOT, Sent
from monarch.runtime.shared import signals
from monarch.runtime.shared.large import new_block
from monarch.runtime.shared.window import AREAS, BACK_SLOTS, SLOTS


class Transfers:
    """One worker's sends and receives in a plan of several parts. `ranks[p]` are the workers of part p, in order."""

    def __init__(self, at: Meetings, plan: Plan, part: int, ranks: Sequence[Sequence[int]]) -> None:
        self._at, self._plan, self._part, self._ranks = at, plan, part, ranks
        self._me = ranks[part].index(at.rank)
        self._everyone = [rank for own in ranks for rank in own]
        self._senders = [rank for number in sorted(plan.senders) for rank in ranks[number]]
        ends = [
            max((_end(route, plan, number) for route in plan.routes(number)), default=0)
            for number in range(len(plan.transfers))
        ]
        self._first = [0, *accumulate(-(-end // at.area) for end in ends)]
        self.last = self._first[-1] + 1
        """The number by which a part that only sends says that it has sent all."""

    def await_senders(self) -> None:
        """Wait until the parts that only send have sent all. Raises Aborted where any of their workers has failed."""
        for rank in self._senders:
            self._at.await_sent(rank, self.last, self._everyone, signals.BACK_SENT)
        if self._senders:
            self._at.took(self.last, self._senders, signals.BACK_TOOK)

    def send(self, number: int) -> Callable[[torch.Tensor], tuple[()]]:
        """Gives what puts this worker's blocks of a transfer where others read them."""
        at, transfer = self._at, self._plan.transfers[number]
        targets, dtype, apart = self._ranks[transfer.target], transfer.sent.dtype, self._part in self._plan.senders
        routes = [route for route in self._plan.routes(number) if route.source == self._me]
        pieces = [
            (
                self._first[number] + piece + 1,
                [
                    route
                    for route in {route.at: route for route in routes}.values()
                    if _is_in(route, piece, at.area, dtype)
                ],
                tuple(dict.fromkeys(targets[each.target] for each in routes if _is_in(each, piece, at.area, dtype))),
            )
            for piece in range(-(-max((_end(route, self._plan, number) for route in routes), default=0) // at.area))
        ]

        def put(event: int, blocks: Sequence[Route], tensor: torch.Tensor, base: int) -> int:
            """Write a piece, and give the bytes that it takes."""
            start, end = (event - self._first[number] - 1) * at.area, 0
            for route in blocks:
                for offset, part in _in_piece(_part(tensor, route.start, route), route.at, start, at.area):
                    at.window.view(base + offset, part.shape, dtype).copy_(part)
                    end = offset + part.nbytes
            return end

        def run(tensor: torch.Tensor) -> tuple[()]:
            for event, blocks, readers in pieces:
                base = at.base(at.rank, AREAS + event % SLOTS)
                at.reclaim_slot(event % SLOTS, self._everyone)
                at.sent(event % SLOTS, event, readers, base, put(event, blocks, tensor, base))
            return ()

        beside = [Sent(event, readers, partial(put, event, blocks)) for event, blocks, readers in pieces]

        def run_beside(tensor: torch.Tensor) -> tuple[()]:
            at.sending.add(tensor, beside)
            return ()

        return run_beside if apart else run

    def recv(self, number: int, shape: Sequence[int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """Gives what copies this worker's block of a transfer from where others have put it."""
        at, transfer = self._at, self._plan.transfers[number]
        sources = self._ranks[transfer.source]
        apart = transfer.source in self._plan.senders
        first, slots, sent, took = (
            (FIRST_SLOT, BACK_SLOTS, signals.BACK_SENT, signals.BACK_TOOK)
            if apart
            else (AREAS, SLOTS, signals.SENT, signals.TOOK)
        )
        routes = [route for route in self._plan.routes(number) if route.target == self._me]
        whole = sum(math.prod(route.shape) for route in routes) == math.prod(shape)
        pieces = [
            (self._first[number] + piece + 1, own)
            for piece in range(-(-max((_end(route, self._plan, number) for route in routes), default=0) // at.area))
            if (own := [route for route in routes if _is_in(route, piece, at.area, dtype)])
        ]

        def run() -> torch.Tensor:
            out = new_block(shape, dtype) if whole else torch.zeros(tuple(shape), dtype=dtype)
            for event, blocks in pieces:
                start = (event - self._first[number] - 1) * at.area
                senders = tuple(dict.fromkeys(sources[route.source] for route in blocks))
                for sender in senders:
                    at.await_sent(sender, event, self._everyone, sent)
                for route in blocks:
                    base = at.base(sources[route.source], first + event % slots)
                    for offset, part in _in_piece(_part(out, route.into, route), route.at, start, at.area):
                        part.copy_(at.window.view(base + offset, part.shape, dtype))
                at.took(event, senders, took)
            return out

        return run


def _part(tensor: torch.Tensor, start: Sequence[int], route: Route) -> torch.Tensor:
    return tensor[tuple(slice(first, first + size) for first, size in zip(start, route.shape, strict=True))]


def _in_piece(block: torch.Tensor, at: int, start: int, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """What of a block, which lies row-major from byte `at` on, is in the piece of `size` bytes from `start` on: views
    of it, each with where it begins in the piece."""
    low = max(start - at, 0) // block.itemsize
    high = min((start + size - at) // block.itemsize, block.numel())
    offset = at + low * block.itemsize - start
    for part in _stretch(block, low, high):
        yield offset, part
        offset += part.numel() * block.itemsize


def _stretch(block: torch.Tensor, low: int, high: int) -> Iterator[torch.Tensor]:
    """The elements of a block from number `low` to `high` in row-major order, as few views."""
    if low == 0 and high == block.numel():
        yield block
        return
    row = block[0].numel()
    first, last = -(-low // row), high // row
    if first > last:  # within one row
        yield from _stretch(block[last], low - last * row, high - last * row)
        return
    if low < first * row:
        yield from _stretch(block[first - 1], low - (first - 1) * row, row)
    if first < last:
        yield block[first:last]
    if last * row < high:
        yield from _stretch(block[last], 0, high - last * row)


def _end(route: Route, plan: Plan, number: int) -> int:
    return route.at + math.prod(route.shape) * plan.transfers[number].sent.dtype.itemsize


def _is_in(route: Route, piece: int, size: int, dtype: torch.dtype) -> bool:
    """Whether some of a block is in a piece of so many bytes."""
    return route.at < (piece + 1) * size and route.at + math.prod(route.shape) * dtype.itemsize > piece * size
