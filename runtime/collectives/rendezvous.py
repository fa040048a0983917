"""Where the libraries of `torch.distributed` leave values for each other while they connect: the mesh's own memory.

Such a library takes a store that all of a group's workers share. This one is each worker's own: what a worker leaves in
it its peers are told at once, by others than the library's thread, which waits for what they have told. There is
nothing to listen to, and nobody else can reach it.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store


class Rendezvous(Store):
    """What the workers of one group leave for each other, once, while they connect.

    `says_least` is how many bytes a value has with which a worker has said all that it will say, also if it asks for
    nothing (the worker that makes up NCCL's id): it goes on when the others know it. Without it a worker has when it
    first asks.
    """

    def __init__(self, says_least: int | None = None) -> None:
        super().__init__()
        self.own: dict[str, str] = {}
        self.asked = threading.Event()
        """The library has left its own, and waits for the others'."""
        self._says_least = says_least
        self._answered = threading.Event()
        self._all: dict[str, str] = {}

    def answer(self, values: dict[str, str]) -> None:
        """What there is now is all that there will be."""
        self._all = values
        self._answered.set()

    # -- what a library calls --------------------------------------------------------------------------------------

    def set(self, key: str, value: Any) -> None:
        data = value.encode() if isinstance(value, str) else bytes(value)
        self.own[key] = data.hex()
        if self._says_least is not None and len(data) >= self._says_least and key not in self._met():
            raise RuntimeError("the others of the group have not come")

    def get(self, key: str) -> bytes:
        return bytes.fromhex(self._met()[key])

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._met()

    def check(self, keys: list[str]) -> bool:
        return all(key in self._all or key in self.own for key in keys)

    def clone(self) -> Rendezvous:
        return self  # there is no connection of which a thread would need its own

    def _met(self) -> dict[str, str]:
        self.asked.set()
        self._answered.wait()
        return self._all
