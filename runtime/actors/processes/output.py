"""The output of a mesh's processes, as the root prints it: with a prefix, equal lines of several processes once.

    [trainers gpus=3] loss 0.31
    [trainers × 64] ready

A line waits for equal ones. Pure: no file, and the caller gives the time.
"""

from __future__ import annotations

import codecs
from collections import deque
from dataclasses import dataclass, field

HOLD_SECONDS = 0.05


@dataclass
class Source:
    """One of the two streams of a process."""

    mesh: str
    place: str
    error: bool
    """Whether it is standard error."""
    last: deque[str]
    """The process' last lines, of both streams."""
    rest: str = ""
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))
    said: dict[str, int] = field(default_factory=dict)
    """How often it said a line that waits."""


@dataclass
class _Line:
    source: Source
    text: str
    count: int = 1


class Output:
    """Lines that wait to be printed, each up to so many seconds; None: they are kept as last lines only.

    With `merged` a line is printed once in that time however often a process says it.
    """

    def __init__(self, seconds: float | None = HOLD_SECONDS, merged: bool = False) -> None:
        self._seconds = seconds
        self._merged = merged
        self._lines: dict[tuple[str, bool, str, int], _Line] = {}
        self._sources: list[Source] = []
        self.due: float | None = None
        """When lines are to be printed."""

    def read(self, source: Source, data: bytes, now: float) -> None:
        """Some bytes were read; none, at the end."""
        text = source.rest + source.decoder.decode(data, final=not data)
        *lines, source.rest = text.split("\n")
        if not data and source.rest:
            lines, source.rest = [*lines, source.rest], ""
        for line in lines:
            self._add(source, line.rsplit("\r", 1)[-1] or line.rstrip("\r"))
        if lines and self.due is None and self._seconds is not None:
            self.due = now + self._seconds

    def _add(self, source: Source, text: str) -> None:
        source.last.append(text)
        if self._seconds is None:
            return
        again = 0 if self._merged else source.said.get(text, 0)
        if not source.said:
            self._sources.append(source)
        source.said[text] = again + 1
        # The second time that a process says it is not the same line as another process' first, unless they merge.
        key = source.mesh, source.error, text, again
        if key in self._lines:
            self._lines[key].count += 1
        else:
            self._lines[key] = _Line(source, text)

    def take(self) -> list[tuple[bool, str]]:
        """The lines to print now: whether on standard error, and the line."""
        lines = [(line.source.error, _shown(line)) for line in self._lines.values()]
        self._lines.clear()
        for source in self._sources:
            source.said.clear()
        self._sources.clear()
        self.due = None
        return lines


def _shown(line: _Line) -> str:
    source = line.source
    where = f" × {line.count}" if line.count > 1 else f" {source.place}" if source.place else ""
    return f"[{source.mesh}{where}] {line.text}"
