"""Strangers at an endpoint: what does not prove to know the secret gets nowhere, and costs nothing."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import ssl
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport import endpoint as endpoint_module
from monarch.runtime.transport import handshake, sockets
from monarch.runtime.transport.endpoint import Endpoint
from monarch.runtime.transport.handshake import HandshakeFailed, Read, Steps, Write
from monarch.runtime.transport.interface import Address, Region
from tests.runtime.transport.peers import PATIENCE, SECRET, contexts
from tests.sample import is_full

DIALER, ACCEPTOR = "d" * 32, "a" * 32


# -- the protocol, without sockets -------------------------------------------------------------------------------------


class Side:
    """One side of a handshake: what it wants to read next, what it has written, and how it ended."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.written: list[bytes] = []
        self.want = 0
        self.over = False
        self.result: Any = None
        self._go(None)

    def _go(self, data: bytes | None) -> None:
        try:
            step = next(self.steps) if data is None else self.steps.send(data)
            while isinstance(step, Write):
                self.written.append(step.data)
                step = next(self.steps)
            assert isinstance(step, Read)
            self.want = step.size
        except StopIteration as end:
            self.over, self.result, self.want = True, end.value, 0

    def feed(self, data: bytes) -> None:
        assert len(data) == self.want
        self._go(data)


def both(secret: bytes = SECRET, wanted: str = ACCEPTOR) -> tuple[Side, Side]:
    return Side(handshake.prove(secret, DIALER, wanted)), Side(handshake.verify(SECRET, ACCEPTOR))


def test_both_prove_who_they_are() -> None:
    dialer, acceptor = both()
    acceptor.feed(dialer.written[0])
    dialer.feed(acceptor.written[0])
    acceptor.feed(dialer.written[1])
    assert acceptor.over and acceptor.result == DIALER
    assert not dialer.over
    dialer.feed(acceptor.written[1])
    assert dialer.over


def test_a_wrong_secret_is_noticed_before_anything_that_depends_on_the_right_one_is_said() -> None:
    dialer, acceptor = both(b"another secret of enough bytes..")
    acceptor.feed(dialer.written[0])
    dialer.feed(acceptor.written[0])
    with pytest.raises(HandshakeFailed, match="did not prove to know the secret"):
        acceptor.feed(dialer.written[1])
    assert len(acceptor.written) == 1


def test_an_acceptor_that_does_not_know_the_secret_is_noticed() -> None:
    dialer, acceptor = both()
    acceptor.feed(dialer.written[0])
    dialer.feed(acceptor.written[0])
    with pytest.raises(HandshakeFailed, match="did not prove to know the secret"):
        dialer.feed(bytes(32))


def test_a_dialers_own_proof_sent_back_to_it_proves_nothing() -> None:
    dialer, acceptor = both()
    acceptor.feed(dialer.written[0])
    dialer.feed(acceptor.written[0])
    with pytest.raises(HandshakeFailed, match="did not prove to know the secret"):
        dialer.feed(dialer.written[1])


def test_what_was_said_once_cannot_be_said_again() -> None:
    dialer, acceptor = both()
    acceptor.feed(dialer.written[0])
    dialer.feed(acceptor.written[0])
    acceptor.feed(dialer.written[1])
    again = Side(handshake.verify(SECRET, ACCEPTOR))
    again.feed(dialer.written[0])
    with pytest.raises(HandshakeFailed, match="did not prove to know the secret"):
        again.feed(dialer.written[1])


def test_a_dialer_cannot_be_passed_on_to_another_endpoint_with_the_same_secret() -> None:
    dialer, _ = both()
    elsewhere = Side(handshake.verify(SECRET, "b" * 32))
    with pytest.raises(HandshakeFailed, match="it looks for process aaaaaaaa"):
        elsewhere.feed(dialer.written[0])
    forged = bytearray(dialer.written[0])
    forged[24:40] = bytes.fromhex("b" * 32)
    elsewhere = Side(handshake.verify(SECRET, "b" * 32))
    elsewhere.feed(bytes(forged))
    dialer.feed(elsewhere.written[0])
    with pytest.raises(HandshakeFailed, match="did not prove to know the secret"):
        elsewhere.feed(dialer.written[1])


@given(st.data())
def test_a_handshake_that_was_changed_on_the_way_fails(data: st.DataObject) -> None:
    """One bit of any message is another."""

    def changed(message: bytes, here: bool) -> bytes:
        if not here:
            return message
        bit = data.draw(st.integers(0, 8 * len(message) - 1))
        flipped = bytearray(message)
        flipped[bit // 8] ^= 1 << bit % 8
        return bytes(flipped)

    at = data.draw(st.integers(0, 3))
    dialer, acceptor = both()
    with pytest.raises(HandshakeFailed):
        acceptor.feed(changed(dialer.written[0], at == 0))
        dialer.feed(changed(acceptor.written[0], at == 1))
        acceptor.feed(changed(dialer.written[1], at == 2))
        dialer.feed(changed(acceptor.written[1], at == 3))


@given(st.binary(min_size=4, max_size=200))
def test_messages_are_bounded_json_objects(data: bytes) -> None:
    side = Side(handshake.read_message())
    size = struct.unpack(">I", data[:4])[0]
    if size > handshake.LARGEST_MESSAGE:
        with pytest.raises(HandshakeFailed, match="bytes, and 65536 are the most"):
            side.feed(data[:4])
        return
    side.feed(data[:4])
    assert side.want == size
    text = (data[4:] * (size + 1))[:size] if data[4:] else b"[" * size
    try:
        side.feed(text)
    except HandshakeFailed as error:
        assert "a message that is no" in str(error)
    else:
        assert isinstance(side.result, dict)


@pytest.mark.parametrize("text", [b"[]", b"3", b"{", b"[" * 60_000, b"\xff\xfe", b'{"a":' * 9000])
def test_hostile_messages_are_refused(text: bytes) -> None:
    side = Side(handshake.read_message())
    side.feed(struct.pack(">I", len(text)))
    with pytest.raises(HandshakeFailed, match="a message that is no"):
        side.feed(text)


# -- over sockets ------------------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> Iterator[Endpoint]:
    with Endpoint(SECRET, transports=("shm", "tcp")) as endpoint:
        yield endpoint


def stranger(endpoint: Endpoint, kind: str) -> socket.socket:
    offer = endpoint.address.offers[kind]
    if kind == "local":
        sock = socket.socket(socket.AF_UNIX)
        sock.connect("\0" + offer["name"])
    else:
        sock = socket.create_connection((offer["host"], offer["port"]))
    sock.settimeout(PATIENCE)
    return sock


def said(sock: socket.socket) -> bytes:
    """All that comes until the connection is closed."""
    found = b""
    while True:
        try:
            piece = sock.recv(4096)
        except ConnectionResetError:
            return found
        if not piece:
            return found
        found += piece


def still_serves(endpoint: Endpoint) -> None:
    """Who knows the secret is served, and nobody else has become a link."""
    memory = bytearray(16)
    with endpoint.register(memory) as registration, Endpoint(SECRET, transports=("shm", "tcp")) as other:
        other.connect(endpoint.address, timeout=PATIENCE).put(b"fine", registration.region).wait(PATIENCE)
        assert {link.peer.process for link in endpoint.links} <= {other.address.process}
    assert memory[:4] == b"fine"


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_garbage_is_dropped(served: Endpoint, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "monarch.transport")

    @given(st.binary(max_size=300))
    def garbage(data: bytes) -> None:
        with stranger(served, kind) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            assert said(sock) == b""

    garbage()
    still_serves(served)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_thousands_of_random_strings_get_nowhere(served: Endpoint, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "monarch.transport")
    for _ in range(10_000 if is_full() else 2_000):
        with stranger(served, kind) as sock:
            sock.send(os.urandom(80))
    still_serves(served)


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_a_handshake_cut_at_any_byte_is_dropped(served: Endpoint, kind: str) -> None:
    hello = next(handshake.prove(SECRET, DIALER, served.address.process))
    assert isinstance(hello, Write)
    for length in range(len(hello.data)):
        with stranger(served, kind) as sock:
            sock.sendall(hello.data[:length])
            sock.shutdown(socket.SHUT_WR)
            assert said(sock) == b""
    still_serves(served)


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_a_replayed_handshake_is_refused_and_logged(
    served: Endpoint, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    steps = handshake.prove(SECRET, DIALER, served.address.process)
    hello = next(steps)
    assert isinstance(hello, Write)
    with stranger(served, kind) as sock:
        sock.sendall(hello.data)
        challenge = sock.recv(40)
        next(steps)
        proof = steps.send(challenge)
        assert isinstance(proof, Write)
        sock.sendall(proof.data)
        assert len(sock.recv(32)) == 32
    with stranger(served, kind) as sock:
        sock.sendall(hello.data)
        assert sock.recv(40) != challenge
        sock.sendall(proof.data)
        assert said(sock) == b""
    assert "did not prove to know the secret" in caplog.text
    still_serves(served)


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"transport": "tcp"},
        {"transport": "tcp", "address": 5},
        {"transport": "tcp", "address": {"process": "x", "host": "y", "offers": {}}},
        {"transport": "tcp", "address": {"process": "0" * 32, "host": "0" * 32, "offers": {}}},
        {"use": True},
    ],
)
def test_what_an_authenticated_peer_says_is_checked_all_the_same(served: Endpoint, message: dict[str, Any]) -> None:
    with stranger(served, "tcp") as sock:
        steps = handshake.prove(SECRET, DIALER, served.address.process)
        step = next(steps)
        while True:
            if isinstance(step, Write):
                sock.sendall(step.data)
                step = next(steps)
            else:
                try:
                    step = steps.send(sock.recv(step.size, socket.MSG_WAITALL))
                except StopIteration:
                    break
        sock.sendall(handshake.write_message(message).data)
        assert said(sock) == b""
    still_serves(served)


@pytest.mark.parametrize("kind", ["local", "tcp"])
def test_who_is_silent_is_dropped(kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(endpoint_module, "GREETING_SECONDS", 0.05)
    with Endpoint(SECRET, transports=("shm", "tcp")) as endpoint, stranger(endpoint, kind) as sock:
        assert said(sock) == b""
    assert "it was silent for 0.05 s" in caplog.text


def test_strangers_do_not_keep_others_out(served: Endpoint) -> None:
    """More silent connections than are kept: the oldest go."""
    crowd = [stranger(served, "tcp") for _ in range(endpoint_module.GREETINGS + 10)]
    still_serves(served)
    assert said(crowd[0]) == b""
    for sock in crowd:
        sock.close()


def test_an_endpoint_with_another_secret_is_refused(served: Endpoint) -> None:
    with Endpoint(secrets.token_bytes(32)) as other:
        with pytest.raises(MonarchError, match=f"cannot connect to process {served.address.process[:8]}: it closed"):
            other.connect(served.address, timeout=PATIENCE)
        link = other.connect(served.address, SECRET, timeout=PATIENCE)
        assert link.transport == "shm"
    still_serves(served)


def test_a_process_that_is_gone_is_a_clear_error() -> None:
    with Endpoint(SECRET) as gone:
        address = gone.address
    with Endpoint(SECRET) as endpoint, pytest.raises(MonarchError, match="cannot connect to the local socket monarch-"):
        endpoint.connect(address)
    with (
        Endpoint(SECRET, transports=("tcp",)) as endpoint,
        pytest.raises(MonarchError, match="Connection refused"),
    ):
        endpoint.connect(address)


def test_connecting_can_be_given_up() -> None:
    class GivenUp(Exception):
        pass

    def give_up() -> None:
        raise GivenUp

    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = Address("a" * 32, "b" * 32, {"tcp": {"host": "127.0.0.1", "port": silent.getsockname()[1]}})
        with Endpoint(SECRET) as endpoint:
            with pytest.raises(GivenUp):
                endpoint.connect(address, check=give_up)
            with pytest.raises(MonarchError, match=r"not within 0.05 s(.|\n)*shm: the peer is on another host"):
                endpoint.connect(address, timeout=0.05)


def test_a_weak_secret_is_refused() -> None:
    with pytest.raises(MonarchError, match="has 5 bytes, and 16 are the least"):
        Endpoint(b"short")


# -- TLS ---------------------------------------------------------------------------------------------------------------


def test_tls_is_wanted_of_both_sides(certificates: Any, caplog: pytest.LogCaptureFixture) -> None:
    tls = contexts(certificates)
    with Endpoint(SECRET, transports=("tcp",), tls=tls) as endpoint:
        with Endpoint(SECRET, transports=("tcp",)) as plain, pytest.raises(MonarchError, match="cannot connect"):
            plain.connect(endpoint.address, timeout=PATIENCE)
        with Endpoint(SECRET, transports=("tcp",), tls=tls) as other:
            link = other.connect(endpoint.address, timeout=PATIENCE)
            assert link.reasons == ("tcp: over TLS",)
        with stranger(endpoint, "tcp") as sock:
            sock.sendall(os.urandom(300))
            said(sock)
    assert "dropped a connection from 127.0.0.1" in caplog.text


def test_a_certificate_that_nobody_signed_is_refused(certificates: Any) -> None:
    tls = contexts(certificates)
    stranger_client = ssl.create_default_context()
    with (
        Endpoint(SECRET, transports=("tcp",), tls=tls) as endpoint,
        Endpoint(SECRET, transports=("tcp",), tls=(tls[0], stranger_client)) as other,
        pytest.raises(MonarchError, match="certificate verify failed"),
    ):
        other.connect(endpoint.address, timeout=PATIENCE)


# -- addresses and regions as data -------------------------------------------------------------------------------------


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=12,
)


@given(JSON, st.dictionaries(st.sampled_from(("process", "host", "offers", "number", "key", "size", "details")), JSON))
def test_reading_descriptions_never_fails_otherwise(data: object, fields: dict[str, object]) -> None:
    for read in (Address.from_json, Region.from_json):
        for each in (data, fields):
            try:
                read(each)
            except MonarchError:
                pass


def test_descriptions_are_exact(served: Endpoint) -> None:
    with served.register(bytearray(100)) as registration:
        assert Region.from_json(registration.region.to_json()) == registration.region
    assert Address.from_json(served.address.to_json()) == served.address
    for name, value in (("number", True), ("number", -1), ("size", 1 << 63), ("key", "A" * 32), ("details", [])):
        with pytest.raises(MonarchError, match="a region's"):
            Region.from_json(registration.region.to_json() | {name: value})


# -- forks -------------------------------------------------------------------------------------------------------------


def test_a_fork_does_not_hold_links_open(served: Endpoint) -> None:
    """The child of a fork has none of its parent's sockets, so the parent's end is seen; and its endpoint is closed."""
    ended = threading.Event()
    dialer = Endpoint(SECRET, transports=("tcp",), lost=lambda link, error: ended.set())
    link = dialer.connect(served.address, timeout=PATIENCE)
    ready, done = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            link.put(b"", Region(1, "0" * 32, 8, {}))
        except MonarchError as error:
            os.write(ready[1], str(error).encode())
        os.read(done[0], 1)
        os._exit(0)
    try:
        assert b"belongs to the process that this one was forked from" in os.read(ready[0], 1000)
        served.close()
        assert ended.wait(PATIENCE)
    finally:
        os.write(done[1], b"x")
        os.waitpid(child, 0)
        dialer.close()
        for fd in (*ready, *done):
            os.close(fd)


def crowded() -> tuple[socket.socket, Address, list[socket.socket]]:
    """A local socket where as many connections wait as the kernel keeps."""
    listener, offer = sockets.listen_local(secrets.token_hex(16))
    listener.listen(0)
    waiting: list[socket.socket] = []
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        try:
            sock.connect("\0" + str(offer["name"]))
        except BlockingIOError:
            sock.close()
            return listener, Address("0" * 32, "0" * 32, {"local": offer}), waiting
        waiting.append(sock)


def test_a_crowd_at_a_local_socket_is_waited_for() -> None:
    listener, address, waiting = crowded()
    looks = 0

    def make_room() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:  # the first time there was none
            listener.accept()[0].close()

    with listener, sockets.connect_local(address, time.monotonic() + PATIENCE, make_room) as sock:
        assert not sock.getblocking() and looks >= 2
    for each in waiting:
        each.close()


def test_a_crowd_is_not_waited_for_without_end() -> None:
    listener, address, waiting = crowded()
    with listener, pytest.raises(MonarchError, match="too many connections wait there"):
        sockets.connect_local(address, time.monotonic())
    for each in waiting:
        each.close()
