"""The `.mplan` file: a plan as bytes, ahead of time or on the way to the workers.

A file holds (see `container` for the bytes):

    manifest               JSON: name, mesh, target, inputs, outputs, slots, source lines, costs, the plan's hash; and
                           what serves other values of named sizes, where it does
    program.jsonl          one instruction a line, a JSON array each (see `encode`)
    graph.txt              the partitioned graph, for people
    traced.txt             the traced graph, on which the passes can be run again; empty where it was not kept
    report.json            what the compiler knows of each value (see `encode_report`); null where it was not kept
    constants.safetensors  the constants' tensors
    binaries.json          machine code of its kernels for a GPU, and how it is launched (see `binaries`); often none
    binaries.bin           the bytes that the former lists

No pickle, nothing compressed. Loading reads and checks; it runs nothing and imports nothing. The bytes are the same for
the same plan.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors

from monarch.compiler.errors import PlanError
from monarch.compiler.plan.binaries import decode_binaries, encode_binaries
from monarch.compiler.plan.check import check_plan
from monarch.compiler.plan.container import (
    AGAIN,
    BINARIES,
    CODE,
    CONSTANTS,
    GRAPH,
    MEMBERS,
    PROGRAM,
    REPORT,
    TRACED,
    dump_json,
    load_json,
    seal,
    unseal,
)
from monarch.compiler.plan.decode_report import decode_report
from monarch.compiler.plan.encode import MAX_DEPTH, Decoder, encode_head, encode_instruction, encode_options
from monarch.compiler.plan.encode_report import encode_report
from monarch.compiler.plan.look import read_file
from monarch.compiler.plan.plan import Part, Plan
from monarch.compiler.plan.report import Report
from monarch.compiler.types import DTYPE_NAMES

T = TypeVar("T")

INPUT_KINDS = ("input", "state", "scalar", "seed")
OUTPUT_KINDS = ("return", "state")


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan as one `.mplan` file: all of it or, on an error, nothing. Raises PlanError."""
    data = plan_bytes(plan)
    target = Path(path)
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}.", delete=False) as file:
            try:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(file.name, 0o644)
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise
    except OSError as error:
        raise PlanError(
            f"cannot write {target}: {error.strerror or error}", hint="give a path that can be written."
        ) from None


def load_plan(path: str | os.PathLike[str], *, report: bool = True) -> Plan:
    """Read a `.mplan` file; without its report, which takes as long as all else, where nobody looks at it. Raises
    PlanError where it is truncated, edited, of another version, or no plan."""
    source = Path(path)
    data = read_file(source)
    return plan_from_bytes(data, name=source.name, report=report)


def plan_bytes(plan: Plan) -> bytes:
    """A plan as the bytes of its file, the same for the same plan. Raises PlanError for one that could not be run."""
    head, program, constants = _parts(plan)
    binaries = encode_binaries(plan.binaries)
    check_plan(plan, Decoder(f"plan '{plan.name}'").fail)
    report = dump_json(_encode_reports(plan)).encode("ascii")
    try:
        manifest = {"plan": head, "hash": _hash(head, program, constants, binaries), "costs": plan.costs}
        if options := encode_options(plan):
            manifest["options"] = options
        if plan.sizes is not None:
            manifest["sizes"] = plan.sizes
        contents = (program, plan.graph.encode(), plan.traced.encode(), report, constants, *binaries)
        return seal(manifest, dict(zip(MEMBERS, contents, strict=True)))
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"the costs of plan '{plan.name}' are not JSON: {error}",
            hint="they hold numbers, strings, lists and dicts.",
        ) from None


def plan_from_bytes(data: bytes, name: str = "the plan", *, report: bool = True) -> Plan:
    """The plan that `plan_bytes` wrote, if need be without its report; `name` is what errors call it. Raises
    PlanError."""
    manifest, members = unseal(data, name, MEMBERS)
    decoder = Decoder(name)
    rest = manifest.pop("options", {})  # where they are not the default's
    sizes = manifest.pop("sizes", None)
    decoder.mapping(manifest, "the manifest", ("plan", "hash", "costs"))
    head = manifest["plan"]
    constants = _load_constants(members[CONSTANTS], decoder)
    program = _load_program(members[PROGRAM], decoder)
    seen = load_json(members[REPORT], f"{REPORT} of {name}") if report else None
    plan = _decode(head, program, constants, decoder, rest)
    graph = decoder.text(members[GRAPH], GRAPH)
    costs = decoder.costs(manifest["costs"])
    plan = replace(
        plan,
        graph=graph,
        traced=decoder.text(members[TRACED], TRACED),
        report=None if seen is None or plan.parts else _decode_report(seen, plan, decoder),
        parts=_with_reports(_with_costs(plan.parts, costs), graph, seen, decoder),
        binaries=decode_binaries(members[BINARIES], members[CODE], decoder),
        sizes=sizes,
        costs=costs,
        hash=manifest["hash"],
    )
    if manifest["hash"] != _hash(head, members[PROGRAM], members[CONSTANTS], (members[BINARIES], members[CODE])):
        decoder.fail("its hash is not that of what it holds")
    check_plan(plan, decoder.fail)
    return plan


def plan_of_json(head: Any, program: list[Any], constants: dict[str, torch.Tensor], decoder: Decoder) -> Plan:
    """The plan of a head and instructions as `encode` writes them, checked as a file's is. Raises PlanError."""
    made = _decode(head, program, constants, decoder, {})
    check_plan(made, decoder.fail)
    return replace(made, hash=hash_of(made))


def _encode_reports(plan: Plan) -> Any:
    """A plan's report; of one with parts, a list of theirs."""
    if plan.parts and any(part.plan.report is not None for part in plan.parts):
        return [_encode_reports(part.plan) for part in plan.parts]
    return None if plan.report is None else encode_report(plan.report)


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


def _decode(
    head: Any,
    program: list[Any],
    constants: dict[str, torch.Tensor],
    decoder: Decoder,
    rest: dict[str, Any],
    within: str = "",
    part: int = 0,
) -> Plan:
    """What a worker runs of a plan, or of a function or part of one: `within` names that among the constants, and
    `part` is the part's number."""
    if isinstance(head, dict) and "parts" in head:
        return _decode_parts(head, program, constants, decoder, rest)
    there = [key for key in ("cuda_graphs", "functions") if isinstance(head, dict) and key in head]
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
    if within.count(_WITHIN) >= MAX_DEPTH:
        decoder.fail(f"functions are nested more than {MAX_DEPTH} deep")
    made: dict[str, Plan] = {}
    for called, function in functions.items():
        entry, body = _taken_apart(function, f"function {called!a}", decoder)
        made[called] = _decode(entry, body, constants, decoder, rest, f"{within}{called}{_WITHIN}")
    own = {
        label.removeprefix(within): tensor
        for label, tensor in constants.items()
        if label.startswith(within) and not any(label.startswith(f"{within}{called}{_WITHIN}") for called in made)
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
    head: dict[str, Any], program: list[Any], constants: dict[str, torch.Tensor], decoder: Decoder, rest: dict[str, Any]
) -> Plan:
    """A plan of several parts."""
    decoder.mapping(head, "the plan", _PARTS)
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
        plan = _decode(entry, body, constants, decoder, rest, f"{name}{_WITHIN}", number)
        parts.append(Part(name, decoder.place(place, f"the place of part {name[:60]!a}"), plan))
    if any(not label.startswith(tuple(f"{part.name}{_WITHIN}" for part in parts)) for label in constants):
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


_WITHIN = "/"
"""Stands behind the name of a function or a part in the names of its constants."""


def hash_of(plan: Plan) -> str:
    """The SHA-256, in hex, of what a worker runs or tells of a plan: all but its graphs' texts, report and costs."""
    return _hash(*_parts(plan), encode_binaries(plan.binaries))


def _parts(plan: Plan) -> tuple[dict[str, Any], bytes, bytes]:
    program = "\n".join(dump_json(encode_instruction(instruction)) for instruction in plan.instructions)
    return encode_head(plan), program.encode("ascii"), _save_constants(plan)


def _hash(head: dict[str, Any], program: bytes, constants: bytes, binaries: tuple[bytes, bytes] = (b"[]", b"")) -> str:
    digest = hashlib.sha256(dump_json(head).encode("ascii"))
    for part in (program, constants, *(binaries if binaries != (b"[]", b"") else ())):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def _load_program(data: bytes, decoder: Decoder) -> list[Any]:
    # One array of all lines is read several times faster than line after line.
    lines = data.replace(b"\n", b",\n")
    return decoder.items(load_json(b"[" + lines + b"]", f"{PROGRAM} of {decoder.name}"), PROGRAM)


def _save_constants(plan: Plan) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for label, tensor in _all_constants(plan):
        if tensor.dtype not in DTYPE_NAMES:
            raise PlanError(f"constant '{label}' is of {tensor.dtype}, which a plan cannot hold")
        whole = tensor.detach().cpu().contiguous()
        if whole.is_complex():  # the format has not all complex dtypes
            label, whole = f"{_COMPLEX}{label}", torch.view_as_real(whole.resolve_conj())
        storage = whole.untyped_storage().data_ptr()
        tensors[label] = whole.clone() if storage in storages else whole  # the format has no shared memory
        storages.add(storage)
    return save_tensors(tensors)


def _all_constants(plan: Plan, within: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The constants of a plan and of its functions or parts, by names that tell whose they are."""
    yield from ((f"{within}{label}", tensor) for label, tensor in plan.constants.items())
    for part in plan.parts:
        yield from _all_constants(part.plan, f"{part.name}{_WITHIN}")
    for name, function in plan.functions.items():
        yield from _all_constants(function, f"{within}{name}{_WITHIN}")


def _load_constants(data: bytes, decoder: Decoder) -> dict[str, torch.Tensor]:
    try:
        tensors = load_tensors(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise PlanError(f"the constants of {decoder.name} cannot be read: {error}", hint=AGAIN) from None
    found = {}
    for label, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            decoder.fail(f"constant {label!a} is of {tensor.dtype}")
        if label.startswith(_COMPLEX):
            if tensor.dtype not in (torch.float32, torch.float64) or tensor.shape[-1:] != (2,):
                decoder.fail(f"constant {label!a} is {list(tensor.shape)} of {tensor.dtype}, not pairs of numbers")
            tensor = torch.view_as_complex(tensor)
        found[label.removeprefix(_COMPLEX)] = tensor
    return found


_COMPLEX = "complex "
"""How the name of a constant begins that is stored as pairs: the real and the imaginary part of each number."""
