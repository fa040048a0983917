"""What a step will take on a cluster, from the plan's report: nothing runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monarch.compiler.cost.cluster import Cluster
from monarch.compiler.inspect.values import report_of
from monarch.compiler.plan import Plan, Value
from monarch.compiler.plan.report import peak


@dataclass(frozen=True)
class Estimate:
    """One step of one worker.

    `seconds`        from its start to its end
    `computing`      of these, the seconds in which the worker computes
    `communicating`  the seconds of collectives by the mesh dims that they run over ("data", "model,data"), whether or
                     not the worker computes meanwhile
    `waiting`        seconds in which the worker waits for collectives, and does nothing else, by these mesh dims
    `sent`           bytes that it sends, by mesh dims
    `flops`          floating-point operations
    `used`           the part of the machine's peak rate that these come to
    `peak`           the most bytes that it holds at once
    `items`          what all workers take in a step: tokens, where an input is a batch of texts of numbers, or examples
    `unit`           "tokens" or "examples"; "" where there is no input with a dim
    """

    seconds: float
    computing: float
    communicating: dict[str, float]
    waiting: dict[str, float]
    sent: dict[str, int]
    flops: float
    used: float
    peak: int
    items: int
    unit: str


def estimate(plan: Plan, cluster: Cluster) -> Estimate:
    """The estimate for a plan whose report was made for `cluster` (`compile_graph(…, cluster=cluster)`).

    One worker's step is simulated: its instructions follow one another, and collectives follow one another on a lane of
    their own; one that is started ahead is waited for where its `wait` stands, any other at once. Raises MonarchError
    for a plan without a report.
    """
    values = report_of(plan).values
    ahead = {value.reads[0] for value in values if value.op == "wait" and value.reads}
    now = free = computing = 0.0
    ends: dict[int, tuple[float, str]] = {}
    waiting: dict[str, float] = {}
    communicating: dict[str, float] = {}
    sent: dict[str, int] = {}
    for number, value in enumerate(values):
        if value.mesh_dims:
            dims = ",".join(value.mesh_dims)
            communicating[dims] = communicating.get(dims, 0.0) + value.seconds
            sent[dims] = sent.get(dims, 0) + value.sent
            free = max(now, free) + value.seconds
            ends[number] = free, dims
            if number in ahead:
                continue
        if value.mesh_dims or value.op == "wait":
            until, dims = ends.get(number if value.mesh_dims else value.reads[0], (now, ""))
            if until > now:
                waiting[dims] = waiting.get(dims, 0.0) + until - now
                now = until
        else:
            computing += value.seconds
            now += value.seconds
    flops = sum(value.flops for value in values)
    items, unit = _items(values)
    most = max(
        (cluster.machine.rate(dtype) for dtype in _products(values)), default=cluster.machine.rate(torch.float32)
    )
    return Estimate(
        seconds=now,
        computing=computing,
        communicating=communicating,
        waiting=waiting,
        sent=sent,
        flops=flops,
        used=flops / now / most if now else 0.0,
        peak=peak(plan)[0],
        items=items,
        unit=unit,
    )


def _products(values: tuple[Value, ...]) -> set[torch.dtype]:
    """The dtypes of the ops that compute most: half of all operations or more."""
    by_dtype: dict[torch.dtype, float] = {}
    for value in values:
        if value.flops and value.types and value.types[0] is not None:
            dtype = value.types[0].dtype
            by_dtype[dtype] = by_dtype.get(dtype, 0.0) + value.flops
    return {max(by_dtype, key=lambda dtype: by_dtype[dtype])} if by_dtype else set()


def _items(values: tuple[Value, ...]) -> tuple[int, str]:
    shapes = [value.types[0] for value in values if value.op == "input" and value.types and value.types[0] is not None]
    for type_ in shapes:
        if type_.dtype == torch.int64 and type_.ndim == 2:
            return type_.shape[0] * type_.shape[1], "tokens"
    return next(((type_.shape[0], "examples") for type_ in shapes if type_.ndim), (0, ""))
