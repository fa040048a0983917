"""Rules of attention ops that have kernels on accelerators only.

Everywhere: every strategy's local call makes the local shapes that the rule promises (on the meta device). On a machine
with a CUDA device: it also makes up the dense result.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monarch.compiler.rules import rule_for
from monarch.compiler.rules.call import result_types
from tests.compiler.rules.dense import Sample, Traced, call, check, cut, local_node, run, shape_of, trace
from tests.compiler.rules.values import real

aten = torch.ops.aten

FLASH = aten._scaled_dot_product_flash_attention.default
FLASH_BACKWARD = aten._scaled_dot_product_flash_attention_backward.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default
EFFICIENT_BACKWARD = aten._scaled_dot_product_efficient_attention_backward.default
CUDNN = aten._scaled_dot_product_cudnn_attention.default
CUDNN_BACKWARD = aten._scaled_dot_product_cudnn_attention_backward.default


def samples(device: str) -> list[Sample]:
    def tensor(*shape: int) -> torch.Tensor:
        return real(*shape, dtype=torch.float16).to(device)

    q, grad = tensor(2, 4, 8, 16), tensor(2, 4, 8, 16)
    k, v = tensor(2, 4, 8, 16), tensor(2, 4, 8, 16)
    mask = tensor(1, 4, 8, 8).expand(2, 4, 8, 8)
    flash, efficient, cudnn = FLASH(q, k, v), EFFICIENT(q, k, v, mask, True), CUDNN(q, k, v, None, True)
    plain = EFFICIENT(q, k, v, None, True)
    return [
        call(FLASH, q, k, v),
        call(FLASH, q, k, v, 0.0, True, scale=0.5),
        call(FLASH_BACKWARD, grad, q, k, v, *flash[:6], 0.0, False, *flash[6:8]),
        call(EFFICIENT, q, k, v, None, True),
        call(EFFICIENT, q, k, v, mask, True),
        call(EFFICIENT_BACKWARD, grad, q, k, v, mask, *efficient, 0.0, [True] * 4),
        call(EFFICIENT_BACKWARD, grad, q, k, v, None, *plain, 0.0, [True, True, True, False]),
        call(CUDNN, q, k, v, None, True),
        call(CUDNN_BACKWARD, grad, q, k, v, *cudnn[:2], *cudnn[6:8], None, *cudnn[2:6], 0.0, False),
    ]


COUNT = len(samples("meta"))


def typed(sample: Sample) -> Sample:
    """The sample with its random state as i64: u64, which flash attention keeps it in, is no dtype of ours yet."""

    def signed(value: Any) -> Any:
        return value.to(torch.int64) if isinstance(value, torch.Tensor) and value.dtype == torch.uint64 else value

    return Sample(sample.op, tuple(map(signed, sample.args)), sample.kwargs)


@pytest.fixture
def signed_state(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.compiler.rules import dense

    def run_signed(*args: Any) -> list[torch.Tensor | None]:
        made = run(*args)
        return [value.to(torch.int64) if value is not None and value.dtype == torch.uint64 else value for value in made]

    monkeypatch.setattr(dense, "run", run_signed)


@pytest.mark.usefixtures("signed_state")
@pytest.mark.parametrize("index", range(COUNT))
def test_local_shapes(index: int) -> None:
    sample = typed(samples("meta")[index])
    traced = trace(sample)
    strategies = rule_for(traced.node, shape_of).strategies(2)
    assert any(strategy.factor not in ("", "partial") for strategy in strategies)
    for strategy in strategies:
        local = local_node(traced, strategy, "m", 2)
        values = [
            torch.empty(cut(value.shape, placement, 2), dtype=value.dtype, device="meta")
            for value, placement in zip(traced.values, strategy.operands, strict=True)
        ]
        made = run(local.target, local.args, local.kwargs, values, {"m": 0}, {"m": 2})
        shapes = [None if value is None else tuple(value.shape) for value in made]
        assert shapes == [None if type_ is None else type_.shape for type_ in result_types(local)], strategy


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device: torch.cuda.is_available() is False")
@pytest.mark.usefixtures("signed_state")
@pytest.mark.parametrize("index", range(COUNT))
def test_numbers(index: int) -> None:
    traced: Traced = trace(typed(samples("cuda")[index]))
    for strategy in rule_for(traced.node, shape_of).strategies(2):
        if strategy.factor != "partial":  # random summands cost half precision too many digits
            check(samples("cuda")[index], traced, [("m", 2, strategy)])
