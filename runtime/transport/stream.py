"""Links over a stream: the frames, and the link that all transports build on.

A frame is a header of fixed size and a payload. The owner's I/O thread receives a put's payload straight into the
region, and answers gets from it; it never blocks in sending, for what it has to say waits in an outbox until the socket
takes it. Other threads send in their own time, one whole frame after the other. So both directions may be full at once,
and reading goes on.

    PUT, POST   payload into a region, then perhaps a signal; a PUT is answered by DONE or REFUSED
    GET         answered by DATA and then DONE, or REFUSED
    ADD, SWAP   a word; answered by DONE with the old value, or REFUSED
    TELL        JSON between the transport's two ends, perhaps with files
    BROKEN      why the sender ends the link
    CLOSE       the sender has finished

What goes wrong with a POST breaks the link. A PUT that is refused has its payload read and thrown away.
"""

from __future__ import annotations

import errno
import functools
import itertools
import json
import logging
import os
import select
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport.buffers import view_of
from monarch.runtime.transport.interface import AccessRefused, LinkLost, Memory, Region, Signal, Work
from monarch.runtime.transport.plug import Owned
from monarch.runtime.transport.regions import WORD
from monarch.runtime.transport.streams import Stream
from monarch.runtime.transport.works import Pending

_log = logging.getLogger("monarch.transport")

PUT, POST, GET, ADD, SWAP, DONE, REFUSED, DATA, TELL, BROKEN, CLOSE = range(1, 12)

# kind, files; the work's number, the payload's size; region, key, offset; the signal's region, key, offset, and a value
_HEADER: Final = struct.Struct("<BB6xQQQ16sQQ16sQq")
_SIZE: Final = _HEADER.size
_NO_KEY = bytes(16)
_BUFFER = 64 << 10
_SCRATCH = 256 << 10
_LARGEST = 1 << 48
_LARGEST_TEXT = 1 << 20
_MOST_WAITING = 1 << 16
_ROUNDS = 64
_SLICE_MS = 1000
_CLOSING = 2.0

_EMPTY = memoryview(b"")
_ZEROS = memoryview(bytes(_SCRATCH))


class _Work(Pending):
    """A work that ends with its link."""

    __slots__ = ("number", "works")

    def __init__(self, number: int, works: dict[int, _Work], keep: Any) -> None:
        super().__init__(keep)
        self.number = number
        self.works = works

    def finish(self, value: int | None = None) -> None:
        self.works.pop(self.number, None)
        super().finish(value)

    def fail(self, error: BaseException) -> None:
        self.works.pop(self.number, None)
        super().fail(error)


class _Outgoing:
    """A frame in the outbox: what is left of it. Its files are closed once sent."""

    __slots__ = ("buffers", "files")
    owned: Owned | None = None

    def __init__(self, buffers: list[memoryview], files: Sequence[int] = ()) -> None:
        self.buffers = buffers
        self.files = files


class _Answer(_Outgoing):
    """A get's answer: a header, `size` bytes of a region, and a header that says that they are whole."""

    __slots__ = ("number", "owned", "size")

    def __init__(self, owned: Owned, view: memoryview, number: int) -> None:
        self.owned = owned
        self.number = number
        self.size = view.nbytes
        header = _HEADER.pack(DATA, 0, number, self.size, 0, _NO_KEY, 0, 0, _NO_KEY, 0, 0)
        end = _HEADER.pack(DONE, 0, number, 0, 0, _NO_KEY, 0, 0, _NO_KEY, 0, 0)
        super().__init__([memoryview(header), view, memoryview(end)] if self.size else [memoryview(header + end)])

    def blank(self) -> None:
        """The region was dropped: what is left of it goes out as zeros, and a refusal follows."""
        self.owned = None
        data = min(self.size, sum(buffer.nbytes for buffer in self.buffers) - _SIZE)
        if data <= 0:
            return  # all of it had been read
        header = self.buffers[0] if len(self.buffers) == 3 else _EMPTY
        whole, rest = divmod(data, _SCRATCH)
        end = _refusal(self.number, AccessRefused("the region was dropped while it was read"))
        self.buffers = [each for each in (header, *[_ZEROS] * whole, _ZEROS[:rest], memoryview(end)) if each.nbytes]


class StreamLink:
    """The `Link` of a stream. See `plug` for what other transports override."""

    def __init__(self, stream: Stream, transport: str, reasons: Sequence[str] = ()) -> None:
        ends = stream.ends
        self.transport = transport
        self.reasons = tuple(reasons)
        self.peer = ends.peer
        self.messages = ends.messages
        self.stream = stream
        self.regions = ends.regions
        self.loop = ends.loop
        self._ended_call = ends.ended
        self._send_now = stream.send
        self._greedy = stream.greedy
        self._fd = stream.fileno()
        self._works: dict[int, _Work] = {}
        self._numbers = itertools.count(1)
        self._keys: dict[str, bytes] = {}
        self._sending = threading.Lock()
        self._outbox: deque[_Outgoing] = deque()
        self._losing = threading.Lock()
        self._error: LinkLost | None = None
        self._closing = False
        self._gone = threading.Event()
        # Receiving, on the I/O thread only.
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0
        self._left = 0
        self._sink: memoryview | None = None
        self._sink_owned: Owned | None = None
        self._after: Callable[[], None] = _nothing
        self._scratch: memoryview | None = None

    def __repr__(self) -> str:
        return f"<link to {self.name} over {self.transport}>"

    @property
    def name(self) -> str:
        """The peer, for messages."""
        return f"process {self.peer.process[:8]}"

    @property
    def closing(self) -> bool:
        """Whether `close` was called here."""
        return self._closing

    @property
    def chosen(self) -> str:
        """Why this transport: the last line of `reasons`."""
        return f"over {'TLS' if self.stream.kind == 'tls' else self.stream.kind}"

    @property
    def error(self) -> LinkLost | None:
        """Why the link ended, once it has."""
        return self._error

    # -- what users of links call ----------------------------------------------------------------------------------

    def put(self, source: Memory, region: Region, offset: int = 0, signal: Signal | None = None) -> Work:
        view = view_of(source)
        self.check(region, offset, view.nbytes, signal)
        work = self.work(view)
        return self._ask(work, self._header(PUT, work.number, view.nbytes, region, offset, signal), view)

    def get(self, target: Memory, region: Region, offset: int = 0) -> Work:
        view = view_of(target, writable=True)
        self.check(region, offset, view.nbytes)
        work = self.work(view)
        # The size that is asked for travels where a signal's offset would.
        header = _HEADER.pack(
            GET, 0, work.number, 0, region.number, self._key(region), offset, 0, _NO_KEY, view.nbytes, 0
        )
        return self._ask(work, header, _EMPTY)

    def post(self, source: Memory, region: Region, offset: int = 0, signal: Signal | None = None) -> None:
        view = view_of(source)
        size = view.nbytes
        self.check(region, offset, size, signal)
        self._send(self._header(POST, 0, size, region, offset, signal), view)

    def fetch_add(self, region: Region, offset: int, value: int) -> Work:
        self.check(region, offset, WORD)
        work = self.work()
        header = _HEADER.pack(
            ADD, 0, work.number, 0, region.number, self._key(region), offset, 0, _NO_KEY, 0, _signed(value)
        )
        return self._ask(work, header, _EMPTY)

    def compare_swap(self, region: Region, offset: int, expected: int, desired: int) -> Work:
        self.check(region, offset, WORD)
        work = self.work()
        # The word to store travels where a signal's offset would.
        stored = _signed(desired) & 0xFFFFFFFFFFFFFFFF
        header = _HEADER.pack(
            SWAP, 0, work.number, 0, region.number, self._key(region), offset, 0, _NO_KEY, stored, _signed(expected)
        )
        return self._ask(work, header, _EMPTY)

    def close(self) -> None:
        """End the link, once what was sent before has been handed to the system. Works that are not finished end with
        LinkLost, here and at the peer."""
        self.begin_to_close()
        self.await_end(_CLOSING + 1)

    def begin_to_close(self) -> None:
        """Close, and do not wait for the end."""
        try:
            self.loop.run(self._close)
        except MonarchError:
            pass  # the endpoint is closed, and so is this

    def await_end(self, seconds: float) -> None:
        """Wait until the link's works, files and socket are given back; not on the I/O thread, which does that."""
        if not self.loop.here() and not self._gone.wait(seconds):
            self.lose(LinkLost(f"the link to {self.name} over {self.transport} was closed here"))
            self._gone.wait()

    def settle(self, owned: Owned) -> None:
        """Return once nothing is read any more from memory that was dropped."""
        if any(outgoing.owned is owned for outgoing in list(self._outbox)):
            with self._sending:
                pass

    def forget(self) -> None:
        """In the child of a fork: close the socket, and say so to who still has the link."""
        self._error = LinkLost(f"the link to {self.name} belongs to the process that this one was forked from")
        self.stream.close()

    # -- what transports use and override --------------------------------------------------------------------------

    def control(self, message: Mapping[str, Any], files: Sequence[int]) -> None:
        """The peer's end has sent this, by `tell`; on the I/O thread. Files that are not kept are to be closed."""
        raise ValueError(f"nobody knows this message: {sorted(message)[:4]}")

    def ended(self, error: LinkLost) -> None:
        """The link is lost or closed; on the I/O thread, once."""

    def tell(self, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        """Send JSON to the peer's `control`. Never blocks. The files are duplicated first, so they may be closed."""
        self.messages += 1
        text = json.dumps(message).encode()
        header = _HEADER.pack(TELL, len(files), 0, len(text), 0, _NO_KEY, 0, 0, _NO_KEY, 0, 0)
        self._reply(_Outgoing([memoryview(header + text)], [os.dup(file) for file in files]))

    def work(self, keep: Any = None) -> _Work:
        """A new work that ends with the link."""
        number = next(self._numbers)
        work = self._works[number] = _Work(number, self._works, keep)
        if self._error is not None:
            work.fail(self._error)
        return work

    def check(self, region: Region, offset: int, size: int, signal: Signal | None = None) -> None:
        """What can be seen to be wrong from here. The owner looks for itself."""
        if offset < 0 or offset + size > region.size:
            raise AccessRefused(
                f"bytes {offset} to {offset + size} are out of the bounds of region {region.number} of {self.name}, "
                f"which has {region.size}"
            )
        if signal is not None and (
            signal.offset < 0 or signal.offset % WORD or signal.offset + WORD > signal.region.size
        ):
            raise AccessRefused(
                f"there is no word at byte {signal.offset} of region {signal.region.number} of {self.name}, which has "
                f"{signal.region.size} bytes: words are aligned to 8 bytes"
            )

    def lose(self, error: LinkLost) -> None:
        """End the link, for a reason. Every unfinished work raises it, from the I/O thread."""
        with self._losing:
            if self._error is not None:
                return
            self._error = error
        self.stream.shutdown()
        try:
            self.loop.call(self._bury)
        except MonarchError:
            pass  # the endpoint is closed, and ends its links itself

    def lost(self, why: str, hint: str = "") -> LinkLost:
        return LinkLost(f"the link to {self.name} over {self.transport} is lost: {why}", hint=hint)

    # -- sending ---------------------------------------------------------------------------------------------------

    def _key(self, region: Region) -> bytes:
        key = self._keys.get(region.key)
        if key is None:
            if len(self._keys) >= 4096:
                self._keys.clear()
            key = self._keys[region.key] = bytes.fromhex(region.key)
        return key

    def _header(self, kind: int, number: int, size: int, region: Region, offset: int, signal: Signal | None) -> bytes:
        if signal is None:
            return _HEADER.pack(kind, 0, number, size, region.number, self._key(region), offset, 0, _NO_KEY, 0, 0)
        word = signal.region
        return _HEADER.pack(
            kind,
            0,
            number,
            size,
            region.number,
            self._key(region),
            offset,
            word.number,
            self._key(word),
            signal.offset,
            signal.value,
        )

    def _ask(self, work: _Work, header: bytes, payload: memoryview) -> _Work:
        try:
            self._send(header, payload)
        except BaseException:
            self._works.pop(work.number, None)
            raise
        return work

    def _send(self, header: bytes, payload: memoryview) -> None:
        """Send a frame, and wait until the system has taken all of it."""
        with self._sending:
            if self._error is not None:
                raise self._fresh()
            if self._closing:
                raise LinkLost(f"the link to {self.name} over {self.transport} was closed here")
            failed = None
            try:
                if self._outbox:
                    # A frame there that is half out has to be finished before the next.
                    while not self._push():
                        self._wait_writable()
                try:
                    sent = self._send_now((header, payload))
                except BlockingIOError:
                    sent = 0
                if sent != _SIZE + payload.nbytes:
                    self._send_rest([memoryview(header), payload], sent)
            except OSError as error:
                failed = error
            except BaseException:
                # Whatever interrupted it: a frame that stays unfinished cannot be followed by another.
                self.lose(self.lost("sending was interrupted"))
                raise
        if failed is not None:
            self._broken(failed)
        if self._outbox:
            self._flush()

    def _send_rest(self, buffers: list[memoryview], sent: int) -> None:
        _advance(buffers, sent)
        while buffers:
            try:
                _advance(buffers, self._send_now(buffers))
            except BlockingIOError:
                self._wait_writable()

    def _wait_writable(self) -> None:
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        while not poll.poll(_SLICE_MS):
            if self._error is not None:
                raise self._fresh()

    def _broken(self, error: OSError) -> None:
        """Sending failed. The peer may have said why before it went: then that is the reason. Without the lock, for
        the I/O thread takes it when it buries the link."""
        try:
            self.loop.run(functools.partial(self._end_with, error))
        except MonarchError:
            pass  # the endpoint is closed
        self.lose(self.lost(error.strerror or str(error)))
        raise self._fresh() from error

    def _last_words(self) -> None:
        """Read what is there, for the peer may have said why it ends the link."""
        while self._error is None and self._receive():
            pass

    def _fresh(self) -> LinkLost:
        error = self._error
        assert error is not None
        return LinkLost(error.message, hint=error.hint)

    # -- the outbox ------------------------------------------------------------------------------------------------

    def _reply(self, outgoing: _Outgoing) -> None:
        self._outbox.append(outgoing)
        if len(self._outbox) > _MOST_WAITING:
            self.lose(self.lost(f"more than {_MOST_WAITING} answers wait for it to read them"))
        self._flush()

    def _flush(self) -> None:
        """Send what the socket takes. Whoever holds the lock does it instead, having given the lock back."""
        while self._outbox and self._sending.acquire(blocking=False):
            try:
                done = self._push()
            except OSError as error:
                # Not at once: this may be in the middle of what has been read.
                self._outbox.clear()
                self.loop.call(functools.partial(self._end_with, error))
                return
            finally:
                self._sending.release()
            if not done:
                self._arm()
                return

    def _end_with(self, error: OSError) -> None:
        if error.errno in (errno.EPIPE, errno.ECONNRESET):
            self._last_words()
        self.lose(self.lost(error.strerror or str(error)))

    def _push(self) -> bool:
        """Send from the outbox, with the lock held; gives False where the socket takes no more."""
        outbox = self._outbox
        while outbox:
            first = outbox[0]
            if isinstance(first, _Answer) and first.owned is not None and first.owned.dropped:
                first.blank()
            buffers: list[memoryview] = []
            for outgoing in itertools.islice(outbox, 32):
                if buffers and (outgoing.files or outgoing.owned is not None):
                    break
                buffers += outgoing.buffers
                if outgoing.files or outgoing.owned is not None:
                    break
            try:
                if first.files:
                    sent = self.stream.send_files(buffers, first.files)
                    _close_files(first)
                else:
                    sent = self._send_now(buffers)
            except BlockingIOError:
                return False
            while outbox:
                sent = _advance(outbox[0].buffers, sent)
                if outbox[0].buffers:
                    break
                outbox.popleft()
                if not sent:
                    break
        return True

    def _arm(self) -> None:
        """Have `ready` called when the socket takes more. Done on the I/O thread, where the socket is closed, too."""
        if not self.loop.here():
            self.loop.call(self._arm)
        elif self._error is None:
            self.loop.change(self._fd, select.EPOLLIN | select.EPOLLOUT)

    # -- receiving, on the I/O thread ------------------------------------------------------------------------------

    def ready(self, events: int) -> None:
        """The socket can be read, or written again."""
        if events & select.EPOLLOUT and self._error is None:
            self.loop.change(self._fd, select.EPOLLIN)
            self._flush()
        if events & ~select.EPOLLOUT:
            for _ in range(_ROUNDS):
                if not self._receive():
                    break

    def _receive(self) -> bool:
        """Read once, and do what has arrived. Gives False once there is no more for now."""
        if self._error is not None:
            return False
        try:
            if self._left:
                return self._receive_payload()
            room = self._buffer[self._end :]
            size = self.stream.receive(room)
            if size == 0:
                self._end_of_stream()
                return False
            self._end += size
            self._parse()
            return size == room.nbytes or self._left > 0 or self._greedy
        except BlockingIOError:
            return False
        except OSError as error:
            self.lose(self.lost(error.strerror or str(error)))
        except (ValueError, struct.error) as error:
            # Frames come from an authenticated peer: this is a defect, or another version.
            self._break_off(f"what it sent is no frame: {error}")
        return False

    def _end_of_stream(self) -> None:
        if self._closing:
            self.lose(LinkLost(f"the link to {self.name} over {self.transport} was closed here"))
        else:
            self.lose(self.lost("the peer has ended, or closed the connection"))

    def _receive_payload(self) -> bool:
        sink = self._sink
        if sink is not None and self._sink_owned is not None and self._sink_owned.dropped:
            sink = self._sink = None
        if sink is None:
            if self._scratch is None:
                self._scratch = memoryview(bytearray(_SCRATCH))
            sink = self._scratch[: self._left]
        size = self.stream.receive_rest(sink)
        if size == 0:
            self._end_of_stream()
            return False
        self._left -= size
        if self._left:
            if self._sink is not None:
                self._sink = sink[size:]
        else:
            self._sink = self._sink_owned = None
            self._after()
        # Less than was asked for: the rest is not there yet.
        return not self._left or self._sink is None or self._greedy

    def _parse(self) -> None:
        """Do all frames that the buffer holds, up to one whose payload is still to come."""
        buffer, start, end = self._buffer, self._start, self._end
        while end - start >= _SIZE:
            kind, files, number, size, region, key, offset, word, word_key, word_offset, value = _HEADER.unpack_from(
                buffer, start
            )
            start += _SIZE
            if size > _LARGEST:
                raise ValueError(f"a payload of {size} bytes")
            sink: memoryview | None = None
            self._sink_owned = None
            if kind == POST or kind == PUT:
                sink = self._begin_put(kind, number, size, region, key, offset, word, word_key, word_offset, value)
            elif kind == DONE:
                done = self._works.get(number)
                if done is not None:
                    done.finish(value if region else None)
                self._after = _nothing
            elif kind == GET or kind == ADD or kind == SWAP:
                self._begin_ask(kind, number, region, key, offset, word_offset, value)
            elif kind == DATA:
                sink = self._begin_data(number, size)
            else:
                sink = self._begin_text(kind, files, number, size)
            here = min(size, end - start)
            if sink is not None and here:
                sink[:here] = buffer[start : start + here]
            start += here
            if here < size:
                self._left = size - here
                self._sink = None if sink is None else sink[here:]
                break
            self._after()
            if self._error is not None:
                return
        if start == end:
            start = end = 0
        elif start > _BUFFER - _SIZE:
            # A header that is not all there: move it to the front. It is short, so the two places do not overlap.
            buffer[: end - start] = buffer[start:end]
            start, end = 0, end - start
        self._start, self._end = start, end

    def _begin_put(
        self,
        kind: int,
        number: int,
        size: int,
        region: int,
        key: bytes,
        offset: int,
        word: int,
        word_key: bytes,
        word_offset: int,
        value: int,
    ) -> memoryview | None:
        regions = self.regions
        signalled: Owned | None = None
        try:
            owned = regions.checked(region, key, offset, size, write=True)
            view = regions.host(owned)
            if word:
                signalled = regions.word(word, word_key, word_offset)
        except AccessRefused as error:
            refused = error
            self._after = lambda: self._refuse(kind, number, refused)
            return None

        def after() -> None:
            if owned.dropped:
                self._refuse(kind, number, AccessRefused(f"region {region} was dropped while it was written"))
                return
            if signalled is not None:
                regions.store(signalled, word_offset, value)
            if kind == PUT:
                self._done(number)

        self._after = after
        self._sink_owned = owned
        return view[offset : offset + size]

    def _begin_ask(self, kind: int, number: int, region: int, key: bytes, offset: int, second: int, value: int) -> None:
        self._after = _nothing
        regions = self.regions
        try:
            if kind == GET:
                owned = regions.checked(region, key, offset, second, write=False)
                view = regions.host(owned)[offset : offset + second]
                self._reply(_Answer(owned, view, number))
                return
            owned = regions.word(region, key, offset)
            if kind == ADD:
                self._done(number, regions.fetch_add(owned, offset, value))
            else:
                desired = second - (1 << 64) if second >> 63 else second
                self._done(number, regions.compare_swap(owned, offset, value, desired))
        except AccessRefused as error:
            self._refuse(kind, number, error)

    def _begin_data(self, number: int, size: int) -> memoryview:
        self._after = _nothing
        work = self._works.get(number)
        if work is None or not isinstance(work.keep, memoryview) or work.keep.nbytes != size:
            raise ValueError(f"data of {size} bytes that nobody asked for")
        return work.keep

    def _begin_text(self, kind: int, files: int, number: int, size: int) -> memoryview:
        if size > _LARGEST_TEXT or kind not in (REFUSED, TELL, BROKEN, CLOSE):
            raise ValueError(f"kind {kind}, {size} bytes")
        text = bytearray(size)
        self._after = lambda: self._told(kind, files, number, text)
        return memoryview(text)

    def _told(self, kind: int, files: int, number: int, text: bytearray) -> None:
        if kind == TELL:
            taken = [self.stream.files.popleft() for _ in range(min(files, len(self.stream.files)))]
            message = json.loads(text)
            if not isinstance(message, dict) or len(taken) != files:
                raise ValueError("a message that is no object, or lacks its files")
            self.control(message, taken)
        elif kind == REFUSED:
            work = self._works.get(number)
            if work is not None:
                work.fail(self._refused_by_peer(json.loads(text)))
        elif kind == BROKEN:
            self.lose(self.lost(text.decode(errors="replace")))
        else:
            self.lose(self.lost("the peer closed it"))

    # -- answers ---------------------------------------------------------------------------------------------------

    def _done(self, number: int, value: int | None = None) -> None:
        """Whether there is a value stands where a region would."""
        atomic = value is not None
        header = _HEADER.pack(DONE, 0, number, 0, atomic, _NO_KEY, 0, 0, _NO_KEY, 0, value or 0)
        self._reply(_Outgoing([memoryview(header)]))

    def _refuse(self, kind: int, number: int, error: AccessRefused) -> None:
        _log.warning("refused %s over %s: %s", self.name, self.transport, error.message)
        if kind == POST:
            self._break_off(f"a post was refused: {error.message}")
            return
        self._reply(_Outgoing([memoryview(_refusal(number, error))]))

    def _refused_by_peer(self, said: object) -> AccessRefused:
        message, hint = said if isinstance(said, list) and len(said) == 2 else (said, "")
        return AccessRefused(f"{self.name} refused, over {self.transport}: {message}", hint=str(hint))

    def _break_off(self, why: str) -> None:
        """Tell the peer why, and end the link."""
        text = why.encode()
        header = _HEADER.pack(BROKEN, 0, 0, len(text), 0, _NO_KEY, 0, 0, _NO_KEY, 0, 0)
        self._reply(_Outgoing([memoryview(header + text)]))
        self.lose(self.lost(why))

    # -- the end ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to read what the peer sends."""
        self.loop.watch(self._fd, select.EPOLLIN, self.ready)

    def _close(self) -> None:
        if self._closing or self._error is not None:
            return
        self._closing = True
        header = _HEADER.pack(CLOSE, 0, 0, 0, 0, _NO_KEY, 0, 0, _NO_KEY, 0, 0)
        self._reply(_Outgoing([memoryview(header)]))
        # The peer closes its end when it has read that, and everything before it; one that does not is not waited for.
        closed = LinkLost(f"the link to {self.name} over {self.transport} was closed here")
        self.loop.later(_CLOSING, lambda: self.lose(closed))

    def _bury(self) -> None:
        error = self._error
        assert error is not None
        self.loop.unwatch(self._fd)
        with self._sending:
            self.stream.close()
            while self._outbox:
                _close_files(self._outbox.popleft())
        self._sink = self._sink_owned = None
        for work in list(self._works.values()):
            work.fail(error)
        self.ended(error)
        self._ended_call(self, error)
        self._gone.set()


def _nothing() -> None:
    pass


def _close_files(outgoing: _Outgoing) -> None:
    for file in outgoing.files:
        os.close(file)
    outgoing.files = ()


def _advance(buffers: list[memoryview], sent: int) -> int:
    """Take `sent` bytes off the front of the buffers; gives what is left of `sent`."""
    while buffers and sent >= buffers[0].nbytes:
        sent -= buffers.pop(0).nbytes
    if buffers and sent:
        buffers[0] = buffers[0][sent:]
        sent = 0
    return sent


def _refusal(number: int, error: AccessRefused) -> bytes:
    text = json.dumps([error.message, error.hint]).encode()
    return _HEADER.pack(REFUSED, 0, number, len(text), 0, _NO_KEY, 0, 0, _NO_KEY, 0, 0) + text


def _signed(value: int) -> int:
    """Wrap around to a signed 8-byte word."""
    return (value + (1 << 63)) % (1 << 64) - (1 << 63)
