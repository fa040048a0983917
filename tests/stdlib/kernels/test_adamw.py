"""AdamW on many tensors against torch.optim.AdamW in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.adamw import BLOCK, VARIANTS, AdamWTable, adamw, adamw_rates, adamw_table
from tests.kernels.triton.assembly import assert_wide
from tests.stdlib.kernels.numerics import TARGETS, assert_near, compiled, launching, meta

SHAPES = [(3,), (70, 50), (BLOCK,), (BLOCK + 1,), (1, 1, 5)]
SETTINGS = {"lr": 3e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}


def _tensors(dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_steps_are_those_of_torch(dtype: torch.dtype) -> None:
    parameters, gradients = _tensors(), _tensors(dtype)
    moments = [[torch.zeros_like(p) for p in parameters] for _ in range(2)]
    copies = [torch.empty_like(p, dtype=torch.bfloat16) for p in parameters]
    exact = [p.double().requires_grad_() for p in parameters]
    optimizer = torch.optim.AdamW(exact, **SETTINGS)
    table = adamw_table(parameters, gradients, *moments, copies)
    with launching(*(tensor for row in table.tensors for tensor in row)):
        for step in range(1, 4):
            for g, like in zip(gradients, exact, strict=True):
                g.copy_(torch.randn(g.shape))
                like.grad = 0.5 * g.double()
            adamw(table, adamw_rates(step=step, **SETTINGS), scale=torch.tensor([0.5]))
            optimizer.step()
    for place, (parameter, like) in enumerate(zip(parameters, exact, strict=True)):
        assert_near(parameter, like.detach(), scale=4)
        assert torch.equal(copies[place], parameter.bfloat16())
        assert_near(moments[0][place], optimizer.state[like]["exp_avg"], scale=4)
        assert_near(moments[1][place], optimizer.state[like]["exp_avg_sq"], scale=4)


def test_a_gradient_of_zero_leaves_only_the_decay() -> None:
    parameters = _tensors()
    before = [p.clone() for p in parameters]
    zeros = [[torch.zeros_like(p) for p in parameters] for _ in range(3)]
    table = adamw_table(parameters, *zeros)
    with launching(*(tensor for row in table.tensors for tensor in row)):
        adamw(table, adamw_rates(step=1, lr=0.1, weight_decay=0.5))
    for old, new in zip(before, parameters, strict=True):
        assert_near(new, old.double() * 0.95)


def test_errors() -> None:
    a, b = torch.zeros(8), torch.zeros(8)
    with pytest.raises(MonarchError, match=r"rates are \[3\]"):
        adamw(adamw_table([a], [a], [a], [a]), torch.zeros(3))
    with pytest.raises(MonarchError, match="no parameters"):
        adamw_table([], [], [], [])
    with pytest.raises(MonarchError, match=r"tensor 1 of the update has 8 elements of torch.float32; .* one of 9 of"):
        adamw_table([a, b], [a, torch.zeros(9)], [a, b], [a, b])
    with pytest.raises(MonarchError, match="a strided one of 8"):
        adamw_table([a], [torch.zeros(16)[::2]], [a], [a])
    with pytest.raises(MonarchError, match="an address that 16 does not divide"):
        adamw_table([a], [torch.zeros(9)[1:]], [a], [a])


def _meta_table() -> AdamWTable:
    wide = [meta(1024, 1024, dtype=torch.float32) for _ in range(4)]
    return adamw_table(wide, [meta(1024, 1024) for _ in range(4)], wide, wide, [meta(1024, 1024) for _ in range(4)])


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", TARGETS)
def test_compiled(target: str) -> None:
    scale = meta(1, dtype=torch.float32)
    for variant in VARIANTS[: None if target == "cuda:90" else 1]:
        for kernel in compiled(
            target, adamw, _meta_table(), meta(8, dtype=torch.float32), scale=scale, variant=variant
        ):
            assert_wide(kernel)
