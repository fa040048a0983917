"""A trace as a file that Perfetto and chrome://tracing open, and that loads back exactly.

The file is one JSON object:

    traceEvents        the events that viewers show (see `chrome`); first, for Perfetto stops at a key unknown to it
    displayTimeUnit    "ns"
    monarch            what was measured, for `load_trace`: {"version": 1, "mesh", "plans", "steps", "commands",
                       "handled", "dropped"}, each step with its spans as one list of integers

Where the path ends in .gz it is compressed, which viewers read too.
"""

from __future__ import annotations

import gzip
import io
import json
import math
import os
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect.chrome import events
from monarch.compiler.layout import MeshSpec
from monarch.compiler.plan.plan import Plan
from monarch.compiler.plan.trace import COMMANDS, HANDLED, Command, Handled, Span, Step, Trace, TracedPlan

__all__ = ["Command", "Handled", "Span", "Step", "Trace", "TracedPlan", "load_trace", "save_trace"]

VERSION = 1
MOST_BYTES = 1 << 30
"""The most bytes that a file may unpack to: one with more is refused, not read."""
_MOST = 2**62
_WORKERS = 1 << 20


def save_trace(trace: Trace, path: str | os.PathLike[str], plans: Sequence[Plan] = ()) -> None:
    """Write a trace. Its values are named by `plans` (found by hash, whatever their order) and by the plans that a
    trace taken in this process holds. Raises MonarchError where the file cannot be written."""
    by_hash = {plan.hash: plan for plan in plans if plan.hash}
    found = [by_hash.get(traced.hash, traced.plan) for traced in trace.plans]
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        try:
            with open(partial, "wb") as raw:
                if target.name.endswith(".gz"):
                    with gzip.GzipFile("", "wb", 6, raw, mtime=0) as packed:
                        _write(packed, trace, found)
                else:
                    _write(raw, trace, found)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise MonarchError(
            f"cannot write {target}: {error.strerror or error}", hint="give a path that can be written."
        ) from None


def _write(file: Any, trace: Trace, plans: Sequence[Plan | None]) -> None:
    """A line an event, so that a long trace is never one string."""
    text = io.TextIOWrapper(file, encoding="ascii", newline="\n")
    text.write('{"traceEvents": [\n')
    comma = ""
    for event in events(trace, plans):
        text.write(comma + json.dumps(event, separators=(",", ":")))
        comma = ",\n"
    text.write('\n],\n"displayTimeUnit": "ns",\n"monarch": {')
    head = {
        "version": VERSION,
        "mesh": trace.mesh.dims,
        "plans": [[plan.name, plan.hash] for plan in trace.plans],
        "commands": [[c.kind, c.label, c.start, c.end, c.number] for c in trace.commands],
        "handled": [[h.kind, h.number, h.worker, h.start, h.end] for h in trace.handled],
        "dropped": trace.dropped,
    }
    for key, value in head.items():
        text.write(f'"{key}": {json.dumps(value, separators=(",", ":"))},\n')
    text.write('"steps": [')
    comma = "\n"
    for step in trace.steps:
        spans = [word for s in step.spans for word in (s.instruction, s.start, s.end, s.held, s.waited)]
        row = [step.plan, step.number, step.worker, step.start, step.end, step.failed, spans]
        text.write(comma + json.dumps(row, separators=(",", ":")))
        comma = ",\n"
    text.write("\n]}}\n")
    text.flush()
    text.detach()


def load_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace that `save_trace` wrote. Raises MonarchError for any other file."""
    return _Reader(Path(path)).trace()


class _Reader:
    """Checks everything that it reads: a trace comes from anywhere."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def fail(self, what: str) -> NoReturn:
        raise MonarchError(
            f"{self.path} is no trace of monarch's: {what}",
            hint="give a file that monarch.profile(...) or `monarchc profile` wrote.",
        )

    def trace(self) -> Trace:
        data = self._json()
        if not isinstance(data, dict) or not isinstance(own := data.get("monarch"), dict):
            self.fail("it holds none of monarch's own data")
        if own.get("version") != VERSION:
            self.fail(f"it has version {str(own.get('version'))[:20]!a}, and this monarch reads version {VERSION}")
        mesh = self._mesh(own.get("mesh"))
        plans = tuple(TracedPlan(self._text(name), self._text(hash_)) for name, hash_ in self._rows(own, "plans", 2))
        steps = tuple(self._step(row, len(plans), mesh) for row in self._rows(own, "steps", 7))
        commands = tuple(
            Command(self._one_of(kind, COMMANDS), self._text(label), *self._times(start, end), self._number(number, -1))
            for kind, label, start, end, number in self._rows(own, "commands", 5)
        )
        handled = tuple(
            Handled(
                self._one_of(kind, HANDLED),
                self._number(number),
                self._number(worker, 0, mesh.workers),
                *self._times(start, end),
            )
            for kind, number, worker, start, end in self._rows(own, "handled", 5)
        )
        return Trace(mesh, plans, steps, commands, handled, self._number(own.get("dropped")))

    def _json(self) -> Any:
        try:
            with open(self.path, "rb") as file:
                if not self.path.is_file():
                    self.fail("it is not a regular file")
                packed = file.read(2) == b"\x1f\x8b"
                file.seek(0)
                source: Any = gzip.GzipFile(fileobj=file) if packed else file
                data = source.read(MOST_BYTES + 1)
        except (EOFError, zlib.error, gzip.BadGzipFile):
            self.fail("its compressed data is damaged")
        except (OSError, ValueError) as error:  # ValueError: a path with a null character
            reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            raise MonarchError(f"cannot read {self.path}: {reason}", hint="give a trace file's path.") from None
        if len(data) > MOST_BYTES:
            self.fail(f"it is larger than {MOST_BYTES >> 20} MiB")
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            self.fail("it is not JSON")

    def _mesh(self, dims: Any) -> MeshSpec:
        pairs = self._list(dims, "the mesh")
        for pair in pairs:
            if len(self._list(pair, "a mesh dim")) != 2 or not isinstance(pair[0], str):
                self.fail("a mesh dim is not a name and a size")
            self._number(pair[1], 1, _WORKERS)
        if math.prod(size for _, size in pairs) > _WORKERS:
            self.fail("its mesh is too large")
        try:
            return MeshSpec(tuple((name, size) for name, size in pairs))
        except MonarchError as error:
            self.fail(error.message)

    def _step(self, row: list[Any], plans: int, mesh: MeshSpec) -> Step:
        plan, number, worker, start, end, failed, words = row
        start, end = self._times(start, end)
        if type(failed) is not bool:
            self.fail("whether a step failed is not true or false")
        if len(self._list(words, "a step's spans")) % 5 or any(type(word) is not int for word in words):
            self.fail("a step's spans are not five whole numbers each")
        spans = tuple(Span(*span) for span in self._fives(words))
        for before, span in zip((None, *spans), spans, strict=False):
            if before is not None and span.start < before.end:
                self.fail("a span starts before the last one ended")
            if not (start <= span.start <= span.end <= end):
                self.fail("a span lies outside of its step")
            if (
                min(span.instruction, span.held, span.waited) < 0
                or max(span.instruction, span.held, span.waited) > _MOST
            ):
                self.fail("a span's numbers are out of range")
        return Step(
            self._number(plan, 0, plans), self._number(number), self._number(worker, 0, mesh.workers), start, end,
            spans, failed,
        )  # fmt: skip

    @staticmethod
    def _fives(words: list[int]) -> Iterator[tuple[int, int, int, int, int]]:
        return zip(*[iter(words)] * 5, strict=True)

    def _rows(self, own: dict[str, Any], key: str, length: int) -> list[list[Any]]:
        rows = self._list(own.get(key), f"'{key}'")
        if any(not isinstance(row, list) or len(row) != length for row in rows):
            self.fail(f"an entry of '{key}' has not {length} parts")
        return rows

    def _list(self, value: Any, what: str) -> list[Any]:
        if not isinstance(value, list):
            self.fail(f"{what} is not a list")
        return value

    def _text(self, value: Any) -> str:
        if not isinstance(value, str):
            self.fail("a name is not text")
        return value

    def _one_of(self, value: Any, known: Sequence[str]) -> str:
        if not isinstance(value, str) or value not in known:
            self.fail(f"a command is none of {', '.join(known)}")
        return value

    def _number(self, value: Any, low: int = 0, end: int = _MOST) -> int:
        if type(value) is not int or not low <= value < end:
            self.fail("a number is missing or out of range")
        return value

    def _times(self, start: Any, end: Any) -> tuple[int, int]:
        # A step under way when the trace began has begun before it.
        if self._number(start, -_MOST) > self._number(end, -_MOST):
            self.fail("something ends before it starts")
        return start, end
