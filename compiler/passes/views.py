"""Views: how a pure graph reads one, and how a write through one reaches the tensor behind it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch._ops import OpOverload

from monarch.compiler.errors import ProgramError
from monarch.compiler.graph import tensor_type
from monarch.compiler.ops.record import enter, of_packet
from monarch.compiler.tape import Expr, Value
from monarch.compiler.types import TensorType

if TYPE_CHECKING:
    from monarch.compiler.passes.emitter import Emitter

aten = torch.ops.aten


def read_view(emit: Emitter, value: Value, base: fx.Node) -> fx.Node:
    """The node that holds the view `value` of `base`, normalised to a few ops: view, permute, expand, slice, select,
    unsqueeze and squeeze become one of `aten.view`, `aten.permute`, `aten.expand`, `aten.slice`, `aten.select`."""
    assert value.parent is not None and value.view is not None
    step, parent = value.view, value.parent
    reader = None if step.func is aten.view.dtype else of_packet(step.func.overloadpacket, "read")
    if reader is not None:
        return reader(emit, value, parent, base)
    out = emit.call(step.func, base, *emit.decode(step.args), type=value.type, **emit.decode_kwargs(step.kwargs))
    return out if step.output is None else emit.item(out, step.output, value.type)


def write_view(emit: Emitter, value: Value, base: fx.Node, new: fx.Node) -> fx.Node:
    """`base` (the parent's value) with the part that `value` views replaced by `new`."""
    assert value.parent is not None and value.view is not None
    step, parent = value.view, value.parent
    writer = None if step.func is aten.view.dtype else of_packet(step.func.overloadpacket, "write")
    if writer is None:
        raise ProgramError(
            f"cannot write through {step.func.overloadpacket._qualified_op_name.replace('::', '.')}",
            hint="write out of place, or to the tensor that is viewed.",
            source=emit.source,
        )
    return writer(emit, value, parent, base, new)


def argument(value: Value, position: int, name: str, default: Any = None) -> Any:
    """An argument of a view's op, counting from 0 after the tensor itself."""
    assert value.view is not None
    if position < len(value.view.args):
        return value.view.args[position]
    return dict(value.view.kwargs).get(name, default)


def _dim(value: Value, parent: Value, position: int = 0, name: str = "dim", default: int = 0) -> int:
    dim: int = argument(value, position, name, default)
    return dim % max(1, len(parent.shape))


def _permutation(value: Value, parent: Value) -> list[int]:
    packet = value.view.func.overloadpacket  # type: ignore[union-attr]
    ndim = len(parent.shape)
    if packet is aten.permute:
        return [dim % ndim for dim in argument(value, 0, "dims")]
    order = list(range(ndim))
    if packet is aten.t:
        return order[::-1]
    first, second = (dim % max(1, ndim) for dim in (argument(value, 0, "dim0"), argument(value, 1, "dim1")))
    if order:
        order[first], order[second] = order[second], order[first]
    return order


def _slice(value: Value, parent: Value) -> tuple[int, int, int, int]:
    dim = _dim(value, parent)
    size = parent.shape[dim]
    start = argument(value, 1, "start") or 0
    end = argument(value, 2, "end")
    end = size if end is None else end
    start, end = (min(max(at + size if at < 0 else at, 0), size) for at in (start, end))
    return dim, start, max(start, end), argument(value, 3, "step", 1)


def _part(value: Value, parent: Value) -> tuple[int, int, int, int]:
    """A piece that split or split_with_sizes gives, as a slice."""
    dim = _dim(value, parent, 1)
    sizes = argument(value, 0, "split_size")
    if sizes is None:
        sizes = argument(value, 0, "split_sizes")
    output = value.view.output  # type: ignore[union-attr]
    assert output is not None
    start = output * sizes if isinstance(sizes, int) else sum(sizes[:output])
    return dim, start, start + value.shape[dim], 1


def _select(value: Value, parent: Value) -> tuple[int, int]:
    if value.view.func.overloadpacket is aten.unbind:  # type: ignore[union-attr]
        assert value.view.output is not None  # type: ignore[union-attr]
        return _dim(value, parent), value.view.output  # type: ignore[union-attr]
    dim = _dim(value, parent)
    index = argument(value, 1, "index")
    return dim, index + parent.shape[dim] if index < 0 else index


def read_reshape(emit: Emitter, value: Value, parent: Value, base: fx.Node) -> fx.Node:
    return emit.reshape(base, value.shape)


def _read_permute(emit: Emitter, value: Value, parent: Value, base: fx.Node) -> fx.Node:
    return emit.permute(base, _permutation(value, parent))


def _read_expand(emit: Emitter, value: Value, parent: Value, base: fx.Node) -> fx.Node:
    return emit.expand(base, value.shape)


def _read_slice(emit: Emitter, value: Value, parent: Value, base: fx.Node) -> fx.Node:
    if isinstance(place := argument(value, 1, "start"), Expr):
        return read_places(emit, base, _dim(value, parent), place, value.type)
    return _emit_slice(emit, base, value, *_slice(value, parent))


def _read_part(emit: Emitter, value: Value, parent: Value, base: fx.Node) -> fx.Node:
    return _emit_slice(emit, base, value, *_part(value, parent))


def _emit_slice(emit: Emitter, base: fx.Node, value: Value, dim: int, start: int, end: int, step: int) -> fx.Node:
    if start == 0 and step == 1 and end >= base.meta["type"].shape[dim]:
        return base
    args = (dim, start, end) if step == 1 else (dim, start, end, step)
    return emit.call(aten.slice.Tensor, base, *args, type=value.type)


def _read_select(emit: Emitter, value: Value, parent: Value, base: fx.Node) -> fx.Node:
    if isinstance(place := argument(value, 1, "index"), Expr):
        return read_places(emit, base, _dim(value, parent), place, value.type)
    return emit.call(aten.select.int, base, *_select(value, parent), type=value.type)


def _read_same(emit: Emitter, value: Value, parent: Value, base: fx.Node) -> fx.Node:
    return base


def _write_reshape(emit: Emitter, value: Value, parent: Value, base: fx.Node, new: fx.Node) -> fx.Node:
    return emit.reshape(new, parent.shape)


def _write_permute(emit: Emitter, value: Value, parent: Value, base: fx.Node, new: fx.Node) -> fx.Node:
    order = _permutation(value, parent)
    return emit.permute(new, [order.index(dim) for dim in range(len(order))])


def _write_slice(emit: Emitter, value: Value, parent: Value, base: fx.Node, new: fx.Node) -> fx.Node:
    if isinstance(place := argument(value, 1, "start"), Expr):
        return write_places(emit, base, new, _dim(value, parent), place)
    return _emit_scatter(emit, parent, base, new, *_slice(value, parent))


def _write_part(emit: Emitter, value: Value, parent: Value, base: fx.Node, new: fx.Node) -> fx.Node:
    return _emit_scatter(emit, parent, base, new, *_part(value, parent))


def _emit_scatter(
    emit: Emitter, parent: Value, base: fx.Node, new: fx.Node, dim: int, start: int, end: int, step: int
) -> fx.Node:
    if start == 0 and step == 1 and end >= parent.shape[dim]:
        return new
    return emit.call(aten.slice_scatter.default, base, new, dim, start, end, step, type=parent.type)


def _write_select(emit: Emitter, value: Value, parent: Value, base: fx.Node, new: fx.Node) -> fx.Node:
    if isinstance(place := argument(value, 1, "index"), Expr):
        return write_places(emit, base, new, _dim(value, parent), place)
    return emit.call(aten.select_scatter.default, base, new, *_select(value, parent), type=parent.type)


def read_places(emit: Emitter, base: fx.Node, dim: int, place: Expr, type: TensorType) -> fx.Node:
    """The elements along `dim` from a place on that only the workers know: as many as `type` has."""
    shape = list(tensor_type(base).shape)
    shape[dim] = type.shape[dim] if type.ndim == len(shape) else 1
    taken = TensorType(type.dtype, tuple(shape))
    index = _places(emit, place, tensor_type(base).shape[dim], shape[dim])
    return emit.reshape(emit.call(aten.index_select.default, base, dim, index, type=taken), type.shape)


def write_places(emit: Emitter, base: fx.Node, new: fx.Node, dim: int, place: Expr, adds: bool = False) -> fx.Node:
    """`base` with `new` written along `dim`, or added, from a place on that only the workers know."""
    into, part = tensor_type(base), tensor_type(new)
    shape = list(into.shape)
    shape[dim] = part.shape[dim] if part.ndim == into.ndim else 1
    index = _places(emit, place, into.shape[dim], shape[dim])
    func = aten.index_add.default if adds else aten.index_copy.default
    return emit.call(func, base, dim, index, emit.reshape(new, shape), type=into)


def _places(emit: Emitter, place: Expr, size: int, count: int) -> fx.Node:
    """`count` places of a dim from `place` on, which may count from the end."""
    one = TensorType(torch.int64, ())
    first = emit.number(place)
    below = emit.call(aten.lt.Scalar, first, 0, type=TensorType(torch.bool, ()))
    from_end = emit.call(aten.add.Tensor, first, size, type=one)
    first = emit.call(aten.where.self, below, from_end, first, type=one)
    row = TensorType(torch.int64, (count,))
    if isinstance(count, int) and count == 1:
        return emit.reshape(first, (1,))
    steps = emit.call(aten.arange.start_step, 0, count, 1, type=row, dtype=torch.int64)
    return emit.call(aten.add.Tensor, steps, first, type=row)


def _write_expand(emit: Emitter, value: Value, parent: Value, base: fx.Node, new: fx.Node) -> fx.Node:
    if math.prod(value.shape) == math.prod(parent.shape):
        return emit.reshape(new, parent.shape)
    raise ProgramError(
        "cannot write in place to an expanded tensor: several of its elements are one",
        hint="call .clone() on the expanded tensor first.",
        source=emit.source,
    )


def _write_diagonal(emit: Emitter, value: Value, parent: Value, base: fx.Node, new: fx.Node) -> fx.Node:
    where = (argument(value, 0, "offset", 0), argument(value, 1, "dim1", 0), argument(value, 2, "dim2", 1))
    return emit.call(aten.diagonal_scatter.default, base, new, *where, type=parent.type)


def _write_same(emit: Emitter, value: Value, parent: Value, base: fx.Node, new: fx.Node) -> fx.Node:
    return new


_RESHAPES = (aten.view, aten._unsafe_view, aten._reshape_alias, aten.squeeze, aten.unsqueeze)


def row_major(emit: Emitter, base: fx.Node) -> fx.Node:
    """A copy with the strides that the trace has seen: on workers a value may have others."""
    return emit.call(aten.clone.default, base, type=base.meta["type"], memory_format=torch.contiguous_format)


def _read_strided(emit: Emitter, value: Value, parent: Value, base: fx.Node) -> fx.Node:
    place = [argument(value, position, name) for position, name in enumerate(_STRIDED)]
    return emit.call(aten.as_strided.default, row_major(emit, base), *map(emit.decode, place), type=value.type)


def _write_strided(emit: Emitter, value: Value, parent: Value, base: fx.Node, new: fx.Node) -> fx.Node:
    place = [argument(value, position, name) for position, name in enumerate(_STRIDED)]
    operands = (row_major(emit, base), new)
    return emit.call(aten.as_strided_scatter.default, *operands, *map(emit.decode, place), type=parent.type)


# A complex tensor and its parts. PyTorch's views only note that they are conjugated or negated; here they are made so.


def _enter_noted(view: object, func: OpOverload) -> None:
    """`func` carries out a conjugation or negation that a view only notes; done twice, the value is as before."""
    enter(
        (view,),
        read=lambda emit, value, parent, base: emit.call(func, base, type=value.type),
        write=lambda emit, value, parent, base, new: emit.call(func, new, type=parent.type),
    )


def _of_parts(emit: Emitter, parts: fx.Node, type: TensorType) -> fx.Node:
    """The complex tensor of a real one [..., 2], in whatever order the workers hold it."""
    real = TensorType(parts.meta["type"].dtype, type.shape)
    taken = [emit.call(aten.select.int, parts, len(type.shape), at, type=real) for at in (0, 1)]
    return emit.call(aten.complex.default, *taken, type=type)


def _read_complex(emit: Emitter, value: Value, parent: Value, base: fx.Node) -> fx.Node:
    return _of_parts(emit, base, value.type)


def _write_complex(emit: Emitter, value: Value, parent: Value, base: fx.Node, new: fx.Node) -> fx.Node:
    return emit.call(aten.view_as_real.default, new, type=parent.type)


def _write_real(emit: Emitter, value: Value, parent: Value, base: fx.Node, new: fx.Node) -> fx.Node:
    return _of_parts(emit, new, parent.type)


_STRIDED = ("size", "stride", "storage_offset")

enter(_RESHAPES, read=read_reshape, write=_write_reshape)
enter((aten.permute, aten.t, aten.transpose), read=_read_permute, write=_write_permute)
enter((aten.alias, aten.detach, aten.lift_fresh), read=_read_same, write=_write_same)
enter((aten.split, aten.split_with_sizes), read=_read_part, write=_write_part)
enter((aten.select, aten.unbind), read=_read_select, write=_write_select)
enter((aten.expand,), read=_read_expand, write=_write_expand)
enter((aten.slice,), read=_read_slice, write=_write_slice)
enter((aten.as_strided,), read=_read_strided, write=_write_strided)
_enter_noted(aten._conj, aten.conj_physical.default)
_enter_noted(aten._neg_view, aten.neg.default)
enter((aten.view_as_complex,), read=_read_complex, write=_write_complex)
enter((aten.view_as_real,), write=_write_real)
enter((aten.diagonal,), write=_write_diagonal)
