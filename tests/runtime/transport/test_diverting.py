"""Bytes of a put that are received into other memory than the region's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from monarch.runtime.transport.endpoint import Endpoint, Registration
from monarch.runtime.transport.interface import Link, Signal

SECRET = b"a secret of sixteen bytes and more"
SIZE = 300_000


@pytest.fixture
def joined() -> Iterator[tuple[Link, Registration, bytearray]]:
    memory = bytearray(SIZE + 16)
    with Endpoint(SECRET, transports=["tcp"]) as owner, Endpoint(SECRET, transports=["tcp"]) as other:
        registration = owner.register(memory)
        yield other.connect(owner.address), registration, memory


def put(link: Link, to: Registration, data: bytes, value: int) -> None:
    link.put(data, to.region, 16, Signal(to.region, 0, value)).wait(10)


def test_the_put_that_was_meant_lies_elsewhere_and_the_next_does_not(
    joined: tuple[Link, Registration, bytearray],
) -> None:
    link, to, memory = joined
    target, data = bytearray(SIZE), bytes(range(250)) * (SIZE // 250)
    to.divert(16, 7, target)
    put(link, to, b"x" * SIZE, 6)  # another signal
    assert memory[16:] == b"x" * SIZE and not any(target)
    put(link, to, data, 7)
    assert to.undivert(16, 7)
    assert target == data and memory[16:] == b"x" * SIZE and memory[0] == 7
    put(link, to, b"y" * SIZE, 7)
    assert target == data and memory[16:] == b"y" * SIZE


def test_a_put_of_another_size_lies_where_it_is_put(joined: tuple[Link, Registration, bytearray]) -> None:
    link, to, memory = joined
    target = bytearray(SIZE)
    to.divert(16, 7, target)
    put(link, to, b"x" * (SIZE - 1), 7)
    assert not to.undivert(16, 7)
    assert memory[16:-1] == b"x" * (SIZE - 1) and not any(target)
