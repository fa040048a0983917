"""Views and constants: they rewrite coordinates, or need none."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from monarch.compiler.graph import args_of
from monarch.compiler.kernels.lower.coordinates import Affine, At, Gathered, Unfusable, reshaped
from monarch.compiler.kernels.lower.values import Lowering, arguments, compute_dtype, handler
from monarch.compiler.loops.signatures import ARITHMETIC
from monarch.compiler.ops.record import enter


def _transparent(*names: str) -> Any:
    enter(names, transparent=True)
    return handler(*names)


def _source(node: fx.Node) -> fx.Node:
    return args_of(node)[0]


@_transparent("aten.view", "aten.reshape", "aten._unsafe_view", "aten.unsqueeze", "aten.squeeze", "aten.flatten")
def _view(lower: Lowering, node: fx.Node, at: At) -> int:
    source = _source(node)
    shape, old = lower.tensors[node].shape, lower.tensors[source].shape
    return lower.value(source, reshaped(at, shape, old, lower.dims))


@_transparent("aten.permute")
def _permute(lower: Lowering, node: fx.Node, at: At) -> int:
    (order,) = arguments(node, "dims")
    found: dict[int, Any] = {dim % len(at): coordinate for dim, coordinate in zip(order, at, strict=True)}
    return lower.value(_source(node), tuple(found[dim] for dim in range(len(at))))


@_transparent("aten.transpose")
def _transpose(lower: Lowering, node: fx.Node, at: At) -> int:
    a, b = arguments(node, "dim0", "dim1")
    found = list(at)
    if found:
        found[a], found[b] = at[b], at[a]
    return lower.value(_source(node), tuple(found))


@_transparent("aten.t")
def _t(lower: Lowering, node: fx.Node, at: At) -> int:
    return lower.value(_source(node), tuple(reversed(at)))


@_transparent("aten.expand")
def _expand(lower: Lowering, node: fx.Node, at: At) -> int:
    return lower.value(_source(node), lower.broadcast(_source(node), at, lower.tensors[node].shape))


@_transparent("aten.select")
def _select(lower: Lowering, node: fx.Node, at: At) -> int:
    dim, index = arguments(node, "dim", "index")
    shape = lower.tensors[_source(node)].shape
    dim %= len(shape)
    place = Affine(index % shape[dim], lower.zero.strides)
    return lower.value(_source(node), (*at[:dim], place, *at[dim:]))


@_transparent("aten.slice")
def _slice(lower: Lowering, node: fx.Node, at: At) -> int:
    dim, start, step = arguments(node, "dim", "start", "step")
    size = lower.tensors[_source(node)].shape[dim]
    start = 0 if start is None else start
    start = min(max(start + size if start < 0 else start, 0), size)
    found = list(at)
    coordinate = found[dim]
    if isinstance(coordinate, Gathered):
        raise Unfusable("a gathered coordinate does not go through a slice")
    found[dim] = (coordinate * step).shifted(start)
    return lower.value(_source(node), tuple(found))


@_transparent("aten.alias", "aten.detach", "aten.lift_fresh_copy", "to_varying", "from_varying")
def _same(lower: Lowering, node: fx.Node, at: At) -> int:
    return lower.value(_source(node), at)


@handler("aten.clone", "aten.contiguous")
def _copy(lower: Lowering, node: fx.Node, at: At) -> int:
    return lower.value(_source(node), at)


def _constant(lower: Lowering, node: fx.Node, value: float | int | bool) -> int:
    dtype = lower.tensors[node].dtype
    if dtype not in ARITHMETIC and dtype not in (torch.bfloat16, torch.float16):
        raise Unfusable(f"a constant of {dtype}")
    rounded = torch.tensor(value, dtype=dtype).item() if abs(value) != float("inf") else value
    return lower.constant(rounded, compute_dtype(dtype))


def _filled(value: int | str, *names: str) -> None:
    """Ops that fill their result: with a number, or with their argument of that name."""

    @_transparent(*names)
    def lowered(lower: Lowering, node: fx.Node, at: At) -> int:
        return _constant(lower, node, arguments(node, value)[0] if isinstance(value, str) else value)


_filled("fill_value", "aten.full", "aten.full_like")
_filled("s", "aten.scalar_tensor")
_filled(0, "aten.zeros", "aten.zeros_like", "aten.new_zeros")
_filled(1, "aten.ones", "aten.ones_like", "aten.new_ones")


@_transparent("aten.arange")
def _arange(lower: Lowering, node: fx.Node, at: At) -> int:
    overload = node.target._overloadname  # type: ignore[union-attr]
    start, step = 0, 1
    if overload != "default":
        (start,) = arguments(node, "start")
    if overload == "start_step":
        (step,) = arguments(node, "step")
    if not (type(start) is int and type(step) is int and isinstance(at[0], Affine)):
        raise Unfusable("an arange of floats")
    return lower.cast(lower.position((at[0] * step).shifted(start)), compute_dtype(lower.tensors[node].dtype))
