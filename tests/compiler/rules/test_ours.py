"""Ops of ours over a mesh dim `m` that is done already, partitioned along a second one, `n`: no rule is wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.rules import Strategy, rule_for
from monarch.compiler.types import TensorType
from tests.compiler.reference import COLLECTIVES
from tests.compiler.rules.dense import Traced, Value, close, combine, local_node, run, shape_of, split
from tests.compiler.rules.values import below, real

M = 2
"""The size of the mesh dim that is done."""

EachWorker = tuple[Value, ...]
"""What each worker along m holds of one operand."""


def both(value: Value) -> EachWorker:
    return (value,) * M


def each(*shape: int) -> EachWorker:
    return tuple(real(*shape) for _ in range(M))


TABLE = real(8, 4)
ROWS = below(8, 4, 6)

# An op, its operands (what each worker along m holds), and how its arguments are made of them.
CASES: dict[str, tuple[ops.MonarchOp, Sequence[EachWorker], Any]] = {
    "all_reduce": (ops.all_reduce, [each(4, 6)], lambda x: ([x], ["m"], "sum")),
    "all_reduce of several": (ops.all_reduce, [each(4, 6), each(2)], lambda x, y: ([x, y], ["m"], "sum")),
    "all_reduce max": (ops.all_reduce, [each(4, 6)], lambda x: ([x], ["m"], "max")),
    "all_gather": (ops.all_gather, [each(4, 6)], lambda x: ([x], ["m"], [0])),
    "all_gather of several": (ops.all_gather, [each(4, 6), each(2, 4)], lambda x, y: ([x, y], ["m"], [0, -1])),
    "reduce_scatter": (ops.reduce_scatter, [each(4, 6)], lambda x: ([x], ["m"], [1], "sum")),
    "reduce_scatter max": (ops.reduce_scatter, [each(4, 6)], lambda x: ([x], ["m"], [0], "max")),
    "all_to_all": (ops.all_to_all, [each(4, 6, 2)], lambda x: ([x], ["m"], [0], [2])),
    "broadcast": (ops.broadcast, [each(4, 6)], lambda x: ([x], ["m"], 1)),
    "permute": (ops.permute, [each(4, 6)], lambda x: ([x], ["m"], [(0, 1)])),
    "shard": (ops.shard, [both(real(4, 6))], lambda x: (x, "m", 0)),
    "first_only": (ops.first_only, [both(real(4, 6))], lambda x: (x, "m")),
    "axis_index": (ops.axis_index, [], lambda: ("m",)),
    "to_varying": (ops.to_varying, [each(4, 6)], lambda x: (x, "m", 0)),
    "from_varying": (ops.from_varying, [each(4, 6)], lambda x: (x, "m", 1)),
    "from_varying sum": (ops.from_varying, [each(4, 6)], lambda x: (x, "m", "sum")),
    "from_varying max": (ops.from_varying, [each(4, 6)], lambda x: (x, "m", "max")),
    "embedding_shard": (
        ops.embedding_shard,
        [tuple(TABLE.chunk(M)), both(ROWS)],
        lambda weight, rows: (weight, rows, "m"),
    ),
    "embedding_backward_shard": (
        ops.embedding_backward_shard,
        [both(real(4, 6, 4)), both(ROWS)],
        lambda grad, rows: (grad, rows, 4, 3, "m"),
    ),
    "gather_shard": (
        ops.gather_shard,
        [each(4, 6), both(below(12, 4, 8))],
        lambda x, index: (x, 1, index, "m"),
    ),
    "scatter_shard": (
        ops.scatter_shard,
        [each(4, 6), both(torch.tensor([[1, 7], [11, 0], [2, 3], [5, 6]])), both(real(4, 2))],
        lambda x, index, values: (x, 1, index, values, "m"),
    ),
    "scatter_shard of a number": (
        ops.scatter_shard,
        [each(4, 6), both(below(12, 4, 2))],
        lambda x, index: (x, -1, index, 2.5, "m"),
    ),
    "scatter_shard of zero": (
        ops.scatter_shard,
        [each(4, 6), both(below(12, 4, 2))],
        lambda x, index: (x, 1, index, 0, "m"),
    ),
    "fill_padding": (ops.fill_padding, [each(4, 6)], lambda x: (x, 0, 3, 0.0, ["m"])),
    "fill_padding with 1": (ops.fill_padding, [each(4, 6)], lambda x: (x, 1, 8, 1.0, ["m"])),
    "in_range": (ops.in_range, [both(below(12, 4, 2))], lambda index: (index, 12, None)),
    "mean_shard": (ops.mean_shard, [each(4, 6)], lambda x: (x, [0, 1], True, 48, None)),
    "arange_shard": (ops.arange_shard, [], lambda: (3, 2, 12, torch.int64, ["m"])),
    "check": (ops.check, [each(4, 6), both(torch.ones(4, 6, dtype=torch.bool))], lambda x, valid: (x, valid, "no")),
    "sample": (
        ops.sample,
        [both(real(4, 6).abs() + 0.5)],
        lambda rate: ("poisson", [rate], 7, 3, [4, 12], [[], ["m"]]),
    ),
    "random": (ops.random, [], lambda: ("normal", [4, 6], torch.float64, 7, 3, [4, 12], [[], ["m"]])),
}


def on_each(
    node: fx.Node, operands: Sequence[EachWorker], position: Mapping[str, int], sizes: Mapping[str, int]
) -> Any:
    """What each worker along m makes at `position` along the other dims."""
    op: Any = node.target
    if op.collective:
        tensors, _, *rest = node.args
        return [
            [
                COLLECTIVES[op.name](
                    list(operands[i]),
                    me,
                    *(a[i] if isinstance(a, list) and op is not ops.permute else a for a in rest),
                )
                for i in range(len(tensors))  # type: ignore[arg-type]
            ]
            for me in range(M)
        ]
    return [
        run(op, node.args, node.kwargs, [held[me] for held in operands], {**position, "m": me}, {**sizes, "m": M})
        for me in range(M)
    ]


def dense(op: ops.MonarchOp, operands: Sequence[EachWorker], arguments: Any) -> tuple[Traced, list[list[Value]]]:
    graph = fx.Graph()
    nodes = []
    for held in operands:
        node = graph.placeholder("x")
        node.meta["type"] = TensorType(held[0].dtype, tuple(held[0].shape))
        nodes.append(node)
    call = graph.create_node("call_function", op, arguments(*nodes), {})
    made = on_each(call, operands, {}, {})
    types = tuple(TensorType(value.dtype, tuple(value.shape)) for value in made[0])
    call.meta["type"] = types if op.collective else types[0]
    return Traced(call, [], []), made


def check_over(op: ops.MonarchOp, operands: Sequence[EachWorker], arguments: Any, strategy: Strategy, k: int) -> None:
    traced, expected = dense(op, operands, arguments)
    local = local_node(traced, strategy, "n", k)
    pieces = []
    for at in range(k):
        held = [
            tuple(split(value, placement, k, index)[at] for value in each_worker)
            for index, (each_worker, placement) in enumerate(zip(operands, strategy.operands, strict=True))
        ]
        pieces.append(on_each(local, held, {"n": at}, {"n": k}))
    for me, index in product(range(M), range(len(expected[0]))):
        whole = combine([piece[me][index] for piece in pieces], strategy.results[index])
        assert close(whole, expected[me][index]), f"worker {me} along m, {strategy}:\n{whole}\n{expected[me][index]}"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("k", [2, 3, 4])
def test_ops_of_ours_along_another_dim(name: str, k: int) -> None:
    traced, _ = dense(*CASES[name])
    for strategy in rule_for(traced.node, shape_of).strategies(k):
        check_over(*CASES[name], strategy, k)


STRATEGIES: dict[str, list[str]] = {
    "all_reduce": ["", "0->0", "1->1", "sum->sum"],
    "all_reduce max": ["", "0->0", "1->1"],
    "all_gather": ["", "1->1", "sum->sum"],
    "reduce_scatter": ["", "0->0", "sum->sum"],
    "all_to_all": ["", "1->1", "sum->sum"],
    "shard": ["", "1->1", "sum->sum"],
    "first_only": ["", "0->0", "1->1", "sum->sum"],
    "axis_index": [""],
    "to_varying": ["", "0->0", "1->1", "sum->sum"],
    "from_varying": ["", "0->0", "1->1", "sum->sum"],
    "from_varying sum": ["", "0->0", "1->1", "sum->sum"],
    "from_varying max": ["", "0->0", "1->1"],
    "embedding_shard": ["", "1,None->2", "None,0->0", "None,1->1", "sum,None->sum"],
    "embedding_backward_shard": ["", "0,0->sum", "1,1->sum", "2,None->1", "sum,None->sum"],
    "gather_shard": ["", "0,0->0", "None,1->1", "sum,None->sum"],
    "scatter_shard": ["", "0,0,0->0", "sum,None,sum->sum"],
    "mean_shard": ["", "0->sum", "1->sum", "sum->sum"],
    "arange_shard": ["", "->0"],
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_ops_of_ours_have_all_strategies(name: str) -> None:
    traced, _ = dense(*CASES[name])
    found = [
        f"{','.join(map(str, s.operands))}->{','.join(map(str, s.results))}" if s.factor else ""
        for s in rule_for(traced.node, shape_of).strategies(2)
    ]
    assert sorted(found) == sorted(STRATEGIES[name])


def test_a_dim_that_becomes_blocks_of_each_workers_own_is_whole_until_it_has() -> None:
    graph = fx.Graph()
    whole = graph.placeholder("x")
    whole.meta["type"] = TensorType(torch.float32, (8, 4))
    own = graph.create_node("call_function", ops.to_varying, (whole, "m", 0), {})
    own.meta["type"] = TensorType(torch.float32, (4, 4))
    again = graph.create_node("call_function", ops.from_varying, (own, "m", 0), {})
    again.meta["type"] = TensorType(torch.float32, (8, 4))
    for node in (own, again):
        found = [strategy.operands for strategy in rule_for(node, shape_of).strategies(2)]
        assert found == [(None,), (1,), ("sum",)]


def test_commit_is_the_same_on_every_worker() -> None:
    graph = fx.Graph()
    node = graph.create_node("call_function", ops.commit, (), {})
    node.meta["type"] = None
    assert rule_for(node, shape_of).strategies(2) == [Strategy((), (), "")]


def test_a_gather_sharded_over_both_dims_is_caught() -> None:
    """gather_shard knows one mesh dim only: cutting its block along another one would look into the wrong rows."""
    with pytest.raises((AssertionError, IndexError)):
        check_over(*CASES["gather_shard"], Strategy((1, None), ("sum",), "v"), 2)


def test_every_local_op_is_covered() -> None:
    # There are kernels, and looks for the first NaN (test_anomalies.py), only once all is partitioned; `out_of_place`
    # runs another op, whose rule it has; draws and checks are tested on several meshes (test_distributions.py);
    # `fill_padding_` stands in plans alone.
    elsewhere = {"kernel", "out_of_place", "find_anomaly", "number_anomaly", "raise_anomaly", "fill_padding_"}
    assert set(LOCAL_OPS) - {str(op) for op, _, _ in CASES.values()} == elsewhere
