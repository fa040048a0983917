"""Two schedules joined by a made-up device: whatever the order of events, nothing overflows, and all jobs end."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.runtime.transport.interface import AccessRefused
from monarch.runtime.transport.verbs.schedule import OneSidedOp, RemoteRegion, Request, Schedule

SENDS, CREDITS, LARGEST = 12, 4, 10


class Side:
    """One end: its schedule, what it has posted, and what has arrived. Checks what a device would refuse."""

    def __init__(self) -> None:
        self.schedule = Schedule(SENDS, CREDITS, LARGEST)
        self.posted: deque[Request] = deque()
        self.queued: deque[int] = deque()  # the send queue: what was posted and is not known to be complete
        self.receives = 2 * CREDITS
        self.inbox: deque[Request] = deque()
        self.stored: list[int] = []
        self.written: list[tuple[int, int, int]] = []
        self.ended: list[OneSidedOp] = []
        self.completions: deque[int] = deque()

    def advance(self) -> None:
        requests, ended = self.schedule.next()
        self.ended += ended
        for request in requests:
            assert request.size <= LARGEST
            self.queued.append(request.number)
            assert len(self.queued) <= SENDS, "more requests than the send queue has places for"
            self.posted.append(request)

    def carry_out(self, peer: Side) -> None:
        request = self.posted.popleft()
        if request.what in ("message", "credits"):
            assert peer.receives > 0, "the peer has no receive for a message"
            peer.receives -= 1
            peer.inbox.append(request)
        elif request.what == "move":
            assert request.job is not None
            peer.written.append((request.job.offset, request.start, request.size))
        if request.signaled:
            self.completions.append(request.number)

    def complete(self) -> None:
        number = self.completions.popleft()
        while self.queued and self.queued[0] <= number:
            self.queued.popleft()
        self.ended += self.schedule.completed(number)

    def take(self) -> None:
        request = self.inbox.popleft()
        self.receives += 1
        self.schedule.ready()
        self.ended += self.schedule.heard(request.consumed)
        if request.what == "message":
            assert request.job is not None and request.job.word is not None
            self.stored.append(request.job.word[2])
            self.schedule.dealt(request.confirm)


def step(sides: list[Side], which: int, what: int) -> bool:
    """Let something happen, if it can."""
    side, peer = sides[which], sides[1 - which]
    if what == 0 and side.posted:
        side.carry_out(peer)
    elif what == 1 and side.completions:
        side.complete()
    elif what == 2 and side.inbox:
        side.take()
    elif what != 3:
        return False
    side.advance()
    return True


def settle(sides: list[Side]) -> None:
    """Let everything happen that can."""
    while any(step(sides, which, what) for which in (0, 1) for what in (0, 1, 2)):
        pass


def region(number: int = 1, **fields: int) -> RemoteRegion:
    return RemoteRegion(number, address=0, remote_key=7, size=1000, writable=True, words=True, **fields)


def put(
    number: int, size: int, signal: bool = False, awaited: bool = True, reach: RemoteRegion | None = None
) -> OneSidedOp:
    """`number` tells it from others."""
    reach = reach or region()
    return OneSidedOp(reach, True, 0, 5, size, number, (reach, 0, number) if signal else None, awaited)


def pair() -> list[Side]:
    sides = [Side(), Side()]
    sides[0].schedule.announce()
    sides[0].advance()
    return sides


jobs = st.tuples(st.integers(0, 1), st.sampled_from([0, 1, 10, 11, 95]), st.booleans(), st.booleans())
events = st.tuples(st.integers(0, 1), st.integers(0, 3))


@given(st.lists(st.one_of(jobs, events), max_size=150))
def test_nothing_overflows_and_everything_ends_in_order(history: list[tuple[int, ...]]) -> None:
    sides = pair()
    given: list[list[OneSidedOp]] = [[], []]
    for entry in history:
        if len(entry) == 2:
            step(sides, *entry)
        else:
            which, size, signal, awaited = entry
            job = put(len(given[which]), size, bool(signal), bool(awaited))
            given[which].append(job)
            sides[which].schedule.add(job)
            sides[which].advance()
    settle(sides)
    for side in sides:
        side.schedule.flush()
        side.advance()
    settle(sides)
    for which, side in enumerate(sides):
        assert side.schedule.idle and not side.schedule.unfinished()
        assert sorted(job.offset for job in side.ended) == [job.offset for job in given[which]]
        moved = [
            (job.offset, start, min(LARGEST, job.size - start))
            for job in given[which]
            for start in range(0, job.size, LARGEST)
        ]
        assert sides[1 - which].written == moved
        assert sides[1 - which].stored == [job.offset for job in given[which] if job.word is not None]
        assert all(job.reach.under_way == 0 for job in given[which])


def test_the_side_that_was_connected_first_waits_until_the_other_is() -> None:
    first, second = Side(), Side()
    first.schedule.add(put(0, 5))
    first.advance()
    assert not first.posted
    second.schedule.announce()
    second.advance()
    second.carry_out(first)
    first.take()
    first.advance()
    assert [request.what for request in first.posted] == ["move"]


def test_no_more_messages_than_the_peer_has_receives_for() -> None:
    side, peer = pair()
    for number in range(3 * CREDITS):
        side.schedule.add(put(number, 0, signal=True, awaited=False))
    side.advance()
    while side.posted:
        side.carry_out(peer)
        side.advance()
        while side.completions:
            side.complete()
            side.advance()
    assert len([request for request in peer.inbox if request.what == "message"]) == CREDITS
    settle([side, peer])
    assert peer.stored == list(range(3 * CREDITS))


def test_credits_are_given_back_also_where_a_jobs_signal_waits_for_credits_itself() -> None:
    sides = pair()
    for side in sides:
        for number in range(5 * CREDITS):
            side.schedule.add(put(number, 30, signal=True))
        side.advance()
    settle(sides)
    assert [side.stored for side in sides] == [list(range(5 * CREDITS))] * 2
    assert all(len(side.ended) == 5 * CREDITS for side in sides)


def test_a_put_with_a_signal_ends_only_when_the_signal_is_stored() -> None:
    side, peer = pair()
    settle([side, peer])
    side.schedule.add(put(0, 5, signal=True))
    side.advance()
    while side.posted:
        side.carry_out(peer)
    while side.completions:
        side.complete()
    assert not side.ended
    settle([side, peer])
    assert [job.offset for job in side.ended] == [0]


def test_what_nobody_waits_for_is_seldom_completed_and_a_flush_completes_it() -> None:
    side, peer = pair()
    settle([side, peer])
    side.schedule.add(put(0, 5, awaited=False))
    side.advance()
    side.carry_out(peer)
    assert not side.completions and not side.schedule.idle
    side.schedule.flush()
    settle([side, peer])
    side.advance()
    settle([side, peer])
    assert side.schedule.idle and [job.offset for job in side.ended] == [0]


def test_jobs_for_a_region_that_is_dropped_end_with_its_error_and_others_go_on() -> None:
    side, peer = pair()
    settle([side, peer])
    gone, kept = region(1), region(2)
    large = put(0, 400, reach=gone)
    for job in (large, put(1, 5, reach=gone), put(2, 5, reach=kept)):
        side.schedule.add(job)
    side.advance()
    assert gone.under_way
    side.schedule.drop(gone, AccessRefused("dropped"))
    side.advance()
    settle([side, peer])
    assert gone.under_way == 0
    assert {job.offset: type(job.error) for job in side.ended} == {0: AccessRefused, 1: AccessRefused, 2: type(None)}
    assert sum(size for offset, _, size in peer.written if offset == 0) < 400


def test_a_full_send_queue_holds_back_what_is_said_out_of_turn() -> None:
    side, peer = pair()
    settle([side, peer])
    side.schedule.add(put(0, LARGEST * SENDS))
    side.advance()
    assert len(side.queued) == SENDS
    peer.schedule.add(put(0, 0, signal=True))
    peer.advance()
    peer.carry_out(side)
    side.take()
    side.advance()
    settle([side, peer])
    assert [job.offset for job in side.ended] == [0] and [job.offset for job in peer.ended] == [0]


@pytest.mark.parametrize("flying", [False, True])
def test_at_the_end_of_a_connection_every_job_is_known(flying: bool) -> None:
    side, _ = pair()
    jobs = [put(0, 300), put(1, 5, signal=True), put(2, 0, signal=True, awaited=False), put(3, 5)]
    for job in jobs:
        side.schedule.add(job)
        if flying:
            side.advance()
    assert sorted(job.offset for job in side.schedule.unfinished()) == [0, 1, 2, 3]
