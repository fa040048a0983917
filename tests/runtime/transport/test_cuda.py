"""Memory of GPUs between processes of one host, on a stand-in of the driver (`libcuda/driver.c`). What all transports
promise is tried by `test_conformance.py`, over `cuda` too; this is what only GPUs have."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monarch.compiler.plan import MonarchError
from monarch.runtime import rdma
from monarch.runtime.transport.cuda import driver
from monarch.runtime.transport.cuda.driver import CudaFailed, Driver
from monarch.runtime.transport.cuda.lane import Job, Lane
from monarch.runtime.transport.endpoint import Endpoint
from monarch.runtime.transport.interface import LinkLost, Signal
from tests.runtime.transport.libcuda import standin
from tests.runtime.transport.libcuda.standin import StandIn
from tests.runtime.transport.peers import PATIENCE, SECRET, Block, GpuBlock, Way, peers

SIZE = 300_001

pytestmark = pytest.mark.skipif(standin.missing() is not None, reason=str(standin.missing()))


@pytest.fixture
def way(libcuda: Path) -> Way:
    return Way("cuda", "cuda", gpu="stand-in", folder=libcuda)


@pytest.fixture
def gpus(way: Way) -> Iterator[StandIn]:
    """This process's."""
    end = way.begin()
    yield standin.GPUS
    end()


@pytest.fixture(params=["cuda", "shm", "tcp"])
def any_way(request: pytest.FixtureRequest, way: Way) -> Way:
    """Each transport that reaches memory of GPUs, one way or the other."""
    return replace(way, transport=request.param)


def some(gpus: StandIn, size: int = SIZE, gpu: int = 0) -> tuple[Any, bytes]:
    """Memory of a GPU, and its bytes."""
    tensor, data = gpus.make(size, gpu), os.urandom(size)
    gpus.write(tensor, data)
    return tensor, data


# -- from everywhere to everywhere -------------------------------------------------------------------------------------


@pytest.mark.parametrize("gpu", [0, 1])
def test_from_gpu_to_gpu(any_way: Way, gpus: StandIn, gpu: int) -> None:
    """The peer's memory is on GPU 0."""
    with peers(any_way) as (peer,), any_way.endpoint() as endpoint:
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        region, words = peer.register(SIZE + 16), peer.words(8)
        source, data = some(gpus, gpu=gpu)
        link.put(source, region, 3).wait(PATIENCE)
        assert peer.read(region.number) == bytes(3) + data + bytes(13)
        target = gpus.make(SIZE, gpu)
        link.get(target, region, 3).wait(PATIENCE)
        assert gpus.read(target) == data
        link.post(source[7:], region, 0, Signal(words, 0, 5))
        peer.wait_word(words.number, 0, 5)
        assert peer.read(region.number, 0, SIZE - 7) == data[7:]


def test_between_a_gpu_and_a_host(any_way: Way, gpus: StandIn) -> None:
    with peers(any_way) as (peer,), any_way.endpoint() as endpoint:
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        region = peer.words(SIZE + 16)
        source, data = some(gpus)
        link.put(source, region, 5).wait(PATIENCE)
        assert peer.read(region.number) == bytes(5) + data + bytes(11)
        target = gpus.make(SIZE)
        link.get(target, region, 5).wait(PATIENCE)
        assert gpus.read(target) == data
        link.post(source[: SIZE - 8], region, 8, Signal(region, 0, 9))
        peer.wait_word(region.number, 0, 9)
        assert peer.read(region.number, 8, SIZE - 8) == data[: SIZE - 8]


def test_into_memory_of_this_process_gpu(way: Way, gpus: StandIn) -> None:
    with peers(way) as (peer,), way.endpoint() as endpoint:
        ours = GpuBlock(endpoint, 5 * 4096)
        endpoint.connect(peer.address(), timeout=PATIENCE)
        peer.put_many(ours.region, 4096, 5)
        assert ours.read() == b"".join(bytes([1 + at]) * 4096 for at in range(5))


def test_within_one_process(way: Way, gpus: StandIn) -> None:
    """CUDA does not open what the same process has exported, so nothing is opened."""
    with way.endpoint() as one, way.endpoint() as other:
        link = one.connect(other.address, timeout=PATIENCE)
        opens = gpus.count("opens")
        theirs = GpuBlock(other, SIZE)
        source, data = some(gpus)
        link.put(source, theirs.region).wait(PATIENCE)
        assert theirs.read() == data and gpus.count("opens") == opens


# -- order -------------------------------------------------------------------------------------------------------------


def test_a_put_waits_for_what_was_launched_before_it(any_way: Way, gpus: StandIn) -> None:
    """A kernel that has yet to write the tensor when the put is asked for."""
    with peers(any_way) as (peer,), any_way.endpoint() as endpoint:
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        region = peer.register(SIZE, 0x11)
        source = gpus.make(SIZE)
        if any_way.transport == "cuda":
            gpus.hold(0)
        for value in range(100):
            gpus.launch_fill(source, value)
        work = link.put(source, region)
        if any_way.transport == "cuda":
            assert not work.done() and peer.read(region.number) == b"\x11" * SIZE
            gpus.release(0)
        work.wait(PATIENCE)
        assert peer.read(region.number) == bytes([99]) * SIZE


def test_a_get_waits_for_what_was_launched_before_it(any_way: Way, gpus: StandIn) -> None:
    """A kernel that still writes the target, for whoever had that memory before."""
    with peers(any_way) as (peer,), any_way.endpoint() as endpoint:
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        region = peer.register(SIZE, 0x33)
        target = gpus.make(SIZE)
        gpus.hold(0)
        gpus.launch_fill(target, 0x44)
        work = link.get(target, region)
        assert not work.done() and gpus.read(target) == bytes(SIZE)
        gpus.release(0)
        work.wait(PATIENCE)
        assert gpus.read(target) == b"\x33" * SIZE


def test_registering_waits_for_what_was_launched_before_it(any_way: Way, gpus: StandIn) -> None:
    with peers(any_way) as (peer,), any_way.endpoint() as endpoint:
        ours = gpus.make(SIZE)
        for value in range(100):
            gpus.launch_fill(ours, value)
        region = endpoint.register(ours).region
        assert gpus.read(ours) == bytes([99]) * SIZE
        peer.connect(endpoint.address)
        assert peer.get(endpoint.address.process, region, SIZE) == bytes([99]) * SIZE


class Gate:
    """A job that begins when it is let."""

    alone = False

    def __init__(self) -> None:
        self.opened = threading.Event()

    def begin(self) -> None:
        self.opened.wait()

    def end(self) -> None: ...


def test_nothing_overtakes_a_copy_that_is_not_done(way: Way, gpus: StandIn) -> None:
    """Puts and atomics in host memory, which would be faster, and copies on another GPU."""
    with peers(way) as (peer,), way.endpoint() as endpoint:
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        region, words = peer.register(SIZE), peer.words(64)
        link.put(b"", region, 0, Signal(words, 0, 1)).wait(PATIENCE)
        first, data = some(gpus)
        second, more = some(gpus, gpu=1)
        launched, gate = gpus.count("launched"), Gate()
        gpus.hold(0)
        link.lane.add(gate)  # so that both copies are there when the first is begun
        link.post(first, region)
        link.post(second[:100], region, 50)
        link.post(b"host", words, 16, Signal(words, 0, 2))
        added = link.fetch_add(words, 8, 1)
        back = bytearray(4)
        got = link.get(back, words, 16)
        link.post(second[:8], region, SIZE - 8, Signal(words, 24, 3))
        assert peer.read(words.number) == (1).to_bytes(8, "little") + bytes(56)
        assert not added.done() and not got.done()
        gate.opened.set()
        while gpus.count("launched") < launched + 2:
            os.sched_yield()
        gpus.settle()  # the copy on the GPU that is not held has had its time
        gpus.release(0)
        peer.wait_word(words.number, 24, 3)
        assert added.wait(PATIENCE) == 0
        got.wait(PATIENCE)
        assert back == b"host"
        assert peer.read(words.number, 0, 20) == (2).to_bytes(8, "little") + (1).to_bytes(8, "little") + b"host"
        assert peer.read(region.number) == data[:50] + more[:100] + data[150:-8] + more[:8]


def test_a_lane_is_busy_until_its_last_job_has_ended() -> None:
    """Whoever looks, and whenever: what it does not see it would overtake."""
    seen: list[bool] = []

    class Watched(deque[Job]):
        def popleft(self) -> Job:
            job = super().popleft()
            seen.append(lane.busy)
            return job

    lane = Lane("watched", pytest.fail)
    lane.jobs = Watched()
    gate = Gate()
    gate.opened.set()
    assert lane.add(gate)
    lane.drain(PATIENCE)
    assert seen == [True]
    lane.close(lambda: None)
    lane.join(PATIENCE)


def test_nothing_spins(way: Way, gpus: StandIn) -> None:
    with peers(way) as (peer,), way.endpoint() as endpoint:
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        region = peer.register(SIZE)
        copies = gpus.count("copies")
        link.put(bytes(SIZE), region).wait(PATIENCE)
        link.get(gpus.make(SIZE), region).wait(PATIENCE)
        assert gpus.count("copies") == copies + 2
        assert gpus.count("spins") == 0, "every event that is waited for is made to be slept for"


# -- what is mapped, and for how long ----------------------------------------------------------------------------------


def test_an_allocation_is_opened_once_and_closed_with_its_last_region(way: Way, gpus: StandIn) -> None:
    """PyTorch cuts many tensors out of one allocation."""
    with peers(way) as (peer,), way.endpoint() as endpoint:
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        regions = peer.register_parts(4096, 3)
        opens, closes = gpus.count("opens"), gpus.count("closes")
        for at, region in enumerate(regions):
            link.put(bytes([at + 1]) * 4096, region).wait(PATIENCE)
        assert [peer.read(region.number) for region in regions] == [bytes([at]) * 4096 for at in (1, 2, 3)]
        assert gpus.count("opens") - opens == 1
        for region in regions:
            assert gpus.count("closes") == closes
            peer.drop(region.number)
        assert gpus.count("closes") - closes == 1


def test_what_was_dropped_can_be_freed(way: Way, gpus: StandIn) -> None:
    """Amid copies: the owner frees its memory as soon as `drop` returns. The stand-in fails who copies to it then."""
    with peers(way) as (peer,), way.endpoint() as endpoint:
        ours = GpuBlock(endpoint, 1 << 20)
        endpoint.connect(peer.address(), timeout=PATIENCE)
        peer.put_many(ours.region, 4096, 2)
        peer.begin("put_until_refused", ours.region, 1 << 20)
        ours.registration.drop()
        gpus.free(ours.memory)
        assert "dropped" in peer.result()
        again = GpuBlock(endpoint, 4096)
        peer.put_many(again.region, 4096, 1)
        assert again.read() == b"\x01" * 4096


def test_memory_that_is_freed_while_it_is_registered_loses_the_link(way: Way, gpus: StandIn) -> None:
    """PyTorch does not do that, for the registration keeps the tensor. The peer's GPU reports an error."""
    with peers(way) as (peer,), way.endpoint() as endpoint:
        ours = GpuBlock(endpoint, 8192)
        endpoint.connect(peer.address(), timeout=PATIENCE)
        peer.put_many(ours.region, 4096, 2)
        gpus.free(ours.memory)
        with pytest.raises(LinkLost, match="failed with CUresult"):
            peer.put_many(ours.region, 4096, 2)


def test_closing_waits_for_copies_and_leaves_no_thread(way: Way, gpus: StandIn) -> None:
    with peers(way) as (peer,):
        region, words = peer.register(SIZE), peer.words(8)
        source, data = some(gpus)
        with way.endpoint() as endpoint:
            link = endpoint.connect(peer.address(), timeout=PATIENCE)
            link.put(source, region).wait(PATIENCE)
            opens, closes = gpus.count("opens"), gpus.count("closes")
            for at in range(20):
                link.post(source, region, 0, Signal(words, 0, at + 1))
        peer.wait_word(words.number, 0, 20)
        assert peer.read(region.number) == data
        assert gpus.count("opens") == opens and gpus.count("closes") == closes + 1


def test_a_link_that_is_lost_gives_back_its_events(way: Way, gpus: StandIn) -> None:
    """Also those of what waited for its turn, and is not begun any more."""
    before = gpus.count("events")
    with peers(way) as (peer,), way.endpoint() as endpoint:
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        region, words = peer.register(SIZE), peer.words(SIZE + 7)
        source, target = gpus.make(SIZE), gpus.make(SIZE)
        link.put(b"maps it", region).wait(PATIENCE)
        gpus.hold(0)
        gpus.launch_fill(source, 1)
        works = [link.put(source, region), link.put(source, words), link.get(target, words), link.get(target, region)]
        peer.kill()
        gpus.release(0)
        for work in works:
            with pytest.raises(LinkLost):
                work.wait(PATIENCE)
        for start in (lambda: link.put(source, words), lambda: link.get(target, words)):
            with pytest.raises(LinkLost):
                start()
    assert gpus.count("events") == before


# -- where CUDA IPC does not reach -------------------------------------------------------------------------------------


@pytest.mark.parametrize("reach_each_other", [True, False])
def test_a_gpu_that_this_process_does_not_see(
    way: Way, libcuda: Path, reach_each_other: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer's memory is on GPU 0; this process sees the other only, as with CUDA_VISIBLE_DEVICES=1. Where the two
    are not peers, bytes go through host memory."""
    end = standin.install(libcuda / "libcuda.so", first=1, peers=reach_each_other)
    try:
        gpus = standin.GPUS
        with peers(way) as (peer,), way.endpoint() as endpoint:
            link = endpoint.connect(peer.address(), timeout=PATIENCE)
            region, words = peer.register(SIZE), peer.words(8)
            source, data = some(gpus)
            opens = gpus.count("opens")
            link.put(source, region, 0, Signal(words, 0, 1)).wait(PATIENCE)
            peer.wait_word(words.number, 0, 1)
            assert peer.read(region.number) == data
            target = gpus.make(SIZE)
            link.get(target, region).wait(PATIENCE)
            assert gpus.read(target) == data
            assert gpus.count("opens") - opens == reach_each_other
            assert ("do not reach each other as peers" in caplog.text) == (not reach_each_other)
    finally:
        end()


def test_what_goes_through_host_memory_overtakes_nothing(way: Way, libcuda: Path) -> None:
    """The first put to a GPU that cannot be reached, right behind copies to one that can, which take their time."""
    end = standin.install(libcuda / "libcuda.so", first=1, peers=False, late=20_000)
    try:
        gpus = standin.GPUS
        with peers(way) as (peer,), way.endpoint() as endpoint:
            link = endpoint.connect(peer.address(), timeout=PATIENCE)
            near, far, words = peer.register_on(1, SIZE), peer.register_on(0, SIZE), peer.words(16)
            source, data = some(gpus)
            opens = gpus.count("opens")
            link.put(b"maps it", near, 0, Signal(words, 0, 1)).wait(PATIENCE)
            assert gpus.count("opens") == opens + 1
            link.post(source, near)  # the two that follow are there when it ends
            link.post(source, near, 0, Signal(words, 0, 2))
            link.post(data, far, 0, Signal(words, 8, 3))
            peer.wait_word(words.number, 8, 3)
            assert peer.read(words.number) == (2).to_bytes(8, "little") + (3).to_bytes(8, "little")
            assert peer.read(near.number) == peer.read(far.number) == data
            assert gpus.count("opens") == opens + 1
    finally:
        end()


def test_memory_that_ipc_does_not_share(way: Way, gpus: StandIn, caplog: pytest.LogCaptureFixture) -> None:
    """As PyTorch's expandable segments are."""
    with peers(way) as (peer,), way.endpoint() as endpoint:
        endpoint.connect(peer.address(), timeout=PATIENCE)
        ours = gpus.make(2 * 4096, kind="standin_expandable")
        region = endpoint.register(ours).region
        assert "goes through host memory" in caplog.text and "expandable_segments:False" in caplog.text
        peer.put_many(region, 4096, 2)
        assert gpus.read(ours) == b"\x01" * 4096 + b"\x02" * 4096


def test_an_empty_tensor(way: Way, gpus: StandIn) -> None:
    with peers(way) as (peer,), way.endpoint() as endpoint:
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        region, words = peer.register(0), peer.words(8)
        link.put(gpus.make(0), region, 0, Signal(words, 0, 4)).wait(PATIENCE)
        link.get(gpus.make(0), region).wait(PATIENCE)
        assert peer.read(words.number) == (4).to_bytes(8, "little")


def test_it_is_preferred_on_one_host_and_passed_over_between_hosts(gpus: StandIn) -> None:
    with Endpoint(SECRET) as one, Endpoint(SECRET) as other:
        assert one.connect(other.address, timeout=PATIENCE).transport == "cuda"
        far = replace(other.address, host="0" * 32)
        link = one.connect(far, timeout=PATIENCE)
        assert link.transport in ("tcp", "verbs")
        assert "cuda: the peer is on another host" in link.reasons
        region = other.register(gpus.make(SIZE)).region
        link.put(bytes(range(100)), region).wait(PATIENCE)


def test_a_process_without_the_driver_is_joined_over_shared_memory(way: Way, gpus: StandIn) -> None:
    both = replace(way, transport="shm")
    with peers(both) as (peer,), Endpoint(SECRET, transports=("cuda", "shm")) as endpoint:
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        assert link.transport == "shm"
        assert link.reasons[0] == "cuda: the peer says: it is not in use there"


def test_without_a_driver_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-not-there.so")
    monkeypatch.setattr(driver, "loaded", None)
    with Endpoint(SECRET, transports=("cuda", "tcp")) as endpoint:
        assert endpoint.transports["cuda"].startswith("the CUDA driver cannot be opened: libcuda-that-is-not-there.so")
        with pytest.raises(MonarchError, match="no transport here reaches memory on cuda:0; in use are tcp"):
            endpoint.register(standin.Tensor(4096, 4096, 0))


def test_the_child_of_a_process_that_has_used_a_gpu_has_none(gpus: StandIn) -> None:
    gpus.make(1)
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(here, (driver.missing() or "").encode())
        os._exit(0)
    os.waitpid(pid, 0)
    assert b"forked from one that has used a GPU: it has to be spawned" in os.read(there, 1000)
    os.close(there)
    os.close(here)


# -- the driver --------------------------------------------------------------------------------------------------------


def test_errors_say_which_call_failed_and_why(gpus: StandIn) -> None:
    libcuda = driver.here()
    with pytest.raises(CudaFailed, match="cuMemGetAddressRange_v2 failed with CUresult 1"):
        libcuda.export(0, 4096)
    tensor = gpus.make(4096)
    exported = libcuda.export(0, tensor.address + 100)
    assert exported.offset == 100
    with pytest.raises(CudaFailed, match="cuIpcOpenMemHandle_v2 failed with CUresult 201"):
        libcuda.open(exported.handle, libcuda.uuids()[0])
    with pytest.raises(CudaFailed, match="CUresult 400: no such handle"):
        libcuda.open(bytes(64), libcuda.uuids()[0])


def test_a_driver_that_lacks_a_call(gpus: StandIn) -> None:
    class Old:
        cuInit = staticmethod(lambda flags: 0)

    with pytest.raises(CudaFailed, match="too old: it has no cuDeviceGetCount"):
        Driver(Old()).uuids()


def test_what_the_stand_in_refuses(gpus: StandIn) -> None:
    """It is strict where CUDA is: without that the tests above would say little."""
    with pytest.raises(AssertionError):
        gpus.free(standin.Tensor(123 << 40, 10, 0))
    assert gpus.library.cuStreamCreate((ctypes.c_void_p * 1)(), ctypes.c_uint(0)) == 201, "no context is current"
    one, other = gpus.make(4096, 0), gpus.make(4096, 1)
    stream = ctypes.c_void_p(gpus.current_stream(0))
    copied = gpus.on(
        0,
        "cuMemcpyDtoDAsync_v2",
        ctypes.c_uint64(one.address),
        ctypes.c_uint64(other.address),
        ctypes.c_size_t(1),
        stream,
    )
    assert copied == 1, "of two GPUs"
    host = ctypes.create_string_buffer(16)
    address = ctypes.c_uint64(ctypes.addressof(host))
    assert gpus.on(0, "cuMemcpyHtoDAsync_v2", address, host, ctypes.c_size_t(16), stream) == 1, "of the host"


# -- buffers -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh() -> Iterator[None]:
    """This process has no endpoint yet, and none afterwards."""
    rdma.close()
    yield
    rdma.close()


@pytest.mark.parametrize("transport", ["cuda", "tcp"])
def test_buffers_of_another_process(way: Way, gpus: StandIn, fresh: None, transport: str) -> None:
    other = replace(way, transport=transport)
    rdma.configure(transports=(transport,))
    with peers(other) as (peer,):
        buffer = pickle.loads(peer.buffer(SIZE, 0x66))
        assert buffer.backend == transport
        target = gpus.make(SIZE)
        buffer.read_into(target).get()
        assert gpus.read(target) == b"\x66" * SIZE
        source, data = some(gpus)
        buffer.write_from(source).get()
        back = bytearray(SIZE)
        buffer.read_into(back).get()
        assert back == data


def test_buffers_in_asyncio_wait_for_the_stream_of_who_asks(way: Way, gpus: StandIn, fresh: None) -> None:
    """Transfers begin on another thread there, which has another current stream."""
    rdma.configure(transports=("cuda",))

    async def write(buffer: rdma.RDMABuffer, source: Any, held: bool) -> None:
        if held:
            gpus.hold(0)
        gpus.launch_fill(source, 0x77)
        transfer = buffer.write_from(source)
        if held:
            assert not transfer.done()
            gpus.release(0)
        await transfer

    with peers(way) as (peer,):
        buffer = pickle.loads(peer.buffer(SIZE, 0x66))
        asyncio.run(write(buffer, gpus.make(SIZE), held=False))
        source, _ = some(gpus)
        asyncio.run(write(buffer, source, held=True))
        back = bytearray(SIZE)
        buffer.read_into(back).get()
        assert back == b"\x77" * SIZE


def test_buffers_of_this_process(way: Way, gpus: StandIn, fresh: None) -> None:
    memory, data = some(gpus)
    rdma.configure(transports=("cuda",))
    buffer = rdma.RDMABuffer(memory)
    assert buffer.backend == "local"
    back = bytearray(SIZE)
    buffer.read_into(back).get()
    assert back == data
    source, more = some(gpus, gpu=1)
    buffer.write_from(source).get()
    assert gpus.read(memory) == more
    buffer.drop().get()


# -- real ones ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(standin.real_missing() is not None, reason=str(standin.real_missing()))
def test_real_tensors_and_streams(fresh: None) -> None:
    """On a GPU: what is put is what the stream that is current here wrote."""
    import torch

    way = Way("cuda-real", "cuda", gpu="real")
    way.begin()
    with peers(way) as (peer,), way.endpoint() as endpoint:
        link = endpoint.connect(peer.address(), timeout=PATIENCE)
        region = peer.register(1 << 26)
        with torch.cuda.stream(torch.cuda.Stream()):
            source = torch.zeros(1 << 26, dtype=torch.uint8, device="cuda")
            for _ in range(7):
                source += 1
            link.put(source, region).wait(PATIENCE)
            target = torch.empty_like(source)
            link.get(target, region).wait(PATIENCE)
            assert bool((target == 7).all())
        host = Block(endpoint, 1 << 20, file=False)
        peer.put_many(host.region, 1 << 18, 4)
        assert host.read() == b"".join(bytes([1 + at]) * (1 << 18) for at in range(4))
