"""One suite for all transports: what `runtime/transport/interface.py` promises, tried over each of them."""

from __future__ import annotations

import os
import random
import threading
from dataclasses import replace

import pytest

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport import stream
from monarch.runtime.transport.endpoint import Endpoint
from monarch.runtime.transport.interface import AccessRefused, LinkLost, Region, Signal
from monarch.runtime.transport.stream import StreamLink
from tests.runtime.transport.peers import PATIENCE, WAYS, Block, Peer, Way, peers

BEYOND_A_CHUNK = (9 << 20) + 5


def wrong(region: Region) -> Region:
    return replace(region, key="0" * 32)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(len(WAYS))
@pytest.mark.parametrize("size", [0, 1, 7, 4096, 65_537, BEYOND_A_CHUNK])
def test_what_is_put_is_there_and_nothing_else_is_changed(link: StreamLink, peer: Peer, size: int) -> None:
    region = peer.register(size + 16, 0xEE)
    data = os.urandom(size)
    assert link.put(data, region, 3).wait(PATIENCE) is None
    assert peer.read(region.number) == b"\xee" * 3 + data + b"\xee" * 13


@pytest.mark.sample(len(WAYS))
@pytest.mark.parametrize("size", [0, 1, 7, 4096, 65_537, BEYOND_A_CHUNK])
def test_what_is_got_is_what_is_there(link: StreamLink, peer: Peer, size: int) -> None:
    region = peer.register(size + 16)
    data = os.urandom(size + 16)
    link.put(data, region).wait(PATIENCE)
    target = bytearray(b"\xee" * (size + 5))
    assert link.get(memoryview(target)[2 : 2 + size], region, 11).wait(PATIENCE) is None
    assert target == b"\xee\xee" + data[11 : 11 + size] + b"\xee" * 3


def test_an_empty_region_can_be_put_to(link: StreamLink, peer: Peer) -> None:
    region = peer.register(0)
    link.put(b"", region).wait(PATIENCE)
    link.get(bytearray(), region).wait(PATIENCE)


def test_many_in_flight_arrive_each_at_its_place(link: StreamLink, peer: Peer) -> None:
    generator = random.Random(7)
    sizes = [generator.choice((0, 1, 5, 100, 4096, 70_001)) for _ in range(300)]
    region = peer.register(sum(sizes))
    pieces = [generator.randbytes(size) for size in sizes]
    offsets = [sum(sizes[:at]) for at in range(len(sizes))]
    works = [link.put(piece, region, offset) for piece, offset in zip(pieces, offsets, strict=True)]
    back = bytearray(sum(sizes))
    for work in works:
        work.wait(PATIENCE)
        assert work.done()
    works = [
        link.get(memoryview(back)[offset : offset + size], region, offset)
        for size, offset in zip(sizes, offsets, strict=True)
    ]
    for work in reversed(works):
        work.wait(PATIENCE)
    assert back == b"".join(pieces)
    assert peer.read(region.number) == back


def test_both_directions_are_full_at_once(way: Way, endpoint: Endpoint, link: StreamLink, peer: Peer) -> None:
    size, count = 2 << 20, 8
    ours = Block(endpoint, size * count, way.file)
    theirs = peer.register(size * count)
    peer.begin("put_many", ours.region, size, count)
    works = [link.put(bytes([1 + at % 255]) * size, theirs, at * size) for at in range(count)]
    gets = [bytearray(size) for _ in range(count)]
    works += [link.get(target, theirs, at * size) for at, target in enumerate(gets)]
    for work in works:
        work.wait(PATIENCE)
    peer.result()
    expected = b"".join(bytes([1 + at % 255]) * size for at in range(count))
    assert ours.view == expected
    assert peer.read(theirs.number) == expected


def test_more_in_flight_than_are_kept_at_once(link: StreamLink, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "MOST_UNDER_WAY", 10)
    region = peer.words(8)
    works = [link.fetch_add(region, 0, 1) for _ in range(200)]
    assert [work.wait(PATIENCE) for work in works] == list(range(200))


def test_a_turn_of_reading_ends_and_goes_on(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """The I/O thread reads a little at a time, in both processes: nothing stays behind in a buffer."""
    monkeypatch.setattr(stream, "ROUNDS", 1)
    with peers(replace(way, rounds=1)) as (peer,), way.endpoint() as endpoint:
        region = peer.register(1 << 20)
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        for size in (1, 16_000, 16_384, 16_385, 100_001):
            data, back = os.urandom(size), bytearray(size)
            link.put(data, region, 5).wait(PATIENCE)
            link.get(back, region, 5).wait(PATIENCE)
            assert back == data


def test_threads_share_a_link(link: StreamLink, peer: Peer) -> None:
    size, count = 10_007, 40
    region = peer.register(size * count * 4)
    failures: list[BaseException] = []

    def put(thread: int) -> None:
        try:
            works = [link.put(bytes([thread + 1]) * size, region, (thread * count + at) * size) for at in range(count)]
            for work in works:
                work.wait(PATIENCE)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=put, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert peer.read(region.number) == b"".join(bytes([thread + 1]) * size * count for thread in range(4))


def test_the_peer_uses_the_same_link_back(way: Way, endpoint: Endpoint, link: StreamLink, peer: Peer) -> None:
    ours = Block(endpoint, 5 * 4096, way.file)
    peer.put_many(ours.region, 4096, 5)
    assert ours.view == b"".join(bytes([1 + at]) * 4096 for at in range(5))
    assert [each.peer.process for each in endpoint.links] == [peer.address().process]


# -- signals -----------------------------------------------------------------------------------------------------------


@pytest.mark.sample(len(WAYS))
@pytest.mark.parametrize("size", [0, 1, 1000, 100_000, BEYOND_A_CHUNK])
def test_the_payload_is_there_when_the_word_is(link: StreamLink, peer: Peer, size: int) -> None:
    words = peer.words(64)
    region = peer.register(size)
    data = os.urandom(size)
    for at in range(0, size, 50_000):
        link.post(data[at : at + 50_000], region, at)
    link.post(b"", region, 0, Signal(words, 24, -5))
    peer.wait_word(words.number, 24, -5)
    assert peer.read(region.number) == data


def test_signals_go_back_and_forth(way: Way, endpoint: Endpoint, link: StreamLink, peer: Peer) -> None:
    """The peer looks at the payload of each message once it sees its word: in the same region, where that can be."""
    rounds = 200
    ours = Block(endpoint, 64, way.file)
    theirs = peer.register(64)
    words = peer.words(64) if way.gpu else theirs
    peer.begin("echo", theirs.number, words.number, ours.region, rounds)
    for value in range(1, rounds + 1):
        link.post(memoryview(bytes([value % 251]) * 56), theirs, 8, Signal(words, 0, value))
        ours.wait_word(0, value)
    peer.result()


def test_a_put_with_a_signal_is_finished_after_it(way: Way, link: StreamLink, peer: Peer) -> None:
    region = peer.register(4096)
    words = peer.words(8) if way.gpu else region
    link.put(b"x" * 100, region, 8, Signal(words, 0, 1 << 62)).wait(PATIENCE)
    assert peer.read(words.number, 0, 8) == (1 << 62).to_bytes(8, "little")
    assert peer.read(region.number, 8, 101) == b"x" * 100 + bytes(1)


def test_steady_state_needs_no_control_messages(way: Way, link: StreamLink, peer: Peer) -> None:
    region = peer.register(4096)
    words = peer.words(8) if way.gpu else region
    link.put(b"first", region, 8, Signal(words, 0, 1)).wait(PATIENCE)
    before = link.messages
    assert before > 0
    for value in range(50):
        link.post(b"data", region, 8, Signal(words, 0, value))
        link.put(b"data", region, 16).wait(PATIENCE)
        link.get(bytearray(4), region, 16).wait(PATIENCE)
    assert link.messages == before


# -- atomics -----------------------------------------------------------------------------------------------------------


def test_atomics_give_the_old_word(link: StreamLink, peer: Peer) -> None:
    region = peer.words(32)
    assert link.fetch_add(region, 8, 5).wait(PATIENCE) == 0
    assert link.fetch_add(region, 8, -7).wait(PATIENCE) == 5
    assert link.compare_swap(region, 8, 0, 9).wait(PATIENCE) == -2
    assert link.compare_swap(region, 8, -2, -9).wait(PATIENCE) == -2
    assert link.fetch_add(region, 8, 0).wait(PATIENCE) == -9
    assert peer.read(region.number) == bytes(8) + (-9).to_bytes(8, "little", signed=True) + bytes(16)


def test_words_wrap_around(link: StreamLink, peer: Peer) -> None:
    region = peer.words(8)
    largest = (1 << 63) - 1
    assert link.compare_swap(region, 0, 0, largest).wait(PATIENCE) == 0
    assert link.fetch_add(region, 0, 1).wait(PATIENCE) == largest
    assert link.fetch_add(region, 0, -1).wait(PATIENCE) == -(1 << 63)
    assert link.fetch_add(region, 0, 0).wait(PATIENCE) == largest


def test_atomics_of_two_peers_are_atomic(way: Way) -> None:
    count = 300
    with peers(way, 2) as others, way.endpoint() as endpoint:
        ours = Block(endpoint, 64, way.file)
        for other in others:
            other.connect(endpoint.address)
        for other in others:
            other.begin("add_many", endpoint.address.process, ours.region, 16, count)
        seen = [value for other in others for value in other.result()]
        assert sorted(seen) == list(range(2 * count))
        for other in others:
            other.begin("count_under_lock", endpoint.address.process, ours.region, 20)
        for other in others:
            other.result()
        assert ours.view.cast("q").tolist() == [0, 40, 2 * count, 0, 0, 0, 0, 0]


# -- refusals ----------------------------------------------------------------------------------------------------------


def test_a_wrong_key_is_refused_and_the_link_goes_on(link: StreamLink, peer: Peer) -> None:
    region = peer.register(1 << 20, 0xEE)
    process = peer.address().process[:8]
    for data in (b"x", b"x" * (1 << 20)):
        with pytest.raises(AccessRefused, match=f"process {process} refused, over {link.transport}: the key is not"):
            link.put(data, wrong(region)).wait(PATIENCE)
    with pytest.raises(AccessRefused, match="the key is not"):
        link.get(bytearray(10), wrong(region)).wait(PATIENCE)
    with pytest.raises(AccessRefused, match="the key is not"):
        link.fetch_add(wrong(region), 0, 1).wait(PATIENCE)
    with pytest.raises(AccessRefused, match="the key is not"):
        link.compare_swap(wrong(region), 0, 0, 1).wait(PATIENCE)
    with pytest.raises(AccessRefused, match="there is no region 999"):
        link.put(b"x", replace(region, number=999)).wait(PATIENCE)
    assert peer.read(region.number) == b"\xee" * (1 << 20)
    link.put(b"right", region).wait(PATIENCE)
    assert peer.read(region.number, 0, 5) == b"right"


@pytest.mark.sample(len(WAYS))
@pytest.mark.parametrize("size", [0, 7, 100_000])
def test_a_put_whose_signal_is_refused_writes_nothing(link: StreamLink, peer: Peer, size: int) -> None:
    region, words = peer.register(100_000, 0xEE), peer.words(64, 0xEE)
    with pytest.raises(AccessRefused, match="the key is not"):
        link.put(bytes(size), region, 0, Signal(wrong(words), 8, 1)).wait(PATIENCE)
    with pytest.raises(AccessRefused, match="bounds|no word"):
        link.put(bytes(size), region, 0, Signal(replace(words, size=1 << 20), 64, 1)).wait(PATIENCE)
    assert peer.read(region.number) == b"\xee" * 100_000
    assert peer.read(words.number) == b"\xee" * 64


def test_bounds_are_checked_here(link: StreamLink, peer: Peer) -> None:
    region = peer.register(100)
    for offset, size in ((0, 101), (100, 1), (-1, 1), (1 << 62, 1)):
        with pytest.raises(AccessRefused, match="out of the bounds of region"):
            link.put(bytes(size), region, offset)
        with pytest.raises(AccessRefused, match="out of the bounds of region"):
            link.get(bytearray(size), region, offset)
        with pytest.raises(AccessRefused, match="out of the bounds of region"):
            link.post(bytes(size), region, offset)
    for offset in (-8, 4, 96, 104):
        with pytest.raises(AccessRefused, match="no word at byte"):
            link.post(b"", region, 0, Signal(region, offset, 1))
    link.put(bytes(100), region).wait(PATIENCE)


def test_bounds_are_checked_at_the_owner(link: StreamLink, peer: Peer) -> None:
    region = peer.register(4096, 0xEE)
    forged = replace(region, size=1 << 40)
    for offset, size in ((0, 4097), (4096, 1), (1 << 39, 8), (4090, 65_536)):
        with pytest.raises(AccessRefused, match="out of the bounds"):
            link.put(bytes(size), forged, offset).wait(PATIENCE)
        with pytest.raises(AccessRefused, match="out of the bounds"):
            link.get(bytearray(size), forged, offset).wait(PATIENCE)
    with pytest.raises(AccessRefused, match="out of the bounds"):
        link.fetch_add(forged, 4096, 1).wait(PATIENCE)
    with pytest.raises(AccessRefused, match="no word at byte 4"):
        link.fetch_add(forged, 4, 1).wait(PATIENCE)
    assert peer.read(region.number) == b"\xee" * 4096
    link.put(b"inside", forged).wait(PATIENCE)
    assert peer.read(region.number, 0, 6) == b"inside"


def test_a_refused_post_breaks_the_link_and_says_why(link: StreamLink, endpoint: Endpoint, peer: Peer) -> None:
    region = peer.register(100, 0xEE)
    with pytest.raises(LinkLost, match="a post was refused: the key is not that of region"):
        link.post(b"x", wrong(region))
        link.put(b"x", region).wait(PATIENCE)
    assert peer.read(region.number) == b"\xee" * 100
    again = endpoint.connect(peer.address(), timeout=PATIENCE)
    again.put(b"fine", region).wait(PATIENCE)


def test_read_only_memory(link: StreamLink, endpoint: Endpoint, peer: Peer) -> None:
    region = peer.register(8)
    with pytest.raises(MonarchError, match="read-only, and is to be written"):
        link.get(b"12345678", region)
    with pytest.raises(MonarchError, match="has to be contiguous: this has shape"):
        link.put(memoryview(bytes(16))[::2], region)
    with pytest.raises(MonarchError, match="a str is no memory"):
        link.put("text", region)


# -- dropping ----------------------------------------------------------------------------------------------------------


def test_dropped_memory_is_refused_and_the_link_goes_on(link: StreamLink, peer: Peer) -> None:
    region, other = peer.register(4096, 0xEE), peer.register(8)
    link.put(b"before", region).wait(PATIENCE)
    peer.drop(region.number)
    with pytest.raises(AccessRefused, match=f"there is no region {region.number}"):
        link.put(b"after", region).wait(PATIENCE)
    with pytest.raises(AccessRefused, match=f"there is no region {region.number}"):
        link.get(bytearray(5), region).wait(PATIENCE)
    with pytest.raises(AccessRefused, match=f"there is no region {region.number}"):
        link.fetch_add(region, 0, 1).wait(PATIENCE)
    assert peer.read(region.number, 0, 6) == b"before"
    link.put(b"other", other).wait(PATIENCE)
    assert peer.register(8).number not in (region.number, other.number)


def test_memory_dropped_in_flight_is_not_written_afterwards(link: StreamLink, peer: Peer) -> None:
    """The owner drops the region amid puts and gets, and uses the memory for something else at once."""
    size = 4 << 20
    region, other = peer.register(size), peer.register(8)
    source, target = b"\x11" * size, bytearray(size)
    link.put(source, region).wait(PATIENCE)
    ends: list[str] = []

    def work(move: object) -> None:
        while True:
            try:
                move().wait(PATIENCE)  # type: ignore[operator]
            except AccessRefused as error:
                ends.append(error.message)
                return

    threads = [
        threading.Thread(target=work, args=(lambda: link.put(source, region),)),
        threading.Thread(target=work, args=(lambda: link.get(target, region),)),
    ]
    for thread in threads:
        thread.start()
    peer.drop_and_fill(region.number, 0x77)
    for thread in threads:
        thread.join()
    assert len(ends) == 2
    assert all("dropped" in end for end in ends), ends
    assert peer.read(region.number) == b"\x77" * size
    link.put(b"goes on", other, 0).wait(PATIENCE)


# -- waiting -----------------------------------------------------------------------------------------------------------


def test_waiting_can_be_given_up(link: StreamLink, peer: Peer) -> None:
    class GivenUp(Exception):
        pass

    def give_up() -> None:
        raise GivenUp

    peer.stop()
    try:
        work = link.fetch_add(Region(1, "0" * 32, 8, {}), 0, 1)
        with pytest.raises(TimeoutError):
            work.wait(0.01)
        with pytest.raises(GivenUp):
            work.wait(check=give_up)
        assert not work.done()
    finally:
        peer.go_on()
    with pytest.raises(AccessRefused):
        work.wait(PATIENCE)


# -- ends --------------------------------------------------------------------------------------------------------------


def test_a_peer_that_is_killed_ends_every_work(way: Way, peer: Peer) -> None:
    lost: list[tuple[StreamLink, LinkLost]] = []
    told = threading.Event()

    def note(link: StreamLink, error: LinkLost) -> None:
        lost.append((link, error))
        told.set()

    with way.endpoint(lost=note) as endpoint:
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        size = 8 << 20
        region = peer.register(size)
        process = link.peer.process[:8]
        killer = threading.Thread(target=peer.kill)
        works = []
        with pytest.raises(LinkLost, match=f"process {process} over {link.transport} is lost"):
            while True:
                works += [link.put(bytes(size), region), link.get(bytearray(size), region)]
                if len(works) == 4:
                    killer.start()
                if len(works) > 20:
                    works.pop(0).wait(PATIENCE)
        killer.join()
        for work in works:
            try:
                work.wait(PATIENCE)
            except LinkLost as error:
                assert f"process {process} over {link.transport} is lost" in error.message
            assert work.done()
        assert told.wait(PATIENCE)
        assert [each for each, _ in lost] == [link]
        with pytest.raises(LinkLost):
            link.post(b"x", region)
        with pytest.raises(LinkLost):
            link.fetch_add(region, 0, 1)
        assert endpoint.links == []


def test_what_was_posted_before_closing_arrives(way: Way, peer: Peer) -> None:
    region, words = peer.register(6 << 20), peer.words(8)
    data = os.urandom(6 << 20)
    with way.endpoint() as endpoint:
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        link.post(data, region)
        link.post(b"", region, 0, Signal(words, 0, 77))
        link.close()
        with pytest.raises(LinkLost, match="closed here"):
            link.put(b"x", region)
    peer.wait_word(words.number, 0, 77)
    assert peer.read(region.number) == data
    assert peer.errors() and "the peer closed it" in peer.errors()[0]


def test_a_closed_endpoint_ends_what_is_under_way(way: Way, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "CLOSING", 0.1)  # what it waits for a peer that is stopped
    endpoint = way.endpoint()
    address = peer.address()
    region = peer.words(8)
    link = endpoint.connect(address, timeout=PATIENCE)
    peer.stop()
    work = link.fetch_add(region, 0, 1)
    endpoint.close()
    peer.go_on()
    with pytest.raises(LinkLost, match="closed here"):
        work.wait(PATIENCE)
    with pytest.raises(MonarchError, match="the endpoint is closed"):
        endpoint.connect(address)
    with pytest.raises(MonarchError, match="the endpoint is closed"):
        endpoint.register(bytearray(8))
    endpoint.close()


def test_nothing_is_left_behind(way: Way) -> None:
    """Endpoints and links that come and go leave no descriptor, no thread, no mapping and no region."""

    def held() -> tuple[set[str], int, int]:
        descriptors = set(os.listdir("/proc/self/fd"))
        with open("/proc/self/maps") as maps:
            shared = sum("memfd:" in line for line in maps)
        return descriptors, threading.active_count(), shared

    with peers(way) as (peer,):
        region, words = peer.register(1 << 20), peer.words(8)
        peer_descriptors = peer_files(peer)
        before = held()
        for _ in range(3):
            with way.endpoint() as endpoint:
                ours = [endpoint.register(bytearray(100)) for _ in range(3)]
                for _ in range(2):
                    link = endpoint.connect(peer.address(), timeout=PATIENCE)
                    link.put(b"x" * 4096, region, 8, Signal(words, 0, 1)).wait(PATIENCE)
                    link.get(bytearray(100_000), region).wait(PATIENCE)
                ours[0].drop()
        for now, earlier in zip(held(), before, strict=True):
            assert now <= earlier  # type: ignore[operator]  # what other tests had left may go meanwhile
        peer.drop(region.number)
        # The peer hears of the ends in its own time; where something is left, this ends with the test's time.
        while peer.links() > 0 or peer_files(peer) > peer_descriptors:
            pass


def peer_files(peer: Peer) -> int:
    return len(os.listdir(f"/proc/{peer.pid()}/fd"))


def test_reasons_say_what_was_tried(link: StreamLink, way: Way) -> None:
    assert link.transport == way.transport
    assert link.reasons[-1].startswith(f"{way.transport}: ")
