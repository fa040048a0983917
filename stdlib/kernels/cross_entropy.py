"""Cross-entropy over a vocabulary, whole or cut over workers, that never stores the softmax of the logits.

    loss[row] = log(sum(exp(logits[row]))) - logits[row, target[row]]

The forward reads the logits once and leaves three numbers a row, its *parts*: the maximum, the sum of exp(logit -
maximum), and the target's logit (0 in the shards that do not have it). The parts of a vocabulary's shards combine
exactly:

    maximum = max over shards;   total = sum over shards of total * exp(maximum of the shard - maximum);   target = sum

so that workers exchange 3 numbers a row in place of the logits (Shoeybi et al., "Megatron-LM", 2019; the running
maximum is Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018). The backward reads the logits
again and writes (softmax - onehot) * dloss, over the logits themselves where it may.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.launch import Variant, ceil_div, check_alike, launch, next_power_of_2

IGNORED = -100
"""The target of rows without a loss, as in `torch.nn.functional.cross_entropy`."""

Parts = tuple[Tensor, Tensor, Tensor]


def cross_entropy(logits: Tensor, target: Tensor, *, variant: Variant | None = None) -> tuple[Tensor, Tensor]:
    """`(loss, lse)` of a whole vocabulary, both float32 [rows]; the loss of rows with target `IGNORED` is 0."""
    return loss_of_parts(cross_entropy_parts(logits, target, variant=variant), target)


def cross_entropy_parts(logits: Tensor, target: Tensor, *, first: int = 0, variant: Variant | None = None) -> Parts:
    """`(maximum, total, target's logit)`, each float32 [rows].

    logits: [rows, columns], the vocabulary's entries from `first` on, of any row stride; target: integers [rows],
    counted over the whole vocabulary.
    """
    rows, columns = _check(logits, target)
    variant = variant or variants(columns)[0]
    parts = torch.empty((3, rows), dtype=torch.float32, device=logits.device)
    launch(
        _parts,
        (rows,),
        variant,
        LOGITS=logits,
        TARGET=target,
        MAXIMUM=parts[0],
        TOTAL=parts[1],
        FOUND=parts[2],
        columns=columns,
        first=first,
        stride=logits.stride(0),
    )
    return parts[0], parts[1], parts[2]


def combine_parts(shards: list[Parts]) -> Parts:
    """The parts of the whole vocabulary from those of its shards: what workers do with a max- and a sum-reduction."""
    maximum = torch.stack([part[0] for part in shards]).amax(0)
    total = torch.stack([total * torch.exp(own - maximum) for own, total, _ in shards]).sum(0)
    return maximum, total, torch.stack([part[2] for part in shards]).sum(0)


def loss_of_parts(parts: Parts, target: Tensor) -> tuple[Tensor, Tensor]:
    """`(loss, lse)`, float32 [rows], from the parts of the whole vocabulary. lse: log of the sum of exp(logits)."""
    maximum, total, found = parts
    lse = maximum + torch.log(total)
    # Not lse - found: where logits are large, the sum in lse has lost what log(total) adds.
    return torch.where(target == IGNORED, 0.0, maximum - found + torch.log(total)), lse


def cross_entropy_backward(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    dloss: Tensor,
    *,
    first: int = 0,
    out: Tensor | None = None,
    variant: Variant | None = None,
) -> Tensor:
    """The gradient of `logits` (a shard's, from `first` on), like them; lse and dloss are float32 [rows].

    `out` takes the result; it may be `logits`, which then need no second tensor of their size.
    """
    rows, columns = _check(logits, target)
    check_alike(target=target, lse=lse, dloss=dloss)
    check_alike(logits=logits, out=out)
    variant = variant or variants(columns)[0]
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device) if out is None else out
    launch(
        _backward,
        (rows, ceil_div(columns, variant.tiles["BLOCK"])),
        variant,
        LOGITS=logits,
        TARGET=target,
        LSE=lse,
        DLOSS=dloss,
        DLOGITS=out,
        columns=columns,
        first=first,
        stride=logits.stride(0),
        stride_out=out.stride(0),
        NO_TARGET=IGNORED,
    )
    return out


def variants(columns: int) -> tuple[Variant, ...]:
    """A row is read in pieces of BLOCK, 16 to 32 elements for each thread."""
    largest = max(16, next_power_of_2(columns))
    shapes = [(4096, 8), (8192, 8), (8192, 16), (2048, 4)]
    fitting = dict.fromkeys((min(block, largest), warps) for block, warps in shapes)
    return tuple(Variant({"BLOCK": block}, warps, 2) for block, warps in fitting)


def _check(logits: Tensor, target: Tensor) -> tuple[int, int]:
    if logits.dim() != 2 or target.shape != logits.shape[:1] or logits.stride(1) != 1:
        raise MonarchError(
            f"logits are {list(logits.shape)} with strides {list(logits.stride())}, and targets {list(target.shape)}",
            hint="Give logits [rows, vocabulary] whose rows are contiguous, and targets [rows].",
        )
    return logits.shape[0], logits.shape[1]


@triton.jit
def _parts(LOGITS, TARGET, MAXIMUM, TOTAL, FOUND, columns, first, stride, BLOCK: tl.constexpr):
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    logits = LOGITS + row.to(tl.int64) * stride
    target = tl.load(TARGET + row).to(tl.int64) - first
    here = (target >= 0) & (target < columns)
    found = tl.load(logits + target, mask=here, other=0.0).to(tl.float32)
    maximum = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(logits + column, mask=column < columns, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(maximum, tl.max(x, axis=0))
        # Where all are -inf so far, -inf - -inf would be no number.
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2((maximum - shift) * LOG2E) + tl.sum(tl.exp2((x - shift) * LOG2E), axis=0)
        maximum = higher
    tl.store(MAXIMUM + row, maximum)
    tl.store(TOTAL + row, total)
    tl.store(FOUND + row, found)


@triton.jit
def _backward(
    LOGITS,
    TARGET,
    LSE,
    DLOSS,
    DLOGITS,
    columns,
    first,
    stride,
    stride_out,
    NO_TARGET: tl.constexpr,
    BLOCK: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = tl.load(TARGET + row).to(tl.int64)
    dloss = tl.where(target == NO_TARGET, 0.0, tl.load(DLOSS + row))
    at = row.to(tl.int64)
    x = tl.load(LOGITS + at * stride + column, mask=column < columns, other=0.0).to(tl.float32)
    softmax = tl.exp2((x - tl.load(LSE + row)) * LOG2E)
    dx = dloss * tl.where(column == target - first, softmax - 1.0, softmax)
    tl.store(DLOGITS + at * stride_out + column, dx.to(DLOGITS.dtype.element_ty), mask=column < columns)
