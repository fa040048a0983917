"""The shapes, strides and dtypes of an op's results, without data: every op is run on meta tensors (PyTorch's own shape
functions).

The commonest ops have a shape function here, for PyTorch's load SymPy or TorchDynamo, which takes as long as all of
torch: a program that needs no others starts in half the time. Torch's FakeTensorMode, which loads them too, is the
fallback for the few ops that have no meta kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from monarch.compiler.alike import Memo, frozen
from monarch.compiler.loading import unwatched
from monarch.compiler.ops.record import enter
from monarch.language.tensors.facts import facts_of

aten = torch.ops.aten

_META = torch.device("meta")


class DependsOnData(Exception):
    """An op's results have a shape, or are Python values, that depend on its operands' data."""


def make_fake(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A contiguous tensor without data."""
    if not torch._C._len_torch_dispatch_stack():  # then a signal's handler may run here, and finds tensors as ever
        return torch.empty(shape, dtype=dtype, device=_META)
    # Modes, such as the one that makes factory functions distributed, shall not see this call.
    with torch._C._DisableTorchDispatch():
        return torch.empty(shape, dtype=dtype, device=_META)


def strided_fake(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor without data that has these strides."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(shape, strides, dtype=dtype, device=_META)


def like(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of the same shape, strides and dtype, without data."""
    if tensor.is_contiguous():
        return make_fake(tuple(tensor.shape), tensor.dtype)
    return strided_fake(tuple(tensor.shape), tensor.stride(), tensor.dtype)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Have PyTorch's default dtype be this one within the block."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        yield
    finally:
        torch.set_default_dtype(before)


def run_fake(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """An op's results on tensors without data. Raises DependsOnData, or what PyTorch raises."""
    if func in _ANY_DIM:
        dim, ndim = kwargs.get("dim", args[1] if len(args) > 1 else -1), max(1, args[0].ndim)
        if not -ndim <= dim < ndim:
            raise IndexError(f"dim {dim} of a tensor that has {args[0].ndim}")
    simple = facts_of(func).known.shape
    if simple is not None and not kwargs:
        known = simple(*args)
        if known is not None:
            return known
    if torch.Tag.data_dependent_output in func.tags or _is_masked(func, args) or _is_counted(func, kwargs):
        raise DependsOnData
    if func.overloadpacket is aten._fused_sdp_choice:
        # Which attention kernel to take depends on the device: ask for the one that the workers have.
        return func(*map(_without_memory, args), **{name: _without_memory(value) for name, value in kwargs.items()})
    if _takes_device(func):
        kwargs = {**kwargs, "device": _META}
    try:
        with torch._C._DisableTorchDispatch():
            out: Any = _on_meta(func, args, kwargs)
            if func in _BATCH_NORMS and not args[5] or func is aten._native_batch_norm_legit_no_training.default:
                # The CPU kernel gives no statistics of a batch that it has not used.
                out = (out[0], out[1].new_empty(0), out[2].new_empty(0))
            return out
    except NotImplementedError:
        if torch.Tag.dynamic_output_shape in func.tags:
            raise DependsOnData from None
        return _fall_back(func, args, kwargs)
    except ZeroDivisionError:
        # PyTorch's shape functions divide by how many elements there are. Its kernels take none.
        return _on_kernel(func, args, kwargs)


_KNOWN: Memo[int | tuple[Any, ...]] = Memo(4096)
"""For calls that are alike, the number of the argument that they give, or their result's shape, strides and dtype."""


def _on_meta(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The results of PyTorch's meta kernel. Most are Python, so that calls that are alike are made once."""
    try:
        key = _key(func, args, kwargs)
        known = _KNOWN.get(key)
    except TypeError:  # an argument without a hash
        return func(*args, **kwargs)
    if known is not None:
        return args[known] if isinstance(known, int) else torch.empty_strided(*known[:2], dtype=known[2], device=_META)
    with unwatched() if func.namespace in ("aten", "prims") else nullcontext():  # a user's op may read anything
        out = func(*args, **kwargs)
    returns = func._schema.returns
    changed = key != _key(func, args, kwargs)  # an operand, as `squeeze_` does
    if func.namespace == "aten" and type(out) is torch.Tensor and len(returns) == 1 and not changed:
        same = next((number for number, arg in enumerate(args) if arg is out), None)
        if same is not None:
            _KNOWN.keep(key, same)
        elif returns[0].alias_info is None and func is not aten._new_zeros_with_same_feature_meta.default:
            # That one gives memory of another tensor's size, which forward derivatives ask for.
            _KNOWN.keep(key, (tuple(out.shape), out.stride(), out.dtype))
    return out


def _key(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Hashable:
    def of(tensor: torch.Tensor) -> Hashable:
        return tensor.dtype, tensor.device, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()

    return func, torch.get_default_dtype(), frozen(args, of), frozen(kwargs, of)


_ANY_DIM = frozenset((aten._softmax.default, aten.sort.default, aten.sort.stable))
"""Ops of which PyTorch's shape functions take any dim, and its kernels none outside."""
_BATCH_NORMS = (aten.native_batch_norm.default, aten._native_batch_norm_legit.default)

# -- shape functions: a tensor, or None where PyTorch's own has to decide ---------------------------------------------


def _plain(*tensors: Any) -> bool:
    """Whether these are contiguous tensors of one floating dtype."""
    first = tensors[0]
    return (
        isinstance(first, torch.Tensor)
        and all(
            isinstance(tensor, torch.Tensor) and tensor.dtype == first.dtype and tensor.is_contiguous()
            for tensor in tensors
        )
        and first.dtype.is_floating_point
    )


def _pointwise(*args: Any) -> torch.Tensor | None:
    dtype: torch.dtype | None = None
    shape: tuple[int, ...] = ()
    for arg in args:
        if not isinstance(arg, torch.Tensor):
            if not isinstance(arg, (int, float)):
                return None
            continue
        if dtype is None:
            dtype, shape = arg.dtype, tuple(arg.shape)
        elif arg.shape != shape:
            if not _broadcast(shape, tuple(arg.shape)):
                return None
            shape = tuple(torch.broadcast_shapes(shape, arg.shape))
        if arg.dtype != dtype or not arg.is_contiguous():
            return None
    return make_fake(shape, dtype) if dtype is not None and dtype.is_floating_point else None


def _broadcast(first: tuple[int, ...], second: tuple[int, ...]) -> bool:
    return all(a == b or a == 1 or b == 1 for a, b in zip(reversed(first), reversed(second), strict=False))


def _in_place(target: Any, *args: Any) -> torch.Tensor | None:
    out = _pointwise(target, *args)
    return target if out is not None and out.shape == target.shape else None


def _same_dtype(a: Any, b: Any) -> None:
    """Torch's meta kernels let this pass, its CPU kernels do not."""
    if a.dtype != b.dtype:
        raise RuntimeError(f"expected both operands to have the same dtype, but got {a.dtype} and {b.dtype}")


def _mm(a: Any, b: Any) -> torch.Tensor | None:
    _same_dtype(a, b)
    fits = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0]
    return make_fake((a.shape[0], b.shape[1]), a.dtype) if fits else None


def _bmm(a: Any, b: Any) -> torch.Tensor | None:
    _same_dtype(a, b)
    fits = a.ndim == b.ndim == 3 and a.shape[0] == b.shape[0] and a.shape[2] == b.shape[1]
    return make_fake((a.shape[0], a.shape[1], b.shape[2]), a.dtype) if fits else None


def _addmm(bias: Any, a: Any, b: Any) -> torch.Tensor | None:
    out = _mm(a, b)
    fits = out is not None and bias.dtype == a.dtype and bias.ndim <= 2
    return out if fits and out is not None and _broadcast(tuple(bias.shape), tuple(out.shape)) else None


def _reduce(x: Any, dims: Any = None, keep: Any = False) -> torch.Tensor | None:
    if not _plain(x) or not (dims is None or isinstance(dims, list)):
        return None
    if any(not -x.ndim <= dim < x.ndim for dim in dims or ()):
        return None
    gone = {dim % x.ndim for dim in dims} if dims else set(range(x.ndim))
    shape = tuple(1 if dim in gone else size for dim, size in enumerate(x.shape) if keep or dim not in gone)
    return make_fake(shape, x.dtype)


def _resolved(x: Any) -> torch.Tensor:
    """A view whose numbers PyTorch notes to be conjugated or negated: without the note."""
    with torch._C._DisableTorchDispatch():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_META)


enter((aten._conj, aten._neg_view), shape=_resolved)
_POINTWISE = (
    "add sub mul div addcmul addcdiv lerp pow neg abs exp log log1p sqrt rsqrt reciprocal tanh sigmoid relu silu"
).split()
enter((getattr(aten, name) for name in _POINTWISE), shape=_pointwise)
enter((getattr(aten, f"{name}_") for name in _POINTWISE), shape=_in_place)
enter((aten.mm,), shape=_mm)
enter((aten.bmm,), shape=_bmm)
enter((aten.addmm,), shape=_addmm)
enter((aten.sum, aten.mean), shape=_reduce)


def _is_masked(func: Any, args: list[Any]) -> bool:
    """Indexing by a mask, whose result has as many elements as the mask has hits. Raises what PyTorch raises of one
    that does not fit, which only its kernels look for."""
    if func.overloadpacket not in _INDEXED:
        return False
    shape, at, masked = args[0].shape, 0, False
    for index in args[1]:
        if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
            for place, (size, wanted) in enumerate(zip(index.shape, shape[at:], strict=False)):
                if size != wanted:
                    raise IndexError(
                        f"The shape of the mask {list(index.shape)} at index {place} does not match the shape of the "
                        f"indexed tensor {list(shape)} at index {at + place}"
                    )
            at, masked = at + index.ndim, True
        else:
            at += 1
    return masked and func is aten.index.Tensor


_INDEXED = frozenset((aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index_put))


def _is_counted(func: Any, kwargs: dict[str, Any]) -> bool:
    """Repeating by numbers in a tensor, whose result has as many elements as they add up to."""
    return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None


def _without_memory(value: Any) -> Any:
    """A CPU tensor of zeros that share one element of memory."""
    if isinstance(value, torch.Tensor):
        return torch.zeros((), dtype=value.dtype).expand(value.shape)
    return value


@functools.cache
def _takes_device(func: Any) -> bool:
    return any(argument.name == "device" for argument in func._schema.arguments)


@functools.cache
def _fake_mode() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode()


def _on_kernel(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    from torch.utils import _pytree as pytree

    out = func(*pytree.tree_map(_without_memory, args), **pytree.tree_map(_without_memory, kwargs))
    return pytree.tree_map_only(torch.Tensor, _left, out)


def _left(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _fall_back(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.utils import _pytree as pytree

    def enter(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
        return torch.device("cpu") if value == _META else value

    try:
        with _fake_mode():
            out = func(*pytree.tree_map(enter, args), **pytree.tree_map(enter, kwargs))
    except (DataDependentOutputException, DynamicOutputShapeException):
        raise DependsOnData from None
    return pytree.tree_map_only(torch.Tensor, _left, out)
