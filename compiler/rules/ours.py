"""Ops of ours over a mesh dim that is done already, met again while another one is partitioned.

What they do along their own mesh dim touches some tensor dims, which stay whole; all else passes through.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from monarch.compiler import ops
from monarch.compiler.rules.call import Call, dim_of
from monarch.compiler.rules.line import Line, factor_names, line
from monarch.compiler.rules.localize import LocalCall, Localized, localize_sizes, localizer
from monarch.compiler.rules.register import sharding_rule
from monarch.compiler.rules.views import tensor_text


def _each(call: Call, touched: Mapping[int, Sequence[int]], linear: bool = True) -> Line:
    """Every tensor keeps its dims but those `touched`, by its place in the list, whose tensors are independent."""
    tensors = []
    taken = 0
    for index, shape in enumerate(call.shapes):
        names = factor_names(taken + len(shape))[taken:]
        taken += len(shape)
        tensors.append(tensor_text(["_" if dim in touched.get(index, ()) else name for dim, name in enumerate(names)]))
    text = ", ".join(tensors)
    # Where one tensor is sharded, the others of its list are replicated, before and after.
    kept = [
        (name, other)
        for index, tensor in enumerate(tensors)
        for name in tensor.split()
        if name not in ("_", "[]")
        for other in range(len(tensors))
        if other != index
    ]
    return line(f"{text} -> {text}", linear=[range(len(tensors))] if linear else [], kept=kept)


def _dims(call: Call, *arguments: str) -> dict[int, list[int]]:
    """For each tensor of the list, the dims that `arguments` name."""
    return {
        index: [dim_of(call[argument][index], len(shape)) for argument in arguments]
        for index, shape in enumerate(call.shapes)
    }


@sharding_rule("all_reduce")
def _all_reduce(call: Call) -> Line:
    return _each(call, {}, linear=call["reduction"] == "sum")


@sharding_rule("all_gather")
def _all_gather(call: Call) -> Line:
    return _each(call, _dims(call, "dims"))


@sharding_rule("reduce_scatter")
def _reduce_scatter(call: Call) -> Line:
    return _each(call, _dims(call, "dims"), linear=call["reduction"] == "sum")


@sharding_rule("all_to_all")
def _all_to_all(call: Call) -> Line:
    return _each(call, _dims(call, "source_dims", "target_dims"))


@sharding_rule("broadcast permute first_only")
def _unchanged(call: Call) -> Line:
    return _each(call, {})


sharding_rule("in_range send", "... -> ...")


@sharding_rule("recv")
def _recv(call: Call) -> Line:
    return line(f"-> {tensor_text(factor_names(len(call.result)))}")


localize_sizes("recv", "shape")


@sharding_rule("fill_padding")
def _fill_padding(call: Call) -> Line:
    return line("... -> ...", linear=[{0}] if call["fill"] == 0 else [])


@localizer("fill_padding")
def _local_fill_padding(call: LocalCall) -> Localized:
    if call.strategy.operands[0] != call["dim"]:
        return call.unchanged()
    return call.replace(mesh_dims=[*call["mesh_dims"], call.mesh_dim])


@sharding_rule("shard")
def _shard(call: Call) -> Line:
    return _each(call, {0: [dim_of(call["dim"], len(call.shapes[0]))]})


sharding_rule("axis_index", "-> []")


@sharding_rule("to_varying from_varying")
def _varying(call: Call) -> Line:
    """Over another mesh dim than their own. The dim that becomes shorter or longer stays whole, until that is done."""
    (shape,), made = call.shapes, call.result
    names = factor_names(len(shape))
    text = tensor_text([name if old == new else "_" for name, old, new in zip(names, shape, made, strict=True)])
    reduced = call["placement"] if call.target is ops.from_varying else None
    linear = reduced in (None, "sum") or isinstance(reduced, int)
    return line(f"{text} -> {text}", linear=[{0}] if linear else [])


@sharding_rule("commit")
def _commit(call: Call) -> Line:
    return line("->")
