"""Models whose blocks are almost equal: the plan by way of a few blocks is that of the whole graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

import monarch
from monarch.compiler import pipeline
from monarch.compiler.errors import LayoutError, MonarchError
from monarch.compiler.graph import Graph
from monarch.compiler.passes import fold as folding
from monarch.compiler.passes.fold import Fold, fold
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan.options import CompileOptions
from monarch.distributed import Mesh
from monarch.stdlib.parallel import combine, fully_shard, tensor_parallel
from tests.compiler.passes.test_fold import without_names

LAYERS = 10


class Block(nn.Module):
    """A norm, two layers and dropout, and two states that each step changes; an `odd` one is other than the rest."""

    def __init__(self, width: int, odd: str) -> None:
        super().__init__()
        self.odd = odd
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("least", torch.zeros(width))
        if odd == "dtype":
            self.up.double()
        if odd == "frozen":
            self.up.weight.requires_grad_(False)
        if odd == "hook":
            self.down.register_forward_hook(lambda module, args, result: result * 2)

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x)
        x = self.up(x.double()).to(x.dtype) if self.odd == "dtype" else self.up(x)
        x = torch.tanh(x) if self.odd == "activation" else F.gelu(x)
        return self.down(x)

    def forward(self, x: torch.Tensor, dropout: float) -> torch.Tensor:
        y = checkpoint(self.inner, x, use_reentrant=False) if self.odd == "checkpoint" else self.inner(x)
        if dropout or self.odd == "dropout":
            y = F.dropout(y, 0.2 if self.odd == "dropout" else dropout)
        with torch.no_grad():
            mean, least = y.mean((0, 1)), y.amin((0, 1))
            if self.odd == "states":
                mean, least = least, mean
            self.mean.copy_(mean)
            if self.odd != "changes-less":
                self.least.copy_(least)
        return x + (y.detach() if self.odd == "detached" else y)


class Model(nn.Module):
    def __init__(self, width: int, dropout: float, odd: dict[int, str]) -> None:
        super().__init__()
        self.dropout = dropout
        self.embedding = nn.Embedding(32, width)
        self.blocks = nn.ModuleList(Block(width, odd.get(at, "")) for at in range(LAYERS))
        for at, what in odd.items():
            if what == "shared":
                self.blocks[at].up.weight = self.blocks[(at + 3) % LAYERS].up.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, self.dropout)
        return x @ self.embedding.weight.T


ODD = "dtype frozen hook activation checkpoint dropout states changes-less detached shared rate".split()
"""How a block is other: `shared` has the weight of another block, and `rate` a learning rate of its own; for the rest
see `Block`."""
LAYOUTS: dict[str, Callable[[nn.Module, Mesh], Any]] = {
    "replicated": lambda model, mesh: None,
    "tensor parallel": lambda model, mesh: tensor_parallel(model, mesh, "model"),
    "sharded": lambda model, mesh: fully_shard(model, mesh, "data"),
    "both": lambda model, mesh: combine(tensor_parallel(model, mesh, "model"), fully_shard(model, mesh, "data")),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=1e-3),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=1e-3, momentum=0.9),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-3),
}


def traced(
    odd: dict[int, str], layouts: str, optimizer: str, width: int, rows: int, dropout: float, clip: bool
) -> Graph:
    mesh = Mesh.abstract(data=2, model=2)
    model = Model(width, dropout, odd)
    model = monarch.module_to_mesh(model, mesh, layouts=LAYOUTS[layouts](model, mesh))
    apart = [p for at, what in odd.items() if what == "rate" for p in model.blocks[at].parameters()]
    rest = [p for p in model.parameters() if all(p is not other for other in apart)]
    groups = [{"params": rest}, *([{"params": apart, "lr": 0.1}] if apart else [])]
    made = OPTIMIZERS[optimizer](groups)

    @monarch.program
    def step(tokens: torch.Tensor) -> torch.Tensor:
        tokens = monarch.layout(tokens, "[@data, -]")
        made.zero_grad()
        loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        made.step()
        return loss

    return step.trace(torch.zeros(rows, 8, dtype=torch.int64)).graph


def compiled(graph: Graph, options: CompileOptions, by_few: bool) -> tuple[object, ...]:
    """What became of it: the plan's hash, its graph and what it costs, or an error."""

    def folded(graph: Graph) -> Fold | None:
        return fold(graph) if by_few else None

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(folding, "LEAST", LAYERS)
        patch.setattr(pipeline, "fold", folded)
        try:
            plan = compile_graph(graph, options)
        except MonarchError as error:
            return type(error).__name__, str(error)
        costs = {name: value for name, value in plan.costs.items() if name != "seconds"}
        if again := costs.get("recomputed"):  # values with their names, which are others
            costs["recomputed"] = {**again, "values": [size for _, size, *_ in again["values"]]}
        return plan.hash, costs, without_names(plan.graph)


def check(graph: Graph, options: CompileOptions) -> None:
    assert compiled(graph, options, by_few=True) == compiled(graph, options, by_few=False)


@pytest.mark.sample(1)
@pytest.mark.parametrize("odd", ODD)
def test_a_model_with_one_other_block_has_the_plan_of_the_whole_graph(odd: str) -> None:
    check(traced({4: odd}, "replicated", "sgd", 16, 4, 0.0, clip=False), CompileOptions(kernels="all"))


@pytest.mark.full
@pytest.mark.timeout(1800)
@settings(max_examples=100)
@given(
    odd=st.dictionaries(st.integers(0, LAYERS - 1), st.sampled_from(ODD), max_size=2),
    layouts=st.sampled_from([*LAYOUTS]),
    optimizer=st.sampled_from([*OPTIMIZERS]),
    width=st.sampled_from([16, 15]),
    rows=st.sampled_from([4, 5]),
    dropout=st.sampled_from([0.0, 0.1]),
    clip=st.booleans(),
    kernels=st.sampled_from(["all", "auto", "off"]),
    limit=st.sampled_from([None, 1.0, 0.8, 0.5]),
)
def test_a_model_of_almost_equal_blocks_has_the_plan_of_the_whole_graph(
    odd: dict[int, str],
    layouts: str,
    optimizer: str,
    width: int,
    rows: int,
    dropout: float,
    clip: bool,
    kernels: str,
    limit: float | None,
) -> None:
    """Or the same error. `limit` is the memory limit, as a part of what the step holds without one."""
    try:
        graph = traced(odd, layouts, optimizer, width, rows, dropout, clip)
    except LayoutError:
        reject()  # a layout does not fit these sizes
    options = CompileOptions(kernels=kernels)
    if limit is not None:
        most = compile_graph(graph, replace(options, memory_limit=1 << 30)).costs["peak_bytes"]
        options = replace(options, memory_limit=int(most * limit))
    check(graph, options)
