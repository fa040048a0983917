"""How long an op takes: an estimate from what the hardware can do at most, not a measurement.

An op takes the longer of its arithmetic at peak and its memory traffic at full bandwidth (the roofline model: Williams,
Waterman and Patterson, CACM 52(4), 2009), and a fixed time to start it. A collective takes a fixed time and its bytes
at the speed of the links (Hockney's model). Real ops come to between a third and nearly all of that; the estimate is
for comparing values of one plan, and plans for one target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Machine:
    """What one worker can do.

    `flops`     floating-point operations a second by dtype, for matrix products; other dtypes go as f32
    `memory`    bytes a second to and from its own memory
    `link`      bytes a second to other workers, in one direction
    `start`     seconds to start an op
    `latency`   seconds that a collective takes for no bytes at all
    `processors`  multiprocessors (of a GPU), and
    `shared`      the bytes of each one's own memory that one program may take
    """

    flops: Mapping[torch.dtype, float]
    memory: float
    link: float
    start: float
    latency: float
    processors: int = 1
    shared: int = 0


MACHINES: dict[str, Machine] = {
    # Multiprocessors of GPUs: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and each
    # GPU's datasheet; of AMD's, compute units and their local data shares.
    #
    # One core with 256-bit fused multiply-adds at some 3 GHz (2 units, 8 lanes), and its share of the memory's speed.
    # Links and latency: this project's own collectives through shared memory, as benchmarks/results has them.
    "cpu": Machine({torch.float32: 96e9, torch.float64: 48e9, torch.bfloat16: 48e9}, 10e9, 6e9, 3e-6, 13e-6),
    # NVIDIA A100 Tensor Core GPU datasheet (SXM, 80 GB): dense rates; NVLink 600 GB/s, both directions together.
    "cuda:80": Machine(
        {torch.float32: 19.5e12, torch.float64: 19.5e12, torch.bfloat16: 312e12, torch.float16: 312e12},
        2.039e12,
        300e9,
        4e-6,
        12e-6,
        108,
        163 * 1024,
    ),
    # NVIDIA H100 Tensor Core GPU datasheet (SXM): dense rates; NVLink 900 GB/s, both directions together.
    "cuda:90": Machine(
        {torch.float32: 67e12, torch.float64: 67e12, torch.bfloat16: 989e12, torch.float16: 989e12},
        3.35e12,
        450e9,
        4e-6,
        10e-6,
        132,
        227 * 1024,
    ),
    # NVIDIA DGX B200 datasheet, divided by its eight GPUs: dense rates; NVLink 1.8 TB/s, both directions together.
    "cuda:100": Machine(
        {torch.float32: 75e12, torch.float64: 37e12, torch.bfloat16: 2250e12, torch.float16: 2250e12},
        8e12,
        900e9,
        4e-6,
        10e-6,
        148,
        227 * 1024,
    ),
    # AMD Instinct MI300X datasheet: dense matrix rates; seven Infinity Fabric links of 128 GB/s, both directions.
    "gfx942": Machine(
        {torch.float32: 163.4e12, torch.float64: 163.4e12, torch.bfloat16: 1307e12, torch.float16: 1307e12},
        5.3e12,
        448e9,
        6e-6,
        15e-6,
        304,
        64 * 1024,
    ),
}

GPUS = tuple(target for target in MACHINES if target != "cpu")

_PASSES = {"all_reduce": 2.0, "permute": 1.0, "broadcast": 1.0}
"""How often a collective moves a tensor over a link; for the others it is the part of it that is not a worker's own."""


def op_seconds(target: str, dtype: torch.dtype, flops: float, moved: int) -> float:
    """Seconds for an op that computes on the worker alone."""
    machine = MACHINES[target]
    rate = machine.flops.get(dtype, machine.flops[torch.float32])
    return machine.start + max(flops / rate, moved / machine.memory)


def collective_seconds(target: str, op: str, sent: int, workers: int) -> float:
    """Seconds for a collective of `sent` bytes (as `Value.sent`) among so many workers."""
    if workers == 1:
        return op_seconds(target, torch.float32, 0.0, 2 * sent)
    machine = MACHINES[target]
    share = 1.0 if op in ("permute", "broadcast") else (workers - 1) / workers
    return machine.latency + _PASSES.get(op, 1.0) * share * sent / machine.link
