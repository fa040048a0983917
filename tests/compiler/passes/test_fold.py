"""Equal blocks are folded and unfolded: the plan is the one that the passes make of the whole graph."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler import pipeline
from monarch.compiler.graph import Graph, Provenance
from monarch.compiler.kernels import fuse
from monarch.compiler.partition.steady import FIRST, Unsteady, check_steady
from monarch.compiler.passes import fold as folding
from monarch.compiler.passes.fold import Fold, fold
from monarch.compiler.passes.unfold import unfold
from monarch.compiler.pipeline import compile_graph, run_passes
from monarch.compiler.plan import Plan
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.text import parse_graph, print_graph
from monarch.distributed import Mesh
from monarch.stdlib.parallel import combine, fully_shard, tensor_parallel

LAYERS = 9
PASSES = ["simplify-views", "decompose", "simplify-lookups", "partition-by-mesh", "simplify-reductions"]
"""Those that see a few of the blocks."""


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Model(nn.Module):
    """The sums between its blocks are no block's, and its last layer has the weight of its first."""

    def __init__(self, layers: int = LAYERS, width: int = 16) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return x @ self.embedding.weight.T


def traced(layouts: Callable[[nn.Module, Mesh], Any], *, plain: bool = False) -> Graph:
    """A training step; a `plain` one has no dropout, and does not clip its gradients."""
    mesh = Mesh.abstract(data=2, model=2)
    model = Model()
    model.train(not plain)
    model = monarch.module_to_mesh(model, mesh, layouts=layouts(model, mesh))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    @monarch.program
    def step(tokens: torch.Tensor) -> torch.Tensor:
        tokens = monarch.layout(tokens, "[@data, -]")
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        if not plain:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return loss

    return step.trace(torch.zeros(4, 8, dtype=torch.int64)).graph


def chain(layers: int = LAYERS, *more: str, kind: Callable[[int], str] = lambda n: "gelu") -> Graph:
    """Layers of a product and an activation, and what else a program has."""
    lines = [f'%w{n} = state "blocks.{n}.w" : f32[32@data, 32]' for n in range(layers)]
    for n in range(layers):
        lines += [
            f'%a{n} = aten.mm(%h{n}, %w{n}) : f32[64, 32]  # m.py:3 in "blocks.{n}"',
            f'%h{n + 1} = aten.{kind(n)}(%a{n}) : f32[64, 32]  # m.py:4 in "blocks.{n}"',
        ]
    lines = ["%h0 = input 0 : f32[64@data, 32]", *lines, *(more or [f"return %h{layers}"])]
    return parse_graph("graph @step on mesh<data=2, model=2> {\n" + "\n".join(lines) + "\n}")


def both(graph: Graph, monkeypatch: pytest.MonkeyPatch, kernels: str = "all") -> tuple[Plan, Plan, bool]:
    """The plan by way of few blocks, and that of the whole graph; and whether the blocks were unfolded with kernels."""
    unfolded: list[bool] = []

    def noting(few: Fold, made: Graph) -> Graph | None:
        whole = unfold(few, made)
        unfolded.append(whole is not None)
        return whole

    options = CompileOptions(kernels=kernels)
    monkeypatch.setattr(folding, "LEAST", LAYERS)
    monkeypatch.setattr(pipeline, "unfold", noting)
    monkeypatch.setattr(pipeline, "fold", fold)
    few = compile_graph(graph, options)
    monkeypatch.setattr(pipeline, "fold", lambda graph: None)
    return few, compile_graph(graph, options), unfolded == [True]


def without_names(text: str) -> list[str]:
    """A graph's text in which values are numbered; without reasons, which call values as passes before did."""
    names: dict[str, str] = {}
    text = re.sub(r"(#[^;\n]*);.*", r"\1", re.sub(" +", " ", text))
    return re.sub(r"%\w+", lambda match: names.setdefault(match[0], f"%{len(names)}"), text).splitlines()


LAYOUTS: dict[str, Callable[[nn.Module, Mesh], Any]] = {
    "replicated": lambda model, mesh: None,
    "sharded": lambda model, mesh: combine(tensor_parallel(model, mesh, "model"), fully_shard(model, mesh, "data")),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("layouts", LAYOUTS)
def test_a_training_step_becomes_what_the_whole_graph_does(layouts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folding, "LEAST", LAYERS)
    graph = traced(LAYOUTS[layouts])
    few = fold(graph)
    assert few is not None
    unfolded = unfold(few, run_passes(few.folded, PASSES))
    assert unfolded is not None
    whole = run_passes(graph, PASSES)
    assert without_names(print_graph(unfolded, modules=True)) == without_names(print_graph(whole, modules=True))
    assert unfolded.updates.keys() == whole.updates.keys()


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_equal_blocks_are_fused_once(layouts: str, monkeypatch: pytest.MonkeyPatch) -> None:
    few, whole, folded = both(traced(LAYOUTS[layouts], plain=True), monkeypatch)
    assert folded
    assert without_names(few.graph) == without_names(whole.graph)
    assert few.hash == whole.hash


def test_blocks_whose_kernels_differ_are_fused_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has its own random numbers, which kernels draw."""
    few, whole, folded = both(traced(LAYOUTS["replicated"]), monkeypatch)
    assert not folded
    assert few.hash == whole.hash


def test_whether_kernels_are_worth_it_counts_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    two = r"\1b = aten.sin(\2)\3\n\1 = aten.cos(\1b)\3"
    graph = parse_graph(re.sub(r"(%h\d+) += aten.gelu\((%a\d+)\)(.*)", two, print_graph(chain(), modules=True)))
    spared = 2 * 32 * 32 * 4
    for worthwhile, count in ((LAYERS * spared, LAYERS), (LAYERS * spared + 1, 0)):
        monkeypatch.setattr(fuse, "WORTHWHILE", worthwhile)
        few, whole, folded = both(graph, monkeypatch, "auto")
        assert folded
        assert [plan.graph.count("= kernel(") for plan in (few, whole)] == [count, count]


def test_layers_that_gather_their_weights_have_the_plan_of_the_whole_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    few, whole, folded = both(chain(), monkeypatch)
    assert folded
    assert without_names(few.graph) == without_names(whole.graph)
    assert few.hash == whole.hash


@pytest.mark.parametrize(
    "graph",
    [
        pytest.param(chain(kind=lambda n: "tanh" if n == 4 else "gelu"), id="one is another"),
        pytest.param(chain(LAYERS, "return %h5"), id="a value of one is returned"),
        pytest.param(
            chain(LAYERS, f"%s = aten.add.Tensor(%h4, %h{LAYERS}) : f32[64, 32]", "return %s"), id="one is read besides"
        ),
    ],
)
def test_blocks_that_are_not_equal_are_left_as_they_are(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    few, whole, folded = both(graph, monkeypatch)
    assert not folded
    assert few.hash == whole.hash


def test_a_block_that_changes_other_states_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks compute the same, and one keeps it in each other's states."""
    lines = print_graph(chain(), modules=True).replace("f32[32@data, 32]", "f32[32, 32]").splitlines()
    states = [f'%{name}{n} = state "blocks.{n}.{name}" : f32[64@data, 32]' for n in range(LAYERS) for name in "st"]
    kept = [("st" if n != 4 else "ts", n) for n in range(LAYERS)]
    updates = [f'update "blocks.{n}.{a}" = %a{n}\nupdate "blocks.{n}.{b}" = %h{n + 1}' for (a, b), n in kept]
    graph = parse_graph("\n".join([lines[0], *states, *lines[1:-2], *updates, *lines[-2:]]))
    few, whole, folded = both(graph, monkeypatch)
    assert not folded
    assert few.outputs == whole.outputs
    assert few.hash == whole.hash


def test_a_list_with_a_value_of_each_block_has_all_of_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    values = ", ".join(f"%h{n + 1}" for n in reversed(range(LAYERS)))
    more = f"%s = aten.stack([{values}]) : f32[{LAYERS}, 64, 32]"
    few, whole, folded = both(chain(LAYERS, more, "return %s"), monkeypatch)
    assert folded
    assert few.hash == whole.hash


def few_blocks(monkeypatch: pytest.MonkeyPatch) -> tuple[Fold, Graph]:
    monkeypatch.setattr(folding, "LEAST", LAYERS)
    found = fold(chain())
    assert found is not None
    return found, run_passes(found.folded, PASSES)


def in_block(graph: Graph, block: int) -> list[Any]:
    return [node for node in graph.calls if node.meta["provenance"].block == block]


def test_blocks_that_have_become_other_than_one_another_are_not_unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    found, made = few_blocks(monkeypatch)
    assert unfold(found, made) is not None
    gelu = next(node for node in in_block(made, folding.LAST) if "gelu" in str(node.target))
    gelu.target = torch.ops.aten.tanh.default
    assert unfold(found, made) is None


def test_what_reads_a_block_as_it_did_not_before_is_not_unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    found, made = few_blocks(monkeypatch)
    result = made.returns[0]
    assert result is not None
    of_first = in_block(made, folding.FIRST)[-1]
    result.replace_input_with(result.all_input_nodes[0], of_first)
    assert unfold(found, made) is None


def test_another_number_of_blocks_that_could_be_cheaper_is_noticed() -> None:
    graph = parse_graph(
        "graph @f on mesh<data=2> {\n%x = input 0 : f32[4]\n"
        + "\n".join(f"%y{n} = aten.neg(%{'x' if not n else f'y{n - 1}'}) : f32[4]" for n in range(4))
        + "\nreturn %y3\n}"
    )
    nodes = list(graph.calls)
    for block, node in enumerate(nodes):
        node.meta["provenance"] = Provenance(block=block)
    operands = {node: node.all_input_nodes for node in nodes}
    stay = np.array([[0.0, 9.0], [9.0, 0.0]])

    def check(costs: list[float], pick: int) -> None:
        check_steady(nodes, operands, dict.fromkeys(nodes, costs), lambda *pair: stay, dict.fromkeys(nodes, pick))

    check([1.0, 2.0], 0)
    with pytest.raises(Unsteady):
        check([2.0, 1.0], 0)
    assert nodes[FIRST].meta["provenance"].block == FIRST
