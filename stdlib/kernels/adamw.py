"""AdamW on many tensors in one launch (Loshchilov and Hutter, "Decoupled Weight Decay Regularization", 2019).

    g = gradient * scale                                        scale: of clipping, 1 without
    m = beta1 * m + (1 - beta1) * g;   v = beta2 * v + (1 - beta2) * g²
    p = p * (1 - lr * weight_decay) - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)

as `torch.optim.AdamW` computes it, all in float32. A table on the device holds the tensors' addresses and sizes, so
that one launch updates a whole model: its programs are dealt out over pieces of the tensors. The table is made once for
tensors that stay where they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.launch import TYPES, Variant, launch

BLOCK = 4096
"""Elements that a program updates."""

VARIANTS = (Variant({"BLOCK": BLOCK}, 8, 1), Variant({"BLOCK": BLOCK}, 16, 1))


@dataclass(frozen=True)
class AdamWTable:
    """Where the tensors of one update lie.

    `addresses`: int64 [tensors, 5] of parameter, gradient, m, v and copy; `pieces`: int32 [programs, 2] of a tensor's
    number and the piece's place in it; `sizes`: int64 [tensors]. `tensors` keeps what the addresses point to alive.
    """

    addresses: Tensor
    sizes: Tensor
    pieces: Tensor
    tensors: tuple[tuple[Tensor, ...], ...]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes of one entry: parameter, gradient, first and second moment, and the copy if there is one."""
        return tuple(tensor.dtype for tensor in self.tensors[0])


def adamw_table(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    first: Sequence[Tensor],
    second: Sequence[Tensor],
    copies: Sequence[Tensor] | None = None,
) -> AdamWTable:
    """The table for parameters, their gradients, and their two moments; `copies` receive the new parameters, rounded.

    Each sequence has one dtype (parameters and moments best float32; then `copies` are the bf16 weights that the model
    computes with), and the tensors of a place have one size. All are contiguous, on one device, and at addresses that
    16 divides, as those of fresh tensors are.
    """
    groups = [parameters, gradients, first, second, *([copies] if copies is not None else [])]
    tensors = tuple(zip(*groups, strict=True))
    if not tensors:
        raise MonarchError("there are no parameters to update")
    for place, row in enumerate(tensors):
        for tensor, example in zip(row, tensors[0], strict=True):
            if tensor.numel() != row[0].numel() or not tensor.is_contiguous() or tensor.dtype != example.dtype:
                raise MonarchError(
                    f"tensor {place} of the update has {row[0].numel()} elements of {example.dtype}; beside it lies a "
                    f"{'contiguous' if tensor.is_contiguous() else 'strided'} one of {tensor.numel()} of {tensor.dtype}"
                )
            if not tensor.is_meta and tensor.data_ptr() % 16:
                raise MonarchError(f"tensor {place} of the update lies at an address that 16 does not divide")
    device = parameters[0].device
    sizes = [row[0].numel() for row in tensors]
    pieces = [(place, piece) for place, size in enumerate(sizes) for piece in range(-(-size // BLOCK))]
    addresses = [[0 if t.is_meta else t.data_ptr() for t in row] + [0] * (5 - len(row)) for row in tensors]
    return AdamWTable(
        torch.tensor(addresses, dtype=torch.int64, device=device),
        torch.tensor(sizes, dtype=torch.int64, device=device),
        torch.tensor(pieces, dtype=torch.int32, device=device).reshape(-1, 2),
        tensors,
    )


def adamw_rates(
    *,
    step: int,
    lr: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    device: torch.device | str | None = None,
) -> Tensor:
    """What an update takes besides tensors, float32 [8]; `step` counts from 1.

    A tensor, and not numbers of the launch, so that a CUDA graph of a step can be run again with the next step's.
    """
    beta1, beta2 = betas
    step_size, correction = lr / (1 - beta1**step), 1 / math.sqrt(1 - beta2**step)
    rates = [1 - lr * weight_decay, step_size, correction, eps, beta1, beta2, 1 - beta1, 1 - beta2]
    return torch.tensor(rates, dtype=torch.float32, device=device)


def adamw(table: AdamWTable, rates: Tensor, *, scale: Tensor | None = None, variant: Variant = VARIANTS[0]) -> None:
    """One update in place. `rates`: of `adamw_rates`, on the parameters' device; `scale`: float32 [1], for the
    gradients."""
    if rates.shape != (8,):
        raise MonarchError(f"rates are {list(rates.shape)}", hint="adamw_rates(step=…, lr=…) makes them")
    kinds = [getattr(tl, _NAMES[TYPES[dtype]]) for dtype in table.dtypes]
    launch(
        _update,
        (table.pieces.shape[0],),
        variant,
        ADDRESSES=table.addresses,
        SIZES=table.sizes,
        PIECES=table.pieces,
        RATES=rates,
        SCALE=scale,
        PARAMETER=kinds[0],
        GRADIENT=kinds[1],
        FIRST=kinds[2],
        SECOND=kinds[3],
        COPY=kinds[4] if len(kinds) > 4 else None,
    )


_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}


@triton.jit
def _update(
    ADDRESSES,
    SIZES,
    PIECES,
    RATES,
    SCALE,
    PARAMETER: tl.constexpr,
    GRADIENT: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    COPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    tensor = tl.load(PIECES + 2 * tl.program_id(0)).to(tl.int64)
    start = tl.load(PIECES + 2 * tl.program_id(0) + 1).to(tl.int64) * BLOCK
    size = tl.load(SIZES + tensor)
    scale = 1.0
    if SCALE is not None:
        scale = tl.load(SCALE)
    entry = ADDRESSES + 5 * tensor
    parameters = _pointer(entry, PARAMETER)
    gradients = _pointer(entry + 1, GRADIENT)
    firsts = _pointer(entry + 2, FIRST)
    seconds = _pointer(entry + 3, SECOND)
    copies = None
    if COPY is not None:
        copies = _pointer(entry + 4, COPY)
    at = start + tl.arange(0, BLOCK)
    # A mask that ends anywhere would make every load one of single elements.
    if start + BLOCK <= size:
        _piece(parameters, gradients, firsts, seconds, copies, RATES, scale, at, None)
    else:
        _piece(parameters, gradients, firsts, seconds, copies, RATES, scale, at, at < size)


@triton.jit
def _piece(PARAMETER, GRADIENT, FIRST, SECOND, COPY, RATES, scale, at, inside):
    decay, step_size, correction, eps = tl.load(RATES), tl.load(RATES + 1), tl.load(RATES + 2), tl.load(RATES + 3)
    beta1, beta2, rest1, rest2 = tl.load(RATES + 4), tl.load(RATES + 5), tl.load(RATES + 6), tl.load(RATES + 7)
    gradient = tl.load(GRADIENT + at, mask=inside).to(tl.float32) * scale
    first = beta1 * tl.load(FIRST + at, mask=inside).to(tl.float32) + rest1 * gradient
    second = beta2 * tl.load(SECOND + at, mask=inside).to(tl.float32) + rest2 * gradient * gradient
    parameter = tl.load(PARAMETER + at, mask=inside).to(tl.float32)
    parameter = parameter * decay - step_size * first / (tl.sqrt(second) * correction + eps)
    tl.store(FIRST + at, first.to(FIRST.dtype.element_ty), mask=inside)
    tl.store(SECOND + at, second.to(SECOND.dtype.element_ty), mask=inside)
    tl.store(PARAMETER + at, parameter.to(PARAMETER.dtype.element_ty), mask=inside)
    if COPY is not None:
        tl.store(COPY + at, parameter.to(COPY.dtype.element_ty), mask=inside)


@triton.jit
def _pointer(entry, TYPE: tl.constexpr):
    return tl.multiple_of(tl.load(entry).to(tl.pointer_type(TYPE)), 16)
