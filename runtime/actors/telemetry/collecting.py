"""Where the rows of telemetry are: a collector beside each host's agent; and the program, which asks all of them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from monarch.compiler.plan import MonarchError
from monarch.runtime.actors.errors import SupervisionError
from monarch.runtime.actors.messages.message import EMPTY, Payload
from monarch.runtime.actors.messages.protocol import FLUSH, RECORD, RECORDED, Head
from monarch.runtime.actors.processes import current
from monarch.runtime.actors.processes.ports import One
from monarch.runtime.actors.telemetry import recording
from monarch.runtime.actors.telemetry.kept import HostTables, Read, Where
from monarch.runtime.actors.telemetry.recording import Bounds

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.process import Process

_SECONDS = 5.0
"""How long a process may take to hand on its rows; a host may take twice as long."""

_of_program: HostTables | None = None
"""The program's store for its own host, while telemetry is on."""


class Collector:
    """Keeps the rows of a host's processes. `recorded` gives the addresses of those that record."""

    def __init__(self, process: Process, recorded: Callable[[], list[str]]) -> None:
        self._process = process
        self._recorded = recorded
        self._kept: HostTables | None = None
        self._lacks: MonarchError | None = None
        process.handle(RECORD, self._on_record)
        process.handle(RECORDED, self._on_recorded)

    def read(self, after: int) -> Read:
        """The batches behind this number, with the rows that the processes have recorded until now. Raises MonarchError
        where pyarrow is missing."""
        process = self._process
        asked: list[One[None]] = []
        for address in self._recorded():
            answer: One[None] = One(address)
            port = process.ports.open(answer)
            if process.router.send(address, (FLUSH, (process.address, port, 0)), EMPTY):
                asked.append(answer)
        for answer in asked:
            with suppress(TimeoutError, SupervisionError):  # it is stuck, or has ended: the other rows are there
                answer.future.get(_SECONDS)
        if self._lacks is not None:
            raise self._lacks
        kept = self._here()
        return (after, {}) if kept is None else kept.read(after)

    def close(self) -> None:
        """Drop the rows kept here for a program on another host. Idempotent."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.close()

    def _here(self) -> HostTables | None:
        return _of_program if self._process.group.root == self._process.address else self._kept

    def _on_record(self, sender: str, head: Head, payload: Payload) -> None:
        _, name, pid, memory, seconds = head
        kept = self._here()
        if kept is None and self._process.group.root != self._process.address and self._lacks is None:
            try:
                kept = self._kept = HostTables(Bounds(memory, seconds))
            except MonarchError as error:
                self._lacks = error
        if kept is not None:
            kept.add(Where(name, pid), payload.decode)

    def _on_recorded(self, sender: str, head: Head, payload: Payload) -> None:
        def answer() -> None:
            try:
                found = self.read(head[2])
            except MonarchError as error:
                self._process.reply(head[1], False, error)
            else:
                self._process.reply(head[1], True, found)

        threading.Thread(target=answer, name="monarch telemetry reader", daemon=True).start()


# -- the program -------------------------------------------------------------------------------------------------------


def start(bounds: Bounds) -> None:
    """Record what happens in the program, and in processes that are spawned from now on. Raises MonarchError where it
    is recorded already, pyarrow is not installed, or this is no program."""
    global _of_program
    process = current.started()
    if process is not None and process.group.root != process.address:
        raise MonarchError(
            "telemetry is started by the program", hint="call monarch.telemetry.start() before it spawns."
        )
    if recording.current is not None:
        raise MonarchError("telemetry is on already", hint="monarch.telemetry.stop() ends it.")
    kept = _of_program = HostTables(bounds)
    where = Where("program", os.getpid())
    recording.start(bounds, lambda rows: kept.add(where, lambda: rows))


def stop() -> None:
    """Record nothing more, and drop all rows. Idempotent."""
    global _of_program
    recording.stop()
    if _of_program is not None:
        _of_program.close()
        _of_program = None


def gather(after: Mapping[str, int]) -> dict[str, Read]:
    """The rows of the hosts, by the address of their agents ("" for the program's), behind the batches of these
    numbers. A host that does not answer in time is left out. Raises MonarchError where telemetry is off."""
    if _of_program is None or recording.current is None:
        raise MonarchError("telemetry is off", hint="monarch.telemetry.start() records from then on.")
    process: Any = current.started()
    asked: dict[str, One[Read]] = {}
    for agent in () if process is None else tuple(process.host.other_hosts):
        answer: One[Read] = One(agent)
        port = process.ports.open(answer)
        if process.router.send(agent, (RECORDED, (process.address, port, 0), after.get(agent, 0)), EMPTY):
            asked[agent] = answer
    recording.current.flush()
    last = after.get("", 0)
    found = {"": _of_program.read(last) if process is None else process.host.collector.read(last)}
    for agent, answer in asked.items():
        with suppress(TimeoutError, SupervisionError):
            found[agent] = answer.future.get(2 * _SECONDS)
    return found
