"""What a worker holds in place of values that failed steps were to make, and what it sends to the controller."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from monarch.runtime.shared.wire import Report
from monarch.runtime.worker.tracing import Tracer


@dataclass(frozen=True)
class Missing:
    """Stands where a value would be, had command `root` not failed."""

    root: int
    committed: bool = False


GONE = Missing(-1)
"""What a handle stands for whose value another step has taken."""


@dataclass(frozen=True)
class Value:
    """A tensor on its way to the controller, for the FETCH command `step`."""

    step: int
    tensor: torch.Tensor


@dataclass(frozen=True)
class Count:
    """How many values this worker holds, for the COUNT command `step`."""

    step: int
    values: int


@dataclass(frozen=True)
class Buffer:
    """Where this worker writes what it measures, for the TRACE command `step`."""

    step: int
    tracer: Tracer


Message = Report | Value | Count | Buffer

__all__ = ["GONE", "Buffer", "Count", "Message", "Missing", "Value"]


@dataclass
class Snapshot:
    """This worker's values at one time, by handle, and blocks of other workers' values, by rank and handle."""

    values: dict[int, torch.Tensor]
    others: dict[tuple[int, int], torch.Tensor] = field(default_factory=dict)
