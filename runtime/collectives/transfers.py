"""Transfers between the parts of one plan, through windows.

Each worker that sends puts its blocks, in the order that `Plan.routes` gives them, into two slots of its window that no
collective uses, and the readers copy them from there. Transfers larger than a slot go in pieces. All pieces of a plan
are numbered: piece p of transfer k is number G(k) + p, where G(k) counts those of the transfers before it, as many as
its largest sender has; so all workers know every number without counting rounds. A piece lies in the slot of its
number's parity. A worker raises two words, which begin with the step's number as its progress does:

    sent    the last piece that it has put into its window
    took    the last piece that it has read, of whichever workers

`recv` waits for the senders' words; `send` waits for those who read what was in the slot before, which has a lower
number or is of an earlier step. Whoever waits so waits for something earlier in the one order of the plan's transfers,
so no parts wait in a circle.

To other hosts a piece goes straight from the value, over transports that take any memory; and one that a single worker
sends to a single one on its counterpart's host is received into the result, where that is waiting for it by then. What
is sent so beside the steps goes as several pieces at once, whose slots lie one behind the other.

What parts send that do nothing else (`Plan.senders`) a thread of the worker sends, through slots and words of its own
(`sending`). The other parts wait before they commit until all of it has been sent: a worker that fails in such a part
says so before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import torch

from monarch.compiler.plan import Plan
from monarch.compiler.plan.transfers import Route
from monarch.runtime.collectives.meeting import Meetings
from monarch.runtime.collectives.sending import FIRST_SLOT, Sent, put
from monarch.runtime.shared import signals
from monarch.runtime.shared.bits import ArrivingSum
from monarch.runtime.shared.large import new_block
from monarch.runtime.shared.signals import STEP_BITS
from monarch.runtime.shared.window import AREAS, BACK_SLOTS, SLOTS

if TYPE_CHECKING:  # see `meeting`
    from monarch.runtime.collectives.mirror import Mirror

_REPORTED_AT_ONCE = BACK_SLOTS // 2
"""Pieces that come beside the steps, whose readers say together that they have read them, and that go to other hosts
together: a frame costs its two processes some 200 µs of Python, as much as half of its bytes' way."""


class _Pieces(NamedTuple):
    """A piece, or several in consecutive slots: the numbers of the first and the last, the blocks that have elements in
    them, and the workers that read them, or have sent them."""

    first: int
    last: int
    blocks: tuple[Route, ...]
    peers: tuple[int, ...]


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
        targets, apart = self._ranks[transfer.target], self._part in self._plan.senders
        routes = [route for route in self._plan.routes(number) if route.source == self._me]
        pieces = self._pieces(number, routes, lambda route: targets[route.target])

        def parts(own: _Pieces, tensor: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
            """The parts of the value in some pieces, each with its offset there."""
            start, size = self._bytes(number, own)
            for route in {route.at: route for route in own.blocks}.values():
                yield from _in_piece(_part(tensor, route.start, route), route.at, start, size)

        def run(tensor: torch.Tensor) -> tuple[()]:
            for own in pieces:
                base = at.base(at.rank, AREAS + own.first % SLOTS)
                at.reclaim_slot(own.first % SLOTS, self._everyone)
                hosts = put(at.window, at.mirror, own.peers, base, parts(own, tensor))
                at.sent(own.last % SLOTS, own.last, own.peers, hosts)
            return ()

        beside = [
            Sent(own.first, own.last, own.peers, partial(parts, own))
            for own in _joined(pieces, lambda readers: at.mirror is not None and at.mirror.takes_values(readers))
        ]

        def run_beside(tensor: torch.Tensor) -> tuple[()]:
            at.sending.add(tensor, beside)
            return ()

        return run_beside if apart else run

    def recv(
        self, number: int, shape: Sequence[int], dtype: torch.dtype, total: ArrivingSum | None = None
    ) -> Callable[[], torch.Tensor]:
        """Gives what copies this worker's block of a transfer from where others have put it, and adds up its bits where
        there is a `total` for it."""
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
        straight = self._straight(number)
        pieces = [own for own in self._pieces(number, routes, lambda route: sources[route.source]) if own.blocks]
        if straight and apart:
            pieces = _joined(pieces, lambda senders: True)
        reports = _reports(pieces, _REPORTED_AT_ONCE if apart else 1)

        def parts(own: _Pieces, out: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
            """Where in the window each part of some pieces is, and where in the result it belongs."""
            start, size = self._bytes(number, own)
            for route in own.blocks:
                base = at.base(sources[route.source], first + own.first % slots)
                for offset, part in _in_piece(_part(out, route.into, route), route.at, start, size):
                    yield base + offset, part

        def run() -> torch.Tensor:
            out = new_block(shape, dtype) if whole else torch.zeros(tuple(shape), dtype=dtype)
            arriving = Arriving(at.mirror if straight else None, at.step)
            if total is not None:
                total.begin()
            try:
                for own in pieces[:slots]:
                    arriving.expect(own.last, parts(own, out))
                for place, own in enumerate(pieces):
                    for sender in own.peers:
                        at.await_sent(sender, own.last, self._everyone, sent)
                    if not arriving.is_in_place(own.last):
                        for offset, part in parts(own, out):
                            part.copy_(at.window.view(offset, part.shape, dtype))
                    if own.last in reports:
                        at.took(own.last, reports[own.last], took)
                    if total is not None:
                        for _, part in parts(own, out):
                            total.add(part)
                    for later in pieces[place + slots : place + slots + 1]:
                        arriving.expect(later.last, parts(later, out))
            finally:
                arriving.forget()
            return out

        return run

    def _pieces(self, number: int, routes: Sequence[Route], peer: Callable[[Route], int]) -> list[_Pieces]:
        """The pieces of these routes, one by one, each with the peers of its blocks; and empty ones between them."""
        size, dtype = self._at.area, self._plan.transfers[number].sent.dtype
        found = []
        for piece in range(-(-max((_end(route, self._plan, number) for route in routes), default=0) // size)):
            blocks = tuple(route for route in routes if _is_in(route, piece, size, dtype))
            event = self._first[number] + piece + 1
            found.append(_Pieces(event, event, blocks, tuple(dict.fromkeys(peer(route) for route in blocks))))
        return found

    def _bytes(self, number: int, pieces: _Pieces) -> tuple[int, int]:
        """Where in the transfer's place some pieces begin, and how many bytes there are of them."""
        area = self._at.area
        return (pieces.first - self._first[number] - 1) * area, (pieces.last - pieces.first + 1) * area

    def _straight(self, number: int) -> bool:
        """Whether the bytes of a transfer can go to their place as they arrive: they are from one worker, this process
        receives them, and no other worker on this host reads them."""
        at, transfer, routes = self._at, self._plan.transfers[number], self._plan.routes(number)
        own = {route.source for route in routes if route.target == self._me}
        if at.mirror is None or len(own) != 1:
            return False
        readers = {self._ranks[transfer.target][route.target] for route in routes if route.source in own}
        return at.mirror.brings(self._ranks[transfer.source][own.pop()]) and readers & set(at.here) == {at.rank}


def _joined(pieces: Sequence[_Pieces], which: Callable[[tuple[int, ...]], bool]) -> list[_Pieces]:
    """As few as may be of the same pieces, where those of the same peers come together and `which` says so of these.
    Both sides find the same ones; where they do not, as some of a sender's readers need less, the bytes wait in the
    window for their readers."""
    found: list[_Pieces] = []
    for each in pieces:
        last = found[-1] if found else None
        if (
            last is not None
            and each.first == last.last + 1
            and each.first // _REPORTED_AT_ONCE == last.first // _REPORTED_AT_ONCE
            and each.peers == last.peers
            and which(each.peers)
        ):
            found[-1] = _Pieces(last.first, each.last, tuple(dict.fromkeys(last.blocks + each.blocks)), each.peers)
        else:
            found.append(each)
    return found


def _reports(pieces: Sequence[_Pieces], together: int) -> dict[int, tuple[int, ...]]:
    """Behind which pieces a reader says how far it has read, and to whom: behind its last of each `together` numbers,
    for a sender has sent all of these before it needs the slot of the first again."""
    found: dict[int, tuple[int, ...]] = {}
    before: dict[int, None] = {}
    for at, own in enumerate(pieces):
        before |= dict.fromkeys(own.peers)
        if at + 1 == len(pieces) or pieces[at + 1].last // together != own.last // together:
            found[own.last], before = tuple(before), {}
    return found


class Arriving:
    """Pieces of a transfer in one step that go to their place as they arrive."""

    def __init__(self, mirror: Mirror | None, step: int) -> None:
        self._mirror, self._step = mirror, step
        self._places: dict[int, int] = {}

    def expect(self, piece: int, parts: Iterable[tuple[int, torch.Tensor]]) -> None:
        """A piece that is not sent yet, as far as this worker knows: in one part, it is received into that."""
        if self._mirror is not None:
            (offset, part), *others = parts
            if not others and part.is_contiguous():
                self._mirror.divert(offset, self._value(piece), part)
                self._places[piece] = offset

    def is_in_place(self, piece: int) -> bool:
        """Whether a piece that has been sent is in its place, and not in the window."""
        offset = self._places.pop(piece, None)
        return self._mirror is not None and offset is not None and self._mirror.undivert(offset, self._value(piece))

    def forget(self) -> None:
        for piece in list(self._places):
            self.is_in_place(piece)

    def _value(self, piece: int) -> int:
        return self._step << STEP_BITS | piece


def _part(tensor: torch.Tensor, start: Sequence[int], route: Route) -> torch.Tensor:
    return tensor[tuple(slice(first, first + size) for first, size in zip(start, route.shape, strict=True))]


def _in_piece(block: torch.Tensor, at: int, start: int, size: int) -> Iterator[tuple[int, torch.Tensor]]:
    """The part of a block, row-major from byte `at` on, that is in the piece of `size` bytes from `start` on: views of
    it, each with its offset in the piece."""
    if block.is_contiguous():
        block = block.view(-1)  # one view, also where it begins or ends within a row
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
