"""Processes of one host: the initiator copies by itself, and stores and wakes signals where it can.

How a region is reached is asked of its owner once a link, and checked there:

    file     the region was registered with the memfd that holds it: it is mapped, and a put is a memcpy
    memory   any other memory, by process_vm_writev, where the system permits that: tried when the link is made
    stream   otherwise: as frames over the local socket, which the owner's I/O thread receives into the memory

Words of a mapped file are stored, and woken, by the initiator; all others by the owner, to whom a frame is sent after
the copy. Atomics always go to the owner.

**What dropping guarantees.** The owner tells every peer that has reached the region, and waits until each has answered
or is gone. A peer answers when none of its threads copies any more; copies go in pieces, and look before each. So once
`drop` returns no peer writes the memory, however it is used then. An owner cannot take back a file: a peer that got one
could have kept it, as a process of the same user could read this one's memory anyway; keys protect against mistakes and
other users, not against a process of the same user that means harm. A process number is not held while it is used: a
copy that begins in the moment in which a peer dies and its number is given to another process of the same user would
reach that one. The file must not be shrunk while it is registered.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from monarch.compiler.plan import MonarchError
from monarch.runtime.shared import futex
from monarch.runtime.transport import buffers, process_vm
from monarch.runtime.transport.buffers import view_of
from monarch.runtime.transport.cuda import staging
from monarch.runtime.transport.interface import AccessRefused, Address, LinkLost, Memory, Region, Signal, Work
from monarch.runtime.transport.plug import Accepted, EndpointContext, Offer, Owned, Unsuitable
from monarch.runtime.transport.regions import WORD
from monarch.runtime.transport.stream import StreamLink
from monarch.runtime.transport.streams import LocalStream, Stream
from monarch.runtime.transport.works import FINISHED, Pending

_SMALL = 32 << 10  # below, a slice assignment is faster than a call that gives up the interpreter's lock
_PIECE = 16 << 20  # what is copied between two looks at whether the region was dropped
_AT_ONCE = 1 << 20  # copying this much takes less than to have another thread do it, and to hear that it is done
_NONCE = 16


class ShmTransport:
    name = "shm"
    streams: tuple[str, ...] = ("local",)

    def __init__(self, context: EndpointContext) -> None:
        self._loop = context.loop
        self._nonce = ctypes.create_string_buffer(secrets.token_bytes(_NONCE), _NONCE)
        self._lock = threading.Lock()
        self._holders: dict[int, set[ShmLink]] = {}
        self._leaving: dict[int, Owned] = {}

    def available(self) -> str | None:
        return None if futex.supported() else "this system has no futexes that this runtime knows"

    def register(self, owned: Owned) -> dict[str, Any] | None:
        return None

    # -- joining ---------------------------------------------------------------------------------------------------

    def _proof(self) -> dict[str, Any]:
        """The addresses at which this process has known bytes: a peer that reads them there can reach its memory."""
        process_vm.permit()
        return {"address": ctypes.addressof(self._nonce), "nonce": self._nonce.raw.hex()}

    def _link(self, stream: Stream, details: Mapping[str, Any]) -> ShmLink:
        if not isinstance(stream, LocalStream):
            raise Unsuitable("there is no local socket to the peer")
        try:
            address, nonce = int(details["address"]), bytes.fromhex(details["nonce"])
        except (KeyError, TypeError, ValueError):
            raise Unsuitable("it did not say where its memory is") from None
        if not 0 < address < 1 << 63 or len(nonce) != _NONCE:
            raise Unsuitable("it did not say where its memory is")
        pid = stream.credentials()[0]
        return self._join(stream, pid, process_vm.probe(pid, address, nonce))

    def _join(self, stream: Stream, pid: int, obstacle: str | None) -> ShmLink:
        return ShmLink(stream, self, pid, obstacle)

    def offer(self, peer: Address) -> Offer:
        return Offer(self._proof())

    def accept(self, stream: Stream, details: Mapping[str, Any], files: Sequence[int]) -> Accepted:
        return Accepted(self._link(stream, details), self._proof())

    def dial(self, stream: Stream, offer: Offer, details: Mapping[str, Any], files: Sequence[int]) -> StreamLink:
        return self._link(stream, details)

    def withdraw(self, offer: Offer) -> None:
        pass

    def close(self) -> None:
        pass

    # -- which peers have reached which regions, at the owner -------------------------------------------------------

    def hold(self, owned: Owned, link: ShmLink) -> None:
        with self._lock:
            if owned.dropped:
                raise AccessRefused(f"region {owned.number} was dropped")
            self._holders.setdefault(owned.number, set()).add(link)

    def release(self, number: int, link: ShmLink) -> None:
        with self._lock:
            holders = self._holders.get(number, set())
            holders.discard(link)
            if not holders:
                self._holders.pop(number, None)
                self._leaving.pop(number, None)

    def release_all(self, link: ShmLink) -> None:
        with self._lock:
            numbers = [number for number, holders in self._holders.items() if link in holders]
        for number in numbers:
            self.release(number, link)

    def drop(self, owned: Owned) -> None:
        with self._lock:
            holders = list(self._holders.get(owned.number, ()))
            if holders:
                # Where nobody waits, the memory must outlive the answers all the same.
                self._leaving[owned.number] = owned
        works = [link.take_back(owned.number) for link in holders]
        if not self._loop.here():
            for work in works:
                try:
                    work.wait()
                except LinkLost:
                    pass  # its process is gone, and so are its works


class RegionAccess:
    """How one region of the peer is reached."""

    kind = "stream"

    def __init__(self, number: int, size: int) -> None:
        self.number = number
        self.size = size
        self.words = True
        self.dropped = False
        self._users = 0
        self._lock = threading.Lock()
        self._left: Callable[[], None] | None = None

    def enter(self, offset: int, size: int) -> None:
        """Begin to use a range. Raises AccessRefused; otherwise `leave` has to follow."""
        if offset + size > self.size:
            raise AccessRefused(
                f"bytes {offset} to {offset + size} are out of the bounds of region {self.number}, which has "
                f"{self.size}"
            )
        with self._lock:
            if self.dropped:
                raise AccessRefused(f"there is no region {self.number} any more: its owner has dropped it")
            self._users += 1

    def leave(self) -> None:
        with self._lock:
            self._users -= 1
            left = self._left if not self._users else None
        if left is not None:
            left()

    def drop(self, left: Callable[[], None]) -> None:
        """Let nobody in any more; `left` is called once nobody is in."""
        with self._lock:
            self.dropped = True
            self._left = left
            empty = not self._users
        if empty:
            left()

    def check_word(self, offset: int) -> None:
        """Raises AccessRefused where there can be no word. `words` is the owner's answer about the memory."""
        if not self.words or offset % WORD:
            raise AccessRefused(
                f"there is no word at byte {offset} of region {self.number}: words are aligned to 8 bytes, writable, "
                "and in host memory"
            )

    def write(self, offset: int, view: memoryview) -> None:
        raise NotImplementedError

    def read(self, offset: int, view: memoryview) -> None:
        raise NotImplementedError

    def store(self, offset: int, value: int) -> None:
        raise NotImplementedError

    def free(self) -> None:
        pass

    def _pieces(self, size: int) -> range:
        return range(0, size, _PIECE)

    def _look(self) -> None:
        if self.dropped:
            raise AccessRefused(f"region {self.number} was dropped by its owner while it was copied")


class _FileReach(RegionAccess):
    """A region in a file, mapped."""

    kind = "file"

    def __init__(self, number: int, file: int, offset: int, size: int, writable: bool) -> None:
        super().__init__(number, size)
        start = offset // mmap.ALLOCATIONGRANULARITY * mmap.ALLOCATIONGRANULARITY
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        mapped = mmap.mmap(file, offset - start + size, mmap.MAP_SHARED, access, offset=start)
        self._view = memoryview(mapped)[offset - start :]
        self._writable = writable
        self._address = buffers.address_of(self._view)
        self._words: memoryview | None = None
        if writable and self._address % 8 == 0:
            self._words = self._view[: size // 8 * 8].cast("q")

    def write(self, offset: int, view: memoryview) -> None:
        if not self._writable:
            raise AccessRefused(f"region {self.number} cannot be written: its memory is read-only")
        size = view.nbytes
        if size <= _SMALL:
            self._view[offset : offset + size] = view
            return
        target, source = self._address + offset, buffers.address_of(view)
        for at in self._pieces(size):
            self._look()
            ctypes.memmove(target + at, source + at, min(_PIECE, size - at))

    def read(self, offset: int, view: memoryview) -> None:
        size = view.nbytes
        if size <= _SMALL:
            view[:] = self._view[offset : offset + size]
            return
        target, source = buffers.address_of(view), self._address + offset
        for at in self._pieces(size):
            self._look()
            ctypes.memmove(target + at, source + at, min(_PIECE, size - at))

    def store(self, offset: int, value: int) -> None:
        words = self._words
        if words is None:
            raise AccessRefused(f"there is no word at byte {offset} of region {self.number}, as it is mapped here")
        if not futex.ORDERED:
            futex.fence()
        words[offset >> 3] = value
        futex.fence()
        futex.wake(self._address + offset)

    def free(self) -> None:
        # The mapping ends with its last view.
        self._words = None
        self._view = memoryview(b"")


class _MemoryReach(RegionAccess):
    """A region anywhere in the peer's memory."""

    kind = "memory"

    def __init__(self, number: int, size: int, pid: int, address: int, writable: bool) -> None:
        super().__init__(number, size)
        self._pid = pid
        self._address = address
        self._writable = writable

    def write(self, offset: int, view: memoryview) -> None:
        if not self._writable:
            raise AccessRefused(f"region {self.number} cannot be written: its memory is read-only")
        self._move(process_vm.write, offset, view)

    def read(self, offset: int, view: memoryview) -> None:
        self._move(process_vm.read, offset, view)

    def _move(self, move: Callable[[int, int, int, int], None], offset: int, view: memoryview) -> None:
        here, there, size = buffers.address_of(view), self._address + offset, view.nbytes
        for at in self._pieces(size):
            self._look()
            move(self._pid, there + at, here + at, min(_PIECE, size - at))


class ShmLink(StreamLink):
    """A link between processes of one host. `obstacle` says why the peer's memory cannot be reached directly."""

    def __init__(self, stream: Stream, transport: ShmTransport, pid: int, obstacle: str | None) -> None:
        super().__init__(stream, transport.name)
        self._transport = transport
        self._pid = pid
        self._obstacle = obstacle
        self.reaches: dict[str, RegionAccess] = {}
        self._found: dict[int, RegionAccess] = {}
        self._asking = threading.Lock()
        # The places where frames that store something may still be under way: direct writes must not overtake them. A
        # new tuple for each frame, made once it is sent, so that a thread that has waited for others removes none of
        # these.
        self.behind: tuple[Region] | None = None
        self._marking = threading.Lock()

    @property
    def chosen(self) -> str:
        if self._obstacle is None:
            return "same host; files are mapped, other memory is copied by process_vm_writev"
        return f"same host; files are mapped, other memory goes through a socket ({self._obstacle})"

    # -- what users of links call ----------------------------------------------------------------------------------

    def put(self, source: Memory, region: Region, offset: int = 0, signal: Signal | None = None) -> Work:
        view = staging.outgoing(source)
        self.check(region, offset, view.nbytes, signal)
        try:
            told = self._write(view, region, offset, signal)
        except AccessRefused as error:
            return self._failed(error)
        if told is None:
            return FINISHED
        view, region, offset = told
        work = super().put(view, region, offset, signal)
        self._mark(region)
        return work

    def post(self, source: Memory, region: Region, offset: int = 0, signal: Signal | None = None) -> None:
        view = staging.outgoing(source)
        self.check(region, offset, view.nbytes, signal)
        try:
            told = self._write(view, region, offset, signal)
        except AccessRefused as error:
            lost = self.lost(f"a post was refused: {error.message}")
            self.lose(lost)
            raise lost from error
        if told is not None:
            view, region, offset = told
            super().post(view, region, offset, signal)
            self._mark(region)

    def get(self, target: Memory, region: Region, offset: int = 0) -> Work:
        if buffers.device_of(target) != "cpu":
            return staging.incoming(target, lambda staged: ShmLink.get(self, staged, region, offset))
        view = view_of(target, writable=True)
        self.check(region, offset, view.nbytes)
        try:
            reach = self._reach(region)
            if reach.kind == "stream":
                return super().get(view, region, offset)
            self._await_frames()
            self._copy(reach, reach.read, offset, view)
        except AccessRefused as error:
            return self._failed(error)
        return FINISHED

    def at_once(self, what: Literal["get", "put"], memory: Memory, region: Region, offset: int = 0) -> Work | None:
        reach = self.reaches.get(region.key)
        if reach is None or reach.number != region.number or reach.dropped or reach.kind not in ("file", "memory"):
            return None
        if self.behind is not None or buffers.size_of(memory) > _AT_ONCE or buffers.device_of(memory) != "cpu":
            return None
        view = view_of(memory, writable=what == "get")
        self.check(region, offset, view.nbytes)
        try:
            self._copy(reach, reach.read if what == "get" else reach.write, offset, view)
        except AccessRefused as error:
            return self._failed(error)
        return FINISHED

    # -- copying ---------------------------------------------------------------------------------------------------

    def _write(
        self, view: memoryview, region: Region, offset: int, signal: Signal | None
    ) -> tuple[memoryview, Region, int] | None:
        """Do a work directly as far as possible; gives the part that has to go as a frame, with the signal."""
        if self._error is not None or self._closing:
            raise self._fresh() if self._error else LinkLost(f"{self!r} was closed here")
        reach = self._reach(region)
        if reach.kind == "stream":
            return view, region, offset
        if signal is None:
            if self.behind is not None:
                self._await_frames()
            self._copy(reach, reach.write, offset, view)
            return None
        word = reach if signal.region is region else self._reach(signal.region)
        if word.kind != "file" and view.nbytes <= _SMALL:
            return view, region, offset  # one frame is less than a copy and a frame
        if self.behind is not None:
            self._await_frames()
        # A refused write changes nothing, so the word is checked first.
        word.enter(signal.offset, WORD)
        try:
            word.check_word(signal.offset)
            self._copy(reach, reach.write, offset, view)
            if word.kind != "file":
                return view[:0], region, offset
            word.store(signal.offset, signal.value)
        finally:
            word.leave()
        return None

    def _copy(
        self, reach: RegionAccess, move: Callable[[int, memoryview], None], offset: int, view: memoryview
    ) -> None:
        reach.enter(offset, view.nbytes)
        try:
            move(offset, view)
        except OSError as error:
            # Its memory cannot be reached any more: most likely the process is gone, which the socket tells as well.
            gone = error.errno == errno.ESRCH
            lost = self.lost("the peer has ended" if gone else f"its memory cannot be reached ({error.strerror})")
            self._last_words_of(lost)
            raise self.error or lost from error
        finally:
            reach.leave()

    def _last_words_of(self, lost: LinkLost) -> None:
        try:
            self.loop.run(self._last_words)
        except MonarchError:
            pass
        self.lose(lost)

    def _mark(self, region: Region) -> None:
        """Frames were sent."""
        with self._marking:
            self.behind = (region,)

    def _await_frames(self) -> None:
        behind = self.behind
        if behind is not None:
            # Whatever the answer is, all that was sent before has been done.
            try:
                super().put(b"", behind[0]).wait()
            except AccessRefused:
                pass
            with self._marking:
                if self.behind is behind:
                    self.behind = None

    def _failed(self, error: AccessRefused) -> Pending:
        work = Pending()
        work.fail(AccessRefused(f"{self.name} refused, over {self.transport}: {error.message}", hint=error.hint))
        return work

    # -- reaching regions ------------------------------------------------------------------------------------------

    def _reach(self, region: Region) -> RegionAccess:
        reach = self.reaches.get(region.key)
        if reach is None or reach.number != region.number or reach.dropped:
            if self.loop.here():
                raise MonarchError("a region cannot be reached for the first time from the I/O thread")
            # One at a time: were a region mapped twice, dropping it would wait for one of the two.
            with self._asking:
                reach = self.reaches.get(region.key)
                if reach is None or reach.number != region.number or reach.dropped:
                    reach = self._ask_for(region)
        return reach

    def _ask_for(self, region: Region) -> RegionAccess:
        work = self.work()
        self.tell({"open": region.number, "key": region.key, "work": work.number})
        work.wait()
        return self._found.pop(work.number)

    def take_back(self, number: int) -> Pending:
        """At the owner: have the peer let go of a region; the work is finished when it has."""
        work = self.work()
        self.tell({"drop": number, "work": work.number})
        return work

    def control(self, message: Mapping[str, Any], files: Sequence[int]) -> None:
        try:
            if "open" in message:
                self._open_for_peer(int(message["open"]), bytes.fromhex(message["key"]), int(message["work"]))
            elif "opened" in message:
                self._opened(message, files)
            elif "drop" in message:
                self._let_go(int(message["drop"]), int(message["work"]))
            elif "dropped" in message:
                self._transport.release(int(message["dropped"]), self)
                self._finish(message, None)
            elif "refused" in message:
                self._finish(message, AccessRefused(str(message["refused"])))
            else:
                super().control(message, files)
        except (KeyError, TypeError) as error:
            raise ValueError(f"a message that lacks something: {error}") from None
        finally:
            for file in files:
                os.close(file)

    def _finish(self, message: Mapping[str, Any], error: AccessRefused | None) -> None:
        work = self._works.get(int(message["work"]))
        if work is not None:
            if error is None:
                work.finish()
            else:
                work.fail(error)

    def _open_for_peer(self, number: int, key: bytes, work: int) -> None:
        answer: dict[str, Any] = {"opened": number, "key": key.hex(), "work": work}
        files: list[int] = []
        try:
            owned = self.regions.checked(number, key, 0, 0, write=False)
            self._transport.hold(owned, self)
            answer |= {"writable": owned.writable, "size": owned.size, "words": self.regions.has_words(number)}
            if owned.view is None:
                answer |= self._lend(owned)
            elif owned.file is not None and owned.size:
                answer |= {"offset": owned.offset}
                access = os.O_RDWR if owned.writable else os.O_RDONLY
                files.append(os.open(f"/proc/self/fd/{owned.file}", access | os.O_CLOEXEC))
            else:
                answer |= {"address": owned.address}
            self.tell(answer, files)
        except AccessRefused as error:
            self.tell({"refused": error.message, "work": work})
        except OSError as error:
            self._transport.release(number, self)
            self.tell({"refused": f"the file of region {number} cannot be opened: {error.strerror}", "work": work})
        finally:
            for file in files:
                os.close(file)

    def _lend(self, owned: Owned) -> dict[str, Any]:
        """At the owner: the details with which the peer reaches memory of a device. Without any, works go over the
        stream."""
        return {}

    def _borrow(self, number: int, size: int, message: Mapping[str, Any]) -> RegionAccess:
        """The memory of an answer of the owner's `_lend`."""
        return RegionAccess(number, size)

    def _opened(self, message: Mapping[str, Any], files: Sequence[int]) -> None:
        work = self._works.get(int(message["work"]))
        if work is None:
            return
        number, size, writable = int(message["opened"]), int(message["size"]), bool(message["writable"])
        reach: RegionAccess
        if files:
            try:
                reach = _FileReach(number, files[0], int(message["offset"]), size, writable)
            except (OSError, ValueError) as error:
                work.fail(AccessRefused(f"the file of region {number} cannot be mapped: {error}"))
                self.tell({"dropped": number, "work": 0})
                return
        elif "address" not in message:
            reach = self._borrow(number, size, message)
        elif self._obstacle is None:
            reach = _MemoryReach(number, size, self._pid, int(message["address"]), writable)
        else:
            reach = RegionAccess(number, size)
        reach.words = message["words"] is True
        self._found[work.number] = reach
        self.reaches[str(message["key"])] = reach
        work.finish()

    def _let_go(self, number: int, work: int) -> None:
        """The owner drops a region: answer when nobody here copies any more."""
        for key, reach in list(self.reaches.items()):
            if reach.number == number:
                del self.reaches[key]
                reach.drop(functools.partial(self._gone_from, reach, work))
                return
        self.tell({"dropped": number, "work": work})

    def _gone_from(self, reach: RegionAccess, work: int) -> None:
        reach.free()
        self.tell({"dropped": reach.number, "work": work})

    def ended(self, error: LinkLost) -> None:
        self._transport.release_all(self)
        for reach in self.reaches.values():
            reach.drop(reach.free)
        self.reaches.clear()
        super().ended(error)
