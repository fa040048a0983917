"""Functions of the user's that workers run as ops on tensors."""

from __future__ import annotations

import warnings
from typing import Any

import numpy
import pytest
import torch

import monarch
from monarch.compiler.errors import ProgramError
from monarch.compiler.execution.factories import executors_by
from monarch.compiler.pipeline import partition_graph
from monarch.compiler.reference import run_reference
from monarch.language import Mesh, local, program
from monarch.language.compile import compiling_with
from monarch.language.errors import TracedAgainWarning
from tests.language.dense import DenseExecutor, compile_dense

MESH = Mesh.abstract(data=2)
PLAIN = torch.rand(3)


def _counts(x: torch.Tensor, bins: int) -> torch.Tensor:
    return x.new_empty(bins, dtype=torch.int64)


@monarch.remote(propagate=_counts)
def counts(x: torch.Tensor, bins: int) -> torch.Tensor:
    """What no op of PyTorch's takes part in."""
    return torch.from_numpy(numpy.histogram(x.numpy(), bins, (0.0, 1.0))[0].astype(numpy.int64))


@monarch.remote(propagate="mocked")
def halves(pair: dict[str, torch.Tensor], by: float = 2.0) -> tuple[torch.Tensor, list[torch.Tensor]]:
    return pair["a"], [pair["b"] / by, pair["a"][:1]]


@monarch.remote(propagate=lambda x, n: x.new_empty(1, dtype=torch.int64))
def exact(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.tensor([n])


@monarch.remote(propagate=lambda x: x)
def wrong(x: torch.Tensor) -> torch.Tensor:
    return x[:1]


def run(function: Any, *inputs: torch.Tensor) -> list[torch.Tensor]:
    traced = program(function, mesh=MESH).trace(*inputs)
    return run_reference(partition_graph(traced.graph), dict(enumerate(inputs)))[0]


def test_a_function_is_an_op_of_whole_tensors() -> None:
    x = torch.rand(8, 4)

    def step(x: "f32[8@data, 4]") -> torch.Tensor:
        return counts(x * 0.5, 4) + counts(x, bins=2).sum()

    with pytest.warns(monarch.PerformanceWarning, match="counts"):
        (found,) = run(step, x)
    assert torch.equal(found, torch.histc(x * 0.5, 4, 0, 1).long() + 32)


def test_in_per_worker_code_each_worker_calls_it_with_its_own() -> None:
    x = torch.rand(8, 4)

    def own(x: torch.Tensor) -> torch.Tensor:
        return counts(x, 4)

    def step(x: "f32[8@data, 4]") -> torch.Tensor:
        return local(own, "[@data, -]", "[@data]", mesh=MESH)(x)

    (found,) = run(step, x)
    assert torch.equal(found, torch.cat([torch.histc(part, 4, 0, 1).long() for part in x.chunk(2)]))


def test_tensors_nest_and_results_have_memory_of_their_own() -> None:
    a, b = torch.randn(4), torch.randn(4)

    def step(a: "f32[4]", b: "f32[4]") -> list[torch.Tensor]:
        same, (half, first) = halves({"a": a, "b": b}, by=4.0)
        same.add_(1)
        return [same, half, first, a]

    found = run(step, a, b)
    for got, want in zip(found, [a + 1, b / 4, a[:1], a], strict=True):
        assert torch.equal(got, want)


def test_equal_calls_are_one_op() -> None:
    def step(x: "f32[4]") -> torch.Tensor:
        return counts(x, 3) + counts(x + 1, 3) + counts(x, 4)[:3]

    names = {str(node.target) for node in program(step, mesh=MESH).trace(torch.rand(4)).graph.calls}
    assert len([name for name in names if name.startswith("monarch_remote.counts_")]) == 2


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x: counts(x, object()), "called with a object"),
        (lambda x: counts(PLAIN, 4), "without a tensor that is on a mesh"),
        (lambda x: monarch.remote(lambda x: x, propagate=lambda x: 3)(x), "gives int"),
    ],
)
def test_a_call_that_cannot_be_an_op_is_an_error(call: Any, said: str) -> None:
    with pytest.raises(ProgramError, match=said):
        program(call, mesh=MESH).trace(monarch.distribute(torch.rand(4), MESH))


def test_what_a_function_closes_over_is_compared_at_each_call() -> None:
    """By what it pickles to; pickling reads much that no check follows, for which a program would be traced anew."""
    by = 2.0
    scaled = monarch.remote(lambda x: x * by, propagate=lambda x: x)

    def step(x: "f32[4]") -> torch.Tensor:
        return scaled(x)

    with executors_by(DenseExecutor), compiling_with(compile_dense), Mesh(data=2) as mesh, warnings.catch_warnings():
        warnings.simplefilter("error", TracedAgainWarning)
        traced, x = program(step, mesh=mesh), torch.rand(4)
        for call, by in enumerate((2.0, 2.0, 2.0, 3.0, 3.0, 2.0)):
            assert torch.equal(traced(x).full_tensor(), x * by), call


def test_another_word_for_propagate_is_an_error() -> None:
    with pytest.raises(ProgramError, match="propagate='cached'"):
        monarch.remote(lambda x: x, propagate="cached")  # type: ignore[call-overload]


def test_workers_run_it_and_refuse_another_shape() -> None:
    """On worker processes, to which the functions travel: they were forked without them."""
    with Mesh(data=2) as mesh:
        x = monarch.distribute(torch.rand(8, 4), mesh)
        assert torch.equal(counts(x, 2).full_tensor(), torch.histc(x.full_tensor(), 2, 0, 1).long())
        for by in (0.1, -0.0, 3.0):
            assert torch.equal(halves({"a": x, "b": x}, by)[1][0].full_tensor(), x.full_tensor() / by)
        assert exact(x, 2**62 + 1).full_tensor().tolist() == [2**62 + 1]
        with pytest.raises(monarch.DeviceMeshError, match="propagate says"):
            wrong(x).full_tensor()
