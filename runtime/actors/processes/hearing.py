"""Owners first: the caller of an actor that dies gets its answer once the actor's owner knows, on whatever host that
is.

    an actor dies       its process tells the owner's, and answers those whose call it died of once that has it; but at
                        once those that have to end before, for it owns them, or what owns them, and so on
    a process dies      who waits for an answer from there asks the processes of the actors' owners whether they know,
                        and fails its calls once they do

An owner's process answers from its I/O thread, whatever its actors do. One that is stopped, or cut off, is waited for
no longer than `HEARING_SECONDS`. All but `tell` and `after` in the I/O thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from monarch.runtime.actors.errors import SupervisionError
from monarch.runtime.actors.messages.message import EMPTY, Payload
from monarch.runtime.actors.messages.protocol import DESCENDS, KNOWS, PLACE_ENDED, Head, ReplyTo
from monarch.runtime.actors.processes.ports import One

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.ownership import PlaceEnded
    from monarch.runtime.actors.processes.process import Process
    from monarch.runtime.future import Future

HEARING_SECONDS = 5.0


class Hearing:
    """A process' share in this: of the caller, of the owner, and of the actor that dies."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._told: dict[str, Future[Any]] = {}
        self._waiting = threading.Condition()
        self._asking: dict[str, list[ReplyTo]] = {}
        process.handle(KNOWS, self._on_knows)
        process.handle(DESCENDS, self._on_descends)

    # -- an actor dies here --------------------------------------------------------------------------------------------

    def tell(self, owner: str, ended: PlaceEnded) -> None:
        """Tell an owner's process of the end of a place. From any thread."""
        head = PLACE_ENDED, ended.mesh, ended.rank
        if ended.failure is None:
            self._process.router.send(owner, (*head, None), EMPTY)
        else:
            self._told[ended.mesh] = self._ask(owner, lambda reply: (*head, reply), Payload.of(ended.failure))

    def after(self, actor: str, task: Callable[[], None]) -> None:
        """Call `task` once the owner knows of the end of an actor here, if that was reported to one. From any
        thread."""

        def known() -> None:
            task()
            with self._waiting:
                del self._told[actor]
                self._waiting.notify_all()

        if (told := self._told.get(actor)) is None:
            task()
        else:
            told.when_done(known)

    def wait(self) -> None:
        """Until all that `after` is to call was called."""
        with self._waiting:
            self._waiting.wait_for(lambda: not self._told, HEARING_SECONDS)

    # -- a process dies ------------------------------------------------------------------------------------------------

    def owners_first(self, address: str, task: Callable[[], None]) -> None:
        """Call `task` once the owners of the actors there whose answers are awaited here know that the process has
        ended."""
        owners = self._process.ports.owners(address) - {self._process.address, *self._process.dead}
        left = len(owners)

        def known() -> None:
            nonlocal left
            left -= 1
            if not left:
                task()

        for owner in owners:
            self._ask(owner, lambda reply: (KNOWS, address, reply), EMPTY).when_done(known)
        if not owners:
            task()

    def knows(self, address: str) -> None:
        """The actors here have been told that a process has ended, or is out of reach."""
        for reply in self._asking.pop(address, ()):
            self._process.reply(reply, True, None)

    def _on_knows(self, sender: str, head: Head, payload: Payload) -> None:
        _, address, reply = head
        if address in self._process.dead or not self._process.router.reaches(address):
            self._process.reply(reply, True, None)
        else:
            self._asking.setdefault(address, []).append(reply)

    # -- the caller descends from the actor that dies
    # ---------------------------------------------------------------------

    def if_descends(self, address: str, actor: str, task: Callable[[], None]) -> None:
        """Call `task` once a process says that something there has come of an actor here. From any thread."""
        asked = self._ask(address, lambda reply: (DESCENDS, actor, reply), EMPTY)

        def known() -> None:
            with suppress(SupervisionError):  # it has ended, and waits for nothing
                if asked.get():
                    task()

        asked.when_done(known)

    def _on_descends(self, sender: str, head: Head, payload: Payload) -> None:
        _, ancestor, reply = head
        here = [actor.instance for actor in list(self._process.actors.values()) if actor.instance.mesh is not None]
        self._process.reply(reply, True, any(instance.descends_from(ancestor) for instance in here))

    def _ask(self, owner: str, head: Callable[[ReplyTo], Head], payload: Payload) -> Future[Any]:
        """A future that is done when the owner's process has answered, or will not."""
        process, asked = self._process, One[Any](owner)
        port = process.ports.open(asked)

        def give_up() -> None:
            process.ports.reply(port, 0, True, lambda: None)

        if not process.router.send(owner, head((process.address, port, 0)), payload):
            give_up()
        process.router.later(HEARING_SECONDS, give_up)
        return asked.future


class HeldAnswers:
    """The answers to whose call an actor died of, until its owner knows. From any thread."""

    def __init__(self, process: Process, actor: str) -> None:
        self._process = process
        self._actor = actor
        self._lock = threading.Lock()
        self._held: list[tuple[ReplyTo, SupervisionError]] | None = []

    def answer(self, reply: ReplyTo, error: SupervisionError) -> None:
        owned = self._process.owned_in(self._actor)
        with self._lock:
            held = self._held is not None and reply[0] not in owned
            if self._held is not None and held:
                self._held.append((reply, error))
        if not held:
            self._process.reply(reply, False, error)
        elif owned:
            self._process.hearing.if_descends(reply[0], self._actor, lambda: self.release(reply[0]))

    def release(self, address: str | None = None) -> None:
        """Answer the calls of that process, or of all, now and from now on."""
        with self._lock:
            answered = [each for each in self._held or () if address in (None, each[0][0])]
            self._held = None if address is None else [each for each in self._held or () if each not in answered]
        for reply, error in answered:
            self._process.reply(reply, False, error)
