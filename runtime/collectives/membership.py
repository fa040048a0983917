"""A worker's place in a process group: how workers find each other, agree on which group they have, and leave it.

Gloo finds its peers through a store, and this one is the mesh's own memory: what a worker sets, its peers are told when
they first ask. A process group has a number. In each step, before its first use, its workers tell each other which one
they have; where these differ, for somebody has left in an earlier step, all make a new one. Events have the same number
on all workers of the mesh, so those that make none count as many rounds.

Gloo looks at no progress words, so who waits in it looks up now and then whether the others still come, and hears of a
failed peer or a lost mesh also where no connection breaks, as when a network is cut. For that Gloo connects on a thread
of its own, which is left to itself, until it gives up, where a peer fails meanwhile.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions, ProcessGroupGloo, Store

from monarch.compiler.plan import MonarchError
from monarch.runtime.collectives import listening
from monarch.runtime.collectives.meeting import Group
from monarch.runtime.signals import DEAD, LINE, STEP_BITS, Aborted

if TYPE_CHECKING:
    from monarch.runtime.collectives.collectives import Collectives

_CONNECT = timedelta(seconds=30)
_FOR_EVER = timedelta(days=365)  # who waits for a worker that fails looks up, and is woken
_LOOK = timedelta(milliseconds=500)
_EXPLAIN_SECONDS = 5.0  # for the cause of a broken connection to be known here
_JOINING = 4  # rounds: two things are told, each behind its length
_ATTEMPTS = 8


class Membership:
    """This worker's place in the process group of the workers along some mesh dims."""

    def __init__(self, at: Collectives, mesh_dims: Sequence[str], address: str) -> None:
        self._at = at
        self._group: Group = at.group(mesh_dims)
        self._what = f"the process group over {', '.join(mesh_dims)}"
        self._say = at.all_gather(mesh_dims, [0])
        self._address = address
        self.size, self.me = self._group.size, self._group.me
        self.step = -1
        """The last one in which it was used."""
        self._number = 0  # of the process group: the same for all that are in it, 0 for none
        self._backend: Any = None
        self._connections: list[socket.socket] = []

    # -- moving bytes ----------------------------------------------------------------------------------------------

    def gathered(self, row: torch.Tensor) -> torch.Tensor:
        """Everyone's row, one after the other: of shape [workers, length]."""
        rows = row.new_empty(self.size, row.numel())
        options = AllgatherOptions()
        options.timeout = _FOR_EVER
        self._run(lambda gloo: gloo._allgather_base(_bytes(rows), _bytes(row), options), rows)
        return rows

    def exchange(self, given: torch.Tensor, lengths: list[int], took: torch.Tensor, from_each: list[int]) -> None:
        """Send each worker so many bytes of what is given, in order, and take so many from each."""
        options = AllToAllOptions()
        options.timeout = _FOR_EVER
        self._run(lambda gloo: gloo.alltoall_base(_bytes(took), _bytes(given), from_each, lengths, options), None)

    def broadcast(self, row: torch.Tensor, root: int) -> None:
        options = BroadcastOptions()
        options.rootRank, options.timeout = root, _FOR_EVER
        self._run(lambda gloo: gloo.broadcast([row], options), row)

    def _run(self, start: Callable[[Any], Any], moved: torch.Tensor | None) -> None:
        if moved is not None and moved.numel() == 0:
            return  # for everyone alike
        if self.step != self._at.step:
            self._agree()
        try:
            work = start(self._backend)
            while not self._ended(work):
                self._look()
            work.wait()
        except RuntimeError as error:
            raise self._explained(error) from error

    @staticmethod
    def _ended(work: Any) -> bool:
        """After a while, or when it has."""
        try:
            work.wait(_LOOK)
        except RuntimeError:  # the while is over, or it has failed
            return bool(work.is_completed())
        return True

    def _look(self) -> None:
        """Raises Aborted where somebody that this worker waits for has failed, or the mesh is lost."""
        words = self._at.signals.words
        if words[DEAD]:
            raise Aborted(words[DEAD] - 1, died=True)
        for peer in self._group.peers:
            progress = words[LINE * (1 + peer)]
            if progress & 1 and progress >> STEP_BITS == self.step:
                raise Aborted(peer, died=False)

    # -- making and leaving ----------------------------------------------------------------------------------------

    def _agree(self) -> None:
        self.step = self._at.step
        numbers = self._say([torch.tensor([self._number])])[0].tolist()
        if self._number and all(number == self._number for number in numbers):
            self._at.skip_rounds(_JOINING)  # other groups may need them, and events have one number for all
            return
        self.leave()
        self._join()
        self._number = max(numbers) + 1

    def leave(self) -> None:
        """Cut all connections. Peers that wait in the process group wake up."""
        while self._connections:
            listening.cut(self._connections.pop())
        self._backend = None
        self._number = 0

    def _join(self) -> None:
        device, listener = listen(self._address)
        try:
            own = listener.getsockname()[:2]
            store = _Rendezvous()
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs have other names
            options._devices, options._threads, options._timeout = [device], 1, _CONNECT
            listeners = self._connect(store, options, own)
            self._connections = listening.connections(own, listeners)
            ends = [ends for each in self._connections if (ends := listening.ends_of(each)) is not None]
            told = [_ends(entry) for entry in self._tell_all(ends)]
            if (wrong := listening.stranger_among(told)) is not None:
                raise MonarchError(
                    f"{self._what} was not used: {wrong}",
                    hint="somebody else on this machine or network has connected to it. The next step tries again.",
                )
            listening.hear_nobody(listener)
        finally:
            listener.close()

    def _connect(self, store: _Rendezvous, options: Any, own: listening.Address) -> list[listening.Address]:
        """Have Gloo connect; gives the listeners of the group's workers."""
        made: Future[Any] = Future()
        made.add_done_callback(lambda _: store.asked.set())

        def connect() -> None:
            try:
                made.set_result(ProcessGroupGloo(store, self.me, self.size, options))
            except BaseException as error:  # whatever it is: who waits for it raises it
                made.set_exception(error)

        threading.Thread(target=connect, name="monarch-gloo-connect", daemon=True).start()
        store.asked.wait()
        told: list[Any] = []
        try:
            if not made.done():
                told = self._tell_all({"listener": own, "values": store.own})
        finally:
            store.answer({key: value for entry in told for key, value in entry["values"].items()})
        listeners = [(host, port) for host, port in (entry["listener"] for entry in told)]
        try:
            while not wait([made], _LOOK.total_seconds()).done:
                self._look()
        except Aborted:
            for each in listening.connections(own, listeners):
                listening.cut(each)
            raise
        try:
            self._backend = made.result()
        except Exception as error:
            raise self._explained(error) from error
        return listeners

    def _tell_all(self, what: Any) -> list[Any]:
        """What each of the group says, JSON, over the mesh's own memory."""
        text = torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8)
        lengths = self._say([torch.tensor([text.numel()])])[0].tolist()
        padded = text.new_zeros(max(lengths))
        padded[: text.numel()] = text
        rows = self._say([padded])[0].view(self.size, -1)
        return [json.loads(bytes(row[:length].tolist())) for row, length in zip(rows, lengths, strict=True)]

    def _explained(self, error: Exception) -> Exception:
        """Gloo says that a connection has broken: why it has, once that is known here."""
        self._at.settle()
        line = LINE * (1 + self._group.peers[0])
        until = time.monotonic() + _EXPLAIN_SECONDS

        def check(seen: int) -> None:
            self._look()
            if time.monotonic() > until:
                raise MonarchError(f"{self._what} broke: {error}")

        try:
            self._at.signals.wait(line, 1 << 62, check)
        except (Aborted, MonarchError) as found:
            return found
        raise AssertionError("no progress word grows so large")


class _Rendezvous(Store):
    """What Gloo's workers leave for each other: all at once, told by others than Gloo's thread, which waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self.own: dict[str, str] = {}
        self.asked = threading.Event()
        """Gloo has left its own, and waits for the others'."""
        self._answered = threading.Event()
        self._all: dict[str, str] = {}

    def answer(self, values: dict[str, str]) -> None:
        """What there is now is all that there will be."""
        self._all = values
        self._answered.set()

    def set(self, key: str, value: Any) -> None:
        self.own[key] = bytes(value).hex()

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self._met()[key])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._met()

    def _met(self) -> dict[str, str]:
        self.asked.set()
        self._answered.wait()
        return self._all


def listen(address: str) -> tuple[Any, socket.socket]:
    """A device of Gloo's, and its listener: the only one that came with it."""
    for _ in range(_ATTEMPTS):
        before = listening.listeners()
        device = ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
        now = listening.listeners()
        made = [now.pop(inode) for inode in now.keys() - before.keys()]
        for other in (*before.values(), *now.values()):
            other.close()
        if len(made) == 1:
            return device, made[0]
        for other in made:  # another thread listens to something as well
            other.close()
    raise MonarchError(f"cannot tell where Gloo listens on {address}")


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(-1).view(torch.uint8)


def _ends(told: Any) -> list[listening.Ends]:
    return [((local[0], local[1]), (remote[0], remote[1])) for local, remote in told]
