"""A link that does as it is told, between two sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from monarch.testing import chaos


@pytest.fixture
def ends() -> Iterator[tuple[chaos.Link, socket.socket, socket.socket]]:
    """A link, and who speaks over it: near and far."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        with chaos.Link(f"127.0.0.1:{server.getsockname()[1]}") as link:
            host, _, port = link.address.rpartition(":")
            with socket.create_connection((host, int(port)), timeout=30) as near:
                far, _ = server.accept()
                with far:
                    far.settimeout(30)
                    yield link, near, far


Ends = tuple[chaos.Link, socket.socket, socket.socket]


def test_it_passes_on_what_is_sent_both_ways(ends: Ends) -> None:
    _, near, far = ends
    near.sendall(b"down")
    assert far.recv(9) == b"down"
    far.sendall(b"up")
    assert near.recv(9) == b"up"
    near.close()
    assert far.recv(9) == b""


def test_one_bit_is_turned_once(ends: Ends) -> None:
    link, near, far = ends
    link.corrupt()
    near.sendall(b"aaa")
    assert far.recv(9) == b"a`a"
    near.sendall(b"aaa")
    assert far.recv(9) == b"aaa"


def test_what_is_dropped_does_not_come(ends: Ends) -> None:
    link, near, far = ends
    link.drop()
    near.sendall(b"first")
    while link.spoil is not None:  # it has been read
        threading.Event().wait(0.001)
    near.sendall(b"second")
    assert far.recv(9) == b"second"


def test_what_is_held_comes_when_it_is_let_go(ends: Ends) -> None:
    link, near, far = ends
    link.hold()
    near.sendall(b"late")
    far.setblocking(False)
    with pytest.raises(BlockingIOError):
        far.recv(9)
    far.settimeout(30)
    link.let_go()
    assert far.recv(9) == b"late"


def test_both_ends_find_it_cut(ends: Ends) -> None:
    link, near, far = ends
    near.sendall(b"x")
    assert far.recv(9) == b"x"
    link.cut()
    for end in (near, far):
        try:
            assert end.recv(9) == b""
        except ConnectionResetError:
            pass
