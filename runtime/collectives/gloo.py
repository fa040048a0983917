"""A worker's place in a process group of Gloo's, and moving bytes in it.

Gloo listens, and takes the first that connects: `listening` checks which processes are connected.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions, BroadcastOptions, ProcessGroupGloo

from monarch.compiler.plan import MonarchError
from monarch.runtime.collectives import listening
from monarch.runtime.collectives.membership import LOOK_SECONDS, Membership
from monarch.runtime.collectives.rendezvous import Rendezvous

if TYPE_CHECKING:
    from monarch.runtime.collectives.collectives import Collectives

_CONNECT = timedelta(minutes=5)  # on a loaded machine; who waits for it hears of a failed peer meanwhile
_FOR_EVER = timedelta(days=365)  # who waits for a worker that fails looks up, and is woken
_LOOK = timedelta(seconds=LOOK_SECONDS)
_ATTEMPTS = 8


class GlooMembership(Membership):
    """This worker's place in the process group of the workers along some mesh dims."""

    joining = 4  # which worker listens where, and which are connected

    def __init__(self, collectives: Collectives, mesh_dims: Sequence[str], address: str) -> None:
        super().__init__(collectives, mesh_dims)
        self._address = address
        self.backend: Any = None
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
        """Send each worker so many bytes of `given`, in order, and take so many from each."""
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
            work = start(self.backend)
            while not self._ended(work):
                self.look()
            work.wait()
        except RuntimeError as error:
            raise self.explained(error) from error

    @staticmethod
    def _ended(work: Any) -> bool:
        """After a while, or when it has."""
        try:
            work.wait(_LOOK)
        except RuntimeError:  # the while is over, or it has failed
            return bool(work.is_completed())
        return True

    # -- making and leaving ----------------------------------------------------------------------------------------

    def _cut(self) -> None:
        while self._connections:
            listening.cut(self._connections.pop())
        self.backend = None

    def _join(self) -> None:
        device, listener = listen(self._address)
        try:
            own = listener.getsockname()[:2]
            store = Rendezvous()
            options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stubs have other names
            options._devices, options._threads, options._timeout = [device], 1, _CONNECT

            def connect() -> Any:
                return ProcessGroupGloo(store, self.me, self.size, options)

            def give_up(told: list[dict[str, Any]]) -> None:
                for each in listening.connections(own, _listeners(told)):
                    listening.cut(each)

            self.backend, told = self._connected(store, connect, {"listener": own}, give_up)
            self._connections = listening.connections(own, _listeners(told))
            ends = [ends for each in self._connections if (ends := listening.ends_of(each)) is not None]
            if (wrong := listening.stranger_among([_ends(entry) for entry in self._tell_all(ends)])) is not None:
                raise MonarchError(
                    f"{self._what} was not used: {wrong}",
                    hint="another process on this machine or network has connected to it. The next step tries again.",
                )
            listening.hear_nobody(listener)
        finally:
            listener.close()


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


def _listeners(told: list[dict[str, Any]]) -> list[listening.Address]:
    return [(host, port) for host, port in (entry["listener"] for entry in told)]
