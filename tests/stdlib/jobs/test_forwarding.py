"""Ports of hosts that are reached from here: by bytes that come and do not come, never by time."""

from __future__ import annotations

import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

import monarch
from monarch.actor import ActorError, this_host, this_proc
from monarch.compiler.mesh import Shape
from monarch.job import PortForwarder, forward
from monarch.runtime.actors.meshes import HostMesh
from monarch.stdlib.jobs.commands import Command
from monarch.stdlib.jobs.forwarding import Connector
from monarch.stdlib.jobs.shell import Terminal

WAIT = 60.0


@contextmanager
def serving(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """The port of a server that has a thread for each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def accept() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                threading.Thread(target=one, args=(connection,), daemon=True).start()

        def one(connection: socket.socket) -> None:
            with connection:
                serve(connection)

        threading.Thread(target=accept, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


def everything(connection: socket.socket) -> bytes:
    found = bytearray()
    while piece := connection.recv(1 << 16):
        found += piece
    return bytes(found)


def reached(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), WAIT)


def doubled(connection: socket.socket) -> None:
    """Answers when all has come: only where an end can be told in one direction alone."""
    connection.sendall(everything(connection) * 2)


def echoed(connection: socket.socket) -> None:
    with suppress(ConnectionResetError):
        while piece := connection.recv(1 << 16):
            connection.sendall(piece)


def test_connections_go_side_by_side_and_each_direction_has_its_own_end() -> None:
    with serving(doubled) as port, forward(this_host(), port) as here:
        first, second = reached(here), reached(here)
        for connection, text in ((first, b"one"), (second, b"other" * 200_000), (first, b" more")):
            connection.sendall(text)
        for connection in (second, first):
            connection.shutdown(socket.SHUT_WR)
        assert everything(first) == b"one more" * 2
        assert everything(second) == b"other" * 400_000
        first.close()
        second.close()


def test_who_sends_more_than_is_read_waits() -> None:
    """64 MiB do not fit anywhere on the way: what is sent before the other side reads is bounded."""
    read, sent = threading.Event(), 0

    def slow(connection: socket.socket) -> None:
        read.wait(WAIT)
        connection.sendall(len(everything(connection)).to_bytes(8, "big"))

    with serving(slow) as port, forward(this_host(), port) as here, reached(here) as connection:
        connection.setblocking(False)
        block, quiet = bytes(1 << 20), 0
        while sent < 1 << 26 and quiet < 40:
            try:
                sent += connection.send(block)
                quiet = 0
            except BlockingIOError:
                quiet += 1
                threading.Event().wait(0.005)  # for room, which need not come
        assert sent < 1 << 26
        read.set()
        connection.settimeout(WAIT)
        connection.sendall(bytes((1 << 26) - sent))
        connection.shutdown(socket.SHUT_WR)
        assert everything(connection) == (1 << 26).to_bytes(8, "big")


def test_the_end_of_the_block_is_that_of_its_connections() -> None:
    with serving(echoed) as port:
        with forward(this_host(), port) as here:
            connection = reached(here)
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"
        with connection, pytest.raises(ConnectionResetError):
            connection.recv(1)
        with pytest.raises(ConnectionRefusedError):
            reached(here)


def test_a_connection_that_nothing_accepts_is_reset_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with forward(this_host(), port) as here:
        with caplog.at_level(logging.WARNING), reached(here) as connection, pytest.raises(ConnectionResetError):
            connection.recv(1)
        with serving(echoed) as other, forward(this_host(), other) as there, reached(there) as connection:
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"
    assert f"ConnectionRefusedError: [Errno 111] Connect call failed ('127.0.0.1', {port})" in caplog.text


def test_a_server_that_breaks_a_connection_breaks_it_here_too() -> None:
    def breaks(connection: socket.socket) -> None:
        connection.recv(1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # reset at close

    with serving(breaks) as port, forward(this_host(), port) as here, reached(here) as connection:
        connection.sendall(b"x")
        with pytest.raises(ConnectionResetError):
            connection.recv(1)


def test_between_meshes_of_processes_each_goes_to_its_own() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    others = this_host().spawn_procs({"gpus": 2})
    forwarder = this_proc().spawn("forwarder", PortForwarder)
    with serving(lambda c: c.sendall(b"a")) as a, serving(lambda c: c.sendall(b"b")) as b:
        ports = (a, b)
        found = forwarder.forward.call_one(others, lambda at: ports[at["gpus"]], procs, "127.0.0.1:0").get(WAIT)
        for port, said in zip(found.values(), (b"a", b"b"), strict=True):
            with reached(port) as connection:
                assert everything(connection) == said
        for arguments, error in [
            ((others, 0, procs, "127.0.0.1:0"), "dst_port=0: a port is a whole number from 1 to 65535"),
            ((others, a, procs, "0.0.0.0:0"), "without a certificate"),
            ((others, a, procs, "9000"), "an address and a port"),
            ((others.slice(gpus=0), a, procs, "127.0.0.1:0"), "from each process to the one at the same place"),
            ((others, a, procs, f"127.0.0.1:{found.values()[0]}"), "address already in use"),
        ]:
            with pytest.raises(ActorError, match=error):
                forwarder.forward.call_one(*arguments).get(WAIT)
    forwarder.stop().get(WAIT)  # type: ignore[attr-defined]
    for port in found.values():
        with pytest.raises(ConnectionRefusedError):
            reached(port)


def test_a_call_that_waits_for_news_comes_back_without() -> None:
    """Calls that wait for minutes are reported as slow, with stacks, which no shell or connection is."""
    with serving(echoed) as port:
        there = this_proc().spawn("connector", Connector, port)
        assert there.prepare.call_one().get(WAIT) == port
        there.connect.call_one(0).get(WAIT)
        with monarch.config.configured(slow_call_warning="100ms"):
            assert there.read.call_one(0).get(WAIT) is None
        there.write.call_one(0, b"x").get(WAIT)
        while (said := there.read.call_one(0).get(WAIT)) is None:
            pass
        assert said == b"x"
        there.stop().get(WAIT)  # type: ignore[attr-defined]
    terminal = this_proc().spawn("terminal", Terminal, (24, 80), {"SHELL": "/bin/cat"}, None, "/")
    assert terminal.start.call_one().get(WAIT) == ""
    assert terminal.read.call_one(0.0).get(WAIT) == b""
    terminal.stop().get(WAIT)  # type: ignore[attr-defined]
    command = this_proc().spawn("command", Command, ["cat"], {}, None)
    assert command.read.call_one(0.0).get(WAIT) is None


def test_a_block_is_for_one_host() -> None:
    with pytest.raises(monarch.MonarchError, match="forwarded to one host, and this mesh has 2"):
        with forward(HostMesh(Shape.of({"hosts": 2}), None, None), 80):
            raise AssertionError
