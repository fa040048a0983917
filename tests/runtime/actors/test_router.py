"""Sockets between processes: who may connect, and what comes of those who go."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from monarch.runtime.actors.messages.address import new_address
from monarch.runtime.actors.messages.message import Payload
from monarch.runtime.actors.messages.protocol import Head
from monarch.runtime.actors.messages.router import Router, listen
from tests.runtime.actors.conftest import WAIT


class Peer:
    """A router that keeps what it is sent."""

    def __init__(self) -> None:
        self.address = new_address()
        self.got: list[tuple[str, Head, object]] = []
        self.enough = threading.Event()
        self.wanted = 1
        self.router = Router(self.address, listen(self.address), self.take)
        self.router.start()

    def take(self, sender: str, head: Head, payload: Payload) -> None:
        self.got.append((sender, head, payload.decode()))
        if len(self.got) >= self.wanted:
            self.enough.set()


def test_messages_come_in_order_also_when_they_have_to_wait() -> None:
    one, two = Peer(), Peer()
    two.wanted = 5000
    for number in range(5000):  # far more than a socket holds
        assert one.router.send(two.address, (number,), Payload.of("x" * (number % 3 * 1000)))
    assert two.enough.wait(WAIT)
    assert [head for _, head, _ in two.got] == [(number,) for number in range(5000)]
    assert {sender for sender, _, _ in two.got} == {one.address}
    one.router.close()
    two.router.close()


def test_sending_to_nobody_and_to_those_who_have_gone() -> None:
    one, two = Peer(), Peer()
    assert not one.router.send(new_address(), (1,), Payload.of(None))
    assert one.router.send(two.address, (1,), Payload.of(None))
    assert two.enough.wait(WAIT)
    one.router.gone(two.address)
    assert not one.router.send(two.address, (2,), Payload.of(None))
    one.router.close()
    two.router.close()


INTRUDER = """
import os, socket, sys
os.setuid(65534)
peer = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
peer.connect("\\0monarch-" + sys.argv[1])
try:
    peer.send(b"0" * 32)
    peer.send(bytes.fromhex(sys.argv[2]))
    print("said", len(peer.recv(10)))
except ConnectionError as error:
    print("refused")
"""


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_another_user_is_not_listened_to(tmp_path: Path) -> None:
    peer, trap = Peer(), tmp_path / "unpickled"
    data = pickle.dumps((("head",), Trap(trap)))
    said = subprocess.run(
        [sys.executable, "-c", INTRUDER, peer.address, data.hex()], capture_output=True, text=True, timeout=WAIT
    )
    assert said.stdout.strip() in ("refused", "said 0"), said.stderr
    other = Peer()
    assert other.router.send(peer.address, (1,), Payload.of(None)) and peer.enough.wait(WAIT)
    assert len(peer.got) == 1 and not trap.exists()
    peer.router.close()
    other.router.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
def test_nothing_is_sent_to_another_user() -> None:
    address = new_address()
    code = (
        "import os, socket, sys\n"
        "os.setuid(65534)\n"
        "listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)\n"
        "listener.bind('\\0monarch-' + sys.argv[1]); listener.listen(5); print('ready', flush=True)\n"
        "connection, _ = listener.accept(); print(len(connection.recv(100)))\n"
    )
    impostor = subprocess.Popen(
        [sys.executable, "-c", code, address], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert impostor.stdout is not None and impostor.stdout.readline() == "ready\n"
    peer = Peer()
    assert not peer.router.send(address, (1,), Payload.of("a secret"))
    out, err = impostor.communicate(timeout=WAIT)
    assert out == "0\n", err
    peer.router.close()


def test_addresses_are_not_to_be_guessed() -> None:
    assert len({new_address() for _ in range(100)}) == 100 and len(new_address()) == 32
    address = new_address()
    with listen(address), pytest.raises(OSError):
        listen(address)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client, pytest.raises(ConnectionRefusedError):
        client.connect("\0monarch-" + address)
