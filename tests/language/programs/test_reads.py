"""Which attributes a program may have read: all that it comes to in any way, and no counts that only share a name with
what other objects are asked for."""

from __future__ import annotations

import datetime
import functools
import operator
import os
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from monarch.language import Mesh, module_to_mesh, program
from monarch.language.errors import TracedAgainWarning
from tests.language.alike import assert_alike


class Trainer:
    """As people write them: names of its attributes are those of methods and arguments of an optimizer's too."""

    def __init__(self, place: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        self.model = place(nn.Linear(4, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.step, self.lr, self.eps, self.params, self.loss = 0, 0.1, 1.0, 3, 0.0

    def train(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(x).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return loss


@pytest.mark.parametrize("how", ["a method", "an argument", "closed over"])
def test_a_trainers_counts_may_change_between_calls(how: str, mesh: Mesh, traces: list[str]) -> None:
    trainer = Trainer(lambda module: module_to_mesh(module, mesh, {}))
    method, argument = program(trainer.train, mesh=mesh), program(lambda t, x: t.train(x), mesh=mesh)
    closed_over = program(lambda x: trainer.train(x), mesh=mesh)
    for call in range(6):
        x = torch.ones(2, 4) * call
        loss = {"a method": method, "closed over": closed_over}.get(how, functools.partial(argument, trainer))(x)
        trainer.step += 1
        trainer.loss += loss.item()
        trainer.lr, trainer.eps, trainer.params = trainer.lr * 0.5, trainer.eps * 0.9, trainer.params + 1
    assert len(traces) == 2  # the second finds the optimizer's state


class Steps:
    def __init__(self, step: int = 1) -> None:
        self.step, self.inner, self.kept = step, self, [self]

    @property
    def same(self) -> Steps:
        return self

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.step


class Finding(Steps):
    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":
            return self
        raise AttributeError(name)


def renamed(s: Any, x: torch.Tensor) -> torch.Tensor:
    s.late = s
    found: torch.Tensor = x * s.late.step
    del s.late
    return found


def said(s: Any, x: torch.Tensor) -> Any:
    match s:
        case Steps(step=3):
            return x * 2, f"{s.step}"
    return x, "{.step}".format(s)  # noqa: UP032


WAYS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "by a property": lambda s, x: x * s.same.step,
    "under its own name": lambda s, x: x * s.inner.step,
    "by __getattr__": lambda s, x: x * s.optimizer.step,
    "in a list": lambda s, x: x * s.kept[0].step,
    "by a variable": lambda s, x: [x * each.step for each in s.kept][0],
    "either": lambda s, x: x * (s if s.step > 3 else s.inner).step,
    "by attrgetter": lambda s, x: x * max(map(operator.attrgetter("step"), s.kept)),
    "by hasattr": lambda s, x: x * (2 if hasattr(s.inner, "late") else 3),
    "by a library": lambda s, x: checkpoint(s, x, use_reentrant=False) + functools.partial(s.inner, x)(),
    "by its dict": lambda s, x: x * vars(s.inner)["step"],
    "by a method's object": lambda s, x: x * s.__call__.__self__.step,
    "by a weak reference": lambda s, x: x * weakref.ref(s)().step,
    "named anew in the program": renamed,
    "in text and patterns": said,
}


@pytest.mark.parametrize("way", WAYS)
def test_an_attribute_that_is_read_in_another_way_is_read(way: str, mesh: Mesh) -> None:
    def case(w: dict[str, Any]) -> Any:
        steps = Finding()
        held = SimpleNamespace(steps=steps)

        def change(call: int) -> None:
            steps.step = call + 2
            if call == 3:
                steps.late = 1  # type: ignore[attr-defined]

        return lambda x: WAYS[way](held.steps, x), change

    assert_alike(case, mesh)


def test_an_attribute_that_is_set_to_what_it_is_is_set(mesh: Mesh) -> None:
    def case(w: dict[str, Any]) -> Any:
        steps = Steps()

        def step(x: torch.Tensor) -> torch.Tensor:
            steps.inner.step = 1
            return x * 2

        def change(call: int) -> None:
            steps.step = call

        step.steps = steps  # type: ignore[attr-defined]
        return step, change

    assert_alike(case, mesh)


def test_an_attribute_that_is_called_as_a_function_that_reads_files_is_none(mesh: Mesh, traces: list[str]) -> None:
    router = SimpleNamespace(load=2.0, exists=True)

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x * router.load) + len(os.sep) * router.exists

    for _ in range(3):
        step(torch.ones(2))
    assert len(traces) == 1


clock = datetime


@pytest.mark.parametrize("way", ["attributes", "a variable"])
def test_what_a_module_is_asked_for_by_another_name_is_known(way: str, mesh: Mesh, traces: list[str]) -> None:
    def step(x: torch.Tensor) -> torch.Tensor:
        module = clock
        now = clock.datetime.now() if way == "attributes" else module.datetime.now()  # monarch: ignore[M301]
        return x * now.microsecond

    traced = program(step, mesh=mesh)
    with pytest.warns(TracedAgainWarning, match="datetime"):
        for _ in range(3):
            traced(torch.ones(2))
    assert len(traces) == 3
