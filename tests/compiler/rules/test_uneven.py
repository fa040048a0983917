"""Every sample on a mesh dim that divides none of its sizes: what is in the padding shows in no result."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import fx

from monarch.compiler.graph import Graph
from monarch.compiler.ops import MonarchOp
from monarch.compiler.pipeline import partition_graph
from monarch.compiler.rules import rule_for
from monarch.compiler.rules.call import result_types
from monarch.compiler.types import Layout, MeshSpec, TensorType
from monarch.compiler.verify import verify
from tests.compiler.reference import run_reference
from tests.compiler.rules.dense import FORMULAS, Sample, Traced, shape_of, trace
from tests.compiler.rules.test_none_wrong import SAMPLES

MESH = MeshSpec.of(m=5)
OPS = [
    sample
    for sample in SAMPLES
    # A graph is pure, what is arbitrary differs between workers, and some ops have no kernel for CPUs.
    if not isinstance(sample.op, MonarchOp)
    and not sample.op._schema.is_mutable
    and not sample.shape_only
    and sample.op not in FORMULAS
]


@pytest.mark.sample(70)
@pytest.mark.parametrize("sample", OPS, ids=str)
def test_an_op_gives_the_dense_result(sample: Sample) -> None:
    traced = trace(sample)
    for dims in shardings(traced):
        graph = graph_of(traced, dims)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            partitioned = partition_graph(graph)
        verify(partitioned, run=True)
        made, _ = run_reference(partitioned, dict(enumerate(traced.values)), poison=True)
        expected = [result for result in traced.results if result is not None]
        for got, wanted in zip(made, expected, strict=True):
            torch.testing.assert_close(got, wanted, equal_nan=True, msg=lambda m, d=dims: f"{d}: {m}")


def shardings(traced: Traced) -> Iterator[tuple[int | None, ...]]:
    """For each operand the dim that is sharded: each dim of each operand alone, and each factor of the rule in all."""
    found: dict[tuple[int | None, ...], None] = {}
    count = len(traced.values)
    for at, value in enumerate(traced.values):
        for dim in range(value.ndim):
            found[tuple(dim if each == at else None for each in range(count))] = None
    rule = rule_for(traced.node, shape_of)
    for factor in rule.sizes:
        places = [[at for at, dim in enumerate(dims) if factor in dim] for dims in rule.operands]
        found[tuple(at[0] if at else None for at in places)] = None
    yield from found


def graph_of(traced: Traced, dims: tuple[int | None, ...]) -> Graph:
    graph = Graph("sample", MESH)
    given = []
    for at, (value, dim) in enumerate(zip(traced.values, dims, strict=True)):
        layout = Layout.replicated(value.ndim).place("m", dim)
        given.append(graph.placeholder("input", at, TensorType(value.dtype, tuple(value.shape), layout)))
    nodes = dict(zip((node for node in traced.node.graph.nodes if node.op == "placeholder"), given, strict=True))
    args = fx.node.map_arg(traced.node.args, lambda node: nodes[node])
    kwargs = fx.node.map_arg(traced.node.kwargs, lambda node: nodes[node])
    types = result_types(traced.node)
    made = graph.call(traced.node.target, *args, type=traced.node.meta["type"], **kwargs)
    if isinstance(traced.node.meta["type"], TensorType):
        graph.output([made], {})
    else:
        parts = [graph.call(operator.getitem, made, at, type=type_) for at, type_ in enumerate(types) if type_]
        graph.output(list(parts), {})
    return graph
