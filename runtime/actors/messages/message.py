"""Messages of actors as bytes: pickle with buffers out of band, and shared memory for large values.

A packet is the pickle of `(head, data)`. The head is a small tuple that says what to do with the message, and the
thread that receives it reads it; the data is the pickled value, which stays bytes until the thread that needs the value
decodes it. Data above `INLINE` bytes and each buffer from `BUFFER` bytes on lie in a file that travels with the packet
(`memory`), one for all receivers of a broadcast. The packet then says too how large they are, and which slot is the
receiver's. What the message refers to (`sending`), and how many other files come with it, is behind that.
"""

from __future__ import annotations

import errno
import io
import os
import pickle
from collections.abc import Sequence
from typing import Any, NoReturn

import cloudpickle
import torch

from monarch.compiler.config import settings
from monarch.compiler.execution.executor import outgoing
from monarch.compiler.plan import MonarchError, format_bytes
from monarch.runtime.actors.messages.memory import MessageMemory, mapped
from monarch.runtime.actors.messages.protocol import Head
from monarch.runtime.actors.messages.sending import Sending
from monarch.runtime.shared.wire import in_bytes
from monarch.runtime.worker import exchange

INLINE = 60 << 10
BUFFER = 64 << 10
PACKET = 160 << 10  # above any packet's size: a packet has INLINE bytes of data and a head at most


class MessageSizeError(MonarchError, ValueError):
    """A message above the setting `codec_max_frame_length`: it was not sent."""


class Files:
    """Files that travel with a message, closed here when nothing refers to this any more."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.fds = fds

    @staticmethod
    def copies(fds: Sequence[int]) -> Files:
        """Of one's own. Raises OSError."""
        return Files([os.dup(fd) for fd in fds])

    def take(self) -> Sequence[int]:
        """They are the caller's now."""
        fds, self.fds = self.fds, ()
        return fds

    def __del__(self) -> None:
        for fd in self.fds:
            os.close(fd)


class Payload:
    """A pickled value: as it is sent, and as it arrives. Cheap to hand on; decoded as often as it is asked for."""

    __slots__ = ("data", "files", "lent", "memory", "parts", "sizes")

    def __init__(
        self,
        data: bytes | None,
        sizes: tuple[int, ...] = (),
        memory: MessageMemory | None = None,
        parts: list[memoryview] | None = None,
    ) -> None:
        self.data = data
        self.sizes = sizes
        self.memory = memory
        self.parts = parts
        self.lent: Sequence[exchange.Reference] = ()
        """The loans of workers to it."""
        self.files: Files | None = None

    @staticmethod
    def of(value: object, to: Sequence[str] = ()) -> Payload:
        """`to` are the processes of the actors that it goes to; distributed tensors can only go to actors.

        Raises what pickling raises: PicklingError, TypeError, and whatever a user's `__reduce__` does; MessageSizeError
        for a value above the setting `codec_max_frame_length`.
        """
        if not to:
            return Payload._of(value)
        sending = Sending(to)
        before = outgoing.set(sending)
        try:
            payload = Payload._of(value)
        finally:
            outgoing.reset(before)
        if sending.tensors:
            payload.lent = sending.lend()
        return payload

    @staticmethod
    def _of(value: object) -> Payload:
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
            return Payload(data)
        parts: list[Any] = [buffer.raw() for buffer in buffers]
        size, most = len(data or b"") + sum(map(len, parts)), settings.codec_max_frame_length
        if size > most:
            raise MessageSizeError(
                f"a message of {size:,} bytes: at most {most:,} ({format_bytes(most)}) may be sent",
                hint="send less at once, or configure(codec_max_frame_length=…); an RDMABuffer moves large memory.",
            )
        if len(data or b"") > INLINE:
            parts.insert(0, data)
            data = None
        return Payload(data, tuple(memoryview(part).nbytes for part in parts), MessageMemory.of(parts))

    def received(self) -> Payload:
        """The same as its receiver has it, in the process that sent it."""
        if self.memory is None and not self.lent:
            return self
        memory = self.memory
        parts = None if memory is None else mapped(memory.fd, memory.issue(), self.sizes)
        received = Payload(self.data, self.sizes, None, parts)
        received.lent = self.lent
        return received

    def views(self) -> list[memoryview]:
        """The large parts, to be read while this payload is referred to."""
        if self.parts is not None:
            return self.parts
        return [] if self.memory is None else self.memory.views(self.sizes)

    def decode(self) -> Any:
        """The value. Raises what unpickling raises. Tensors share memory with those of an earlier decoding.

        One that workers have lent something to is decoded once, and waits for them; or else it is dropped.
        """
        parts = self.parts or []
        try:
            if self.data is None:
                return pickle.loads(parts[0], buffers=parts[1:])
            return pickle.loads(self.data, buffers=parts)
        finally:
            self.drop()

    def wait(self) -> None:
        """Until `decode` need not wait for anything."""
        for reference in self.lent:
            exchange.wait(reference)

    def drop(self) -> None:
        """It is not decoded, or no more."""
        lent, self.lent = self.lent, ()
        for reference in lent:
            exchange.read(reference)


EMPTY = Payload(pickle.dumps(None, 5))
NO_ARGUMENTS = Payload(pickle.dumps(((), {}), 5))


def packet(head: Head, payload: Payload) -> bytes:
    """A packet for one receiver."""
    if payload.parts is not None and payload.memory is None:  # it was received, and is passed on
        payload.memory = MessageMemory.of(payload.parts)
    more: tuple[Any, ...] = ()
    if payload.lent or payload.files is not None:
        more = payload.lent, 0 if payload.files is None else len(payload.files.fds)
    elif payload.memory is None:
        return pickle.dumps((head, payload.data), 5)
    slot = 0 if payload.memory is None else payload.memory.issue()
    return pickle.dumps((head, payload.data, payload.sizes, slot, *more), 5)


def unpack(data: bytes, files: Sequence[int]) -> tuple[Head, Payload]:
    """A packet's head and payload; takes over the files that came with it."""
    rest = Files(files) if files else None
    head, inline, *large = pickle.loads(data)
    if not large:
        return head, Payload(inline)
    sizes, slot, *more = large
    lent, own = more or ((), 0)
    payload = Payload(inline, sizes)
    try:
        if len(files) < (own or bool(sizes)):  # the kernel drops files that the receiver has no room for
            raise OSError(errno.EMFILE, "a large message came when too many files were open (ulimit -n)")
        if sizes:
            payload.parts = mapped(files[0], slot, sizes)
    except OSError as error:
        payload = lost(error)
    payload.lent = lent
    if own:
        payload.files = rest
    return head, payload


def lost(error: OSError) -> Payload:
    """In place of one that cannot be received whole: a process that wants the value gets the error, also where the
    message is handed on."""
    return Payload(pickle.dumps(_Raising(error), 5))


class _Raising:
    """A value that cannot be unpickled, for this reason."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def __reduce__(self) -> tuple[object, ...]:
        return _raise, (self._error,)


def _raise(error: OSError) -> NoReturn:
    raise error


class _Pickler(cloudpickle.Pickler):
    """As cloudpickle does it, so that definitions of a script or a notebook can be sent, and CPU tensors by their
    memory.

    A tensor is sent by itself: two views of one storage arrive as two tensors that share nothing. A tensor that is
    dense in another order of its dims (a transpose, channels_last) keeps its strides; one with gaps arrives contiguous.
    """

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if (kind is torch.Tensor or kind is torch.nn.Parameter) and _plain(value):
            bare = value.detach().resolve_conj().resolve_neg()
            order = () if bare.is_contiguous() else _dense_order(bare)
            bare = (bare.permute(order) if order else bare).contiguous()
            row: Any = in_bytes(bare).numpy()
            memory = pickle.PickleBuffer(row) if bare.numel() else b""
            # A parameter that is handed on as a tensor would not be found by the modules that it is put into.
            given = memory, bare.dtype, tuple(bare.shape), value.requires_grad, kind is torch.nn.Parameter
            return _tensor, (*given, order) if order else given
        return super().reducer_override(value)


def _plain(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_quantized


def _dense_order(tensor: torch.Tensor) -> tuple[int, ...]:
    """The order of its dims in which a tensor is contiguous; () where there is none."""
    strides = tensor.stride()
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return tuple(order) if tensor.permute(order).is_contiguous() else ()


def _tensor(
    memory: Any,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    requires_grad: bool,
    parameter: bool,
    order: tuple[int, ...] = (),
) -> torch.Tensor:
    flat = torch.frombuffer(memory, dtype=dtype) if len(memory) else torch.empty(0, dtype=dtype)
    tensor = flat.reshape(shape)
    if order:
        tensor = tensor.permute([order.index(dim) for dim in range(len(order))])
    if parameter:
        return torch.nn.Parameter(tensor, requires_grad)
    return tensor.requires_grad_(requires_grad)
