"""The marks that a worker keeps in place of values that failed steps were to make, and its messages to the controller.

The process that workers are forked from imports this at each start, and a named tuple takes a seventh of the time of a
frozen dataclass to define."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from monarch.runtime.shared.wire import Report
from monarch.runtime.worker.tracing import Tracer


@dataclass(frozen=True)
class Missing:
    """Stands where a value would be, had command `root` not failed."""

    root: int
    committed: bool = False


GONE = Missing(-1)
"""The mark of a handle whose value another step has taken."""


class Fetched(NamedTuple):
    """A tensor on its way to the controller, for the FETCH command `step`."""

    step: int
    tensor: torch.Tensor


class Count(NamedTuple):
    """How many values this worker holds, for the COUNT command `step`."""

    step: int
    values: int


class Buffer(NamedTuple):
    """The place where this worker writes its measurements, for the TRACE command `step`."""

    step: int
    tracer: Tracer


Message = Report | Fetched | Count | Buffer


class Snapshot(NamedTuple):
    """This worker's values at one time, by handle, and blocks of other workers' values, by rank and handle."""

    values: dict[int, torch.Tensor]
    others: dict[tuple[int, int], torch.Tensor]


__all__ = ["GONE", "Buffer", "Count", "Message", "Missing", "Snapshot", "Fetched"]
