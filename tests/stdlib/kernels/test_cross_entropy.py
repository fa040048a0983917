"""Cross-entropy over a whole vocabulary and over its shards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.cross_entropy import (
    combine_parts,
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_parts,
    loss_of_parts,
    variants,
)
from tests.kernels.triton.assembly import assert_wide
from tests.stdlib.kernels.numerics import TARGETS, assert_near, compiled, launching, meta

DTYPES = [torch.float32, torch.bfloat16]


def _case(rows: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Logits, targets, the losses' gradients; the exact losses, and the exact gradient of the logits."""
    logits = (5 * torch.randn(rows, columns)).to(dtype)
    target = torch.randint(columns, (rows,))
    target[0] = -100
    dloss = torch.randn(rows)
    exact = logits.double().requires_grad_()
    loss = functional.cross_entropy(exact, target, reduction="none")
    loss.backward(dloss.double())
    assert exact.grad is not None
    return logits, target, dloss, loss.detach(), exact.grad


@pytest.mark.sample(4)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [5, 1000, 8192, 9001])
def test_whole(columns: int, dtype: torch.dtype) -> None:
    logits, target, dloss, exact, gradient = _case(6, columns, dtype)
    with launching():
        loss, lse = cross_entropy(logits, target)
        dlogits = cross_entropy_backward(logits, target, lse, dloss)
    assert loss[0] == 0
    assert_near(loss, exact)
    assert_near(dlogits.flatten(), gradient.flatten(), scale=4)  # softmax - 1 may be next to nothing in a row


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sharded_and_in_place(dtype: torch.dtype) -> None:
    logits, target, dloss, exact, gradient = _case(7, 1200, dtype)
    firsts = range(0, 1200, 300)
    with launching():
        parts = [cross_entropy_parts(logits[:, i : i + 300], target, first=i) for i in firsts]
        loss, lse = loss_of_parts(combine_parts(parts), target)
        for i in firsts:
            shard = logits[:, i : i + 300]
            cross_entropy_backward(shard, target, lse, dloss, first=i, out=shard)
    assert_near(loss, exact)
    assert_near(logits.flatten(), gradient.flatten(), scale=4)


def test_logits_that_are_masked_out() -> None:
    logits, target = torch.randn(3, 700), torch.tensor([650, 20, 699])
    logits[:2, 100:600] = -torch.inf
    logits[0, :600] = -torch.inf  # a whole piece, from the row's beginning
    exact = functional.cross_entropy(logits.double(), target, reduction="none")
    with launching():
        loss, lse = cross_entropy(logits, target, variant=variants(128)[0])
        dlogits = cross_entropy_backward(logits, target, lse, torch.ones(3))
    assert_near(loss, exact)
    assert torch.isfinite(dlogits).all() and (dlogits[0, :600] == 0).all()


def test_huge_logits_do_not_overflow() -> None:
    logits, target = torch.tensor([[1e4, -1e4, 1e4 - 1], [-3e38, 0.0, 3e38]]), torch.tensor([2, 2])
    with launching():
        loss, _ = cross_entropy(logits, target)
    assert_near(loss, functional.cross_entropy(logits.double(), target, reduction="none"))


def test_every_variant_gives_the_same() -> None:
    logits, target, _, exact, _ = _case(2, 10000, torch.float32)
    with launching():
        for variant in variants(10000):
            assert_near(cross_entropy(logits, target, variant=variant)[0], exact)


def test_errors() -> None:
    with pytest.raises(MonarchError, match=r"logits are \[4, 8\] with strides \[8, 1\], and targets \[5\]"):
        cross_entropy(meta(4, 8), meta(5))
    with pytest.raises(MonarchError, match="whose rows are contiguous"):
        cross_entropy(meta(8, 4).T, meta(4))
    with pytest.raises(MonarchError, match=r"target is \[4\] and dloss \[1\]"):
        cross_entropy_backward(meta(4, 8), meta(4), meta(4), meta(1))
    with pytest.raises(MonarchError, match=r"logits is \[4, 8\] and out \[4, 4\]"):
        cross_entropy_backward(meta(4, 8), meta(4), meta(4), meta(4), out=meta(4, 4))


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", TARGETS)
def test_compiled(target: str) -> None:
    logits, targets, rows = meta(4096, 128256), meta(4096, dtype=torch.int64), meta(4096, dtype=torch.float32)
    for variant in variants(128256)[: None if target == "cuda:90" else 1]:
        for kernel in compiled(target, cross_entropy_parts, logits, targets, first=128256, variant=variant):
            assert_wide(kernel, kinds=("load",))
        for kernel in compiled(target, cross_entropy_backward, logits, targets, rows, rows, variant=variant):
            assert_wide(kernel)
