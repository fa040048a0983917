"""The workers' messages: failures, values, counts. Kept for the calls that asked."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterable
from typing import Any

import torch

from monarch.compiler.plan import MonarchError
from monarch.runtime.controller.state import ControllerState
from monarch.runtime.shared import wire
from monarch.runtime.shared.wire import Report


class Replies:
    """Not thread-safe."""

    def __init__(self, state: ControllerState) -> None:
        self._state = state
        self._answers: dict[int, dict[int, torch.Tensor | None]] = {}

    def expect(self, command: int) -> None:
        self._answers.setdefault(command, {})

    def forget(self, command: int) -> None:
        self._answers.pop(command, None)

    def of(self, command: int) -> dict[int, torch.Tensor]:
        return {rank: value for rank, value in self._answers[command].items() if value is not None}

    def pending(self, command: int, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that have neither answered the command nor failed it."""
        answers = self._answers[command]
        return [rank for rank in ranks if rank not in answers]

    def take(self, rank: int, packet: Any, file: int = -1) -> None:
        """Note what a worker sent. A value too large for a packet is in the file, or behind the packet's head where it
        has come from another host; the file stays the caller's to close.
        Raises MonarchError where a limit of the system keeps it from being read; it may be asked for again."""
        kind, command = wire.UP_HEAD.unpack_from(packet)
        body = memoryview(packet)[wire.UP_HEAD.size :]
        if kind == wire.ENDED:
            self._state.ended(rank, command)
        elif kind == wire.DOUBT:
            self._state.doubted(rank, command)
        elif kind == wire.REPORT:
            self._state.report(Report.decode(bytes(body)))
            if command in self._answers:
                self._answers[command][rank] = None
        elif command in self._answers and rank not in self._answers[command]:
            self._answers[command][rank] = _tensor(kind, body, file)


def _tensor(kind: int, body: memoryview, file: int) -> torch.Tensor:
    if kind == wire.COUNTED:
        return torch.tensor(wire.KIND.unpack(body)[0])
    dtype, shape, start = wire.read_value_head(body)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    if file == wire.LOST_FILE:
        raise _not_taken_in(body, os.strerror(errno.EMFILE))
    if file < 0 and kind == wire.BUFFER_FILE:  # on another host: its content comes when measuring ends
        return torch.zeros(shape, dtype=dtype)
    if file < 0:
        return torch.frombuffer(bytearray(body[start:]), dtype=dtype).view(shape)
    # The file's pages become the tensor's memory, and go when it does; no descriptor is kept for them.
    try:
        whole = torch.from_file(
            f"/proc/self/fd/{file}", shared=kind == wire.BUFFER_FILE, size=math.prod(shape), dtype=dtype
        )
    except RuntimeError as error:  # which is all that torch says of the system's errors
        raise _not_taken_in(body, str(error)) from None
    return whole.view(shape)


def _not_taken_in(body: memoryview, why: str) -> MonarchError:
    hint = "A limit is reached: on open files (ulimit -n) or memory. Read it again then."
    return MonarchError(wire.not_taken_in(body, why), hint=hint)
