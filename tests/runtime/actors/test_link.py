"""Connections between processes of two hosts: frames, whatever the pieces in which they come."""

from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Callable

import pytest
import torch

from monarch.runtime.actors.messages.link import Link
from monarch.runtime.actors.messages.memory import MessageMemory
from monarch.runtime.actors.messages.message import PACKET, Payload
from monarch.runtime.actors.messages.protocol import RELAY, Head
from monarch.runtime.transport.streams import Buffers, Stream


class Loop:
    """One that the test turns."""

    def __init__(self) -> None:
        self.handlers: dict[int, Callable[[int], None]] = {}
        self.poll = select.epoll()

    def watch(self, fd: int, handler: Callable[[int], None], events: int = select.EPOLLIN) -> None:
        self.handlers[fd] = handler
        self.poll.register(fd, events)

    def change(self, fd: int, events: int) -> None:
        self.poll.modify(fd, events)

    def forget(self, fd: int) -> None:
        del self.handlers[fd]
        self.poll.unregister(fd)

    def soon(self, task: Callable[[], None]) -> None:
        task()

    def later(self, seconds: float, ring: Callable[[], None]) -> None:
        raise AssertionError("a link sets no alarm")

    def turn(self) -> None:
        for fd, events in self.poll.poll(10):
            if fd in self.handlers:
                self.handlers[fd](events)


class Pieces(Stream):
    """A stream of which little is sent and read at a time."""

    def __init__(self, sock: socket.socket, most: int) -> None:
        super().__init__(sock)
        self._most = most
        self.send = self._send
        self.receive = self._receive

    def _send(self, buffers: Buffers) -> int:
        return self.socket.send(memoryview(buffers[0])[: self._most])

    def _receive(self, view: memoryview) -> int:
        return self.socket.recv_into(view[: self._most])


class Pair:
    """Two ends, and what came out of each."""

    def __init__(self, most: int | None = None) -> None:
        self.loop = Loop()
        self.got: dict[str, list[tuple[Head, Payload]]] = {"a": [], "b": []}
        self.ended: dict[str, str] = {}
        self.links = {name: Link(name, self.loop, self._take, self._lost) for name in "ab"}
        self.sockets = socket.socketpair()
        self.most = most

    def join(self) -> None:
        for link, sock in zip(self.links.values(), self.sockets, strict=True):
            link.join(Stream(sock) if self.most is None else Pieces(sock, self.most))

    def _take(self, peer: str, head: Head, payload: Payload) -> None:
        self.got[peer].append((head, payload))

    def _lost(self, link: Link, why: str) -> None:
        self.ended[link.peer] = why


@pytest.mark.parametrize("most", [None, 100_003, 4099])
def test_messages_of_all_sizes_come_as_they_were_sent(most: int | None) -> None:
    pair = Pair(most)
    sizes = [0, 1, 1000, 15_000, 16_384, 20_000, 300_000, 0, 16_383, 1]
    tensors = [torch.arange(size, dtype=torch.float32) for size in sizes]
    for number, tensor in enumerate(tensors):
        assert pair.links["a"].send((number,), Payload.of(tensor))  # those before it is joined wait
        assert pair.links["b"].send((number,), Payload.of(["x" * tensor.numel(), tensor, tensor + 1]))
        if number == 4:
            pair.join()
    while min(map(len, pair.got.values())) < len(sizes):
        pair.loop.turn()
    for number, tensor in enumerate(tensors):
        head, payload = pair.got["b"][number]
        assert head == (number,) and torch.equal(payload.decode(), tensor)
        head, payload = pair.got["a"][number]
        text, one, two = payload.decode()
        assert head == (number,) and text == "x" * tensor.numel()
        assert torch.equal(one, tensor) and torch.equal(two, tensor + 1)
        one += 1  # the memory is the receiver's, and nobody else's
        assert torch.equal(one, two)
        del one, two, payload
        pair.got["a"][number] = (), Payload.of(None)  # and may be used for another message from now on


def test_what_was_sent_before_the_end_is_taken() -> None:
    pair = Pair()
    pair.join()
    pair.links["a"].send((1,), Payload.of("last words"))
    over: list[bool] = []
    pair.links["b"].then.append(lambda: over.append(len(pair.got["b"]) == 1))
    pair.sockets[0].shutdown(socket.SHUT_WR)
    while "b" not in pair.ended:
        pair.loop.turn()
    assert over == [True]
    assert not pair.links["b"].open and not pair.links["b"].send((2,), Payload.of(None))


def test_a_frame_that_is_too_long_ends_the_link() -> None:
    pair = Pair()
    pair.links["b"].join(Stream(pair.sockets[1]))
    pair.sockets[0].send((PACKET + 1).to_bytes(4, "big"))
    while "b" not in pair.ended:
        pair.loop.turn()
    assert f"a packet of {PACKET + 1} bytes" in pair.ended["b"]


def test_what_there_is_no_memory_for_is_an_error_where_it_is_wanted_and_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    pair = Pair()
    pair.join()
    with monkeypatch.context() as patch:
        patch.setattr("monarch.runtime.actors.messages.link.room", full)
        patch.setattr(MessageMemory, "room", full)
        tensor = torch.zeros(300_000)
        pair.links["a"].send((1,), Payload.of([tensor, tensor + 1]))
        pair.links["a"].send((RELAY, "to", "from", (2,)), Payload.of(tensor))
        while len(pair.got["b"]) < 2:
            pair.loop.turn()
    pair.links["a"].send((3,), Payload.of("small"))
    while len(pair.got["b"]) < 3:
        pair.loop.turn()
    lost, relayed, small = (payload for _, payload in pair.got["b"])
    with pytest.raises(OSError, match="no room for a message of 2400000 bytes: Cannot allocate memory"):
        lost.decode()
    with pytest.raises(OSError, match="no room for a message of 1200000 bytes"):
        relayed.decode()
    assert small.decode() == "small" and not pair.ended


def test_one_that_fails_before_it_is_joined() -> None:
    pair = Pair()
    pair.links["a"].send((1,), Payload.of(None))
    pair.links["a"].fail("nobody is there")
    assert pair.ended == {"a": "nobody is there"} and not pair.links["a"].send((2,), Payload.of(None))
    pair.links["a"].join(Stream(pair.sockets[0]))  # too late
    with pytest.raises(OSError):
        os.fstat(pair.sockets[0].fileno())
