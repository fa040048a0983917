"""Ints among a program's arguments that change from call to call: one trace serves all their values, and where it
cannot, each value is traced once."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from torch import nn

from monarch.language import Mesh, distribute, module_to_mesh, program
from tests.language.alike import assert_alike, nothing
from tests.language.partitioned import partitioned_mesh
from tests.language.programs.uses_of_numbers import USES

QUIET = pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.sample(12)
@pytest.mark.parametrize("use", USES)
def test_an_int_that_is_an_argument_is_an_int_to_python(use: str, mesh: Mesh) -> None:
    def case(w):
        state = types.SimpleNamespace(left=None)

        def step(given):
            state.left = USES[use](*given)
            return state.left

        numbers = [1, 2, 3, 3, 4, 0, 7, 1, 5, 2]
        return step, nothing, lambda call: (torch.ones(3, 4) + call, numbers[call], 0.5 * numbers[call])

    assert_alike(case, mesh, calls=10)


Rows = Annotated[torch.Tensor, "f32[b, 4]"]


class Pair(NamedTuple):
    x: torch.Tensor
    n: int


@QUIET
@pytest.mark.parametrize(
    "given",
    [
        lambda x, n: ((x, n), {}),
        lambda x, n: ((x,), {"n": n}),
        lambda x, n: (([x, n],), {}),
        lambda x, n: (({"n": n, "deep": [(x, "text", None)]},), {}),
        lambda x, n: ((Pair(x, n),), {}),
        lambda x, n: ((x, n, n + 1, [n, n - 1]), {"flag": True}),
    ],
    ids=["by place", "by name", "list", "dict", "named tuple", "several"],
)
def test_an_int_costs_few_traces_wherever_it_stands(given: Any, mesh: Mesh, traces: list[str]) -> None:
    def step(*args: Any, **kwargs: Any) -> Any:
        leaves = torch.utils._pytree.tree_leaves((args, kwargs))
        x = next(leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
        numbers = [leaf for leaf in leaves if isinstance(leaf, int) and not isinstance(leaf, bool)]
        for number in numbers:
            x = x * min(1.0, number / 100) * 0.9**number + number
        return x, [number + 1 for number in numbers]

    run = program(step, mesh=mesh)
    for n in (0, 1, 5, 3, 1000, 7, 5, -1):
        x = torch.full((3,), n / 7)
        args, kwargs = given(distribute(x, mesh), n)
        ours, numbers = run(*args, **kwargs)
        dense, expected = step(*given(x, n)[0], **given(x, n)[1])
        torch.testing.assert_close(ours.full_tensor(), dense)
        assert numbers == expected and all(type(number) is int for number in numbers)
    assert len(traces) <= 3


@QUIET
def test_a_training_step_takes_its_number(mesh: Mesh, traces: list[str]) -> None:
    def trained(place: Callable[[Any], Any], make: Callable[[Any], Any]) -> list[float]:
        torch.manual_seed(0)
        model = place(nn.Linear(4, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def step(x: torch.Tensor, number: int) -> torch.Tensor:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * min(1.0, (number + 1) / 5) * 0.97**number
            optimizer.zero_grad()
            loss = model(x).square().mean() + number * 0.0
            loss.backward()
            optimizer.step()
            return loss

        run = make(step)
        return [run(torch.ones(2, 4), number).item() for number in range(12)]

    dense = trained(lambda module: module, lambda step: step)
    ours = trained(lambda module: module_to_mesh(module, mesh, {}), program(mesh=mesh))
    assert ours == pytest.approx(dense, rel=1e-5)
    assert len(traces) <= 6


@QUIET
def test_each_of_a_few_sizes_is_traced_once(mesh: Mesh, traces: list[str]) -> None:
    run = program(lambda x, n: x[:n] * n, mesh=mesh)
    for n in (1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 3, 1):
        assert run(torch.ones(8), n).tolist() == [n] * n
    assert len(traces) == 5


@QUIET
def test_a_call_whose_number_is_needed_now_and_then_leaves_the_others_as_they_are(
    mesh: Mesh, traces: list[str]
) -> None:
    said: list[str] = []

    @program(mesh=mesh)
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        if n % 10 == 9:
            said.append(f"step {n}")
        return x * n

    for n in range(100):
        assert step(torch.ones(2), n).tolist() == [n, n]
    assert said == [f"step {n}" for n in range(9, 100, 10)]
    assert len(traces) <= 13


def test_an_argument_may_be_a_number_of_another_type(mesh: Mesh) -> None:
    def step(x: torch.Tensor, n: Any, m: Any) -> Any:
        return x * (n or 3) + (m or 5), type(n).__name__, n, type(m).__name__, m

    run = program(step, mesh=mesh)
    x = torch.ones(2)
    for n, m in [(1, 2), (2, 2), (True, 3), (2.5, 3), (None, 4), (3, False), (3, 2), (0, 0), (False, 1), (1, None)] * 2:
        (ours, *rest), (dense, *expected) = run(x, n, m), step(x, n, m)
        assert ours.tolist() == dense.tolist() and rest == expected
        assert [type(each) for each in rest] == [type(each) for each in expected]


def test_one_int_becomes_an_input_and_another_is_a_size(mesh: Mesh) -> None:
    run = program(lambda x, n, m: x[:n] + m, mesh=mesh)
    for n, m in [
        (3, 5),
        (3, 6),
        (5, 6),
        (3, 3),
        (5, 5),
        (6, 3),
        (2, 3),
        (3, 2),
        (1, 9),
        (9, 1),
        (5, 3),
        (6, 6),
        (3, 5),
    ]:
        assert run(torch.zeros(8), n, m).tolist() == [m] * min(n, 8)


def test_a_list_among_the_arguments_takes_what_is_computed_of_ints(mesh: Mesh, traces: list[str]) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor, numbers: list[Any], kept: dict[str, Any]) -> torch.Tensor:
        numbers[1] = numbers[0] * 2
        kept["last"], kept["n"] = numbers[0], numbers[1] + kept["n"]
        return x * numbers[0]

    for n in (1, 2, 3, 4, 5, 6):
        numbers, kept = [n, 7], {"n": n}
        assert step(torch.ones(1), numbers, kept).item() == n
        assert numbers == [n, 2 * n] and kept == {"n": 3 * n, "last": n}
        assert all(type(each) is int for each in (*numbers, *kept.values()))
    assert len(traces) <= 3


def test_a_call_that_raises_leaves_python_as_it_was(mesh: Mesh) -> None:
    state = types.SimpleNamespace(last=0)

    @program(mesh=mesh)
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        state.last = n
        if n == 4:
            raise ValueError("four")
        return x * n

    for n in (1, 2, 3):
        assert step(torch.ones(1), n).item() == n and state.last == n
    for _ in range(2):
        with pytest.raises(ValueError, match="four"):
            step(torch.ones(1), 4)
        assert state.last == 3
    assert step(torch.ones(1), 5).item() == 5 and state.last == 5 and type(state.last) is int


@dataclasses.dataclass
class Config:
    n: int


@QUIET
def test_ints_serve_all_named_sizes(traces: list[str]) -> None:
    with partitioned_mesh(data=2) as mesh:

        @program(mesh=mesh)
        def step(x: Rows, n: int) -> torch.Tensor:
            return x.sum(0) * n / x.shape[0]

        for b, n in [(2, 1), (3, 1), (4, 2), (5, 3), (2, 4), (6, 5)]:
            assert step(torch.ones(b, 4), n).tolist() == [n] * 4
    assert len(traces) == 2


@QUIET
def test_an_int_of_an_object_is_read_at_each_call(mesh: Mesh) -> None:
    run = program(lambda x, config, n: x * config.n + n, mesh=mesh)
    config = Config(1)
    for n in range(8):
        config.n = n * n
        assert run(torch.ones(1), config, n).item() == n * n + n


@QUIET
def test_a_method_takes_ints(mesh: Mesh) -> None:
    class Trainer:
        def __init__(self, scale: float) -> None:
            self.scale, self.seen = scale, 0

        @program(mesh=mesh)
        def step(self, x: torch.Tensor, n: int) -> torch.Tensor:
            self.seen = n
            return x * n * self.scale

    one, other = Trainer(1.0), Trainer(2.0)
    for n in range(8):
        assert one.step(torch.ones(1), n).item() == n and other.step(torch.ones(1), n + 1).item() == 2 * n + 2
        assert (one.seen, other.seen) == (n, n + 1)


def test_an_int_that_code_asks_for_its_type_is_an_int(mesh: Mesh, traces: list[str]) -> None:
    run = program(lambda x, n: x * {int: 2.0, bool: 3.0}[type(n)] * n, mesh=mesh)
    for n in (1, 2, 3, 1, 2, 3):
        assert run(torch.ones(1), n).item() == 2 * n
    assert len(traces) <= 6


def test_an_argument_that_is_written_in_place_and_one_that_is_a_size(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor, n: int) -> torch.Tensor:
        x.add_(1)
        return x[:n].sum()

    for n in (1, 2, 3, 4, 5, 2, 3, 1, 5, 4, 2):
        x = distribute(torch.zeros(8), mesh)
        assert step(x, n).item() == n and x.sum().item() == 8
