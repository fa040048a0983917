"""Logging as in one process: the records of a process of actors go to the handlers of the program.

A process that was spawned has none of the program's handlers, whose files and sockets are the program's: records go to
the root, which hands them to its own loggers by their names. So a handler that is added there later sees them too, and
`logging.basicConfig` does nothing in such a process (but with `force=True`), as in a program that has called it. Levels
are those that the spawner's loggers had when it started the process, or that `ProcMesh.logging_option` has set since.
What an actor logs has its name before it, as the setting `prefix_python_logs_with_actor` says.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from monarch.compiler.config import settings
from monarch.runtime.actors.messages.message import Payload
from monarch.runtime.actors.processes.current import running

_FORMATTER = logging.Formatter()
Levels = tuple[tuple[str, int], ...]
"""Of the loggers that have one of their own, by name; the root logger's is ""."""


def levels() -> Levels:
    return tuple((name, logger.level) for name, logger in _loggers() if logger.level)


def _loggers() -> list[tuple[str, logging.Logger]]:
    found = list(logging.root.manager.loggerDict.items())
    return [("", logging.root), *((name, each) for name, each in found if isinstance(each, logging.Logger))]


_handled: list[logging.Logger] | None = None
_levels: dict[str, int] = {}


def note() -> None:
    """In the parent of processes that will `forward`: which loggers have handlers, and levels. To look at hundreds of
    loggers is to write to them, for Python counts references, and each process would copy their pages."""
    global _handled, _levels
    _handled, _levels = [logger for _, logger in _loggers() if logger.handlers], dict(levels())


def forward(send: Callable[[Payload], bool], where: str, given: Levels) -> None:
    """Have the records of this process, which was just forked, sent on; `where` is their `processName`."""
    for logger in [logger for _, logger in _loggers()] if _handled is None else _handled:
        for handler in list(logger.handlers):
            logger.removeHandler(handler)
    for name, level in given:
        if _levels.get(name) != level:
            logging.getLogger(name).setLevel(level)
    handler = _Forward(send, where)
    logging.root.addHandler(handler)
    logging.lastResort = handler  # for loggers that do not propagate


def forward_from(level: int, shown: bool) -> None:
    """From now on this process, whose records are forwarded, logs from a level on, or sends no records at all."""
    logging.root.setLevel(level)
    for handler in logging.root.handlers:
        if isinstance(handler, _Forward):
            handler.shown = shown


class _Forward(logging.Handler):
    def __init__(self, send: Callable[[Payload], bool], where: str) -> None:
        super().__init__()
        self._send = send
        self._where = where
        self.shown = True

    def emit(self, record: logging.LogRecord) -> None:
        if not self.shown:
            return
        try:
            self._send(_payload(record, self._where))
        except Exception:  # as every handler does: logging raises nothing in its caller
            self.handleError(record)


def _payload(record: logging.LogRecord, where: str) -> Payload:
    text = record.getMessage()
    fields = record.__dict__ | {"msg": text, "args": None, "exc_info": None, "processName": where}
    found = running.get(None)
    # An empty text stays empty: torch.compile's structured records are such.
    if found is not None and found.actor_instance.actor_id and text and settings.prefix_python_logs_with_actor:
        prefix = f"[actor={found.actor_instance.label}] "
        fields |= {"msg": f"{prefix}{text}", "actor_prefix": prefix}
    if record.exc_info and not record.exc_text:
        fields["exc_text"] = _FORMATTER.formatException(record.exc_info)
    try:
        return Payload.of(fields)
    except Exception:  # the user's `extra`, which may raise anything
        plain = {name: value for name, value in fields.items() if isinstance(value, str | int | float | None)}
        return Payload.of(plain)


class Received:
    """Records of other processes, handed to the loggers here in a thread of its own: handlers may take their time."""

    def __init__(self, write: Callable[[str], None]) -> None:
        """`write` takes a line that there is no handler for."""
        self._write = write
        self._records: queue.SimpleQueue[Payload | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def take(self, payload: Payload) -> None:
        """In the I/O thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="monarch logs", daemon=True)
            self._thread.start()
        self._records.put(payload)

    def end(self, seconds: float) -> None:
        """Wait until all records so far are handled, so long at most."""
        self._records.put(None)
        if self._thread is not None:
            self._thread.join(seconds)

    def _serve(self) -> None:
        while (payload := self._records.get()) is not None:
            fields: dict[str, Any] = payload.decode()
            record = logging.makeLogRecord(fields)
            logger = logging.getLogger(record.name)
            if not logger.isEnabledFor(record.levelno):
                continue
            if logger.hasHandlers():
                logger.handle(record)
            elif record.levelno >= logging.WARNING:
                self._write(f"[{record.processName}] {_FORMATTER.format(record)}")
