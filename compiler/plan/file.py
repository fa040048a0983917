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

import os
import tempfile
from collections.abc import Iterator
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
    MEMBERS,
    dump_json,
    hash_members,
    seal,
    unseal,
)
from monarch.compiler.plan.decode import WITHIN, decode_plan, plan_of_members
from monarch.compiler.plan.encode import TorchDecoder, encode_head, encode_instruction, encode_options
from monarch.compiler.plan.encode_report import encode_report
from monarch.compiler.plan.look import COMPLEX, read_file
from monarch.compiler.plan.plan import Plan
from monarch.compiler.types import DTYPE_NAMES

T = TypeVar("T")


def save_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Write a plan as one `.mplan` file: all of it or, on an error, nothing. Raises PlanError."""
    data = plan_bytes(plan)
    target = Path(path)
    try:
        put_file(target, data, f".{target.name}.", mode=0o644)
    except OSError as error:
        raise PlanError(
            f"cannot write {target}: {error.strerror or error}", hint="give a path that can be written."
        ) from None


def put_file(path: Path, data: bytes, prefix: str, *, mode: int = 0o600, sync: bool = True) -> None:
    """Write a file all at once: who opens it finds what was there before, or all of `data`. Until then it has another
    name, with this prefix; with `sync` it is on the disk when this returns. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=prefix, delete=False) as file:
        try:
            file.write(data)
            file.flush()
            if sync:
                os.fsync(file.fileno())
            os.fchmod(file.fileno(), mode)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


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
    check_plan(plan, TorchDecoder(f"plan '{plan.name}'").fail)
    report = dump_json(_encode_reports(plan)).encode("ascii")
    try:
        manifest = {"plan": head, "hash": hash_members(head, program, constants, binaries), "costs": plan.costs}
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
    decoder = TorchDecoder(name)
    plan = plan_of_members(manifest, members, _load_constants(members[CONSTANTS], decoder), decoder, report=report)
    plan = replace(plan, binaries=decode_binaries(members[BINARIES], members[CODE], decoder))
    check_plan(plan, decoder.fail)
    return plan


def plan_of_json(head: Any, program: list[Any], constants: dict[str, torch.Tensor], decoder: TorchDecoder) -> Plan:
    """The plan of a head and instructions as `encode` writes them, checked as a file's is. Raises PlanError."""
    made = decode_plan(head, program, constants, decoder, {})
    check_plan(made, decoder.fail)
    return replace(made, hash=hash_of(made))


def _encode_reports(plan: Plan) -> Any:
    """A plan's report; of one with parts, a list of theirs."""
    if plan.parts and any(part.plan.report is not None for part in plan.parts):
        return [_encode_reports(part.plan) for part in plan.parts]
    return None if plan.report is None else encode_report(plan.report)


def hash_of(plan: Plan) -> str:
    """The SHA-256, in hex, of what a worker runs or tells of a plan: all but its graphs' texts, report and costs."""
    return hash_members(*_parts(plan), encode_binaries(plan.binaries))


def _parts(plan: Plan) -> tuple[dict[str, Any], bytes, bytes]:
    program = "\n".join(dump_json(encode_instruction(instruction)) for instruction in plan.instructions)
    return encode_head(plan), program.encode("ascii"), _save_constants(plan)


def _save_constants(plan: Plan) -> bytes:
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for label, tensor in all_constants(plan):
        if tensor.dtype not in DTYPE_NAMES:
            raise PlanError(f"constant '{label}' is of {tensor.dtype}, which a plan cannot hold")
        whole = tensor.detach().cpu().contiguous()
        if whole.is_complex():  # the format has not all complex dtypes
            label, whole = f"{COMPLEX}{label}", torch.view_as_real(whole.resolve_conj())
        storage = whole.untyped_storage().data_ptr()
        tensors[label] = whole.clone() if storage in storages else whole  # the format has no shared memory
        storages.add(storage)
    return save_tensors(tensors)


def all_constants(plan: Plan, within: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The constants of a plan and of its functions or parts, by names that tell whose they are."""
    yield from ((f"{within}{label}", tensor) for label, tensor in plan.constants.items())
    for part in plan.parts:
        yield from all_constants(part.plan, f"{part.name}{WITHIN}")
    for name, function in plan.functions.items():
        yield from all_constants(function, f"{within}{name}{WITHIN}")


def _load_constants(data: bytes, decoder: TorchDecoder) -> dict[str, torch.Tensor]:
    try:
        tensors = load_tensors(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise PlanError(f"the constants of {decoder.name} cannot be read: {error}", hint=AGAIN) from None
    found = {}
    for label, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            decoder.fail(f"constant {label!a} is of {tensor.dtype}")
        if label.startswith(COMPLEX):
            if tensor.dtype not in (torch.float32, torch.float64) or tensor.shape[-1:] != (2,):
                decoder.fail(f"constant {label!a} is {list(tensor.shape)} of {tensor.dtype}, not pairs of numbers")
            tensor = torch.view_as_complex(tensor)
        found[label.removeprefix(COMPLEX)] = tensor
    return found
