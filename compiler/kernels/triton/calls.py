"""Calls of ATen's ops that templates run in a plan for a GPU: which, and their machine code.

A call stays in the plan as it is, as the meaning; its machine code is beside it. Calls of one op on tensors of the same
shapes and strides share theirs.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import fx

from monarch.compiler.cost.machine import MACHINES
from monarch.compiler.graph import Graph, args_of
from monarch.compiler.kernels.templates import CallCost, Template, templates
from monarch.compiler.kernels.tensors import tensors_of
from monarch.compiler.kernels.triton.ahead import cached, compiling, launch_binary
from monarch.compiler.kernels.triton.variants import MOST_VARIANTS
from monarch.compiler.loops.ir import Buffer
from monarch.compiler.plan.binaries import KernelBinary, TemplateCall
from monarch.compiler.plan.plan import Instruction, Plan, Slot
from monarch.compiler.types import DTYPE_NAMES


@dataclass(frozen=True)
class TemplateSite:
    """The calls of one op in a plan that one template can serve: equal arguments, with a `Buffer` for each tensor."""

    template: Template
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: tuple[Buffer, ...] = ()
    instructions: tuple[int, ...] = ()
    why: str = ""
    seconds: float = 0.0

    @property
    def inputs(self) -> tuple[Buffer, ...]:
        return tuple(each for each in (*self.args, *dict(self.kwargs).values()) if isinstance(each, Buffer))

    def made(self) -> tuple[list[Any], dict[str, Any], list[torch.Tensor]]:
        """The arguments on the meta device, and the tensors among them."""
        tensors: list[torch.Tensor] = []

        def real(value: Any) -> Any:
            if not isinstance(value, Buffer):
                return value
            tensors.append(torch.empty_strided(value.shape, value.strides, dtype=value.dtype, device="meta"))
            return tensors[-1]

        args = [real(each) for each in self.args]
        return args, {name: real(value) for name, value in self.kwargs}, tensors

    def binaries(self, target: str, version: str, folder: Path) -> list[KernelBinary]:
        """Machine code in each variant that fits the target, the template's first choice first; none where no
        variant fits."""
        args, kwargs, _ = self.made()
        found = []
        for number, variant in enumerate(self.template.variants(*args, **kwargs)[:MOST_VARIANTS]):
            binary = self.built(variant, target, version, folder)
            if all(launch.shared_bytes <= MACHINES[target].shared for launch in binary.launches):
                # The order is the template's own: by how much the others are slower is not estimated.
                found.append(replace(binary, seconds=0.0 if number else self.seconds))
        return found

    def built(self, variant: Any, target: str, version: str, folder: Path) -> KernelBinary:
        args, kwargs, tensors = self.made()
        results, launches = self.template.launches(variant, args, kwargs)
        names = {_place(tensor): f"a{number}" for number, tensor in enumerate(tensors)}
        names |= {_place(tensor): f"b{number}" for number, tensor in enumerate(results)}
        scratch: list[torch.Tensor] = []
        for launch in launches:
            for tensor in launch.tensors.values():
                if _place(tensor) not in names:
                    names[_place(tensor)] = f"s{len(scratch)}"
                    scratch.append(tensor)
        name = " and ".join(map(str, variant)) if isinstance(variant, tuple) else str(variant)
        of = TemplateCall(self.template.name, self.instructions, self.inputs, self.outputs, self.why)
        key = hashlib.sha256(repr((self.op, self.args, self.kwargs)).encode()).hexdigest()
        taken = [tuple(names[_place(tensor)] for tensor in launch.tensors.values()) for launch in launches]
        sizes = tuple((each.dtype, each.untyped_storage().nbytes() // each.itemsize) for each in scratch)

        def compiled() -> KernelBinary:
            with compiling(self.template.name, target):
                made = tuple(
                    launch_binary(launch.compile_fixed(target), launch.programs, pointers, tuple(launch.tiles.items()))
                    for launch, pointers in zip(launches, taken, strict=True)
                )
            return KernelBinary(key, made, sizes)

        parts = version, target, key, name, repr((taken, sizes)), *(launch.fingerprint for launch in launches)
        return replace(cached(folder, parts, key, compiled), variant=name, call=of)


def calls_of(plan: Plan, graph: Graph, when: str = "auto") -> list[TemplateSite]:
    """The calls of a plan that a template is to run: those that it takes and, where `when` is "auto", those for which
    it is estimated to be faster than ATen's op in parts. `graph` is that of the plan."""
    known = templates()
    if when == "off" or not any(each.op in known for each in plan.instructions):
        return []
    tensors = tensors_of(graph)
    places = [at for at, instruction in enumerate(plan.instructions) if instruction.op != "commit"]
    found: dict[object, TemplateSite | None] = {}
    for at, node in zip(places, graph.calls, strict=True):
        op = plan.instructions[at].op
        if op not in known:
            continue
        args, kwargs = _buffers(node, tensors)
        key = op, args, kwargs
        if key not in found:
            found[key] = _chosen(TemplateSite(known[op], op, args, kwargs), plan.target, when)
        if (call := found[key]) is None:
            continue
        call = found[key] = replace(call, instructions=(*call.instructions, at))
        for user in node.users:  # its results have the template's strides
            if user.target is operator.getitem:
                tensors[user] = call.outputs[args_of(user)[1]]
    return [call for call in found.values() if call is not None]


def _chosen(call: TemplateSite, target: str, when: str) -> TemplateSite | None:
    args, kwargs, _ = call.made()
    if call.template.refuses(*args, **kwargs):
        return None
    work = call.template.work(*args, **kwargs)
    ours, parts = _seconds(work, call.inputs[0].dtype, target)
    if when == "auto" and ours >= parts:
        return None
    results, _ = call.template.launches(call.template.variants(*args, **kwargs)[0], args, kwargs)
    outputs = tuple(Buffer(each.dtype, tuple(each.shape), each.stride()) for each in results)
    why = f"{ours * 1e6:.1f} us estimated; ATen's op in {work.parts} parts {parts * 1e6:.1f} us"
    return replace(call, outputs=outputs, why=why, seconds=ours)


def _buffers(node: fx.Node, tensors: Mapping[fx.Node, Buffer]) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    def buffer(value: Any) -> Any:
        return tensors[value] if isinstance(value, fx.Node) else value

    return tuple(map(buffer, args_of(node))), tuple((name, buffer(value)) for name, value in node.kwargs.items())


def _seconds(work: CallCost, dtype: torch.dtype, target: str) -> tuple[float, float]:
    """The estimated time of the template, and of the op in parts."""
    machine = MACHINES[target]
    rate = machine.rate(DTYPE_NAMES[dtype])
    ours = work.launches * machine.start + max(work.flops / (rate * work.reached), work.moved / machine.memory)
    parts = work.parts * machine.start + max(work.parts_flops / rate, work.parts_moved / machine.memory)
    return ours, parts


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor on the meta device begins: the storage that it shares with its views, and where in it."""
    return int(tensor.untyped_storage()._cdata), int(tensor.storage_offset())


def arguments(instruction: Instruction, tensors: Iterable[torch.Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """An instruction's arguments with tensors, in order, in place of slots."""
    given = iter(tensors)

    def real(value: Any) -> Any:
        return next(given) if isinstance(value, Slot) else value

    return [real(each) for each in instruction.args], {name: real(each) for name, each in instruction.kwargs.items()}
