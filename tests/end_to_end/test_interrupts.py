"""Interrupts are failures like others: Ctrl-C, and signals' handlers that use the mesh, at any point of the
controller's code in a training step. State is then that before the step or behind it, never a part of either."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.distributed import Mesh
from monarch.runtime.control.security import Security
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.controller.local import LocalConnection
from monarch.runtime.hosts.attached import AttachedHosts
from monarch.runtime.hosts.remote import RemoteConnection
from monarch.testing import chaos
from tests.runtime.actors.agents import hosts_here
from tests.runtime.collectives.loopback import LoopbackTree
from tests.sample import is_full

pytestmark = pytest.mark.sample(1, of="kernels")

BATCH = torch.tensor([1, 2, 3, 4]), torch.tensor([4, 3, 2, 1])


WHERE = pytest.mark.parametrize("where", ["here", "hosts"])


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
def ctrl_c(where: Callable[..., Any]) -> Iterator[None]:
    """Interrupt the block as a user does, when it has come into this function; and see to it that it is."""
    over, main = threading.Event(), threading.main_thread().ident
    assert main is not None

    def interrupt() -> None:
        while where.__code__ not in codes(sys._current_frames()[main]):
            if over.wait(0.001):
                return
        os.kill(os.getpid(), signal.SIGINT)

    def codes(frame: FrameType | None) -> set[CodeType]:
        found = set()
        while frame is not None:
            found.add(frame.f_code)
            frame = frame.f_back
        return found

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            yield
    finally:
        over.set()
        thread.join()


@contextmanager
def mesh_at(where: str, folder: Path, **dims: int) -> Iterator[Mesh]:
    """Workers here, on two hosts without a network, or on two of which the controller reaches one over the other."""
    with ExitStack() as end:
        if where == "here":
            hosts = None
        elif where == "hosts":
            tree: Any = LoopbackTree(2)
            connect = partial(RemoteConnection, tree, ["tcp"], 30.0)
            hosts = AttachedHosts(tree, Security.token("x" * 32), connect, 0, 0)
            end.callback(hosts.close)
        else:
            token = folder / "token"
            agents = end.enter_context(hosts_here(2, folder))
            hosts = end.enter_context(monarch.hosts(agents.addresses, token=token, fan_out=1, trusted_network=True))
        yield end.enter_context(Mesh(hosts=hosts, **dims))


class Loops:
    """A step that ends by itself with `least=1.0`, and never with -1.0. It counts in a state and in Python."""

    def __init__(self, mesh: Mesh) -> None:
        self.calls = 0
        self.total = monarch.distribute(torch.zeros(()), mesh)
        self.x = monarch.distribute(torch.ones(4), mesh)

    @monarch.program
    def step(self, least: float) -> torch.Tensor:
        self.calls += 1
        self.total.add_(1)
        (x,) = monarch.while_loop(lambda x: x.sum() > least, lambda x: (x * 0.5,), (self.x,))
        return x.sum()


@pytest.mark.parametrize("where", ["here", "hosts", pytest.param("behind another host", marks=pytest.mark.full)])
def test_ctrl_c_gives_up_the_step_that_is_waited_for_and_those_behind_it(where: str, tmp_path: Path) -> None:
    with mesh_at(where, tmp_path, data=2) as mesh:
        loops = Loops(mesh)
        assert loops.step(1.0).item() == 1.0
        for times in (3, 5):
            with ctrl_c(Mesh.fetch):
                before, never = loops.step(1.0), [loops.step(-1.0) for _ in range(3)]
                never[0].item()
            assert loops.calls == times - 1 and loops.total.item() == times - 1 and before.item() == 1.0
            for result in never:
                with pytest.raises(monarch.exceptions.DeviceMeshError, match="was aborted"):
                    result.item()
            assert loops.step(1.0).item() == 1.0
            assert loops.calls == times and loops.total.item() == times


@WHERE
def test_ctrl_c_once_more_gives_up_what_was_called_before_too(where: str, tmp_path: Path) -> None:
    with mesh_at(where, tmp_path, data=2) as mesh:
        loops = Loops(mesh)
        assert loops.step(1.0).item() == 1.0
        with ctrl_c(Mesh.fetch):
            never = [loops.step(-1.0) for _ in range(3)]
            never[-1].item()
        with ctrl_c(Mesh.settle):
            loops.total.item()
        assert loops.calls == 1 and loops.total.item() == 1
        assert loops.step(1.0).item() == 1.0


@WHERE
def test_ctrl_c_leaves_the_steps_of_other_parts(where: str, tmp_path: Path) -> None:
    with mesh_at(where, tmp_path, pipe=2) as mesh:
        first, second = (Loops(mesh.slice(pipe=at)) for at in range(2))
        for each in (first, second):
            assert each.step(1.0).item() == 1.0
        with ctrl_c(Mesh.fetch):
            never = first.step(-1.0)
            beside = second.step(1.0)
            never.item()
        assert (first.calls, first.total.item()) == (1, 1)
        assert (second.calls, second.total.item(), beside.item()) == (2, 2, 1)
        assert first.step(1.0).item() == 1.0


def test_a_worker_dies_after_ctrl_c() -> None:
    """What was aborted is not given up again, nor is what has its numbers in the new session."""
    with Mesh(data=2) as mesh:
        loops = Loops(mesh)
        assert loops.step(1.0).item() == 1.0
        with ctrl_c(Mesh.fetch):
            loops.step(-1.0).item()
        os.kill(mesh.executor.worker_pids()[1], signal.SIGKILL)  # type: ignore[attr-defined]
        with pytest.raises(monarch.exceptions.DeviceMeshError):
            while True:
                loops.step(1.0).item()
        monarch.heal_mesh(mesh)
        done = loops.calls
        assert loops.total.item() == done
        assert [loops.step(1.0).item() for _ in range(5)] == [1.0] * 5
        assert loops.calls == done + 5 and loops.total.item() == done + 5


@WHERE
def test_ctrl_c_in_the_first_call_leaves_nothing_of_it(where: str, tmp_path: Path) -> None:
    with mesh_at(where, tmp_path, data=2) as mesh:
        x = monarch.distribute(torch.ones(4), mesh, "[@data]")
        held: dict[str, torch.Tensor] = {}

        @monarch.program
        def step(x: torch.Tensor) -> torch.Tensor:
            (held["last"],) = monarch.while_loop(lambda x: x.sum() > -1.0, lambda x: (x * 0.5,), (x,))
            return held["last"].sum()

        with ctrl_c(MeshExecutor.wait):
            step(x).item()
        assert held == {}
        assert (x + 1).full_tensor().tolist() == [2.0] * 4


def test_ctrl_c_ends_many_ops_between_two_of_them() -> None:
    with Mesh(data=2) as mesh:
        weight = monarch.distribute(torch.eye(512) * 0.5, mesh)
        x = monarch.distribute(torch.ones(512, 512), mesh, "[@data, -]")

        @monarch.program
        def step(x: torch.Tensor) -> torch.Tensor:
            for _ in range(500):
                x = (x @ weight).tanh()
            return x.sum()

        step(x).wait()
        with ctrl_c(Mesh.fetch):
            result = step(x)
            result.item()
        with pytest.raises(monarch.exceptions.DeviceMeshError, match="was aborted"):
            result.item()
        assert (x + 1).sum().item() == 2 * 512 * 512


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


RECORDS = "/language/recorder/recording.py", "/language/eager/flush.py", "/controller/connection.py"


def test_an_interrupt_at_any_point_of_ops_outside_of_programs() -> None:
    """Ops that are recorded behind it are applied, each with its own numbers."""
    with Mesh(data=2) as mesh:
        total = monarch.distribute(torch.zeros(4), mesh, "[@data]")

        def add() -> float:
            total.add_(1.0)
            return total.sum().item()

        def add_more() -> float:
            total.add_(0.25).add_(1.0)
            return total.sum().item()

        for call in (add, add_more):
            call()
        with chaos.interrupt(-1, within=RECORDS) as points:
            add()
        now = add_more()
        for at in range(0, points.passed, 1 if is_full() else 3):
            with suppress(KeyboardInterrupt), chaos.interrupt(at, within=RECORDS) as found:
                add()
            before, now = now, add_more()
            assert now - before in (5.0, 9.0), found.where


def test_no_wait_for_a_command_that_ctrl_c_kept_from_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[bool] = []

    def give_up(self: MeshExecutor, *given: Any) -> bool:
        answers.append(plain(self, *given))
        return answers[-1]

    def taken(self: LocalConnection, step: object) -> None:  # of the command that asks for the value
        monkeypatch.setattr(LocalConnection, "taken", as_is)
        raise KeyboardInterrupt

    plain, as_is = MeshExecutor.give_up, LocalConnection.taken
    with Mesh(data=2) as mesh:
        x = monarch.distribute(torch.ones(4096), mesh)

        @monarch.program
        def step(x: torch.Tensor, least: float) -> torch.Tensor:
            (x,) = monarch.while_loop(lambda x: x.sum() > least, lambda x: (x * 0.5,), (x,))
            return x

        assert step(x, 1.0).full_tensor().sum() == 1.0
        never = step(x, -1.0)
        monkeypatch.setattr(MeshExecutor, "give_up", give_up)
        monkeypatch.setattr(LocalConnection, "taken", taken)
        with pytest.raises(KeyboardInterrupt):
            never.full_tensor()
        assert answers == [True]
        assert step(x, 1.0).full_tensor().sum() == 1.0


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
