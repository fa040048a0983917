"""Owners first: who called an actor that dies is answered once the actor's owner knows, on whatever host that is.

    an actor dies       its process tells the owner's, and answers those whose call it died of once that has it
    a process dies      who waits for an answer from there asks the processes of the actors' owners whether they know,
                        and fails its calls once they do

An owner's process answers from its I/O thread, whatever its actors do. One that is stopped, or cut off, is waited for
no longer than `HEARING_SECONDS`. All but `tell` and `after` in the I/O thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from monarch.runtime.actors.messages.message import EMPTY, Payload
from monarch.runtime.actors.messages.protocol import KNOWS, PLACE_ENDED, Head, ReplyTo
from monarch.runtime.actors.processes.ports import One

if TYPE_CHECKING:
    from monarch.runtime.actors.processes.ownership import PlaceEnded
    from monarch.runtime.actors.processes.process import Process
    from monarch.runtime.future import Future

HEARING_SECONDS = 5.0


class Hearing:
    """A process' share in this: of the caller, of the owner, and of what dies."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._told: dict[str, Future[None]] = {}
        self._waiting = threading.Condition()
        self._asking: dict[str, list[ReplyTo]] = {}
        process.handle(KNOWS, self._on_knows)

    # -- an actor dies here --------------------------------------------------------------------------------------------

    def tell(self, owner: str, ended: PlaceEnded) -> None:
        """Tell an owner's process of the end of a place. From any thread."""
        head = PLACE_ENDED, ended.mesh, ended.rank
        if ended.failure is None:
            self._process.router.send(owner, (*head, None), EMPTY)
        else:
            self._told[ended.mesh] = self._ask(owner, lambda reply: (*head, reply), Payload.of(ended.failure))

    def after(self, actor: str, task: Callable[[], None]) -> None:
        """Call `task` once the owner knows of the end of an actor here, if it was told of one. From any thread."""

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
        """Call `task` once those who own the actors there whose answers are awaited here know that it has ended."""
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

    def _ask(self, owner: str, head: Callable[[ReplyTo], Head], payload: Payload) -> Future[None]:
        """A future that is done when the owner's process has answered, or will not."""
        process, asked = self._process, One[None](owner)
        port = process.ports.open(asked)

        def give_up() -> None:
            process.ports.reply(port, 0, True, lambda: None)

        if not process.router.send(owner, head((process.address, port, 0)), payload):
            give_up()
        process.router.later(HEARING_SECONDS, give_up)
        return asked.future
