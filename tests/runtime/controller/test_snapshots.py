"""Values that are on one worker alone survive its death: all go back to a snapshot, and what was called since is done
again."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from monarch.compiler.plan import DeviceMeshError, LostError, MeshSpec, MonarchError, Plan
from monarch.runtime.controller import snapshots
from monarch.runtime.controller.executor import MeshExecutor
from tests.runtime.building import Building, each, whole
from tests.runtime.collectives.loopback import executor_on

pytestmark = pytest.mark.sample(1, of="executor")

MESH = MeshSpec.of(a=2, b=2)
W = each(MESH, (4, 6))
R = whole((4,))


@pytest.fixture(params=["local", "hosts"])
def executor(request: pytest.FixtureRequest) -> Iterator[MeshExecutor]:
    with executor_on(request.param, MESH) as executor:
        yield executor


def training(mesh: MeshSpec = MESH) -> Plan:
    """w = 2 w + x, each worker's own; r += the sum of a column of w over all workers. Gives r's sum."""
    build = Building(mesh, "train")
    w = build.input(W, "state", "w", donate=True)
    r = build.input(R, "state", "r", donate=True)
    x = build.input(W)
    total = build.call("getitem", build.call("all_reduce", [x], list(mesh.names), "sum"), 0)
    change = build.call("aten.sum.default", total)
    build.call("commit")
    new = build.call("aten.add_.Tensor", build.call("aten.mul_.Tensor", w, 2.0), x)
    more = build.call("aten.add_.Tensor", r, change)
    build.output(build.call("aten.sum.default", more), whole(()))
    build.output(new, W, "state", "w")
    build.output(more, R, "state", "r")
    return build.plan()


class Loop:
    """A training loop that reads its losses late, and goes on from the step that it is told has failed."""

    def __init__(self, executor: MeshExecutor, late: int = 0) -> None:
        self.executor, self.late, self.plan = executor, late, training()
        self.states: list[Any] = [(executor.put(torch.zeros(4, 6), W), executor.put(torch.zeros(4), R))]
        self.losses: list[Any] = []
        self.read: list[float] = []
        self.heals = 0

    def batch(self, step: int) -> torch.Tensor:
        return torch.arange(24.0).view(4, 6) % (step + 2)

    def run(self, steps: int, before: Any = lambda step: None) -> None:
        for _ in range(100 * steps):
            if len(self.read) == steps:
                return
            try:
                while len(self.losses) < steps and len(self.losses) - len(self.read) <= self.late:
                    before(len(self.losses))
                    step = [*self.states[-1], self.batch(len(self.losses))]
                    loss, w, r = self.executor.run(self.plan, step)
                    self.losses.append(loss)
                    self.states.append((w, r))
                    del self.states[: -self.late - 2]
                self.read.append(self.executor.shards(self.losses[len(self.read)], [0])[0].item())
            except DeviceMeshError:
                self.executor.heal([(f"{name}", state) for name, state in zip("wr", self.states[-1], strict=True)])
                self.heals += 1
                good = len(self.read)
                for loss in self.losses[good:]:
                    try:
                        self.executor.wait(loss)
                    except DeviceMeshError as dropped:
                        assert "was dropped when the mesh was healed" in dropped.message
                        break
                    good += 1
                behind = len(self.losses) - good
                del self.losses[good:]
                del self.states[len(self.states) - behind :]
        raise AssertionError("no progress")

    def check(self) -> None:
        w, r = torch.zeros(4, 6), torch.zeros(4)
        for step, read in enumerate(self.read):
            w = 2 * w + self.batch(step)
            r = r + self.batch(step).sum()
            assert read == r.sum().item()
        assert torch.equal(torch.cat(self.executor.shards(self.states[-1][0])), w)
        assert all(torch.equal(each, r) for each in self.executor.shards(self.states[-1][1]))


def kill(executor: MeshExecutor, *ranks: int) -> None:
    pids = executor.worker_pids()
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("every", "late"), [(1, 0), (3, 0), (5, 7), (100, 3)])
def test_a_loop_goes_on_with_the_same_bits(executor: MeshExecutor, every: int, late: int) -> None:
    loop = Loop(executor, late)
    executor.snapshots(every, 1)
    deaths = {2: 1, 9: 0, 17: 2, 18: 3, 25: 1}
    loop.run(30, lambda step: kill(executor, deaths.pop(step)) if step in deaths else None)
    assert loop.heals >= 2 and not deaths
    loop.check()


def test_a_death_at_any_moment_of_a_snapshot_leaves_the_former(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker is killed behind the first command of every other snapshot, or the second, or the third."""
    with MeshExecutor(MESH) as executor:
        loop = Loop(executor)
        executor.snapshots(2, 2)
        give, taken, given = executor.connection.command, 0, 0
        chance = random.Random(0)

        def command(step: Any, *args: Any, **kwargs: Any) -> None:
            nonlocal taken, given
            give(step, *args, **kwargs)
            if "snapshot" in step.name:
                taken, given = (taken + 1, 0) if step.name.startswith("take") else (taken, given + 1)
                if taken % 2 and taken // 2 % 3 == given:
                    executor.connection.publish()
                    kill(executor, chance.randrange(4))

        monkeypatch.setattr(executor.connection, "command", command)
        loop.run(40)
        monkeypatch.undo()
        loop.run(41)  # no step works without a worker that has been killed behind the last one
        assert loop.heals > 5
        loop.check()


def test_a_death_while_the_mesh_goes_back(executor: MeshExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, renew, victims = Loop(executor), executor.connection.renew, [1]
    executor.snapshots(4, 1)
    loop.run(6)

    def renew_and_kill() -> None:
        renew()
        if victims:
            os.kill(executor.connection.pids()[victims.pop()], signal.SIGKILL)

    monkeypatch.setattr(executor.connection, "renew", renew_and_kill)
    kill(executor, 1)
    loop.run(9)
    assert not victims
    loop.check()


def test_what_a_dead_worker_alone_held_is_read_again_once_the_mesh_is_healed(executor: MeshExecutor) -> None:
    loop = Loop(executor)
    executor.snapshots(2, 1)
    loop.run(6)
    kill(executor, 0)
    with pytest.raises(DeviceMeshError):
        while True:
            executor.put(torch.zeros(4), R)
    with pytest.raises(LostError) as info:
        executor.shards(loop.states[-1][0])
    assert info.value.hint == "monarch.heal_mesh(mesh) restores it from a snapshot: read it again then."
    executor.heal([])
    loop.check()


def test_the_worker_and_all_that_keep_its_blocks_are_too_much(executor: MeshExecutor) -> None:
    loop = Loop(executor)
    executor.snapshots(2, 1)
    loop.run(5)
    kill(executor, 0, *executor.kept_snapshots.keepers[0])  # type: ignore[union-attr]
    with pytest.raises(LostError, match="cannot be restored") as info:
        loop.run(8)
    assert f"w: {W}" in info.value.hint and "r:" not in info.value.hint
    assert "The workers that kept copies of them have ended too" in info.value.hint


def test_steps_that_fail_are_not_done_again(executor: MeshExecutor) -> None:
    loop = Loop(executor)
    executor.snapshots(50, 1)
    build = Building(MESH, "pick")
    w = build.input(W, "state", "w", donate=True)
    at = build.input(whole((1,), torch.int64))
    picked = build.call("aten.index_select.default", w, 1, at)
    build.call("commit")
    build.output(build.call("aten.add_.Tensor", w, build.call("aten.sum.default", picked)), W, "state", "w")
    pick = build.plan()
    loop.run(3)
    (wrong,) = executor.run(pick, [loop.states[-1][0], torch.tensor([77])])
    with pytest.raises(DeviceMeshError, match="out of DATA bounds"):
        executor.wait(wrong)
    assert executor.recover(wrong) is loop.states[-1][0]
    loop.run(5)
    kill(executor, 2)
    loop.run(9)
    loop.check()


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that replace nothing, and batches, have the next snapshot be taken early; workers hold two at most."""
    monkeypatch.setattr(snapshots, "LOG_STEPS", 20)
    with MeshExecutor(MESH) as executor:
        loop = Loop(executor)
        executor.snapshots(1000, 1)
        loop.run(2)
        for step in range(200):
            executor.wait(executor.put(torch.ones(4, 6), W))
            loop.run(3 + step // 10)
        assert executor.state.log is not None and len(executor.state.log) < 60
        kill(executor, 3)
        loop.run(30)
        loop.check()
        loop.losses.clear()
        del loop.states[:-1]
        assert executor.held_values() == [2] * 4


def test_a_snapshot_is_of_one_step_though_steps_write_in_place() -> None:
    """The values of a snapshot are those of its step, to the bit, however many steps come behind it."""
    with MeshExecutor(MESH) as executor:
        loop = Loop(executor)
        loop.run(3)
        executor.snapshots(100, 1)
        loop.run(20)
        assert executor.kept_snapshots is not None and executor.kept_snapshots.number == 0
        kill(executor, 0)
        loop.run(21)
        loop.check()


def test_they_end_and_are_refused_where_they_cannot_be(executor: MeshExecutor) -> None:
    with pytest.raises(MonarchError, match="cannot keep"):
        executor.snapshots(3, 4)
    with pytest.raises(MonarchError, match="cannot keep"):
        executor.snapshots(3, 0)
    loop = Loop(executor)
    executor.snapshots(3, 1)
    executor.snapshots(0, 1)
    loop.run(3)
    kill(executor, 1)
    with pytest.raises(LostError):
        loop.run(8)
