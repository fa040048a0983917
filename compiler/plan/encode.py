"""Plans as JSON values, and back, with everything that a file says checked on the way.

Instruction arguments: a Slot is `{"$": index}`, a dtype `{"dtype": "f32"}`, an infinity or nan `{"float": "inf"}`; a
complex number `{"complex": "(1+2j)"}`; a memory format, layout or device is `{"memory_format": …}`, `{"layout": …}`,
`{"device": …}`. The rest stand for themselves; ints and floats stay apart, for JSON writes 1 and 1.0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from monarch.compiler.errors import LayoutError, MonarchError, PlanError, Source
from monarch.compiler.mesh import MeshShapeError, NDSlice, Shape
from monarch.compiler.names import CONSTANT_NAMES, CONSTANTS
from monarch.compiler.plan.checks import Checks, short
from monarch.compiler.plan.options import ANOMALIES, BACKENDS, ROUNDINGS, TARGETS, CompileOptions, check_backend
from monarch.compiler.plan.plan import Instruction, Plan, Region, Slot, ValueSpec
from monarch.compiler.plan.transfers import Transfer
from monarch.compiler.types import DTYPE_NAMES, DTYPES, MeshSpec, TensorType

MAX_DEPTH = 32
"""Of lists among an instruction's arguments."""


# -- to JSON ---------------------------------------------------------------------------------------------------------


def encode_head(plan: Plan) -> dict[str, Any]:
    """Everything of a plan that a worker needs but its instructions and constants."""
    if plan.parts:
        return _encode_parts(plan)
    return {
        "name": plan.name,
        "mesh": [list(dim) for dim in plan.mesh.dims],
        "target": plan.target,
        "collectives": plan.collectives,
        **({"cuda_graphs": True} if plan.cuda_graphs else {}),
        "inputs": [_encode_value(spec) for spec in plan.inputs],
        "outputs": [_encode_value(spec) for spec in plan.outputs],
        "slots": plan.slots,
        "arena": plan.arena,
        "donated": list(plan.donated),
        "constant_slots": dict(plan.constant_slots),
        "sources": [_encode_source(source) for source in plan.sources],
        **({"functions": _encode_functions(plan)} if plan.functions else {}),
    }


def _encode_functions(plan: Plan) -> dict[str, Any]:
    return {name: _encode_whole(function) for name, function in plan.functions.items()}


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
    return {key: value for key in _NOT_RUN if (value := getattr(plan.options, key)) != getattr(CompileOptions, key)}


_NOT_RUN = ("memory_limit", "rounding", "strict", "kernels", "redundancy", "anomaly")


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
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, complex):
        return {"complex": str(value)}
    if isinstance(value, list | tuple):
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
_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


# -- from JSON -------------------------------------------------------------------------------------------------------


class Decoder(Checks):
    """Reads what `encode_head` and `encode_instruction` gave. Raises PlanError with the file's name and the part."""

    def target(self, value: Any) -> str:
        if value not in TARGETS if isinstance(value, str) else True:
            self.fail(f"its target is {short(value)}, not one of {', '.join(TARGETS)}")
        return str(value)

    def collectives(self, value: Any, target: str) -> str:
        """What moves a plan's tensors."""
        if not isinstance(value, str):
            self.fail(f"its collectives are {short(value)}, not one of {', '.join(BACKENDS)}")
        try:
            check_backend(value, target)
        except MonarchError as error:
            self.fail(error.message)
        return value

    def cuda_graphs(self, head: dict[str, Any], target: str) -> bool:
        """Whether a plan is recorded as CUDA graphs: that is said where it is so."""
        if "cuda_graphs" not in head:
            return False
        if head["cuda_graphs"] is not True or not target.startswith("cuda:"):
            self.fail(f"its CUDA graphs are {short(head['cuda_graphs'])}, and it is for {target}")
        return True

    def options(self, head: dict[str, Any], rest: Any) -> CompileOptions:
        """What `encode_head` and `encode_options` say of a plan's options."""
        target = self.target(head["target"])
        given = self.mapping(rest, "'options'")
        if unknown := given.keys() - set(_NOT_RUN):
            self.fail(f"its options have {', '.join(map(short, sorted(unknown)))}")
        if "memory_limit" in given:
            self.integer(given["memory_limit"], "its memory limit", 1)
        if given.get("strict", True) is not True:
            self.fail(f"its option 'strict' is {short(given['strict'])}")
        if given.get("redundancy", 1) != 1:
            self.fail(f"its option 'redundancy' is {short(given['redundancy'])}")
        for key, known in (("rounding", ROUNDINGS), ("kernels", ("auto", "all", "off")), ("anomaly", ANOMALIES[1:])):
            if key in given and self.string(given[key], f"its option '{key}'") not in known:
                self.fail(f"its option '{key}' is {short(given[key])}, not one of {', '.join(known)}")
        return CompileOptions(
            target=target,
            collectives=self.collectives(head["collectives"], target),
            cuda_graphs=self.cuda_graphs(head, target),
            **given,
        )

    def type(self, value: Any, mesh: MeshSpec, what: str) -> TensorType:
        dtype, sizes, layout = self.parts_of_type(value, what)
        type_ = TensorType(DTYPES[dtype], sizes, layout)
        try:
            type_.check(mesh, what)
        except LayoutError as error:
            self.fail(error.message)
        return type_

    def padded_type(self, value: Any, mesh: MeshSpec, what: str) -> TensorType:
        """A type whose sizes have padding in them, and how much of each is that."""
        *plain, padding = self.items(value, f"the type of {what}", 6)
        type_ = self.type(plain, mesh, what)
        pads = self.items(padding, f"the padding of {what}")
        if pads and len(pads) != type_.ndim:
            self.fail(f"the padding of {what} is {short(pads)}, and it has {type_.ndim} dims")
        found = tuple(
            self.integer(pad, f"the padding of {what}", 0, size + 1)
            for pad, size in zip(pads, type_.shape, strict=bool(pads))
        )
        return TensorType(type_.dtype, type_.shape, type_.layout, found)

    def values(
        self, value: Any, mesh: MeshSpec, slots: int, kinds: Sequence[str], part: int = 0
    ) -> tuple[ValueSpec, ...]:
        """Inputs or outputs: each of one of `kinds`, in a slot below `slots`, of part number `part`."""
        specs = []
        for entry in self.items(value, "the list of inputs or outputs"):
            kind, label, type_, slot = self.items(entry, "an input or output", 4)
            if kind not in kinds:
                self.fail(f"an input or output is {short(kind)}, not one of {', '.join(kinds)}")
            if type(label) not in (int, str):
                self.fail(f"the label of an input or output is {short(label)}")
            what = f"{kind} {short(label)}"
            type_, slot = self.type(type_, mesh, what), self.integer(slot, f"the slot of {what}", 0, slots)
            specs.append(ValueSpec(kind, label, type_, slot, part))
        return tuple(specs)

    def place(self, value: Any, what: str) -> Shape:
        """Which workers a part has."""
        labels, offset, sizes, strides = self.items(value, what, 4)
        sizes = [self.integer(size, f"a size of {what}", 1, 2**31) for size in self.items(sizes, what)]
        strides = [self.integer(stride, f"a stride of {what}", 1, 2**31) for stride in self.items(strides, what)]
        first = self.integer(offset, f"the first worker of {what}", 0, 2**31)
        try:
            return Shape(self.strings(labels, what), NDSlice(offset=first, sizes=sizes, strides=strides))
        except MeshShapeError as error:
            self.fail(f"{what} cannot be: {error.message}")

    def transfer(self, value: Any, meshes: Sequence[MeshSpec]) -> Transfer:
        """A transfer between two of the parts, whose meshes these are."""
        source, target, sent, received, name, line = self.items(value, "a transfer", 6)
        ends = [self.integer(end, "a part of a transfer", 0, len(meshes)) for end in (source, target)]
        text = self.string(name, "a transfer's name")
        what = f"transfer {short(text)}"
        return Transfer(
            ends[0],
            ends[1],
            self.padded_type(sent, meshes[ends[0]], f"{what} as it is sent"),
            self.padded_type(received, meshes[ends[1]], f"{what} as it is received"),
            text,
            None if line is None else self.source(line),
        )

    def costs(self, value: Any, depth: int = 0) -> dict[str, Any]:
        """Free JSON, of some depth."""
        if depth == 0:
            self.mapping(value, "'costs'")
        if depth > MAX_DEPTH:
            self.fail(f"'costs' nests more than {MAX_DEPTH} deep")
        if type(value) in (dict, list):
            for entry in value.values() if type(value) is dict else value:
                self.costs(entry, depth + 1)
        return value

    def instruction(self, value: Any) -> Instruction:
        op, args, kwargs, out, free, source, regions = self.items(value, "an instruction", 7)
        self.string(op, "an instruction's op")
        return Instruction(
            op,
            tuple([self.argument(entry) for entry in self.items(args, f"the arguments of {short(op)}")]),
            {key: self.argument(entry) for key, entry in self.mapping(kwargs, f"the arguments of {short(op)}").items()},
            out,
            tuple(self.items(free, f"the freed slots of {short(op)}")),
            source,
            tuple([self.region(entry) for entry in self.items(regions, f"the regions of {short(op)}")]),
        )

    def region(self, value: Any) -> Region | None:
        if value is None:
            return None
        offset, dtype, shape = self.items(value, "a region", 3)
        if not isinstance(dtype, str) or dtype not in DTYPES:
            self.fail(f"the dtype of a region is {short(dtype)}")
        sizes = tuple([self.integer(size, "a size of a region") for size in self.items(shape, "the shape of a region")])
        return Region(self.integer(offset, "the start of a region"), DTYPES[dtype], sizes)

    def argument(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind is dict and len(value) == 1:
            return self.tagged(*next(iter(value.items())))
        if kind is list:
            if depth >= MAX_DEPTH:
                self.fail(f"lists are nested more than {MAX_DEPTH} deep")
            return [self.argument(entry, depth + 1) for entry in value]
        if kind is int and not -(2**63) <= value < 2**64:
            self.fail("a number is too large")
        if value is None or kind in (int, float, bool, str):
            return value
        self.fail(f"an argument is {short(value)}, which no instruction takes")

    def tagged(self, tag: str, value: Any) -> Any:
        if tag == "$" and type(value) is int:
            return Slot(value)
        if isinstance(value, str):
            if tag == "float" and value in _FLOATS:
                return _FLOATS[value]
            if tag in _KINDS and isinstance(CONSTANTS.get(value), _KINDS[tag]):
                return CONSTANTS[value]
            if tag == "complex":
                try:
                    return complex(value)
                except ValueError:
                    self.fail(f"{short(value)} is no complex number")
            if tag == "device":
                try:
                    return torch.device(value)
                except (RuntimeError, UnicodeError):
                    self.fail(f"{short(value)} is no device")
        self.fail(f"an argument is {short({tag: value})}, which no instruction takes")
