"""Logging in processes of actors: handlers of the program see their records, and files stay what they are."""

from __future__ import annotations

import io
import logging
import queue
from collections.abc import Iterator
from logging.handlers import QueueHandler
from pathlib import Path

import pytest

from monarch.actor import Actor, endpoint, shutdown_context, this_host
from tests import python
from tests.runtime.actors.conftest import WAIT

log = logging.getLogger("tests.actors")


class Logger(Actor):
    @endpoint
    def say(self, text: str) -> None:
        log.info("said %s", text, extra={"lock": io.StringIO()})  # what cannot be sent is left out

    @endpoint
    def fail(self) -> None:
        try:
            raise ValueError("as told")
        except ValueError:
            log.exception("failed")


@pytest.fixture
def records() -> Iterator[queue.SimpleQueue[logging.LogRecord]]:
    """Those that come to a handler that is added after the processes are there."""
    found: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(found)  # type: ignore[arg-type]
    log.setLevel(logging.INFO)
    yield found
    log.removeHandler(handler)
    log.setLevel(logging.NOTSET)


def test_handlers_that_are_added_later_see_what_actors_log(records: queue.SimpleQueue[logging.LogRecord]) -> None:
    actors = this_host().spawn_procs(per_host={"gpus": 2}, name="crew").spawn("logger", Logger)
    actors.initialized.get(WAIT)
    handler = QueueHandler(records)  # type: ignore[arg-type]
    log.addHandler(handler)
    try:
        actors.slice(gpus=1).say.call_one("hello").get(WAIT)  # type: ignore[attr-defined]
        record = records.get(timeout=WAIT)
        assert (record.getMessage(), record.processName, record.name) == ("said hello", "crew gpus=1", log.name)
        actors.slice(gpus=0).fail.call_one().get(WAIT)  # type: ignore[attr-defined]
        record = records.get(timeout=WAIT)
        assert record.levelno == logging.ERROR and "ValueError: as told" in str(record.exc_text or record.msg)
    finally:
        log.removeHandler(handler)


def test_without_a_handler_warnings_are_printed_with_a_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    class Warner(Actor):
        @endpoint
        def warn(self) -> None:
            logging.getLogger("tests.nobody").warning("careful")

    handlers, logging.root.handlers = logging.root.handlers, []  # pytest's
    try:
        this_host().spawn_procs(name="crew").spawn("warner", Warner).warn.call_one().get(WAIT)
        shutdown_context().get(WAIT)
    finally:
        logging.root.handlers = handlers
    assert "[crew] careful\n" in capsys.readouterr().err


HOLDER = """
import logging, os, sys
from monarch.actor import Actor, endpoint

handler = logging.FileHandler("log")
logging.getLogger().addHandler(handler)
own = open("own", "w")

class Writer(Actor):
    @endpoint
    def write(self) -> int:
        logging.warning("logged")
        handler.stream.write("by its stream\\n")
        handler.flush()
        own.write("written")
        own.flush()
        return os.fstat(own.fileno()).st_ino
"""
PROGRAM = """
from holder import Writer, os, own
from monarch.actor import this_host
writer = this_host().spawn_procs().spawn("writer", Writer)
assert writer.write.call_one().get(30) == os.fstat(own.fileno()).st_ino
"""


def test_files_that_were_open_when_the_first_process_was_started_are_what_they_were(tmp_path: Path) -> None:
    """Were they closed there, what has such a number next, such as a socket, would be written into."""
    (tmp_path / "holder.py").write_text(HOLDER)
    done = python.run("-c", PROGRAM, capture_output=True, text=True, timeout=2 * WAIT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["by its stream", "logged"]
    assert (tmp_path / "own").read_text() == "written"
