"""A worker's memory as a schedule runs, from buffers that are followed through every instruction.

Each instruction is carried out on tensors without data of one worker's shapes (torch's meta device), so that which
results share a buffer with what they read (views, writes in place, a reshape that has to copy or has not) is what torch
itself does. A buffer counts from the instruction that makes it until nothing holds it: neither a slot of the frame nor
the worker, which keeps a program's inputs through the step and the states that the step replaces until the commit. What
an op takes while it runs is not counted, and each result of a collective is taken to have a buffer of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import Graph
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.ops.regions import regions_of
from monarch.compiler.plan.plan import Instruction, Slot
from monarch.compiler.schedule.schedule import Schedule
from monarch.compiler.text import find_op
from monarch.compiler.types import MeshSpec


@dataclass(frozen=True)
class Footprint:
    """Bytes that a worker takes and gives back: for each input (and constant) by slot, and for each instruction."""

    inputs: dict[int, int]
    takes: list[int]
    gives: list[int]

    @property
    def peak(self) -> tuple[int, int]:
        """The most bytes held at once, and the number of the first instruction at which they are; -1 for before all."""
        total = most = sum(self.inputs.values())
        at = -1
        for number, (taken, given) in enumerate(zip(self.takes, self.gives, strict=True)):
            total += taken
            if total > most:
                most, at = total, number
            total -= given
        return most, at


def footprint(schedule: Schedule) -> Footprint:
    """Follow a schedule's buffers."""
    with torch.no_grad():
        return _Follower(schedule).run()


def alive(schedule: Schedule, at: int) -> dict[int, int]:
    """The buffers that a worker holds as instruction `at` is done (-1: before all of them), before anything is freed
    behind it: bytes by the slot of the value that took them."""
    with torch.no_grad():
        follower = _Follower(schedule)
        follower.run(stop=at)
        return follower.alive


@dataclass
class _Follower:
    schedule: Schedule
    slots: dict[int, Any] = field(default_factory=dict)
    counts: dict[int, int] = field(default_factory=dict)
    """How many values refer to each buffer."""
    sizes: dict[int, int] = field(default_factory=dict)
    dead: list[int] = field(default_factory=list)
    """Sizes of the buffers that nothing holds any more."""
    kept: list[torch.Tensor] = field(default_factory=list)
    """The tensors that a worker keeps through the step: a buffer is known by its address, so it must not go."""
    takers: dict[int, int] = field(default_factory=dict)
    """The slot of the value that took each buffer."""

    @property
    def alive(self) -> dict[int, int]:
        found: dict[int, int] = {}
        for buffer, size in self.sizes.items():
            slot = self.takers[buffer]
            found[slot] = found.get(slot, 0) + size
        return found

    def run(self, stop: int | None = None) -> Footprint:
        """Follow the schedule, up to the end of instruction `stop`, by default to its end."""
        schedule, graph = self.schedule, self.schedule.graph
        calls = iter(schedule.calls)
        inputs: dict[int, int] = {}
        until_commit: list[torch.Tensor] = []
        for spec, donated in zip(schedule.inputs, schedule.donated, strict=True):
            value = _empty(spec.type.local_shape(graph.mesh), spec.type.dtype)
            inputs[spec.slot] = self.hold(value, spec.slot)
            self.slots[spec.slot] = value
            if spec.kind in ("input", "state"):
                self.hold(value, spec.slot)
                (until_commit if donated else self.kept).append(value)
        for label, slot in schedule.constant_slots.items():
            value = _empty(tuple(graph.constants[label].shape), graph.constants[label].dtype)
            inputs[slot] = self.hold(value, slot)
            self.hold(value, slot)
            self.kept.append(value)
            self.slots[slot] = value
        takes: list[int] = []
        gives: list[int] = []
        if stop == -1:
            return Footprint(inputs, takes, gives)
        for number, instruction in enumerate(schedule.instructions):
            taken = 0
            if instruction.op == "commit":
                for value in until_commit:
                    self.drop(value)
                until_commit = []
            else:
                call = next(calls)
                value = self.result(call, instruction)
                taken = self.hold(value, instruction.out)
                if call.target in ops.WITH_REGIONS:
                    within = max(map(_within, regions_of(graph, call)))
                    taken += within
                    self.dead.append(within)
                self.slots[instruction.out] = value
            if number == stop:
                break
            for slot in instruction.free:
                self.drop(self.slots.pop(slot, None))
            takes.append(taken)
            gives.append(sum(self.dead))
            self.dead = []
        return Footprint(inputs, takes, gives)

    # -- buffers ---------------------------------------------------------------------------------------------------

    def hold(self, value: Any, slot: int) -> int:
        """Hold a slot's buffers once more; gives the bytes of those that were not held before."""
        new = 0
        for tensor in _tensors(value):
            storage = tensor.untyped_storage()
            count = self.counts.get(storage._cdata, 0)
            self.counts[storage._cdata] = count + 1
            if not count:
                self.sizes[storage._cdata] = storage.nbytes()
                self.takers[storage._cdata] = slot
                new += storage.nbytes()
        return new

    def drop(self, value: Any) -> None:
        for tensor in _tensors(value):
            buffer = tensor.untyped_storage()._cdata
            self.counts[buffer] -= 1
            if not self.counts[buffer]:
                del self.counts[buffer]
                self.dead.append(self.sizes.pop(buffer))

    # -- ops -------------------------------------------------------------------------------------------------------

    def result(self, call: fx.Node, instruction: Instruction) -> Any:
        args = [self.filled(argument) for argument in instruction.args]
        kwargs = {name: self.filled(argument) for name, argument in instruction.kwargs.items()}
        try:
            with torch.device("meta"):
                return self.call(instruction.op, args, kwargs)
        except (NotImplementedError, RuntimeError, TypeError):
            # An op without a meta kernel, or one that looks at its data.
            made = [
                None if type_ is None else _empty(type_.local_shape(self.schedule.graph.mesh), type_.dtype)
                for type_ in (call.meta["type"] if isinstance(call.meta["type"], tuple) else (call.meta["type"],))
            ]
            return made[0] if len(made) == 1 and not gives_list(instruction.op) else made

    def call(self, op: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        mesh = self.schedule.graph.mesh
        if op == "getitem":
            return operator.getitem(*args)
        if op in _WITH_REGIONS:
            raise NotImplementedError
        if op in _COLLECTIVES:
            return _COLLECTIVES[op](mesh, *args, **kwargs)
        if op == "kernel":
            tensors, text, over = args
            made = [torch.empty_strided(b.shape, b.strides, dtype=b.dtype) for b in parse_kernel(text).outputs]
            return [result if at < 0 else tensors[at] for at, result in zip(over, made, strict=True)]
        if op == "send":
            return args[0]
        if op == "recv":
            return torch.empty(args[1], dtype=args[2])
        if op in LOCAL_OPS:
            # The last worker: where only the first keeps a value, the others make zeros of it.
            return LOCAL_OPS[op]({name: size - 1 for name, size in mesh.dims}, mesh.sizes, *args, **kwargs)
        return find_op(op)(*args, **kwargs)

    def filled(self, argument: Any) -> Any:
        if isinstance(argument, Slot):
            return self.slots[argument.index]
        if isinstance(argument, (list, tuple)):
            return [self.filled(each) for each in argument]
        return argument


_WITH_REGIONS = frozenset(op.name for op in ops.WITH_REGIONS)


def _within(region: Graph) -> int:
    """The peak of a region's memory, besides its operands."""
    schedule = Schedule(region.copy())
    found = footprint(schedule)
    return found.peak[0] - sum(found.inputs.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def gives_list(op: str) -> bool:
    known = op in _COLLECTIVES or op in _WITH_REGIONS or op in ("kernel", "out_of_place")
    return known or op not in LOCAL_OPS and len(find_op(op)._schema.returns) != 1


# -- collectives: their results on one worker -------------------------------------------------------------------------

Tensors = Sequence[torch.Tensor]


def _group(mesh: MeshSpec, mesh_dims: Sequence[str]) -> int:
    size = 1
    for name in mesh_dims:
        size *= mesh.sizes[name]
    return size


def _resized(tensor: torch.Tensor, grown: int | None, shrunk: int | None, k: int) -> torch.Tensor:
    shape = list(tensor.shape)
    if grown is not None:
        shape[grown] *= k
    if shrunk is not None:
        shape[shrunk] //= k
    return _empty(shape, tensor.dtype)


def _same(mesh: MeshSpec, tensors: Tensors, *rest: Any, **kwargs: Any) -> list[torch.Tensor]:
    return [_empty(tensor.shape, tensor.dtype) for tensor in tensors]


def _all_gather(mesh: MeshSpec, tensors: Tensors, mesh_dims: Sequence[str], dims: Sequence[int]) -> list[torch.Tensor]:
    k = _group(mesh, mesh_dims)
    return [_resized(tensor, dim, None, k) for tensor, dim in zip(tensors, dims, strict=True)]


def _reduce_scatter(
    mesh: MeshSpec, tensors: Tensors, mesh_dims: Sequence[str], dims: Sequence[int], reduction: str
) -> list[torch.Tensor]:
    k = _group(mesh, mesh_dims)
    return [_resized(tensor, None, dim, k) for tensor, dim in zip(tensors, dims, strict=True)]


def _all_to_all(
    mesh: MeshSpec, tensors: Tensors, mesh_dims: Sequence[str], source_dims: Sequence[int], target_dims: Sequence[int]
) -> list[torch.Tensor]:
    k = _group(mesh, mesh_dims)
    return [_resized(*each, k) for each in zip(tensors, source_dims, target_dims, strict=True)]


_COLLECTIVES: dict[str, Callable[..., list[torch.Tensor]]] = {
    "all_reduce": _same,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "broadcast": _same,
    "permute": _same,
    "wait": lambda mesh, pending, tensors: pending,
}
