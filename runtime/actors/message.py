"""What actors send each other, as bytes: pickle with buffers out of band, and shared memory for what is large.

A packet is the pickle of `(head, data, sizes)`. The head is a small tuple that says what to do with the message, and is
read by the thread that receives it; the data is the pickled value, which stays bytes until the thread that needs the
value decodes it. Data above `INLINE` bytes and each buffer above `BUFFER` bytes lie in an anonymous file (memfd) that
travels with the packet, one for all receivers of a broadcast. A receiver maps it privately: nothing is copied until
somebody writes, and who writes changes only his own.
"""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import pickle
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import cloudpickle
import torch

INLINE = 60 << 10
BUFFER = 64 << 10
PACKET = 160 << 10  # above any packet's size: a packet has INLINE bytes of data and a head at most
_ALIGNMENT = 64
_HEAD = 64 << 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


class Memory:
    """An anonymous file, closed when nothing refers to it any more."""

    __slots__ = ("fd", "size")

    def __init__(self, fd: int, size: int) -> None:
        self.fd = fd
        self.size = size

    @staticmethod
    def of(parts: Sequence[Any]) -> Memory:
        """A file that holds these, each from the next multiple of 64 bytes."""
        memory = Memory(os.memfd_create("monarch-message", os.MFD_CLOEXEC), 0)
        for part in parts:
            view = memoryview(part).cast("B")
            at = memory.size
            while view:
                written = os.pwrite(memory.fd, view, at)
                view, at = view[written:], at + written
            memory.size = -(-at // _ALIGNMENT) * _ALIGNMENT
        os.ftruncate(memory.fd, memory.size)
        return memory

    def map(self) -> memoryview:
        """The file's bytes, writable here alone (copied on write), until nothing refers to the view any more.

        By the C function, for Python's `mmap` keeps a file open for each mapping.
        """
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE
        address = _libc.mmap(None, self.size, protection, flags, self.fd, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            error = ctypes.get_errno()
            raise OSError(error, f"mapping {self.size} bytes of a message: {os.strerror(error)}")
        memory = (ctypes.c_char * self.size).from_address(address)
        # Not at exit: a tensor that lies there may be in use until the very end.
        weakref.finalize(memory, _libc.munmap, address, self.size).atexit = False
        return memoryview(memory).cast("B")

    def __del__(self) -> None:
        with suppress(OSError):
            os.close(self.fd)


class Payload:
    """A pickled value: as it is sent, and as it arrives. Cheap to hand on; decoded as often as it is asked for."""

    __slots__ = ("data", "memory", "sizes", "view")

    def __init__(
        self, data: bytes | None, sizes: tuple[int, ...], memory: Memory | None, view: memoryview | None
    ) -> None:
        self.data = data
        self.sizes = sizes
        self.memory = memory
        self.view = view

    @staticmethod
    def of(value: object) -> Payload:
        """Raises what pickling raises: PicklingError, TypeError, and whatever a user's `__reduce__` does."""
        buffers: list[pickle.PickleBuffer] = []

        def in_band(buffer: pickle.PickleBuffer) -> bool:
            if memoryview(buffer).nbytes < BUFFER:
                return True
            buffers.append(buffer)
            return False

        file = io.BytesIO()
        _Pickler(file, 5, buffer_callback=in_band).dump(value)
        data: bytes | None = file.getvalue()
        if not buffers and len(data or b"") <= INLINE:
            return Payload(data, (), None, None)
        parts: list[Any] = [buffer.raw() for buffer in buffers]
        if len(data or b"") > INLINE:
            parts.insert(0, data)
            data = None
        return Payload(data, tuple(memoryview(part).nbytes for part in parts), Memory.of(parts), None)

    def received(self) -> Payload:
        """The same as its receiver has it, in the process that sent it."""
        return self if self.memory is None else Payload(self.data, self.sizes, None, self.memory.map())

    def decode(self) -> Any:
        """The value. Raises what unpickling raises. Tensors share memory with those of an earlier decoding."""
        if self.view is None:
            return pickle.loads(self.data)  # type: ignore[arg-type]
        parts, at = [], 0
        for size in self.sizes:
            parts.append(self.view[at : at + size])
            at += -(-size // _ALIGNMENT) * _ALIGNMENT
        data = parts.pop(0) if self.data is None else self.data
        return pickle.loads(data, buffers=parts)


EMPTY = Payload(pickle.dumps(None, 5), (), None, None)
NO_ARGUMENTS = Payload(pickle.dumps(((), {}), 5), (), None, None)


def packet(head: tuple[Any, ...], payload: Payload) -> bytes:
    return pickle.dumps((head, payload.data, payload.sizes), 5)


def unpack(data: bytes, files: Sequence[int]) -> tuple[tuple[Any, ...], Payload]:
    """A packet's head and payload; takes over the files that came with it."""
    memories = [Memory(fd, 0) for fd in files]
    head, inline, sizes = pickle.loads(data)
    if not sizes:
        return head, Payload(inline, (), None, None)
    if not memories:  # the kernel drops files that the receiver has no room for
        return head, Lost(OSError(errno.EMFILE, "a large message came when too many files were open (ulimit -n)"))
    try:
        memory = memories[0]
        memory.size = os.fstat(memory.fd).st_size
        return head, Payload(inline, sizes, None, memory.map())
    except OSError as error:
        return head, Lost(error)


class Lost(Payload):
    """Of a message that could not be received whole: who wants the value gets the error."""

    __slots__ = ("error",)

    def __init__(self, error: OSError) -> None:
        super().__init__(None, (), None, None)
        self.error = error

    def decode(self) -> Any:
        raise self.error


class _Pickler(cloudpickle.Pickler):
    """As cloudpickle does it, so that what a script or a notebook defines can be sent, and CPU tensors by their memory.

    A tensor is sent by itself: two views of one storage arrive as two tensors that share nothing.
    """

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if (kind is torch.Tensor or kind is torch.nn.Parameter) and _plain(value):
            bare = value.detach().resolve_conj().resolve_neg().contiguous()
            memory = pickle.PickleBuffer(bare.reshape(-1).view(torch.uint8).numpy()) if bare.numel() else b""
            # A parameter that is handed on as a tensor would not be found by the modules that it is put into.
            return _tensor, (memory, bare.dtype, tuple(bare.shape), value.requires_grad, kind is torch.nn.Parameter)
        return super().reducer_override(value)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized


def _tensor(
    memory: Any, dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool, parameter: bool
) -> torch.Tensor:
    flat = torch.frombuffer(memory, dtype=dtype) if len(memory) else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)
