"""What localized calls look like: the arguments that change, and only those; operands stay where they stood."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.rules import localize, replace_operands, rule_for, tensor_operands
from monarch.compiler.rules.call import op_name, result_types
from tests.compiler.rules.dense import Sample, call, cut, shape_of, trace
from tests.compiler.rules.test_none_wrong import SAMPLES
from tests.compiler.rules.values import below, real

aten = torch.ops.aten


def localized(sample: Sample, factor: str, k: int = 2) -> list[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """The call localized under each strategy that shards `factor`."""
    node = trace(sample).node
    found = []
    for strategy in rule_for(node, shape_of).strategies(k):
        if strategy.factor == factor:
            operands = [
                cut(operand.meta["type"].shape, placement, k)
                for operand, placement in zip(tensor_operands(node), strategy.operands, strict=True)
            ]
            results = [
                None if type_ is None else cut(type_.shape, placement, k)
                for type_, placement in zip(result_types(node), strategy.results, strict=True)
            ]
            found.append(localize(node, operands, results, strategy, "tp", k))
    return found


def text(sample: Sample, factor: str, k: int = 2) -> str:
    ((target, args, kwargs),) = localized(sample, factor, k)
    parts = [str(value) for value in args] + [f"{key}={value}" for key, value in kwargs.items()]
    return f"{op_name(target)}({', '.join(parts)})"


X = real(4, 6)

TEXTS: list[tuple[Sample, str, str]] = [
    (call(aten.view.default, X, [24]), "a", "aten.view.default(x0, [12])"),
    (call(aten.view.default, X, [-1, 3]), "a", "aten.view.default(x0, [4, 3])"),
    (call(aten.expand.default, real(4, 1), [4, 6]), "b", "aten.expand.default(x0, [4, 3])"),
    (call(aten.expand.default, real(4, 1), [-1, 6]), "a", "aten.expand.default(x0, [2, 6])"),
    (call(aten.squeeze.default, real(2, 1, 6)), "a", "aten.squeeze.dims(x0, [1])"),
    (call(aten.squeeze.dim, real(2, 1, 6), 0), "a", "aten.squeeze.dims(x0, [])"),
    (call(aten.slice.Tensor, X, 0, 0, 4), "a", "aten.slice.Tensor(x0, 0, 0, 2)"),
    (call(aten.slice.Tensor, X, 0, 0, 4), "b", "aten.slice.Tensor(x0, 0, 0, 4)"),
    (call(aten.slice.Tensor, X, 1, 2, 4), "a", "aten.slice.Tensor(x0, 1, 2, 4)"),
    (call(aten.repeat.default, real(3), [4]), "r0", "aten.repeat.default(x0, [2])"),
    (call(aten.full.default, [4, 6], 1.0), "b", "aten.full.default([4, 3], 1.0)"),
    (call(aten.new_zeros.default, real(3), [4, 6]), "a", "aten.new_zeros.default(x0, [2, 6])"),
    (call(aten.arange.default, 12), "n", "arange_shard(0, 1, 6, torch.int64, ['tp'])"),
    (call(aten.arange.start_step, 3, 27, 2), "n", "arange_shard(3, 2, 6, torch.int64, ['tp'])"),
    (call(aten.mean.dim, X, [1], True), "b", "mean_shard(x0, [1], True, 6, None)"),
    (call(aten.mean.dim, X, [1], True), "a", "aten.mean.dim(x0, [1], True)"),
    (call(aten.mean.default, X), "a", "mean_shard(x0, [0, 1], False, 24, None)"),
    (call(aten.embedding.default, real(8, 4), below(8, 3)), "v", "embedding_shard(x0, x1, tp)"),
    (call(aten.embedding.default, real(8, 4), below(8, 3)), "d", "aten.embedding.default(x0, x1)"),
    (
        call(aten.embedding_dense_backward.default, real(3, 4), below(8, 3), 8, 5, False),
        "v",
        "embedding_backward_shard(x0, x1, 4, 5, tp)",
    ),
    (call(aten.gather.default, X, 1, below(6, 4, 2)), "v", "gather_shard(x0, 1, x1, tp)"),
    (call(aten.gather.default, X, 1, below(6, 4, 2)), "j", "aten.gather.default(x0, 1, x1)"),
    (call(aten.scatter.value, X, -1, below(6, 4, 2), 2.0), "v", "scatter_shard(x0, 1, x1, 2.0, tp)"),
    (call(aten.mm.default, X, real(6, 8)), "k", "aten.mm.default(x0, x1)"),
    (
        call(aten.native_group_norm.default, real(4, 8, 3), None, None, 4, 8, 3, 4, 1e-5),
        "g",
        "aten.native_group_norm.default(x0, None, None, 4, 4, 3, 2, 1e-05)",
    ),
    (
        call(aten.convolution.default, real(2, 4, 5), real(6, 2, 3), None, [1], [0], [1], False, [0], 2),
        "g",
        "aten.convolution.default(x0, x1, None, [1], [0], [1], False, [0], 1)",
    ),
]


@pytest.mark.parametrize(("sample", "factor", "expected"), TEXTS, ids=str)
def test_local_calls(sample: Sample, factor: str, expected: str) -> None:
    assert text(sample, factor) == expected


def test_nested_arange_and_random_know_all_their_mesh_dims() -> None:
    outer = call(ops.arange_shard, 0, 1, 12, torch.int64, ["dp"])
    node = trace(outer, {"dp": 0}, {"dp": 1}).node
    strategy = rule_for(node, shape_of).strategies(2)[1]
    assert localize(node, [], [(6,)], strategy, "tp", 2)[1] == (0, 1, 6, torch.int64, ["dp", "tp"])
    numbers = call(ops.random, "normal", [4, 6], torch.float32, 7, 1, [4, 12], [[], ["dp"]])
    node = trace(numbers, {"dp": 0}, {"dp": 2}).node
    strategy = next(s for s in rule_for(node, shape_of).strategies(2) if s.results == (1,))
    args = localize(node, [], [(4, 3)], strategy, "tp", 2)[1]
    assert args == ("normal", [4, 3], torch.float32, 7, 1, [4, 12], [[], ["dp", "tp"]])
    assert node.args[6] == [[], ["dp"]]


@pytest.mark.parametrize("sample", SAMPLES, ids=str)
def test_operands_keep_order_and_number(sample: Sample) -> None:
    """The partitioner puts resharded operands in the places of the old ones, one by one."""
    node = trace(sample).node
    for strategy in rule_for(node, shape_of).strategies(2):
        factor = strategy.factor
        for _, args, kwargs in localized(sample, factor) if factor not in ("", "partial") else ():
            found: list[fx.Node] = []
            fx.node.map_arg((args, kwargs), found.append)
            assert [operand.name for operand in found] == [operand.name for operand in tensor_operands(node)]


def test_replace_operands_goes_by_position() -> None:
    node = trace(call(aten.cat.default, [X, X], 1)).node
    assert replace_operands((node.args, node.kwargs), ["first", "second"]) == ((["first", "second"], 1), {})
