"""Interrupts are failures like others: Ctrl-C, and signals' handlers that use the mesh, at any line of the controller's
code in a training step. State is then that before the step or behind it, never a part of either."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.distributed import Mesh
from tests.sample import is_full

OURS = ("/monarch/language/", "/monarch/runtime/controller/", "/monarch/runtime/shared/", "/monarch/runtime/processes/")
BATCH = torch.tensor([1, 2, 3, 4]), torch.tensor([4, 3, 2, 1])


class Training:
    """A model on a mesh, and a program that trains it."""

    def __init__(self, mesh: Mesh) -> None:
        torch.manual_seed(0)
        self.model = monarch.module_to_mesh(nn.Sequential(nn.Embedding(16, 4), nn.Linear(4, 16)), mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.step = monarch.program(self._step)

    def _step(self, tokens, targets):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(tokens), targets)
        loss.backward()
        self.optimizer.step()
        return loss

    def state(self) -> list[torch.Tensor]:
        """Parameters and moments, in one order."""
        moments = [self.optimizer.state[p] for p in self.model.parameters()]
        values = [*self.model.parameters(), *(m[key] for m in moments for key in sorted(m))]
        return [value.detach().full_tensor() for value in values]


def equal(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


@contextmanager
def at_line(number: int, act: Callable[[], object]) -> Iterator[list[int]]:
    """Act when the controller's own code comes to its line number `number`; gives how many lines it came to. What a
    finalizer raises Python does not raise anywhere, so these do not count."""
    lines = [0]

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if not any(part in frame.f_code.co_filename for part in OURS) or frame.f_code.co_name == "__del__":
            return None
        if event == "line":
            lines[0] += 1
            if lines[0] == number + 1:
                sys.settrace(None)
                act()
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)


def interrupt() -> None:
    raise KeyboardInterrupt


@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["Ctrl-C", "a handler that saves a checkpoint"])
def test_an_interrupt_at_any_line_of_a_step(what: str) -> None:
    with Mesh(data=2) as mesh:
        training, other = Training(mesh), Training(mesh)
        for each in (training, other):
            for _ in range(5):
                each.step(*BATCH).item()
        with at_line(-1, interrupt) as lines:
            training.step(*BATCH).item()
        other.step(*BATCH).item()
        saved: list[list[torch.Tensor]] = []
        act = interrupt if what == "Ctrl-C" else lambda: saved.append(training.state())
        before, after, loss = other.state(), None, 0.0
        for line in range(0, lines[0], 1 if is_full() else 29):
            if after is None:
                loss = other.step(*BATCH).item()
                after = other.state()
            with suppress(KeyboardInterrupt), at_line(line, act):
                assert training.step(*BATCH).item() == loss
            now = training.state()
            assert all(equal(each, before) or equal(each, after) for each in (now, *saved)), line
            if what == "Ctrl-C" and equal(now, before):  # the step was not taken: the next call takes it
                assert training.step(*BATCH).item() == loss
                now = training.state()
            assert equal(now, after), line
            before, after = after, None
            saved.clear()


def test_programs_on_one_mesh_may_be_called_from_several_threads() -> None:
    with Mesh(data=2) as mesh:
        total = monarch.distribute(torch.zeros(4), mesh, "[@data]")

        @monarch.program
        def add(x):
            total.add_(x)
            return total.sum()

        seen: list[float] = []
        failed: list[BaseException] = []

        def work() -> None:
            try:
                seen.extend(add(1.0).item() for _ in range(20))
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        assert sorted(seen) == [4.0 * (1 + call) for call in range(80)]
        assert torch.equal(total.full_tensor(), torch.full((4,), 80.0))
