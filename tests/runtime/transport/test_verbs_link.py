"""What only links over verbs do, on a real device: memory out of its reach, forks, peers that misbehave."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import pytest

from monarch.runtime.transport.endpoint import Endpoint
from monarch.runtime.transport.interface import AccessRefused, LinkLost, Signal
from monarch.runtime.transport.verbs import adapter
from monarch.runtime.transport.verbs.adapter import VerbsFailed
from monarch.runtime.transport.verbs.link import VerbsLink
from monarch.runtime.transport.verbs.memory import Memories
from tests.runtime.transport.peers import PATIENCE, SECRET, without_verbs

LARGE = 100_000


@pytest.fixture(params=["pyverbs", "ibverbs"])
def ends(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Endpoint, Endpoint]]:
    """Two endpoints in this process."""
    if why := without_verbs(request.param):
        pytest.skip(why)
    monkeypatch.setattr(adapter, "LIBRARIES", (request.param,))
    with Endpoint(SECRET, transports=("verbs",)) as owner, Endpoint(SECRET, transports=("verbs",)) as user:
        yield owner, user


@pytest.fixture
def refused(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Sizes of memory that the device will not register."""
    sizes: set[int] = set()
    register = Memories.register

    def limited(self: Memories, device: str, address: int, size: int, access: int) -> Any:
        if size in sizes:
            raise VerbsFailed("too much is locked already", 12)
        return register(self, device, address, size, access)

    monkeypatch.setattr(Memories, "register", limited)
    return sizes


def test_a_region_out_of_reach_goes_over_the_stream(ends: tuple[Endpoint, Endpoint], refused: set[int]) -> None:
    owner, user = ends
    refused.add(LARGE)
    memory = bytearray(LARGE)
    region = owner.register(memory).region
    link = user.connect(owner.address)
    data, back = os.urandom(LARGE - 8), bytearray(LARGE - 8)
    link.put(data, region, 8, Signal(region, 0, 7)).wait(PATIENCE)
    link.get(back, region, 8).wait(PATIENCE)
    assert bytes(back) == data and bytes(memory) == (7).to_bytes(8, "little") + data


def test_one_order_holds_for_both_ways(ends: tuple[Endpoint, Endpoint], refused: set[int]) -> None:
    """Turn by turn into memory within and out of reach; the last word of each is of the last post."""
    owner, user = ends
    refused.add(LARGE)
    near, far = bytearray(2 * LARGE), bytearray(LARGE)
    inside, outside = owner.register(near).region, owner.register(far).region
    link = user.connect(owner.address)
    for turn in range(1, 20):
        link.post(bytes([turn]) * 5000, outside, 8)
        link.post(bytes([turn]) * 5000, inside, 8, Signal(inside, 0, turn))
        link.post(b"", inside, 0, Signal(outside, 0, turn))
    link.put(b"", inside, 0, Signal(inside, 0, 99)).wait(PATIENCE)
    assert bytes(near[:5008]) == (99).to_bytes(8, "little") + bytes([19]) * 5000
    assert bytes(far[:5008]) == (19).to_bytes(8, "little") + bytes([19]) * 5000


def test_a_source_out_of_reach_goes_over_the_stream(ends: tuple[Endpoint, Endpoint], refused: set[int]) -> None:
    owner, user = ends
    refused.add(LARGE)
    memory = bytearray(2 * LARGE)
    region = owner.register(memory).region
    link = user.connect(owner.address)
    data, back = os.urandom(LARGE), bytearray(LARGE)
    link.put(b"near", region).wait(PATIENCE)
    link.put(data, region, 4).wait(PATIENCE)
    link.get(back, region, 4).wait(PATIENCE)
    assert bytes(memory[:4]) == b"near" and bytes(back) == data


def test_a_refused_post_over_the_stream_breaks_the_link(ends: tuple[Endpoint, Endpoint], refused: set[int]) -> None:
    owner, user = ends
    refused.add(LARGE)
    registration = owner.register(bytearray(LARGE))
    link = user.connect(owner.address)
    link.put(b"x", registration.region).wait(PATIENCE)
    registration.drop()
    with pytest.raises(LinkLost, match="a post was refused"):
        while True:
            link.post(b"x", registration.region)


def test_a_forked_child_does_no_harm_to_the_connection(ends: tuple[Endpoint, Endpoint]) -> None:
    """Whatever the child destroys of what it has inherited, the parent's connection stands."""
    owner, user = ends
    memory = bytearray(LARGE)
    region = owner.register(memory).region
    link = user.connect(owner.address)
    link.put(b"before", region).wait(PATIENCE)
    child = os.fork()
    if not child:
        try:
            held = [name for name in os.listdir("/proc/self/fd") if "infiniband" in _target(name)]
            assert isinstance(link, VerbsLink)
            link.connection.pair.close()
        except VerbsFailed:
            gc.collect()
            os._exit(0 if not held else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    link.put(os.urandom(LARGE), region).wait(PATIENCE)


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        return ""


@pytest.mark.parametrize(
    "message",
    [
        {"open": "1", "key": "00"},
        {"open": 1, "key": "xyz"},
        {"opened": 77, "key": "0" * 32, "reach": [0, 0, 8, 1, 1]},
        {"drop": None},
        {"close": 5},
        {},
    ],
)
def test_a_message_that_is_none_ends_the_link(ends: tuple[Endpoint, Endpoint], message: dict[str, Any]) -> None:
    owner, user = ends
    link = user.connect(owner.address)
    assert isinstance(link, VerbsLink)
    link.tell(message)
    with pytest.raises(LinkLost):
        link.fetch_add(owner.register(bytearray(8)).region, 0, 1).wait(PATIENCE)
    assert user.connect(owner.address).transport == "verbs"


def test_a_signal_for_a_region_that_was_not_opened_ends_the_link(ends: tuple[Endpoint, Endpoint]) -> None:
    owner, user = ends
    opened, other = owner.register(bytearray(64)), owner.register(bytearray(b"\xee" * 64))
    link = user.connect(owner.address)
    assert isinstance(link, VerbsLink)
    link.put(b"x", opened.region).wait(PATIENCE)
    reach = link.reaches[opened.region.number, opened.region.key]
    assert reach is not None
    reach.number = other.region.number
    with pytest.raises(LinkLost):
        link.put(b"", opened.region, 0, Signal(opened.region, 8, 1)).wait(PATIENCE)
    with pytest.raises(LinkLost):
        link.fetch_add(other.region, 0, 0).wait(PATIENCE)
    again = bytearray(64)
    user.connect(owner.address).get(again, other.region).wait(PATIENCE)
    assert again == b"\xee" * 64


def test_a_device_that_refuses_loses_the_link(ends: tuple[Endpoint, Endpoint]) -> None:
    """As where a region was taken from the device although the peer had not left it."""
    owner, user = ends
    region = owner.register(bytearray(64)).region
    link = user.connect(owner.address)
    assert isinstance(link, VerbsLink)
    link.put(b"x", region).wait(PATIENCE)
    reach = link.reaches[region.number, region.key]
    assert reach is not None
    reach.remote_key ^= 0xFF
    with pytest.raises(LinkLost, match="the peer's device refused the access"):
        link.put(b"x", region).wait(PATIENCE)
    with pytest.raises(LinkLost):
        link.put(b"x", region)


def test_dropping_waits_for_those_who_have_opened_the_region(ends: tuple[Endpoint, Endpoint]) -> None:
    owner, user = ends
    registration = owner.register(bytearray(1 << 22))
    link = user.connect(owner.address)
    works = [link.put(bytes(1 << 22), registration.region) for _ in range(4)]
    registration.drop()
    for work in works:
        assert work.done()
        try:
            work.wait(0)
        except AccessRefused as error:
            assert "dropped" in error.message


def test_dropping_on_the_io_thread_does_not_wait(ends: tuple[Endpoint, Endpoint]) -> None:
    owner, user = ends
    registration = owner.register(bytearray(64))
    link = user.connect(owner.address)
    link.put(b"x", registration.region).wait(PATIENCE)
    owner.links[0].loop.run(registration.drop)
    with pytest.raises(AccessRefused):
        while True:
            link.get(bytearray(64), registration.region).wait(PATIENCE)
