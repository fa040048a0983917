"""Faults that a worker suffers because its controller's program asked for them (`chaos.workers`). Loaded with the
first."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from monarch.runtime.worker.loaded import LoadedPlan
    from monarch.runtime.worker.state import WorkerState


class Kind(IntEnum):
    """A fault of a worker, and its value."""

    KILL = 1
    STOP = 2
    """Nanoseconds until a process of its own lets it go on."""
    SLOW = 3
    """Nanoseconds that each instruction takes longer."""
    FAIL = 4
    CUT = 5
    DELAY = 6
    """Nanoseconds that each message to another host waits, in this session."""
    GARBLE = 7
    MEMORY = 8
    """Bytes of address space that are left; a negative one lifts the limit. Likewise below."""
    FILES = 9
    """Files that it can still open."""
    FILE_SIZE = 10
    """Bytes that a file can have."""
    FLIP = 11
    """The bit, of those of the value whose handle follows."""
    NAN = 12


class InjectedError(RuntimeError):
    """The error of an instruction that was to fail."""


class _At:
    """Acts when a step comes to an instruction; told of each by the frame (see `frame.Observer`)."""

    def __init__(self, act: Callable[[int], None]) -> None:
        self._act = act
        self.clock = time.monotonic_ns

    def enter(self, slots: Sequence[int], values: Sequence[Any]) -> None:
        self._act(0)

    def ran(self, instruction: int, start: int, end: int, slot: int, value: Any) -> None:
        self._act(instruction + 1)

    def met(self, instruction: int, start: int, end: int, slot: int = -1, value: Any = None) -> None:
        self._act(instruction + 1)

    def freed(self, slots: Sequence[int]) -> None:
        pass


class _Nan(_At):
    """Puts a NaN into the first floating-point result of a step from an instruction on."""

    def __init__(self, at: int) -> None:
        super().__init__(lambda instruction: None)
        self._left: int | None = at

    def ran(self, instruction: int, start: int, end: int, slot: int, value: Any) -> None:
        if self._left is None or instruction < self._left:
            return
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(each, torch.Tensor) and each.is_floating_point() and each.numel():
                each[(0,) * each.ndim] = torch.nan
                self._left = None
                return


def suffer(state: WorkerState, kind: int, at: int, value: int, handle: int = -1) -> None:
    """Suffer a fault at once (`at` is -1), or when the next step comes to its instruction `at`, or to the last that it
    has: behind the commit, where it commits at its end. An instruction that fails does so before the commit at the
    latest: behind it stand none that can fail."""
    if kind == Kind.FLIP:
        _flip(state, handle, value)
        return
    if kind == Kind.NAN:
        state.run_next(lambda plan: _Nan(max(at, 0)))
        return
    act = _ACTS[Kind(kind)]
    if at < 0 and kind not in (Kind.SLOW, Kind.FAIL):
        act(state, value)
        return

    def observer(plan: LoadedPlan) -> _At:
        ops = [instruction.op for instruction in plan.instructions]
        last = len(ops) + plan.frame.commits_at_end
        if kind == Kind.FAIL:
            last = ops.index("commit") if "commit" in ops else len(ops)
        here = min(max(at, 0), last)

        def come(instruction: int) -> None:
            if kind == Kind.FAIL and instruction == here:
                what = f"before instruction {here} of {len(ops)}" + (f", {ops[here]}" if here < len(ops) else "")
                raise InjectedError(f"a fault was injected {what}")
            if kind == Kind.SLOW or instruction == here:
                act(state, value)

        return _At(come)

    state.run_next(observer)


def _kill(state: WorkerState, value: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop(state: WorkerState, value: int) -> None:
    pid = os.getpid()
    subprocess.Popen(["/bin/sh", "-c", f"sleep {value / 1e9:f}; kill -CONT {pid}"])
    os.kill(pid, signal.SIGSTOP)


def _slow(state: WorkerState, value: int) -> None:
    time.sleep(value / 1e9)


def _links(state: WorkerState) -> list[Any]:
    """To the counterparts on other hosts."""
    mirror = state.mirror
    return [] if mirror is None else mirror.links


def _cut(state: WorkerState, value: int) -> None:
    for link in _links(state):
        link.stream.shutdown()


def _delay(state: WorkerState, value: int) -> None:
    def later(post: Callable[..., None]) -> Callable[..., None]:
        def posted(*arguments: Any) -> None:
            time.sleep(value / 1e9)
            post(*arguments)

        return posted

    for link in _links(state):
        link.post = later(link.post)


def _garble(state: WorkerState, value: int) -> None:
    for link in _links(state):
        link.garble()


def _flip(state: WorkerState, handle: int, bit: int) -> None:
    held = state.values.get(handle)
    if not isinstance(held, torch.Tensor):
        raise InjectedError("the tensor whose bit was to be flipped has no value here")
    if bit >= 8 * held.nbytes:
        raise InjectedError(f"no bit {bit}: this worker holds {8 * held.nbytes} of the tensor")
    at, bit = divmod(bit, 8 * held.itemsize)
    place = [int(each) for each in torch.unravel_index(torch.tensor(at), held.shape)]
    element = held[tuple(place)].reshape(1).clone()
    element.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    held[tuple(place)] = element[0]


def _limit(number: int, limit_for: Callable[[int], int]) -> Callable[[WorkerState, int], None]:
    def limit(state: WorkerState, left: int) -> None:
        _, most = resource.getrlimit(number)
        resource.setrlimit(number, (most if left < 0 else limit_for(left), most))

    return limit


def limit_on_memory(left: int) -> int:
    """On this process's address space, in bytes, for so many to be left."""
    with open("/proc/self/statm") as about:
        return int(about.read().split()[0]) * resource.getpagesize() + left


def limit_on_files(left: int) -> int:
    """On the numbers of open files, for so many of them to be free."""
    taken = set(map(int, os.listdir("/proc/self/fd")))
    free = (number for number in itertools.count() if number not in taken)
    return next(itertools.islice(free, left, None))


def limit_on_file_size(left: int) -> int:
    return left


_ACTS: dict[Kind, Callable[[WorkerState, int], None]] = {
    Kind.KILL: _kill,
    Kind.STOP: _stop,
    Kind.SLOW: _slow,
    Kind.FAIL: lambda state, value: None,  # see `suffer`
    Kind.CUT: _cut,
    Kind.DELAY: _delay,
    Kind.GARBLE: _garble,
    Kind.MEMORY: _limit(resource.RLIMIT_AS, limit_on_memory),
    Kind.FILES: _limit(resource.RLIMIT_NOFILE, limit_on_files),
    Kind.FILE_SIZE: _limit(resource.RLIMIT_FSIZE, limit_on_file_size),
}
