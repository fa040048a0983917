"""Logging in processes of actors: handlers of the program see their records, and files stay what they are."""

from __future__ import annotations

import asyncio
import io
import logging
import queue
from collections.abc import Iterator
from logging.handlers import QueueHandler
from pathlib import Path

import pytest

from monarch.actor import Actor, endpoint, shutdown_context, this_host
from monarch.config import configured
from tests import python
from tests.runtime.actors.conftest import WAIT

log = logging.getLogger("tests.actors")


class Logger(Actor):
    @endpoint
    def say(self, text: str) -> None:
        log.info("said %s", text, extra={"lock": io.StringIO()})  # what cannot be sent is left out

    @endpoint
    def say_by_its_logger(self, level: int, text: str) -> None:
        self.logger.log(level, text)
        print(text, flush=True)

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
        assert (record.processName, record.name) == ("crew gpus=1", log.name)
        assert record.getMessage() == "[actor=logger[1]] said hello"
        actors.slice(gpus=0).fail.call_one().get(WAIT)  # type: ignore[attr-defined]
        record = records.get(timeout=WAIT)
        assert record.levelno == logging.ERROR and "ValueError: as told" in str(record.exc_text or record.msg)
    finally:
        log.removeHandler(handler)


@pytest.fixture
def heard() -> Iterator[queue.SimpleQueue[logging.LogRecord]]:
    """Those of `Logger.logger`."""
    found: queue.SimpleQueue[logging.LogRecord] = queue.SimpleQueue()
    handler = QueueHandler(found)  # type: ignore[arg-type]
    logger = logging.getLogger("Logger")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(logging.NOTSET)


def test_an_actor_has_a_logger_and_its_name_before_what_it_logs(heard: queue.SimpleQueue[logging.LogRecord]) -> None:
    named = this_host().spawn_procs().spawn("named", Logger)
    with configured(prefix_python_logs_with_actor=False):
        plain = this_host().spawn_procs().spawn("plain", Logger)
    for actor in (named, plain):
        for text in ("hello", ""):
            actor.say_by_its_logger.call_one(logging.INFO, text).get(WAIT)
    said = [heard.get(timeout=WAIT) for _ in range(4)]
    assert [record.getMessage() for record in said] == ["[actor=named] hello", "", "hello", ""]
    assert said[0].__dict__["actor_prefix"] == "[actor=named] "


def test_logging_options_say_what_comes_to_the_program(
    heard: queue.SimpleQueue[logging.LogRecord], capsys: pytest.CaptureFixture[str]
) -> None:
    logging.getLogger("Logger").setLevel(logging.NOTSET)
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="crew")
    actors = procs.spawn("logger", Logger)

    def say(level: int, text: str) -> None:
        actors.say_by_its_logger.call(level, text).get(WAIT)

    asyncio.run(procs.logging_option())
    say(logging.ERROR, "silent")
    asyncio.run(procs.logging_option(stream_to_client=True, level=logging.DEBUG))
    logging.getLogger("Logger").setLevel(logging.DEBUG)
    say(logging.DEBUG, "debug")
    asyncio.run(procs.logging_option(stream_to_client=True, aggregate_window_sec=3600, level=logging.ERROR))
    for _ in range(3):
        say(logging.WARNING, "again")
    say(logging.ERROR, "error")
    texts = sorted(heard.get(timeout=WAIT).getMessage() for _ in range(4))
    assert texts == [f"[actor=logger[{rank}]] {text}" for rank in range(2) for text in ("debug", "error")]
    shutdown_context().get(WAIT)
    printed = capsys.readouterr().out
    assert "silent" not in printed
    assert printed.count("again") == 1 and "[crew × 6] again" in printed


def test_logging_options_that_make_no_sense_are_refused() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    with pytest.raises(ValueError, match="it needs stream_to_client=True"):
        asyncio.run(procs.logging_option(aggregate_window_sec=1))
    with pytest.raises(ValueError, match="a number of seconds from 0"):
        asyncio.run(procs.logging_option(stream_to_client=True, aggregate_window_sec=-1))
    with pytest.raises(ValueError, match="from 0 to 255"):
        asyncio.run(procs.logging_option(level=256))
    with pytest.raises(ValueError, match="from 0 to 255"):
        asyncio.run(procs.logging_option(level="INFO"))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="is a slice"):
        asyncio.run(procs.slice(gpus=0).logging_option())


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
    assert "[crew] [actor=warner] careful\n" in capsys.readouterr().err


HOLDER = """
import logging, os, socket, sys
from monarch.actor import Actor, endpoint

handler = logging.FileHandler("log")
logging.getLogger().addHandler(handler)
own = open("own", "w")
nowhere = logging.FileHandler(os.devnull)  # as pytest has one
logging.getLogger().addHandler(nowhere)
ends, pipe = socket.socketpair(), os.pipe()
numbers = [nowhere.stream.fileno(), *(end.fileno() for end in ends), *pipe]

class Writer(Actor):
    @endpoint
    def write(self) -> int:
        logging.warning("logged")
        handler.stream.write("by its stream\\n")
        handler.flush()
        own.write("written")
        own.flush()
        return os.fstat(own.fileno()).st_ino

    @endpoint
    def others(self) -> list[str]:
        return [os.readlink(f"/proc/self/fd/{number}") for number in numbers]

    @endpoint
    def close(self) -> None:
        for end in ends:
            end.close()
"""
PROGRAM = """
from holder import Writer, numbers, os, own
from monarch.actor import this_host
writer = this_host().spawn_procs().spawn("writer", Writer)
assert (found := writer.others.call_one().get(30)) == [os.devnull] * len(numbers), found
writer.close.call_one().get(30)
assert writer.write.call_one().get(30) == os.fstat(own.fileno()).st_ino
"""


def test_files_that_were_open_when_the_first_process_was_started_are_what_they_were(tmp_path: Path) -> None:
    """Were they closed there, what has such a number next, such as a socket, would be written into or closed. Those
    without a name are empty ones there, under the same numbers: the user's objects hold these."""
    (tmp_path / "holder.py").write_text(HOLDER)
    done = python.run("-c", PROGRAM, capture_output=True, text=True, timeout=2 * WAIT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["[actor=writer] logged", "by its stream"]
    assert (tmp_path / "own").read_text() == "written"
