"""A plan for GPUs, made ready for one. It differs from a plan on a CPU in three things.

- Generated kernels, and the templates that were chosen for calls, are the machine code that the plan carries, in its
  first variant.
- Ops that make tensors from nothing make them on the device.
- A call of attention that no template takes is computed in parts. It stands in the graph as the op that ATen has for
  CPUs, whatever the target.

Not yet run on a GPU: its tests stand in for the driver.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from monarch.compiler.attention import IN_PARTS
from monarch.compiler.errors import PlanError
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.plan.binaries import KernelBinary, kernel_hash
from monarch.compiler.plan.plan import Instruction, Plan, Slot
from monarch.runtime.worker.device.load import GpuKernel

Bind = Callable[..., Callable[..., Any]]
Tensors = Sequence[torch.Tensor]


def device_for(plan: Plan, worker: int) -> torch.device:
    """The GPU on which a worker of a host runs a plan: they take turns. Raises PlanError where there is none, or
    another."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise PlanError(
            f"plan '{plan.name}' is compiled for {plan.target}, and torch finds no GPU here",
            hint="run it where there is one, with a torch that is built for it; or compile it for CPUs.",
        )
    number = worker % count
    if plan.target.startswith("cuda:"):
        here = "cuda:{}{}".format(*torch.cuda.get_device_capability(number))
    else:
        here = torch.cuda.get_device_properties(number).gcnArchName.partition(":")[0]
    if here != plan.target:
        raise PlanError(
            f"plan '{plan.name}' is compiled for {plan.target}, and GPU {number} here is {here}",
            hint=f"compile it for that: --target {here}, or @monarch.program(target={here!r}).",
        )
    return torch.device("cuda", number)


class OnGpu:
    """A plan on one device. `plan` is the one that a frame runs there, with its constants on the device, and
    `binds(rest)` binds its ops: `rest` has the collectives and the commit."""

    def __init__(self, plan: Plan, device: torch.device) -> None:
        if plan.target == "cpu":
            raise PlanError(f"plan '{plan.name}' is for CPUs", hint="compile it for the GPU: --target cuda:90.")
        self.device = device
        self._binaries: dict[str, KernelBinary] = {}
        for binary in plan.binaries:
            self._binaries.setdefault(binary.kernel, binary)
        self._calls = {at: each for each in self._binaries.values() if each.call for at in each.call.instructions}
        self._loaded: dict[tuple[str, tuple[int, ...]], Any] = {}
        self._made: list[Callable[[Tensors], Any]] = []
        self.plan = replace(
            plan,
            instructions=tuple(self._here(at, instruction) for at, instruction in enumerate(plan.instructions)),
            constants={name: constant.to(device) for name, constant in plan.constants.items()},
        )

    def binds(self, rest: Bind) -> Bind:
        def bind(name: str, *arguments: Any) -> Callable[..., Any]:
            if name == "kernel":
                text, over = arguments
                return self._made[int(text)] if text.isdigit() else self._kernel(text, tuple(over))
            bound = rest(name, *arguments)
            return partial(_within, self.device, bound) if name in LOCAL_OPS else bound

        return bind

    def check(self) -> None:
        """Wait for the device. Raises IndexError, with the user's line, where an index was out of range since the last
        check."""
        gathering = [kernel for kernel in self._loaded.values() if kernel.binary.gathers]
        if gathering:
            found = torch.cat([kernel.error for kernel in gathering]).tolist()  # waits once, not for each
            if any(found):
                self.forget()
                raise next(kernel.failure(number) for kernel, number in zip(gathering, found, strict=True) if number)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def forget(self) -> None:
        """Indices that were out of range in a step that has failed are no matter of the next."""
        for kernel in self._loaded.values():
            if kernel.binary.gathers:
                kernel.error.zero_()

    # -- instructions ----------------------------------------------------------------------------------------------

    def _here(self, at: int, instruction: Instruction) -> Instruction:
        """The instruction as it runs on the device."""
        op = instruction.op
        if at in self._calls:
            binary = self._calls[at]
            run = self._load(binary, binary.call, (-1,) * len(binary.call.outputs) if binary.call else ())
            return self._taken(instruction, run if _returns_several(op) else lambda tensors: run(tensors)[0])
        if op in IN_PARTS:
            return self._taken(instruction, partial(_with_arguments, IN_PARTS[op], instruction))
        if op.startswith(("aten.", "prims.")) and _takes_device(op):
            return replace(instruction, kwargs={**instruction.kwargs, "device": self.device})
        return instruction

    def _taken(self, instruction: Instruction, run: Callable[[Tensors], Any]) -> Instruction:
        """An instruction that calls `run` with the tensors among the arguments: as a frame calls kernels."""
        self._made.append(run)
        slots = [value for value in (*instruction.args, *instruction.kwargs.values()) if isinstance(value, Slot)]
        return replace(instruction, op="kernel", args=(slots, str(len(self._made) - 1), ()), kwargs={})

    def _kernel(self, text: str, over: tuple[int, ...]) -> Callable[[Tensors], tuple[torch.Tensor, ...]]:
        kernel = parse_kernel(text)
        key = kernel_hash(kernel)
        if key not in self._binaries:
            raise PlanError(
                f"plan '{self.plan.name}' has no machine code for kernel {kernel.name}",
                hint=f"compile it for {self.plan.target} where triton is installed: pip install triton==3.6.0.",
            )
        return self._load(self._binaries[key], kernel, over)

    def _load(
        self, binary: KernelBinary, of: Any, over: tuple[int, ...]
    ) -> Callable[[Tensors], tuple[torch.Tensor, ...]]:
        if (binary.kernel, over) not in self._loaded:
            self._loaded[binary.kernel, over] = GpuKernel(of, binary, self.device, over)
        loaded: Callable[[Tensors], tuple[torch.Tensor, ...]] = self._loaded[binary.kernel, over]
        return loaded


def _within(device: torch.device, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with device:
        return function(*args, **kwargs)


def _with_arguments(function: Callable[..., Any], instruction: Instruction, tensors: Tensors) -> Any:
    """Call with the instruction's arguments, tensors in the places of slots."""
    given = iter(tensors)
    args, kwargs = (
        [next(given) if isinstance(value, Slot) else value for value in values]
        for values in (instruction.args, instruction.kwargs.values())
    )
    return function(*args, **dict(zip(instruction.kwargs, kwargs, strict=True)))


def _schema(op: str) -> torch.FunctionSchema:
    namespace, name, overload = op.split(".")
    found: torch.FunctionSchema = getattr(getattr(getattr(torch.ops, namespace), name), overload)._schema
    return found


def _takes_device(op: str) -> bool:
    return any(argument.name == "device" for argument in _schema(op).arguments)


def _returns_several(op: str) -> bool:
    return len(_schema(op).returns) > 1
