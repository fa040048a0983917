"""Plans as JSON values, and back, with everything that a file says checked on the way.

Instruction arguments: a Slot is `{"$": index}`, a dtype `{"dtype": "f32"}`, an infinity or nan `{"float": "inf"}`; a
complex number `{"complex": "(1+2j)"}`; a memory format, layout or device is `{"memory_format": …}`, `{"layout": …}`,
`{"device": …}`. The rest stand for themselves; ints and floats stay apart, for JSON writes 1 and 1.0.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from monarch.compiler.errors import PlanError, Source
from monarch.compiler.mesh import Shape
from monarch.compiler.names import CONSTANT_NAMES, CONSTANTS
from monarch.compiler.plan.checks import short
from monarch.compiler.plan.decode import NOT_RUN, Decoder
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.plan import Instruction, Plan, Slot, ValueSpec
from monarch.compiler.plan.transfers import Transfer
from monarch.compiler.types import DTYPE_NAMES, DTYPES, TensorType


def encode_head(plan: Plan) -> dict[str, Any]:
    """Everything of a plan that a worker needs but its instructions and constants."""
    if plan.parts:
        return _encode_parts(plan)
    functions = {name: _encode_whole(function) for name, function in plan.functions.items()}
    return {
        "name": plan.name,
        "mesh": [list(dim) for dim in plan.mesh.dims],
        "target": plan.target,
        "collectives": plan.collectives,
        **({"cuda_graphs": True} if plan.cuda_graphs else {}),
        **_encode_dtype(plan),
        "inputs": [_encode_value(spec) for spec in plan.inputs],
        "outputs": [_encode_value(spec) for spec in plan.outputs],
        "slots": plan.slots,
        "arena": plan.arena,
        "donated": list(plan.donated),
        "constant_slots": dict(plan.constant_slots),
        "sources": [_encode_source(source) for source in plan.sources],
        **({"functions": functions} if functions else {}),
    }


def _encode_dtype(plan: Plan) -> dict[str, str]:
    """PyTorch's default dtype, where it is not float32."""
    return {"dtype": plan.options.dtype} if plan.options.dtype != CompileOptions.dtype else {}


def _encode_whole(plan: Plan) -> dict[str, Any]:
    """A plan that another one holds, with its instructions."""
    return {**encode_head(plan), "program": [encode_instruction(each) for each in plan.instructions]}


def _encode_parts(plan: Plan) -> dict[str, Any]:
    """The head of a plan of several parts. Its inputs and outputs are given by their parts' numbers: each is the next
    one of that part."""
    return {
        "name": plan.name,
        "mesh": [list(dim) for dim in plan.mesh.dims],
        "target": plan.target,
        "collectives": plan.collectives,
        **_encode_dtype(plan),
        "inputs": [spec.part for spec in plan.inputs],
        "outputs": [spec.part for spec in plan.outputs],
        "parts": [[part.name, _encode_place(part.place), _encode_whole(part.plan)] for part in plan.parts],
        "transfers": [_encode_transfer(transfer) for transfer in plan.transfers],
    }


def _encode_place(place: Shape) -> list[Any]:
    """`[labels, offset, sizes, strides]`."""
    return [place.labels, place.ndslice.offset, place.ndslice.sizes, place.ndslice.strides]


def _encode_transfer(transfer: Transfer) -> list[Any]:
    types = [[*encode_type(type_), list(type_.padding)] for type_ in (transfer.sent, transfer.received)]
    line = transfer.line and _encode_source(transfer.line)
    return [transfer.source, transfer.target, *types, transfer.name, line]


def _encode_source(source: Source) -> list[Any]:
    caller = source.caller and _encode_source(source.caller)
    return [source.file, source.line, source.column, source.end_column, caller]


def encode_options(plan: Plan) -> dict[str, Any]:
    """The options that are not the default's and no worker needs: "memory_limit", "rounding", "strict", "kernels",
    "redundancy", "anomaly"."""
    return {key: value for key in NOT_RUN if (value := getattr(plan.options, key)) != getattr(CompileOptions, key)}


def _encode_value(spec: ValueSpec) -> list[Any]:
    return [spec.kind, spec.label, encode_type(spec.type), spec.slot]


def encode_type(type_: TensorType) -> list[Any]:
    """`[dtype, shape, shards, partial, varying]`."""
    layout = type_.layout
    partial = [list(entry) for entry in layout.partial]
    shards = [list(names) for names in layout.shards]
    return [DTYPE_NAMES[type_.dtype], list(type_.shape), shards, partial, list(layout.varying)]


def encode_instruction(instruction: Instruction) -> list[Any]:
    """`[op, args, kwargs, out, free, source, regions]`. Raises PlanError for an argument that a plan cannot hold."""
    return [
        instruction.op,
        [_encode(argument, instruction) for argument in instruction.args],
        {key: _encode(value, instruction) for key, value in instruction.kwargs.items()},
        instruction.out,
        list(instruction.free),
        instruction.source,
        [at and [at.offset, DTYPE_NAMES[at.dtype], list(at.shape)] for at in instruction.regions],
    ]


def _encode(value: Any, instruction: Instruction) -> Any:
    if isinstance(value, Slot):
        return {"$": value.index}
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": str(value)}
    if isinstance(value, (list, tuple)):
        return [_encode(entry, instruction) for entry in value]
    if isinstance(value, torch.device):
        return {"device": str(value)}
    for kind, type_ in _KINDS.items():
        if isinstance(value, type_) and value in CONSTANT_NAMES:
            return {kind: CONSTANT_NAMES[value]}
    raise PlanError(
        f"an argument of {instruction.op} cannot stand in a plan: {value!r} ({type(value).__name__})",
        hint="arguments are slots, numbers, bools, strings, None, dtypes, and lists of these.",
    )


_KINDS: dict[str, type] = {"dtype": torch.dtype, "memory_format": torch.memory_format, "layout": torch.layout}


class TorchDecoder(Decoder):
    """Reads plans that can be run: their dtypes are torch's."""

    dtypes = DTYPES

    def constant(self, kind: str, value: str) -> Any:
        if kind == "device":
            try:
                return torch.device(value)
            except (RuntimeError, UnicodeError):
                self.fail(f"{short(value)} is no device")
        if not isinstance(found := CONSTANTS.get(value), _KINDS[kind]):
            self.fail(f"an argument is {short({kind: value})}, which no instruction takes")
        return found
