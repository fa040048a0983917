"""A link over verbs: bytes by RDMA WRITE and READ, signals by messages, everything else over the link's stream.

**Opening a region.** The first use of a region asks the owner over the stream, with the region's key. A peer that may
use it gets its address and the device's key for it; another one gets AccessRefused, and the connection is unharmed. (A
device that refuses a request ends the connection with that; and it knows 32-bit keys only, which can be guessed.)

**Signals.** What order a device writes in is not what a processor that watches the memory may rely on: by the
InfiniBand specification (volume 1, 9.5 and 10.8) the bytes of an RDMA WRITE are defined at the responder once a later
message has used up a receive there and its completion was taken. So a signal is such a message, a SEND that names word
and value, and the owner's I/O thread stores the word when it has taken the completion. A reliable connection carries
out requests in order: the puts before it are there too. The same thread does the atomics that come over the stream,
of all links: they are atomic with each other. Those of a device would be so with themselves only (IBV_ATOMIC_HCA).

**Dropping a region.** The owner tells who has opened it, waits until they say that nothing is under way there any more,
and only then takes it from the device. If that takes longer than `PATIENCE`, whose request is refused by the device
then loses the link.

**Losing the link.** A request that fails puts the queue pair into its error state, where it stays: the link is lost. So
it is when the stream ends, which is how the death of a peer is seen at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
import select
import struct
import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport.cuda.driver import CudaFailed
from monarch.runtime.transport.interface import AccessRefused, LinkLost, Memory, Region, Signal
from monarch.runtime.transport.regions import WORD
from monarch.runtime.transport.stream import StreamLink
from monarch.runtime.transport.streams import Stream
from monarch.runtime.transport.verbs import adapter
from monarch.runtime.transport.verbs.adapter import Completion, Device, Path, VerbsFailed
from monarch.runtime.transport.verbs.memory import SMALL
from monarch.runtime.transport.verbs.ports import Way
from monarch.runtime.transport.verbs.schedule import OneSidedOp, RemoteRegion, Request, Schedule
from monarch.runtime.transport.works import Pending

if TYPE_CHECKING:
    from monarch.runtime.transport.verbs.transport import VerbsTransport

SENDS = 128
CREDITS = 64
PATIENCE = 2.0
_WAITING = 256
_SLICE = 0.05
_READS = 16

# region, offset and value of a word; how many messages were consumed; whether there is a word, and an answer is wanted
_MESSAGE = struct.Struct("<QQqQ??6x")
_RECEIVES = 2 * CREDITS


_CONTROLS = ("open", "opened", "drop", "left")


class _Refused(Exception):
    """The owner refuses, or would: an `AccessRefused` that does not name the region yet."""


def _dropped(number: int) -> _Refused:
    return _Refused(f"region {number} was dropped")


class Connection:
    """A queue pair, its completions, and memory for copies and for messages that come in."""

    def __init__(self, device: Device, way: Way) -> None:
        self.way = way
        self.reads = device.reads
        self.number = secrets.randbits(24)
        self._arena = mmap.mmap(-1, SENDS * SMALL + _RECEIVES * _MESSAGE.size)
        self.bytes = memoryview(self._arena)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._arena))
        self._held: list[Any] = []
        try:
            self._memory = device.register(self._address, len(self._arena), adapter.LOCAL_WRITE)
            self._held.append(self._memory)
            self.completions = device.completions(SENDS + _RECEIVES)
            self._held.append(self.completions)
            self.pair = device.queue_pair(self.completions, SENDS, _RECEIVES)
            self._held.append(self.pair)
        except VerbsFailed:
            self.close()
            raise

    def details(self) -> dict[str, Any]:
        """The data of this end that the peer needs."""
        gid = self.way.gid
        return {
            "family": self.way.family,
            "pair": self.pair.number,
            "packet": self.number,
            "mtu": self.way.port.mtu,
            "lid": self.way.port.lid,
            "reads": self.reads,
            "gid": None if gid is None else gid.raw.hex(),
        }

    def connect(self, peer: Mapping[str, Any]) -> None:
        """Join it to the end that has these details. Raises VerbsFailed, and ValueError for details that no
        end has."""
        pair, packet, mtu, lid, reads = integers(
            [peer.get(name) for name in ("pair", "packet", "mtu", "lid", "reads")], 5
        )
        gid = self.way.gid
        path = Path(
            port=self.way.port.number,
            queue_pair=pair,
            mtu=min(self.way.port.mtu, mtu),
            send_number=self.number,
            receive_number=packet,
            reads=max(1, min(reads, self.reads, _READS)),
            lid=lid,
            gid=None if gid is None else sixteen_bytes(peer.get("gid")),
            gid_index=0 if gid is None else gid.index,
        )
        self.pair.connect(path)
        for number in range(_RECEIVES):
            self.receive(number)

    def receive(self, number: int) -> None:
        address = self._address + self._message_at(number)
        self.pair.receive(number, address, self._memory.local_key, _MESSAGE.size)

    def message(self, number: int) -> tuple[Any, ...]:
        return _MESSAGE.unpack_from(self.bytes, self._message_at(number))

    def _message_at(self, number: int) -> int:
        return SENDS * SMALL + number * _MESSAGE.size

    def copied(self, request: int) -> tuple[int, int, int]:
        """Memory for a request's bytes, which is its own until it is completed: where in `bytes`, its address and its
        local key."""
        start = request % SENDS * SMALL
        return start, self._address + start, self._memory.local_key

    def close(self) -> None:
        while self._held:
            self._held.pop().close()


class VerbsLink(StreamLink):
    def __init__(
        self, stream: Stream, reasons: Sequence[str], transport: VerbsTransport, connection: Connection, dialer: bool
    ) -> None:
        super().__init__(stream, "verbs", reasons)
        self._verbs = transport
        self.connection = connection
        self._schedule = Schedule(SENDS, CREDITS, connection.way.port.max_message)
        self._turn = threading.Lock()
        self._changed = threading.Condition(self._turn)
        # The peer's regions: None for one that its device does not reach.
        self.reaches: dict[tuple[int, str], RemoteRegion | None] = {}
        self._opening: dict[tuple[int, str], Pending] = {}
        self._leaving: list[RemoteRegion] = []
        # This process's regions that the peer has opened, and those of them that are being dropped.
        self._lent: set[int] = set()
        self._called_back: dict[int, Pending] = {}
        self._on_stream: Pending | None = None
        transport.links.add(self)
        self.loop.watch(connection.completions.fd, select.EPOLLIN, self._serve, self.defect)
        if dialer:
            # The acceptor was connected before; its first message tells it that so is this end now.
            with self._turn:
                self._schedule.announce()
                self._advance()

    # -- what users of links call ----------------------------------------------------------------------------------

    def put(self, source: Memory, region: Region, offset: int = 0, signal: Signal | None = None) -> Pending:
        work = self._begin(True, source, region, offset, signal, awaited=True)
        assert work is not None
        return work

    def get(self, target: Memory, region: Region, offset: int = 0) -> Pending:
        work = self._begin(False, target, region, offset, None, awaited=True)
        assert work is not None
        return work

    def post(self, source: Memory, region: Region, offset: int = 0, signal: Signal | None = None) -> None:
        self._begin(True, source, region, offset, signal, awaited=False)

    @property
    def chosen(self) -> str:
        return f"{self._verbs.device_name} {self.connection.way}, with {self._verbs.library_name}"

    def begin_to_close(self) -> None:
        if not self.loop.here():
            # The end goes over the stream, and must not overtake works that were sent here before.
            with self._turn:
                self._wait_idle(PATIENCE)
        super().begin_to_close()

    def _begin(
        self, write: bool, memory: Memory, region: Region, offset: int, signal: Signal | None, awaited: bool
    ) -> Pending | None:
        local = self._verbs.memories.local(memory, write)
        try:
            self.check(region, offset, local.size, signal)
            reach, word = self._reaches_of(region, signal)
            if reach is not None:
                self._allowed(reach, offset, local.size, write)
        except BaseException as error:
            local.release()
            if isinstance(error, _Refused):
                raise self._refusal(error, awaited) from None
            raise
        if reach is None or (signal is not None and word is None) or not local.reached:
            local.release()
            return self._over_stream(write, memory, region, offset, signal, awaited)
        work = self.work() if awaited else None
        job = OneSidedOp(reach, write, local.address, local.key, local.size, offset, word, awaited, (work, local))
        with self._turn:
            self._await_stream()
            while not awaited and self._schedule.waiting >= _WAITING and self._error is None:
                self._changed.wait(_SLICE)
            lost = self._error is not None
            if not lost:
                self._schedule.add(job)
                ended = self._advance()
        if lost:
            local.release()
            raise self._fresh()
        self._conclude(ended)
        return work

    def _reaches_of(
        self, region: Region, signal: Signal | None
    ) -> tuple[RemoteRegion | None, tuple[RemoteRegion, int, int] | None]:
        """The region, and the word of the signal; None for memory that the device does not reach. Raises _Refused."""
        reach = self._reach(region)
        if signal is None:
            return reach, None
        holder = self._reach(signal.region)
        if holder is None:
            return reach, None
        self._allowed(holder, signal.offset, WORD, True)
        if not holder.words:
            raise _Refused(
                f"there is no 8-byte word at byte {signal.offset} of region {holder.number}: words are aligned to 8 "
                "bytes, in host memory"
            )
        return reach, (holder, signal.offset, signal.value)

    def _refusal(self, error: _Refused, awaited: bool) -> MonarchError:
        if awaited:
            return AccessRefused(f"{self.name} refused, over verbs: {error}")
        self.lose(self.lost(f"a post was refused: {error}"))
        return self._fresh()

    def _allowed(self, reach: RemoteRegion, offset: int, size: int, write: bool) -> None:
        if reach.error is not None:
            raise reach.error
        if offset + size > reach.size:
            raise _Refused(
                f"bytes {offset} to {offset + size} are out of the bounds of region {reach.number}, which has "
                f"{reach.size}"
            )
        if write and not reach.writable:
            raise _Refused(f"region {reach.number} cannot be written: its memory is read-only")

    # -- the stream, for memory that a device does not reach: one order for both
    # ----------------------------------------

    def _over_stream(
        self, write: bool, memory: Memory, region: Region, offset: int, signal: Signal | None, awaited: bool
    ) -> Pending | None:
        with self._turn:
            self._wait_idle(None)
        work: Any = super().put(memory, region, offset, signal) if write else super().get(memory, region, offset)
        self._on_stream = work
        if not awaited:
            work.then(lambda: self._posted(work))
        return work if awaited else None

    def _posted(self, work: Pending) -> None:
        try:
            work.wait(0)
        except AccessRefused as error:
            self.lose(self.lost(f"a post was refused: {error.message}"))
        except LinkLost:
            pass

    def _await_stream(self) -> None:
        work = self._on_stream
        while work is not None and not work.done() and self._error is None:
            self._changed.wait(_SLICE)
        self._on_stream = None

    def _wait_idle(self, seconds: float | None) -> None:
        end = None if seconds is None else time.monotonic() + seconds
        self._schedule.flush()
        self._advance()
        while not self._schedule.idle and self._error is None and (end is None or time.monotonic() < end):
            self._changed.wait(_SLICE)
            self._schedule.flush()
            self._advance()

    # -- the peer's regions ----------------------------------------------------------------------------------------

    def _reach(self, region: Region) -> RemoteRegion | None:
        """The region as the device reaches it; asks its owner, the first time. None where it does not."""
        name = (region.number, region.key)
        try:
            return self.reaches[name]
        except KeyError:
            pass
        if self.loop.here():
            raise MonarchError("the first use of a region waits for its owner's answer, and the I/O thread must not")
        with self._turn:
            opening = self._opening.get(name)
            first = opening is None
            if opening is None:
                opening = self._opening[name] = self.work()
        if first:
            self.tell({"open": region.number, "key": region.key})
        opening.wait()
        try:
            return self.reaches[name]
        except KeyError:
            raise _dropped(region.number) from None

    def _opened(self, number: int, message: Mapping[str, Any]) -> None:
        name = (number, str(message.get("key")))
        with self._turn:
            opening = self._opening.pop(name, None)
            if opening is None:
                raise ValueError(f"nobody asked to open region {number}")
            found = message.get("reach")
            if found is not None:
                address, remote_key, size, writable, words = integers(found, 5)
                self.reaches[name] = RemoteRegion(number, address, remote_key, size, bool(writable), bool(words))
            elif "refused" not in message:
                self.reaches[name] = None
        if "refused" in message:
            opening.fail(_Refused(str(message["refused"])[:300]))
        else:
            opening.finish()

    def _drop(self, number: int) -> None:
        """The owner drops a region: leave it, and say so once nothing is under way there."""
        with self._turn:
            for name in [name for name in self.reaches if name[0] == number]:
                reach = self.reaches.pop(name)
                if reach is not None:
                    self._schedule.drop(reach, _dropped(number))
                    self._leaving.append(reach)
            ended = self._advance()
        self._conclude(ended)
        if all(reach.number != number for reach in self._leaving):
            self.tell({"left": number})
        self._leave()

    def _leave(self) -> None:
        for reach in [reach for reach in self._leaving if not reach.under_way]:
            self._leaving.remove(reach)
            self.tell({"left": reach.number})

    # -- this process's regions, on the I/O thread -----------------------------------------------------------------

    def _lend(self, number: int, key: object) -> None:
        answer: dict[str, Any] = {"opened": number, "key": key}
        try:
            owned = self.regions.checked(number, sixteen_bytes(key), 0, 0, write=False)
        except AccessRefused as error:
            self.tell({**answer, "refused": error.message})
            return
        memory = self._verbs.memories.find(number)
        if memory is None:
            self.tell(answer)
            return
        self._lent.add(number)
        words = owned.view is not None and owned.writable and owned.address % WORD == 0
        self.tell({**answer, "reach": [memory.address, memory.remote_key, owned.size, int(owned.writable), int(words)]})

    def call_back(self, number: int) -> Pending | None:
        """Ask the peer to leave a region; gives what ends when it has, or the link has. None where it had not opened
        it."""
        if number not in self._lent:
            return None
        left = self._called_back[number] = self.work()
        self.tell({"drop": number})
        return left

    def control(self, message: Mapping[str, Any], files: Sequence[int]) -> None:
        for file in files:
            os.close(file)
        what, number = next(((what, message[what]) for what in _CONTROLS if what in message), ("", 0))
        if not what or type(number) is not int:
            raise ValueError(f"nobody knows this message: {sorted(message)[:4]}")
        if what == "open":
            self._lend(number, message.get("key"))
        elif what == "opened":
            self._opened(number, message)
        elif what == "drop":
            self._drop(number)
        else:
            self._lent.discard(number)
            left = self._called_back.pop(number, None)
            if left is not None:
                left.finish()

    # -- the device ------------------------------------------------------------------------------------------------

    def _advance(self) -> list[OneSidedOp]:
        """Post all requests that can be posted, with `_turn` held. Gives the jobs that have ended."""
        requests, ended = self._schedule.next()
        try:
            for request in requests:
                self._post(request)
        except VerbsFailed as error:
            self.lose(self.lost(str(error)))
        return ended

    def _post(self, request: Request) -> None:
        pair, number, job = self.connection.pair, request.number, request.job
        start, slot, slot_key = self.connection.copied(number)
        if request.what == "move":
            assert job is not None
            address, key = job.address + request.start, job.key
            if key is None:
                ctypes.memmove(slot, address, request.size)
                address, key = slot, slot_key
            move = pair.write if job.write else pair.read
            remote = job.reach.address + job.offset + request.start
            move(number, address, key, request.size, remote, job.reach.remote_key, request.signaled)
        elif request.what == "flush":
            # No byte is written, so the region's address and key are not looked at.
            pair.write(number, slot, slot_key, 0, 0, 0, True)
        else:
            region, offset, value = 0, 0, 0
            if job is not None:
                assert job.word is not None
                region, offset, value = job.word[0].number, job.word[1], job.word[2]
            _MESSAGE.pack_into(
                self.connection.bytes,
                start,
                region,
                offset,
                value,
                request.consumed,
                job is not None,
                request.confirm,
            )
            pair.send(number, slot, slot_key, _MESSAGE.size, request.signaled)

    def _serve(self, events: int) -> None:
        """Take the completions of the device, on the I/O thread."""
        try:
            taken = self.connection.completions.take()
            failed = next((one for one in taken if one.status != adapter.SUCCESS), None)
            with self._turn:
                ended: list[OneSidedOp] = []
                for one in taken:
                    if one.status != adapter.SUCCESS:
                        break
                    ended += self._received(one) if one.received else self._schedule.completed(one.number)
                if failed is None:
                    ended += self._advance()
                self._changed.notify_all()
        except (VerbsFailed, CudaFailed, ValueError) as error:
            self.lose(self.lost(str(error)))
            return
        self._conclude(ended)
        self._leave()
        if failed is not None:
            why = adapter.STATUS.get(failed.status, f"a request failed with status {failed.status}")
            self.lose(self.lost(why))

    def _received(self, one: Completion) -> list[OneSidedOp]:
        """Handle a message; raises ValueError for one that this peer may not send."""
        if one.size != _MESSAGE.size:
            raise ValueError(f"the peer sent a message of {one.size} bytes")
        region, offset, value, consumed, stores, confirm = self.connection.message(one.number)
        self.connection.receive(one.number)
        self._schedule.ready()
        ended = self._schedule.heard(consumed)
        if stores:
            owned = self.regions.find(region)
            # A region that is not there was dropped: the peer may have sent this before it left.
            if owned is not None:
                if region not in self._lent or offset % WORD or offset + WORD > owned.size:
                    raise ValueError(
                        f"the peer sent a signal for byte {offset} of region {region}, which it has not opened"
                    )
                self._verbs.memories.flush()
                self.regions.store(owned, offset, value)
            self._schedule.dealt(confirm)
        return ended

    def _conclude(self, jobs: Sequence[OneSidedOp]) -> None:
        for job in jobs:
            work, local = job.data
            error = job.error
            try:
                local.release(whole=error is None)
            except CudaFailed as failed:
                error = self.lost(str(failed))
                self.lose(error)
            if isinstance(error, _Refused):
                error = self._refusal(error, job.awaited)
            if work is not None and error is None:
                work.finish()
            elif work is not None:
                work.fail(error)

    def ended(self, error: LinkLost) -> None:
        self._verbs.links.discard(self)
        self.loop.unwatch(self.connection.completions.fd)
        with self._turn:
            # Completions from before the peer closed its end are still stored.
            self._take_last()
            self.connection.close()
            jobs = self._schedule.unfinished()
            self._changed.notify_all()
        for job in jobs:
            job.data[1].release()

    def _take_last(self) -> None:
        try:
            for one in self.connection.completions.take():
                if one.received and one.status == adapter.SUCCESS:
                    self._received(one)
        except (VerbsFailed, CudaFailed, ValueError):
            pass  # the link is lost already, for a reason that is known


def integers(values: object, count: int) -> list[int]:
    """Numbers that come from elsewhere. Raises ValueError."""
    if not isinstance(values, list) or len(values) != count or not all(type(one) is int for one in values):
        raise ValueError(f"{count} numbers were expected")
    return values


def sixteen_bytes(value: object) -> bytes:
    """A key or an address that comes from elsewhere, as hex digits. Raises ValueError."""
    if not isinstance(value, str) or len(value) != 32:
        raise ValueError("32 hex digits were expected")
    return bytes.fromhex(value)
