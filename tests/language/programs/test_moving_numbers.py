"""Numbers in Python that change from call to call: one trace serves all their values, and where it cannot, each call is
traced anew and exact."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch.language import Mesh, distribute, program
from monarch.language.errors import TracedAgainWarning
from tests.language.alike import assert_alike, fit, nothing
from tests.language.programs.uses_of_numbers import USES

QUIET = pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
AGAIN = pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")


# -- what a program may do with such a number --------------------------------------------------------------------------


@AGAIN
@pytest.mark.sample(12)
@pytest.mark.parametrize("use", USES)
def test_a_number_that_a_program_counts_is_an_int_to_python(use: str, mesh: Mesh) -> None:
    def case(w):
        state = types.SimpleNamespace(n=0, f=0.75)

        def step(x):
            state.n += 1
            state.f *= 0.875
            state.left = USES[use](x, state.n, state.f)
            return state.left

        return step, lambda call: setattr(state, "n", 1) if call == 5 else None

    assert_alike(case, mesh, calls=9)


@AGAIN
@pytest.mark.parametrize("use", ["arithmetic", "with floats", "branches", "tensors of floats", "sizes", "text", "type"])
def test_a_number_that_changes_between_calls_is_read_at_each(use: str, mesh: Mesh) -> None:
    def case(w):
        state = types.SimpleNamespace(n=0, f=0.5)

        def change(call):
            state.n, state.f = [3, 3, 0, True, 2.5, 7, -2, 1][call], [0.5, 2.0, 0.0, 3, -1.0, math.inf, 0.25, 1.0][call]

        return lambda x: USES[use](x, state.n, state.f) if type(state.n) is int else x, change

    assert_alike(case, mesh, calls=8)


# -- where it may stand ------------------------------------------------------------------------------------------------


def _attribute(step: Any) -> Callable[[Any], Any]:
    state = types.SimpleNamespace(n=0)

    def run(x: Any) -> Any:
        state.n += 1
        return step(x, state.n)

    return run


def _nonlocal(step: Any) -> Callable[[Any], Any]:
    n = 0

    def count() -> None:
        nonlocal n
        n += 1

    def run(x: Any) -> Any:
        count()
        return step(x, n)

    return run


GLOBAL = 0


def _global(step: Any) -> Callable[[Any], Any]:
    def run(x: Any) -> Any:
        global GLOBAL
        GLOBAL += 1
        return step(x, GLOBAL)

    return run


def _entry(step: Any) -> Callable[[Any], Any]:
    counts = {"all": [0, "a"]}

    def run(x: Any) -> Any:
        counts["all"][0] += 1  # type: ignore[operator]
        return step(x, counts["all"][0])

    return run


@dataclasses.dataclass(slots=True, weakref_slot=True)
class _Slots:
    n: int = 0


def _slot(step: Any) -> Callable[[Any], Any]:
    state = _Slots()

    def run(x: Any) -> Any:
        state.n += 1
        return step(x, state.n)

    return run


def _module(step: Any) -> Callable[[Any], Any]:
    layer = torch.nn.Identity()
    layer.calls = 0  # type: ignore[assignment]

    def run(x: Any) -> Any:
        layer.calls += 1  # type: ignore[assignment, operator]
        return step(layer(x), layer.calls)

    return run


@QUIET
@pytest.mark.parametrize("place", [_attribute, _nonlocal, _global, _entry, _slot, _module], ids=lambda it: it.__name__)
def test_a_count_costs_two_traces(place: Any, mesh: Mesh, traces: list[str]) -> None:
    used = lambda x, n: x * min(1.0, n / 100) * 0.5**n + n  # noqa: E731
    global GLOBAL
    GLOBAL = 0
    step, dense = program(place(used), mesh=mesh), place(used)
    for call in range(12):
        x = torch.full((3,), float(call))
        ours, before = step(distribute(x, mesh)).full_tensor(), GLOBAL
        if place is _global:
            GLOBAL = call
        torch.testing.assert_close(ours, dense(x))
        assert GLOBAL == before
    assert len(traces) == 2


@QUIET
def test_a_count_that_starts_again_is_set_where_it_was_that_number_before(mesh: Mesh, traces: list[str]) -> None:
    state = types.SimpleNamespace(n=0, rounds=0)

    def step(x: torch.Tensor) -> torch.Tensor:
        state.rounds += 1
        x = x * state.n
        state.n = 0
        return x

    run = program(step, mesh=mesh)
    for call in (0, 3, 0, 5, 0, 7):
        state.n = call
        assert run(torch.ones(2)).tolist() == [call, call]
        assert state.n == 0
    assert state.rounds == 6 and len(traces) <= 3


@QUIET
def test_both_ways_of_a_branch_on_a_count_are_traced_once(mesh: Mesh, traces: list[str]) -> None:
    state = types.SimpleNamespace(n=0, saved=0)

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        state.n += 1
        if state.n % 5 == 0:
            state.saved = state.n
            return x * 2
        return x

    found = [step(torch.ones(1)).item() for _ in range(20)]
    assert found == [1, 1, 1, 1, 2] * 4 and state.saved == 20 and len(traces) <= 5


@pytest.mark.parametrize(
    "name, traced", [("StepLR", 6), ("CosineAnnealingLR", 3), ("ExponentialLR", 2), ("LambdaLR", 3)]
)
@QUIET
def test_a_scheduler_that_steps_in_a_program_costs_few_traces(
    name: str, traced: int, mesh: Mesh, traces: list[str]
) -> None:
    options: dict[str, Any] = {
        "StepLR": {"step_size": 4},
        "CosineAnnealingLR": {"T_max": 20},
        "ExponentialLR": {"gamma": 0.9},
        "LambdaLR": {"lr_lambda": lambda epoch: min(1.0, (epoch + 1) / 6)},
    }

    def case(w):
        schedule = getattr(torch.optim.lr_scheduler, name)(w["o"], **options[name])

        def step(x):
            loss = fit(w, x)
            schedule.step()
            return loss, schedule.get_last_lr(), schedule.last_epoch

        return step, nothing

    assert_alike(case, mesh, calls=12)
    assert len(traces) <= traced


class Counting(torch.optim.Optimizer):
    """SGD with a corrected mean, which counts its steps as ints."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "seen": 0, "decay": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["seen"] += 1
            for parameter in group["params"]:
                state = self.state[parameter]
                if not state:
                    state.update(step=0, mean=torch.zeros_like(parameter))
                state["step"] += 1
                state["mean"].mul_(group["decay"]).add_(parameter.grad)
                parameter.add_(state["mean"] / (1 - group["decay"] ** state["step"]), alpha=-group["lr"])


@QUIET
def test_an_optimizer_that_counts_ints_counts_ints(mesh: Mesh, traces: list[str]) -> None:
    def case(w):
        optimizer = Counting(w["m"].parameters())

        def step(x):
            optimizer.zero_grad()
            w["m"](x).square().mean().backward()
            optimizer.step()
            return [{k: v for k, v in state.items() if k != "mean"} for state in optimizer.state.values()]

        return step, lambda call: optimizer.param_groups[0].update(decay=0.8) if call == 5 else None

    assert_alike(case, mesh, calls=9)
    assert len(traces) <= 4


@AGAIN
def test_a_call_that_raises_leaves_the_count_as_it_was(mesh: Mesh) -> None:
    state = types.SimpleNamespace(n=0, f=1.0)

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        state.n += 1
        state.f *= 0.5
        if state.n == 4:
            raise ValueError("four")
        return x * state.n

    for n in (1, 2, 3):
        assert step(torch.ones(1)).item() == n
    for _ in range(3):
        with pytest.raises(ValueError, match="four"):
            step(torch.ones(1))
        assert (state.n, state.f) == (3, 0.125) and type(state.n) is int and type(state.f) is float
    state.n = 10
    assert step(torch.ones(1)).item() == 11 and state.f == 0.0625


def test_a_number_whose_value_the_program_needs_is_said(mesh: Mesh) -> None:
    state = types.SimpleNamespace(n=0)

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        state.n += 1
        return x.new_zeros(state.n)

    with pytest.warns(TracedAgainWarning, match="'n' differs at each call"):
        assert [len(step(torch.ones(1))) for _ in range(14)] == [*range(1, 15)]
