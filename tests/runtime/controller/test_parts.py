"""Plans on parts of a mesh: some of its workers, with dims of their own. What they compute, and that a failure on one
part leaves the others alone."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from monarch.compiler.blocks import REDUCE
from monarch.compiler.mesh import Shape
from monarch.compiler.plan import DeviceMeshError, LostError, MeshSpec, MonarchError, Plan
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.controller.parts import PartExecutor
from tests.runtime.building import Building, each, op_on_each, whole
from tests.runtime.collectives.loopback import WAYS, executor_on
from tests.runtime.stopping import stop

pytestmark = pytest.mark.sample(1, of="executor")

MESH = MeshSpec.of(a=2, b=3)
ALL = Shape.of(MESH.sizes)
SHAPES = {
    "slice": ALL.at("a", 1),
    "gaps": ALL.select("b", slice(0, None, 2)),
    "across": ALL.at("b", 1),
    "one": ALL.at("a", 1).at("b", 2),
    "renamed": ALL.rename({"a": "x"}),
    "flat": ALL.flatten("w"),
    "split": ALL.at("b", 0).split({"a": ("p", "q")}, {"q": 2}),
}
W = whole((4,))


@pytest.fixture(scope="module", params=WAYS)
def executor(request: pytest.FixtureRequest) -> Iterator[MeshExecutor]:
    with executor_on(request.param, MESH) as executor:
        yield executor


@pytest.fixture
def fresh() -> Iterator[MeshExecutor]:
    """For tests that kill workers."""
    with executor_on("local", MESH) as executor:
        yield executor


def training(mesh: MeshSpec, failing: bool = False) -> Plan:
    """w += the sum over the part's workers of their x; gives w's sum. `failing` before the commit, on the workers
    that are first along no mesh dim."""
    build = Building(mesh, "train")
    w = build.input(W, "state", "w", donate=True)
    x = build.input(each(mesh, (mesh.workers, 4)))
    total = build.call("getitem", build.call("all_reduce", [x], list(mesh.names), "sum"), 0)
    row = build.call("aten.select.int", total, 0, 0)
    if failing:
        inside = build.call("axis_index", mesh.names[0])
        for name in mesh.names[1:]:
            inside = build.call("aten.mul.Tensor", inside, build.call("axis_index", name))
        table = build.constant("table", torch.tensor([0, 9]))
        inside = build.call("aten.clamp.default", inside, 0, 1)
        at = build.call("aten.index_select.default", table, 0, build.call("aten.unsqueeze.default", inside, 0))
        build.call("aten.index_select.default", row, 0, at)
    build.call("commit")
    out = build.call("aten.add_.Tensor", w, row)
    build.output(build.call("aten.sum.default", out), whole(()))
    build.output(out, W, "state", "w")
    return build.plan()


class Trained:
    """State on a part, and what it should be."""

    def __init__(self, executor: MeshExecutor, shape: Shape) -> None:
        self.on = executor.over(shape)
        self.plan = training(self.on.mesh)
        self.handle: Any = self.on.put(torch.zeros(4), W)
        self.expected = torch.zeros(4)
        self.losses: list[tuple[Any, float]] = []

    def batch(self) -> torch.Tensor:
        return torch.arange(self.on.mesh.workers * 4.0).view(-1, 4) + len(self.losses)

    def step(self) -> None:
        x = self.batch()
        loss, self.handle = self.on.run(self.plan, [self.handle, x])
        self.expected = self.expected + x.sum(0)
        self.losses.append((loss, float(self.expected.sum())))

    def check(self) -> None:
        for shard in self.on.shards(self.handle):
            assert torch.equal(shard, self.expected)
        for loss, expected in self.losses:
            assert [float(value) for value in self.on.shards(loss)] == [expected] * self.on.mesh.workers


@pytest.mark.sample()
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_collectives_of_a_part_are_of_its_workers(executor: MeshExecutor, shape: Shape) -> None:
    part = executor.over(shape)
    mesh = part.mesh
    for length in (5, 300_000):
        blocks = [torch.randn(length) for _ in range(mesh.workers)]
        for dims in [list(mesh.names), *([name] for name in mesh.names)]:
            plan, inputs = op_on_each(mesh, "all_reduce", [blocks], dims, "sum")
            (out,) = part.run(plan, inputs)
            found = part.shards(out)
            for place in range(mesh.workers):
                group = mesh.group(place, dims)
                total = blocks[group[0]]
                for other in group[1:]:
                    total = REDUCE["sum"](total, blocks[other])
                assert torch.equal(found[place], total)
            plan, inputs = op_on_each(mesh, "all_gather", [blocks], dims, [0])
            (out,) = part.run(plan, inputs)
            for place, shard in enumerate(part.shards(out)):
                assert torch.equal(shard, torch.cat([blocks[at] for at in mesh.group(place, dims)]))
            turn = [(at, (at + 1) % len(mesh.group(0, dims))) for at in range(len(mesh.group(0, dims)))]
            plan, inputs = op_on_each(mesh, "permute", [blocks], dims, turn)
            (out,) = part.run(plan, inputs)
            for place, shard in enumerate(part.shards(out)):
                group = mesh.group(place, dims)
                assert torch.equal(shard, blocks[group[group.index(place) - 1]])


def test_parts_that_share_workers_take_turns(executor: MeshExecutor) -> None:
    trained = [Trained(executor, shape) for shape in (ALL, *SHAPES.values())]
    chosen = random.Random(0)
    for _ in range(60):
        chosen.choice(trained).step()
    for each_ in trained:
        each_.check()


def test_a_part_is_one_object_and_takes_its_own_values_only(executor: MeshExecutor) -> None:
    first, second = executor.over(ALL.at("a", 0)), executor.over(ALL.at("a", 1))
    assert executor.over(ALL.at("a", 0)) is first and first.whole is executor
    value = first.put(torch.zeros(4), W)
    with pytest.raises(MonarchError, match="is not on this mesh"):
        second.wait(value)
    executor.wait(value)  # of any part: a step over several parts is waited for so
    with pytest.raises(MonarchError, match="is for mesh<a=2, b=3>, and this mesh is mesh<b=3>"):
        first.run(training(MESH), [value, torch.zeros(6, 4)])
    with pytest.raises(MonarchError, match="no worker 3: the mesh mesh<b=3> has workers 0 to 2"):
        first.shards(value, [3])
    assert torch.equal(first.shards(value, [2])[0], torch.zeros(4))


def test_what_is_not_used_is_freed_on_the_part(executor: MeshExecutor) -> None:
    before = executor.held_values()
    part = executor.over(SHAPES["gaps"])
    value = part.put(torch.zeros(4), W)
    members = set(part.place.ranks)
    assert executor.held_values() == [count + (rank in members) for rank, count in enumerate(before)]
    del value
    assert executor.held_values() == before


def test_a_step_that_fails_on_a_part_is_nothing_to_others(executor: MeshExecutor) -> None:
    failing, beside, over = (Trained(executor, SHAPES[name]) for name in ("gaps", "one", "across"))
    for each_ in (failing, beside, over):
        each_.step()
    loss, state = failing.on.run(training(failing.on.mesh, failing=True), [failing.handle, failing.batch()])
    dependent, _ = failing.on.run(failing.plan, [state, failing.batch()])
    for each_ in (beside, over):
        each_.step()
    for handle in (loss, dependent):
        with pytest.raises(DeviceMeshError, match=r"worker a=1, b=1 failed in aten.index_select.default") as caught:
            failing.on.wait(handle)
        assert (caught.value.worker, caught.value.coordinates) == (5, {"a": 1, "b": 1})
        assert "on mesh<a=2, b=2>, part of mesh<a=2, b=3>" in caught.value.hint
    failing.handle = failing.on.recover(state)
    failing.step()
    for each_ in (failing, beside, over):
        each_.check()


def test_parts_from_several_threads(executor: MeshExecutor) -> None:
    trained = [Trained(executor, shape) for shape in (ALL.at("a", 0), ALL.at("a", 1), ALL.at("b", 1))]

    def work(each_: Trained) -> None:
        for _ in range(15):
            each_.step()
            each_.on.wait(each_.losses[-1][0])

    threads = [threading.Thread(target=work, args=(each_,)) for each_ in trained]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each_ in trained:
        assert len(each_.losses) == 15
        each_.check()


def test_a_part_does_not_wait_for_the_others(fresh: MeshExecutor) -> None:
    first, second = Trained(fresh, ALL.at("a", 0)), Trained(fresh, ALL.at("a", 1))
    first.check()
    stopped = second.on.worker_pids()[0]
    stop(stopped)
    try:
        second.step()
        for _ in range(3):
            first.step()
            first.check()
        failed, _ = first.on.run(training(first.on.mesh, failing=True), [first.handle, first.batch()])
        with pytest.raises(DeviceMeshError, match="worker b=1 failed"):
            first.on.wait(failed)
        first.on.undo()
    finally:
        os.kill(stopped, signal.SIGCONT)
    second.check()


# -- a worker's death ------------------------------------------------------------------------------------------------


def kill(part: MeshExecutor | PartExecutor, number: int) -> None:
    os.kill(part.worker_pids()[number], signal.SIGKILL)


def notice(trained: Trained) -> None:
    with pytest.raises(DeviceMeshError, match="was killed by SIGKILL"):
        while True:
            trained.on.wait(trained.on.put(torch.zeros(2), whole((2,))))


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["local", "hosts"])
def test_a_mesh_heals_with_what_its_parts_hold(where: str) -> None:
    with executor_on(where, MESH) as executor:
        trained = [Trained(executor, shape) for shape in (ALL, ALL.at("a", 0), ALL.at("a", 1), ALL.at("b", 0))]
        for _ in range(5):
            for each_ in trained:
                each_.step()
        for each_ in trained:
            each_.check()
        kill(executor, 3)
        notice(trained[1])
        executor.heal([(f"w{at}", each_.handle) for at, each_ in enumerate(trained)])
        for _ in range(2):
            for each_ in trained:
                each_.step()
        for each_ in trained:
            each_.losses = each_.losses[-2:]
            each_.check()


def test_steps_that_one_part_had_done_are_not_done_again_where_another_died(fresh: MeshExecutor) -> None:
    """Those of the first are behind steps of the second, which a stopped worker holds up and which are given again."""
    first, second = Trained(fresh, ALL.at("a", 0)), Trained(fresh, ALL.at("a", 1))
    first.check()
    pids = second.on.worker_pids()
    stop(pids[0])
    for _ in range(3):
        second.step()
        first.step()
    first.check()
    os.kill(pids[0], signal.SIGKILL)
    notice(first)
    fresh.heal([("first", first.handle), ("second", second.handle)])
    first.step()
    second.step()
    first.check()
    second.check()


def test_steps_behind_the_one_that_is_told_are_dropped_on_its_part_alone(fresh: MeshExecutor) -> None:
    first, second = Trained(fresh, ALL.at("a", 0)), Trained(fresh, ALL.at("a", 1))
    second.step()
    second.check()
    before = second.handle, second.expected
    stopped = second.on.worker_pids()[0]
    stop(stopped)
    second.step()
    lost = second.losses.pop()[0]
    first.step()
    second.step()
    second.losses.pop()
    os.kill(stopped, signal.SIGKILL)
    with pytest.raises(DeviceMeshError, match="was killed by SIGKILL"):
        second.on.wait(lost)
    first_state = first.handle
    fresh.heal([("first", first_state), ("second", second.handle)])
    with pytest.raises(DeviceMeshError, match="was dropped"):
        second.on.wait(lost)
    assert second.on.recover(second.handle).type == before[0].type
    second.handle, second.expected = second.on.recover(second.handle), before[1]
    first.step()
    second.step()
    first.check()
    second.check()


def test_state_on_one_worker_alone_is_lost_with_it_and_kept_by_a_snapshot(fresh: MeshExecutor) -> None:
    one = Trained(fresh, SHAPES["one"])
    one.step()
    one.check()
    kill(one.on, 0)
    notice(one)
    with pytest.raises(LostError, match=r"1 tensor of mesh<a=2, b=3> cannot be restored"):
        fresh.heal([("w", one.handle)])
    with executor_on("local", MESH) as executor:
        one, other, halves = (Trained(executor, shape) for shape in (SHAPES["one"], ALL, ALL.at("b", 2)))
        executor.snapshots(2, 1)
        for _ in range(7):
            for each_ in (one, other, halves):
                each_.step()
        one.check()
        kill(one.on, 0)
        notice(other)
        executor.heal([("one", one.handle), ("other", other.handle), ("halves", halves.handle)])
        for each_ in (one, other, halves):
            each_.step()
            each_.check()
