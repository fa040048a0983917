"""Memory as transports see it: its bytes and its address, whatever object holds it."""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from monarch.compiler.plan import MonarchError
from monarch.runtime.shared.wire import in_bytes
from monarch.runtime.transport.interface import Memory

_SMALL = 32 << 10  # below, a slice assignment is faster than a call that gives up the interpreter's lock


@dataclass(frozen=True)
class MemoryRange:
    """Bytes of host memory, or of a GPU ("cuda:1" is `gpu` 1), which stay where they are as long as `keep` exists: the
    view, or the tensor."""

    address: int
    size: int
    gpu: int | None
    keep: Any

    def part(self, offset: int, size: int) -> MemoryRange:
        return MemoryRange(self.address + offset, size, self.gpu, self.keep)


def range_of(memory: Memory, writable: bool = False) -> MemoryRange:
    """Where memory of the host or of a GPU is. Raises MonarchError as `view_of` and `device_range` do."""
    device = device_of(memory)
    if device == "cpu":
        view = view_of(memory, writable)
        return MemoryRange(address_of(view), view.nbytes, None, view)
    address, size = device_range(memory)
    return MemoryRange(address, size, gpu_of(device), memory)


def gpu_of(device: str) -> int:
    """The number of an NVIDIA GPU, by its name. Raises MonarchError for other devices."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        raise MonarchError(f"no transport reaches memory on {device}", hint="Copy it to host memory first.")
    return int(number or 0)


def view_of(memory: Memory, writable: bool = False) -> memoryview:
    """The bytes of host memory, not copied. Raises MonarchError where it is not contiguous, or read-only and to be
    written."""
    if type(memory) is memoryview:
        view = memory
    elif hasattr(memory, "data_ptr"):
        view = _tensor_view(memory)
    else:
        try:
            view = memoryview(memory)
        except (TypeError, ValueError, BufferError):
            raise MonarchError(
                f"a {type(memory).__name__} is no memory that can be registered or moved",
                hint="Give a contiguous tensor, or a contiguous buffer: a memoryview, mmap, bytearray or numpy array.",
            ) from None
    if not view.c_contiguous:
        raise MonarchError(
            f"memory has to be contiguous: this has shape {view.shape} and strides {view.strides}",
            hint="Copy it first.",
        )
    if writable and view.readonly:
        raise MonarchError(f"this {type(memory).__name__} is read-only, and is to be written")
    if view.ndim != 1 or view.format != "B":
        # numpy reads every format that buffers have, memoryview.cast only some of them.
        view = np.asarray(view).reshape(-1).view(np.uint8).data
    return view


def _tensor_view(tensor: Any) -> memoryview:
    import torch

    if tensor.layout is not torch.strided:
        raise MonarchError(f"memory has to be contiguous: this tensor's layout is {tensor.layout}")
    if not tensor.is_contiguous():
        raise MonarchError(
            f"memory has to be contiguous: this tensor has shape {list(tensor.shape)}, strides {list(tensor.stride())}",
            hint="Call .contiguous() on it, and keep the result.",
        )
    if tensor.is_conj() or tensor.is_neg():
        raise MonarchError(
            "this tensor is conjugated or negated lazily, so its memory does not hold its values",
            hint="Call .resolve_conj().resolve_neg() on it, and keep the result.",
        )
    if tensor.device.type != "cpu":
        raise MonarchError(f"this tensor is on {tensor.device}: only its own transports reach that")
    return memoryview(in_bytes(tensor.detach()).numpy())  # type: ignore[arg-type]


def size_of(memory: Memory) -> int:
    """Bytes."""
    if hasattr(memory, "data_ptr"):
        return int(memory.numel() * memory.element_size())
    return view_of(memory).nbytes


def copy(target: memoryview, source: memoryview) -> None:
    """Copy bytes; large ones without holding the interpreter's lock."""
    if source.nbytes <= _SMALL:
        target[:] = source
    else:
        ctypes.memmove(address_of(target), address_of(source), source.nbytes)


def device_of(memory: Memory) -> str:
    device = getattr(memory, "device", None)
    return str(device) if hasattr(memory, "data_ptr") and device is not None else "cpu"


def device_range(tensor: Any) -> tuple[int, int]:
    """Address and bytes of a contiguous tensor on a device."""
    if not tensor.is_contiguous():
        raise MonarchError(
            f"memory has to be contiguous: this tensor has shape {list(tensor.shape)}, strides {list(tensor.stride())}",
            hint="Call .contiguous() on it, and keep the result.",
        )
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def address_of(view: memoryview) -> int:
    """Where its bytes are; 0 where there are none."""
    if not view.nbytes:
        return 0
    return np.frombuffer(view, np.uint8).__array_interface__["data"][0]


def file_of(memory: Memory) -> tuple[int, int] | None:
    """The file that holds a tensor whose `share_memory_()` was called: its descriptor, which stays the tensor's, and
    the tensor's offset."""
    if not hasattr(memory, "untyped_storage") or device_of(memory) != "cpu" or not memory.is_shared():
        return None
    import torch.multiprocessing

    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return None
    storage = memory.untyped_storage()
    return storage._share_fd_cpu_()[0], memory.data_ptr() - storage.data_ptr()


def check_file(file: int, offset: int, size: int) -> None:
    if offset < 0 or os.fstat(file).st_size < offset + size:
        raise MonarchError(
            f"the file does not hold the memory: bytes {offset} to {offset + size} of {os.fstat(file).st_size}"
        )
