"""Ops of the user's own in programs: mutating ones, several results, lists, gradients, with a rule and without."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from monarch.compiler.errors import PerformanceWarning, ProgramError
from monarch.compiler.graph import Graph
from monarch.compiler.ops.record import records_kept
from monarch.compiler.pipeline import partition_graph
from monarch.compiler.rules import sharding_rule
from monarch.language import Mesh, distribute, program
from tests.compiler.reference import run_reference

MESH = Mesh.abstract(data=2, model=2)


@torch.library.custom_op("customtest::scale_", mutates_args={"x"})
def scale_(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


@torch.library.custom_op("customtest::push", mutates_args={"cache"})
def push(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Exchanges the cache for x, and gives the old one upside down."""
    old = cache.flip(0)
    cache.copy_(x)
    return old


@push.register_fake
def _(cache: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(cache)


@torch.library.custom_op("customtest::add_to_all", mutates_args={"xs"})
def add_to_all(xs: list[torch.Tensor], y: torch.Tensor) -> None:
    for x in xs:
        x.add_(y)


@torch.library.custom_op("customtest::relu_", mutates_args={"x"})
def relu_(x: torch.Tensor) -> None:
    """No ReLU: an op of the user's is not known by its name."""
    x.neg_()


@torch.library.custom_op("customtest::reverse", mutates_args=())
def reverse(x: torch.Tensor) -> torch.Tensor:
    return x.flip(0) * 2


@reverse.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


reverse.register_autograd(lambda ctx, grad: torch.ops.customtest.reverse(grad))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        yield


def traced(function: Callable[..., Any], *arguments: torch.Tensor, layout: list[Any]) -> tuple[Graph, list[Any]]:
    """The partitioned graph of a function of tensors that all have this layout, and what it gives."""
    placed = [distribute(argument, MESH, layout) for argument in arguments]
    graph = partition_graph(program(mesh=MESH)(function).trace(*placed).graph)
    return graph, run_reference(graph, dict(enumerate(arguments)))[0]


def expect(function: Callable[..., Any], *arguments: torch.Tensor, layout: Any = ("data", "model")) -> Graph:
    graph, made = traced(function, *arguments, layout=list(layout))
    dense = function(*(argument.clone() for argument in arguments))
    for one, other in zip(made, dense, strict=True):
        torch.testing.assert_close(one, other)
    return graph


def test_an_op_that_changes_its_operand() -> None:
    def step(x: torch.Tensor) -> Any:
        y = x + 1
        torch.ops.customtest.scale_(y, 3.0)
        torch.ops.customtest.relu_(y)
        return y, y.sum()

    expect(step, torch.randn(4, 4))


def test_one_that_also_gives_a_tensor_and_one_that_changes_a_list_and_a_view() -> None:
    def step(x: torch.Tensor, cache: torch.Tensor) -> Any:
        cache, y = cache * 1, x * 2
        old = torch.ops.customtest.push(cache, y)
        torch.ops.customtest.add_to_all([cache[1:3], y], x.sum())
        return old, cache, y

    expect(step, torch.randn(4, 4), torch.randn(4, 4))


def test_gradients_through_an_op_without_a_rule() -> None:
    def step(x: torch.Tensor) -> Any:
        x = x.detach().requires_grad_()
        torch.ops.customtest.reverse(x * x).sin().sum().backward()
        return (x.grad,)

    expect(step, torch.randn(4, 4))


def test_a_rule_for_an_op_that_changes_its_operand_shards_it() -> None:
    with records_kept():
        sharding_rule("customtest.scale_", "... -> ...")

        def step(x: torch.Tensor) -> Any:
            y = x + 1
            torch.ops.customtest.scale_(y, 3.0)
            return (y,)

        assert "all_gather" not in str(expect(step, torch.randn(4, 4)))


def test_operands_that_share_memory_with_one_that_is_changed_are_refused() -> None:
    def step(x: torch.Tensor) -> Any:
        y = x + 1
        torch.ops.customtest.push(y[:2], y[2:])
        return y

    with pytest.raises(ProgramError, match="writes to an operand that shares memory with another operand of it"):
        traced(step, torch.randn(4, 4), layout=["data", None])
