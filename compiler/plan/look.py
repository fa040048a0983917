"""A plan's file, read to be looked at: without torch or the elements of constants, and never to be run.

Reading a plan to run it checks every op, and loads torch for that, which takes longer than all that is asked of it.
"""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

from monarch.compiler.errors import PlanError
from monarch.compiler.layout import ITEM_SIZES
from monarch.compiler.plan.binaries import decode_binaries
from monarch.compiler.plan.container import BINARIES, CODE, CONSTANTS, MEMBERS, load_json, unseal
from monarch.compiler.plan.decode import Decoder, plan_of_members
from monarch.compiler.plan.plan import Plan, Slot
from monarch.compiler.tensor_type import SEEN_DTYPES, TensorType


def look_at(path: str | os.PathLike[str]) -> Plan:
    """The plan of a file, to look at: its dtypes stand for torch's, and its constants are their
    types. Raises PlanError where it is no plan's file, or damaged."""
    source = Path(path)
    manifest, members = unseal(read_file(source), source.name, MEMBERS)
    decoder = Decoder(source.name)
    plan = plan_of_members(manifest, members, _constants(members[CONSTANTS], decoder), decoder, report=True)
    _check(plan, len(plan.transfers), decoder)
    return replace(plan, binaries=decode_binaries(members[BINARIES], members[CODE], decoder))


def _check(plan: Plan, transfers: int, decoder: Decoder) -> None:
    """Check what is read of instructions: `check_plan`, which knows what can be run, needs torch."""
    for each in plan.instructions:
        if each.op == "kernel":
            operands, text, over = decoder.items(list(each.args), "the arguments of a kernel", 3)
            most = len(decoder.items(operands, "a kernel's operands"))
            if not all(isinstance(operand, Slot) for operand in operands):
                decoder.fail("an operand of a kernel is in no slot")
            decoder.string(text, "a kernel")
            for place in decoder.items(over, "what a kernel writes over"):
                decoder.integer(place, "what a kernel writes over", -1, most)
        elif each.op in ("send", "recv"):
            given = each.args[each.op == "send" :][:1]
            decoder.integer(given[0] if given else None, "a transfer's number", 0, max(transfers, 1))
    for part in plan.parts:
        _check(part.plan, transfers, decoder)


def _constants(data: bytes, decoder: Decoder) -> dict[str, Any]:
    """The types of the tensors in a safetensors file, by name: what its head says."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > len(data) - 8:
        decoder.fail("its constants have no head")
    head = decoder.mapping(load_json(data[8 : 8 + size], f"{CONSTANTS} of {decoder.name}"), CONSTANTS)
    found = {}
    for label, entry in head.items():
        if label == "__metadata__":
            continue
        about = decoder.mapping(entry, "a constant", ("dtype", "shape", "data_offsets"))
        name = _NAMES.get(decoder.string(about["dtype"], "a constant's dtype"), about["dtype"].lower())
        shape = [decoder.integer(length, "a size of a constant") for length in decoder.items(about["shape"], "a shape")]
        if label.startswith(COMPLEX):  # pairs: the real and the imaginary part of each number
            label, name, shape = label.removeprefix(COMPLEX), {"f32": "c64", "f64": "c128"}.get(name, ""), shape[:-1]
        if name not in ITEM_SIZES:
            decoder.fail(f"constant {label!a} is of {about['dtype'][:60]!a}")
        found[label] = TensorType(SEEN_DTYPES[name], tuple(shape))
    return found


COMPLEX = "complex "
"""How the name of a constant begins that is stored as pairs."""

_NAMES = {"BOOL": "bool"}
"""The format's names of dtypes that are not ours in capitals."""


def read_file(path: Path) -> bytes:
    """The bytes of a plan's file. Raises PlanError."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise PlanError(f"{path} is not a regular file", hint="give a file that plan.save() wrote.")
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise PlanError(f"cannot read {path}: {reason}", hint="give a file that plan.save() wrote.") from None


def _open_at_once(path: str, flags: int) -> int:
    """A named pipe would otherwise be waited for."""
    return os.open(path, flags | os.O_NONBLOCK)
