"""This process's memory as the device knows it: regions for peers, and memory that it sends from and receives into."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from monarch.runtime.transport import buffers
from monarch.runtime.transport.cuda.driver import CudaFailed, Driver, here
from monarch.runtime.transport.interface import Memory
from monarch.runtime.transport.plug import Owned
from monarch.runtime.transport.verbs import adapter, gpu
from monarch.runtime.transport.verbs.adapter import Device, MemoryRegion, VerbsFailed

SMALL = 1024
"""Bytes up to which host memory is copied to be sent."""

_log = logging.getLogger("monarch.transport")


class Registered:
    """Memory that the device knows, until all its users have released it."""

    def __init__(self, region: MemoryRegion, address: int, size: int, writable: bool) -> None:
        self.address, self.size, self.writable = address, size, writable
        self.region = region
        self._users = 1
        self._lock = threading.Lock()

    def hold(self) -> bool:
        """Gives whether it could be: not once the last user has released it."""
        with self._lock:
            if not self._users:
                return False
            self._users += 1
            return True

    def release(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.region.close()


class Local:
    """This side's memory of a put or a get, until it is released: `release(True)` once all bytes have arrived.

    `reached`  whether the device reaches it
    `key`      None where its bytes are copied when they are sent
    """

    def __init__(
        self,
        keep: Any,
        address: int,
        size: int,
        registered: Registered | None = None,
        reached: bool = True,
        received: Callable[[], None] | None = None,
    ) -> None:
        self._keep = keep
        self._registered = registered
        self._received = received
        self.size = size
        self.reached = reached
        self.address = address
        self.key: int | None = None
        if registered is not None:
            self.address += registered.region.address - registered.address
            self.key = registered.region.local_key

    def release(self, whole: bool = False) -> None:
        registered, received = self._registered, self._received
        self._registered = self._received = self._keep = None
        try:
            if whole and received is not None:
                received()
        finally:
            if registered is not None:
                registered.release()


class Memories:
    """All of a process's, on one device. `driver` is that of its GPUs, asked for when it is first needed."""

    def __init__(self, device: Device, driver: Callable[[], Driver] = here) -> None:
        self._device = device
        self._make_driver = driver
        self._driver: Driver | None = None
        self._owned: dict[int, Registered] = {}
        self._lock = threading.Lock()

    def add(self, owned: Owned) -> None:
        """Register memory for peers. Memory that the device does not reach goes over the stream."""
        access = adapter.REMOTE_READ
        if owned.writable:
            access |= adapter.REMOTE_WRITE | adapter.LOCAL_WRITE
        try:
            region = self.register(owned.device, owned.address, owned.size, access)
        except VerbsFailed as error:
            _log.warning("region %d is out of the device's reach: %s", owned.number, error)
            return
        with self._lock:
            self._owned[owned.number] = Registered(region, owned.address, owned.size, owned.writable)

    def remove(self, number: int) -> Registered | None:
        """Nobody finds it any more. It is registered until it is released."""
        with self._lock:
            return self._owned.pop(number, None)

    def find(self, number: int) -> MemoryRegion | None:
        found = self._owned.get(number)
        return None if found is None else found.region

    def close(self) -> None:
        with self._lock:
            owned, self._owned = list(self._owned.values()), {}
        for registered in owned:
            registered.release()

    def flush(self) -> None:
        """Let what peers have written be seen, also on GPUs."""
        if self._driver is not None:
            self._driver.flush()

    def local(self, memory: Memory, write: bool) -> Local:
        """Memory that is sent from (`write`) or received into. Raises MonarchError where it cannot be."""
        device = buffers.device_of(memory)
        if device != "cpu":
            return self._on_gpu(memory, device, write)
        view = buffers.view_of(memory, writable=not write)
        address, size = buffers.address_of(view), view.nbytes
        if not size or (write and size <= SMALL):
            return Local(view, address, size)
        keep = (memory, view)
        if found := self._around(address, size, writable=not write):
            return Local(keep, address, size, found)
        try:
            return Local(keep, address, size, self._for_a_while(device, address, size, write))
        except VerbsFailed as error:
            _log.warning("%d bytes go over the stream: %s", size, error)
            return Local(keep, address, size, reached=False)

    def _on_gpu(self, tensor: Any, device: str, write: bool) -> Local:
        address, size = buffers.device_range(tensor)
        if not size:
            return Local(tensor, address, 0)
        if write:
            gpu.wait_for_streams(tensor)
        found = self._around(address, size, writable=not write)
        if found is None:
            try:
                found = self._for_a_while(device, address, size, write)
            except VerbsFailed as error:
                _log.info("%d bytes on %s go through host memory: %s", size, device, error)
                return self._staged(tensor, write)
        return Local(tensor, address, size, found, received=None if write else self.flush)

    def _staged(self, tensor: Any, write: bool) -> Local:
        staged = gpu.pinned(tensor, fill=write)
        address, size = staged.data_ptr(), staged.numel()
        received = None if write else lambda: gpu.fill(tensor, staged)
        try:
            return Local(
                (tensor, staged), address, size, self._for_a_while("cpu", address, size, write), True, received
            )
        except VerbsFailed as error:
            _log.warning("%d bytes of host memory cannot be registered: %s", size, error)
            return Local(tensor, address, size, reached=False)

    def register(self, device: str, address: int, size: int, access: int) -> MemoryRegion:
        if device == "cpu":
            return self._device.register(address, size, access)
        if self._driver is None:
            try:
                self._driver = self._make_driver()
            except CudaFailed as error:
                raise VerbsFailed(str(error)) from error
        return gpu.register(self._driver, self._device, device, address, size, access)

    def _for_a_while(self, device: str, address: int, size: int, write: bool) -> Registered:
        access = 0 if write else adapter.LOCAL_WRITE
        return Registered(self.register(device, address, size, access), address, size, not write)

    def _around(self, address: int, size: int, writable: bool) -> Registered | None:
        """Memory that is registered for peers anyway and has all of these bytes, with a reference."""
        with self._lock:
            for one in self._owned.values():
                inside = one.address <= address and address + size <= one.address + one.size
                if inside and one.writable >= writable and one.hold():
                    return one
        return None
