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

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from monarch.compiler.plan import MeshSpec
from monarch.runtime.collectives.sending import Sending
from monarch.runtime.shared import futex, signals
from monarch.runtime.shared.signals import LINE, STEP_BITS, Aborted, Signals, Stopped, TimedSignals
from monarch.runtime.shared.window import AREAS, SLOTS, Window

if TYPE_CHECKING:  # workers on one host need neither it nor the transports below it
    from monarch.runtime.collectives.mirror import Mirror

Tensors = list[torch.Tensor]
Collective = Callable[[Sequence[torch.Tensor]], Tensors]

_LEAD_ABOVE = 4
_JOINT = 1 << STEP_BITS - 1  # more events than any part of a plan has before


class Group:
    """The workers of one collective, and this worker's place among them.

    `hosts` are the other hosts that some of them are on, and `host_of` gives each rank's if it is another. Where there
    are any, everyone looks at everyone: a word from the leader would say nothing of the bytes that others have sent.
    `by_host` are the ranks of one host after the other, or nothing where hosts take turns in the group's order or have
    different numbers of its workers.
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
        self.by_host = (ranks,) if mirror is None else mirror.by_host(ranks)


class Meetings:
    """One worker's side of the rounds of its mesh's collectives, whichever workers take part in them.

    Workers that run a step count its events alike, from the step's number on, and those that it is not for count none.
    So any of the workers may meet in a step, and others in the next.
    """

    def __init__(self, mesh: MeshSpec, rank: int, window: Window, mirror: Mirror | None = None) -> None:
        self.workers = mesh.workers
        self.rank = rank
        self.window = window
        self.mirror = mirror
        self.signals = self._signals()
        self.area = window.geometry.area
        self.here = range(mesh.workers) if mirror is None else mirror.here
        self._at = 0
        self._area = 0
        self._readers: list[tuple[tuple[int, ...], int]] = [((), 0)] * AREAS
        self._slots: list[tuple[tuple[int, ...], int]] = [((), 0)] * SLOTS
        self.sending = Sending(window, rank, mirror)
        self.verdict: Callable[[int], bool] = lambda step: False
        """Waits for the answer whether other workers have passed the commit of a step, where a worker died
        meanwhile."""
        self.leaving: list[Callable[[int], None]] = []
        """Each ends what else peers may wait in for this worker, which has said that it fails a step."""

    # -- steps -----------------------------------------------------------------------------------------------------

    @property
    def step(self) -> int:
        return self._at >> STEP_BITS

    def begin(self, step: int) -> None:
        self._at = step << STEP_BITS
        self._area = step % 2  # not where the last step left off: if it failed, that is not the same place everywhere

    def fail(self, step: int, peers: Collection[int]) -> None:
        """Give up the step: tell the peers that it is for, and wait until each of them has finished or given it up as
        well."""
        words = self.signals.words
        if self._at >> STEP_BITS != step:  # it failed before it began
            self.begin(step)
        self.signals.store(LINE * (1 + self.rank), self._at | 1)
        for leave in self.leaving:
            leave(step)
        if self.mirror is not None:
            self._fail_across(self.mirror, step)
        for rank in self.here:
            if rank == self.rank or rank not in peers:
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
        if not words[signals.DEAD]:  # or else somebody may still ask whether this worker came to the commit
            self.signals.store(LINE * (1 + self.rank), (step + 1) << STEP_BITS)

    def _fail_across(self, mirror: Mirror, step: int) -> None:
        """The part of `fail` that concerns other hosts. How far workers there are, this one does not see: the hosts
        tell the controller when all of theirs are over with the step, and it releases those that stand still."""
        mirror.give_up(self._at | 1)
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
        self.signals = timed = TimedSignals(self._signals(), clock)
        return lambda: timed.waited

    def time_no_waits(self) -> None:
        self.signals = self._signals()

    def _signals(self) -> Signals:
        made = self.window.signals()
        if self.mirror is not None:  # what comes is written by a thread of this process, which yielding would hold up
            made.yielding = 0
        return made

    # -- workers that are behind -----------------------------------------------------------------------------------

    def passed(self, command: int, ranks: Iterable[int] | None = None) -> bool:
        """Whether all workers of the mesh, or these, have finished the commands before this one, as far as is known
        here."""
        words = self.signals.words
        if words[signals.PASSED] >= command:
            return True
        for rank in range(self.workers) if ranks is None else ranks:
            line = LINE * (1 + rank)
            if words[line + signals.DONE] < command and (
                rank in self.here or words[line + signals.PROGRESS] >> STEP_BITS < command
            ):
                return False
        return True

    def await_passed(self, command: int, ranks: Iterable[int] | None = None) -> bool:
        """Wait until `passed`. False where a worker has died first."""
        ranks = range(self.workers) if ranks is None else tuple(ranks)
        words = self.signals.words

        def check(seen: int) -> None:
            if words[signals.DEAD] or self.passed(command, ranks):
                raise _Ended

        self.announce()
        try:
            for rank in ranks:
                if rank in self.here:
                    self.signals.wait(signals.line_of(rank) + signals.DONE, command, check)
            if not self.passed(command, ranks):  # those on other hosts say nothing of it: the controller does
                line = signals.line_of(self.rank)
                words[line + signals.BEHIND] = command
                futex.fence()
                futex.wake(self.signals.address + 8 * (line + signals.DONE))  # where the host's listener looks
                self.signals.wait(signals.PASSED, command, check)
        except _Ended:
            pass
        return self.passed(command, ranks)

    # -- rounds ----------------------------------------------------------------------------------------------------

    def next_area(self) -> int:
        """The number of the area for the next round, once nobody reads it any more: two take turns."""
        area = self._area = (self._area + 1) % 2
        self.reclaim(area)
        return area

    def reclaim(self, area: int) -> None:
        readers, event = self._readers[area]
        words = self.signals.words
        for rank in readers:
            if words[LINE * (1 + rank)] < event:
                self._wait_reader(rank, event)

    def _wait_reader(self, rank: int, event: int) -> None:
        self.announce()
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

    def is_stopped(self, step: int) -> bool:
        """Whether the controller was interrupted, and wants this step given up."""
        words = self.signals.words
        return step < words[signals.STOPPED] and step >= words[signals.STOP_FROM]  # the first is rarely so

    def halt(self) -> None:
        """Raises Stopped where it wants the step under way given up."""
        if self.is_stopped(self.step):
            raise Stopped(self.rank)

    def look(self, ranks: Iterable[int]) -> None:
        """Raises Aborted where one of these workers has failed this step, or any has died: for ops that compute long
        without a collective."""
        words = self.signals.words
        if words[signals.DEAD]:
            raise Aborted(words[signals.DEAD] - 1, died=True)
        for rank in ranks:
            progress = words[LINE * (1 + rank)]
            if progress & 1 and progress >> STEP_BITS == self.step:
                raise Aborted(rank, died=False)

    def meet(self, group: Group) -> None:
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

    def arrive(self, hosts: Sequence[int]) -> int:
        """Say that this worker has come, also to those other `hosts`; gives the event's number."""
        self._at = arrive = self._at + 2
        self.signals.store(LINE * (1 + self.rank), arrive)
        if hosts and self.mirror is not None:
            self.mirror.tell(hosts, arrive)
        return arrive

    def until(self, ranks: Sequence[int], event: int, group: Group) -> None:
        """Wait until `ranks` have come to an earlier event."""
        words = self.signals.words
        for rank in ranks:
            if words[LINE * (1 + rank)] < event:
                self._await(self.signals.wait_for_peer, rank, event, group.peers)

    def skip_meeting(self) -> None:
        """In place of a meeting that others have."""
        self._at += 4

    def skip_rounds(self, count: int) -> None:
        """In place of rounds in which others write, meet, and read."""
        self._at += 6 * count
        self._area = (self._area + count) % 2

    def lend(self, area: int, readers: Sequence[int]) -> None:
        """`readers` may read this area of ours until they come to the event that this worker has just come to."""
        self._readers[area] = (tuple(readers), self._at)

    def _await(self, wait: Callable[[int, int, Sequence[int]], None], rank: int, event: int, group: Any) -> None:
        self.announce()
        try:
            wait(rank, event, group)
        except Aborted:
            self._at = self.signals.words[LINE * (1 + self.rank)]  # the former answer stands
            raise

    def came(self, sources: Sequence[int], hosts: Sequence[int] = ()) -> None:
        """Say that this worker has come, also to those other `hosts`, and wait for `sources` alone."""
        arrive = self.arrive(hosts)
        self._at = arrive + 2
        for rank in sources:
            self._await(self.signals.wait_for_peer, rank, arrive, (rank,))

    def read(self, readers: Sequence[int], *areas: int, hosts: Sequence[int] = ()) -> None:
        """Note that this worker has read all that it needs of the round, of workers on `hosts` among others; `readers`
        read `areas` of its own."""
        self._at = done = self._at + 2
        self.signals.store(LINE * (1 + self.rank), done)
        if hosts and self.mirror is not None:
            self.mirror.owe(hosts)
        for area in areas:
            self._readers[area] = (tuple(readers), done)

    def announce(self) -> None:
        if self.mirror is not None:
            self.mirror.announce(self.signals.words[LINE * (1 + self.rank)])

    def announcing(self, run: Collective) -> Collective:
        """A collective that, at its end, sends this worker's progress to other hosts: their workers may write there
        again at once."""
        if self.mirror is None:
            return run

        def announced(tensors: Sequence[torch.Tensor]) -> Tensors:
            outs = run(tensors)
            self.announce()
            return outs

        return announced

    def share(self, hosts: Sequence[int], offset: int, size: int) -> None:
        """The workers of those other hosts have read the area."""
        if hosts and size and self.mirror is not None:
            self.mirror.write(hosts, offset, size)

    def join(self) -> None:
        """From here on all parts of the step's plan count events alike, however many each has had."""
        self._at = self.step << STEP_BITS | _JOINT

    # -- between the parts of a plan (see `transfers`) -------------------------------------------------------------

    def sent(self, slot: int, piece: int, readers: tuple[int, ...], hosts: Sequence[int]) -> None:
        """`readers`, also those on other `hosts`, may read a piece that this worker has put into a slot."""
        event = self.step << STEP_BITS | piece
        self.signals.store(signals.line_of(self.rank) + signals.SENT, event)
        if self.mirror is not None:
            self.mirror.tell(hosts, event, signals.SENT)
        self._slots[slot] = readers, event

    def took(self, piece: int, senders: Sequence[int], word: int = signals.TOOK) -> None:
        """This worker has read its part of a piece."""
        event = self.step << STEP_BITS | piece
        self.signals.store(signals.line_of(self.rank) + word, event)
        if self.mirror is not None and (hosts := self.mirror.hosts_of(senders)):
            self.mirror.tell(hosts, event, word)

    def await_sent(self, rank: int, piece: int, everyone: Sequence[int], word: int = signals.SENT) -> None:
        """Wait until a worker has sent a piece. Raises Aborted where any of `everyone`, who run the step, has failed
        it, or a worker has died."""
        self._await_word(signals.line_of(rank) + word, self.step << STEP_BITS | piece, everyone, rank)

    def reclaim_slot(self, slot: int, everyone: Sequence[int]) -> None:
        """Wait until no worker reads the former content of a slot any more. Raises as `await_sent` does."""
        readers, event = self._slots[slot]
        for rank in readers:
            self._await_word(signals.line_of(rank) + signals.TOOK, event, everyone, rank)

    def _await_word(self, index: int, event: int, everyone: Sequence[int], rank: int) -> None:
        words = self.signals.words
        if words[index] >= event:
            return
        self.announce()

        def check(seen: int) -> None:
            if words[signals.DEAD]:
                raise Aborted(words[signals.DEAD] - 1, died=True)
            progress = words[signals.line_of(rank)] >> STEP_BITS
            if event >> STEP_BITS < self.step and (words[signals.line_of(rank)] & 1 or progress > event >> STEP_BITS):
                raise _Ended  # it failed that step, and reads no more of it
            try:
                self.look(everyone)
            except Aborted:
                if words[index] < event:
                    raise

        try:
            self.signals.wait(index, event, check)
        except _Ended:
            pass

    def base(self, rank: int, area: int) -> int:
        return self.window.geometry.area_of(rank, area)


class _Ended(Exception):
    """The worker that was waited for will not come any more, and need not."""
