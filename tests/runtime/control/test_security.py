"""Who must not get anywhere: each is refused, what is refused is logged with the peer's address, nothing comes of it,
and the host goes on serving."""

from __future__ import annotations

import logging
import os
import queue
import random
import re
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from monarch.compiler.plan import MonarchError
from monarch.runtime.control import codec, limits
from monarch.runtime.control import monarch_pb2 as pb
from monarch.runtime.control.certificates import make_certificates
from monarch.runtime.control.handshake import ControllerHandshake, Release
from monarch.runtime.control.loop import log
from monarch.runtime.control.message import Message
from monarch.runtime.control.records import Attach, HostPart, Record, Start
from monarch.runtime.control.security import Security, split_address
from monarch.runtime.control.tree import HostTree
from tests.runtime.control.hosts import SECONDS, TOKEN, Host, Subscriber, attached, running, token_security
from tests.runtime.control.raw import Proxy, RawStream, raw
from tests.sample import is_full

FRAMES = 2_000 if is_full() else 400


@pytest.fixture
def host(caplog: pytest.LogCaptureFixture) -> Iterator[Host]:
    """A host with a token, which after each test still serves."""
    caplog.set_level(logging.INFO, "monarch.control")
    with running(1) as (host,):
        yield host
        assert_serves(host)


def assert_serves(host: Host, security: Security | None = None) -> None:
    made = len(host.made)
    with attached([host], security) as tree:
        answers = Subscriber(tree)
        tree.send(Message("hello", head={"a": 1}, data=b"data"))
        assert bytes(answers.next().data) == b"data"
    assert len(host.made) == made + 1


def refusals(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was logged about peers that were refused or whose streams were ended: each with the peer's address."""
    ours = [record for record in caplog.records if record.name == log.name and record.levelno >= logging.WARNING]
    said = [record.getMessage() for record in ours]
    assert all(line.startswith("ipv4:127.0.0.1:") for line in said), said
    return said


@contextmanager
def logged(caplog: pytest.LogCaptureFixture, *parts: str) -> Iterator[None]:
    """One refusal is logged in the block, and says all of this."""
    before = len(refusals(caplog))
    yield
    said = refusals(caplog)[before:]
    assert len(said) == 1 and all(part in said[0] for part in parts), said


# -- who it is -----------------------------------------------------------------------------------------------------


def test_a_wrong_token_is_refused(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    with logged(caplog, "refused: the token is not this host's"), pytest.raises(MonarchError, match="not this host's"):
        HostTree([host.address], Security.token("another token entirely"))
    assert not host.made


def test_a_host_that_does_not_know_the_token_is_refused_by_the_controller(host: Host) -> None:
    """A listener that accepts anybody, to be sent what is meant for a host."""
    with running(1, Security.token("the listener's own token")) as (listener,):
        listener.agent.security = _AcceptsAnybody(listener.agent.security)
        with pytest.raises(MonarchError, match="token"):
            HostTree([listener.address], token_security())
        assert not listener.made


class _AcceptsAnybody(Security):
    def __init__(self, other: Security) -> None:
        super().__init__(secret=other.secret)


def test_a_client_that_says_nothing_of_itself_is_refused(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    with logged(caplog, "ended: a frame is 'sealed' where 'hello' is due"), raw(host.address) as stream:
        stream.write(pb.Frame(sealed=pb.Sealed(head=b"x")).SerializeToString())
        assert stream.refusal()[0] == "INVALID_ARGUMENT"
    assert not host.made


def test_a_client_that_takes_its_time_is_refused(
    host: Host, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "HANDSHAKE_SECONDS", 0.2)
    with logged(caplog, "has not proved its identity"), raw(host.address) as stream:
        stream.write(ControllerHandshake(b"x" * 16, Release(limits.PROTOCOL, "0")).hello())
        assert stream.refusal() == ("UNAUTHENTICATED", "the handshake took too long")


def test_another_version_is_refused_and_both_are_named(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    with (
        logged(caplog, "version 7 of the protocol (Monarch 9.9)", f"version {limits.PROTOCOL} "),
        pytest.raises(MonarchError, match=rf"version 7 of the protocol \(Monarch 9.9\).*version {limits.PROTOCOL} "),
    ):
        HostTree([host.address], token_security(), own=Release(7, "9.9"))


def test_a_host_of_another_version_is_refused_by_the_controller() -> None:
    with running(1) as (host,), raw(host.address) as stream:
        handshake = ControllerHandshake(TOKEN.encode(), Release(limits.PROTOCOL, "0.1"))
        stream.write(handshake.hello())
        challenge = pb.Frame.FromString(stream.read())
        challenge.challenge.protocol = 8
        with pytest.raises(Exception, match=f"the host speaks version 8 .*this end version {limits.PROTOCOL}"):
            handshake.prove(challenge.SerializeToString())


# -- what was said before, or by others --------------------------------------------------------------------------------


def test_a_recorded_session_is_of_no_use_to_who_plays_it_again(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    proxy = Proxy(host.address)
    tree = HostTree([proxy.address], token_security())
    answers = Subscriber(tree)
    tree.send(Message("hello", data=b"what was said"))
    answers.next()
    recorded = bytes(proxy.sent)
    tree.close()
    assert b"what was said" in recorded and host.made[0].ended.wait(SECONDS)
    with (
        logged(caplog, "refused: the token is not this host's"),
        socket.create_connection(split_address(host.address), timeout=SECONDS) as player,
    ):
        player.sendall(recorded)
        answer = b""
        while b"the token is not" not in answer:
            assert (more := player.recv(1 << 16))
            answer += more
    assert len(host.made) == 1
    proxy.close()


def test_what_somebody_alters_on_the_way_ends_the_stream(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    proxy = Proxy(host.address, lambda data: data.replace(b"pay 1 coin", b"pay 9 coin"))
    with tree_of(proxy.address) as tree, logged(caplog, "ended: frame", "altered"):
        lost = Subscriber(tree)
        tree.send(Message("order", data=b"pay 1 coin"))
        assert "altered" in lost.lost(1)[0]
    service = host.made[0]
    assert service.ended.wait(SECONDS) and service.got.empty()
    proxy.close()


@contextmanager
def tree_of(address: str) -> Iterator[HostTree]:
    tree = HostTree([address], token_security())
    try:
        yield tree
    finally:
        tree.close()


def sealed(stream: RawStream) -> Callable[..., bytes]:
    """Greets the host, and then seals records."""
    sealer = stream.greet(token_security()).sealer
    return lambda *records: sealer.seal(*codec.encode(records))


def attach(address: str) -> Attach:
    return Attach(0, (address,), 8, SECONDS)


def test_a_replayed_frame_ends_the_stream(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    with logged(caplog, "frame 1 came where frame 2 was due: replayed or lost"), raw(host.address) as stream:
        seal = sealed(stream)
        stream.write(seal(attach(host.address)))
        order = seal(Start("quiet"))
        stream.write(order)
        service = host.services.get(timeout=SECONDS)
        assert service.got.get(timeout=SECONDS).kind == "quiet"
        stream.write(order)
        assert stream.refusal()[0] == "INVALID_ARGUMENT"
    assert service.ended.wait(SECONDS) and service.got.empty()


# -- what is no message --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("records", "says"),
    [
        ([Start("x")], "before anything was attached"),
        ([attach("a:1"), attach("a:1")], "attached already"),
        ([attach("a:1"), Start("x", head=b"[]")], "a JSON object"),
        ([attach("a:1"), Start("x", head=b'{"a":')], "not JSON"),
        ([attach("a:1"), HostPart(0, 0, b"x")], "belongs to no message"),
        ([attach("a:1"), Start("x", size=1 << 60)], "at most"),
        ([attach("a:1"), Start("x" * 100)], "not a word"),
        ([attach("a:1"), Start("x", head=bytes(limits.HEAD_BYTES + 1))], "a head of"),
        ([Attach(0, ("a:1",), 100_000, 1.0)], "fan-out"),
    ],
    ids=lambda value: "" if isinstance(value, list) else value,
)
def test_a_malformed_message_ends_the_stream_of_who_sent_it(
    host: Host, caplog: pytest.LogCaptureFixture, records: list[Record], says: str
) -> None:
    with attached([host]) as good:
        answers = Subscriber(good)
        with logged(caplog, "ended: ", says), raw(host.address) as stream:
            seal = sealed(stream)
            for record in records:
                stream.write(seal(record))
            code, text = stream.refusal()
            assert code == "INVALID_ARGUMENT" and says in text
        good.send(Message("hello"))
        assert answers.next().kind == "echo"
    assert all(service.got.qsize() <= 1 for service in host.made)


def test_an_oversized_frame_ends_the_stream(host: Host) -> None:
    with raw(host.address) as stream:
        stream.write(bytes(limits.WIRE_BYTES + 1))
        assert stream.refusal()[0] == "RESOURCE_EXHAUSTED"
    with raw(host.address) as stream:
        seal = sealed(stream)
        stream.write(seal(attach(host.address), Start("quiet", size=limits.WIRE_BYTES, data=bytes(limits.WIRE_BYTES))))
        assert stream.refusal()[0] == "RESOURCE_EXHAUSTED"
    assert not host.made


def test_random_frames_get_nowhere(host: Host, caplog: pytest.LogCaptureFixture) -> None:
    """Each in a stream of its own: as the first frame, as the answer to the challenge, behind a whole handshake. (The
    decoders get ten thousand more in test_codec.)"""
    randomness = random.Random(5)
    with raw(host.address) as stream:
        for at in range(FRAMES):
            if at % 3:
                handshake = ControllerHandshake(TOKEN.encode(), Release(limits.PROTOCOL, "0"))
                stream.write(handshake.hello())
                challenge = stream.read()
                if at % 3 == 2:
                    stream.write(handshake.prove(challenge))
                    stream.read()
            stream.write(randomness.randbytes(randomness.randrange(200)))
            assert stream.refusal()[0] == "INVALID_ARGUMENT"
            stream.end()
            stream.begin()
    assert len(refusals(caplog)) >= FRAMES and not host.made


def test_ten_thousand_random_byte_strings_get_nowhere(host: Host) -> None:
    randomness = random.Random(6)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    address = split_address(host.address)
    open_ones: list[socket.socket] = []
    for at in range(10_000):
        client = socket.create_connection(address, timeout=SECONDS)
        client.sendall((preface if at % 2 else b"") + randomness.randbytes(randomness.randrange(1, 300)))
        open_ones.append(client)
        if len(open_ones) == 100:
            for each in open_ones:
                each.close()
            open_ones.clear()
    assert not host.made


def test_who_is_refused_before_a_word_is_logged(host: Host, folder: Path, strangers: Path) -> None:
    """Bytes that are no HTTP/2, no TLS, no certificate, another authority's: with the address, and how often."""
    if not host.agent.connections.works:
        pytest.skip("the kernel does not tell of connections that end (sock_diag)")
    with running(1, Security.tls(folder / "127.0.0.1")) as (tls,), heard() as lines:
        for refused in (host, tls):
            with socket.create_connection(split_address(refused.address), timeout=SECONDS) as client:
                client.sendall(b"no HTTP")
                client.shutdown(socket.SHUT_WR)
                while client.recv(1 << 16):
                    pass
            line = lines.get(timeout=SECONDS)
            assert line == "a connection was refused, or ended before the first message: from 127.0.0.1"
        for certificate in (None, strangers / "controller"):
            refused_certificate(tls, folder, certificate)
        count = 0
        while count < 2:
            found = re.match(r"(a|\d+) connections? w", lines.get(timeout=SECONDS))
            assert found
            count += 1 if found[1] == "a" else int(found[1])
        assert_serves(host)
        assert_serves(tls, Security.tls(folder / "controller"))
    assert lines.empty()  # good clients are not among them


@contextmanager
def heard(level: int = logging.WARNING) -> Iterator[queue.SimpleQueue[str]]:
    """What is logged, as it is logged."""
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    handler = logging.Handler(level)
    handler.emit = lambda record: lines.put(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("monarch.control")
    before = logger.level
    logger.setLevel(level)
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


# -- TLS -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("ours")
    make_certificates(made, ["127.0.0.1,localhost"])
    return made


@pytest.fixture(scope="module")
def strangers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("theirs")
    make_certificates(made, ["127.0.0.1,localhost"])
    return made


@pytest.fixture
def tls_host(folder: Path) -> Iterator[Host]:
    with running(1, Security.tls(folder / "127.0.0.1")) as (host,):
        yield host
        assert_serves(host, Security.tls(folder / "controller"))


def test_hosts_attach_each_other_with_their_certificates(folder: Path) -> None:
    with running(5, Security.tls(folder / "127.0.0.1")) as hosts:
        with attached(hosts, Security.tls(folder / "controller"), fan_out=1) as tree:
            answers = Subscriber(tree)
            tree.send(Message("hello"))
            assert len(answers.several(5)) == 5


def test_a_certificate_of_another_authority_is_refused(tls_host: Host, strangers: Path) -> None:
    with pytest.raises(MonarchError, match="its certificate is not accepted"):
        HostTree([tls_host.address], Security.tls(strangers / "controller"))
    assert not tls_host.made


def test_a_client_without_a_certificate_or_with_a_strangers_is_refused_by_the_host(
    tls_host: Host, folder: Path, strangers: Path
) -> None:
    for certificate in (None, strangers / "controller"):
        refused_certificate(tls_host, folder, certificate)
    assert not tls_host.made


def refused_certificate(host: Host, folder: Path, certificate: Path | None) -> None:
    client = ssl.create_default_context(cafile=str(folder / "ca.pem"))
    client.set_alpn_protocols(["h2"])
    if certificate:
        client.load_cert_chain(certificate / "cert.pem", certificate / "key.pem")
    with socket.create_connection(split_address(host.address), timeout=SECONDS) as plain:
        with client.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped:
            try:
                wrapped.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
                assert wrapped.recv(100) == b""
            except OSError:
                pass  # refused while it was being sent to


def test_a_client_without_tls_is_refused(tls_host: Host) -> None:
    with pytest.raises(MonarchError, match="or uses TLS"):
        HostTree([tls_host.address], token_security())
    assert not tls_host.made


def test_a_host_without_tls_is_refused(host: Host, folder: Path) -> None:
    with pytest.raises(MonarchError, match="does not use TLS"):
        HostTree([host.address], Security.tls(folder / "controller"))


def test_a_controllers_certificate_makes_no_host(folder: Path) -> None:
    security = Security.tls(folder / "controller")
    with running(1, security) as (false,), pytest.raises(MonarchError, match="unsupported certificate purpose"):
        HostTree([false.address], security)


def test_a_host_under_another_name_is_refused(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["node1"])
    with running(1, Security.tls(tmp_path / "node1")) as (host,), pytest.raises(MonarchError, match="127.0.0.1"):
        HostTree([host.address], Security.tls(tmp_path / "controller"))


def test_random_bytes_get_nowhere_with_tls(tls_host: Host) -> None:
    randomness = random.Random(8)
    for _ in range(500):
        with socket.create_connection(split_address(tls_host.address), timeout=SECONDS) as client:
            client.sendall(randomness.choice([b"", b"\x16\x03\x01\x02\x00"]) + randomness.randbytes(200))
    assert not tls_host.made


def test_the_data_between_workers_uses_the_same_certificates(folder: Path, strangers: Path) -> None:
    contexts = Security.tls(folder / "127.0.0.1").contexts()
    assert contexts is not None
    for client, accepted in ((contexts[1], True), (_contexts(strangers)[1], False)):
        here, there = socket.socketpair()
        here.settimeout(SECONDS)
        there.settimeout(SECONDS)
        assert _shake(contexts[0], client) is accepted
        here.close()
        there.close()
    assert token_security().contexts() is None


def _contexts(folder: Path) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    contexts = Security.tls(folder / "127.0.0.1").contexts()
    assert contexts is not None
    return contexts


def _shake(server: ssl.SSLContext, client: ssl.SSLContext) -> bool:
    """A handshake in memory."""
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(up, down, server_side=True),
        client.wrap_bio(down, up, server_hostname="127.0.0.1"),
    ]
    done: set[int] = set()
    while len(done) < 2:
        for at in (1, 0):
            try:
                ends[at].do_handshake()
                done.add(at)
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return False
    return True


# -- what is refused before anything is listened on ------------------------------------------------------------------


def test_a_token_is_for_loopback_or_for_a_network_that_was_called_trusted() -> None:
    for address in ("0.0.0.0:0", "192.0.2.1:4242", "[::]:0", "node1:4242"):
        with pytest.raises(MonarchError, match="no loopback address"):
            Host(token_security(), address)
        with pytest.raises(MonarchError, match="no loopback address"):
            HostTree([address], token_security())
    trusting = Security.token(TOKEN, trusted_network=True)
    with running(1, trusting, listen="0.0.0.0:0") as (host,):
        port = split_address(host.address)[1]
        tree = HostTree([f"127.0.0.1:{port}"], token_security())
        tree.close()


def test_a_token_file_is_for_its_owner_only(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(TOKEN + "\n")
    for mode in (0o644, 0o640, 0o604, 0o620, 0o602):
        path.chmod(mode)
        with pytest.raises(MonarchError, match=f"mode {mode:o}"):
            Security.token(path)
    path.chmod(0o600)
    assert Security.token(path).secret == TOKEN.encode()


def test_a_short_token_is_refused() -> None:
    with pytest.raises(MonarchError, match="a token of 5 bytes: it has to have 16"):
        Security.token("short")


def test_a_key_is_for_its_owner_only(tmp_path: Path) -> None:
    make_certificates(tmp_path)
    for path in tmp_path.rglob("*key.pem"):
        assert path.stat().st_mode & 0o777 == 0o600
    key = tmp_path / "controller" / "key.pem"
    key.chmod(0o644)
    with pytest.raises(MonarchError, match="key.pem can be read or written by others"):
        Security.tls(tmp_path / "controller")


def test_a_folder_without_certificates_is_an_error_that_names_those_that_have_some(tmp_path: Path) -> None:
    make_certificates(tmp_path, ["node1"])
    with pytest.raises(MonarchError, match="controller, node1"):
        Security.tls(tmp_path)
    (tmp_path / "node1" / "key.pem").write_bytes((tmp_path / "controller" / "key.pem").read_bytes())
    with pytest.raises(MonarchError, match="cannot be used"):
        Security.tls(tmp_path / "node1")


def test_an_address_that_is_taken_is_an_error_that_says_so() -> None:
    with (
        running(1) as (host,),
        pytest.raises(MonarchError, match=f"cannot listen on {host.address}: Address already in use"),
    ):
        Host(token_security(), host.address)


def test_an_address_that_is_not_here_is_an_error_that_says_so() -> None:
    wanted = "cannot listen on 192.0.2.1:4242: Cannot assign requested address\n.*an address of this machine"
    with pytest.raises(MonarchError, match=wanted):
        Host(Security.token("0123456789abcdef", trusted_network=True), "192.0.2.1:4242")


def test_nothing_here_unpickles() -> None:
    folder = Path(codec.__file__).parent
    assert not [path for path in folder.glob("*.py") if "pickle" in path.read_text()]
    assert os.path.exists(folder / "agent.py")


def test_a_connection_that_is_closed_at_first_is_tried_again(host: Host) -> None:
    """As by a host that strangers have just flooded."""
    refused = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)

    def serve() -> None:
        while len(refused) < 2:
            client, _ = listener.accept()
            client.close()
            refused.append(client)
        client, _ = listener.accept()
        there = socket.create_connection(split_address(host.address))
        threads = [threading.Thread(target=pump, args=ends) for ends in ((client, there), (there, client))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        client.close()
        there.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = threading.Thread(target=serve)
        server.start()
        tree = HostTree([f"127.0.0.1:{listener.getsockname()[1]}"], token_security())
        assert len(refused) == 2 and len(tree.hosts) == 1
        tree.close()
        server.join(SECONDS)
