"""A step that fails on the workers leaves nothing in Python either: tensors that the program binds anew are again those
of the last step that worked."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import monarch
from monarch.compiler.errors import DeviceIndexError
from monarch.distributed import Mesh
from monarch.testing import chaos

pytestmark = pytest.mark.sample(1, of="kernels")

GOOD, BAD = torch.tensor([1, 3]), torch.tensor([1, 9])


class Metrics:
    """State that a step binds anew in every way that Python has, beside state that it changes in place."""

    def __init__(self, place: Any) -> None:
        self.mean, self.inplace, self.last = (place(torch.zeros(3)) for _ in range(3))
        self.entries = {"average": place(torch.zeros(3)), "swapped": place(torch.ones(3))}
        self.listed = [place(torch.zeros(3))]
        self.recent = deque([place(torch.zeros(3)), place(torch.ones(3))], 2)
        self.weight = place(torch.zeros(3))
        self.slot = SimpleNamespace(value=place(torch.zeros(3)))
        total = place(torch.zeros(3))

        def step(x, chosen):
            nonlocal total
            row = x.mean(0)
            self.mean = 0.9 * self.mean + 0.1 * row
            self.inplace.add_(row)
            self.entries["average"] = self.entries["average"] + self.mean
            self.slot.value, self.entries["swapped"] = self.entries["swapped"], self.slot.value + row
            self.listed[0] = self.listed[0] + row
            self.recent.append(self.recent[0] + row)
            self.weight.data = self.weight.data - 0.1 * row
            total = total + row
            self.last = row
            return x.sum(1)[chosen].sum()

        self.step = step

    def state(self) -> list[torch.Tensor]:
        held = [self.mean, self.inplace, self.last, *self.entries.values(), *self.listed, *self.recent, self.weight]
        return [full(value) for value in (*held, self.slot.value, self.total)]

    @property
    def total(self) -> Any:
        cells = dict(zip(self.step.__code__.co_freevars, self.step.__closure__, strict=True))
        return cells["total"].cell_contents


def full(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.clone()


def batch(call: int) -> torch.Tensor:
    return torch.arange(12.0).view(4, 3) * (call + 1)


def assert_same(mine: Metrics, dense: Metrics) -> None:
    for value, expected in zip(mine.state(), dense.state(), strict=True):
        torch.testing.assert_close(value, expected)


@pytest.mark.sample()
@pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("bad", [1, 4, 7])
@pytest.mark.parametrize("behind", [0, 1, 5])
def test_tensors_bound_anew_are_those_before_the_step_that_failed_with_others_under_way(bad: int, behind: int) -> None:
    with Mesh(data=2) as mesh:
        mine, dense = Metrics(lambda value: monarch.distribute(value, mesh, "[-]")), Metrics(torch.clone)
        step = monarch.program(mine.step, mesh=mesh)
        for call in range(bad):
            step(batch(call), GOOD)
            dense.step(batch(call), GOOD)
        lost = [step(batch(bad), BAD), *(step(batch(50 + call), GOOD) for call in range(behind))]
        for loss in lost:
            with pytest.raises(DeviceIndexError):
                loss.item()
        assert_same(mine, dense)
        for call in range(10, 16):
            assert step(batch(call), GOOD).item() == dense.step(batch(call), GOOD).item()
        assert_same(mine, dense)


def test_the_state_itself_says_that_the_step_failed_and_then_is_there() -> None:
    with Mesh(data=2) as mesh:
        mine, dense = Metrics(lambda value: monarch.distribute(value, mesh, "[-]")), Metrics(torch.clone)
        step = monarch.program(mine.step, mesh=mesh)
        for call in range(5):
            step(batch(call), GOOD)
            dense.step(batch(call), GOOD)
        step(batch(5), BAD)
        failed = mine.mean
        with pytest.raises(DeviceIndexError):
            mine.mean.full_tensor()
        assert mine.mean is not failed
        assert_same(mine, dense)
        with pytest.raises(DeviceIndexError):
            failed.full_tensor()


def test_what_was_bound_after_the_failed_step_stays() -> None:
    with Mesh(data=2) as mesh:
        mine = Metrics(lambda value: monarch.distribute(value, mesh, "[-]"))
        step = monarch.program(mine.step, mesh=mesh)
        for call in range(5):
            step(batch(call), GOOD)
        loss = step(batch(5), BAD)
        mine.mean = monarch.distribute(torch.full((3,), 7.0), mesh, "[-]")
        with pytest.raises(DeviceIndexError):
            loss.item()
        assert mine.mean.full_tensor().tolist() == [7.0] * 3


class Counting:
    """A program that appends and counts. Where it `reads` how long its list is, each call is traced again."""

    def __init__(self, mesh: Mesh, reads: bool = False) -> None:
        self.reads = reads
        self.length = 0
        self.history: list[Any] = []
        self.seen: list[Any] = []
        self.calls = 0
        self.total = monarch.distribute(torch.zeros(3), mesh, "[-]")
        self.step = monarch.program(self._step, mesh=mesh)

    def _step(self, x, chosen):
        self.calls += 1
        self.total = self.total + x.mean(0)
        loss = x.sum(1)[chosen].sum()
        self.history.append(loss)
        self.seen.append(self.calls)
        if self.reads:
            self.length = len(self.history)
        return loss


@pytest.mark.parametrize("reads", [False, True])
def test_a_list_that_a_program_appends_to_has_no_entry_of_a_failed_step(reads: bool) -> None:
    with Mesh(data=2) as mesh:
        counting = Counting(mesh, reads)
        for call in range(4):
            counting.step(batch(call), GOOD)
        for call in (4, 5, 6):
            counting.step(batch(call), BAD if call == 4 else GOOD)
        counting.history.append("mine")
        assert len(counting.history) == 8
        with pytest.raises(DeviceIndexError):
            counting.history[4].item()
        assert counting.calls == 4 and counting.seen == [1, 2, 3, 4]
        assert len(counting.history) == 5 and counting.history[-1] == "mine"
        counting.step(batch(7), GOOD)
        expected = [batch(call).sum(1)[GOOD].sum().item() for call in (0, 1, 2, 3, 7)]
        assert [loss.item() for loss in counting.history if loss != "mine"] == expected
        torch.testing.assert_close(
            counting.total.full_tensor(), torch.stack([batch(call).mean(0) for call in (0, 1, 2, 3, 7)]).sum(0)
        )


@pytest.mark.sample(2)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["counts", "is traced", "shifts a queue"])
def test_an_interrupt_at_any_line_of_a_step_makes_its_effects_once_or_not(kind: str) -> None:
    """All but the second are replayed."""
    traced, counts = kind == "is traced", kind != "shifts a queue"
    with Mesh(data=2) as mesh:
        place = lambda value: monarch.distribute(value, mesh)  # noqa: E731
        counting, queue, count = Counting(mesh, traced), deque([place(torch.zeros(()))] * 3, 3), place(torch.zeros(()))

        @monarch.program(mesh=mesh)
        def shift(x, chosen):
            nonlocal count
            count = count + 1
            queue.append(count * 1)

        step = counting.step if counts else shift
        for _ in range(5):
            step(batch(0), GOOD)
        calls = 5
        with chaos.interrupt(-1) as points:
            step(batch(0), GOOD)
        calls += 1
        for at in range(0, points.passed, 997 if traced else 7):
            with suppress(KeyboardInterrupt), chaos.interrupt(at) as found:
                step(batch(0), GOOD)
            if counts:
                assert counting.calls in (calls, calls + 1), found.where
                calls = counting.calls
                assert counting.seen == list(range(1, calls + 1)) and len(counting.history) == calls, found.where
                torch.testing.assert_close(counting.total.full_tensor(), calls * batch(0).mean(0))
            else:
                now = int(count.item())
                assert now in (calls, calls + 1), found.where
                calls = now
                assert [int(value.item()) for value in queue] == [calls - 2, calls - 1, calls], found.where
