"""Running a kernel by torch's own ops: the ground truth for emitters; the reference executor runs it too."""

from __future__ import annotations

import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monarch.compiler.loops.contraction import Contraction, contraction
from monarch.compiler.loops.ir import Buffer, Constant, Index, Kernel, Load, Nest, Op, Position, Reduce, Store
from monarch.compiler.loops.signatures import BOOL, POINTWISE

Tensors = Sequence[torch.Tensor]


def interpret(kernel: Kernel, inputs: Tensors) -> list[torch.Tensor]:
    """The kernel's outputs. Raises IndexError where a gather's index is out of range."""
    operands = [laid_out(tensor, buffer) for tensor, buffer in zip(inputs, kernel.inputs, strict=True)]
    outputs = [torch.empty_strided(b.shape, b.strides, dtype=b.dtype) for b in kernel.outputs]
    for nest in kernel.nests:
        _run(nest, operands, outputs)
    return outputs


def laid_out(tensor: torch.Tensor, buffer: Buffer) -> torch.Tensor:
    """The tensor with a buffer's strides: itself, or a copy. The stride of a dim of size 1 means nothing."""
    if tensor.shape != buffer.shape or tensor.dtype != buffer.dtype:
        raise TypeError(
            f"a kernel wants {buffer.dtype} of {list(buffer.shape)}, got {tensor.dtype} of {list(tensor.shape)}"
        )
    apart = zip(buffer.shape, tensor.stride(), buffer.strides, strict=True)
    return tensor if all(size == 1 or is_ == wanted for size, is_, wanted in apart) else moved(tensor, buffer.strides)


def moved(tensor: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """A copy with these strides; along one of 0 all elements are the first."""
    made = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    once = tuple(slice(0, 1) if stride == 0 else slice(None) for stride in strides)
    made[once].copy_(tensor[once])
    return made


def _run(nest: Nest, inputs: Tensors, outputs: Tensors) -> None:
    """Every value has all of the nest's dims: size 1 along those that it does not vary along."""
    values: list[Any] = []
    reduced = tuple(range(len(nest.dims) - nest.reduced, len(nest.dims)))
    found = contraction(nest)
    for number, statement in enumerate(nest.body):
        if found is not None and number in (found.product, found.reduce):
            # All products at once would not fit in memory.
            values.append(_multiplied(values, found, len(nest.kept)) if number == found.reduce else None)
            continue
        match statement:
            case Load(buffer, index, gather, stride, size):
                at = _addresses(index, nest.dims)
                if gather >= 0:
                    picked = values[gather]
                    outside = picked[(picked < 0) | (picked >= size)]
                    if outside.numel():
                        raise IndexError(f"index out of range: {int(outside[0])}, and there are {size} rows")
                    at = at + picked * stride
                tensor = inputs[buffer]
                memory = tensor.as_strided((_extent(tensor),), (1,), tensor.storage_offset())
                values.append(memory[at])
            case Constant(value, dtype):
                values.append(torch.tensor(value, dtype=dtype).reshape([1] * len(nest.dims)))
            case Position(dim):
                values.append(_along(nest.dims, dim, 1))
            case Op(name, args, dtype):
                operands = [values[arg] for arg in args]
                values.append(operands[0].to(dtype) if name == "cast" else _OPS[name](*operands))
            case Reduce(name, arg):
                whole = list(values[arg].shape)
                for dim in reduced:
                    whole[dim] = nest.dims[dim]
                values.append(_REDUCE[name](values[arg].expand(whole), reduced))
            case Store(buffer, index, value, sums):
                tensor = outputs[buffer - len(inputs)]
                at = _addresses(index, nest.dims)
                stored = values[value]
                if sums and (over := tuple(dim for dim, size in enumerate(at.shape) if size < nest.dims[dim])):
                    stored = stored.expand(nest.dims).sum(over, keepdim=True, dtype=stored.dtype)
                flat = tensor.as_strided((tensor.numel(),), (1,), 0)
                flat[at.reshape(-1)] = stored.expand(at.shape).reshape(-1)
                values.append(None)


def _multiplied(values: Sequence[Any], found: Contraction, kept: int) -> torch.Tensor:
    left, right = values[found.left], values[found.right]
    letters = string.ascii_letters[: left.dim()]
    product = torch.einsum(f"{letters},{letters}->{letters[:kept]}", left, right)
    return product.reshape(*product.shape, *[1] * (left.dim() - kept))


def _extent(tensor: torch.Tensor) -> int:
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _along(dims: Sequence[int], dim: int, stride: int) -> torch.Tensor:
    shape = [1] * len(dims)
    shape[dim] = dims[dim]
    return (torch.arange(dims[dim]) * stride).reshape(shape)


def _addresses(index: Index, dims: Sequence[int]) -> torch.Tensor:
    at = torch.full([1] * len(dims), index.offset)
    for dim, stride in enumerate(index.strides):
        if stride:
            at = at + _along(dims, dim, stride)
    return at


def _prod(value: torch.Tensor, dims: tuple[int, ...]) -> torch.Tensor:
    for dim in dims:
        value = value.prod(dim, keepdim=True, dtype=value.dtype)
    return value


_REDUCE: dict[str, Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor]] = {
    "sum": lambda value, dims: value.sum(dims, keepdim=True, dtype=value.dtype) if dims else value,
    "prod": _prod,
    "max": lambda value, dims: value.amax(dims, keepdim=True) if dims else value,
    "min": lambda value, dims: value.amin(dims, keepdim=True) if dims else value,
    "any": lambda value, dims: value.sum(dims, keepdim=True) > 0 if dims else value,
    "all": lambda value, dims: (
        value.sum(dims, keepdim=True) == math.prod(value.shape[d] for d in dims) if dims else value
    ),
}


def _fma(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    if a.dtype == torch.float32:  # exact in f64 but for a double rounding that is as good as never met
        return (a.double() * b.double() + c.double()).float()
    return torch.addcmul(c, a, b)


def _not(value: torch.Tensor) -> torch.Tensor:
    return value.logical_not() if value.dtype == BOOL else value.bitwise_not()


_OTHERWISE: dict[str, Callable[..., torch.Tensor]] = {
    "sign": torch.sgn,
    "max": torch.maximum,
    "min": torch.minimum,
    "fma": _fma,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": _not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
}
"""The pointwise ops that torch calls otherwise."""
_OPS = {name: _OTHERWISE.get(name) or getattr(torch, name) for name in POINTWISE if name != "cast"}
"""`cast` is `Tensor.to`."""
