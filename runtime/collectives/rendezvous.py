"""A store in the mesh's own memory, in which libraries of `torch.distributed` exchange values while they connect.

Such a library takes a store that all of a group's workers share. This one is each worker's own: a worker's values go to
its peers at once, by another thread than the library's, which waits for the peers' values. It listens on no port, and
no other process can reach it.
"""

from __future__ import annotations

import threading
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import Store


class Rendezvous(Store):
    """The values that the workers of one group exchange, once, while they connect. `says_least` is the size of a value
    with which a worker has stored all that it will store, also if it asks for nothing (the worker that makes up NCCL's
    id): it goes on when the others have it. Without it a worker has stored all when it first asks."""

    def __init__(self, says_least: int | None = None) -> None:
        super().__init__()
        self.own: dict[str, str] = {}
        self.asked = threading.Event()
        """The library has left its own, and waits for the others'."""
        self._says_least = says_least
        self._answered = threading.Event()
        self._all: dict[str, str] = {}

    def answer(self, values: dict[str, str]) -> None:
        """All values are there: no worker adds another."""
        self._all = values
        self._answered.set()

    # -- called by a library ---------------------------------------------------------------------------------------

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
