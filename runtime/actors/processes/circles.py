"""Actors that wait for each other: found, proved, and ended with an error.

An actor that has waited for an answer for a while (the setting `deadlock_check`) asks after it: a probe goes to where
the answer is to come from. Where the actor that has the call, in its mailbox or in its hands, waits itself, the probe
goes on to whom that one waits for. A probe that comes back to an actor that still waits for the same answer has gone
round a circle in which nobody can answer before another one does, for each handles one message at a time, and waits
without a timeout. Then one of them, the first by its name, has its call fail; the others get their answers, or that
error.

An actor's wait is seen in the frames of its thread, or its task, when it is asked: calls cost nothing for it. Waits
that are not seen so (a wait with a timeout, several futures at once, endpoints that run beside others, answers that a
host's agent gathers) is never taken for a circle, and so is not found either. Slow calls are reported all the same
(`debugging.stacks`).

Chandy, Misra and Haas, "Distributed deadlock detection", ACM TOCS 1 (1983): edge chasing, for waits for all of several.
"""

from __future__ import annotations

import sys
import threading
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Any

from monarch.compiler.config import settings
from monarch.runtime.actors.errors import SupervisionError
from monarch.runtime.actors.messages.message import EMPTY, Payload
from monarch.runtime.actors.messages.protocol import PROBE, Head
from monarch.runtime.actors.processes.ports import All, One
from monarch.runtime.future import Future

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.instance import LocalActor
    from monarch.runtime.actors.processes.process import Process

_LONGEST = 64
"""How many actors may be in a circle that is looked for."""

Step = tuple[str, str, str]
"""One of a path: the address of an actor's process, the actor, and "a[0] waits for b.step" for people."""


class Circles:
    """Those through the actors of one process. In its I/O thread."""

    def __init__(self, process: Process) -> None:
        self._process = process
        process.handle(PROBE, self._on_probe)

    def watch(self) -> None:
        """Look now and then which actors wait for each other."""
        before = monotonic() - settings.deadlock_check
        for actor in list(self._process.actors.values()):
            port, call = self._wait_of(actor)
            if call is not None and call.since <= before:
                self._ask(actor, port, call, port, ())
        self._process.router.later(settings.deadlock_check, self.watch)

    def _wait_of(self, actor: LocalActor) -> tuple[int, One[Any] | All[Any] | None]:
        """The call, and its port, for whose answer an actor waits and does nothing else."""
        future = actor.waits_for()
        for port, call in self._process.ports.calls().items() if future is not None else ():
            if isinstance(call, One | All) and call.future is future:
                return port, call
        return -1, None

    def _ask(self, actor: LocalActor, port: int, call: One[Any] | All[Any], token: int, path: tuple[Step, ...]) -> None:
        """Send a probe on to where an actor waits for answers from."""
        here = self._process.address
        step = here, actor.instance.actor_id, f"{actor.instance.label} waits for {call.what}"
        for place, address in call.pending().items():
            self._process.router.send(address, (PROBE, token, (here, port, place), (*path, step)), EMPTY)

    def _on_probe(self, sender: str, head: Head, payload: Payload) -> None:
        _, token, reply, path = head
        actor = next((each for each in list(self._process.actors.values()) if each.has(reply)), None)
        if actor is None:
            return
        port, call = self._wait_of(actor)
        if call is None:
            return
        me = self._process.address, actor.instance.actor_id
        if me == path[0][:2]:
            if port == token and me == min(step[:2] for step in path):
                circle = ", ".join(text for _, _, text in path)
                call.future.fail(
                    SupervisionError(
                        f"'{call.what}' never gets an answer: actors wait for each other: {circle}", call.what
                    )
                )
                self._process.ports.close(port)
        elif len(path) < _LONGEST and all(step[:2] != me for step in path):
            self._ask(actor, port, call, token, path)


def awaited_in(frame: FrameType | None) -> Future[Any] | None:
    """The future for which a thread waits, without a timeout, in its innermost frame."""
    if frame is None or frame.f_code is not Future._wait.__code__ or frame.f_locals.get("timeout") is not None:
        return None
    return frame.f_locals["self"]


def awaited_by(coroutine: Any) -> Future[Any] | None:
    """The future that a coroutine awaits, by way of others."""
    while (further := getattr(coroutine, "cr_await", None)) is not None:
        coroutine = further
    if getattr(coroutine, "gi_code", None) is not Future.__await__.__code__ or coroutine.gi_frame is None:
        return None
    return coroutine.gi_frame.f_locals["self"]


def frame_of(thread: threading.Thread) -> FrameType | None:
    """Where a thread is now."""
    return sys._current_frames().get(thread.ident or 0)
