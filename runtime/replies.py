"""What the workers send up: failures, values, counts. Reads whatever has come, and keeps it for whoever asked."""

from __future__ import annotations

import math
import os
import select
import socket
from array import array
from collections.abc import Iterable

import torch

from monarch.runtime import wire
from monarch.runtime.controller_state import ControllerState
from monarch.runtime.wire import Report

_SLEEP_MILLISECONDS = 50


class Replies:
    """The controller's ends of the workers' sockets. Not thread-safe but for `sleep`."""

    def __init__(self, ends: list[socket.socket], state: ControllerState) -> None:
        self._ends = ends
        self._state = state
        self._reports = 0
        self._answers: dict[int, dict[int, torch.Tensor | None]] = {}

    def expect(self, command: int) -> None:
        self._answers[command] = {}

    def forget(self, command: int) -> None:
        self._answers.pop(command, None)

    def of(self, command: int) -> dict[int, torch.Tensor]:
        return {rank: value for rank, value in self._answers[command].items() if value is not None}

    def pending(self, command: int, ranks: Iterable[int]) -> list[int]:
        """Those of `ranks` that have neither answered the command nor failed it."""
        answers = self._answers[command]
        return [rank for rank in ranks if rank not in answers]

    def read(self, reports: int) -> None:
        """Read what there is, unless there have been just so many failures and all are known."""
        if reports == self._reports:
            return
        for rank, end in enumerate(self._ends):
            while self._receive(rank, end):
                pass

    def sleep(self, ranks: Iterable[int]) -> None:
        """Wait a little, at most until one of `ranks` sends something."""
        poll = select.poll()
        for rank in ranks:
            if (fd := self._ends[rank].fileno()) >= 0:  # closed by another thread
                poll.register(fd, select.POLLIN)
        poll.poll(_SLEEP_MILLISECONDS)

    def _receive(self, rank: int, end: socket.socket) -> bool:
        try:
            packet, extra, _, _ = end.recvmsg(wire.PACKET_BYTES, socket.CMSG_SPACE(4))
        except (BlockingIOError, ConnectionError):
            return False
        if not packet:
            return False
        kind, command = wire.UP_HEAD.unpack_from(packet)
        body = packet[wire.UP_HEAD.size :]
        if kind == wire.REPORT:
            self._reports += 1
            self._state.report(Report.decode(body))
            if command in self._answers:
                self._answers[command][rank] = None
            return True
        fd = -1
        for level, type_, data in extra:
            if level == socket.SOL_SOCKET and type_ == socket.SCM_RIGHTS:
                (fd,) = array("i", data)
        try:
            if command in self._answers:
                self._answers[command][rank] = _tensor(kind, body, fd)
        finally:
            if fd >= 0:
                os.close(fd)
        return True


def _tensor(kind: int, body: bytes, fd: int) -> torch.Tensor:
    if kind == wire.COUNTED:
        return torch.tensor(wire.KIND.unpack(body)[0])
    dtype, shape, start = wire.read_value_head(body)
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype)
    if kind == wire.VALUE:
        return torch.frombuffer(bytearray(memoryview(body)[start:]), dtype=dtype).view(shape)
    # The file's pages become the tensor's memory, and go when it does; no descriptor is kept for them.
    return torch.from_file(
        f"/proc/self/fd/{fd}", shared=kind == wire.BUFFER_FILE, size=math.prod(shape), dtype=dtype
    ).view(shape)
