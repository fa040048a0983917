"""No rule is wrong: every strategy of every sample, over one mesh dim and over several, makes up the dense result."""

from __future__ import annotations

import pytest
import torch

from monarch.compiler.rules import Strategy, rule_for
from monarch.compiler.rules.register import registered
from tests.compiler.rules.dense import Differs, Sample, call, check, check_all, nested_levels, shape_of, trace
from tests.compiler.rules.samples import index_samples, matmul_samples, reduce_samples, view_samples
from tests.compiler.rules.samples_layers import (
    attention_samples,
    convolution_samples,
    factory_samples,
    loss_samples,
    norm_samples,
    our_samples,
)
from tests.compiler.rules.samples_linalg import fourier_samples, linalg_samples, sampler_samples
from tests.compiler.rules.samples_more import margin_samples, rare_samples, search_samples
from tests.compiler.rules.samples_pointwise import pointwise_samples
from tests.compiler.rules.values import real

aten = torch.ops.aten

SAMPLES: list[Sample] = [
    *pointwise_samples(),
    *view_samples(),
    *matmul_samples(),
    *reduce_samples(),
    *index_samples(),
    *norm_samples(),
    *loss_samples(),
    *attention_samples(),
    *convolution_samples(),
    *factory_samples(),
    *our_samples(),
    *linalg_samples(),
    *sampler_samples(),
    *fourier_samples(),
    *search_samples(),
    *margin_samples(),
    *rare_samples(),
]

ELSEWHERE = {
    "tests of collectives (test_ours.py)": """
        all_gather all_reduce all_to_all axis_index broadcast commit embedding_backward_shard embedding_shard first_only
        gather_shard permute reduce_scatter scatter_shard shard arange_shard to_varying from_varying
    """,
    "tests of several meshes (test_several_meshes.py)": "recv send",
    "tests of model families (test_training.py, mixtral)": """
        transformers.grouped_mm_fallback transformers.grouped_mm_fallback_backward
    """,
    "tests of accelerator kernels (test_accelerator.py)": """
        aten._scaled_dot_product_flash_attention.default aten._scaled_dot_product_flash_attention_backward
        aten._scaled_dot_product_efficient_attention aten._scaled_dot_product_efficient_attention_backward
        aten._scaled_dot_product_cudnn_attention aten._scaled_dot_product_cudnn_attention_backward
    """,
    "refused: they draw random numbers (test_errors.py)": """
        aten.bernoulli aten.dropout aten.exponential aten.multinomial aten.normal aten.normal_functional aten.poisson
        aten.rand aten.rand_like aten.randint aten.randint_like aten.randn aten.randn_like aten.random aten.randperm
        aten.rrelu_with_noise aten.rrelu_with_noise_functional aten.uniform aten.binomial aten._sample_dirichlet
        aten._standard_gamma
    """,
    "tests of draws on any mesh, and of checks (test_distributions.py)": "check sample",
}


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_every_strategy_makes_up_the_dense_result(sample: Sample) -> None:
    assert check_all(sample)


def test_every_registered_op_has_a_sample() -> None:
    sampled = set()
    for sample in SAMPLES:
        name = str(sample.op)
        sampled |= {name, name.rsplit(".", 1)[0]}
    elsewhere = {name for names in ELSEWHERE.values() for name in names.split()}
    ours = [
        name for name in registered() if not name.startswith("tests_of")
    ]  # other tests of this process register some
    missing = sorted(name for name in ours if name not in sampled | elsewhere)
    assert not missing
    assert not sorted(elsewhere - set(registered()))


def test_what_is_sampled_also_shards() -> None:
    """The checks would pass without a single strategy: count what they ran."""
    replicated = sharded = passed = nested = 0
    for sample in SAMPLES:
        traced = trace(sample)
        for strategy in rule_for(traced.node, shape_of).strategies(2):
            replicated += strategy.factor == ""
            passed += strategy.factor == "partial"
            sharded += strategy.factor not in ("", "partial")
        nested += sum(1 for _ in nested_levels(traced, 2))
    assert replicated == len(SAMPLES)
    assert sharded > len(SAMPLES)
    assert passed > len(SAMPLES) / 4
    assert nested > 4 * len(SAMPLES)


WRONG = [
    (call(aten._softmax.default, real(4, 6), 1, False), Strategy((1,), (1,), "d")),
    (call(aten.mm.default, real(4, 6), real(6, 8)), Strategy((1, 0), (None,), "k")),
    (call(aten.mm.default, real(4, 6), real(6, 8)), Strategy(("sum", "sum"), ("sum",), "partial")),
    (call(aten.addmm.default, real(8), real(4, 6), real(6, 8)), Strategy((None, 1, 0), ("sum",), "k")),
    (call(aten.relu.default, real(4, 6)), Strategy(("sum",), ("sum",), "partial")),
    (call(aten.view.default, real(4, 6), [24]), Strategy((1,), (0,), "b")),
    (call(aten.cumsum.default, real(4, 6), 1), Strategy((1,), (1,), "b")),
    (call(aten.add.Tensor, real(4, 6), 1.0), Strategy(("sum",), ("sum",), "partial")),
]


@pytest.mark.parametrize(("sample", "strategy"), WRONG, ids=str)
def test_a_wrong_strategy_is_caught(sample: Sample, strategy: Strategy) -> None:
    with pytest.raises((Differs, RuntimeError)):
        check(sample, trace(sample), [("m", 2, strategy)])


@pytest.mark.parametrize(
    "sample",
    [
        call(aten.linear.default, real(4, 2, 8), real(8, 8), real(8)),
        call(aten.view.default, real(8, 3, 8), [24, 2, 4]),
        call(aten.mean.dim, real(8, 8), [0, 1]),
        call(aten.arange.start_step, 3, 19, 2),
    ],
    ids=str,
)
def test_three_nested_dims(sample: Sample) -> None:
    traced = trace(sample)
    for levels in nested_levels(traced, 2, depth=3):
        check(sample, traced, levels)
