"""One record for each op: all that Monarch knows of it beside its schema.

    find(aten.mm.default, "rule")         # what is known of this overload, of the op, or of the view that it copies
    record("aten.mm").rule = line(...)    # each part of the compiler writes its own field, as it is imported

`monarch.compiler.ops.schema` derives the rest from the op's schema. An op without a record is right too: it runs whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from monarch.compiler.ops import MonarchOp


@dataclass
class OpRecord:
    """The known facts of an op, or of one overload of it; None for unknown ones.

    `record`       how the recorder takes a call that does not go onto the tape as it is (`language.recorder`)
    `shape`        its results' shapes, without PyTorch's own, slower function (`language.tensors.shapes`)
    `normalise`    how a call becomes nodes of the graph that mean the same (`passes.functionalize`)
    `read`         how a view is read, `write` how a write to it reaches what it views (`passes.views`)
    `rule`         how it partitions (`rules.register`)
    `localize`     what a worker's arguments are (`rules.localize`)
    `padding`      what adds nothing to the reduction that it is, and may stand in the padding of its operands
                   (`rules.padding`)
    `decompose`    what it consists of, where a mesh dim splits it: a function, or "torch" for PyTorch's own
                   decomposition (`passes.decompose`)
    `lower`        what lowers it to a loop nest; for an op with several results, by the number of the result (-1: the
                   one result). `transparent`: its value is an operand's, at other indices (`kernels.lower`)
    `out`          the overload that writes its result into memory that it is given, and as which argument
                   (`plan.arena`)
    `in_place`     whether its in-place form computes the same bits (`schedule.emit`)
    """

    record: Callable[..., Any] | None = None
    shape: Callable[..., Any] | None = None
    normalise: Callable[..., None] | None = None
    read: Callable[..., Any] | None = None
    write: Callable[..., Any] | None = None
    rule: Any = None
    localize: Callable[..., Any] | None = None
    padding: float | None = None
    decompose: Callable[..., Any] | str | None = None
    lower: dict[int, Callable[..., int]] = field(default_factory=dict)
    transparent: bool = False
    out: tuple[str, str] | None = None
    in_place: bool = False


_RECORDS: dict[str, OpRecord] = {}


def record(op: object) -> OpRecord:
    """The record of an op ("aten.add", `aten.add`, "all_reduce"), or of one overload ("aten.sum.dim_IntList"): a new
    one where there is none. It stays the op's: later entries are read in it."""
    return _RECORDS.setdefault(str(op), OpRecord())


def enter(ops: Iterable[object], **fields: Any) -> None:
    """Write fields of several ops' records."""
    for op in ops:
        of_op = record(op)
        for name, value in fields.items():
            setattr(of_op, name, value)


def find(target: Any, name: str) -> Any:
    """A field of the record of a node's target: of the overload, else of the op, else of the view that it copies. None
    where none has it."""
    for each in _names(target):
        known = _RECORDS.get(each)
        if known is not None and (value := getattr(known, name)) is not None:
            return value
    return None


@lru_cache(4096)
def _names(target: Any) -> tuple[str, ...]:
    """Under which names a node's target may have records, the most special one first."""
    if isinstance(target, torch._ops.OpOverload):
        packet = str(target.overloadpacket)
        return str(target), packet, packet.removesuffix("_copy")
    return (str(target) if isinstance(target, MonarchOp) else getattr(target, "__name__", str(target)),)


def of_packet(packet: object, name: str) -> Any:
    """A field of an op's record, which holds for all its overloads; None where nothing is known."""
    known = _RECORDS.get(str(packet))
    return None if known is None else getattr(known, name)


def recorded(name: str) -> list[str]:
    """The names of all ops and overloads whose records have this field."""
    return sorted(op for op, known in _RECORDS.items() if getattr(known, name))


@contextmanager
def records_kept() -> Iterator[None]:
    """Forget behind a block the entries made in it: for tests."""
    before = {op: copy(known) for op, known in _RECORDS.items()}
    try:
        yield
    finally:
        for op, changed in _RECORDS.items():  # in place, for others hold the records
            vars(changed).update(vars(before.get(op) or OpRecord()))
