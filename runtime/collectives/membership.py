"""A worker's place in a process group: how workers agree on which group they have, find each other, and leave it.

A process group has a number. In each step, before its first use, its workers tell each other which one they have; where
these differ, for somebody has left in an earlier step, all make a new one. Events have the same number on all workers
of the mesh, so those that make none count as many rounds.

Libraries that move tensors look at no progress words, so a worker that waits for one checks now and then whether the
others still come, and sees a failed peer or a lost mesh also where no connection breaks, as when a network is cut. For
that they connect on a thread of their own, which is left to itself, until it gives up, where a peer fails meanwhile.

Peers are found through a store, and this one is the mesh's own memory (`rendezvous`): there is none that others could
reach.
"""

from __future__ import annotations

import json
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import torch

from monarch.compiler.plan import MonarchError
from monarch.runtime.collectives.meeting import Group
from monarch.runtime.collectives.rendezvous import Rendezvous
from monarch.runtime.shared.signals import DEAD, LINE, STEP_BITS, Aborted

if TYPE_CHECKING:
    from monarch.runtime.collectives.collectives import Collectives

LOOK_SECONDS = 0.5
"""The seconds between two checks of a waiting worker."""

_EXPLAIN_SECONDS = 30.0  # for the cause of a broken connection to be known here, also on a loaded machine


class Membership(ABC):
    """This worker's place in the process group of the workers along some mesh dims."""

    joining: int
    """Rounds that it takes to join: as `_tell_all`, two for each message."""

    def __init__(self, collectives: Collectives, mesh_dims: Sequence[str]) -> None:
        self._at = collectives.at
        self._name_of = collectives.name_of
        self._group: Group = collectives.group(mesh_dims)
        self._what = f"the process group over {', '.join(mesh_dims)}"
        self._say = collectives.all_gather(mesh_dims, [0])
        self.size, self.me = self._group.size, self._group.me
        self.step = -1
        """The last one in which it was used."""
        self._number = 0  # of the process group: the same for all that are in it, 0 for none

    @abstractmethod
    def _join(self) -> None:
        """Connect with the group's workers, in `joining` rounds."""

    @abstractmethod
    def _cut(self) -> None:
        """Part with those that it is connected with, if any."""

    def leave(self) -> None:
        """Cut all connections. Peers that wait in the process group wake up."""
        self._cut()
        self._number = 0

    def _agree(self) -> None:
        """Be in one process group with the others, before its first use in a step."""
        self.step = self._at.step
        numbers = self._say([torch.tensor([self._number])])[0].tolist()
        if self._number and all(number == self._number for number in numbers):
            self._at.skip_rounds(self.joining)  # other groups may need them, and events have one number for all
            return
        self.leave()
        self._join()
        self._number = max(numbers) + 1

    def _connected(
        self,
        store: Rendezvous,
        connect: Callable[[], Any],
        what: dict[str, Any],
        give_up: Callable[[list[dict[str, Any]]], None],
    ) -> tuple[Any, list[dict[str, Any]]]:
        """The result of `connect`, which finds its peers through the store; and the description of each of the group,
        `what` among it. `give_up` is called with the latter where a peer fails meanwhile."""
        made: Future[Any] = Future()
        made.add_done_callback(lambda _: store.asked.set())

        def run() -> None:
            try:
                made.set_result(connect())
            except BaseException as error:  # any error: the thread that waits for it raises it
                made.set_exception(error)

        threading.Thread(target=run, name="monarch-connect", daemon=True).start()
        store.asked.wait()
        told: list[dict[str, Any]] = []
        try:
            if not made.done():
                told = self._tell_all({**what, "values": store.own})
        finally:
            store.answer({key: value for entry in told for key, value in entry["values"].items()})
        try:
            while not wait([made], LOOK_SECONDS).done:
                self.look()
        except Aborted:
            give_up(told)
            raise
        try:
            return made.result(), told
        except Exception as error:
            raise self.explained(error) from error

    def _tell_all(self, what: Any) -> list[Any]:
        """The messages of each of the group, JSON, over the mesh's own memory."""
        text = torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8)
        lengths = self._say([torch.tensor([text.numel()])])[0].tolist()
        padded = text.new_zeros(max(lengths))
        padded[: text.numel()] = text
        rows = self._say([padded])[0].view(self.size, -1)
        return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]

    # -- failing ---------------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Raises Aborted where somebody that this worker waits for has failed, or the mesh is lost."""
        words = self._at.signals.words
        if words[DEAD]:
            raise Aborted(words[DEAD] - 1, died=True)
        for peer in self._group.peers:
            progress = words[LINE * (1 + peer)]
            if progress & 1 and progress >> STEP_BITS == self.step:
                raise Aborted(peer, died=False)

    def explained(self, error: Exception) -> Exception:
        """The library says that a connection has broken: why it has, once that is known here."""
        self._at.announce()
        line = LINE * (1 + self._group.peers[0])
        until = time.monotonic() + _EXPLAIN_SECONDS

        def check(seen: int) -> None:
            self.look()
            if time.monotonic() > until:
                raise MonarchError(f"{self._what} broke: {error}")

        try:
            self._at.signals.wait(line, 1 << 62, check)
        except (Aborted, MonarchError) as found:
            return found
        raise AssertionError("no progress word grows so large")
