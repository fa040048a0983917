"""One line that says how far a stream is: rewritten in a terminal and in a notebook, and rare in a pipe or a file."""

from __future__ import annotations

import sys
import time
from typing import Any

from monarch.compiler.loading import load

_TERMINAL, _NOTEBOOK = 0.1, 0.5
_PIPE = 10.0
"""Seconds until a line is shown again; in a pipe, where each stays, twice as many after each line."""


class Progress:
    """Where to show how far a stream is, if at all."""

    def __init__(self, shown: bool | None) -> None:
        """`shown` is None for: where somebody looks on."""
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        self._notebook = shell is not None and hasattr(shell, "kernel")
        self._shown = (self._terminal or self._notebook) if shown is None else shown
        self._pause = _TERMINAL if self._terminal else _NOTEBOOK if self._notebook else _PIPE
        self._start = self._next = time.monotonic()
        self._display: Any = None
        self._rows = 0

    def count(self, rows: int, place: str, waited: float) -> None:
        """So many more rows were given, at this place of the stream; the program has `waited` so many seconds."""
        self._rows += rows
        now = time.monotonic()
        if self._shown and now >= self._next:
            self._show(self._line(place, waited, now), "\r\x1b[2K", "")
            self._next = now + self._pause
            if not self._terminal and not self._notebook:
                self._pause *= 2

    def end(self, place: str, waited: float) -> None:
        """The stream is at its end: the last line, which stays. `waited` is in seconds."""
        if self._shown and self._rows:
            self._show(self._line(place, waited, time.monotonic()), "\r\x1b[2K", "\n")
        self._start, self._rows = time.monotonic(), 0

    def _line(self, place: str, waited: float, now: float) -> str:
        rate = self._rows / max(now - self._start, 1e-9)
        return f"{place} · {rate:,.0f} rows/s · waited {waited:.1f} s"

    def _show(self, line: str, before: str, behind: str) -> None:
        if self._terminal:
            sys.stderr.write(f"{before}{line}{behind}")
            sys.stderr.flush()
        elif self._notebook:
            text = {"text/plain": line}
            if self._display is None:
                self._display = load("IPython.display").display(text, raw=True, display_id=True)
            else:
                self._display.update(text, raw=True)
        else:
            print(line, file=sys.stderr, flush=True)
