"""Programs as methods: of objects that are copied, of classes, of modules, of slots."""

from __future__ import annotations

import copy
import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from monarch.compiler.errors import ProgramError
from monarch.language import Mesh, distribute, program
from tests.language.alike import assert_alike

CASES: list[Callable[..., Any]] = []
Case = Callable[..., Any]


def case(function: Case) -> Case:
    CASES.append(function)
    return function


@case
def programs_as_methods(w):
    class Base:
        rate = 2.0

        @w["program"]
        def scaled(self, x):
            return x * self.rate

    class Trainer(Base):
        def __init__(self, count):
            self.count = count
            self.history = []

        @w["program"]
        def scaled(self, x):
            self.history.append(self.count)
            self.count *= 0.5
            return super().scaled(x) + self.count

        @classmethod
        @w["program"]
        def of_class(cls, x):
            cls.rate += 1
            return x * cls.rate

        @staticmethod
        @w["program"]
        def alone(x):
            return x * 3

    @dataclasses.dataclass(slots=True, weakref_slot=True)
    class Slotted:
        rate: float

        @w["program"]
        def scaled(self, x):
            return x * self.rate

    first, slotted = Trainer(1.0), Slotted(2.0)
    state = {"second": copy.copy(first), "third": copy.deepcopy(first)}

    def step(x):
        found = [each.scaled(x) for each in (first, *state.values(), slotted)]
        return found, Trainer.of_class(x), first.of_class(x), Trainer.alone(x), first.alone(x)

    def change(call):
        first.rate = float(call)
        slotted.rate = call + 0.5
        state.update(second=copy.copy(first), third=copy.deepcopy(first))
        state["second"].count = 9.0

    step.own = True
    return step, change


@case
def a_forward_that_is_a_program(w):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.rate = w["m"], 1.0

        @w["program"]
        def forward(self, x):
            return self.layer(x).detach() * self.rate

    model = Model()

    def step(x):
        return model(x)

    step.own = True
    return step, lambda call: setattr(model, "rate", float(call))


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_what_it_is_without_a_program(case: Case, mesh: Mesh) -> None:
    assert_alike(case, mesh)


def test_what_a_method_has_learnt_ends_with_its_object(mesh: Mesh) -> None:
    class Trainer:
        @program(mesh=mesh)
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    trainer = Trainer()
    for _ in range(2):
        trainer.step(distribute(torch.ones(2), mesh))
    assert trainer.step.remembered[0].traces == 1
    assert not vars(trainer)
    gone = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert gone() is None
    assert not vars(Trainer)["step"]._bound


def test_a_method_of_objects_that_allow_no_weak_references(mesh: Mesh) -> None:
    class Trainer:
        __slots__ = ("rate",)

        @program(mesh=mesh)
        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    with pytest.raises(ProgramError, match="objects of class 'Trainer' allow no weak references"):
        Trainer().step(torch.ones(2))


def test_attributes_of_a_program_are_state_as_those_of_functions_are(mesh: Mesh, traces: list[str]) -> None:
    def run(wrap: Callable[[Any], Any], make: Callable[[torch.Tensor], Any]) -> list[Any]:
        def function(x: torch.Tensor) -> Any:
            step.calls += 1
            step.mean = (step.mean * 0.5 if hasattr(step, "mean") else make(torch.zeros(2))) + x
            return x * step.calls * step._scale + other(x)

        function.calls = 0  # type: ignore[attr-defined]
        step = wrap(function)
        step._scale = 2.0
        other = wrap(lambda x: step.mean * other.rate)
        other.rate = 1.0
        found: list[Any] = []
        for call in range(6):
            found += [step(torch.ones(2)).tolist(), step.calls, step.mean.tolist()]
            if call == 2:
                step.calls = 10
            if call == 3:
                del step.mean
            if call == 4:
                step._scale, other.rate = 5.0, 7.0
        return found

    wanted = run(lambda function: function, lambda tensor: tensor)
    assert run(program(mesh=mesh), lambda tensor: distribute(tensor, mesh)) == wanted


@pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
def test_a_program_within_a_program_costs_no_traces(mesh: Mesh, traces: list[str]) -> None:
    inner = program(lambda x: x * 2, mesh=mesh)
    outer = program(lambda x: inner(x) + 1, mesh=mesh)
    for _ in range(4):
        inner(torch.ones(3)), outer(torch.ones(2)), inner(torch.ones(2))
    assert len(traces) == 3
