"""Plans written by hand: what the tests of the runtime run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monarch.compiler.plan import Instruction, Layout, MeshSpec, Plan, Slot, Source, TensorType, ValueSpec


class Building:
    """Collects a plan's inputs, instructions and outputs."""

    def __init__(self, mesh: MeshSpec, name: str = "test") -> None:
        self.mesh = mesh
        self.name = name
        self._inputs: list[ValueSpec] = []
        self._donated: list[bool] = []
        self._outputs: list[ValueSpec] = []
        self._instructions: list[Instruction] = []
        self._sources: list[Source] = []
        self._constants: dict[str, torch.Tensor] = {}
        self._constant_slots: dict[str, int] = {}
        self._slots = 0

    def _slot(self) -> int:
        self._slots += 1
        return self._slots - 1

    def input(
        self, type: TensorType, kind: str = "input", label: str | int | None = None, donate: bool = False
    ) -> Slot:
        slot = self._slot()
        self._inputs.append(ValueSpec(kind, len(self._inputs) if label is None else label, type, slot))
        self._donated.append(donate)
        return Slot(slot)

    def constant(self, label: str, tensor: torch.Tensor) -> Slot:
        slot = self._slot()
        self._constants[label] = tensor
        self._constant_slots[label] = slot
        return Slot(slot)

    def call(
        self,
        op: str,
        *args: Any,
        free: Sequence[Slot] = (),
        source: Source | None = None,
        into: Slot | None = None,
        **kwargs: Any,
    ) -> Slot:
        slot = self._slot() if into is None else into.index
        where = -1
        if source is not None:
            self._sources.append(source)
            where = len(self._sources) - 1
        frees = tuple(each.index for each in free)
        self._instructions.append(Instruction(op, args, kwargs, slot, frees, where))
        return Slot(slot)

    def output(self, slot: Slot, type: TensorType, kind: str = "return", label: str | int | None = None) -> None:
        self._outputs.append(ValueSpec(kind, len(self._outputs) if label is None else label, type, slot.index))

    def plan(self) -> Plan:
        return Plan(
            self.name,
            self.mesh,
            tuple(self._inputs),
            tuple(self._outputs),
            tuple(self._instructions),
            self._slots,
            tuple(self._donated),
            self._constants,
            self._constant_slots,
            tuple(self._sources),
        )


def whole(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> TensorType:
    """A replicated tensor."""
    return TensorType(dtype, tuple(shape))


def each(mesh: MeshSpec, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> TensorType:
    """A tensor whose dim 0 is sharded over the whole mesh: worker i holds rows i of what is stacked; `shape` is
    global."""
    return TensorType(dtype, tuple(shape), Layout((mesh.names, *((),) * (len(shape) - 1))))


def stacked(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """The global tensor of type `each` of which worker i holds `blocks[i]`, with a leading dim of 1."""
    return torch.stack(list(blocks))


def op_on_each(
    mesh: MeshSpec, op: str, blocks: Sequence[Sequence[torch.Tensor]], *args: Any
) -> tuple[Plan, list[torch.Tensor]]:
    """A plan that runs a collective on a list of tensors, and its inputs: `blocks[i][r]` is worker r's tensor i."""
    build = Building(mesh, op)
    slots, inputs = [], []
    for per_worker in blocks:
        tensor = stacked(per_worker)
        slot = build.input(each(mesh, tensor.shape, tensor.dtype))
        slots.append(build.call("aten.select.int", slot, 0, 0))
        inputs.append(tensor)
    result = build.call(op, slots, *args)
    for at in range(len(blocks)):
        item = build.call("getitem", result, at)
        build.output(item, whole((), blocks[at][0].dtype))
    return build.plan(), inputs
