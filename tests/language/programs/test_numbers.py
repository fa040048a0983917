"""Numbers that only a call knows, arguments and optimizers' rates: to Python they are as without programs."""

from __future__ import annotations

import copy
import decimal
import fractions
import json
import math
import pickle
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from monarch.language import Mesh
from tests.language.alike import assert_alike, fit, nothing

CASES: list[Callable[..., Any]] = []
Case = Callable[..., Any]


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def number(function: Callable[[Any, float], Any]) -> Case:
    def of_number(w):
        def step(given):
            return function(*given)

        return step, nothing, lambda call: (torch.ones(3, 4), [0.1, 0.5, 0.5, 2.5, -1.5, 0.0][call])

    return of_number


NUMBERS: dict[str, Callable[[Any, Any], Any]] = {
    "isinstance": lambda x, t: x * 2 if isinstance(t, (int, float)) else x,
    "key": lambda x, t: x * {0.5: 3, 2.5: 4}.get(t, 1),
    "member": lambda x, t: x * 2 if t in [0.5, 2.5] or t in {-1.5} else x,
    "parts": lambda x, t: x * (t // 1) + t % 2 + divmod(t, 2)[1] + (5 // t if t else 1) + t.real + t.imag,
    "math": lambda x, t: x * math.exp(t) + math.floor(t) + math.ceil(t) + math.trunc(t) + math.copysign(1, t),
    "text": lambda x, t: (x, str(t), repr(t), f"{t} {t:.3f}", "%.2f" % t),  # noqa: UP031
    "rounded": lambda x, t: (x * round(t), round(t, 1), int(t), bool(t), t.is_integer(), t.hex()),
    "least": lambda x, t: (x * max(t, 0.2), min(t, 1.0), sorted([t, 0.3, -1.0])),
    "tensor": lambda x, t: (torch.tensor([t, 1.0]), x.new_tensor(t), torch.full((2,), t), x.clamp(min=t)),
    "copied": lambda x, t: (x * copy.deepcopy(t), copy.copy(t), pickle.loads(pickle.dumps(t))),
    "type": lambda x, t: x * (2 if type(t) is float else 3) * len(type(t).__name__),
    "type in a table": lambda x, t: x * {float: 2.0}.get(type(t), 3.0),
    "type of an entry": lambda x, t: x * (2 if type([t][0]) is float else 3),
    "types": lambda x, t: x * (2 if [*map(type, (x, t))][1] is float else 3),
    "JSON": lambda x, t: (x, json.dumps({"t": t}), json.dumps([t], default=str)),
    "exact": lambda x, t: (x, fractions.Fraction(t), decimal.Decimal(t), struct.pack("d", t)),
    "NumPy": lambda x, t: (x * float(np.float64(t)), np.array([t, 1.0]).tolist(), np.full(3, t).sum()),
    "NumPy's dtypes": lambda x, t: (x, (np.ones(2, np.float32) * t).dtype.name, type(np.float64(2) * t).__name__),
    "of the class": lambda x, t: x * t.fromhex("0x1p1") + float.__add__(t, 1.0),
    "made keys": lambda x, t: (x * 2, {t: 1}, {t}, {"a": {t: "b"}}),
    "range": lambda x, t: sum((x for _ in range(int(t * 2))), x),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_a_float_to_python(name: str, mesh: Mesh) -> None:
    assert_alike(number(NUMBERS[name]), mesh)


def test_zeros_of_both_signs_and_no_number_are_values_of_their_own(mesh: Mesh) -> None:
    def case(w):
        def step(given):
            x, t = given
            return x * (2 if f"{t}"[0] == "-" else 3 if t != t else 1), f"{t}"

        return step, nothing, lambda call: (torch.ones(3, 4), [0.0, -0.0, math.nan, 0.0, math.nan, -0.0][call])

    assert_alike(case, mesh)


def test_a_number_is_left_as_a_key(mesh: Mesh) -> None:
    def case(w):
        left: dict[float, Any] = {}

        def step(given):
            x, t = given
            left[t] = x * t
            return x * len(left)

        return step, nothing, lambda call: (torch.ones(3, 4), 0.5 * (call % 3))

    assert_alike(case, mesh)


# -- optimizers ------------------------------------------------------------------------------------------------------

_SCHEDULERS: dict[str, dict[str, Any]] = {
    "StepLR": {"step_size": 2},
    "CosineAnnealingLR": {"T_max": 4},
    "CosineAnnealingWarmRestarts": {"T_0": 2},
    "CyclicLR": {"base_lr": 0.01, "max_lr": 0.1, "step_size_up": 2},
    "LinearLR": {},
}


@pytest.mark.sample()
@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("name", _SCHEDULERS)
def test_a_scheduler_steps_in_a_program_or_outside(name: str, inside: bool, mesh: Mesh) -> None:
    def scheduled(w):
        schedule = getattr(torch.optim.lr_scheduler, name)(w["o"], **_SCHEDULERS[name])

        def step(x):
            rate = w["o"].param_groups[0]["lr"]
            loss = fit(w, x)
            if inside:
                schedule.step()
            return loss * rate, schedule.get_last_lr(), w["o"].param_groups[0]["lr"]

        return step, nothing if inside else lambda call: schedule.step()

    assert_alike(scheduled, mesh)


@case
def rates_of_all_kinds(w):
    rates = [1, 0, 0.5, np.float64(0.25), torch.tensor(0.1), 0.1]

    def step(x):
        loss = fit(w, x)
        return loss, w["o"].param_groups[0]["lr"] * 2

    return step, lambda call: w["o"].param_groups[0].update(lr=rates[call])


@case
def a_rate_that_the_program_changes(w):
    state = {"count": 0}

    def step(x):
        state["count"] += 1
        loss = fit(w, x)
        for group in w["o"].param_groups:
            group["lr"] *= 0.9 if group["lr"] > 0.06 else 1.1
        loss = loss + fit(w, x)
        w["o"].param_groups[0]["lr"] = min(w["o"].param_groups[0]["lr"], 0.1 / state["count"])
        return loss, {key: value for key, value in w["o"].param_groups[0].items() if key != "params"}

    return step, lambda call: w["o"].param_groups[0].update(lr=0.5) if call == 3 else None


@case
def optimizers_that_only_slots_hold(w):
    class Holder:
        __slots__ = ("optimizer",)

    holders, other = [Holder(), Holder()], w["place"](nn.Linear(4, 4))
    holders[0].optimizer = w["o"]
    holders[1].optimizer = torch.optim.SGD(other.parameters(), lr=0.3)

    def step(x):
        rate = holders[1].optimizer.param_groups[0]["lr"]
        loss = other(w["m"](x)).square().mean() * rate
        loss.backward()
        for holder in holders:
            holder.optimizer.step()
            holder.optimizer.zero_grad()
        return loss, rate

    return step, lambda call: holders[1].optimizer.param_groups[0].update(lr=0.3 / (call + 1))


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_what_it_is_without_a_program(case: Case, mesh: Mesh) -> None:
    assert_alike(case, mesh)


@pytest.mark.sample(1)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam])
def test_step_numbers_of_layers_that_train_now_and_then(kind: Any, mesh: Mesh) -> None:
    """Equal step numbers are one value on the workers, until one parameter steps and another does not."""

    def now_and_then(w):
        other, state = w["place"](nn.Linear(4, 4)), {"all": True}
        optimizer = kind([*w["m"].parameters(), *other.parameters()], lr=0.05)

        def eager(x):
            optimizer.zero_grad()
            loss = (other(w["m"](x)) if state["all"] else w["m"](x)).square().mean()
            loss.backward()
            optimizer.step()
            return loss

        step = w["program"](eager)

        def own(x):
            return (eager if state["eager"] else step)(x).detach()

        own.own = True  # the program, and the same code in the eager door on one state
        state["eager"] = False
        return own, lambda call: state.update(all=call % 2 == 0, eager=call in (2, 3))

    assert_alike(now_and_then, mesh, calls=8)
