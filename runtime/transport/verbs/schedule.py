"""Which requests may be sent when, over one reliable connection: pure, no device and no clock.

Jobs are done in the order in which they come. A job is cut into requests of at most `max_message` bytes; a put's last
one is the message with its signal. A job waits where:

- All `sends` places of the send queue are taken. They are freed by completions, and only a request that is *signaled*
  makes one, which then stands for all before it. Signaled are the last request of a job that a thread waits for, and
  every `sends // 4`-th.
- The peer has no receive for the message. Each side posts `2 * credits` receives. Half are for messages with signals:
  at most `credits` more are sent than the peer has dealt with. Every message of the other direction says how many those
  are, and so does a message of its own once half of the credits are owed, or the peer waits to hear that its signal was
  stored. Each such message answers one or more that the peer does not know to be dealt with, so the other half of the
  receives is enough for them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any


@dataclass(eq=False)
class RemoteRegion:
    """A region of the peer: `size` bytes, the first of which its device knows as `address`.

    `error`      why it may not be used any more
    `under_way`  how many requests have been given out for it and are not known to have ended
    """

    number: int
    address: int
    remote_key: int
    size: int
    writable: bool
    words: bool
    error: Exception | None = None
    under_way: int = 0


@dataclass(eq=False)
class OneSidedOp:
    """A put or a get of `size` bytes at `offset` of a region.

    `address`, `key`  the local memory; `key` is None where its bytes are copied when they are sent
    `word`            the signal's region, the word's byte there, and its value
    `awaited`         whether a thread waits for the end
    `data`            the transport's own
    """

    reach: RemoteRegion
    write: bool
    address: int
    key: int | None
    size: int
    offset: int
    word: tuple[RemoteRegion, int, int] | None = None
    awaited: bool = True
    data: Any = None
    error: Exception | None = None
    started: int = 0
    """Bytes that have requests."""


@dataclass(frozen=True)
class Request:
    """A request to post, of the kind `what`:

    "move"     `size` bytes of the job, from byte `start`
    "message"  the job's word, and how many messages were `consumed` here; the peer is to `confirm` it
    "credits"  how many were consumed
    "flush"    nothing, but it has a completion
    """

    number: int
    what: str
    signaled: bool
    job: OneSidedOp | None = None
    last: bool = False
    start: int = 0
    size: int = 0
    consumed: int = 0
    confirm: bool = False


class Schedule:
    def __init__(self, sends: int, credits: int, max_message: int) -> None:
        self._credits = credits
        self._max_message = max_message
        self._every = sends // 4
        self._jobs: deque[OneSidedOp] = deque()
        self._flying: deque[Request] = deque()
        self._free = sends
        self._next = 0
        self._silent = 0  # requests since the last signaled one
        self._messages = 0  # given out
        self._may_send = credits  # in all
        self._confirming: deque[tuple[int, OneSidedOp]] = deque()
        self._consumed = 0
        self._said = 0  # of these, to the peer
        self._owes_answer = False
        self._flush = False
        self._ready = False

    # -- what happens ----------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """The peer's end of the connection is made: nothing is sent before."""
        self._ready = True

    def announce(self) -> None:
        """Both ends are made, which the peer cannot know: tell it."""
        self._ready = self._owes_answer = True

    def add(self, job: OneSidedOp) -> None:
        self._jobs.append(job)

    def completed(self, number: int) -> list[OneSidedOp]:
        """The device has finished this request, and so all before it. Gives the jobs that end with that."""
        ended = []
        while self._flying and self._flying[0].number <= number:
            request = self._flying.popleft()
            self._free += 1
            job = request.job
            if job is None:
                continue
            for reach in _regions(job, request):
                reach.under_way -= 1
            if request.last and not (job.word is not None and job.awaited):
                ended.append(job)
        return ended

    def heard(self, consumed: int) -> list[OneSidedOp]:
        """The peer has dealt with so many messages in all. Gives the jobs that end with that."""
        self._may_send = max(self._may_send, consumed + self._credits)
        ended = []
        while self._confirming and self._confirming[0][0] <= consumed:
            ended.append(self._confirming.popleft()[1])
        return ended

    def dealt(self, confirm: bool) -> None:
        """A message of the peer's was dealt with, which it perhaps waits to hear."""
        self._consumed += 1
        self._owes_answer |= confirm

    def drop(self, reach: RemoteRegion, error: Exception) -> None:
        """Nothing more is to be sent for this region. Once its `under_way` is 0, nothing is."""
        reach.error = error
        self.flush()

    def flush(self) -> None:
        """See to it that all requests complete, also those that no thread waits for."""
        if self._flying and not self._flying[-1].signaled:
            self._flush = True

    @property
    def idle(self) -> bool:
        return not self._jobs and not self._flying

    @property
    def waiting(self) -> int:
        """How many jobs wait for their turn."""
        return len(self._jobs)

    def unfinished(self) -> list[OneSidedOp]:
        """All jobs, at the end of the connection."""
        flying = [request.job for request in self._flying if request.job is not None and request.last]
        confirming = [job for _, job in self._confirming]
        return list({id(job): job for job in (*confirming, *flying, *self._jobs)}.values())

    # -- what follows ----------------------------------------------------------------------------------------------

    def next(self) -> tuple[list[Request], list[OneSidedOp]]:
        """The requests to post now, in this order; and the jobs that have ended: with an `error`, or because they had
        nothing to send."""
        requests: list[Request] = []
        ended: list[OneSidedOp] = []
        if not self._ready:
            return requests, ended
        if (self._owes_answer or self._consumed - self._said >= self._credits // 2) and self._free:
            self._give(requests, "credits", consumed=self._say())
        while self._jobs:
            job = self._jobs[0]
            job.error = job.reach.error or (job.word[0].error if job.word is not None else None)
            if job.error is None and not self._advance(job, requests):
                break
            self._jobs.popleft()
            if job.error is not None or (not job.size and job.word is None):
                ended.append(job)
        if self._flush and self._free:
            self._flush = False
            if self._flying and not self._flying[-1].signaled:
                self._give(requests, "flush", signaled=True)
        return requests, ended

    def _advance(self, job: OneSidedOp, requests: list[Request]) -> bool:
        """Send as much of the first job as can be sent. Gives whether that was all."""
        while job.started < job.size:
            if not self._free:
                return False
            size = min(self._max_message, job.size - job.started)
            last = job.started + size == job.size and job.word is None
            self._give(requests, "move", job, last, signaled=last and job.awaited, start=job.started, size=size)
            job.started += size
        if job.word is not None:
            if not self._free or self._messages == self._may_send:
                return False
            self._messages += 1
            if job.awaited:
                self._confirming.append((self._messages, job))
            self._give(requests, "message", job, True, consumed=self._say(), confirm=job.awaited)
        return True

    def _say(self) -> int:
        self._said, self._owes_answer = self._consumed, False
        return self._consumed

    def _give(
        self,
        requests: list[Request],
        what: str,
        job: OneSidedOp | None = None,
        last: bool = False,
        signaled: bool = False,
        start: int = 0,
        size: int = 0,
        consumed: int = 0,
        confirm: bool = False,
    ) -> None:
        signaled = signaled or self._silent + 1 >= self._every
        self._silent = 0 if signaled else self._silent + 1
        request = Request(self._next, what, signaled, job, last, start, size, consumed, confirm)
        self._next += 1
        self._free -= 1
        self._flying.append(request)
        if job is not None:
            for reach in _regions(job, request):
                reach.under_way += 1
        requests.append(request)


def _regions(job: OneSidedOp, request: Request) -> tuple[RemoteRegion, ...]:
    """Those that a request needs."""
    if request.what == "move":
        return (job.reach,)
    assert job.word is not None
    return (job.word[0],)
