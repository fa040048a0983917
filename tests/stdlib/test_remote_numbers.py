"""Numbers that remote functions take on tensors: operands, of which one trace and one plan serve all values."""

from __future__ import annotations

import math
import re
import struct
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import monarch
from monarch.compiler.errors import PerformanceWarning
from monarch.compiler.execution.factories import executors_by
from monarch.compiler.pipeline import partition_graph
from monarch.language import Mesh, local, program
from monarch.language.compile import compiling_with
from monarch.language.eager import flush
from tests.compiler.reference import run_reference
from tests.language.dense import DenseExecutor, compile_dense

KINDS: list[type] = [int, float, bool, np.float64, np.float32, np.int64, np.int8]


def _told(value: Any) -> list[int]:
    """Which type a number has, and all of its bits."""
    whole = isinstance(value, (bool, int, np.integer))
    low = int(value) % 2**32 if whole else struct.unpack("<Q", struct.pack("<d", value))[0] % 2**32
    high = (int(value) >> 32) % 2**32 if whole else struct.unpack("<Q", struct.pack("<d", value))[0] >> 32
    return [KINDS.index(type(value)) if type(value) in KINDS else -1, low, high]


@monarch.remote(propagate=lambda x, numbers, **more: x.new_empty(3 * (len(numbers) + len(more)), dtype=torch.int64))
def told(x: torch.Tensor, numbers: Any, **more: Any) -> torch.Tensor:
    """What a worker is given."""
    values = list(numbers.values()) if isinstance(numbers, dict) else list(numbers)
    return torch.tensor([each for value in (*values, *more.values()) for each in _told(value)])


@monarch.remote(propagate="mocked")
def scaled(x: torch.Tensor, by: float, times: int = 1) -> torch.Tensor:
    return x * (by * times) + by


def _first(x: torch.Tensor, n: int) -> torch.Tensor:
    return x[:n].clone()


def _named(x: torch.Tensor, word: Any) -> torch.Tensor:
    return x + len(str(word))


def first_n(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.new_empty(n)


def alike(x: torch.Tensor, word: Any) -> torch.Tensor:
    return x


first, named = monarch.remote(_first, propagate=first_n), monarch.remote(_named, propagate=alike)


@pytest.fixture(autouse=True)
def mesh() -> Iterator[Mesh]:
    with executors_by(DenseExecutor), compiling_with(compile_dense), Mesh(data=2) as mesh:
        yield mesh


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that the eager door compiles."""
    made: list[Any] = []
    compile_graph = flush.compile_graph

    def noted(graph: Any, *args: Any) -> Any:
        made.append(graph)
        return compile_graph(graph, *args)

    monkeypatch.setattr(flush, "compile_graph", noted)
    return made


NUMBERS = [
    *(0.1, -0.0, 0.0, math.inf, -math.inf, math.nan, 5e-324, 1.0, 3.0),
    *(3, 0, -1, 2**62 + 1, -(2**63), 2**63 - 1),
    *(np.float64(0.1), np.float64(-0.0), np.float32(0.1), np.int64(2**62 + 1), np.int8(-3)),
]


def test_a_worker_has_the_number_that_a_plain_call_would_have(mesh: Mesh, plans: list[Any]) -> None:
    """Of the same type and the same bits; numbers of one type are of one plan."""
    x = monarch.distribute(torch.rand(3), mesh)
    x.full_tensor()
    before = len(plans)
    for number in NUMBERS:
        assert told(x, [number]).full_tensor().tolist() == _told(number), repr(number)
    assert len(plans) - before == len({type(number) for number in NUMBERS})


def test_numbers_of_one_tape_are_each_their_own(mesh: Mesh) -> None:
    """They run in one command: 0.0 equals -0.0, 1 equals 1.0 and True, and NaN nothing."""
    x = monarch.distribute(torch.rand(3), mesh)
    numbers = [0.0, -0.0, 1, 1.0, True, False, 0, math.nan, -0.0, 0.0]
    one = told(x, numbers)
    each = [told(x, [number]) for number in numbers]
    assert one.full_tensor().tolist() == [word for number in numbers for word in _told(number)]
    for got, number in zip(each, numbers, strict=True):
        assert got.full_tensor().tolist() == _told(number), repr(number)


def test_zeros_of_both_signs_in_one_tape(mesh: Mesh) -> None:
    """Numbers of PyTorch's own ops, too."""
    x = monarch.distribute(torch.ones(1), mesh)
    plus, minus = x * 0.0, x * -0.0
    assert math.copysign(1, plus.full_tensor().item()) == 1
    assert math.copysign(1, minus.full_tensor().item()) == -1


def test_floats_and_whole_numbers_are_of_one_plan(mesh: Mesh, plans: list[Any]) -> None:
    x = monarch.distribute(torch.rand(3), mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(20):
            lr = 0.1 / (step + 1)
            found = scaled(x, lr, times=step)
            assert torch.equal(found.full_tensor(), x.full_tensor() * (lr * step) + lr)
    assert len([graph for graph in plans if "monarch_remote" in str(graph)]) == 1


def test_nested_numbers_and_keywords(mesh: Mesh, plans: list[Any]) -> None:
    x = monarch.distribute(torch.rand(3), mesh)
    for step in range(3):
        numbers = {"a": step, "b": step / 3, "c": True, "d": 2**70 if step == 9 else 7}
        found = told(x, numbers, lr=0.5 * step, seed=step).full_tensor().tolist()
        assert found == [word for value in (*numbers.values(), 0.5 * step, step) for word in _told(value)]
    assert len([graph for graph in plans if "monarch_remote" in str(graph)]) == 1


class Rate(float):
    """A float of the user's."""


@pytest.mark.parametrize("number", [2**64, -(2**90), True, False, Rate(0.5), np.float64(1), 1 + 2j])
def test_what_no_operand_can_be_stays_in_the_op(mesh: Mesh, number: Any) -> None:
    kind = monarch.remote(lambda x, n: x + (n == number and type(n) is type(number)), propagate=lambda x, n: x)
    x = monarch.distribute(torch.zeros(2), mesh)
    assert kind(x, number).full_tensor().tolist() == [1.0, 1.0]


def test_a_number_of_a_program_is_that_of_each_call(mesh: Mesh) -> None:
    def step(x: "f32[4]", by: float) -> Any:
        return scaled(x * 2, by / 3, times=2) + scaled(x, 0.25)

    traced, x = program(step, mesh=mesh), torch.rand(4)
    for by in (3.0, -0.0, 5.0, math.inf, 0.1):
        want = (x * 2) * (by / 3 * 2) + by / 3 + (x * 0.25 + 0.25)
        assert torch.equal(traced(x, by).full_tensor(), want), by
    assert traced.remembered == [(1, 1)]


def test_a_number_of_a_program_that_decides_a_shape_is_specialised(mesh: Mesh) -> None:
    part = monarch.remote(lambda x, share: x[: int(len(x) * share)].clone(), propagate="mocked")

    def step(x: "f32[4]", share: float) -> Any:
        return part(x, share)

    traced, x = program(step, mesh=mesh), torch.rand(4)
    for share in (0.5, 1.0, 0.25, 0.5):
        assert torch.equal(traced(x, share).full_tensor(), x[: int(4 * share)])
    assert traced.remembered == [(3, 3)]


def test_a_branch_of_propagate_is_specialised(mesh: Mesh) -> None:
    def shape(x: torch.Tensor, n: float) -> torch.Tensor:
        return x.new_empty(2) if n > 1 else x.new_empty(3, dtype=torch.int64)

    made = monarch.remote(lambda x, n: torch.zeros(2) if n > 1 else torch.ones(3, dtype=torch.int64), propagate=shape)
    x = monarch.distribute(torch.rand(4), mesh)
    for n in (0.5, 1.5, 2.5, 0.5, math.nan):
        want = [0.0, 0.0] if n > 1 else [1, 1, 1]
        assert made(x, n).full_tensor().tolist() == want


@pytest.mark.parametrize(
    "shape",
    [
        lambda x, n: x.new_empty(n),
        lambda x, n: x.new_empty(n + 1)[1:],
        lambda x, n: torch.arange(n, device="meta", dtype=torch.float32),
        lambda x, n: torch.arange(0.0, float(n), device="meta"),
        lambda x, n: x.expand(2, -1).reshape(-1)[:n],
        lambda x, n: torch.empty((2, n), device="meta")[0],
        lambda x, n: x.new_empty(int(np.ceil(n / 1.0))),
        lambda x, n: x.repeat(2)[range(10)[n] - n :][:n],
        lambda x, n: x.repeat(2).narrow(0, 0, n),
        lambda x, n: torch.stack([x.sum() for _ in range(n)]),
        lambda x, n: x.repeat(2).split([n, 8 - n])[0],
        lambda x, n: x.new_empty({2: 2, 3: 3, 4: 4}[n]),
        lambda x, n: x.new_empty(len("." * n)),
        lambda x, n: torch.linspace(0, 1, n, device="meta"),
        lambda x, n: x.new_empty(min(n, 8)),
    ],
)
def test_whatever_makes_a_shape_of_a_number_asks_for_it(mesh: Mesh, shape: Any) -> None:
    made = monarch.remote(lambda x, n: x.repeat(2)[:n].clone(), propagate=shape)
    x = monarch.distribute(torch.rand(4), mesh)
    for n in (2, 4, 3):
        assert torch.equal(made(x, n).full_tensor(), x.full_tensor().repeat(2)[:n])


def test_arithmetic_and_elements_do_not_ask(mesh: Mesh, plans: list[Any]) -> None:
    def mocked(x: torch.Tensor, a: float, n: int) -> torch.Tensor:
        y = torch.full_like(x, a) + x.clamp(min=-a, max=abs(n)) * (n + 1) / (a - 7) + a**2 - (3 - n)
        return torch.where(y > n, y, a).masked_fill(x > a, n).add(x, alpha=n)

    function = monarch.remote(mocked, propagate="mocked")
    x = monarch.distribute(torch.randn(8), mesh)
    for step in range(4):
        want = mocked(x.full_tensor(), step / 2, step)
        assert torch.equal(function(x, step / 2, step).full_tensor(), want)
    assert len([graph for graph in plans if "monarch_remote" in str(graph)]) == 1


def test_in_per_worker_code(mesh: Mesh) -> None:
    def own(x: torch.Tensor, by: float) -> torch.Tensor:
        return scaled(x, by)

    def step(x: "f32[8@data]", by: float) -> torch.Tensor:
        return local(lambda part: own(part, by), "[@data]", "[@data]", mesh=mesh)(x)

    x = torch.rand(8)
    graph = partition_graph(program(step, mesh=mesh).trace(x, 0.5).graph)
    for by in (0.5, 0.25):
        assert torch.equal(run_reference(graph, {0: x, "argument1": by})[0][0], x * by + by)


def test_gradients_through_an_autograd_function_of_remote_ones(mesh: Mesh) -> None:
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, by: float) -> torch.Tensor:
            ctx.by = by
            return scaled(x, by)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            return scaled(gradient, ctx.by) - ctx.by, None

    def step(x: "f32[4]", by: float) -> Any:
        y = x.detach().requires_grad_()
        return torch.autograd.grad(Scaled.apply(y, by).sum(), y)[0]

    traced, x = program(step, mesh=mesh), torch.rand(4)
    for by in (3.0, 0.5):
        assert torch.equal(traced(x, by).full_tensor(), torch.full((4,), by))
    for by in (3.0, 0.5):
        y = monarch.distribute(x, mesh).requires_grad_()
        Scaled.apply(y, by).sum().backward()
        assert y.grad is not None and torch.equal(y.grad.full_tensor(), torch.full((4,), by))


@pytest.mark.parametrize(
    ("function", "propagate", "values", "said"),
    [
        (_first, first_n, range(1, 20), r"'n' \(8 now; `propagate` needs"),
        (_named, alike, "abcdefghijkl", r"'word' \('h' now; pass changing"),
    ],
)
def test_the_eighth_value_of_what_stays_in_the_op_warns(
    mesh: Mesh, function: Any, propagate: Any, values: Any, said: str
) -> None:
    again = monarch.remote(function, propagate=propagate)
    x = monarch.distribute(torch.rand(40), mesh)
    for count, value in enumerate(values, 1):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", PerformanceWarning)
            again(x, value)
        told = [str(each.message) for each in caught if "remote function" in str(each.message)]
        assert len(told) == (count == 8), told
        if told:
            assert re.search(said, told[0]), told
