"""The activity of actors' processes, as the program sees it: plain data, for the live page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from monarch.runtime.actors.debugging.stacks import ANSWER_SECONDS, ask
from monarch.runtime.actors.errors import SupervisionError
from monarch.runtime.actors.messages.message import EMPTY
from monarch.runtime.actors.messages.protocol import LOOK, ReplyTo
from monarch.runtime.actors.processes import current
from monarch.runtime.actors.processes.ports import One, failing
from monarch.runtime.actors.processes.process import Process

_SECONDS = 1.0
"""How long all processes together may take to answer."""


def look() -> list[dict[str, Any]]:
    """Each process: name, pid, host, memory (bytes), answers, and actors (name, class_name, queued, running); without
    those that have no answer in time, but for its name."""
    process = current.started()
    if process is None:
        return []
    asked = {address: (name, _ask(process, address)) for address, name in _known(process)}
    deadline = time.monotonic() + _SECONDS
    found = [{"name": "program", **process.look()}] if process.actors else []
    for name, answer in asked.values():
        try:
            seen = answer.future.get(max(0.0, deadline - time.monotonic()))
        except TimeoutError:
            nothing = {"pid": 0, "host": "", "memory": 0, "actors": []}
            found.append({"name": name, "answers": False, **nothing})
        except SupervisionError:  # it has just ended
            continue
        else:
            found.append({"name": name, **seen})
    return found


def stacks_of() -> dict[str, str]:
    """The stacks of each process, by name."""
    process = current.started()
    if process is None:
        return {}
    asked = {name: ask(process, address) for address, name in _known(process)}
    found = {}
    for name, answer in asked.items():
        try:
            found[name] = answer.future.get(ANSWER_SECONDS)
        except TimeoutError:
            found[name] = f"no answer within {ANSWER_SECONDS:g} s: stopped, or in code that keeps the GIL"
        except SupervisionError:
            continue
    return found


def _known(process: Process) -> Iterator[tuple[str, str]]:
    """The processes that the program knows, by address, and their names."""
    if process.host is not None:
        yield from process.host.places()
    yield from process.places_elsewhere()


def _ask(process: Process, address: str) -> One[dict[str, Any]]:
    answer: One[dict[str, Any]] = One(address)
    reply: ReplyTo = (process.address, process.ports.open(answer), 0)
    if not process.router.send(address, (LOOK, reply), EMPTY):
        answer.take(0, False, failing(process.lost(address, "look")))
        process.ports.close(reply[1])
    return answer
