"""Signals' handlers that use the mesh, where the signal comes while a program is traced."""

from __future__ import annotations

import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch

from monarch.language import Mesh, distribute, program
from monarch.language.programs.changes import Gradients, undoing
from monarch.language.programs.handlers import ALL, HandlersLater
from monarch.language.programs.kinds import Tensor
from monarch.testing import chaos


@pytest.fixture
def handle() -> Iterator[Callable[[Callable[[], Any]], None]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda handler: signal.signal(signal.SIGUSR1, lambda number, frame: handler()) and None
    signal.signal(signal.SIGUSR1, before)


def test_it_sees_the_state_behind_the_step_and_is_no_part_of_the_program(
    mesh: Mesh, handle: Callable[[Callable[[], Any]], None]
) -> None:
    total, calls = distribute(torch.zeros(4), mesh), distribute(torch.zeros(()), mesh)
    count = program(lambda: calls.add_(1), mesh=mesh)
    seen: list[float] = []

    @program(mesh=mesh)
    def step(x: torch.Tensor, interrupted: bool) -> torch.Tensor:
        total.add_(x)
        if interrupted:
            signal.raise_signal(signal.SIGUSR1)
        total.add_(x)
        return total.sum()

    handle(lambda: (seen.append(total.full_tensor()[0].item()), count()))
    mine = signal.getsignal(signal.SIGUSR1)
    assert step(torch.ones(4), True).item() == 8
    assert seen == [2.0] and calls.item() == 1
    assert signal.getsignal(signal.SIGUSR1) is mine
    assert step(torch.ones(4), False).item() == 16 and calls.item() == 1


def test_what_it_raises_comes_out_of_the_call_behind_the_step(
    mesh: Mesh, handle: Callable[[Callable[[], Any]], None]
) -> None:
    total = distribute(torch.zeros(4), mesh)

    def stop() -> None:
        raise TimeoutError

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> None:
        signal.raise_signal(signal.SIGUSR1)
        total.add_(x)

    handle(stop)
    with pytest.raises(TimeoutError):
        step(torch.ones(4))
    assert total.full_tensor()[0].item() == 1


def test_ctrl_c_once_more_while_a_call_is_taken_back(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [distribute(torch.ones(2), mesh).requires_grad_() for _ in range(3)]
    calls: list[int] = []

    @program(mesh=mesh)
    def step(last: bool) -> None:
        calls.append(1)
        sum((weight * 2).sum() for weight in weights).backward()  # type: ignore[union-attr]
        if last:
            signal.raise_signal(signal.SIGINT)

    def put(cls: Any, *given: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        plain(cls, *given)

    plain = Tensor.put.__func__  # type: ignore[attr-defined]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Tensor, "put", classmethod(put))
        step(True)
    assert [weight.grad for weight in weights] == [None] * 3 and not calls
    step(False)
    assert all(weight.grad is not None for weight in weights) and calls == [1]


def test_ctrl_c_once_more_while_a_call_s_gradients_are_given_back(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = [distribute(torch.ones(2), mesh).requires_grad_() for _ in range(3)]

    @program(mesh=mesh)
    def step() -> None:
        for weight in weights:
            weight.grad = None
        sum((weight * 2).sum() for weight in weights).backward()  # type: ignore[union-attr]

    for _ in range(3):
        step()
    before = [weight.grad for weight in weights]

    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(type(mesh.executor), "run", interrupted)
        patched.setattr(Mesh, "settle", interrupted)
        step()
    assert [weight.grad for weight in weights] == before and None not in before


@pytest.mark.parametrize("ctrl_c", [0, 1, ALL])
def test_handlers_are_there_again_wherever_ctrl_c_comes(
    ctrl_c: int, handle: Callable[[Callable[[], Any]], None]
) -> None:
    seen: list[str] = []
    handle(lambda: seen.append("handled"))
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)]

    def act() -> None:
        handler: Any = signal.getsignal(signal.SIGINT)
        handler(signal.SIGINT, sys._getframe(2))  # as Python calls it, with the frame that is interrupted

    within = ["/programs/handlers.py"]
    at = passed = 0
    while at == 0 or at <= passed:
        seen.clear()
        came = False
        with suppress(KeyboardInterrupt), chaos.interrupt(at - 1, act, within) as points, HandlersLater(ctrl_c):
            signal.raise_signal(signal.SIGUSR1)
            came = True
        assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)] == before, points.where
        if not str(points.where).endswith(("in __call__", "in run")):  # that signal's own handling was interrupted
            assert seen == ["handled"] * came, points.where
        passed = max(passed, points.passed if at == 0 else 0)
        at += 1


def test_ctrl_c_once_more_before_anything_is_taken_back(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes as soon as the first is handled, where nothing has begun that it could wait for."""
    weight = distribute(torch.ones(2), mesh).requires_grad_()

    @program(mesh=mesh)
    def step() -> torch.Tensor:
        weight.grad = None
        loss = torch.nn.functional.dropout(weight, 0.5).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    for _ in range(3):
        step()
    before = torch.get_rng_state(), weight.grad
    entered = 0

    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)

    def enter(block: HandlersLater) -> HandlersLater:
        nonlocal entered
        entered += 1
        if entered == at:
            signal.raise_signal(signal.SIGINT)
        return plain(block)

    plain = HandlersLater.__enter__
    for at in (1, 2, 3, 4):
        entered = 0
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(type(mesh.executor), "run", interrupted)
            patched.setattr(HandlersLater, "__enter__", enter)
            step()
        assert entered >= at
        assert torch.equal(torch.get_rng_state(), before[0]) and weight.grad is before[1] is not None


def test_what_could_take_a_first_gradient_back_does_not_keep_it() -> None:
    weight = torch.ones(2, requires_grad=True)
    for dropped in (False, True):
        change = Gradients([weight], [None], [torch.ones(2)])
        change.make()
        undo = undoing([change])
        left = weakref.ref(change.after[0])
        del change
        if dropped:
            weight.grad = None
            assert left() is None
            weight.grad = mine = torch.zeros(2)
        assert undo is not None
        undo(False)
        assert weight.grad is (mine if dropped else None)
