"""Functions of the user's that workers run as ops on tensors."""

from __future__ import annotations

import functools
import warnings
from contextlib import ExitStack
from typing import Any

import numpy
import pytest
import torch
from torch._library.custom_ops import OPDEFS

import monarch
from monarch.compiler.errors import ProgramError
from monarch.compiler.execution.factories import executors_by
from monarch.compiler.pipeline import partition_graph
from monarch.language import Mesh, local, program
from monarch.language.compile import compiling_with
from monarch.language.errors import TracedAgainWarning
from tests.compiler.reference import run_reference
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


def _marked(x: torch.Tensor, by: float, path: str) -> torch.Tensor:
    return x * by + len(path)


@pytest.mark.parametrize("dense", [True, False], ids=["in this process", "on workers"])
def test_values_that_stay_in_the_op_are_of_few_ops(dense: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a path is that each call gives anew: PyTorch forgets no op, and nor do the workers."""
    monkeypatch.setattr("monarch.stdlib.remote.MANY_OPS", 2)
    marked = monarch.remote(functools.partial(_marked), propagate=lambda x, by, path: x if path else None)
    marked.__name__ = "marked_in_process" if dense else "marked_on_workers"
    x = torch.rand(4)
    with ExitStack() as stack:
        if dense:
            stack.enter_context(executors_by(DenseExecutor))
            stack.enter_context(compiling_with(compile_dense))
        mesh = stack.enter_context(Mesh(data=2))
        step: Any = program(lambda x, by, path: marked(x * 1, by, path), mesh=mesh)
        placed = monarch.distribute(x, mesh)
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", monarch.PerformanceWarning)
        for number in (*range(1, 6), 1, 5):
            for by in (0.5, 2.0):
                assert torch.equal(step(x, by, "p" * number).full_tensor(), x * by + number)
                assert torch.equal(marked(placed, by, "p" * number).full_tensor(), x * by + number)
    assert len([name for name in OPDEFS if marked.__name__ in name]) == 3
