"""ATen calls that are recorded in another form: strided and conjugated views, copies to plain tensors; and sparse ones,
which are refused."""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler.ops.record import enter
from monarch.language.errors import OperatorError
from monarch.language.recorder.dispatch import record
from monarch.language.recorder.recording import current_program, outside_programs
from monarch.language.recorder.refusals import refuse
from monarch.language.recorder.refused_writes import reshaped_in_place
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor

aten = torch.ops.aten


def _as_strided(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of a tensor's memory: of that of the tensor behind all its views, which has to fill it."""
    offset = args[3] if len(args) > 3 else kwargs.get("storage_offset")
    ref = args[0]._ref
    offset = ref.fake.storage_offset() if offset is None else offset
    while ref.parent is not None:
        if ref.place is not None:
            raise refuse(
                OperatorError(
                    f"{func.overloadpacket} of a view at a place that only the workers know",
                    hint="take a copy of it first: x[i].clone().",
                    source=user_source(),
                )
            )
        ref = ref.parent
    whole = DistributedTensor(ref.fake, ref)
    if not whole.is_contiguous():
        whole = whole.permute(sorted(range(whole.ndim), key=whole.stride, reverse=True))
    if not whole.is_contiguous():
        strided = OperatorError(
            f"{func.overloadpacket} of a tensor with strides {ref.fake.stride()}, which workers may hold otherwise",
            hint="make it contiguous first: x.contiguous().",
            source=user_source(),
        )
        raise refuse(strided)
    return record(func, (whole, args[1], args[2], offset), {})


def _strided_copy(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func._schema.is_mutable:
        return record(func, args, kwargs)
    return _as_strided(aten.as_strided.default, args, kwargs).clone(memory_format=torch.contiguous_format)


def _strided_scatter(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if func._schema.is_mutable:
        return record(func, args, kwargs)
    x, source, size, strides = args[:4]
    begins = x._ref.fake.storage_offset()
    offset = args[4] if len(args) > 4 else kwargs.get("storage_offset")
    offset = begins if offset is None else offset
    if not x.is_contiguous() or offset < begins:
        raise refuse(
            OperatorError(
                f"{func.overloadpacket} of a part of a tensor's memory that goes by its own order",
                hint="take a copy of it first: x.clone(memory_format=torch.contiguous_format).",
                source=user_source(),
            )
        )
    made = x.clone(memory_format=torch.contiguous_format)
    made.as_strided(size, strides, offset - begins).copy_(source)
    return made


def _sparse(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    sparse = OperatorError(
        f"{func.overloadpacket} gives a sparse tensor, which a distributed tensor cannot be",
        hint="fetch the tensor first, outside of programs: x.full_tensor().",
        source=user_source(),
    )
    raise refuse(sparse)


def _copy_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`plain.copy_(x)` outside a program fetches x."""
    target, source = args[0], args[1]
    if current_program() is None and not isinstance(target, DistributedTensor):
        return target.copy_(source.full_tensor())
    return record(func, args, kwargs)


def _set(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`x.set_(y)`: from now on both have one memory."""
    target, source = args[0], args[1] if len(args) > 1 else kwargs.get("source")
    if isinstance(source, torch.UntypedStorage):
        return record(func, args, kwargs)  # which refuses it
    if source is None or isinstance(source, DistributedTensor) and target.shape != source.shape:
        raise reshaped_in_place(func)
    if not (isinstance(target, DistributedTensor) and isinstance(source, DistributedTensor)):
        raise refuse(
            OperatorError(
                f"{func.overloadpacket} of a distributed and a plain tensor would have them share their memory",
                hint="x.copy_(y) copies, and y.full_tensor() is plain.",
                source=user_source(),
            )
        )
    target.data = source
    return target


def _conjugate(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The conjugate of a tensor, or of a number: autograd meets one as the factor of a complex tensor."""
    if isinstance(args[0], torch.Tensor):
        return record(func, args, kwargs)
    with outside_programs():
        return torch.tensor(complex(args[0]).conjugate(), dtype=torch.complex128)


enter((aten._conj,), record=_conjugate)
enter((aten.set_,), record=_set)
enter((aten.copy_,), record=_copy_out)
enter((aten.as_strided,), record=_as_strided)
enter((aten.as_strided_copy,), record=_strided_copy)
enter((aten.as_strided_scatter,), record=_strided_scatter)
enter((f"aten._to_sparse{kind}" for kind in ("", "_csr", "_csc", "_bsr", "_bsc")), record=_sparse)
