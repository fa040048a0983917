"""Frames that nobody should send, from a peer that has proved to know the secret; and atomics over several links."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport import endpoint, frames, handshake, stream
from monarch.runtime.transport.endpoint import Endpoint
from monarch.runtime.transport.frames import HEADER, NO_KEY, SIZE
from monarch.runtime.transport.handshake import Steps, Write
from monarch.runtime.transport.interface import AccessRefused, Address, LinkLost, Region
from monarch.runtime.transport.plug import Owned
from monarch.runtime.transport.stream import StreamLink
from tests.runtime.transport.peers import PATIENCE, SECRET

KINDS = st.sampled_from([0, *range(1, 12), 12, 255])
NUMBERS = st.sampled_from([0, 1, 2, 7, 8, 64, 100, 1 << 20, 1 << 47, (1 << 63) - 1, (1 << 64) - 1])


@pytest.fixture
def served() -> Iterator[Endpoint]:
    with Endpoint(SECRET, transports=("tcp",)) as endpoint:
        yield endpoint


def run(sock: socket.socket, steps: Steps) -> Any:
    try:
        step = next(steps)
        while True:
            if isinstance(step, Write):
                sock.sendall(step.data)
                step = next(steps)
            else:
                step = steps.send(sock.recv(step.size, socket.MSG_WAITALL))
    except StopIteration as end:
        return end.value


def joined(endpoint: Endpoint) -> socket.socket:
    """The socket of a link that this test speaks for itself."""
    offer = endpoint.address.offers["tcp"]
    sock = socket.create_connection((offer["host"], offer["port"]))
    sock.settimeout(PATIENCE)
    process = os.urandom(16).hex()
    run(sock, handshake.prove(SECRET, process, endpoint.address.process))
    address = Address(process, "0" * 32, {}).to_json()

    def agree() -> Steps:
        yield handshake.write_message({"transport": "tcp", "address": address, "details": {}})
        answer = yield from handshake.read_message()
        assert answer == {"details": {}}
        yield handshake.write_message({"use": True})

    run(sock, agree())
    return sock


@pytest.mark.parametrize("rounds", [0, stream.ROUNDS], ids=["at once", "when it has its next turn"])
def test_a_defect_ends_the_link_and_no_other(served: Endpoint, caplog: pytest.LogCaptureFixture, rounds: int) -> None:
    """Something that nobody foresaw is raised on the I/O thread: who waits hears of it, and others are served."""
    with Endpoint(SECRET, transports=("tcp",)) as endpoint:
        link, other = endpoint.connect(served.address), endpoint.connect(served.address)
        region = served.register(bytearray(8)).region

        left = iter(range(rounds))

        def broken() -> bool:
            if next(left, None) is None:
                raise RuntimeError("unforeseen")
            with suppress(BlockingIOError):
                link.stream.receive(memoryview(bytearray(1000)))
            return True

        link._receive = broken  # type: ignore[method-assign]
        work = link.fetch_add(region, 0, 1)
        with pytest.raises(LinkLost, match=r"a defect of this process: RuntimeError\('unforeseen'\)"):
            work.wait(PATIENCE)
        assert "unforeseen" in caplog.text
        assert other.fetch_add(region, 0, 1).wait(PATIENCE) in (0, 1)


def drain(sock: socket.socket) -> bytes:
    found = b""
    try:
        while piece := sock.recv(1 << 16):
            found += piece
    except ConnectionResetError:
        pass
    return found


def checked(endpoint: Endpoint, memory: bytearray) -> None:
    """Nothing was written, and others are served."""
    assert memory == b"\xee" * len(memory)
    own = bytearray(8)
    with endpoint.register(own) as registration, Endpoint(SECRET, transports=("tcp",)) as other:
        other.connect(endpoint.address, timeout=PATIENCE).put(b"fine", registration.region).wait(PATIENCE)
    assert own[:4] == b"fine"


def test_random_frames_change_nothing(served: Endpoint, caplog: pytest.LogCaptureFixture) -> None:
    memory = bytearray(b"\xee" * 100)
    registration = served.register(memory)
    number = registration.region.number

    @given(
        st.lists(
            st.builds(
                lambda kind, files, work, size, region, key, offset, word, second, value, payload: (
                    HEADER.pack(kind, files, work, size, region, key, offset, word, key, second, value) + payload
                ),
                KINDS,
                st.integers(0, 255),
                NUMBERS,
                NUMBERS,
                st.sampled_from([0, number, number + 1]),
                st.binary(min_size=16, max_size=16),
                NUMBERS,
                st.sampled_from([0, number]),
                NUMBERS,
                st.integers(-(1 << 63), (1 << 63) - 1),
                st.binary(max_size=120),
            ),
            max_size=5,
        )
    )
    def send(sent: list[bytes]) -> None:
        with joined(served) as sock:
            try:
                sock.sendall(b"".join(sent))
                sock.shutdown(socket.SHUT_WR)
            except (BrokenPipeError, ConnectionResetError, OSError):
                pass  # it has broken the link already
            drain(sock)

    caplog.set_level("CRITICAL", "monarch.transport")
    send()
    checked(served, memory)


def test_random_bytes_as_frames_change_nothing(served: Endpoint) -> None:
    memory = bytearray(b"\xee" * 100)
    served.register(memory)
    for _ in range(200):
        with joined(served) as sock:
            sock.sendall(os.urandom(3 * SIZE))
            sock.shutdown(socket.SHUT_WR)
            drain(sock)
    checked(served, memory)


@pytest.mark.parametrize(
    "frame",
    [
        frames.plain(99),
        frames.plain(frames.TELL, text=b"no JSON"),
        frames.plain(frames.TELL, text=b"[" * 200_000),
        frames.plain(frames.TELL, text=b'{"unknown": 1}'),
        frames.plain(frames.TELL, text=b"{}", files=3),
        HEADER.pack(frames.DATA, 0, 5, 10, 0, NO_KEY, 0, 0, NO_KEY, 0, 0) + bytes(10),
        HEADER.pack(frames.TELL, 0, 0, 1 << 30, 0, NO_KEY, 0, 0, NO_KEY, 0, 0),
        HEADER.pack(frames.PUT, 0, 0, 1 << 60, 0, NO_KEY, 0, 0, NO_KEY, 0, 0),
    ],
)
def test_what_is_no_frame_breaks_the_link_and_says_why(served: Endpoint, frame: bytes) -> None:
    with joined(served) as sock:
        sock.sendall(frame)
        said = drain(sock)
    assert said[0] == frames.BROKEN
    assert b"its message is no frame" in said
    checked(served, bytearray(b"\xee"))


def test_data_is_taken_for_gets_only(served: Endpoint) -> None:
    """A peer that answers a put with data of its size would write to the memory that is put."""
    source = bytearray(b"\xee" * 10)
    with joined(served) as sock:
        while not served.links:  # the endpoint's thread makes it of what was sent
            pass
        work = served.links[0].put(source, Region(1, "0" * 32, 10, {}))
        number = HEADER.unpack(sock.recv(SIZE, socket.MSG_WAITALL))[2]
        sock.sendall(HEADER.pack(frames.DATA, 0, number, 10, 0, NO_KEY, 0, 0, NO_KEY, 0, 0) + bytes(10))
        with pytest.raises(LinkLost, match="data of 10 bytes that nobody asked for"):
            work.wait(PATIENCE)
    assert source == b"\xee" * 10


def test_an_answer_is_blanked_where_its_region_is_dropped() -> None:
    """However much of it is out: what follows has the right length, is zeros, and ends in a refusal."""
    view = memoryview(b"\x11" * 1000)
    for out in (0, 10, SIZE, SIZE + 1, SIZE + 999, SIZE + 1000, SIZE + 1001):
        owned = Owned(1, NO_KEY, view, view, 0, 1000, True, None, 0, "cpu")
        answer = frames.Answer(owned, view, 42)
        whole = b"".join(answer.buffers)
        frames.advance(answer.buffers, out)
        owned.dropped = True
        answer.look()
        rest = b"".join(answer.buffers)
        data_left = min(1000, max(0, SIZE + 1000 - out))
        if data_left == 0:
            assert rest == whole[out:]
            continue
        assert rest[: max(0, SIZE - out)] == whole[out:SIZE]
        rest = rest[max(0, SIZE - out) :]
        assert rest[:data_left] == bytes(data_left)
        assert rest[data_left:] == frames.refused(42, AccessRefused("the region was dropped while it was read"))


def test_atomics_are_atomic_over_all_transports_at_once() -> None:
    memory = bytearray(16)
    count = 300
    with (
        Endpoint(SECRET, transports=("shm", "tcp")) as owner,
        Endpoint(SECRET, transports=("shm",)) as near,
        Endpoint(SECRET, transports=("tcp",)) as far,
    ):
        region = owner.register(memory).region
        links = [each.connect(owner.address, timeout=PATIENCE) for each in (near, far)]
        assert [link.transport for link in links] == ["shm", "tcp"]
        works = []
        seen = []
        for _ in range(count):
            works += [link.fetch_add(region, 8, 1) for link in links]
            seen.append(owner.fetch_add(region, 8, 1))
        seen += [work.wait(PATIENCE) for work in works]
        assert sorted(seen) == list(range(3 * count))
        assert owner.compare_swap(region, 8, 3 * count, -1) == 3 * count
    assert memory == bytes(8) + b"\xff" * 8


def test_an_endpoint_that_cannot_listen_leaves_nothing() -> None:
    before = set(os.listdir("/proc/self/fd"))
    with pytest.raises(MonarchError, match="cannot listen on '192.0.2.1'"):
        Endpoint(SECRET, bind="192.0.2.1", transports=("shm", "tcp"))
    assert set(os.listdir("/proc/self/fd")) == before


def test_a_link_that_the_peer_does_not_hear_of_leaves_nothing(
    served: Endpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last message of the handshake, which says that the link is used, does not get through."""
    ended: list[str] = []
    monkeypatch.setattr(StreamLink, "ended", lambda link, error: ended.append(error.message))

    def broken(message: dict[str, Any]) -> Steps:
        raise OSError(errno.EPIPE, "Broken pipe")
        yield  # a generator

    monkeypatch.setattr(endpoint, "announce", broken)
    with Endpoint(SECRET, transports=("tcp",)) as other:
        with pytest.raises(MonarchError, match="cannot connect to process"):
            other.connect(served.address)
        assert "the peer does not know that it is used" in ended
        assert other.links == []
