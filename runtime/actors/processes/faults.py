"""Failures that processes deal with themselves, as the program gets them: each owner's process reports to the root.

It reports at once, but not more often than every `SECONDS`: of the failures in between it reports the newest `MOST`
then, and of the rest their number.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from monarch.compiler.execution.events import Fault, heard, tell
from monarch.runtime.actors.errors import MeshFailure
from monarch.runtime.actors.messages.message import Payload
from monarch.runtime.actors.messages.protocol import FAULTS, Head

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.process import Process

SECONDS = 0.1
MOST = 50


class Faults:
    """A process' share in this: of those that report, and of the root, which gets the reports."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._held: deque[Fault] = deque(maxlen=MOST)
        self._more = 0
        self._next = 0.0
        process.handle(FAULTS, self._on_faults)

    def note(self, failure: MeshFailure) -> None:
        """An owner here hears of a failure. From any thread."""
        fault = Fault(f"{failure.mesh_name}[{failure.rank}]", failure.reason, failure.report())
        if self._process.address == self._process.group.root:
            if heard(Fault):
                tell(fault)
            return
        with self._lock:
            self._more += len(self._held) == MOST
            self._held.append(fault)
            wait = self._next - monotonic()
            if wait > 0 and len(self._held) == 1:
                self._process.router.later(wait, self.send)
        if wait <= 0:
            self.send()

    def send(self) -> None:
        """Report to the root the failures that were not reported yet. From any thread."""
        with self._lock:
            faults, more = list(self._held), self._more
            self._held.clear()
            self._more = 0
            if faults:
                self._next = monotonic() + SECONDS
                faults[0] = replace(faults[0], before=more)
                self._process.router.send(self._process.group.root, (FAULTS,), Payload.of(faults))

    def _on_faults(self, sender: str, head: Head, payload: Payload) -> None:
        if heard(Fault):
            for fault in payload.decode():
                tell(fault)
        else:
            payload.drop()
