"""A link between processes of one host that reaches memory of GPUs: shared memory's link, and copies by the driver.

**Reaching a region on a GPU.** It is asked of its owner once a link, with the region's key, as shared memory's are. Who
may use it gets the IPC handle of the allocation that holds it, and maps that once, however many regions it holds.

**Order.** Copies are launched on streams of the link's own, after what PyTorch had launched on its current stream when
they were asked for, by the link's lane (see `lane`), which waits for their ends without spinning. What else is put
while the lane is busy goes through it too. So what is put arrives in order. A signal's word is in host memory; once the
copy has ended the owner is told to store it.

**What dropping guarantees.** As with shared memory: the owner waits until every peer has ended its copies and closed
its mapping, or is gone. So the memory may be freed afterwards, which CUDA leaves undefined while a peer has it mapped.
A peer that means harm could keep its mapping; a process of the same user could do that anyway.

**When the owner dies** what is under way ends with LinkLost, after the copies have ended one way or the other: until
then they may write to the memory that was given here. CUDA's documentation does not say what such a copy meets; if it
is an error of the whole context, this process's use of that GPU is over as well.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport import buffers
from monarch.runtime.transport.buffers import MemoryRange
from monarch.runtime.transport.cuda import driver, staging
from monarch.runtime.transport.cuda.driver import CudaFailed, CudaStream, Event
from monarch.runtime.transport.cuda.lane import Lane
from monarch.runtime.transport.interface import AccessRefused, LinkLost, Memory, Region, Signal, Work
from monarch.runtime.transport.plug import Owned
from monarch.runtime.transport.regions import WORD
from monarch.runtime.transport.shm import RegionAccess, ShmLink
from monarch.runtime.transport.stream import StreamLink
from monarch.runtime.transport.streams import Stream as Socket
from monarch.runtime.transport.works import Pending

if TYPE_CHECKING:
    from monarch.runtime.transport.cuda.transport import CudaTransport

_log = logging.getLogger("monarch.transport")

_CLOSING = 2.0


class GpuReach(RegionAccess):
    """A region on a GPU of the peer. To shared memory it is one that frames reach, which its owner carries out."""

    def __init__(self, number: int, size: int, lent: Mapping[str, Any], ours: bool) -> None:
        super().__init__(number, size)
        self._handle = bytes.fromhex(lent["handle"])
        self._offset, self._address = int(lent["offset"]), int(lent["address"])
        self._uuid = str(lent["device"])
        self._ours = ours
        self.mapped: MemoryRange | None = None
        self.mappable = True

    def place(self, offset: int, size: int) -> MemoryRange:
        """Where it is mapped here; maps it, the first time. By one thread at a time. Raises CudaFailed."""
        if self.mapped is None:
            if self._ours:
                # A process cannot open the handle of memory that it has exported itself.
                self.mapped = MemoryRange(self._address, self.size, driver.here().uuids().index(self._uuid), None)
            else:
                gpu, base = driver.here().open(self._handle, self._uuid)
                self.mapped = MemoryRange(base + self._offset, self.size, gpu, None)
        return self.mapped.part(offset, size)

    def free(self) -> None:
        mapped, self.mapped = self.mapped, None
        if mapped is not None and not self._ours:
            try:
                driver.here().close(self._handle)
            except CudaFailed as error:
                _log.warning("the mapping of region %d cannot be closed: %s", self.number, error)


class CudaLink(ShmLink):
    def __init__(self, stream: Socket, transport: CudaTransport, pid: int, obstacle: str | None) -> None:
        super().__init__(stream, transport, pid, obstacle)
        self._cuda = transport
        self._ours = pid == os.getpid()
        self._streams: dict[int, CudaStream] = {}
        self._latest: tuple[int, Event] | None = None
        self.lane = Lane(f"monarch-cuda-{self.peer.process[:8]}", self._lane_broken)
        transport.lanes.add(self.lane)

    @property
    def chosen(self) -> str:
        return f"CUDA IPC for memory of GPUs; {super().chosen}"

    # -- what users of links call ----------------------------------------------------------------------------------

    def put(self, source: Memory, region: Region, offset: int = 0, signal: Signal | None = None) -> Work:
        if self._is_plain(source, region):
            return super().put(source, region, offset, signal)
        place = self._checked(source, region, offset, signal)
        try:
            copy = self._copy_of(True, place, region, offset, signal)
        except AccessRefused as error:
            return self._failed(error)
        if copy is None:
            return self._put_later(source, region, offset, signal)
        return self._added(copy)

    def get(self, target: Memory, region: Region, offset: int = 0) -> Work:
        if self._is_plain(target, region):
            return super().get(target, region, offset)
        place = self._checked(target, region, offset, writable=True)
        try:
            copy = self._copy_of(False, place, region, offset, None)
        except AccessRefused as error:
            return self._failed(error)
        if copy is not None:
            return self._added(copy)
        after = staging.launched(target)
        if after is None:
            return self._later(lambda: ShmLink.get(self, target, region, offset))
        return self._later(
            lambda: staging.incoming(target, lambda staged: ShmLink.get(self, staged, region, offset), after), after
        )

    def post(self, source: Memory, region: Region, offset: int = 0, signal: Signal | None = None) -> None:
        if self._is_plain(source, region):
            super().post(source, region, offset, signal)
            return
        place = self._checked(source, region, offset, signal)
        try:
            copy = self._copy_of(True, place, region, offset, signal)
        except AccessRefused as error:
            raise self.refused(error) from error
        if copy is None:
            self._put_later(source, region, offset, signal, posted=True)
        else:
            copy.posted = True
            self._added(copy)

    def fetch_add(self, region: Region, offset: int, value: int) -> Work:
        if not self.lane.busy:
            return super().fetch_add(region, offset, value)
        self.can_send()
        self.check(region, offset, WORD)
        return self._later(lambda: StreamLink.fetch_add(self, region, offset, value))

    def compare_swap(self, region: Region, offset: int, expected: int, desired: int) -> Work:
        if not self.lane.busy:
            return super().compare_swap(region, offset, expected, desired)
        self.can_send()
        self.check(region, offset, WORD)
        return self._later(lambda: StreamLink.compare_swap(self, region, offset, expected, desired))

    # -- what goes where -------------------------------------------------------------------------------------------

    def _is_plain(self, memory: Memory, region: Region) -> bool:
        """Whether it is between memory of hosts, and nothing is to be waited for."""
        return not self.lane.busy and "cuda" not in region.details and buffers.device_of(memory) == "cpu"

    def _checked(
        self, memory: Memory, region: Region, offset: int, signal: Signal | None = None, writable: bool = False
    ) -> MemoryRange:
        self.can_send()
        place = buffers.range_of(memory, writable)
        self.check(region, offset, place.size, signal)
        return place

    def _copy_of(
        self, write: bool, place: MemoryRange, region: Region, offset: int, signal: Signal | None
    ) -> _Copy | None:
        """The driver's copy; None for a work that goes shared memory's way, in turn. Raises AccessRefused."""
        reach = self._reach(region)
        if not isinstance(reach, GpuReach) or not reach.mappable:
            return None
        word = None if signal is None else self._reach(signal.region)
        reach.enter(offset, place.size)
        try:
            if word is not None and signal is not None:
                word.enter(signal.offset, WORD)
                try:
                    # A refused write changes nothing, so the word is checked first.
                    word.check_word(signal.offset)
                except AccessRefused:
                    word.leave()
                    raise
            return _Copy(self, write, place, reach, region, offset, signal, word)
        except AccessRefused:
            reach.leave()
            raise

    def _put_later(
        self, source: Memory, region: Region, offset: int, signal: Signal | None, posted: bool = False
    ) -> Pending:
        after = staging.launched(source)
        return self._later(
            lambda: ShmLink.put(self, staging.outgoing(source, after), region, offset, signal), after, posted
        )

    def _added(self, copy: _Copy) -> Pending:
        if not self.lane.add(copy, wait=not self.loop.here()):
            copy.release()
            copy.fail(self._fresh())
        return copy.pending

    def _later(self, start: Callable[[], Work], after: Event | None = None, posted: bool = False) -> Pending:
        """Start it in its turn. It closes `after`, if it is started at all."""
        job = _QueuedWork(self, start, after, posted)
        if not self.lane.add(job, wait=not self.loop.here()):
            job.refuse(self._fresh())
        return job.pending

    def refused(self, error: AccessRefused) -> LinkLost:
        lost = self.lost(f"a post was refused: {error.message}")
        self.lose(lost)
        return lost

    # -- on the lane's thread --------------------------------------------------------------------------------------

    def gpu_stream(self, gpu: int) -> CudaStream:
        """The stream on which the next launch comes after the former ones, on whichever GPU."""
        stream = self._streams.get(gpu)
        if stream is None:
            stream = self._streams[gpu] = driver.here().stream(gpu)
        if self._latest is not None and self._latest[0] != gpu:
            stream.wait(self._latest[1])
        return stream

    def launched(self, gpu: int, event: Event) -> None:
        self._latest = gpu, event

    def close_event(self, event: Event) -> None:
        if self._latest is not None and self._latest[1] is event:
            self._latest = None
        try:
            event.close()
        except CudaFailed as error:
            _log.warning("an event cannot be given back: %s", error)

    def tell_owner(self, signal: Signal, posted: bool) -> Work | None:
        """Have a word stored. Raises LinkLost."""
        told: Work | None = None
        if posted:
            StreamLink.post(self, b"", signal.region, signal.offset, signal)
        else:
            told = StreamLink.put(self, b"", signal.region, signal.offset, signal)
        self._mark(signal.region)
        return told

    def _lane_broken(self, error: BaseException) -> None:
        _log.error("the lane of %r failed", self, exc_info=error)
        self.lose(self.lost(f"copying failed: {error!r}"))

    # -- the peer's regions, and this process's --------------------------------------------------------------------

    def _lend(self, owned: Owned) -> dict[str, Any]:
        exported = self._cuda.exported(owned.number)
        return {} if exported is None else {"cuda": exported}

    def _borrow(self, number: int, size: int, message: Mapping[str, Any]) -> RegionAccess:
        if "cuda" not in message:
            return RegionAccess(number, size)
        return GpuReach(number, size, message["cuda"], self._ours)

    # -- the end ---------------------------------------------------------------------------------------------------

    def begin_to_close(self) -> None:
        if not self.loop.here() and self._error is None:
            self.lane.drain(_CLOSING)
        super().begin_to_close()

    def await_end(self, seconds: float) -> None:
        super().await_end(seconds)
        if not self.loop.here():
            self.lane.join(seconds)

    def _gone_from(self, reach: RegionAccess, work: int) -> None:
        # Closing a mapping may wait for the GPU, which the I/O thread must not.
        closing = _Closing(lambda: ShmLink._gone_from(self, reach, work))
        open_here = isinstance(reach, GpuReach) and reach.mapped is not None
        if not open_here or not self.lane.add(closing, wait=False):
            super()._gone_from(reach, work)

    def ended(self, error: LinkLost) -> None:
        mapped = {key: reach for key, reach in self.reaches.items() if isinstance(reach, GpuReach)}
        for key in mapped:
            del self.reaches[key]
        super().ended(error)
        self.lane.close(lambda: self._give_up(mapped.values()))

    def _give_up(self, mapped: Iterable[GpuReach]) -> None:
        for reach in mapped:
            reach.drop(reach.free)
        self._cuda.lanes.discard(self.lane)
        for stream in self._streams.values():
            stream.close()
        self._streams.clear()


class _Copy:
    """A copy to or from a region on a GPU."""

    def __init__(
        self,
        link: CudaLink,
        write: bool,
        place: MemoryRange,
        reach: GpuReach,
        region: Region,
        offset: int,
        signal: Signal | None,
        word: RegionAccess | None,
    ) -> None:
        # Not one of the link's works: those fail at once when it ends, and this writes to memory until its copy ends.
        self.pending = Pending(place)
        self.posted = False
        self._link = link
        self._write = write
        self._place = place
        self._reach = reach
        self._region = region
        self._offset = offset
        self._signal = signal
        self._word = word
        self._event: Event | None = None
        self._failed: BaseException | None = None
        self._after: Event | None = None
        if place.gpu is not None and place.size:
            try:
                self._after = driver.here().now(place.gpu)
            except CudaFailed as error:
                self._failed = link.lost(str(error))

    @property
    def alone(self) -> bool:
        """Until the region is mapped: where it cannot be, this goes as frames, which would overtake copies."""
        return self._reach.mapped is None

    def begin(self) -> None:
        link, place = self._link, self._place
        if self._failed is None and link.error is not None:
            self._failed = link.error
        if self._failed is not None:
            return
        try:
            there = self._reach.place(self._offset, place.size)
        except (CudaFailed, ValueError) as error:
            _log.warning("region %d goes through host memory: %s", self._reach.number, error)
            self._reach.mappable = False
            self._stage()
            return
        try:
            gpu = there.gpu if place.gpu is None else place.gpu
            assert gpu is not None
            stream = link.gpu_stream(gpu)
            if self._after is not None:
                stream.wait(self._after)
            if self._write:
                stream.copy(there, place)
            else:
                stream.copy(place, there)
            self._event = stream.record()
            link.launched(gpu, self._event)
        except CudaFailed as error:
            self._failed = link.lost(str(error))

    def _stage(self) -> None:
        memory, after, self._after = self._place.keep, self._after, None
        try:
            if self._write:
                sent = staging.outgoing(memory, after)
                work = ShmLink.put(self._link, sent, self._region, self._offset, self._signal)
            elif self._place.gpu is None:
                work = ShmLink.get(self._link, memory, self._region, self._offset)
            else:
                work = staging.incoming(
                    memory, lambda staged: ShmLink.get(self._link, staged, self._region, self._offset), after
                )
            self._signal = None
            work.wait()
        except MonarchError as error:
            self._failed = error

    def end(self) -> None:
        link = self._link
        try:
            if self._event is not None:
                self._event.wait()
        except CudaFailed as error:
            self._failed = link.lost(str(error))
        if self._failed is None and link.error is not None:
            self._failed = link.error
        told: Work | None = None
        if self._failed is None and self._signal is not None:
            try:
                told = link.tell_owner(self._signal, self.posted)
            except MonarchError as error:
                self._failed = error
        self.release()
        if self._failed is not None:
            self.fail(self._failed)
        elif told is None:
            self.pending.finish()
        else:
            _follow(self.pending, told)

    def fail(self, error: BaseException) -> None:
        if isinstance(error, LinkLost):
            self._link.lose(error)
        elif self.posted and isinstance(error, AccessRefused):
            self._link.refused(error)
        self.pending.fail(error)

    def release(self) -> None:
        """Leave the regions, and give back the events."""
        for event in (self._after, self._event):
            if event is not None:
                self._link.close_event(event)
        if self._word is not None:
            self._word.leave()
        self._reach.leave()


class _Closing:
    """A mapping to be closed, after all that uses it."""

    alone = False

    def __init__(self, begin: Callable[[], None]) -> None:
        self.begin = begin

    def end(self) -> None:
        pass


class _QueuedWork:
    """A work that came while the lane was busy, or that waits for a GPU: in its turn."""

    alone = True

    def __init__(self, link: CudaLink, start: Callable[[], Work], after: Event | None, posted: bool) -> None:
        self.pending = Pending(start)
        self._link = link
        self._start = start
        self._after = after
        self._posted = posted
        self._begun = False

    def begin(self) -> None:
        if self._link.error is not None:
            self.refuse(self._link.error)
            return
        try:
            work = self._start()
        except MonarchError as error:
            self._fail(error)
        else:
            self._begun = True
            work.then(lambda: self._finish(work))

    def refuse(self, error: LinkLost) -> None:
        """It is not started."""
        if self._after is not None:
            self._link.close_event(self._after)
        self.pending.fail(error)

    def _finish(self, work: Work) -> None:
        try:
            self.pending.finish(work.wait(0))
        except MonarchError as error:
            self._fail(error)

    def _fail(self, error: MonarchError) -> None:
        if self._posted and isinstance(error, AccessRefused):
            self._link.refused(error)
        self.pending.fail(error)

    def end(self) -> None:
        if not self._begun:
            # An error that nobody foresaw has ended the link: works that wait end with it.
            self.pending.fail(self._link.error or self._link.lost("it was not begun"))


def _follow(pending: Pending, work: Work) -> None:
    def finish() -> None:
        try:
            pending.finish(work.wait(0))
        except MonarchError as error:
            pending.fail(error)

    work.then(finish)
