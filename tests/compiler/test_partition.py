"""The partitioner: right against dense PyTorch, and for standard layouts just the collectives that an expert would
write."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
import torch

from monarch.compiler.cost.work import graph_costs
from monarch.compiler.errors import LayoutError
from monarch.compiler.partition import nesting_order
from monarch.compiler.pipeline import partition_graph
from monarch.compiler.text import parse_graph
from monarch.compiler.types import MeshSpec, TensorType
from tests.compiler.reference import run_reference
from tests.compiler.training import CNN, GPT, Step, check

LAYERS = 2
BATCH, SEQUENCE, WIDTH, VOCAB = 8, 16, 32, 256


def replicated(name: str, p: torch.Tensor) -> str | None:
    return None


def megatron(name: str, p: torch.Tensor) -> str | None:
    part = name.split(".")[-2]
    return "[@model, -]" if part in ("q", "k", "v", "up") else "[-, @model]" if part in ("o", "down") else None


def fully_sharded(name: str, p: torch.Tensor) -> str | None:
    return "[@data" + ", -" * (p.ndim - 1) + "]"


def both(name: str, p: torch.Tensor) -> str | None:
    tensor = megatron(name, p)
    if tensor is None:
        return fully_sharded(name, p)
    return tensor.replace("[@model", "[@(model,data)") if tensor.startswith("[@") else "[@data, @model]"


@cache
def traced_step(optimizer: str) -> Step:
    """Traced once: where it runs is chosen behind that."""
    torch.manual_seed(0)
    tokens, targets = torch.randint(0, VOCAB, (2, BATCH, SEQUENCE))
    model = GPT(VOCAB, WIDTH, layers=LAYERS)
    return Step(model, MeshSpec.of(data=1), (tokens, targets), ("[-, -]",) * 2, replicated, optimizer=optimizer)


def gpt_step(mesh: MeshSpec, layout_of: Any, inputs: str = "[@data, -]", optimizer: str = "adamw") -> Step:
    step = copy.copy(traced_step(optimizer))
    step.graph = step.on(mesh, (inputs, inputs), layout_of)
    return step


CASES = {
    "one worker": (MeshSpec.of(data=1), replicated, "[@data, -]"),
    "data parallel": (MeshSpec.of(data=2), replicated, "[@data, -]"),
    "data parallel 4": (MeshSpec.of(data=4), replicated, "[@data, -]"),
    "tensor parallel": (MeshSpec.of(model=2), megatron, "[-, -]"),
    "fully sharded": (MeshSpec.of(data=2), fully_sharded, "[@data, -]"),
    "data and tensor parallel": (MeshSpec.of(data=2, model=2), megatron, "[@data, -]"),
    "fully sharded in tensor parallel": (MeshSpec.of(data=2, model=2), both, "[@data, -]"),
    "sequences": (MeshSpec.of(seq=2), replicated, "[-, @seq]"),
    "sequences and tensor parallel": (MeshSpec.of(seq=2, model=2), megatron, "[-, @seq]"),
    "fully sharded over sequences": (MeshSpec.of(data=2, seq=2), fully_sharded, "[@data, @seq]"),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.full)])
def test_a_training_step_gives_the_numbers_of_dense_pytorch(case: str, optimizer: str) -> None:
    mesh, layout_of, inputs = CASES[case]
    step = gpt_step(mesh, layout_of, inputs, optimizer=optimizer)
    check(step, *run_reference(partition_graph(step.graph), step.values))


def collectives(step: Step) -> dict[str, dict[str, dict[str, int]]]:
    return graph_costs(partition_graph(step.graph))["collectives"]


PARAMETERS = sum(p.numel() for p in GPT(VOCAB, WIDTH, layers=LAYERS).parameters())


def test_data_parallel_reduces_the_gradients_once() -> None:
    moved = collectives(gpt_step(MeshSpec.of(data=2), replicated))
    # One bucket of gradients and the loss; and the number of targets that count, which cross_entropy's ignore_index
    # makes data.
    assert moved["data"].keys() == {"all_reduce"}
    assert moved["data"]["all_reduce"]["count"] == 2
    assert moved["data"]["all_reduce"]["bytes"] == 4 * PARAMETERS + 8


def test_tensor_parallel_reduces_twice_a_block_each_way() -> None:
    moved = collectives(gpt_step(MeshSpec.of(model=2), megatron, "[-, -]"))
    activation = 4 * BATCH * SEQUENCE * WIDTH
    assert moved == {
        "model": {"all_reduce": {"count": 4 * LAYERS, "tensors": 4 * LAYERS, "bytes": 4 * LAYERS * activation}}
    }


def test_fully_sharded_gathers_each_layer_twice_and_scatters_its_gradients_once() -> None:
    moved = collectives(gpt_step(MeshSpec.of(data=2), fully_sharded))["data"]
    groups = LAYERS + 3  # the blocks, the embedding, the last norm and the head
    assert moved["reduce_scatter"]["count"] == groups
    assert moved["reduce_scatter"]["bytes"] == 4 * PARAMETERS
    # The embedding's table is not needed again in the backward pass.
    assert moved["all_gather"]["count"] == 2 * groups - 1
    assert moved["all_reduce"] == {"count": 1, "tensors": 2, "bytes": 8}
    assert moved.keys() == {"reduce_scatter", "all_gather", "all_reduce"}


def vocabulary_parallel(name: str, p: torch.Tensor) -> str | None:
    return "[@model, -]" if name in ("embed.weight", "head.weight") else megatron(name, p)


@pytest.mark.sample(1)
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_sharded_vocabulary_never_makes_the_logits_whole(optimizer: str) -> None:
    step = gpt_step(MeshSpec.of(model=2), vocabulary_parallel, "[-, -]", optimizer=optimizer)
    partitioned = partition_graph(step.graph)
    check(step, *run_reference(partitioned, step.values))
    logits = BATCH * SEQUENCE * VOCAB
    for node in partitioned.calls:
        if isinstance(node.meta["type"], TensorType) and node.meta["type"].numel == logits:
            assert partitioned.local_shape(node.meta["type"]) != node.meta["type"].shape, node


@pytest.mark.sample(1)
@pytest.mark.parametrize("mesh", [MeshSpec.of(data=2), MeshSpec.of(data=4)])
def test_a_convolution_network_has_the_batch_statistics_of_the_whole_batch(mesh: MeshSpec) -> None:
    torch.manual_seed(0)
    images, labels = torch.randn(8, 2, 16, 16), torch.randint(0, 8, (8,))
    step = Step(CNN(), mesh, (images, labels), ("[@data, -, -, -]", "[@data]"), replicated, optimizer="sgd")
    partitioned = partition_graph(step.graph)
    check(step, *run_reference(partitioned, step.values), tolerance=1e-4)
    moved = graph_costs(partitioned)["collectives"]["data"]
    assert moved.keys() == {"all_reduce"}


def test_a_graph_is_as_long_for_many_workers_as_for_few() -> None:
    """The graphs for 4 and for 32 workers have the same ops; only sizes differ."""
    texts = []
    for data, model in ((2, 2), (8, 4)):
        step = gpt_step(MeshSpec.of(data=data, model=model), megatron)
        texts.append([str(node.target) for node in partition_graph(step.graph).calls])
    assert texts[0] == texts[1]


def test_layouts_that_nest_two_dims_in_opposite_orders_are_refused() -> None:
    graph = parse_graph(
        """graph @f on mesh<data=2, model=2> {
          %a = state "a"              : f32[8@(data,model)]
          %b = state "b"              : f32[8@(model,data)]
          %c = aten.add.Tensor(%a, %b) : f32[8]
          return %c
        }"""
    )
    with pytest.raises(LayoutError, match="nest the mesh dims 'model' and 'data' in opposite orders") as caught:
        partition_graph(graph)
    assert "state 'a' is [@(data,model)]" in str(caught.value)
    assert "state 'b' is [@(model,data)]" in str(caught.value)


def test_the_mesh_dim_that_comes_first_in_a_nested_layout_is_partitioned_first() -> None:
    graph = parse_graph(
        """graph @f on mesh<data=2, model=2> {
          %a = state "a" : f32[8@(model,data)]
          return %a
        }"""
    )
    assert nesting_order(graph) == ("model", "data")
