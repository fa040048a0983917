"""No placement is missing: what placement of a core op's operands and results holds numerically is a strategy, or is
had for free from one, or is listed here with the reason why it is left out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from monarch.compiler.rules import Strategy, rule_for
from monarch.compiler.types import Placement
from tests.compiler.rules.dense import Differs, Sample, call, check, check_all, had_for_free, shape_of, trace
from tests.compiler.rules.values import below, distinct, flags, real, unit

aten = torch.ops.aten


def placements(shape: tuple[int, ...], k: int, reductions: tuple[str, ...]) -> list[Placement]:
    return [None, *(dim for dim, size in enumerate(shape) if size > 1 and size % k == 0), *reductions]


def negated(sample: Sample) -> Sample:
    """The same call on other numbers: every float's sign turned."""
    args = pytree.tree_map_only(torch.Tensor, lambda x: -x if x.dtype.is_floating_point else x, sample.args)
    return Sample(sample.op, args, sample.kwargs)


def valid(sample: Sample, k: int) -> Iterator[Strategy]:
    """Every placement of operands (whole, sharded, partial sums) and results that makes up the dense result."""
    traced = trace(sample)
    others = [trace(sample), trace(negated(sample))]  # what holds for one choice of numbers and summands may be luck
    operands = [placements(tuple(value.shape), k, ("sum",)) for value in traced.values]
    results = [
        placements(tuple(value.shape), k, ("sum", "max", "min")) for value in traced.results if value is not None
    ]
    for into in product(*operands):
        for out in product(*results):
            strategy = Strategy(into, out, "?")
            try:
                check(sample, traced, [("m", k, strategy)])
                for salt, other in enumerate(others, start=1):
                    check(sample, other, [("m", k, strategy)], salt)
            except (Differs, RuntimeError, IndexError):
                continue  # the pieces do not even fit together, or make up something else
            yield strategy


def missing(sample: Sample, k: int) -> list[tuple[tuple[Placement, ...], tuple[Placement, ...]]]:
    listed = rule_for(trace(sample).node, shape_of).strategies(k)
    return [
        (strategy.operands, strategy.results)
        for strategy in valid(sample, k)
        if not any(had_for_free(strategy, one) for one in listed)
    ]


CORE = [
    call(aten.mm.default, real(4, 6), real(6, 8)),
    call(aten.mm.default, real(4, 1), real(1, 8)),
    call(aten.bmm.default, real(2, 4, 6), real(2, 6, 8)),
    call(aten.addmm.default, real(8), real(4, 6), real(6, 8)),
    call(aten.addmm.default, real(4, 1), real(4, 6), real(6, 8)),
    call(aten.mv.default, real(4, 6), real(6)),
    call(aten.dot.default, real(4), real(4)),
    call(aten.add.Tensor, real(4, 6), real(4, 6)),
    call(aten.add.Tensor, real(4, 6), real(6)),
    call(aten.add.Tensor, real(4, 1), real(1, 6)),
    call(aten.add.Tensor, real(4, 6), 1.0),
    call(aten.sub.Tensor, real(4, 6), real(4, 6), alpha=2),
    call(aten.mul.Tensor, real(4, 6), real(4, 1)),
    call(aten.mul.Tensor, real(4, 6), 2.0),
    call(aten.div.Tensor, real(4, 6), unit(6)),
    call(aten.where.self, flags(4, 6), real(4, 6), real(6)),
    call(aten.masked_fill.Scalar, real(4, 6), flags(4, 6), 0),
    call(aten.masked_fill.Scalar, real(4, 6), flags(4, 6), 1),
    call(aten.addcmul.default, real(4, 2), real(4, 2), real(4, 2)),
    call(aten.addcdiv.default, real(4, 2), real(4, 2), unit(4, 2)),
    call(aten.lerp.Scalar, real(4, 2), real(4, 2), 0.3),
    call(aten.maximum.default, real(4, 6), real(4, 6)),
    call(aten.relu.default, real(4, 6)),
    call(aten.exp.default, real(4, 6)),
    call(aten.neg.default, real(4, 6)),
    call(aten.threshold_backward.default, real(4, 6), real(4, 6), 0),
    call(aten.gelu_backward.default, real(4, 6), real(4, 6)),
    call(aten.sum.default, real(4, 6)),
    call(aten.sum.dim_IntList, real(4, 6, 2), [0, -1]),
    call(aten.sum.dim_IntList, real(4, 6), [1], True),
    call(aten.mean.dim, real(4, 6), [1]),
    call(aten.amax.default, real(4, 6), [1]),
    call(aten.amin.default, real(4, 6), [0], True),
    call(aten.argmax.default, distinct(4, 6), 1),
    call(aten.var.correction, real(4, 6), [1]),
    call(aten.cumsum.default, real(4, 6), 1),
    call(aten._softmax.default, real(4, 6), 1, False),
    call(aten._log_softmax.default, real(4, 6), 0, False),
    call(aten._softmax_backward_data.default, real(4, 6), unit(4, 6), 1, torch.float64),
    call(aten.permute.default, real(4, 6, 2), [2, 0, 1]),
    call(aten.transpose.int, real(4, 6, 2), 0, 1),
    call(aten.t.default, real(4, 6)),
    call(aten.unsqueeze.default, real(4, 6), 1),
    call(aten.squeeze.dim, real(4, 1, 6), 1),
    call(aten.expand.default, real(4, 1), [2, 4, 6]),
    call(aten.repeat.default, real(4, 2), [2, 4, 1]),
    call(aten.slice.Tensor, real(4, 6), 1, 1, 5),
    call(aten.slice.Tensor, real(4, 6), 1, 0, 6),
    call(aten.select.int, real(4, 6), 1, 2),
    call(aten.cat.default, [real(4, 2), real(4, 6)], 1),
    call(aten.stack.default, [real(4, 2), real(4, 2)], 1),
    call(aten.split.Tensor, real(4, 6), 3, 1),
    call(aten.flip.default, real(4, 6), [1]),
    call(aten.tril.default, real(2, 4, 6)),
    call(aten.constant_pad_nd.default, real(4, 6), [1, 1]),
    call(aten.embedding.default, real(8, 4), below(8, 4, 6)),
    call(aten.embedding_dense_backward.default, real(4, 6, 2), below(8, 4, 6), 8, -1, False),
    call(aten.index_select.default, real(4, 6), 1, below(6, 4)),
    call(aten.gather.default, real(4, 6), 1, below(6, 4, 8)),
    call(aten.scatter_add.default, real(4, 6), 1, below(6, 4, 8), real(4, 8)),
    call(aten.index_put.default, real(4, 6), [below(4, 8), below(6, 8)], real(8), True),
    call(aten.index.Tensor, real(4, 6, 2), [None, below(6, 8)]),
    call(aten.full.default, [4, 6], 2.0),
    call(aten.arange.default, 12),
    call(aten.convolution.default, real(2, 4, 3), real(4, 4, 3), real(4), [1], [1], [1], False, [0], 1),
]


@pytest.mark.sample()
@pytest.mark.parametrize("sample", CORE, ids=str)
@pytest.mark.parametrize("k", [2, 3])
def test_no_placement_is_missing(sample: Sample, k: int) -> None:
    assert missing(sample, k) == []


# Placements that hold and are left out, and why.
LEFT_OUT = [
    (
        "the values of the operand do not matter: a pending sum would do as it is",
        call(aten.full_like.default, real(4), 2.0),
        [(("sum",), (None,))],
    ),
    (
        "linear in weight and bias together, but the other results do not depend on them",
        call(aten.native_layer_norm.default, real(1, 2), [2], real(2), real(2), 1e-5),
        [((None, "sum", "sum"), ("sum", None, None))],
    ),
    (
        "a copy is its source's, whatever it is copied over",
        call(aten.copy.default, real(4), real(4)),
        [(("sum", None), (None,))],
    ),
]


@pytest.mark.parametrize(
    ("why", "sample", "left_out"), LEFT_OUT, ids=lambda value: value if isinstance(value, str) else ""
)
def test_left_out(why: str, sample: Sample, left_out: list[object]) -> None:
    found = [m for m in missing(sample, 2) if not {"max", "min"} & {*m[1]}]
    assert found == left_out, why


dims = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=0, max_size=4)


@given(dims, st.data(), st.sampled_from([2, 3, 4]))
def test_views_none_wrong_none_missing(source: list[int], data: st.DataObject, k: int) -> None:
    """Between any two shapes of as many elements."""
    count = math.prod(source)
    target: list[int] = []
    left = count
    while left > 1:
        size = data.draw(st.sampled_from([d for d in range(1, left + 1) if left % d == 0]))
        target.append(size)
        left //= size
    target += [1] * data.draw(st.integers(0, 2))
    assume(len(target) <= 6)
    sample = call(aten.view.default, real(*source), target)
    check_all(sample, (k,))
    assert missing(sample, k) == []


@given(dims, st.lists(st.booleans(), min_size=8, max_size=8), st.integers(0, 4), st.sampled_from([2, 3, 4]))
def test_broadcasting_none_wrong_none_missing(shape: list[int], ones: list[bool], drop: int, k: int) -> None:
    """Between any two shapes that broadcast."""
    left = [1 if one else size for size, one in zip(shape, ones, strict=False)]
    right = [1 if one else size for size, one in zip(shape, ones[4:], strict=False)][drop:]
    for op in (aten.mul.Tensor, aten.add.Tensor, aten.atan2.default):
        sample = call(op, real(*left), real(*right))
        check_all(sample, (k,))
        assert missing(sample, k) == []


@given(dims, st.permutations(range(4)), st.sampled_from([2, 3]))
def test_permutations_none_wrong_none_missing(shape: list[int], order: list[int], k: int) -> None:
    sample = call(aten.permute.default, real(*shape), [dim for dim in order if dim < len(shape)])
    check_all(sample, (k,))
    assert missing(sample, k) == []
