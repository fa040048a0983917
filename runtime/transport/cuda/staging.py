"""Memory of GPUs by way of host memory, for links that reach only host memory: over sockets, or into shared memory.

Copies wait for all that PyTorch has launched before them, and block the thread that calls them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from monarch.compiler.plan import MonarchError
from monarch.runtime.transport import buffers
from monarch.runtime.transport.buffers import MemoryRange
from monarch.runtime.transport.cuda import driver
from monarch.runtime.transport.cuda.driver import CudaFailed, Event
from monarch.runtime.transport.interface import AccessRefused, Memory, Work
from monarch.runtime.transport.plug import Owned
from monarch.runtime.transport.works import Pending


def outgoing(source: Memory, after: Event | None = None) -> memoryview:
    """The bytes of memory to send: its own, or a copy of a GPU's memory after PyTorch's launches, which ends with
    `after` (closed here), if not now. Raises MonarchError."""
    if buffers.device_of(source) == "cpu":
        return buffers.view_of(source)
    return _read(buffers.range_of(source), after)


def incoming(target: Memory, get: Callable[[memoryview], Work], after: Event | None = None) -> Work:
    """Fill memory of a GPU with the bytes that `get` puts into host memory. Raises MonarchError."""
    place = buffers.range_of(target)
    staged = memoryview(bytearray(place.size))
    pending = Pending(place)
    after = after or launched(target)
    try:
        work = get(staged)
    except MonarchError:
        move(place, buffers.range_of(b""), after)
        raise

    def finish() -> None:
        try:
            try:
                work.wait(0)
            except MonarchError:
                move(place, buffers.range_of(b""), after)
                raise
            move(place, buffers.range_of(staged), after)
        except MonarchError as error:
            pending.fail(error)
        else:
            pending.finish()

    work.then(finish)
    return pending


def move(target: MemoryRange, source: MemoryRange, after: Event | None = None) -> None:
    """Copy within this process: all of `source` to the beginning of `target`, after what PyTorch has launched.
    `after` is where that ends, if not now, and is closed. Raises MonarchError."""
    if target.gpu is None and source.gpu is None:
        ctypes.memmove(target.address, source.address, source.size)
        return
    try:
        if source.size:
            driver.here().copy(target, source, after)
        elif after is not None:
            after.close()
    except CudaFailed as error:
        raise MonarchError(f"memory of a GPU cannot be copied: {error}") from error


def launched(memory: Memory) -> Event | None:
    """PyTorch's launches so far on this thread's stream of the GPU that has the memory; None for host memory. Raises
    MonarchError."""
    gpu = buffers.range_of(memory).gpu
    if gpu is None:
        return None
    try:
        return driver.here().now(gpu)
    except CudaFailed as error:
        raise MonarchError(f"memory of a GPU cannot be copied: {error}") from error


# -- at the owner ------------------------------------------------------------------------------------------------------


def reaches(device: str) -> bool:
    """Whether the memory of a device can be copied to and from host memory here."""
    return device.partition(":")[0] == "cuda" and driver.missing() is None


def await_launched(owned: Owned) -> None:
    """Wait for PyTorch's launches on this thread's stream of the GPU that has the memory: then peers, which cannot wait
    for streams of this process, read their results. Raises MonarchError."""
    after = launched(owned.memory)
    if after is not None:
        try:
            after.wait()
            after.close()
        except CudaFailed as error:
            raise MonarchError(f"memory on {owned.device} cannot be registered: {error}") from error


def load(owned: Owned, offset: int, size: int) -> memoryview:
    """Bytes of a region: its own, or a copy of a GPU's. Raises AccessRefused."""
    if owned.view is not None:
        return owned.view[offset : offset + size]
    try:
        return _read(_place(owned, offset, size))
    except MonarchError as error:
        raise AccessRefused(f"region {owned.number} cannot be read: {error.message}") from error


def store(owned: Owned, offset: int, staged: memoryview) -> None:
    """Write to a region on a GPU. Raises AccessRefused."""
    try:
        move(_place(owned, offset, staged.nbytes), buffers.range_of(staged))
    except MonarchError as error:
        raise AccessRefused(f"region {owned.number} cannot be written: {error.message}") from error


def _place(owned: Owned, offset: int, size: int) -> MemoryRange:
    return MemoryRange(owned.address + offset, size, buffers.gpu_of(owned.device), owned.memory)


def _read(place: MemoryRange, after: Event | None = None) -> memoryview:
    staged = memoryview(bytearray(place.size))
    move(buffers.range_of(staged), place, after)
    return staged
