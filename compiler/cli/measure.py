"""`monarch doctor --measure FILE`: this machine as a description that `--machine` takes (compiler/cost/cluster.py).

The rates are those of a worker with a core, while all cores do the same: of matrix products, of attention, of copies in
memory, of starting an op, and of collectives between two workers. Each is the best of a few rounds, for what else runs
can only make a round longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F

import monarch
from monarch.compiler.cli.screen import console
from monarch.compiler.cost.cluster import load_cluster
from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect.timeline import steps_of
from monarch.compiler.types import DTYPES
from monarch.distributed import Mesh
from monarch.runtime.hosts.doctor.facts import Limits
from monarch.runtime.hosts.doctor.machine import look

_ROUNDS = 12
_PRODUCT = 512
_COPIED = 1 << 23
"""Elements of an f32 tensor that is copied, 32 MiB."""
_ATTENTION = 2, 4, 128, 64
_ATTENTION_FLOPS = 14.0 * 2 * 4 * 128 * 128 * 64
_SMALL, _LARGE = 2, 1 << 21
"""Elements of an f32 tensor that two workers gather: 8 bytes for the latency, and 8 MiB."""
_STEPS = 12


@dataclass(frozen=True)
class Rates:
    """One worker's speed: operations a second by dtype ("f32"), bytes a second to and from its memory, seconds to start
    an op; of collectives between workers bytes a second in one direction, and seconds for one of no bytes; and the part
    of the operations a second that attention reaches."""

    flops: dict[str, float]
    memory: float
    start: float
    bandwidth: float
    latency: float
    attention: float


def measure(path: Path) -> None:
    """Measure this machine, and write its description to `path`. Raises MonarchError where it cannot be written."""
    found = look()
    text = description(measure_rates(found.limits.cores), found.limits, found.system)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MonarchError(f"cannot write {path}: {error.strerror}", hint="give a path that can be written.") from None
    load_cluster(str(path))
    out = console(stderr=True)
    out.print(f"wrote {path}: this machine, for --machine {path}", soft_wrap=True)
    if found.gpus:
        out.print("  its GPUs were not measured: name a machine that ships, such as h100-8", soft_wrap=True)


def measure_rates(cores: int) -> Rates:
    """Starts a thread for each core, and a mesh of two workers for the collectives."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flops = {name: 2.0 * _PRODUCT**3 / _at_once(_product(DTYPES[name]), cores) for name in ("f32", "f64", "bf16")}
        memory = 2 * 4 * _COPIED / _at_once(_copy, cores)
        attention = _ATTENTION_FLOPS / _at_once(_attention, cores) / flops["f32"]
        start = _start()
    finally:
        torch.set_num_threads(threads)
    small, large = _gather_seconds(_SMALL), _gather_seconds(_LARGE)
    # A worker of two gets half of the gathered tensor from the other: see Cluster.collective_seconds.
    bandwidth = 4 * _LARGE / 2 / max(large - small, 1e-9)
    return Rates(flops, memory, start, bandwidth, small, min(1.0, attention))


def description(rates: Rates, limits: Limits, system: str) -> str:
    """The TOML file of a machine: its workers are its cores, and share its memory."""
    flops = ", ".join(f"{name} = {rate:.3g}" for name, rate in rates.flops.items())
    memory = min(limits.memory, limits.allowed or limits.memory)
    return f"""\
description = "This machine: {limits.cores} workers, a core each"
sources = ["monarch doctor --measure, {datetime.now(UTC):%Y-%m-%d}, {system.replace('"', "'")}"]
target = "cpu"
memory = {memory // limits.cores}            # of a worker: its share
memory_bandwidth = {rates.memory:.3g}
flops = {{ {flops} }}
attention = {rates.attention:.3g}
cores = {limits.cores}
start = {rates.start:.3g}

[[links]]
within = "this machine"
bandwidth = {rates.bandwidth:.3g}
latency = {rates.latency:.3g}
"""


def _product(dtype: torch.dtype) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        x = torch.ones(_PRODUCT, _PRODUCT, dtype=dtype)
        out = torch.empty_like(x)
        return lambda: torch.mm(x, x, out=out)

    return make


def _copy() -> Callable[[], object]:
    source, target = torch.ones(_COPIED), torch.zeros(_COPIED)
    return lambda: target.copy_(source)


def _attention() -> Callable[[], object]:
    """Attention and its gradients, as a training step has them."""
    q, k, v = (torch.ones(_ATTENTION, requires_grad=True) for _ in range(3))

    def run() -> object:
        return torch.autograd.grad(F.scaled_dot_product_attention(q, k, v).sum(), (q, k, v))

    return run


def _at_once(make: Callable[[], Callable[[], object]], cores: int) -> float:
    """Seconds that a call takes while as many threads as there are cores make one each: cores share the memory, and
    some of them a unit that multiplies. `make` gives a thread its own call. The slowest thread of the best round
    counts."""
    together = threading.Barrier(cores, timeout=60.0)  # of a thread that failed the others wait no longer

    def run() -> list[float]:
        torch.set_num_threads(1)
        call = make()
        call()
        found = []
        for _ in range(_ROUNDS):
            together.wait()
            begin = time.perf_counter()
            call()
            found.append(time.perf_counter() - begin)
        return found

    with ThreadPoolExecutor(cores) as pool:
        rounds = [each.result() for each in [pool.submit(run) for _ in range(cores)]]
    return min(map(max, zip(*rounds, strict=True)))


def _start() -> float:
    """Seconds of an op with nothing to do."""
    x = torch.ones(1)
    many = 200

    def run() -> None:
        for _ in range(many):
            x.add_(0)

    return _best(run) / many


def _best(call: Callable[[], object]) -> float:
    call()
    found = []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return min(found)


def _gather_seconds(elements: int) -> float:
    """Seconds in which two workers gather a tensor of so many elements that is sharded over them, without waiting for
    each other."""
    with Mesh(data=2) as mesh:
        sharded = monarch.distribute(torch.zeros(elements), mesh, "[@data]")

        @monarch.program
        def gather(x):  # type: ignore[no-untyped-def]
            return monarch.layout(x, "[-]")

        plan = gather.compile(sharded)
        gather(sharded).wait()
        with monarch.profile() as profile:
            for _ in range(_STEPS):
                gather(sharded).wait()
    times = [
        span.end - span.start - span.waited
        for step in steps_of(profile.trace, plan)
        for span in step.spans
        if span.instruction < len(plan.instructions) and plan.instructions[span.instruction].op == "all_gather"
    ]
    return min(times) * 1e-9
