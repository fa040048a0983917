"""No worker makes more than it needs: over all golden programs and model families, no value is larger than the largest
local block of what it is made from, but for collectives' results, ops that run whole, and ops that grow their operands;
and none is made whole only to keep a shard of it."""

from __future__ import annotations

import math
import operator
from pathlib import Path

import pytest
import torch

from monarch.compiler import ops
from monarch.compiler.errors import MonarchError
from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import partition_graph
from monarch.compiler.rules import tensor_operands
from monarch.compiler.text import parse_graph
from monarch.compiler.types import TensorType
from monarch.language import Mesh, layout, module_to_mesh, program
from monarch.stdlib.parallel import combine, fully_shard, tensor_parallel
from tests.models.families import FAMILIES

TESTS = Path(__file__).parents[1]
SAMPLED = ("llama", "bloom", "deberta-v2", "mixtral", "t5")


PRODUCTS = "mm bmm matmul addmm baddbmm linear convolution convolution_backward".split()
"""Their results have dims of several operands, and a pending sum has all of them."""


def silly(graph: Graph) -> list[str]:
    """What a partitioned graph makes too much of."""
    found = []
    free: set[torch.fx.Node] = set()  # values that come from no value with dims
    for node in graph.calls:
        type_ = node.meta["type"]
        if not isinstance(type_, TensorType) or "gathered" in node.meta or _comes_from_elsewhere(node):
            continue
        operands = tensor_operands(node)
        if all(operand in free or not operand.meta["type"].ndim for operand in operands):
            free.add(node)
            if type_.ndim and node.users and all(user.target is ops.shard for user in node.users):
                found.append(f"%{node.name} is made whole, and shards of it are kept: {node.format_node()}")
            continue
        if getattr(node.target, "_opname", "") in PRODUCTS:
            continue
        types = [each.meta["type"] for each in operands if each.meta["type"].ndim]
        grows = math.prod(type_.shape) > max(math.prod(each.shape) for each in types)
        local, largest = _elements(graph, type_), max(_elements(graph, each) for each in types)
        if not grows and local > largest:
            found.append(f"%{node.name} has {local} elements, its largest operand {largest}: {node.format_node()}")
    return found


def _elements(graph: Graph, type_: TensorType) -> int:
    return math.prod(graph.local_shape(type_))


def _comes_from_elsewhere(node: torch.fx.Node) -> bool:
    """Whether a value is one of an op's several results, of other workers, or of a region."""
    return node.target is operator.getitem or ops.is_collective(node.target) or node.target in ops.WITH_REGIONS


def golden_graphs() -> dict[str, Graph]:
    found = {}
    for file in sorted(TESTS.rglob("golden/*.txt")):
        text = file.read_text()
        if text.startswith("graph @"):
            try:
                found[file.stem] = parse_graph(text)
            except MonarchError:
                continue  # several graphs, or more text behind one
    return found


GOLDEN = golden_graphs()


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_programs_make_no_more_than_they_need(name: str) -> None:
    graph = GOLDEN[name]
    if graph.partitioned != graph.mesh.names:
        if graph.partitioned or graph.parts:
            pytest.skip("a graph of several meshes, or on its way through the partitioner")
        graph = partition_graph(graph)
    assert silly(graph) == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", SAMPLED)
def test_training_steps_of_models_make_no_more_than_they_need(family: str) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family].model()
    mesh = Mesh.abstract(data=2, model=2)
    module_to_mesh(model, mesh, combine(tensor_parallel(model, mesh, "model"), fully_shard(model, mesh, "data")))

    def step(**batch: torch.Tensor) -> list[torch.Tensor]:
        placed = {name: layout(x, ["data"] + [None] * (x.ndim - 1)) for name, x in batch.items()}
        loss = model(**placed).loss
        loss.backward()
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return [loss, *grads]

    batch = FAMILIES[family].batch(torch.Generator().manual_seed(1))
    assert silly(partition_graph(program(step).trace(**batch).graph)) == []
