"""Sizes that the mesh does not divide, through whole models and training: partitioned, with all padding that the
compiler takes to hold anything poisoned."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch.compiler.ops import is_collective
from monarch.compiler.text import parse_layout
from monarch.compiler.types import Layout
from monarch.language import Mesh, distribute, manual_seed, program
from monarch.stdlib.parallel import combine, data_parallel, fully_shard, tensor_parallel
from tests.language.models import (
    CNN,
    TinyGPT,
    assert_same_parameters,
    make_step,
    square_loss,
    token_batch,
    token_loss,
    twins,
    vector_batch,
)
from tests.language.partitioned import partitioned_mesh

TABLE = {"up": "column", "down": "row", "qkv": "column", "out": "row"}


def gpt() -> nn.Module:
    return TinyGPT(vocabulary=67, width=12, heads=3, layers=1, length=5)


def tensor(model: nn.Module, mesh: Mesh) -> dict[str, Layout]:
    """Linear layers and words, the tied output layer's too, over `model`."""
    return tensor_parallel(model, mesh, "model", table=TABLE) | {"tokens.weight": parse_layout("[@model, -]")}


LAYOUTS: dict[str, Callable[[nn.Module, Mesh], dict[str, Layout]]] = {
    "data": lambda model, mesh: data_parallel(model),
    "fsdp": lambda model, mesh: fully_shard(model, mesh, "data"),
    "tensor": tensor,
    "both": lambda model, mesh: combine(tensor(model, mesh), fully_shard(model, mesh, "data")),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("layouts", "kernels"),
    [
        ("data", True),
        ("fsdp", False),
        pytest.param("tensor", False, marks=pytest.mark.full),
        ("tensor", True),
        ("both", True),
    ],
)
def test_a_gpt_trains_as_in_plain_torch(layouts: str, kernels: bool) -> None:
    with partitioned_mesh(data=4, model=2, kernels=kernels) as mesh:
        model, plain = twins(gpt, mesh, layouts=LAYOUTS[layouts](gpt(), mesh))
        # A key's bias has a gradient of rounding errors alone, which a smaller eps would make steps of.
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-3) for m in (model, plain))
        step, reference = program(make_step(model, ours, token_loss)), make_step(plain, theirs, token_loss)
        for seed, rows in enumerate((5, 5, 3)):  # the last batch of the epoch is smaller
            batch = token_batch(seed, rows, 5, 67)
            placed = [distribute(each, mesh, "[@data, -]") for each in batch]
            assert step(*placed).item() == pytest.approx(reference(*batch).item(), rel=1e-5)
        assert_same_parameters(model, plain, atol=1e-5)


@pytest.mark.sample(3)
@pytest.mark.parametrize("rows", [1, 3, 10])
@pytest.mark.parametrize("door", ["program", "eager"])
def test_a_cnn_with_batch_norm(rows: int, door: str) -> None:
    def loss(model: nn.Module, images: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(images), targets, label_smoothing=0.1)

    with partitioned_mesh(data=4) as mesh:
        model, plain = twins(CNN, mesh)
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
        step, reference = make_step(model, ours, loss), make_step(plain, theirs, loss)
        step = program(step) if door == "program" else step
        for seed in range(2):
            torch.manual_seed(seed)
            batch = torch.randn(rows, 1, 8, 8), torch.randint(0, 10, (rows,))
            placed = distribute(batch[0], mesh, "[@data, -, -, -]"), distribute(batch[1], mesh, "[@data]")
            assert step(*placed).item() == pytest.approx(reference(*batch).item(), rel=1e-5)
        assert_same_parameters(model, plain, atol=1e-5)


def test_norms_clipping_and_accumulation() -> None:
    def accumulate(model: nn.Module, optimizer: torch.optim.Optimizer, *batch: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            square_loss(model, *batch).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return norm

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(7, 9), nn.LayerNorm(9), nn.ReLU(), nn.Linear(9, 7))

    with partitioned_mesh(data=4) as mesh:
        model, plain = twins(make, mesh, layouts=fully_shard(make(), mesh, "data"))
        ours, theirs = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (model, plain))
        step = program(partial(accumulate, model, ours))
        for seed in range(3):
            batch = vector_batch(seed, 5, 7)
            placed = [distribute(each, mesh, "[@data, -]") for each in batch]
            assert step(*placed).item() == pytest.approx(accumulate(plain, theirs, *batch).item(), rel=1e-5)
        assert_same_parameters(model, plain, atol=1e-5)


def test_random_numbers_are_those_of_the_sizes_without_padding() -> None:
    def draw(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x) + nn.functional.dropout(x, 0.5)

    x = torch.ones(10, 7)
    with partitioned_mesh(data=1, model=1) as mesh:
        manual_seed(3)
        expected = program(draw)(distribute(x, mesh)).full_tensor()
    with partitioned_mesh(data=4, model=2) as mesh:
        for layout in ("[@data, -]", "[-, @data]", "[@data, @model]", "[-, @(data,model)]"):
            manual_seed(3)
            assert torch.equal(program(draw)(distribute(x, mesh, layout)).full_tensor(), expected)


def test_what_a_user_sees_has_no_padding() -> None:
    with partitioned_mesh(data=4, model=2) as mesh:
        x = distribute(torch.arange(15.0).view(5, 3), mesh, "[@data, @model]")
        assert (str(x.tensor_type), x.shape) == ("f32[5@data, 3@model]", (5, 3))
        assert [x.to_local(data=at).shape for at in range(4)] == [(2, 2), (2, 2), (1, 2), (0, 2)]
        y = (x / 0).flatten()
        assert (y.shape, y.sum().isnan().item()) == ((15,), True)
        z = program(lambda a: (a.exp(), a.flip(0), torch.cat([a, a]), a.max(), a.sort(1).values))(x)
        plain = x.full_tensor()
        wanted = (plain.exp(), plain.flip(0), torch.cat([plain, plain]), plain.max(), plain.sort(1).values)
        for got, expected in zip(z, wanted, strict=True):
            assert "+" not in str(got.tensor_type)
            torch.testing.assert_close(got.full_tensor(), expected)


@pytest.mark.parametrize("layout", ["[@data, -]", "[-, @data]"])
def test_an_index_into_the_padding_is_an_error(layout: str) -> None:
    with partitioned_mesh(data=4) as mesh:
        table = distribute(torch.randn(5, 3), mesh, layout)
        look_up = program(lambda t, i: nn.functional.embedding(i, t))
        assert look_up(table, torch.tensor([4])).full_tensor().shape == (1, 3)
        with pytest.raises(IndexError, match="out of range"):
            look_up(table, torch.tensor([5])).full_tensor()
        scores = distribute(torch.randn(2, 5), mesh, "[-, @data]")
        loss = program(nn.functional.cross_entropy)
        assert loss(scores, torch.tensor([4, -100])).item() > 0
        with pytest.raises(IndexError, match="out of range: 5, and there are 5 rows"):
            loss(scores, torch.tensor([0, 5])).item()


def test_an_uneven_sequence_is_sharded_through_merges_of_batch_and_sequence() -> None:
    def step(x: torch.Tensor, targets: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = (each.detach().requires_grad_() for each in (x, weight))
        loss = nn.functional.cross_entropy((x @ weight).flatten(0, 1), targets.flatten())
        return loss.detach(), *torch.autograd.grad(loss, (x, weight))

    dense = torch.randn(4, 5, 6), torch.randint(7, (4, 5)), torch.randn(6, 7)
    with partitioned_mesh(data=3) as mesh:
        layouts = "[-, @data, -]", "[-, @data]", "[-, -]"
        placed = [distribute(each, mesh, layout) for each, layout in zip(dense, layouts, strict=True)]
        compiled = program(step, strict=True)
        for ours, theirs in zip(compiled(*placed), step(*dense), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)
        graph = compiled.trace(*placed).partition().graph
    moved = {str(node.target) for node in graph.calls if is_collective(node.target)}
    assert moved == {"all_reduce"}


def test_merged_dims_stay_apart_beside_a_loop_on_values() -> None:
    """Nothing of a batch whose sequence the mesh does not divide is gathered for a linear layer and a loss."""
    x, targets, weight = torch.randn(3, 7, 8), torch.randint(0, 16, (3, 7)), torch.randn(8, 16)

    def step(scan: Callable[..., Any], x: torch.Tensor, targets: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        w = w.detach().requires_grad_()
        scale = scan(w)
        loss = nn.functional.cross_entropy((x @ w * scale).flatten(0, 1), targets.flatten())
        return [loss.detach(), *torch.autograd.grad(loss, w)]

    def scanned(w: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = monarch.scan(lambda total, row: (total + row.tanh().sum(), total), torch.zeros(()), w)[0]
        return found

    with partitioned_mesh(seq=2) as mesh:
        run = program(partial(step, scanned), mesh=mesh)
        placed = [distribute(x, mesh, "[-, @seq, -]"), distribute(targets, mesh, "[-, @seq]"), distribute(weight, mesh)]
        for got, expected in zip(run(*placed), step(lambda w: w.tanh().sum(), x, targets, weight), strict=True):
            torch.testing.assert_close(got.full_tensor(), expected)
        collectives = [
            str(node.target) for node in run.trace(*placed).partition().graph.calls if is_collective(node.target)
        ]
    assert collectives and set(collectives) == {"all_reduce"}


OF_NOTHING: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda x: x.mean(),
    "mean of two": lambda x: x.mean((0, 1)),
    "var": lambda x: torch.var_mean(x, 1)[0],
    "std": lambda x: x.std(0, correction=2),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("layout", ["[@data, -, -]", "[-, @data, -]"])
@pytest.mark.parametrize("shape", [(0, 3, 4), (3, 0, 4), (1, 3, 4)])
@pytest.mark.parametrize("name", OF_NOTHING)
@pytest.mark.filterwarnings("ignore:.*degrees of freedom")
def test_a_mean_of_nothing_is_nan(name: str, shape: tuple[int, ...], layout: str) -> None:
    def gradient(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().requires_grad_()
        made = OF_NOTHING[name](x)
        return made.detach(), torch.autograd.grad(made.sum(), x)[0]

    x = torch.randn(shape)
    with partitioned_mesh(data=2) as mesh:
        found = program(gradient, mesh=mesh)(distribute(x, mesh, layout))
        for ours, theirs in zip(found, gradient(x), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs, equal_nan=True)


def test_complex_numbers_vary_by_their_distance_from_the_mean() -> None:
    x = torch.randn(5, 3, dtype=torch.complex64)

    def spread(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        made = (x.var(), x.std(0, keepdim=True), *torch.var_mean(x, 0, correction=0))
        return *(each.detach() for each in made), *torch.autograd.grad(made[0] + made[1].sum(), x)

    with partitioned_mesh(data=2) as mesh:
        for ours, theirs in zip(program(spread, mesh=mesh)(distribute(x, mesh, "[@data, -]")), spread(x), strict=True):
            torch.testing.assert_close(ours.full_tensor(), theirs)
