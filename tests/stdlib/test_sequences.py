"""Sequence parallelism beside tensor parallelism: PyTorch's numbers, and the collectives of Megatron-LM."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler import ops
from monarch.compiler.errors import LayoutError
from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import partition_graph
from monarch.language import Mesh, program
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.models.llama import Llama
from monarch.stdlib.parallel import combine, fully_shard, tensor_parallel
from tests.compiler.reference import run_reference

MESH = Mesh.abstract(data=2, model=2)
LAYERS, BATCH, TIME, WIDTH = 2, 4, 16, 32
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(vocabulary=60, width=WIDTH, layers=LAYERS, sequence=TIME),
    "llama": lambda: Llama(vocabulary=60, width=WIDTH, layers=LAYERS),
}


def step_of(model: nn.Module, sequence: bool, sharded: bool = False) -> Graph:
    """The partitioned graph of a training step of a copy of the model."""
    placed = copy.deepcopy(model)
    layouts = tensor_parallel(placed, MESH, "model", sequence=sequence)
    if sharded:
        layouts = combine(layouts, fully_shard(placed, MESH, "data"))
    monarch.module_to_mesh(placed, MESH, layouts=layouts)
    optimizer = torch.optim.SGD(placed.parameters(), lr=0.1)

    @program(mesh=MESH)
    def step(tokens: f"i64[{BATCH}@data, {TIME}]", targets: f"i64[{BATCH}@data, {TIME}]"):  # type: ignore[valid-type]
        optimizer.zero_grad()
        loss = F.cross_entropy(placed(tokens).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        return loss

    tokens = torch.zeros(BATCH, TIME, dtype=torch.int64)
    return partition_graph(step.trace(tokens, tokens).graph)


def activations_moved(graph: Graph) -> Counter[str]:
    """How many tensors of batch, time and width each collective over "model" moves."""
    moved: Counter[str] = Counter()
    for node in graph.calls:
        if ops.is_collective(node.target) and "model" in node.args[1]:
            for each in node.args[0]:
                moved[ops.name_of(node.target)] += each.meta["type"].numel == BATCH * TIME * WIDTH
    return +moved


@pytest.mark.sample(2)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_activations_between_blocks_are_shards_of_the_sequence(family: str, sharded: bool) -> None:
    torch.manual_seed(0)
    model = FAMILIES[family]()
    tokens, targets = torch.randint(0, 60, (2, BATCH, TIME))
    graph = step_of(model, True, sharded)
    values = {name: each.detach().clone() for name, each in model.named_parameters()}
    (loss,), updates = run_reference(graph, {0: tokens, 1: targets, "sgd.lr": torch.tensor(0.1).double(), **values})
    plain = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    plain.backward()
    torch.testing.assert_close(loss, plain.detach())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(updates[name], values[name] - 0.1 * parameter.grad, rtol=1e-4, atol=1e-6)
    norms = [node for node in graph.calls if "layer_norm.default" in str(node.target) or "rsqrt" in str(node.target)]
    made = [types[0] if isinstance(types := node.meta["type"], tuple) else types for node in norms]
    assert [type_.layout.placement("model") for type_ in made].count(1) >= 2 * LAYERS
    # Each block's attention and MLP gather and scatter once forward and once backward, and never reduce to all.
    assert activations_moved(graph) == {"all_gather": 4 * LAYERS, "reduce_scatter": 4 * LAYERS}


def test_without_it_norms_are_whole_also_on_a_module_that_had_it() -> None:
    model = FAMILIES["gpt"]()
    tensor_parallel(model, MESH, "model", sequence=True)
    assert activations_moved(step_of(model, False)) == {"all_reduce": 4 * LAYERS}


def test_a_table_of_layers_and_a_layout_of_ones_own() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.LayerNorm(8))
    table = {"1": "column", "3": "row"}
    layouts = tensor_parallel(model, MESH, "model", table=table, sequence="[-, @(data,model), -]")
    placed = monarch.module_to_mesh(copy.deepcopy(model), MESH, layouts=layouts)
    x = torch.randn(3, 8, 8)
    run = program(lambda x: placed(x).detach(), mesh=MESH)
    values = {name: each.detach() for name, each in model.named_parameters()}
    for rows in (3, 1):
        graph = partition_graph(run.trace(x[:rows]).graph)
        torch.testing.assert_close(run_reference(graph, {0: x[:rows], **values})[0][0], model(x[:rows]).detach())
        assert "reduce_scatter" in str(graph)
    odd = run.trace(x[:, :5]).graph  # five tokens over four workers are not sharded
    assert "reduce_scatter" not in str(partition_graph(odd))


def test_a_layout_that_does_not_shard_time_is_an_error() -> None:
    with pytest.raises(LayoutError, match="does not shard time over 'model'") as error:
        tensor_parallel(FAMILIES["gpt"](), MESH, "model", sequence="[@data, -, @model]")
    assert '"[-, @model, -]"' in str(error.value)
