"""`monarch.log`: numbers of a run to TensorBoard, Weights & Biases, or a function, without waiting for the workers."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from monarch.compiler.blocks import reading
from monarch.compiler.config import settings
from monarch.compiler.errors import DeviceMeshError, MonarchError, ProgramError
from monarch.compiler.execution.events import WorkersStatus, subscribe
from monarch.compiler.execution.executor import Executor, Handle
from monarch.compiler.loading import load
from monarch.language.recorder.recording import current_program
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.controller.steps import RemoteTensor

logger = logging.getLogger("monarch")

Sink = Callable[[str, float, int], object]
"""Takes a name, a value and a step."""
_Value = float | tuple[Executor, Handle]


class Log:
    """Where values go that are logged while it is open; made by `monarch.log_to`.

    A thread asks the workers for values in the order in which they were logged, and writes them in that order. A value
    whose step failed is left out, with a warning; one that a lost worker had is asked for again once the mesh is
    healed.
    """

    def __init__(self, sink: Sink, close: Callable[[], object]) -> None:
        self._sink, self._close_sink = sink, close
        self.owner = os.getpid()
        self._waiting: deque[tuple[str, _Value, int]] = deque()
        self._steps: dict[str, int] = {}
        self._writing = threading.Lock()
        self._in_sink = threading.Lock()
        self._changed = threading.Condition()
        self._closed = self._halted = False
        self._error: Exception | None = None
        self._unsubscribe = subscribe(self._hear, WorkersStatus)
        self._thread = threading.Thread(target=self._run, name="monarch log", daemon=True)
        self._thread.start()

    def add(self, name: str, value: Any, step: int | None) -> None:
        """See `monarch.log`."""
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        step = self._steps.get(name, -1) + 1 if step is None else int(step)
        self._steps[name] = step
        with self._changed:
            self._waiting.append((name, _value(name, value), step))
            self._halted = False
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait for all values that have been logged, and write them. Raises the writer's error."""
        while self._waiting and self._write():
            pass
        if self._waiting:
            name, _, step = self._waiting[0]
            logger.warning("%d logged values are not there yet, from %r at step %d on", len(self._waiting), name, step)
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """Write the values logged so far, and close the writer. Idempotent."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._end()
            if threading.current_thread() is not self._thread:
                self._thread.join()
            self._close_sink()

    def _end(self) -> None:
        """Nothing more is logged here."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._unsubscribe()
        if self in _logs:
            _logs.remove(self)

    def close_within(self, seconds: float) -> None:
        """`close`, for the program's end: as long as one value after the other comes within so many seconds. Values
        that do not are dropped, with a warning, and a writer that has not returned by then is left open."""
        if self._closed:
            return
        with self._changed:
            self._halted = False
            self._changed.notify_all()
            first, until = None, 0.0
            while self._waiting and not self._halted:
                if self._waiting[0] is not first:
                    first, until = self._waiting[0], time.monotonic() + seconds
                if not self._changed.wait(until - time.monotonic()) and time.monotonic() >= until:
                    break
            if self._waiting:
                name, _, step = self._waiting[0]
                why = "its mesh has lost workers" if self._halted else f"it was not written within {seconds:g} s"
                what = f"{len(self._waiting)} logged value{'s' * (len(self._waiting) != 1)}"
                logger.warning("the program ends without %s, from %r at step %d on: %s", what, name, step, why)
        self._end()
        if self._in_sink.acquire(blocking=False):  # and not given back: nothing is written any more
            self._close_sink()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or (self._waiting and not self._halted))
                if self._closed:
                    return
            halted = not self._write()
            with self._changed:
                self._halted = halted  # until something is logged, by when the mesh may be healed
                self._changed.notify_all()

    def _write(self) -> bool:
        """Write the next value, once it is computed; whether it is done with."""
        with self._writing:
            if not self._waiting:
                return True
            name, value, step = self._waiting[0]
            try:
                number = value if isinstance(value, float) else _read(*value)
            except DeviceMeshError as error:
                if not _is_final(value):
                    return False
                logger.warning("%r at step %d is not logged: %s", name, step, error.message)
            except MonarchError as error:
                logger.warning("%r at step %d is not logged: %s", name, step, error.message)
            else:
                try:
                    with self._in_sink:
                        self._sink(name, number, step)
                except Exception as error:  # a writer's, which the next call raises
                    self._error = error
            self._waiting.popleft()
            return True

    def _hear(self, status: WorkersStatus) -> None:
        """A mesh is being closed: its values are read before."""
        executor = status.executor
        if status.is_running or (isinstance(executor, MeshExecutor) and executor.is_lost):
            return
        while any(isinstance(value, tuple) and value[0].whole is executor for _, value, _ in tuple(self._waiting)):
            if not self._write():
                return


def _no_op() -> None:
    """Keeps nothing."""


def _is_final(value: _Value) -> bool:
    """Whether a value will never be there: its own step has failed."""
    return isinstance(value, tuple) and isinstance(value[1], RemoteTensor) and value[1].step.error is not None


def _value(name: str, value: Any) -> _Value:
    """A logged value in a form that the thread can read: tensors by their handles, so that another step may replace
    them."""
    if isinstance(value, DistributedTensor):
        if value.numel() != 1:
            raise MonarchError(
                f"{name!r} is {list(value.shape)}, and one number is logged",
                hint="log its mean, or one element: monarch.log(name, x.mean(), step).",
                source=user_source(),
            )
        handle, mesh = value._value()
        return mesh.executor, handle
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise MonarchError(f"{name!r} is {list(value.shape)}, and one number is logged", source=user_source())
    return float(value)


def _read(executor: Executor, handle: Handle) -> float:
    known = reading(handle.type, executor.mesh)
    return float(known.whole(executor.shards(handle, known.ranks, quiet=True)))


_logs: list[Log] = []


def at_exit() -> None:
    """Close the open writers, at the program's end, before meshes are closed."""
    with ExitStack() as logs:
        for each in tuple(_logs):
            if each.owner == os.getpid():
                logs.callback(each.close_within, settings.exit_timeout)


def log(name: str, value: Any, step: int | None = None) -> None:
    """Log a number of the run: returns at once, whether the workers have computed it or not.

        monarch.log_to("runs/first")
        for step, batch in enumerate(batches):
            monarch.log("loss", train_step(batch), step)

    `value` is a number or a tensor with one element, plain or distributed; `step` by default counts up for each name.
    Values go to everything that `log_to` has opened, in order; where that is nothing, nowhere. Raises ProgramError in a
    program, MonarchError for what is no single number, and what a writer raised earlier.
    """
    if current_program() is not None:
        raise ProgramError(
            "monarch.log in a program: the value is there when the program runs",
            hint="return it, and log it after the call: monarch.log('loss', train_step(batch), step).",
            source=user_source(),
        )
    for each in tuple(_logs):
        each.add(name, value, step)


def log_to(target: Any) -> Log:
    """Have `monarch.log` write to a folder for TensorBoard (a path), a run of Weights & Biases, or a function of name,
    value and step:

        monarch.log_to("runs/first")
        monarch.log_to(wandb.init(mode="offline"))
        with monarch.log_to(lambda name, value, step: print(name, value, step)): ...

    Until it is closed, at the latest at the program's end, when all that was logged is written. A mesh that is closed
    gives its values before. Raises MonarchError where TensorBoard is not installed, or nothing can be written to
    `target`.
    """
    made = Log(*_writer(target))
    _logs.append(made)
    return made


def _writer(target: Any) -> tuple[Sink, Callable[[], object]]:
    if isinstance(target, (str, os.PathLike)):
        try:
            writer = load("torch.utils.tensorboard:SummaryWriter")(os.fspath(target))
        except ImportError as error:
            raise MonarchError("TensorBoard is not installed", hint="pip install tensorboard") from error
        return writer.add_scalar, writer.close
    if callable(getattr(target, "log", None)):
        return lambda name, value, step: target.log({name: value}, step=step), getattr(target, "finish", _no_op)
    if callable(target):
        return target, _no_op
    raise MonarchError(
        f"nothing can be logged to a {type(target).__name__}",
        hint="give a folder for TensorBoard, a run of wandb's, or a function of name, value and step.",
    )
