"""Tensors that a worker and the actors of its process give each other: loans of values, and tensors that actors
return."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from monarch.runtime.shared import wire
from monarch.runtime.shared.place import ranks_of
from monarch.runtime.shared.wire import Report
from monarch.runtime.worker.exchange import Actors, Loan
from monarch.runtime.worker.loaded import LoadedPlan
from monarch.runtime.worker.messages import Message, Missing


class Lending:
    """The commands LEND and ADOPT of `WorkerState`, and what follows for steps that write in place."""

    rank: int
    values: dict[int, torch.Tensor | Missing]
    actors: Actors | None
    seen: dict[int, list[weakref.ref[Any]] | None]
    """Values that actors may see: as long as one of these lives, or (None) for ever."""
    _donated: list[int]

    def _lend(self, step: int, body: bytearray) -> list[Message]:
        _, token, count, *rest = wire.unpack_numbers(body)
        messages = rest[count:][self.rank]
        if messages:
            assert self.actors is not None
            self.actors.lend(token, [self._loan(handle) for handle in rest[:count]], messages)
        return []

    def _loan(self, handle: int) -> Loan | str:
        value = self.values[handle]
        if isinstance(value, Missing):
            return f"command {value.root}, which was to make it, failed"
        loan = Loan(value.cpu())
        held = loan.held() if value.device.type == "cpu" else None  # or else it is a copy
        known = self.seen.get(handle, [])
        if held is not None and known is not None:
            self.seen[handle] = [*(ref for ref in known if ref() is not None), held]
        return loan

    def _adopt(self, step: int, body: bytearray) -> list[Message]:
        _, token, base, count, *place = wire.unpack_numbers(body)
        if place and self.rank not in ranks_of(place):
            return []
        assert self.actors is not None
        try:
            tensors = self.actors.adopt(token)
        except KeyError:
            for handle in range(base, base + count):
                self.values[handle] = Missing(step)
            return [Report("failed", self.rank, step, "an actor's result for a program has been freed")]
        for handle, tensor in enumerate(tensors, base):
            self.values[handle] = tensor
            self.seen[handle] = None
        return []

    def _part_from_actors(self, plan: LoadedPlan, arguments: list[Any]) -> None:
        """Values that the step may write in place, and that an actor may see, are copied for the step."""
        for at, handle in zip(plan.donated, self._donated, strict=True):
            if handle in self.seen:
                seen = self.seen[handle]
                if seen is None or any(ref() is not None for ref in seen):
                    arguments[at] = arguments[at].clone()
