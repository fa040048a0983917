"""Links over a stream: the link that all transports build on.

The owner's I/O thread receives a put's payload straight into the region, and answers gets from it; it never blocks in
sending, for its frames wait in an outbox until the socket takes them. Other threads send in their own time, one whole
frame after the other. So both directions may be full at once, and reading goes on. An error of a POST breaks the link;
a PUT that is refused has its payload read and thrown away.
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
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport import buffers
from monarch.runtime.transport.buffers import view_of
from monarch.runtime.transport.cuda import staging
from monarch.runtime.transport.frames import (
    ADD,
    BROKEN,
    CLOSE,
    DATA,
    DONE,
    EMPTY,
    GET,
    HEADER,
    NO_KEY,
    POST,
    PUT,
    REFUSED,
    SIZE,
    SWAP,
    TELL,
    Answer,
    Outgoing,
    done,
    key_of,
    plain,
    refused,
    request,
    signed,
)
from monarch.runtime.transport.interface import AccessRefused, LinkLost, Memory, Region, Signal, Work
from monarch.runtime.transport.outbox import Outbox
from monarch.runtime.transport.plug import Owned
from monarch.runtime.transport.regions import WORD
from monarch.runtime.transport.streams import Stream
from monarch.runtime.transport.works import LinkWork

_log = logging.getLogger("monarch.transport")

_BUFFER = 64 << 10
_SCRATCH = 256 << 10
_LARGEST = 1 << 48
_LARGEST_TEXT = 1 << 20
_MOST_WAITING = 1 << 16
MOST_UNDER_WAY = 1 << 14
ROUNDS = 64  # reads of one link, before others have their turn
CLOSING = 2.0


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
        self._greedy = stream.greedy
        self._fd = stream.fileno()
        self._works: dict[int, LinkWork] = {}
        self._numbers = itertools.count(1)
        self._outbox = Outbox(stream, self.loop, self)
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
        view = staging.outgoing(source)
        self.check(region, offset, view.nbytes, signal)
        work = self.work((view,))  # what a work keeps as a view is what data for it is received into
        return self._ask(work, request(PUT, work.number, view.nbytes, region, offset, signal), view)

    def get(self, target: Memory, region: Region, offset: int = 0) -> Work:
        if buffers.device_of(target) != "cpu":
            return staging.incoming(target, lambda staged: StreamLink.get(self, staged, region, offset))
        view = view_of(target, writable=True)
        self.check(region, offset, view.nbytes)
        work = self.work(view)
        # The size that is asked for travels where a signal's offset would.
        header = HEADER.pack(GET, 0, work.number, 0, region.number, key_of(region), offset, 0, NO_KEY, view.nbytes, 0)
        return self._ask(work, header, EMPTY)

    def at_once(self, what: Literal["get", "put"], memory: Memory, region: Region, offset: int = 0) -> Work | None:
        """A `get` or a `put` that has ended when this returns; None, and nothing done, where that would wait for the
        peer, or for much to be copied."""
        return None

    def post(self, source: Memory, region: Region, offset: int = 0, signal: Signal | None = None) -> None:
        view = staging.outgoing(source)
        size = view.nbytes
        self.check(region, offset, size, signal)
        self._send(request(POST, 0, size, region, offset, signal), view)

    def fetch_add(self, region: Region, offset: int, value: int) -> Work:
        self.check(region, offset, WORD)
        work = self.work()
        header = HEADER.pack(ADD, 0, work.number, 0, region.number, key_of(region), offset, 0, NO_KEY, 0, signed(value))
        return self._ask(work, header, EMPTY)

    def compare_swap(self, region: Region, offset: int, expected: int, desired: int) -> Work:
        self.check(region, offset, WORD)
        work = self.work()
        # The word to store travels where a signal's offset would.
        stored = signed(desired) & 0xFFFFFFFFFFFFFFFF
        header = HEADER.pack(
            SWAP, 0, work.number, 0, region.number, key_of(region), offset, 0, NO_KEY, stored, signed(expected)
        )
        return self._ask(work, header, EMPTY)

    def close(self) -> None:
        """End the link, once the system has all that was sent before. Works that are not finished end with LinkLost,
        here and at the peer."""
        self.begin_to_close()
        self.await_end(CLOSING + 1)

    def begin_to_close(self) -> None:
        """Close, and do not wait for the end."""
        try:
            self.loop.run(self._close)
        except MonarchError:
            pass  # the endpoint is closed, and so is this

    def await_end(self, seconds: float) -> None:
        """Wait until the link's works, files and socket are given back; not on the I/O thread, which does that. Where
        it does not, which only a defect can cause, the log says so."""
        if not self.loop.here() and not self._gone.wait(seconds):
            self.lose(LinkLost(f"the link to {self.name} over {self.transport} was closed here"))
            if not self._gone.wait(CLOSING):
                _log.warning("%r was closed %g s ago, and its socket is not given back", self, CLOSING)

    def await_unread(self, owned: Owned) -> None:
        """Return once nothing is read any more from memory that was dropped."""
        self._outbox.await_unread(owned)

    def forget(self) -> None:
        """In the child of a fork: close the socket, and tell the threads that still have the link."""
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
        frame = plain(TELL, text=json.dumps(message).encode(), files=len(files))
        self._queue(Outgoing(frame, files=[os.dup(file) for file in files]))

    def garble(self) -> None:
        """Send a frame that no peer understands, for tests: as if a message had been spoilt on its way."""
        self._queue(Outgoing(memoryview(b"\xff" * SIZE)))

    def work(self, keep: Any = None) -> LinkWork:
        """A new work that ends with the link."""
        if len(self._works) >= MOST_UNDER_WAY and not self.loop.here():
            # The owner keeps an answer for each of them until it is read.
            self._await_oldest()
        number = next(self._numbers)
        work = self._works[number] = LinkWork(number, self._works, keep)
        if self._error is not None:
            work.fail(self._error)
        return work

    def _await_oldest(self) -> None:
        works = list(self._works.values())
        if works:
            try:
                works[0].wait()
            except MonarchError:
                pass  # its own affair

    def check(self, region: Region, offset: int, size: int, signal: Signal | None = None) -> None:
        """The errors that this side can see. The owner checks again."""
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

    def _ask(self, work: LinkWork, header: bytes, payload: memoryview) -> LinkWork:
        try:
            self._send(header, payload)
        except BaseException:
            self._works.pop(work.number, None)
            raise
        return work

    def _send(self, header: bytes, payload: memoryview) -> None:
        failed = self._outbox.send(header, payload)
        if failed is not None:
            self._broken(failed)

    def can_send(self) -> None:
        if self._error is not None:
            raise self._fresh()
        if self._closing:
            raise LinkLost(f"the link to {self.name} over {self.transport} was closed here")

    def interrupted(self) -> None:
        self.lose(self.lost("sending was interrupted"))

    @property
    def alive(self) -> bool:
        return self._error is None

    def _broken(self, error: OSError) -> None:
        """Sending failed. The peer may have said why before it went: then that is the reason."""
        try:
            self.loop.run(functools.partial(self.send_failed, error))
        except MonarchError:
            pass  # the endpoint is closed
        self.lose(self.lost(error.strerror or str(error)))
        raise self._fresh() from error

    def _last_words(self) -> None:
        """Read all that has arrived, for the peer may have said why it ends the link."""
        while self._error is None and self._receive():
            pass

    def _fresh(self) -> LinkLost:
        error = self._error
        assert error is not None
        return LinkLost(error.message, hint=error.hint)

    def _reply(self, *buffers: memoryview) -> None:
        self._queue(Outgoing(*buffers))

    def _queue(self, outgoing: Outgoing) -> None:
        if len(self._outbox) > _MOST_WAITING:
            self.lose(self.lost(f"more than {_MOST_WAITING} answers wait for it to read them"))
        self._outbox.add(outgoing)

    def send_failed(self, error: OSError) -> None:
        if error.errno in (errno.EPIPE, errno.ECONNRESET):
            self._last_words()
        self.lose(self.lost(error.strerror or str(error)))

    # -- receiving, on the I/O thread ------------------------------------------------------------------------------

    def ready(self, events: int) -> None:
        """The socket can be read, or written again."""
        if events & select.EPOLLOUT and self._error is None:
            self._outbox.writable()
        if events & ~select.EPOLLOUT:
            for _ in range(ROUNDS):
                if not self._receive():
                    break
            else:
                # Other links have their turn. Bytes that TLS has decrypted already would not make the socket ready
                # again.
                self.loop.call(functools.partial(self.ready, select.EPOLLIN), self.defect)

    def _receive(self) -> bool:
        """Read once, and handle the frames that have arrived. False once there are no more for now."""
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
        except (ValueError, RecursionError, struct.error) as error:
            # Frames come from an authenticated peer: this is a defect, or another version.
            self._break_off(f"its message is no frame: {error}")
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
        while end - start >= SIZE:
            kind, files, number, size, region, key, offset, word, word_key, word_offset, value = HEADER.unpack_from(
                buffer, start
            )
            start += SIZE
            if size > _LARGEST:
                raise ValueError(f"a payload of {size} bytes")
            sink: memoryview | None = None
            self._sink_owned = None
            if kind == POST or kind == PUT:
                sink = self._begin_put(kind, number, size, region, key, offset, word, word_key, word_offset, value)
            elif kind == DONE:
                finished = self._works.get(number)
                if finished is not None:
                    finished.finish(value if region else None)
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
        elif start > _BUFFER - SIZE:
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
            if word:
                signalled = regions.word(word, word_key, word_offset)
        except AccessRefused as error:
            self._after = functools.partial(self._refuse, kind, number, error)
            return None

        host = owned.view
        sink = memoryview(bytearray(size)) if host is None else host[offset : offset + size]
        elsewhere = owned.diverted.get((offset, value)) if signalled is not None and owned.diverted else None
        if elsewhere is not None and elsewhere.nbytes == size and owned.diverted.pop((offset, value), None) is not None:
            sink = elsewhere

        def after() -> None:
            if owned.dropped:
                self._refuse(kind, number, AccessRefused(f"region {region} was dropped while it was written"))
                return
            if host is None:
                try:
                    staging.store(owned, offset, sink)
                except AccessRefused as error:
                    self._refuse(kind, number, error)
                    return
            if signalled is not None:
                regions.store(signalled, word_offset, value)
            if kind == PUT:
                self._reply(done(number))

        self._after = after
        self._sink_owned = owned
        return sink

    def _begin_ask(self, kind: int, number: int, region: int, key: bytes, offset: int, second: int, value: int) -> None:
        self._after = _nothing
        regions = self.regions
        try:
            if kind == GET:
                owned = regions.checked(region, key, offset, second, write=False)
                self._queue(Answer(owned, staging.load(owned, offset, second), number))
                return
            owned = regions.word(region, key, offset)
            if kind == ADD:
                self._reply(done(number, regions.fetch_add(owned, offset, value)))
            else:
                desired = second - (1 << 64) if second >> 63 else second
                self._reply(done(number, regions.compare_swap(owned, offset, value, desired)))
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
        self._after = lambda: self._take_text(kind, files, number, text)
        return memoryview(text)

    def _take_text(self, kind: int, files: int, number: int, text: bytearray) -> None:
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

    def _refuse(self, kind: int, number: int, error: AccessRefused) -> None:
        _log.warning("refused %s over %s: %s", self.name, self.transport, error.message)
        if kind == POST:
            self._break_off(f"a post was refused: {error.message}")
            return
        self._reply(refused(number, error))

    def _refused_by_peer(self, said: object) -> AccessRefused:
        message, hint = said if isinstance(said, list) and len(said) == 2 else (said, "")
        return AccessRefused(f"{self.name} refused, over {self.transport}: {message}", hint=str(hint))

    def _break_off(self, why: str) -> None:
        """Tell the peer why, and end the link."""
        self._reply(plain(BROKEN, text=why.encode()))
        self.lose(self.lost(why))

    # -- the end ---------------------------------------------------------------------------------------------------

    def open(self) -> None:
        """Begin to read the peer's frames."""
        self.loop.watch(self._fd, select.EPOLLIN, self.ready, self.defect)

    def defect(self, error: Exception) -> None:
        """An error that nobody foresaw came up in serving this link: the link ends, for its works could wait for
        ever."""
        self.lose(self.lost(f"a defect of this process: {error!r}"))

    def _close(self) -> None:
        if self._closing or self._error is not None:
            return
        self._closing = True
        self._reply(plain(CLOSE))
        # The peer closes its end when it has read that, and everything before it; one that does not is not waited for.
        closed = LinkLost(f"the link to {self.name} over {self.transport} was closed here")
        self.loop.later(CLOSING, lambda: self.lose(closed))

    def _bury(self) -> None:
        error = self._error
        assert error is not None
        self.loop.unwatch(self._fd)
        self._sink = self._sink_owned = None
        for work in list(self._works.values()):
            work.fail(error)
        try:
            self.ended(error)
            self._ended_call(self, error)
        finally:
            self._outbox.close(self.stream.close)
            self._gone.set()


def _nothing() -> None:
    pass
