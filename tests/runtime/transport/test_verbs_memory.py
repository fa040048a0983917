"""What is registered, how, and for how long: on a made-up device and a made-up CUDA driver."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from monarch.runtime.transport import buffers
from monarch.runtime.transport.cuda.driver import CudaFailed, Driver
from monarch.runtime.transport.loop import Loop
from monarch.runtime.transport.plug import EndpointContext, Owned
from monarch.runtime.transport.regions import Regions
from monarch.runtime.transport.verbs import adapter, gpu
from monarch.runtime.transport.verbs.adapter import VerbsFailed
from monarch.runtime.transport.verbs.memory import SMALL, Memories
from monarch.runtime.transport.verbs.transport import VerbsTransport

PAGE = mmap.PAGESIZE
BASE = 0x7F0000000000


@dataclass
class Region:
    address: int
    what: tuple[Any, ...]
    local_key: int = 7
    remote_key: int = 8
    closed: bool = False

    def close(self) -> None:
        assert not self.closed
        self.closed = True


@dataclass
class Device:
    """Registers what `refuses` does not name: "memory", "peer memory" (of a GPU, by its address) or "dma-buf"."""

    refuses: tuple[str, ...] = ()
    regions: list[Region] = field(default_factory=list)

    def register(self, address: int, size: int, access: int) -> Region:
        self._refuse("peer memory" if address >= BASE and address < BASE + (1 << 32) else "memory", errno.EFAULT)
        return self._add(Region(address, ("address", address, size, access)))

    def register_dmabuf(self, fd: int, offset: int, size: int, access: int) -> Region:
        os.fstat(fd)  # it is open
        self._refuse("dma-buf", errno.EOPNOTSUPP)
        return self._add(Region(offset, ("dma-buf", offset, size, access)))

    def _refuse(self, what: str, code: int) -> None:
        if what in self.refuses:
            raise VerbsFailed(f"{what}: {os.strerror(code)}", code)

    def _add(self, region: Region) -> Region:
        self.regions.append(region)
        return region


class Cuda:
    """libcuda, as far as it is used: `exports` tells whether it can make dma-bufs."""

    def __init__(self, exports: bool = True) -> None:
        self.exports = exports
        self.ranges: list[tuple[int, int]] = []
        self.flushed = 0
        self.current: list[int] = []

    def cuInit(self, flags: Any) -> int:
        return 0

    def cuDeviceGetCount(self, count: Any) -> int:
        count[0] = 2
        return 0

    def cuDeviceGetUuid_v2(self, uuid: Any, device: Any) -> int:
        return 0

    def cuDeviceGet(self, device: Any, ordinal: Any) -> int:
        device[0] = ordinal.value
        return 0

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context[0] = 1000 + device.value
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        self.current.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.current.pop()
        return 0

    def cuMemGetHandleForAddressRange(self, file: Any, address: Any, size: Any, kind: Any, flags: Any) -> int:
        assert self.current == [1001], "the GPU's context has to be current"
        assert address.value % PAGE == 0 and size.value % PAGE == 0 and kind.value == 1
        if not self.exports:
            return 801  # CUDA_ERROR_NOT_SUPPORTED
        self.ranges.append((address.value, size.value))
        file[0] = os.open(os.devnull, os.O_RDWR)
        return 0

    def cuFlushGPUDirectRDMAWrites(self, target: Any, scope: Any) -> int:
        assert self.current == [1001]
        self.flushed += 1
        return 0


def registered(cuda: Cuda, device: Device, address: int, size: int) -> Region:
    found = gpu.register(Driver(cuda), device, "cuda:1", address, size, adapter.REMOTE_READ)
    assert isinstance(found, Region)
    return found


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_gpu_memory_is_registered_through_a_dmabuf_of_whole_pages() -> None:
    cuda, device, before = Cuda(), Device(), open_files()
    region = registered(cuda, device, BASE + PAGE + 512, 3 * PAGE)
    assert cuda.ranges == [(BASE + PAGE, 4 * PAGE)]
    assert region.what == ("dma-buf", 512, 3 * PAGE, adapter.REMOTE_READ) and region.address == 512
    assert open_files() == before


@pytest.mark.parametrize("exports, refuses", [(False, ()), (True, ("dma-buf",))])
def test_or_else_by_its_address(exports: bool, refuses: tuple[str, ...]) -> None:
    device, before = Device(refuses), open_files()
    region = registered(Cuda(exports), device, BASE + 512, PAGE)
    assert region.what == ("address", BASE + 512, PAGE, adapter.REMOTE_READ) and region.address == BASE + 512
    assert open_files() == before


def test_or_else_it_is_said_what_each_way_has_met() -> None:
    with pytest.raises(
        VerbsFailed, match=r"no dma-buf \(dma-buf: Operation not supported\), and no nvidia-peermem \(peer"
    ):
        registered(Cuda(), Device(("dma-buf", "peer memory")), BASE, PAGE)
    with pytest.raises(VerbsFailed, match="CUresult 801"):
        registered(Cuda(exports=False), Device(("peer memory",)), BASE, PAGE)


def test_a_driver_from_before_dmabufs() -> None:
    class Old(Cuda):
        cuMemGetHandleForAddressRange = property()  # type: ignore[assignment]  # reading it raises AttributeError

    with pytest.raises(VerbsFailed, match="too old: it has no cuMemGetHandleForAddressRange"):
        registered(Old(), Device(("peer memory",)), BASE, PAGE)


def test_without_a_driver_gpu_memory_is_out_of_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> object:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    memories = Memories(Device())
    memories.add(owned(BASE, PAGE, device="cuda:1"))
    assert memories.find(5) is None


# -- a process's memory ------------------------------------------------------------------------------------------------


def owned(address: int, size: int, writable: bool = True, device: str = "cpu") -> Owned:
    return Owned(5, bytes(16), None, None, address, size, writable, None, 0, device)


def place(memory: Any) -> int:
    return buffers.address_of(buffers.view_of(memory))


def test_what_peers_may_do_is_what_they_get_a_key_for() -> None:
    device = Device()
    memories = Memories(device)
    memories.add(owned(4096, 64))
    memories.add(owned(4096, 64, writable=False))
    everything = adapter.REMOTE_READ | adapter.REMOTE_WRITE | adapter.LOCAL_WRITE
    assert [region.what[3] for region in device.regions] == [everything, adapter.REMOTE_READ]


def test_what_is_small_is_copied_and_what_is_empty_is_nothing() -> None:
    device = Device()
    memories = Memories(device)
    for size in (0, 1, SMALL):
        local = memories.local(bytearray(size), write=True)
        assert (local.size, local.key, local.reached) == (size, None, True)
        local.release()
    assert memories.local(bytearray(0), write=False).key is None
    assert not device.regions


def test_what_is_registered_for_peers_is_not_registered_again() -> None:
    device = Device()
    memories = Memories(device)
    memory = bytearray(8 * SMALL)
    memories.add(owned(place(memory), len(memory)))
    local = memories.local(memoryview(memory)[SMALL : 4 * SMALL], write=True)
    assert (local.address, local.key) == (place(memory) + SMALL, 7)
    kept = memories.remove(5)
    assert kept is not None
    kept.release()
    assert not device.regions[0].closed, "it is still sent from"
    local.release(whole=True)
    assert device.regions[0].closed and len(device.regions) == 1


def test_read_only_memory_that_is_registered_is_not_received_into() -> None:
    device = Device()
    memories = Memories(device)
    memory = bytearray(8 * SMALL)
    memories.add(owned(place(memory), len(memory), writable=False))
    memories.local(memory, write=False).release(whole=True)
    assert [region.what[3] for region in device.regions] == [adapter.REMOTE_READ, adapter.LOCAL_WRITE]


@pytest.mark.parametrize("write, access", [(True, 0), (False, adapter.LOCAL_WRITE)])
def test_other_memory_is_registered_for_a_while(write: bool, access: int) -> None:
    device = Device()
    memory = bytearray(8 * SMALL)
    local = Memories(device).local(memory, write)
    assert device.regions[0].what == ("address", place(memory), len(memory), access) and local.reached
    local.release()
    assert device.regions[0].closed


def test_what_cannot_be_registered_is_out_of_reach() -> None:
    device = Device(("memory",))
    memories = Memories(device)
    assert not memories.local(bytearray(8 * SMALL), write=True).reached
    memories.add(owned(4096, 64))
    assert memories.find(5) is None


class OnGpu:
    """A tensor whose bytes are on a GPU, as far as it is looked at."""

    device = "cuda:1"

    def __init__(self, size: int) -> None:
        self.size = size

    def data_ptr(self) -> int:
        return BASE + 512

    def is_contiguous(self) -> bool:
        return True

    def numel(self) -> int:
        return self.size

    def element_size(self) -> int:
        return 1


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tensors whose GPU was waited for."""
    waited: list[Any] = []
    monkeypatch.setattr(gpu, "wait_for_streams", waited.append)
    return waited


def test_a_gpu_is_waited_for_before_sending_and_flushed_after_receiving(waited: list[Any]) -> None:
    cuda, device = Cuda(), Device()
    memories = Memories(device, lambda: Driver(cuda))
    tensor = OnGpu(100)  # small, and not copied all the same
    memories.local(tensor, write=True).release(whole=True)
    assert waited == [tensor] and not cuda.flushed and device.regions[0].what[0] == "dma-buf"
    memories.local(tensor, write=False).release(whole=True)
    assert cuda.flushed == 1
    memories.local(tensor, write=False).release()
    assert cuda.flushed == 1 and all(region.closed for region in device.regions)


def test_gpu_memory_out_of_reach_goes_through_host_memory(waited: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(("dma-buf", "peer memory"))
    memories = Memories(device, lambda: Driver(Cuda()))
    staged, filled = torch.arange(64, dtype=torch.uint8), []
    monkeypatch.setattr(gpu, "pinned", lambda tensor, fill: staged)
    monkeypatch.setattr(gpu, "fill", lambda tensor, staged: filled.append((tensor, staged)))
    tensor = OnGpu(64)
    local = memories.local(tensor, write=True)
    assert (local.address, local.size, local.key) == (staged.data_ptr(), 64, 7)
    local.release(whole=True)
    assert not filled
    memories.local(tensor, write=False).release(whole=True)
    assert filled == [(tensor, staged)] and all(region.closed for region in device.regions)


def test_bytes_pass_through_host_memory_both_ways() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    staged = gpu.pinned(tensor, fill=True)
    assert staged.numpy().tobytes() == tensor.numpy().tobytes()
    target = torch.zeros(2, 3)
    gpu.fill(target, staged)
    assert torch.equal(target, tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: torch.cuda.is_available() is False")
def test_a_real_gpus_memory_is_exported_where_it_can_be() -> None:
    tensor = torch.zeros(1 << 21, dtype=torch.uint8, device="cuda:0")
    address = -(-tensor.data_ptr() // PAGE) * PAGE
    try:
        file = Driver().dmabuf(0, address, PAGE)
    except CudaFailed as error:
        pytest.skip(str(error))
    os.close(file)
    Driver().flush()


def test_a_region_says_that_it_is_on_a_gpu_that_the_device_reaches() -> None:
    """Without that an endpoint takes its memory for out of reach."""
    transport = VerbsTransport(EndpointContext("", "", Loop("test"), Regions()))
    for device, expected in ((Device(), {}), (Device(("dma-buf", "peer memory")), None)):
        transport._memories = Memories(device, lambda: Driver(Cuda()))
        assert transport.register(owned(BASE, PAGE, device="cuda:1")) == expected
    host = owned(4096, 64)
    host.view = memoryview(bytearray(64))
    assert transport.register(host) is None
