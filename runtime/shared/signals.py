"""How the processes of a mesh tell each other how far they are: words in shared memory, one writer each.

Every worker has two counters that only grow, and that only it writes:

    progress   step << STEP_BITS | event | failed      its place inside a step: peers in a collective wait for it
    done       the number of commands it has finished  the controller waits for it
    over       those that it has finished or given up, where that differs and peers are on other hosts
    sent, took      step << STEP_BITS | piece           the pieces that it has sent to other parts, and read of theirs
    back sent, back took                                likewise, of sends beside the steps that follow
    link messages   handshakes and the like that it has sent to peers on other hosts, as a count
    behind     it waits until all workers, also on other hosts, have finished so many commands

Events count by 2 within a step, and the lowest bit of `progress` says that the worker has failed the step. All workers
run the same instructions, so the same event has the same number everywhere, whichever group of workers it concerns:
to wait for a peer is to wait until its progress reaches one's own number, and a group needs no counter of its own.
Numbers grow from step to step, so nothing has to be reset, also after a failed step. See `collectives` for the rule
that keeps a failed worker from overtaking peers that still wait for it.

There is one writer a word, so no atomic instruction is needed but a fence; a sleeper sets the word's hint first, and a
writer that finds the hint set wakes the sleepers. Sleeps are bounded all the same, so that a lost wake costs
milliseconds and a death is noticed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from time import monotonic_ns

from monarch.runtime.shared import futex

STEP_BITS = 24

# Two cache lines a worker, the second for transfers between parts of a plan; offsets in 8-byte words.
LINE = 16
PROGRESS, PROGRESS_HINT, DONE, DONE_HINT, REPORTS, OVER, LINK_MESSAGES, BEHIND = range(8)
SENT, SENT_HINT, TOOK, TOOK_HINT, BACK_SENT, BACK_SENT_HINT, BACK_TOOK, BACK_TOOK_HINT = range(8, 16)

# The mesh's own line comes first: the ring's head, its hint, 1 + the rank of a worker that died, and how many commands
# all workers of all hosts have finished or given up, which is said only while some stand still after a failure. Last,
# how many they have all finished, which is said only where a worker waits for those that are behind; and the commands
# from which on, and before which, steps are given up that have not passed their commit: the controller was interrupted.
(
    HEAD,
    HEAD_HINT,
    DEAD,
    RELEASED,
    RELEASED_HINT,
    PASSED,
    PASSED_HINT,
    STOPPED,
    STOPPED_HINT,
    STOP_FROM,
    STOP_FROM_HINT,
) = range(11)

_SLEEP = 0.05
_YIELDING = 200_000
"""So many nanoseconds of giving the core to others come before a sleep: about as long as a small step, or as the
controller takes from one to the next. To wake a sleeper costs the waker some 10 µs, and the sleeper several times that.
"""


class Aborted(Exception):
    """A peer failed the step, or died, while this worker waited for it."""

    kind = "aborted"

    def __init__(self, rank: int, died: bool) -> None:
        super().__init__(f"worker {rank} {'died' if died else 'failed'}")
        self.rank = rank
        self.died = died


class Stopped(Aborted):
    """The controller was interrupted, and wants the step given up."""

    kind = "stopped"

    def __init__(self, rank: int) -> None:
        super().__init__(rank, died=False)


def line_of(rank: int) -> int:
    return LINE * (1 + rank)


def size_in_bytes(workers: int) -> int:
    return 8 * LINE * (1 + workers)


def cores() -> int:
    return len(os.sched_getaffinity(0))


class Signals:
    """The words of one mesh, as seen by one process. `words` is its control page as 8-byte integers."""

    def __init__(self, words: memoryview, address: int, workers: int) -> None:
        self.words = words
        self.address = address
        self.workers = workers
        # With a core for every worker, giving it away and looking again saves the cost of sleeping, and of being woken.
        # Yields end when they have taken so long: where others compute on the cores, that is the first.
        self.yielding = 1_000 if workers > cores() else _YIELDING

    # -- waiting ---------------------------------------------------------------------------------------------------

    def store(self, index: int, value: int) -> None:
        """Set a word, and wake the threads that sleep on it."""
        words = self.words
        if not futex.ORDERED:
            futex.fence()
        words[index] = value
        futex.fence()
        if words[index + 1]:
            words[index + 1] = 0
            futex.wake(self.address + 8 * index)

    def advance(self, index: int, value: int) -> None:
        """`store`, but a word that is further on stays: an interrupted call may be made again late."""
        words = self.words
        if not futex.ORDERED:
            futex.fence()
        words[index] = value if value > words[index] else words[index]
        futex.fence()
        if words[index + 1]:
            words[index + 1] = 0
            futex.wake(self.address + 8 * index)

    def wait(self, index: int, target: int, check: Callable[[int], None]) -> None:
        """Return once the word reaches `target`. `check(seen)` is called before each sleep, and raises to give up."""
        self._wait(index, target, check)
        if not futex.ORDERED:
            futex.fence()

    def _wait(self, index: int, target: int, check: Callable[[int], None]) -> None:
        words = self.words
        if words[index] >= target:
            return
        until = monotonic_ns() + self.yielding
        while monotonic_ns() < until:
            os.sched_yield()
            if words[index] >= target:
                return
        while (seen := words[index]) < target:
            check(seen)
            words[index + 1] = 1
            futex.fence()
            if words[index] >= target:
                return
            futex.wait(self.address + 8 * index, seen, _SLEEP)

    # -- one worker's view -----------------------------------------------------------------------------------------

    def wait_for_peer(self, rank: int, target: int, group: Sequence[int]) -> None:
        """Wait until a peer's progress reaches `target`. Raises Aborted once one of `group` has failed the same step,
        or any worker has died. A peer that reached `target` before it failed counts as having reached it."""
        step = target >> STEP_BITS
        words = self.words

        def check(seen: int) -> None:
            if words[DEAD]:
                if words[LINE * (1 + rank)] < target:
                    raise Aborted(words[DEAD] - 1, died=True)
                return
            for peer in group:
                progress = words[LINE * (1 + peer)]
                if progress & 1 and progress >> STEP_BITS == step and words[LINE * (1 + rank)] < target:
                    raise Aborted(peer, died=False)

        self.wait(LINE * (1 + rank), target, check)


class TimedSignals(Signals):
    """Signals that add up how long they waited, by a clock, in `waited`."""

    def __init__(self, like: Signals, clock: Callable[[], int]) -> None:
        super().__init__(like.words, like.address, like.workers)
        self.yielding = like.yielding
        self.waited = 0
        self._clock = clock

    def wait(self, index: int, target: int, check: Callable[[int], None]) -> None:
        start = self._clock()
        try:
            super().wait(index, target, check)
        finally:
            self.waited += self._clock() - start
