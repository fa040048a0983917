"""Steps that fail: who hears of it, what is kept, and that work goes on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from monarch.compiler.plan import DeviceMeshError, MeshSpec, Plan, Slot, Source, TensorType
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.controller.local import LocalConnection
from tests.runtime.building import Building, each, whole
from tests.runtime.collectives.loopback import WAYS, executor_on

pytestmark = pytest.mark.sample(1, of="executor")

MESH = MeshSpec.of(a=2, b=3)
COLLECTIVES: dict[str, tuple[Any, ...]] = {
    "all_reduce": (["a", "b"], "sum"),
    "all_gather": (["a", "b"], [0]),
    "reduce_scatter": (["a", "b"], [0], "sum"),
    "all_to_all": (["a", "b"], [0], [1]),
    "broadcast": (["a", "b"], 4),
    "permute": (["a", "b"], [(4, 0), (0, 1), (1, 2), (2, 3), (3, 5)]),
}


@pytest.fixture(scope="module", params=WAYS)
def executor(request: pytest.FixtureRequest) -> Iterator[MeshExecutor]:
    with executor_on(request.param, MESH) as executor:
        yield executor


def fail_where(build: Building, x: Slot, rank_of: Sequence[int]) -> Slot:
    """An op that raises on the listed workers only: it asks for one row too many of a tensor as long as they allow."""
    own = build.call("axis_index", "a")
    at = build.call("aten.add.Tensor", build.call("aten.mul.Tensor", own, 3), build.call("axis_index", "b"))
    table = build.constant("table", torch.tensor([9 if rank in rank_of else 0 for rank in range(6)]))
    index = build.call("aten.index_select.default", table, 0, build.call("aten.unsqueeze.default", at, 0))
    return build.call("aten.index_select.default", x, 0, index, source=Source("train.py", 12))


def healthy(executor: MeshExecutor) -> None:
    """The mesh works: a collective over all of it gives the right answer."""
    build = Building(executor.mesh, "healthy")
    x = build.input(each(executor.mesh, (6, 4)))
    total = build.call("all_reduce", [x], ["a", "b"], "sum")
    build.output(build.call("getitem", total, 0), whole((1, 4)))
    value = torch.randn(6, 4)
    (out,) = executor.run(build.plan(), [value])
    shards = executor.shards(out)
    for shard in shards:
        assert torch.equal(shard, shards[0])
    torch.testing.assert_close(shards[0][0], value.sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("op", COLLECTIVES)
@pytest.mark.parametrize("failing", [[4], [0], [1, 2]], ids=str)
def test_peers_in_a_collective_are_told(executor: MeshExecutor, op: str, failing: list[int]) -> None:
    build = Building(MESH, "bad")
    x = build.input(whole((6, 6)))
    row = fail_where(build, x, failing)
    y = build.call("aten.add.Tensor", x, row)
    build.output(build.call("getitem", build.call(op, [y], *COLLECTIVES[op]), 0), whole(()))
    after = build.call("all_reduce", [y], ["a", "b"], "sum")
    build.output(build.call("getitem", after, 0), whole(()))
    for handle in executor.run(build.plan(), [torch.randn(6, 6)]):
        with pytest.raises(DeviceMeshError) as info:
            executor.wait(handle)
        text = str(info.value)
        a, b = MESH.point(failing[0])
        assert text.startswith(f"train.py:12: error: worker a={a}, b={b} failed in aten.index_select.default: ")
        assert "out of range" in text and "operands: f32[6, 6], i64[1]" in text
        assert "the worker's traceback:" in text and "step " in text
        assert ("2 of 6 workers failed" in text) == (len(failing) == 2)
    healthy(executor)


def test_only_the_groups_concerned_give_up_and_all_come_back_together(executor: MeshExecutor) -> None:
    """Worker 0 fails before a collective of one group; the other groups finish the step; many steps follow at once."""
    build = Building(MESH, "bad")
    x = build.input(whole((6, 6)))
    y = build.call("aten.add.Tensor", x, fail_where(build, x, [0]))
    build.output(build.call("getitem", build.call("all_reduce", [y], ["b"], "sum"), 0), whole((6, 6)))
    bad, good = build.plan(), Building(MESH, "good")
    x = good.input(each(MESH, (6, 1)))
    for dims in (["a"], ["b"], ["a", "b"]):
        x = good.call("getitem", good.call("all_reduce", [x], dims, "sum"), 0)
    good.output(x, whole((1, 1)))
    plan = good.plan()
    outs = []
    for at in range(60):
        outs.append(
            executor.run(bad if at % 3 == 0 else plan, [torch.ones(6, 6) if at % 3 == 0 else torch.ones(6, 1)])[0]
        )
    for at, out in enumerate(outs):
        if at % 3 == 0:
            with pytest.raises(DeviceMeshError, match="worker a=0, b=0 failed"):
                executor.shards(out)
        else:
            assert [shard.item() for shard in executor.shards(out)] == [36.0] * 6


def test_what_depends_on_a_failed_step_says_why_it_failed(executor: MeshExecutor) -> None:
    build = Building(MESH, "first")
    x = build.input(whole((6, 6)))
    build.output(fail_where(build, x, [3]), whole((1, 6)))
    (broken,) = executor.run(build.plan(), [torch.zeros(6, 6)])
    follow = Building(MESH, "second")
    y = follow.input(whole((1, 6)))
    total = follow.call("getitem", follow.call("all_reduce", [y], ["a"], "sum"), 0)
    follow.output(total, whole((1, 6)))
    plan = follow.plan()
    outs = [broken]
    for _ in range(3):
        outs.append(executor.run(plan, [outs[-1]])[0])
    for out in reversed(outs):
        for ask in (executor.wait, executor.shards):
            with pytest.raises(
                DeviceMeshError, match="train.py:12: error: worker a=1, b=0 failed in aten.index_select"
            ):
                ask(out)
    healthy(executor)


def training_step(donate: bool, when: str) -> Plan:
    """w += x, with an op that fails if x says so: before the commit, or after it."""
    build = Building(MESH, f"train {when}")
    type_ = each(MESH, (6, 4))
    w = build.input(type_, "state", "w", donate=donate)
    index = build.input(whole((1,), torch.int64))
    x = build.input(type_)
    if when == "before":
        x = build.call(
            "aten.mul.Tensor",
            x,
            build.call("aten.select.int", build.call("aten.index_select.default", x, 1, index), 1, 0),
        )
    build.call("commit")
    if when == "after":
        x = build.call(
            "aten.mul.Tensor",
            x,
            build.call("aten.select.int", build.call("aten.index_select.default", x, 1, index), 1, 0),
        )
    build.output(build.call("aten.add_.Tensor", w, x), type_, "state", "w")
    return build.plan()


def test_state_is_that_of_the_last_step_that_committed(executor: MeshExecutor) -> None:
    plan, type_ = training_step(True, "before"), each(MESH, (6, 4))
    before, x = torch.zeros(6, 4), torch.ones(6, 4)
    good, bad = torch.tensor([1]), torch.tensor([77])
    state = executor.put(before, type_)
    (state,) = executor.run(plan, [state, good, x])
    kept = state
    (state,) = executor.run(plan, [state, bad, x])
    (state,) = executor.run(plan, [state, good, x])  # sent before anyone knows that the step before it fails
    with pytest.raises(DeviceMeshError, match="aten.index_select"):
        executor.wait(state)
    recovered = executor.recover(state)
    assert recovered is kept
    assert torch.equal(torch.cat(executor.shards(recovered)), torch.ones(6, 4))
    del kept, state
    (state,) = executor.run(plan, [recovered, good, x])  # the handle was given back
    del recovered
    assert torch.equal(torch.cat(executor.shards(state)), torch.full((6, 4), 2.0))
    assert executor.recover(state) is state


def test_a_failure_after_the_commit_is_told_as_such(executor: MeshExecutor) -> None:
    plan, type_ = training_step(True, "after"), each(MESH, (6, 4))
    state = executor.put(torch.zeros(6, 4), type_)
    (after,) = executor.run(plan, [state, torch.tensor([77]), torch.ones(6, 4)])
    with pytest.raises(DeviceMeshError, match="the step had committed: the state that it replaces is gone"):
        executor.wait(after)
    for handle in (after, state):
        with pytest.raises(DeviceMeshError, match="the step had committed"):
            executor.recover(handle)
    del state, after, handle
    healthy(executor)


def test_nothing_that_failed_is_left_on_the_workers() -> None:
    with MeshExecutor(MESH) as executor:
        plan, type_ = training_step(True, "before"), each(MESH, (6, 4))
        state = executor.put(torch.zeros(6, 4), type_)
        (failed,) = executor.run(plan, [state, torch.tensor([77]), torch.ones(6, 4)])
        with pytest.raises(DeviceMeshError):
            executor.wait(failed)
        del failed
        assert executor.held_values() == [1] * 6
        del state
        assert executor.held_values() == [0] * 6


def test_a_plan_that_a_worker_cannot_build(executor: MeshExecutor) -> None:
    if not isinstance(executor.connection, LocalConnection):
        pytest.skip("what goes to other hosts is checked before it is sent")
    build = Building(MESH, "wrong")
    x = build.input(whole((2,)))
    build.output(build.call("all_reduce", [x], ["nowhere"], "sum"), whole((2,)))
    plan = build.plan()
    for _ in range(2):
        (out,) = executor.run(plan, [torch.zeros(2)])
        with pytest.raises(DeviceMeshError, match="failed: KeyError: 'nowhere'"):
            executor.wait(out)
    healthy(executor)


def test_an_output_that_is_no_tensor(executor: MeshExecutor) -> None:
    build = Building(MESH)
    x = build.input(whole((2,)))
    build.output(build.call("aten.split.Tensor", x, 1, 0), TensorType(torch.float32, (2,)))
    (out,) = executor.run(build.plan(), [torch.zeros(2)])
    with pytest.raises(DeviceMeshError, match="is a (list|tuple), not one tensor"):
        executor.shards(out)
    healthy(executor)
