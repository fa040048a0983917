"""The calls of NVIDIA's driver (libcuda) that transports need: contexts, copies, and memory shared between processes.

The driver is PyTorch's too, in the same process: contexts are the devices' primary ones, which PyTorch uses as well, so
pointers, streams and events of either serve both. Signatures and names ("_v2") are those of cuda.h 12.9.

**Nothing here spins.** Events are made with CU_EVENT_BLOCKING_SYNC, so that a waiting thread sleeps.

**Forks.** CUDA does not survive one: in the child of a process that has used a GPU there is no driver, and `missing`
says so. Opening the library, as opposed to using it, survives.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from monarch.runtime.transport.buffers import MemoryRange

LIBRARY = "libcuda.so.1"

_DMA_BUF_FD = 1
_CURRENT_CONTEXT, _OWNER = 0, 100
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream, nor the other way
_BLOCKING_SYNC, _DISABLE_TIMING = 1, 2
_LAZY_ENABLE_PEER_ACCESS = 1
_IS_LEGACY_IPC_CAPABLE = 10
_HANDLE_BYTES = 64


class CudaFailed(Exception):
    """A call of the CUDA driver failed, or there is no driver."""


class _Handle(ctypes.Structure):
    """CUipcMemHandle: passed by value."""

    _fields_ = [("reserved", ctypes.c_char * _HANDLE_BYTES)]


@dataclass(frozen=True)
class Exported:
    """Memory that other processes may open: the handle of the allocation that holds it (PyTorch's allocator cuts many
    tensors out of one), and where in that it begins."""

    handle: bytes
    offset: int


@dataclass
class _Opened:
    gpu: int
    address: int
    users: int


class Driver:
    """GPUs by their numbers, as PyTorch numbers them. `library` is libcuda, or a stand-in with functions of the same
    names. Safe to use from several threads. Everything raises CudaFailed."""

    def __init__(self, library: Any = None) -> None:
        if library is None:
            try:
                library = ctypes.CDLL(LIBRARY)
            except OSError as error:
                raise CudaFailed(f"the CUDA driver cannot be opened: {error}") from error
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._opened: dict[bytes, _Opened] = {}
        self._streams: dict[int, CudaStream] = {}
        self._lock = threading.RLock()
        self._launching = threading.Lock()
        self._names: list[str] | None = None

    @property
    def used(self) -> bool:
        """Whether a GPU was used through this."""
        return self._names is not None or bool(self._contexts)

    def uuids(self) -> list[str]:
        """The GPUs that this process sees: for each the name that all processes give it, 32 hex digits."""
        with self._lock:
            if self._names is None:
                self._call("cuInit", ctypes.c_uint(0))
                count = (ctypes.c_int * 1)()
                self._call("cuDeviceGetCount", count)
                names = []
                for gpu in range(count[0]):
                    uuid = (ctypes.c_ubyte * 16)()
                    self._call("cuDeviceGetUuid_v2", uuid, self._device(gpu))
                    names.append(bytes(uuid).hex())
                self._names = names
            return self._names

    # -- memory of other processes ---------------------------------------------------------------------------------

    def export(self, gpu: int, address: int) -> Exported:
        """Let other processes open the allocation that holds `address`. It must not be freed before they close it."""
        base, size = (ctypes.c_uint64 * 1)(), (ctypes.c_size_t * 1)()
        handle, capable = _Handle(), (ctypes.c_int * 1)()
        with self.on(gpu):
            self._call("cuMemGetAddressRange_v2", base, size, ctypes.c_uint64(address))
            self._call("cuPointerGetAttribute", capable, ctypes.c_int(_IS_LEGACY_IPC_CAPABLE), ctypes.c_uint64(base[0]))
            if not capable[0]:
                raise CudaFailed(
                    "CUDA IPC does not share memory of this kind: of PyTorch's expandable segments, or of a pool "
                    "(set PYTORCH_ALLOC_CONF=expandable_segments:False,backend:native before PyTorch starts)"
                )
            self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(base[0]))
        return Exported(ctypes.string_at(ctypes.addressof(handle), _HANDLE_BYTES), address - int(base[0]))

    def open(self, handle: bytes, uuid: str) -> tuple[int, int]:
        """Map an allocation of another process, on the GPU `uuid`; gives the GPU in whose context it is, and its
        address. Mapped once, however often it is opened; each opening is to be closed.

        Where this process does not see that GPU it is mapped for the first that it sees, which has to reach the other
        as a peer."""
        with self._lock:
            found = self._opened.get(handle)
            if found is None:
                gpus = self.uuids()
                if not gpus:
                    raise CudaFailed("this process sees no GPU")
                gpu = gpus.index(uuid) if uuid in gpus else 0
                address = (ctypes.c_uint64 * 1)()
                with self.on(gpu):
                    self._call(
                        "cuIpcOpenMemHandle_v2",
                        address,
                        _Handle.from_buffer_copy(handle),
                        ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS),
                    )
                found = self._opened[handle] = _Opened(gpu, int(address[0]), 0)
            found.users += 1
            return found.gpu, found.address

    def close(self, handle: bytes) -> None:
        with self._lock:
            found = self._opened[handle]
            found.users -= 1
            if not found.users:
                del self._opened[handle]
                with self.on(found.gpu):
                    self._call("cuIpcCloseMemHandle", ctypes.c_uint64(found.address))

    # -- copying ---------------------------------------------------------------------------------------------------

    def stream(self, gpu: int) -> CudaStream:
        """A new stream; the caller's to close."""
        return CudaStream(self, gpu)

    def now(self, gpu: int) -> Event:
        """All that PyTorch has launched so far on this thread's current stream."""
        event = Event(self, gpu)
        lent: dict[int, int] = getattr(_lent, "streams", {})
        event.record(lent[gpu] if gpu in lent else current_stream(gpu))
        return event

    def copy(self, target: MemoryRange, source: MemoryRange, after: Event | None = None) -> None:
        """Copy, and return when it is done: all of `source` to the beginning of `target`. Begins after the event,
        which is closed; without one, after what `now` says of the GPUs of both."""
        gpu = source.gpu if source.gpu is not None else target.gpu
        assert gpu is not None, "memory of a GPU, on one side at least"
        with self._launching:
            stream = self._streams.get(gpu)
            if stream is None:
                stream = self._streams[gpu] = self.stream(gpu)
            if after is not None:
                stream.wait(after)
                after.close()
            else:
                for each in {place.gpu for place in (target, source) if place.gpu is not None}:
                    launched = self.now(each)
                    stream.wait(launched)
                    launched.close()
            stream.copy(target, source)
            done = stream.record()
        done.wait()
        done.close()

    # -- memory that devices reach over PCI ------------------------------------------------------------------------

    def dmabuf(self, gpu: int, address: int, size: int) -> int:
        """A file descriptor for memory of whole pages; the caller's to close."""
        file = (ctypes.c_int * 1)(-1)
        with self.on(gpu):
            self._call(
                "cuMemGetHandleForAddressRange",
                file,
                ctypes.c_uint64(address),
                ctypes.c_size_t(size),
                ctypes.c_int(_DMA_BUF_FD),
                ctypes.c_uint64(0),
            )
        return file[0]

    def flush(self) -> None:
        """Make what devices have written visible on the GPUs: those that this was used for."""
        for gpu in list(self._contexts):
            with self.on(gpu):
                self._call("cuFlushGPUDirectRDMAWrites", ctypes.c_int(_CURRENT_CONTEXT), ctypes.c_int(_OWNER))

    # -- calls -----------------------------------------------------------------------------------------------------

    def _device(self, gpu: int) -> ctypes.c_int:
        device = (ctypes.c_int * 1)()
        self._call("cuDeviceGet", device, ctypes.c_int(gpu))
        return ctypes.c_int(device[0])

    def _context(self, gpu: int) -> ctypes.c_void_p:
        context = self._contexts.get(gpu)
        if context is None:
            with self._lock:
                self.uuids()
                found = (ctypes.c_void_p * 1)()
                self._call("cuDevicePrimaryCtxRetain", found, self._device(gpu))
                context = self._contexts[gpu] = ctypes.c_void_p(found[0])
        return context

    @contextmanager
    def on(self, gpu: int) -> Iterator[None]:
        """With this thread's calls on a GPU, in the context that PyTorch uses: other threads have none of their own."""
        self._call("cuCtxPushCurrent_v2", self._context(gpu))
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", (ctypes.c_void_p * 1)())

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise CudaFailed(f"the CUDA driver is too old: it has no {name}") from None
        if status := function(*arguments):
            raise CudaFailed(f"{name} failed with CUresult {status}{_MEANING.get(status, '')}")


_MEANING = {
    2: ": out of memory",
    3: ": not initialised, or forked from a process that has used a GPU",
    100: ": no GPU",
    201: ": no such context",
    205: ": the memory cannot be mapped",
    217: ": the GPUs do not reach each other as peers",
    400: ": no such handle",
    700: ": an address that is not mapped",
    801: ": not supported",
}


class Event:
    """A point in a stream."""

    def __init__(self, driver: Driver, gpu: int) -> None:
        self.loaded = driver
        self._gpu = gpu
        made = (ctypes.c_void_p * 1)()
        with driver.on(gpu):
            driver._call("cuEventCreate", made, ctypes.c_uint(_BLOCKING_SYNC | _DISABLE_TIMING))
        self.handle = ctypes.c_void_p(made[0])

    def record(self, stream: int) -> None:
        with self.loaded.on(self._gpu):
            self.loaded._call("cuEventRecord", self.handle, ctypes.c_void_p(stream))

    def wait(self) -> None:
        """Sleep until all before it is done. Raises CudaFailed where some of that has failed."""
        with self.loaded.on(self._gpu):
            self.loaded._call("cuEventSynchronize", self.handle)

    def close(self) -> None:
        with self.loaded.on(self._gpu):
            self.loaded._call("cuEventDestroy_v2", self.handle)


class CudaStream:
    """A stream of ours: its launches run in order, and beside all other streams."""

    def __init__(self, driver: Driver, gpu: int) -> None:
        self.loaded = driver
        self.gpu = gpu
        made = (ctypes.c_void_p * 1)()
        with driver.on(gpu):
            driver._call("cuStreamCreate", made, ctypes.c_uint(_NON_BLOCKING))
        self._handle = ctypes.c_void_p(made[0])

    def wait(self, event: Event) -> None:
        """Begin nothing more before the event."""
        with self.loaded.on(self.gpu):
            self.loaded._call("cuStreamWaitEvent", self._handle, event.handle, ctypes.c_uint(0))

    def copy(self, target: MemoryRange, source: MemoryRange) -> None:
        """Launch a copy of all of `source` to the beginning of `target`."""
        size = ctypes.c_size_t(source.size)
        if not source.size:
            return
        driver, to, here = self.loaded, target.gpu, source.gpu
        with driver.on(self.gpu):
            if to is None:
                driver._call(
                    "cuMemcpyDtoHAsync_v2",
                    ctypes.c_void_p(target.address),
                    ctypes.c_uint64(source.address),
                    size,
                    self._handle,
                )
            elif here is None:
                driver._call(
                    "cuMemcpyHtoDAsync_v2",
                    ctypes.c_uint64(target.address),
                    ctypes.c_void_p(source.address),
                    size,
                    self._handle,
                )
            elif to == here:
                driver._call(
                    "cuMemcpyDtoDAsync_v2",
                    ctypes.c_uint64(target.address),
                    ctypes.c_uint64(source.address),
                    size,
                    self._handle,
                )
            else:
                # Goes through host memory by itself where the two do not reach each other as peers.
                driver._call(
                    "cuMemcpyPeerAsync",
                    ctypes.c_uint64(target.address),
                    driver._context(to),
                    ctypes.c_uint64(source.address),
                    driver._context(here),
                    size,
                    self._handle,
                )

    def record(self) -> Event:
        """The end of all that was launched here so far."""
        event = Event(self.loaded, self.gpu)
        event.record(self._handle.value or 0)
        return event

    def close(self) -> None:
        with self.loaded.on(self.gpu):
            self.loaded._call("cuStreamDestroy_v2", self._handle)


# -- this process ------------------------------------------------------------------------------------------------------

loaded: Driver | None = None
_lock = threading.Lock()
_forked = False


def here() -> Driver:
    """This process's driver. Raises CudaFailed where there is none."""
    global loaded
    with _lock:
        if _forked:
            raise CudaFailed("this process was forked from one that has used a GPU: it has to be spawned instead")
        if loaded is None:
            loaded = Driver()
        return loaded


def missing() -> str | None:
    """Why memory of GPUs is out of reach of this process, or None. Uses no GPU: a fork is still possible after it."""
    try:
        here()
    except CudaFailed as error:
        return str(error)
    return without_gpus()


def without_gpus() -> str | None:
    """Why PyTorch has no NVIDIA GPU here, or None."""
    import torch

    if torch.version.hip:
        return f"this torch is built for ROCm {torch.version.hip.partition('-')[0]}, and only CUDA's driver is known"
    if not torch.version.cuda:
        return "this torch is built without CUDA"
    if torch.cuda._is_in_bad_fork():
        return "this process was forked from one that has used a GPU: it has to be spawned instead"
    # Asks NVML, not CUDA.
    return None if torch.cuda.device_count() else "torch sees no GPU: see CUDA_VISIBLE_DEVICES, and nvidia-smi"


def current_stream(gpu: int) -> int:
    """The stream on which this thread's PyTorch launches."""
    import torch

    return int(torch.cuda.current_stream(gpu).cuda_stream)


_lent = threading.local()


def as_if_here(call: Callable[[], None]) -> Callable[[], None]:
    """The call, for another thread: it waits for PyTorch's launches on the current streams of this one."""
    torch = sys.modules.get("torch")
    if not (loaded is not None and loaded.used) and not (torch is not None and torch.cuda.is_initialized()):
        return call
    try:
        streams = {gpu: current_stream(gpu) for gpu in range(len(here().uuids()))}
    except CudaFailed:
        return call  # another maker's GPUs, which nothing here copies from

    def run() -> None:
        _lent.streams = streams
        try:
            call()
        finally:
            _lent.streams = {}

    return run


def _after_fork() -> None:
    global loaded, _lock, _forked
    _lock = threading.Lock()
    _forked = _forked or (loaded is not None and loaded.used)
    loaded = None


os.register_at_fork(after_in_child=_after_fork)
