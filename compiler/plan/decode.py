"""Plans from the JSON values of `encode`, with everything that a file says checked on the way. Without torch: what runs
a plan reads it with `encode.TorchDecoder`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from monarch.compiler.errors import LayoutError, MonarchError
from monarch.compiler.layout import MeshSpec
from monarch.compiler.mesh import MeshShapeError, NDSlice, Shape
from monarch.compiler.plan.checks import Checks, short
from monarch.compiler.plan.container import (
    BINARIES,
    CODE,
    CONSTANTS,
    GRAPH,
    PROGRAM,
    REPORT,
    TRACED,
    hash_members,
    load_json,
)
from monarch.compiler.plan.decode_report import decode_report
from monarch.compiler.plan.options import (
    ANOMALIES,
    BACKENDS,
    DEFAULT_DTYPES,
    ROUNDINGS,
    TARGETS,
    CompileOptions,
    check_backend,
)
from monarch.compiler.plan.plan import ArenaRange, Instruction, Part, Plan, Slot, ValueSpec
from monarch.compiler.plan.report import Report
from monarch.compiler.plan.transfers import Transfer
from monarch.compiler.tensor_type import SEEN_DTYPES, TensorType

T = TypeVar("T")

MAX_DEPTH = 32
"""Of lists among an instruction's arguments."""

NOT_RUN = ("memory_limit", "rounding", "strict", "kernels", "redundancy", "anomaly")
"""Options that no worker needs."""

INPUT_KINDS = ("input", "state", "scalar", "seed")
OUTPUT_KINDS = ("return", "state")

_FLOATS = {"inf": math.inf, "-inf": -math.inf, "nan": math.nan}


class Decoder(Checks):
    """Reads what `encode_head` and `encode_instruction` gave. Raises PlanError with the file's name and the part.
    `dtypes` are what a name stands for: torch's, or what stands for these where nothing is run."""

    dtypes: Mapping[str, Any] = SEEN_DTYPES

    def constant(self, kind: str, value: str) -> Any:
        """A dtype, memory format, layout or device among an instruction's arguments."""
        return f"{kind} {value}"

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

    def dtype(self, head: dict[str, Any]) -> str:
        """PyTorch's default dtype for a plan's ops: that is said where it is not float32."""
        dtype = head.get("dtype", CompileOptions.dtype)
        if not isinstance(dtype, str) or dtype not in DEFAULT_DTYPES:
            self.fail(f"its default dtype is {short(dtype)}, not one of {', '.join(DEFAULT_DTYPES)}")
        return dtype

    def options(self, head: dict[str, Any], rest: Any) -> CompileOptions:
        """What `encode_head` and `encode_options` say of a plan's options."""
        target = self.target(head["target"])
        given = self.mapping(rest, "'options'")
        if unknown := given.keys() - set(NOT_RUN):
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
            dtype=self.dtype(head),
            **given,
        )

    def type(self, value: Any, mesh: MeshSpec, what: str) -> TensorType:
        dtype, sizes, layout = self.parts_of_type(value, what)
        type_ = TensorType(self.dtypes[dtype], sizes, layout)
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

    def region(self, value: Any) -> ArenaRange | None:
        if value is None:
            return None
        offset, dtype, shape = self.items(value, "a region", 3)
        if not isinstance(dtype, str) or dtype not in self.dtypes:
            self.fail(f"the dtype of a region is {short(dtype)}")
        sizes = tuple([self.integer(size, "a size of a region") for size in self.items(shape, "the shape of a region")])
        return ArenaRange(self.integer(offset, "the start of a region"), self.dtypes[dtype], sizes)

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
            if tag == "complex":
                try:
                    return complex(value)
                except ValueError:
                    self.fail(f"{short(value)} is no complex number")
            if tag in ("dtype", "memory_format", "layout", "device"):
                return self.constant(tag, value)
        self.fail(f"an argument is {short({tag: value})}, which no instruction takes")


_HEAD = (
    "name",
    "mesh",
    "target",
    "collectives",
    "inputs",
    "outputs",
    "slots",
    "arena",
    "donated",
    "constant_slots",
    "sources",
)


def plan_of_members(
    manifest: dict[str, Any], members: Mapping[str, bytes], constants: dict[str, Any], decoder: Decoder, *, report: bool
) -> Plan:
    """The plan of a file's manifest and members (see `container`), without machine code; if need be without its report.
    Raises PlanError."""
    rest = manifest.pop("options", {})  # where they are not the default's
    sizes = manifest.pop("sizes", None)
    decoder.mapping(manifest, "the manifest", ("plan", "hash", "costs"))
    head = manifest["plan"]
    # One array of all lines is read several times faster than line after line.
    lines = b"[" + members[PROGRAM].replace(b"\n", b",\n") + b"]"
    program = decoder.items(load_json(lines, f"{PROGRAM} of {decoder.name}"), PROGRAM)
    seen = load_json(members[REPORT], f"{REPORT} of {decoder.name}") if report else None
    plan = decode_plan(head, program, constants, decoder, rest)
    graph = decoder.text(members[GRAPH], GRAPH)
    costs = decoder.costs(manifest["costs"])
    if manifest["hash"] != hash_members(head, members[PROGRAM], members[CONSTANTS], (members[BINARIES], members[CODE])):
        decoder.fail("its hash is not that of what it holds")
    return replace(
        plan,
        graph=graph,
        traced=decoder.text(members[TRACED], TRACED),
        report=None if seen is None or plan.parts else _decode_report(seen, plan, decoder),
        parts=_with_reports(_with_costs(plan.parts, costs), graph, seen, decoder),
        sizes=sizes,
        costs=costs,
        hash=manifest["hash"],
    )


def decode_plan(
    head: Any,
    program: list[Any],
    constants: dict[str, Any],
    decoder: Decoder,
    rest: dict[str, Any],
    within: str = "",
    part: int = 0,
) -> Plan:
    """What a worker runs of a plan, or of a function or part of one: `within` names that among the constants, and
    `part` is the part's number."""
    if isinstance(head, dict) and "parts" in head:
        return _decode_parts(head, program, constants, decoder, rest)
    there = [key for key in ("cuda_graphs", "dtype", "functions") if isinstance(head, dict) and key in head]
    head = decoder.mapping(head, "the plan", (*_HEAD, *there))
    mesh = decoder.mesh(head["mesh"])
    slots = decoder.integer(head["slots"], "the number of slots", 0, 2**31)
    constant_slots = {
        label: decoder.integer(slot, f"the slot of constant {label!a}", 0, slots)
        for label, slot in decoder.mapping(head["constant_slots"], "'constant_slots'").items()
    }
    donated = decoder.items(head["donated"], "'donated'")
    if any(type(entry) is not bool for entry in donated):
        decoder.fail("'donated' holds something else than true and false")
    functions = decoder.mapping(head.get("functions", {}), "the functions")
    if within.count(WITHIN) >= MAX_DEPTH:
        decoder.fail(f"functions are nested more than {MAX_DEPTH} deep")
    made: dict[str, Plan] = {}
    for called, function in functions.items():
        entry, body = _taken_apart(function, f"function {called!a}", decoder)
        made[called] = decode_plan(entry, body, constants, decoder, rest, f"{within}{called}{WITHIN}")
    own = {
        label.removeprefix(within): tensor
        for label, tensor in constants.items()
        if label.startswith(within) and not any(label.startswith(f"{within}{called}{WITHIN}") for called in made)
    }
    if set(own) != set(constant_slots):
        decoder.fail("its constants are not those that it names slots for")
    return Plan(
        name=decoder.string(head["name"], "its name"),
        mesh=mesh,
        inputs=decoder.values(head["inputs"], mesh, slots, INPUT_KINDS, part),
        outputs=decoder.values(head["outputs"], mesh, slots, OUTPUT_KINDS, part),
        instructions=tuple([decoder.instruction(entry) for entry in program]),
        slots=slots,
        arena=decoder.integer(head["arena"], "the size of the arena"),
        donated=tuple(donated),
        constants={label: own[label] for label in constant_slots},
        constant_slots=constant_slots,
        sources=decoder.sources(head["sources"]),
        options=decoder.options({key: value for key, value in head.items() if key != "functions"}, rest),
        functions=made,
    )


def _taken_apart(value: Any, what: str, decoder: Decoder) -> tuple[dict[str, Any], list[Any]]:
    """The head and the instructions of a plan that another one holds."""
    head = dict(decoder.mapping(value, what))
    return head, decoder.items(head.pop("program", None), f"the program of {what}")


_PARTS = ("name", "mesh", "target", "collectives", "inputs", "outputs", "parts", "transfers")


def _decode_parts(
    head: dict[str, Any], program: list[Any], constants: dict[str, Any], decoder: Decoder, rest: dict[str, Any]
) -> Plan:
    """A plan of several parts."""
    decoder.mapping(head, "the plan", (*_PARTS, *(["dtype"] if "dtype" in head else [])))
    if program:
        decoder.fail("it has parts, and instructions of its own")
    parts: list[Part] = []
    for number, value in enumerate(decoder.items(head["parts"], "the parts")):
        name, place, whole = decoder.items(value, "a part", 3)
        name = decoder.string(name, "a part's name")
        if any(name == each.name for each in parts):
            decoder.fail(f"it has two parts named {name[:60]!a}")
        entry, body = _taken_apart(whole, f"part {name[:60]!a}", decoder)
        if "parts" in entry:
            decoder.fail(f"part {name[:60]!a} has parts of its own")
        plan = decode_plan(entry, body, constants, decoder, rest, f"{name}{WITHIN}", number)
        parts.append(Part(name, decoder.place(place, f"the place of part {name[:60]!a}"), plan))
    if any(not label.startswith(tuple(f"{part.name}{WITHIN}" for part in parts)) for label in constants):
        decoder.fail("its constants are not those that it names slots for")
    meshes = [part.plan.mesh for part in parts]
    return Plan(
        name=decoder.string(head["name"], "its name"),
        mesh=decoder.mesh(head["mesh"]),
        inputs=_joined([part.plan.inputs for part in parts], head["inputs"], "inputs", decoder),
        outputs=_joined([part.plan.outputs for part in parts], head["outputs"], "outputs", decoder),
        instructions=(),
        slots=0,
        donated=_joined([part.plan.donated for part in parts], head["inputs"], "inputs", decoder),
        options=decoder.options(head, rest),
        parts=tuple(parts),
        transfers=tuple(decoder.transfer(each, meshes) for each in decoder.items(head["transfers"], "the transfers")),
    )


def _joined(each: Sequence[tuple[T, ...]], order: Any, what: str, decoder: Decoder) -> tuple[T, ...]:
    """What the parts have each, in the order in which the numbers of the parts stand."""
    numbers = [decoder.integer(part, f"a part of its {what}", 0, len(each)) for part in decoder.items(order, what)]
    if any(numbers.count(part) != len(own) for part, own in enumerate(each)):
        decoder.fail(f"its {what} are not those of its parts")
    rest = [iter(own) for own in each]
    return tuple(next(rest[part]) for part in numbers)


WITHIN = "/"
"""Stands behind the name of a function or a part in the names of its constants."""


def _decode_report(seen: Any, plan: Plan, decoder: Decoder) -> Report:
    return decode_report(seen, decoder, plan.mesh, len(plan.instructions), len(plan.sources))


def _with_costs(parts: tuple[Part, ...], costs: dict[str, Any]) -> tuple[Part, ...]:
    """The parts with what each costs alone, where the costs of all have the form that the compiler gives them."""
    each = costs.get("parts")
    own = [each.get(part.name) if isinstance(each, dict) else None for part in parts]
    return tuple(
        replace(part, plan=replace(part.plan, costs=found)) if isinstance(found, dict) else part
        for part, found in zip(parts, own, strict=True)
    )


def _with_reports(parts: tuple[Part, ...], graph: str, seen: Any, decoder: Decoder) -> tuple[Part, ...]:
    """The parts with the text of each one's graph, of which the whole's consists, and with their reports."""
    texts = graph.split("\n\n")
    if len(texts) == len(parts):
        plans = (replace(part.plan, graph=text) for part, text in zip(parts, texts, strict=True))
        parts = tuple(replace(part, plan=plan) for part, plan in zip(parts, plans, strict=True))
    if seen is None or not parts:
        return parts
    reports = decoder.items(seen, "the reports of its parts", len(parts))
    return tuple(
        replace(part, plan=replace(part.plan, report=_decode_report(report, part.plan, decoder)))
        for part, report in zip(parts, reports, strict=True)
    )
