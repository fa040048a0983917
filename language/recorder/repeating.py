"""Stretches of a tape that are alike: the microbatches of a pipeline. Two are traced and compared, and the others are
written as the second is, with other values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monarch.compiler import ops
from monarch.compiler.tape import Expr, Op, Value, View
from monarch.language.recorder.random import drawn_streams, skip_streams
from monarch.language.recorder.recording import Recording
from monarch.language.tensors.tensor import DistributedTensor

_STREAM = {ops.random: 3, ops.sample: 2}
"""The argument that is the number of a draw's stream."""


@dataclass(frozen=True)
class Stretch:
    """What a microbatch wrote onto a tape.

    `ops`, `values`  the first of them, and the first behind
    `streams`        of random numbers, likewise; None where the program has seeded the generator
    `around`         how much the recording had besides: it is the same behind the stretch
    `given`          the values of the microbatch's rows
    `loss`           its loss
    """

    microbatch: int
    ops: tuple[int, int]
    values: tuple[int, int]
    streams: tuple[int, int] | None
    around: tuple[tuple[int, ...], tuple[int, ...]]
    given: tuple[Value, ...]
    loss: DistributedTensor


class Writing:
    """Notes a stretch while it is written."""

    def __init__(self, recording: Recording, microbatch: int, given: Sequence[DistributedTensor]) -> None:
        self._recording = recording
        self._microbatch = microbatch
        self._given = tuple(recording.value_of(each._ref) for each in given)
        self._ops, self._values = len(recording.tape.ops), recording.tape.values
        self._streams, self._around = drawn_streams(), _around(recording)

    def done(self, loss: DistributedTensor) -> Stretch:
        tape, before, after = self._recording.tape, self._streams, drawn_streams()
        return Stretch(
            self._microbatch,
            (self._ops, len(tape.ops)),
            (self._values, tape.values),
            None if before is None or after is None else (before, after),
            (self._around, _around(self._recording)),
            self._given,
            loss,
        )


def are_alike(recording: Recording, first: Stretch, second: Stretch) -> bool:
    """Whether the second stretch is the first with other rows, values and streams, and a third would be."""
    if (
        first.streams is None
        or second.streams is None
        or second.around[0] != second.around[1]
        or recording.value_of(second.loss._ref).parent is not None
    ):
        return False
    written = recording.tape.ops[slice(*second.ops)]
    renamed = _Renamed(first, second.given, second.microbatch, second.values[0], second.streams[0])
    expected = [renamed.op(op) for op in recording.tape.ops[slice(*first.ops)]]
    return (
        len(written) == len(expected)
        and second.values[1] - second.values[0] == first.values[1] - first.values[0]
        and second.streams[1] - second.streams[0] == first.streams[1] - first.streams[0]
        and all(map(_same, expected, written))
        and renamed.value(recording.value_of(first.loss._ref)) == recording.value_of(second.loss._ref)
    )


def repeat(
    recording: Recording, like: Stretch, microbatch: int, given: Sequence[DistributedTensor]
) -> DistributedTensor:
    """Write a microbatch that is like another. Gives its loss."""
    tape, streams = recording.tape, drawn_streams()
    assert streams is not None and like.streams is not None
    values = tuple(recording.value_of(each._ref) for each in given)
    renamed = _Renamed(like, values, microbatch, tape.values, streams)
    for op in tape.ops[slice(*like.ops)]:
        recording.put(renamed.op(op))
    tape.values += like.values[1] - like.values[0]
    skip_streams(like.streams[1] - like.streams[0])
    return recording.new(like.loss._ref.fake, renamed.value(recording.value_of(like.loss._ref)))


class Repeats:
    """Microbatches that are traced, and those that are written as another was.

    The first differs: its gradients are the first ones. The second and third are traced, and compared: where they
    differ in nothing but their rows, and tracing the third has changed nothing in Python, the others with as many rows
    are written as the third is. Else each is traced.
    """

    def __init__(self, recording: Recording, of: tuple[Any, ...]) -> None:
        """`of` are the objects whose code runs in each."""
        self._recording = recording
        self._of = of
        self._rows = -1
        self._last: tuple[Stretch, Any] | None = None
        """The microbatch traced last, and what Python held behind it."""
        self._like: Stretch | None = None
        """The one that others are like."""
        self._ends = False
        """Whether a microbatch was unlike another."""

    def loss_of(
        self, microbatch: int, rows: int, given: list[DistributedTensor], traced: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """The loss of a microbatch, whose gradients are added to those of the parameters."""
        if rows != self._rows:
            self._rows, self._last, self._like = rows, None, None
        if self._like is not None:
            return repeat(self._recording, self._like, microbatch, given)
        python = self._recording.repeatable
        if self._ends or python is None or self._recording.symbols is not None:
            return traced()
        writing = Writing(self._recording, microbatch, given)
        loss = traced()
        assert isinstance(loss, DistributedTensor)
        stretch, seen = writing.done(loss), python.seen(*self._of)
        if self._last is not None:
            before, saw = self._last
            if seen is not None and seen == saw and are_alike(self._recording, before, stretch) and python.proves():
                self._like = stretch
            else:
                self._ends = True
        self._last = stretch, seen
        return loss


def _around(recording: Recording) -> tuple[int, ...]:
    """The parts of a recording besides ops: objects that these refer to, and that a stretch which is written anew does
    not make."""
    return (
        *map(len, (recording.tape.inputs, recording.states, recording.constants, recording.large, recording.plain)),
        *map(len, (recording.scalars, recording.steps, recording.regions, recording.guards)),
        int(recording.varies),
    )


def _same(first: Op, second: Op) -> bool:
    return first == second and all(
        a is b
        or (
            a is not None
            and b is not None
            and (a.dtype, a.shape, a.parent, a.view) == (b.dtype, b.shape, b.parent, b.view)
        )
        for a, b in zip(_results(first), _results(second), strict=True)
    )


def _results(op: Op) -> tuple[Value | None, ...]:
    return op.out if isinstance(op.out, tuple) else (op.out,)


class _Renamed:
    """Ops of a stretch as they are for another microbatch."""

    def __init__(self, like: Stretch, given: Sequence[Value], microbatch: int, first: int, stream: int) -> None:
        assert like.streams is not None
        self._own = range(*like.values)
        self._values = {mine.index: theirs for mine, theirs in zip(like.given, given, strict=True)}
        self._by, self._streams = first - like.values[0], stream - like.streams[0]
        self._microbatch = microbatch

    def op(self, op: Op) -> Op:
        args = self.argument(op.args)
        at = _STREAM.get(op.func)
        if at is not None and len(args) == at + 1:  # with one more it has a seed of its own
            args = (*args[:at], args[at] + self._streams)
        return Op(
            op.func,
            args,
            self.argument(op.kwargs),
            self.argument(op.out),
            op.source,
            op.backward,
            op.module,
            self._task(op.task),
        )

    def value(self, value: Value) -> Value:
        known = self._values.get(value.index)
        if known is not None or value.index not in self._own:
            return value if known is None else known
        parent = None if value.parent is None else self.value(value.parent)
        made = Value(value.index + self._by, value.dtype, value.shape, parent, self._view(value.view))
        self._values[value.index] = made
        return made

    def argument(self, entry: Any) -> Any:
        if isinstance(entry, Value):
            return self.value(entry)
        if isinstance(entry, tuple):
            return tuple([self.argument(each) for each in entry])
        if isinstance(entry, Expr):
            return Expr(entry.op, self.argument(entry.args))
        return entry

    def _view(self, view: View | None) -> View | None:
        if view is None:
            return None
        args, kwargs = self.argument(view.args), self.argument(view.kwargs)
        return View(
            view.func, args, kwargs, view.output, view.source, view.backward, view.module, self._task(view.task)
        )

    def _task(self, task: Any) -> Any:
        return None if task is None else task._replace(microbatch=self._microbatch)
