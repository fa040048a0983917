"""The variants of a plan's kernels, measured on the GPU that they are for."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from monarch.compiler.errors import MonarchError
from monarch.compiler.loops.interpret import moved
from monarch.compiler.loops.ir import Buffer, Kernel
from monarch.compiler.plan.binaries import KernelBinary, TemplateCall, kernels_of
from monarch.compiler.plan.file import hash_of
from monarch.compiler.plan.plan import Plan
from monarch.runtime.worker.device.load import GpuKernel

Measure = Callable[[Kernel | TemplateCall, KernelBinary], float]
"""Seconds of one call of a kernel in one variant; infinity where it does not run."""

Fastest = Callable[[Sequence[KernelBinary], Callable[[KernelBinary], float]], KernelBinary]
"""Which of some variants is the fastest, by measuring each as often as it takes."""

_LAUNCHES = 20


def tuned(
    plan: Plan, measure: Measure, fastest: Fastest, told: Callable[[KernelBinary], None] = lambda best: None
) -> Plan:
    """The plan with the fastest variant of each kernel first, and the measurements. A kernel of which there is one
    variant is not measured."""
    kernels = kernels_of(plan)
    groups: dict[str, list[KernelBinary]] = {}
    for binary in plan.binaries:
        groups.setdefault(binary.kernel, []).append(binary)
    made: list[KernelBinary] = []
    for variants in groups.values():
        if len(variants) == 1:
            made += variants
            continue
        times: dict[str, list[float]] = {}

        def measured(variant: KernelBinary, times: dict[str, list[float]] = times) -> float:
            seconds = measure(variant.call or kernels[variant.kernel], variant)
            times.setdefault(variant.variant, []).append(seconds)
            return seconds

        best = fastest(variants, measured)
        order = [best, *(each for each in variants if each is not best)]
        done = [_noted(each, times.get(each.variant, [])) for each in order]
        told(done[0])
        made += done
    plan = replace(plan, binaries=tuple(made))
    return replace(plan, hash=hash_of(plan))


def _noted(binary: KernelBinary, times: Sequence[float]) -> KernelBinary:
    """A variant and its measured time. One that does not run has no time."""
    seconds = statistics.median(times) if times else 0.0
    known = 0.0 < seconds < float("inf")
    return replace(binary, seconds=seconds if known else 0.0, measured=known)


def gpu_for(target: str) -> torch.device:
    """The GPU of this process, which has to be of the plan's target. Raises MonarchError where there is none."""
    if not torch.cuda.is_available():
        raise MonarchError(
            "variants of kernels are measured on a GPU, and torch finds none here",
            hint=f"run this on a machine that the plan's target {target} names, with a build of torch for it.",
        )
    if target.startswith("cuda:"):
        here = "cuda:{}{}".format(*torch.cuda.get_device_capability())
    else:
        here = torch.cuda.get_device_properties(0).gcnArchName.partition(":")[0]
    if here != target:
        raise MonarchError(f"the plan is for {target}, and the GPU here is {here}", hint="compile it for that target.")
    return torch.device("cuda", torch.cuda.current_device())


def on_gpu(device: torch.device) -> Measure:
    """Seconds of a call on the device, of several in a row on random operands."""

    from triton.runtime.errors import OutOfResources

    def measure(kernel: Kernel | TemplateCall, binary: KernelBinary) -> float:
        tensors = [example(buffer, device) for buffer in kernel.inputs]
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        try:
            run = GpuKernel(kernel, binary, device)
            for _ in range(3):
                run(tensors)
        except OutOfResources:
            return float("inf")
        start.record()
        for _ in range(_LAUNCHES):
            run(tensors)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / _LAUNCHES

    return measure


def example(buffer: Buffer, device: torch.device) -> torch.Tensor:
    """A tensor with this shape and these strides: random numbers, or zeros of an integer dtype, which are valid indices
    everywhere."""
    tensor = torch.zeros(buffer.shape, dtype=buffer.dtype, device=device)
    return moved(tensor.normal_(0.0, 0.1) if buffer.dtype.is_floating_point else tensor, buffer.strides)
