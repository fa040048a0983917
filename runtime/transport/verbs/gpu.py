"""Memory of GPUs, for devices that reach it over PCI (GPUDirect RDMA), and a way around for those that do not.

A GPU's memory is registered through a dma-buf, which the CUDA driver makes of it and the kernel hands to the device
(Linux 5.12, CUDA 11.7, the driver's open kernel modules); or else by its address alone, which works where the module
nvidia-peermem is loaded; or else not at all, and this process's side of a transfer goes through pinned host memory.

Nothing here knows of the GPU's streams, and a device waits for none: whatever runs on the GPU is waited for before its
memory is sent from, and what the device wrote is flushed before anybody is told that it is there.

Tested with stand-ins for the CUDA driver and for the device; **not run on a GPU yet**.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from monarch.runtime.transport.verbs.adapter import Device, MemoryRegion, VerbsFailed

_DMA_BUF_FD = 1
_CURRENT_CONTEXT, _OWNER = 0, 100


class CudaFailed(Exception):
    """A call of the CUDA driver failed, or there is no driver."""


class Driver:
    """The few calls of libcuda that are needed; GPUs by their numbers. `library` is it, or a stand-in with functions of
    the same names. PyTorch has initialised it: nobody else makes memory on a GPU here."""

    def __init__(self, library: Any = None) -> None:
        if library is None:
            try:
                library = ctypes.CDLL("libcuda.so.1")
            except OSError as error:
                raise CudaFailed(f"the CUDA driver cannot be opened: {error}") from error
        self._library = library
        self._contexts: dict[int, ctypes.c_void_p] = {}

    def dmabuf(self, gpu: int, address: int, size: int) -> int:
        """A file descriptor for memory of whole pages; the caller's to close."""
        file = (ctypes.c_int * 1)(-1)
        with self._on(gpu):
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
        """Make what devices have written visible on the GPUs: those whose memory `dmabuf` was asked for."""
        for gpu in self._contexts:
            with self._on(gpu):
                self._call("cuFlushGPUDirectRDMAWrites", ctypes.c_int(_CURRENT_CONTEXT), ctypes.c_int(_OWNER))

    @contextmanager
    def _on(self, gpu: int) -> Iterator[None]:
        """With this thread's calls on a GPU, in the context that PyTorch uses: the I/O thread has none of its own."""
        if gpu not in self._contexts:
            found = (ctypes.c_void_p * 1)()
            self._call("cuDevicePrimaryCtxRetain", found, ctypes.c_int(gpu))
            self._contexts[gpu] = ctypes.c_void_p(found[0])
        self._call("cuCtxPushCurrent_v2", self._contexts[gpu])
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
            raise CudaFailed(f"{name} failed with CUresult {status}")


def register(driver: Driver, device: Device, where: str, address: int, size: int, access: int) -> MemoryRegion:
    """Register memory of a GPU ("cuda:0"), one way or the other. Raises VerbsFailed, with what each has met."""
    kind, _, number = where.partition(":")
    if kind != "cuda":
        raise VerbsFailed(f"it is not known how devices reach memory on {where}")
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    whole = -(-(address + size - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    try:
        file = driver.dmabuf(int(number or 0), start, whole)
        try:
            return device.register_dmabuf(file, address - start, size, access)
        finally:
            os.close(file)
    except (CudaFailed, VerbsFailed) as error:
        no_dmabuf = str(error)
    try:
        return device.register(address, size, access)
    except VerbsFailed as error:
        raise VerbsFailed(f"no dma-buf ({no_dmabuf}), and no nvidia-peermem ({error})", error.errno) from error


def wait_for_streams(tensor: Any) -> None:
    """Until all that was launched on the tensor's GPU is finished."""
    import torch

    torch.cuda.synchronize(tensor.device)


def pinned(tensor: Any, fill: bool) -> Any:
    """Host memory of the tensor's size, which holds its bytes if it is to be `fill`ed."""
    import torch

    copy = torch.empty(tensor.numel() * tensor.element_size(), dtype=torch.uint8, pin_memory=tensor.is_cuda)
    if fill:
        copy.copy_(tensor.detach().reshape(-1).view(torch.uint8))
    return copy


def fill(tensor: Any, staged: Any) -> None:
    """The other way: staged bytes into the tensor."""
    import torch

    tensor.detach().view(-1).view(torch.uint8).copy_(staged)
