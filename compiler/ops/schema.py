"""The memory effects in an op's schema: which arguments it writes, and which its results may share memory with.

Everything that asks "is it a view?" or "what does it write?" asks here.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx

from monarch.compiler.graph import args_of, tensor_type
from monarch.compiler.ops import (
    MonarchOp,
    check,
    constrain,
    fill_padding,
    first_only,
    from_varying,
    in_range,
    send,
    shard,
    to_varying,
)

aten = torch.ops.aten

_MAY_COPY = frozenset("reshape reshape_as contiguous to type_as flatten ravel".split())
"""ATen ops whose schemas say that they are views, and that copy where they have to."""


@dataclass(frozen=True)
class MemoryEffects:
    """The effects of an op on memory.

    `writes`   names of the arguments that it writes
    `results`  for each result, the name of the argument that it is (one that the op writes), or "" for another tensor
    `shares`   positions of the arguments that a result may share memory with; None for any: an op whose schema says
               nothing of it, for it is not torch's
    `view`     every result shares memory with an argument, and nothing is written
    `exact`    its one result surely lies in the memory of its first argument
    """

    writes: tuple[str, ...]
    results: tuple[str, ...]
    shares: frozenset[int] | None
    view: bool
    exact: bool

    @property
    def gives(self) -> tuple[int, ...]:
        """Which results are tensors of their own, by position."""
        return tuple(at for at, name in enumerate(self.results) if not name)


@cache
def memory_of(op: torch._ops.OpOverload) -> MemoryEffects:
    """The memory effects in an op's schema."""
    schema = op._schema
    of_torch = op.namespace in ("aten", "prims")
    written = {argument.name: argument.alias_info for argument in schema.arguments if argument.is_write}
    results = tuple(
        next((name for name, info in written.items() if _meet(result.alias_info, info)), "")
        for result in schema.returns
    )
    infos = [result.alias_info for result in schema.returns]
    shares = frozenset(at for at, argument in enumerate(schema.arguments) if argument.alias_info is not None)
    if op.overloadpacket in (aten.reshape, aten._unsafe_view):
        shares = frozenset([0])  # their schemas leave it out
    first = schema.arguments[0].alias_info if schema.arguments else None
    return MemoryEffects(
        writes=tuple(written),
        results=results,
        shares=shares if of_torch or shares else None,
        view=bool(infos)
        and all(info is not None and not info.is_write for info in infos)
        and op.overloadpacket is not aten.lift_fresh,
        exact=of_torch and len(infos) == 1 and _meet(infos[0], first) and op.overloadpacket.__name__ not in _MAY_COPY,
    )


@cache
def pure_form(op: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """The ATen overload that takes the same arguments as `op`, which writes to some, computes what `op` writes, and
    nothing else: `add_.Tensor` -> `add.Tensor`, `cumsum.out` -> `cumsum.default`.

    None where there is none: an op of the user's is not known by its name."""
    if op.namespace != "aten" or memory_of(op).gives:
        return None
    name, overload = op._schema.name.split("::")[1], op._overloadname
    in_place = name.endswith("_") and not name.endswith("__")
    packet = getattr(aten, name[:-1], None) if in_place else op.overloadpacket
    wanted = _parameters(op, written=in_place)
    for candidate in () if packet is None else (overload, *packet.overloads()):
        found = getattr(packet, candidate, None)
        if found is None or found._schema.is_mutable:
            continue
        parameters = _parameters(found, written=True)
        others = found._schema.arguments[len(wanted) :]
        given = not in_place and parameters[: len(wanted)] == wanted and all(map(_has_default, others))
        if parameters == wanted or given:
            return found
    return None


def _has_default(argument: Any) -> bool:
    return bool(argument.has_default_value())


def _parameters(op: torch._ops.OpOverload, *, written: bool) -> list[tuple[str, str]]:
    """Names and types of an op's arguments, with those that it writes or without."""
    return [(each.name, str(each.type)) for each in op._schema.arguments if written or not each.is_write]


def _meet(one: Any, other: Any) -> bool:
    """Whether two arguments or results of a schema may share memory."""
    return one is not None and other is not None and bool(set(one.before_set) & set(other.before_set))


def is_view(target: Any) -> bool:
    """Whether a node's target only shows its operand's memory in another way."""
    return (
        isinstance(target, torch._ops.OpOverload) and bool(memory_of(target).shares) and not target._schema.is_mutable
    )


def viewed_operand(node: fx.Node) -> fx.Node | None:
    """The operand of a graph's node whose memory the node's result shares, or may share."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem:
        return viewed_operand(args_of(node)[0])
    if node.target is fill_padding:
        shares = fills_in_place(node)
    elif isinstance(node.target, MonarchOp):
        shares = node.target in (shard, first_only, check, in_range, send, to_varying, from_varying)
    else:
        shares = bool(memory_of(node.target).shares)
    return args_of(node)[0] if shares else None


_SAME_PADDING = frozenset("view _unsafe_view reshape permute transpose t unsqueeze squeeze detach alias".split())
"""Views whose padding is the padding of their base, and nothing else."""


def fills_in_place(fill: fx.Node) -> bool:
    """Whether a `fill_padding` writes zeros over the padding of its operand, instead of a copy's.

    Padding that is not known to be zero may be anything for all its readers (`monarch.compiler.passes.padding`), and so
    zeros too. Integers are left alone: the masks for padding are computed from integers in the padding."""
    value: fx.Node | None = args_of(fill)[0]
    if args_of(fill)[3] != 0 or not tensor_type(fill).dtype.is_floating_point:
        return False
    while value is not None and (viewed := viewed_operand(value)) is not None:
        same = value.target in (fill_padding, shard, constrain) or _packet(value) in _SAME_PADDING
        value = viewed if same else None
    return value is not None and value.op == "call_function"


def _packet(node: fx.Node) -> str:
    return str(getattr(getattr(node.target, "overloadpacket", None), "__name__", ""))
