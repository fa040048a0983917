"""The speed of machines, and the time of an op on one: the numbers behind every estimate.

Times are estimates from the hardware's peak rates, not measurements. An op takes the longer of its arithmetic at peak
and its memory traffic at full bandwidth (the roofline model: Williams, Waterman and Patterson, CACM 52(4), 2009), and a
fixed time to start it. A collective takes a fixed time and its bytes at the speed of the links (Hockney's model:
Parallel Computing 20(3), 1994). Real ops come to between a third and nearly all of that; the estimate is for comparing
values of one plan, and plans for one target.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from monarch.compiler.cost.link import Link


@dataclass(frozen=True)
class Machine:
    """The speed of one worker.

    `flops`     floating-point operations a second by dtype ("f32"), for matrix products; other dtypes go as f32
    `memory`    bytes a second to and from its own memory
    `link`      to the other workers of its host: its latency is that of a collective of no bytes at all (what a
                collective takes is `cluster.Cluster`'s to say)
    `start`     seconds to start an op
    `attention` the part of `flops` that attention comes to: between its products it computes exponentials
    `processors`  multiprocessors (of a GPU), and
    `shared`      the bytes of each one's own memory that one program may take
    """

    flops: Mapping[str, float]
    memory: float
    link: Link
    start: float
    processors: int = 1
    shared: int = 0
    attention: float = 1.0

    def slower(self, times: float) -> Machine:
        """One on which all takes so many times as long."""
        flops = {dtype: rate / times for dtype, rate in self.flops.items()}
        return replace(
            self, flops=flops, memory=self.memory / times, link=self.link.slower(times), start=self.start * times
        )

    def rate(self, dtype: str) -> float:
        """Floating-point operations a second in `dtype`."""
        return self.flops.get(dtype, self.flops["f32"])

    def op_seconds(self, dtype: str, flops: float, moved: float) -> float:
        """Seconds for an op that computes on the worker alone and moves so many bytes of its memory."""
        return self.start + max(flops / self.rate(dtype), moved / self.memory)


MACHINES: dict[str, Machine] = {
    # Multiprocessors of GPUs: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", and each
    # GPU's datasheet; of AMD's, compute units and their local data shares.
    #
    # One core with 256-bit fused multiply-adds at some 3 GHz (2 units, 8 lanes), and its share of the memory's speed.
    # Links and latency: this project's own collectives through shared memory, as benchmarks/results has them.
    "cpu": Machine({"f32": 96e9, "f64": 48e9, "bf16": 48e9}, 10e9, Link(6e9, 13e-6), 3e-6),
    # NVIDIA A100 Tensor Core GPU datasheet (SXM, 80 GB): dense rates; NVLink 600 GB/s, both directions together.
    "cuda:80": Machine(
        {"f32": 19.5e12, "f64": 19.5e12, "bf16": 312e12, "f16": 312e12},
        2.039e12,
        Link(300e9, 12e-6),
        4e-6,
        108,
        163 * 1024,
    ),
    # NVIDIA H100 Tensor Core GPU datasheet (SXM): dense rates; NVLink 900 GB/s, both directions together.
    "cuda:90": Machine(
        {"f32": 67e12, "f64": 67e12, "bf16": 989e12, "f16": 989e12},
        3.35e12,
        Link(450e9, 10e-6),
        4e-6,
        132,
        227 * 1024,
    ),
    # NVIDIA DGX B200 datasheet, divided by its eight GPUs: dense rates; NVLink 1.8 TB/s, both directions together.
    "cuda:100": Machine(
        {"f32": 75e12, "f64": 37e12, "bf16": 2250e12, "f16": 2250e12},
        8e12,
        Link(900e9, 10e-6),
        4e-6,
        148,
        227 * 1024,
    ),
    # AMD Instinct MI300X datasheet: dense matrix rates; seven Infinity Fabric links of 128 GB/s, both directions.
    "gfx942": Machine(
        {"f32": 163.4e12, "f64": 163.4e12, "bf16": 1307e12, "f16": 1307e12},
        5.3e12,
        Link(448e9, 15e-6),
        6e-6,
        304,
        64 * 1024,
    ),
}

BALANCED = Machine({"f32": 4.0}, memory=10.0, link=Link(bandwidth=1.0, latency=64.0), start=0.0)
"""The machine for which the partitioner chooses layouts, whatever a plan is compiled for: its unit of time is that in
which a worker sends a byte. A CPU worker does some 10 to 50 floating-point operations in that time, a GPU hundreds; 4
also keeps tensor parallelism in the narrowest models from being traded for gathered weights."""
