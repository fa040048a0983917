"""Signals' handlers that use the mesh, where the signal comes while a program is traced."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from monarch.language import Mesh, distribute, program


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
