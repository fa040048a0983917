"""Interrupts are failures like others: Ctrl-C, and signals' handlers that use the mesh, at any point of the
controller's code in a training step. State is then that before the step or behind it, never a part of either."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.distributed import Mesh
from monarch.testing import chaos
from tests.sample import is_full

pytestmark = pytest.mark.sample(1, of="kernels")

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
def ctrl_c_in_a_step(mesh: Mesh) -> Iterator[None]:
    """Interrupt the block while the workers are in a step, as a user does; and see to it that it is."""
    (monarch.distribute(torch.zeros(()), mesh) + 1).item()  # nothing is under way
    failed = threading.Event()

    def wait_and_interrupt() -> None:
        while not mesh.executor.look()[0]:  # type: ignore[attr-defined]
            if failed.wait(0.001):
                return
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait_and_interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
            time.sleep(60)
    finally:
        failed.set()
        thread.join()


def test_ctrl_c_ends_the_step_that_the_workers_are_in() -> None:
    """One that would never end by itself. Nothing of it is left, nor of what was called behind it."""
    with Mesh(data=2) as mesh:
        total, calls = monarch.distribute(torch.zeros(()), mesh), [0]
        x = monarch.distribute(torch.ones(4), mesh, "[@data]")

        @monarch.program
        def step(x: torch.Tensor, least: float) -> torch.Tensor:
            calls[0] += 1
            total.add_(1)
            (x,) = monarch.while_loop(lambda x: x.sum() > least, lambda x: (x * 0.5,), (x,))
            return x.sum()

        assert step(x, 1.0).item() == 1.0
        for times in (2, 3):
            never: list[torch.Tensor] = []
            with ctrl_c_in_a_step(mesh):
                for _ in range(3):
                    never.append(step(x, -1.0))
                never[-1].item()
            assert calls == [times - 1] and total.item() == times - 1
            assert step(x, 1.0).item() == 1.0
            assert calls == [times] and total.item() == times
            for result in never:
                with pytest.raises(monarch.exceptions.DeviceMeshError, match="was given up"):
                    result.item()


def test_ctrl_c_in_the_first_call_leaves_nothing_of_it() -> None:
    with Mesh(data=2) as mesh:
        x = monarch.distribute(torch.ones(4), mesh, "[@data]")
        held: dict[str, torch.Tensor] = {}

        @monarch.program
        def step(x: torch.Tensor) -> torch.Tensor:
            (held["last"],) = monarch.while_loop(lambda x: x.sum() > -1.0, lambda x: (x * 0.5,), (x,))
            return held["last"].sum()

        with ctrl_c_in_a_step(mesh):
            step(x).item()
        assert held == {}
        assert (x + 1).full_tensor().tolist() == [2.0] * 4


def test_ctrl_c_ends_many_ops_between_two_of_them() -> None:
    with Mesh(data=2) as mesh:
        weight = monarch.distribute(torch.eye(256) * 0.5, mesh)
        x = monarch.distribute(torch.ones(256, 256), mesh, "[@data, -]")

        @monarch.program
        def step(x: torch.Tensor) -> torch.Tensor:
            for _ in range(200):
                x = (x @ weight).tanh()
            return x.sum()

        step(x).wait()
        with ctrl_c_in_a_step(mesh):
            several = [step(x) for _ in range(8)]
            several[-1].item()
        with pytest.raises(monarch.exceptions.DeviceMeshError, match="was given up"):
            several[-1].item()
        assert (x + 1).sum().item() == 2 * 256 * 256


@pytest.mark.sample(1)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["Ctrl-C", "a handler that saves a checkpoint"])
def test_an_interrupt_at_any_point_of_a_step(what: str) -> None:
    with Mesh(data=2) as mesh:
        training, other = Training(mesh), Training(mesh)
        for each in (training, other):
            for _ in range(5):
                each.step(*BATCH).item()
        with chaos.interrupt(-1) as points:
            training.step(*BATCH).item()
        other.step(*BATCH).item()
        saved: list[list[torch.Tensor]] = []
        act = chaos.ctrl_c if what == "Ctrl-C" else lambda: saved.append(training.state())
        before, after, loss = other.state(), None, 0.0
        for at in range(0, points.passed, 1 if is_full() else 29):
            if after is None:
                loss = other.step(*BATCH).item()
                after = other.state()
            with suppress(KeyboardInterrupt), chaos.interrupt(at, act) as found:
                assert training.step(*BATCH).item() == loss
            now = training.state()
            assert all(equal(each, before) or equal(each, after) for each in (now, *saved)), found.where
            if what == "Ctrl-C" and equal(now, before):  # the step was not taken: the next call takes it
                assert training.step(*BATCH).item() == loss
                now = training.state()
            assert equal(now, after), found.where
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
