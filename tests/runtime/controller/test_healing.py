"""A mesh that loses workers goes on: what is kept, what is done again, what is dropped, and what is lost."""

from __future__ import annotations

import gc
import os
import pickle
import signal
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch.compiler.plan import DeviceMeshError, LostError, MeshSpec, MonarchError, Plan, Source, TensorType
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.controller.healing import KEPT_BYTES, copies, find_sources
from monarch.runtime.controller.state import ControllerState
from monarch.runtime.controller.steps import Replay, Step
from monarch.runtime.processes.looking import Exit
from monarch.runtime.shared import wire
from monarch.runtime.shared.place import Place
from monarch.runtime.shared.wire import Report
from tests.runtime.building import Building, each, whole
from tests.runtime.collectives.loopback import executor_on
from tests.sample import is_full

pytestmark = pytest.mark.sample(1, of="executor")

MESH = MeshSpec.of(a=2, b=2)
W = whole((6, 4))


@pytest.fixture(params=["local", "hosts"])
def executor(request: pytest.FixtureRequest) -> Iterator[MeshExecutor]:
    with executor_on(request.param, MESH) as executor:
        yield executor


def training(mesh: MeshSpec = MESH) -> Plan:
    """w += the sum over all workers of their x; gives w's sum."""
    build = Building(mesh, "train")
    w = build.input(W, "state", "w", donate=True)
    x = build.input(each(mesh, (mesh.workers, 6, 4)))
    y = build.call("aten.select.int", x, 0, 0)
    total = build.call("getitem", build.call("all_reduce", [y], list(mesh.names), "sum"), 0)
    build.call("commit")
    out = build.call("aten.add_.Tensor", w, total)
    build.output(build.call("aten.sum.default", out), whole(()))
    build.output(out, W, "state", "w")
    return build.plan()


def kill(executor: MeshExecutor, *ranks: int) -> None:
    pids = executor.worker_pids()
    for rank in ranks:
        os.kill(pids[rank], signal.SIGKILL)


def notice(executor: MeshExecutor) -> None:
    """Use the mesh until it says that it has lost a worker."""
    with pytest.raises(DeviceMeshError, match="was killed by SIGKILL"):
        while True:
            executor.wait(executor.put(torch.zeros(2), whole((2,))))


class Loop:
    """A loop over batches that are all different, which reads losses so many steps late, and goes back to the step
    that it is told has failed."""

    def __init__(self, executor: MeshExecutor, late: int = 0) -> None:
        self.executor, self.late, self.plan = executor, late, training(executor.mesh)
        self.states: list[Any] = [executor.put(torch.zeros(6, 4), W)]
        self.losses: list[Any] = []
        self.read: list[float] = []
        self.heals = 0

    def batch(self, step: int) -> torch.Tensor:
        return torch.arange(self.executor.mesh.workers * 24.0).view(-1, 6, 4) * (step + 1)

    def run(self, steps: int, before: Any = lambda step: None) -> None:
        for _ in range(100 * steps):
            if len(self.read) == steps:
                return
            try:
                while len(self.losses) < steps and len(self.losses) - len(self.read) <= self.late:
                    before(len(self.losses))
                    loss, state = self.executor.run(self.plan, [self.states[-1], self.batch(len(self.losses))])
                    self.losses.append(loss)
                    self.states.append(state)
                self.read.append(self.executor.shards(self.losses[len(self.read)], [0])[0].item())
            except DeviceMeshError as error:
                assert error.mesh_lost and error.signal == "SIGKILL"
                self.executor.heal([("w", self.states[-1])])
                self.heals += 1
                good = len(self.read)  # of the others, those that were done or are done again
                for loss in self.losses[good:]:
                    try:
                        self.executor.wait(loss)
                    except DeviceMeshError as dropped:
                        assert "was dropped when the mesh was healed" in dropped.message
                        break
                    good += 1
                del self.losses[good:], self.states[good + 1 :]
        raise AssertionError("no progress")

    def check(self) -> None:
        total, batches = torch.zeros(6, 4), (self.batch(step) for step in count())
        for read in self.read:
            total += next(batches).sum(0)
            assert read == total.sum().item()
        for shard in self.executor.shards(self.states[-1]):
            assert torch.equal(shard, total)


@pytest.mark.sample()
@pytest.mark.parametrize("late", [0, 7])
def test_a_loop_goes_on_with_the_same_bits(executor: MeshExecutor, late: int) -> None:
    loop = Loop(executor, late)
    deaths = {3: 1, 9: 0, 10: 3, 17: 2}
    loop.run(24, lambda step: kill(executor, deaths.pop(step)) if step in deaths else None)
    assert loop.heals and not deaths
    loop.check()


def test_two_deaths_at_once_and_one_while_nothing_goes_on(executor: MeshExecutor) -> None:
    loop = Loop(executor)
    loop.run(3)
    before = executor.worker_pids()
    kill(executor, 0, 3)
    loop.run(6)
    after = executor.worker_pids()
    assert [a == b for a, b in zip(before, after, strict=True)] == [False, True, True, False]
    kill(executor, 1)
    notice(executor)
    executor.heal([])
    loop.run(9)
    loop.check()


def test_what_was_done_is_read_from_those_that_live(executor: MeshExecutor) -> None:
    loop = Loop(executor)
    loop.run(3)
    kill(executor, 2)
    notice(executor)
    loop.check()
    executor.heal([("w", loop.states[-1])])
    loop.check()


def test_a_death_while_the_mesh_is_healed(executor: MeshExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    loop, renew, victims = Loop(executor), executor.connection.renew, [1, 2]
    loop.run(2)

    def renew_and_kill() -> None:
        renew()
        if victims:
            os.kill(executor.connection.pids()[victims.pop()], signal.SIGKILL)

    monkeypatch.setattr(executor.connection, "renew", renew_and_kill)
    kill(executor, 0)
    loop.run(5)
    assert not victims
    loop.check()


def test_steps_before_the_one_that_failed_are_done_again(executor: MeshExecutor) -> None:
    """Of twelve that are under way, one is said to have failed: those before it are applied, it and those behind it are
    not."""
    loop = Loop(executor, 12)
    loop.run(2)
    kill(executor, 3)
    handles = []
    state = loop.states[-1]
    for step in range(2, 14):
        try:
            loss, state = executor.run(loop.plan, [state, loop.batch(step)])
        except DeviceMeshError:
            break
        handles.append((loss, state))
    middle = len(handles) // 2
    told = None
    if handles:
        with pytest.raises(DeviceMeshError) as info:
            executor.wait(handles[middle][0])
        told = info.value
        assert told.step is not None and told.program == "train"
    executor.heal([])
    for at, (loss, state) in enumerate(handles):
        if at < middle:
            expected = sum(loop.batch(step).sum() for step in range(3 + at))
            assert executor.shards(loss, [0])[0] == expected
        else:
            with pytest.raises(DeviceMeshError, match="was dropped when the mesh was healed"):
                executor.wait(loss)
            with pytest.raises(DeviceMeshError, match="was dropped when the mesh was healed"):
                executor.run(loop.plan, [state, loop.batch(0)])


def test_what_one_worker_alone_held_is_named(executor: MeshExecutor) -> None:
    type_ = each(MESH, (4, 8))
    build = Building(MESH, "double")
    x = build.input(type_, "state", "x", donate=True)
    build.output(build.call("aten.mul.Tensor", x, 2.0), type_, "state", "x")
    (state,) = executor.run(build.plan(), [executor.put(torch.ones(4, 8), type_)])
    kept = executor.put(torch.ones(6, 4), W)
    executor.wait(state)
    kill(executor, 1)
    notice(executor)
    with pytest.raises(LostError, match="1 tensor of .* cannot be restored: worker a=0, b=1 was killed") as info:
        executor.heal([("model.x", state), ("kept", kept)])
    for error in (info.value, pickle.loads(pickle.dumps(info.value))):
        assert f"model.x: {type_}" in error.hint and "kept" not in error.hint
    with pytest.raises(LostError):
        executor.shards(state)  # a step that is done, and is not to be called again
    executor.heal([("kept", kept)])  # without it the mesh goes on
    for ask in (lambda: executor.shards(state), lambda: executor.run(build.plan(), [state])):
        with pytest.raises(LostError):
            ask()
    assert torch.equal(executor.shards(kept)[1], torch.ones(6, 4))


def test_what_the_controller_has_placed_it_places_again(executor: MeshExecutor) -> None:
    type_ = each(MESH, (4, 30, 50))  # more than goes inline
    value = torch.randn(type_.shape)
    handle = executor.put(value, type_)
    value_then = value.clone()
    value.zero_()  # the caller's own
    executor.wait(handle)
    kill(executor, 0)
    notice(executor)
    executor.heal([("x", handle)])
    assert torch.equal(torch.cat(executor.shards(handle)), value_then)


def test_heals_leave_nothing_behind() -> None:
    with MeshExecutor(MESH) as executor:
        loop = Loop(executor)
        loop.run(1)

        def state() -> tuple[int, int]:
            gc.collect()  # meshes of tests before
            maps = Path("/proc/self/maps").read_text()
            return len(os.listdir("/proc/self/fd")), maps.count("monarch-mesh")

        kill(executor, 0)
        loop.run(2)
        before, pids = state(), set[int]()
        for step in range(20 if is_full() else 8):
            pids |= set(executor.worker_pids())
            kill(executor, step % 4)
            loop.run(3 + step)
        loop.check()
        loop.losses = loop.losses[-1:]
        loop.states = loop.states[-1:]
        assert all(now <= then for now, then in zip(state(), before, strict=True))  # what others left may go meanwhile
        assert executor.held_values() == [2] * 4
        alive = set(executor.worker_pids())
    assert all(not Path(f"/proc/{pid}").exists() or _zombie(pid) for pid in pids | alive)


def _zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_a_mesh_that_has_lost_nobody_is_left_alone() -> None:
    with MeshExecutor(MESH) as executor:
        pids = executor.worker_pids()
        executor.heal([])
        assert executor.worker_pids() == pids
    with pytest.raises(MonarchError, match="closed"):
        executor.heal([])


@pytest.mark.parametrize("where", ["known", "taken in", "taken in while it is healed"])
def test_a_death_of_which_an_interrupted_call_took_the_word_is_told(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the word of a worker's end and what follows from it: the mesh was waited for without an end."""
    monkeypatch.setattr("monarch.runtime.controller.local.EXIT_SECONDS", 0.05)
    monkeypatch.setattr("monarch.runtime.processes.workers._MISSED_SECONDS", 0.05)
    with MeshExecutor(MESH) as executor:
        connection: Any = executor.connection
        holder, name = (connection.state, "give_up") if where == "known" else (connection.workers, "exits")
        plain = getattr(holder, name)

        def interrupted(*arguments: Any) -> Any:
            if name == "give_up" or plain(*arguments):
                monkeypatch.setattr(holder, name, plain)
                raise KeyboardInterrupt
            return []

        x = executor.put(torch.ones(6, 4), W)
        executor.wait(x)
        pids = executor.worker_pids()
        os.kill(pids[1], signal.SIGKILL)
        if where.endswith("healed"):
            told(executor)
            os.kill(pids[2], signal.SIGKILL)
        monkeypatch.setattr(holder, name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            while True:
                executor.heal([]) if where.endswith("healed") else executor.held_values()
        if where != "taken in while it is healed":
            told(executor)
        executor.heal([])
        assert torch.equal(executor.shards(x)[1], torch.ones(6, 4))


def told(executor: MeshExecutor) -> None:
    with pytest.raises(DeviceMeshError) as info:
        while True:
            executor.held_values()
    assert info.value.mesh_lost


# -- decisions, without processes --------------------------------------------------------------------------------------


def test_a_step_is_committed_if_anybody_has_passed_its_commit() -> None:
    state = ControllerState(MESH)
    state.died([Exit(0, "was killed by SIGKILL", -9)])
    assert state.expected == [1, 2, 3] and not state.is_quiet
    state.doubted(1, 5)
    state.ended(2, 6)  # it has finished step 5
    state.doubted(3, 5)
    assert state.expected == [] and state.verdicts() == {1: (5, True), 3: (5, True)}
    assert state.verdicts() == {1: (5, True), 3: (5, True)}  # they are told again where that was interrupted
    state.ended(1, 6)
    state.ended(3, 6)
    assert state.is_quiet and state.verdicts() == {}
    other = ControllerState(MESH)
    other.died([Exit(0, "was killed by SIGKILL", -9)])
    for rank in (1, 2):
        other.doubted(rank, 5)
    other.ended(3, 5)
    assert other.verdicts() == {1: (5, False), 2: (5, False)}


def test_what_is_under_way_is_given_again_or_dropped() -> None:
    state = ControllerState(MESH)
    steps = []
    for name in ("put", "train", "train", "fetch", "train"):
        step = Step(name)
        step.sequence = state.next_command
        step.again = None if name == "fetch" else Replay(b"")
        state.last = step
        state.note(step)
        steps.append(step)
    state.died([Exit(1, "was killed by SIGKILL", -9)])
    for rank, finished in ((0, 2), (2, 1), (3, 2)):
        state.ended(rank, finished)
    state.report(Report("aborted", 0, 2, op="all_reduce", source=Source("train.py", 7)))
    state.conclude()
    assert [state.is_done(step) for step in steps[:3]] == [True, False, False]
    error = state.refused("evaluate")  # a call that comes now: all that were accepted before it are given again
    assert (error.step, error.program) == (5, "evaluate")
    error = state.lost_step(steps[2])
    assert isinstance(error, DeviceMeshError) and error.step == state.told[None] == 2
    error = state.refused("evaluate")
    assert (error.step, error.program) == (2, "train")
    assert state.drop() == [steps[1]]
    assert [step.error is not None for step in steps] == [False, False, True, True, True]
    state.renewed()
    assert state.dead is None and state.expected == [0, 1, 2, 3]
    state.ended(0, 5)  # it was asked twice, and the second answer comes late
    state.doubted(2, 5)
    assert state.expected == [0, 1, 2, 3]
    state.ended(0, state.next_command)
    assert state.expected == [1, 2, 3]


@pytest.mark.parametrize(
    ("layout", "gone", "pairs"),
    [
        (whole((4,)), {1}, ((0, 1),)),
        (whole((4,)), {0, 1, 2}, ((3, 0), (3, 1), (3, 2))),
        (whole((4,)), set(), ()),
        (each(MeshSpec.of(a=2), (4,)), {1}, ((0, 1),)),
        (each(MeshSpec.of(a=2), (4,)), {1, 3}, ((0, 1), (2, 3))),
        (each(MESH, (4,)), {2}, None),
        (each(MeshSpec.of(b=2), (4,)), {1, 3}, None),
    ],
)
def test_blocks_come_from_workers_that_hold_the_same(
    layout: TensorType, gone: set[int], pairs: tuple[tuple[int, int], ...] | None
) -> None:
    assert find_sources(layout, Place.whole(MESH), set(range(4)) - gone) == pairs


def test_copies_are_cut_into_commands_of_bounded_size() -> None:
    big = whole((KEPT_BYTES // 16,))
    records = list(copies({1: big, 2: big, 3: whole(())}, MESH, ((0, 1),)))
    assert len(records) == 3
    assert wire.unpack_numbers(records[2])[:5] == (wire.COPY, 1, 0, 1, 3)


def test_a_place_that_a_healing_did_not_fill_is_no_survivor() -> None:
    """Its new worker has said that it waits, and another one has died: healing asked it for ever."""
    state = ControllerState(MESH)
    state.gone[1] = "was killed by SIGKILL"
    for rank in (0, 2, 3):
        state.ended(rank, 7)
    state.gone[0] = "was killed by SIGKILL"  # as a healing leaves it that could not be finished
    assert state.is_quiet and state.survivors == [2, 3]
