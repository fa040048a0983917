"""Plans of several parts, which send each other values and commit together."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.compiler.blocks import whole_of
from monarch.compiler.mesh import NDSlice, Shape
from monarch.compiler.plan import DeviceMeshError, Layout, MeshSpec, Part, Plan, TensorType, Transfer
from monarch.compiler.plan.check_parts import wrong_parts
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.controller.local import LocalConnection
from monarch.runtime.worker.faults import Kind
from tests.runtime.building import Building
from tests.runtime.collectives.loopback import executor_on
from tests.runtime.stopping import stopped

pytestmark = pytest.mark.sample(1, of="executor")

ROOT = MeshSpec.of(w=6)


@pytest.fixture(scope="module", params=["local", "hosts"])
def executor(request: pytest.FixtureRequest) -> Iterator[MeshExecutor]:
    with executor_on(request.param, ROOT) as executor:
        yield executor


def shape(mesh: MeshSpec, first: int, step: int = 1) -> Shape:
    rows = NDSlice.new_row_major([size for _, size in mesh.dims])
    return Shape(
        mesh.names, NDSlice(offset=first, sizes=rows.sizes, strides=[step * stride for stride in rows.strides])
    )


def joined(
    parts: Sequence[tuple[str, Shape, Building]], moved: Sequence[tuple[int, int, TensorType, TensorType]]
) -> Plan:
    """The plan of these parts, whose inputs and outputs come part by part."""
    made: list[Part] = []
    for number, (name, place, build) in enumerate(parts):
        plan = build.plan()
        inputs, outputs = (
            tuple(
                replace(spec, part=number, label=f"{name}.{spec.label}" if spec.kind == "state" else spec.label)
                for spec in specs
            )
            for specs in (plan.inputs, plan.outputs)
        )
        made.append(Part(name, place, replace(plan, inputs=inputs, outputs=outputs)))
    transfers: list[Transfer] = []
    for number, (source, target, sent, received) in enumerate(moved):
        transfers.append(Transfer(source, target, sent, received, f"t{number}"))
    inputs = tuple(spec for part in made for spec in part.plan.inputs)
    outputs = tuple(spec for part in made for spec in part.plan.outputs)
    donated = tuple(each for part in made for each in part.plan.donated)
    return Plan("joint", ROOT, inputs, outputs, (), 0, donated, parts=tuple(made), transfers=tuple(transfers))


def moving(first: Shape, sent: TensorType, second: Shape, received: TensorType) -> Plan:
    """x + 1 of the first part to the second, whose result is twice that."""
    a, b = (Building(MeshSpec(tuple(place.extent.items()))) for place in (first, second))
    a.call("send", a.call("aten.add.Tensor", a.input(sent.unpadded), 1), 0)
    got = b.call("recv", 0, list(received.local_shape(b.mesh)), received.dtype)
    b.output(b.call("aten.mul.Tensor", got, 2), received.unpadded)
    return joined([("a", first, a), ("b", second, b)], [(0, 1, sent, received)])


A = (MeshSpec(()), MeshSpec.of(x=2), MeshSpec.of(x=3), MeshSpec.of(x=2, y=2))
B = (MeshSpec(()), MeshSpec.of(z=2))


@st.composite
def layouts(draw: st.DrawFn, mesh: MeshSpec) -> Layout:
    layout = Layout.replicated(2)
    for name in draw(st.permutations(mesh.names)):
        layout = layout.place(name, draw(st.none() | st.integers(0, 1)))
    return layout


@settings(max_examples=25)
@given(data=st.data())
def test_a_value_comes_in_any_layout_and_size(executor: MeshExecutor, data: st.DataObject) -> None:
    first, second = data.draw(st.sampled_from(A)), data.draw(st.sampled_from(B))
    size = data.draw(st.sampled_from([(12, 6), (7, 5), (1, 3), (1200, 900)]))
    types = [TensorType(torch.float32, size, data.draw(layouts(mesh))).padded(mesh) for mesh in (first, second)]
    places = [shape(first, 0), shape(second, 4)]
    if data.draw(st.booleans()):  # the other way round
        types.reverse()
        places.reverse()
    plan = moving(places[0], types[0], places[1], types[1])
    assert wrong_parts(plan) is None
    value = torch.randn(size)
    on = executor.over(places[1])
    for _ in range(2):
        (out,) = executor.run(plan, [value])
        got = whole_of(on.shards(out), out.type, on.mesh)
        torch.testing.assert_close(got, (value + 1) * 2, rtol=0, atol=0)


# -- steps over several parts ----------------------------------------------------------------------------------------

STAGES = shape(MeshSpec.of(data=3), 0), shape(MeshSpec.of(data=3), 3)
W = TensorType(torch.float32, (6,), Layout((("data",),)))
SUM = TensorType(torch.float32, ())


def pipeline(failing: int | None = None) -> Plan:
    """Both parts have a state. The first sends x + w0 to the second, which adds it to w1 and sends that back, for w0 to
    take. Each gives its state's sum. Part `failing` fails before it commits."""
    mesh = MeshSpec.of(data=3)
    builds = [Building(mesh) for _ in range(2)]
    states = [build.input(W, "state", "w", donate=True) for build in builds]
    x = builds[0].input(W)
    builds[0].call("send", builds[0].call("aten.add.Tensor", x, states[0]), 0)
    h = builds[1].call("recv", 0, [2], torch.float32)
    y = builds[1].call("aten.add.Tensor", states[1], h)
    builds[1].call("send", y, 1)
    back = builds[0].call("recv", 1, [2], torch.float32)
    for number, (build, state, value) in enumerate(zip(builds, states, (back, y), strict=True)):
        if failing == number:
            at = build.constant("at", torch.tensor([9]))
            build.call("aten.index_select.default", value, 0, at)
        build.call("commit")
        out = build.call("aten.copy_.default", state, value)
        total = build.call(
            "getitem", build.call("all_reduce", [build.call("aten.sum.default", value)], ["data"], "sum"), 0
        )
        build.output(total, SUM)
        build.output(out, W, "state", "w")
    return joined([("a", STAGES[0], builds[0]), ("b", STAGES[1], builds[1])], [(0, 1, W, W), (1, 0, W, W)])


class Pipeline:
    def __init__(self, executor: MeshExecutor) -> None:
        self.executor, self.plan = executor, pipeline()
        assert wrong_parts(self.plan) is None
        self.on = [executor.over(place) for place in STAGES]
        self.states: list[Any] = [on.put(torch.zeros(6), W) for on in self.on]
        self.expected = [torch.zeros(6), torch.zeros(6)]
        self.steps = 0

    def step(self) -> list[Any]:
        self.steps += 1
        x = torch.arange(6.0) + self.steps
        first, self.states[0], second, self.states[1] = self.executor.run(
            self.plan, [self.states[0], x, self.states[1]]
        )
        y = self.expected[1] + x + self.expected[0]
        self.expected = [y, y]
        return [first, second]

    def check(self) -> None:
        for on, state, expected in zip(self.on, self.states, self.expected, strict=True):
            assert torch.equal(whole_of(on.shards(state), W, on.mesh), expected)


def test_parts_take_turns_in_a_step_and_commit_together(executor: MeshExecutor) -> None:
    run = Pipeline(executor)
    for _ in range(12):
        results = run.step()
        assert [on.shards(each)[0].item() for on, each in zip(run.on, results, strict=True)] == [
            each.sum().item() for each in run.expected
        ]
    run.check()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_failure_in_one_part_fails_the_step_for_all(executor: MeshExecutor, failing: int) -> None:
    run, bad = Pipeline(executor), pipeline(failing)
    run.step()
    made = executor.run(bad, [run.states[0], torch.ones(6), run.states[1]])
    for on, handle in zip((run.on[0], run.on[0], run.on[1], run.on[1]), made, strict=True):
        with pytest.raises(DeviceMeshError, match="failed in aten.index_select.default"):
            on.wait(handle)
    run.states = [on.recover(handle) for on, handle in zip(run.on, (made[1], made[3]), strict=True)]
    run.step()
    run.step()
    run.check()


def test_programs_on_one_part_take_what_a_step_over_both_gave(executor: MeshExecutor) -> None:
    run = Pipeline(executor)
    run.step()
    build = Building(MeshSpec.of(data=3))
    build.output(build.call("aten.mul.Tensor", build.input(W), 2), W)
    for on, state, expected in zip(run.on, run.states, run.expected, strict=True):
        (out,) = on.run(build.plan(), [state])
        assert torch.equal(whole_of(on.shards(out), W, on.mesh), expected * 2)
    run.step()
    run.check()


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["local", "hosts"])
def test_a_mesh_that_loses_a_worker_of_a_part_goes_on(where: str) -> None:
    with executor_on(where, ROOT) as executor:
        executor.snapshots(2, 1)
        run = Pipeline(executor)
        for _ in range(5):
            run.step()
        run.check()
        os.kill(executor.worker_pids()[4], signal.SIGKILL)
        with pytest.raises(DeviceMeshError, match="was killed by SIGKILL"):
            while True:
                run.on[0].wait(run.on[0].put(torch.zeros(6), W))
        executor.heal([("a", run.states[0]), ("b", run.states[1])])
        run.step()
        run.check()


def test_each_part_is_measured_as_a_plan_of_its_own(executor: MeshExecutor) -> None:
    run = Pipeline(executor)
    executor.trace_start()
    run.step()
    run.check()
    trace = executor.trace_stop()
    assert {(step.worker, trace.plans[step.plan].plan.mesh.workers) for step in trace.steps} == {
        (at, 3) for at in range(6)
    }
    ops = {
        each.plan.instructions[span.instruction].op
        for step in trace.steps
        for each in [trace.plans[step.plan]]
        for span in step.spans
    }
    assert {"send", "recv", "commit"} <= ops


# -- parts that only send ----------------------------------------------------------------------------------------------

LARGE = TensorType(torch.float32, (9_000_000,), Layout((("data",),)))
"""Of which a worker has more than its slots hold."""


class Handing:
    """The first part has a value, and counts it up in place; a plan hands it to the second, which keeps it."""

    def __init__(self, executor: MeshExecutor, type_: TensorType = LARGE) -> None:
        mesh = MeshSpec.of(data=3)
        self.executor, self.type = executor, type_
        self.on = [executor.over(place) for place in STAGES]
        first, second, counting = Building(mesh), Building(mesh), Building(mesh)
        first.call("send", first.input(type_, "state", "v"), 0)
        first.call("commit")
        state = second.input(type_, "state", "w", donate=True)
        got = second.call("recv", 0, list(type_.local_shape(mesh)), torch.float32)
        second.call("commit")
        second.output(second.call("aten.copy_.default", state, got), type_, "state", "w")
        self.plan = joined([("a", STAGES[0], first), ("b", STAGES[1], second)], [(0, 1, type_, type_)])
        assert wrong_parts(self.plan) is None and self.plan.senders == {0}
        counted = counting.input(type_, "state", "v", donate=True)
        counting.call("commit")
        counting.output(counting.call("aten.add_.Scalar", counted, 1), type_, "state", "v")
        self.counting = counting.plan()
        self.value: Any = self.on[0].put(torch.zeros(type_.shape), type_)
        self.kept: Any = self.on[1].put(torch.zeros(type_.shape), type_)

    def count(self) -> None:
        [self.value] = self.on[0].run(self.counting, [self.value])

    def hand(self) -> None:
        [self.kept] = self.executor.run(self.plan, [self.value, self.kept])

    def check(self, kept: float) -> None:
        got = whole_of(self.on[1].shards(self.kept), self.type, self.on[1].mesh)
        assert got.eq(kept).all(), (got.min(), got.max())


def workers_of(executor: MeshExecutor, part: int) -> list[int]:
    """The part's processes."""
    return [executor.worker_pids()[rank] for rank in STAGES[part].ranks()]


@pytest.mark.parametrize("type_", [W, LARGE], ids=["small", "large"])
def test_a_part_that_only_sends_goes_on_and_what_it_overwrites_is_sent_as_it_was(
    executor: MeshExecutor, type_: TensorType
) -> None:
    run = Handing(executor, type_)
    run.count()
    run.hand()
    run.check(1)
    with stopped(*workers_of(executor, 1)):
        run.count()
        run.hand()
        run.count()
        run.count()
        if isinstance(executor.connection, LocalConnection):  # hosts say only how far all workers are
            run.on[0].wait(run.value)
    run.check(2)
    run.count()
    run.hand()
    run.hand()
    run.check(5)


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("type_", [W, LARGE], ids=["small", "large"])
def test_a_failure_on_either_side_leaves_the_receivers_state(
    executor: MeshExecutor, type_: TensorType, failing: int
) -> None:
    run = Handing(executor, type_)
    run.count()
    run.hand()
    run.count()
    executor.inject(next(iter(STAGES[failing].ranks())), Kind.FAIL, 10**6, 0)
    run.hand()
    run.count()
    with pytest.raises(DeviceMeshError, match="InjectedError"):
        run.on[1].wait(run.kept)
    run.kept = run.on[1].recover(run.kept)
    run.check(1)
    run.hand()
    run.check(3)


@pytest.mark.sample(4)
@pytest.mark.parametrize("where", ["local", "hosts"])
@pytest.mark.parametrize("snapshots", [False, True])
@pytest.mark.parametrize("overwritten", [False, True])
def test_a_step_that_only_its_senders_have_done_where_a_worker_dies(
    where: str, snapshots: bool, overwritten: bool
) -> None:
    with executor_on(where, ROOT) as executor:
        if snapshots:
            executor.snapshots(2, 1)
        run = Handing(executor, LARGE if snapshots else TensorType(torch.float32, (4,)))
        run.count()
        run.hand()
        run.check(1)
        pids = workers_of(executor, 1)
        with stopped(*pids):
            run.count()
            run.hand()
            if overwritten:
                run.count()
                if where == "local" and not snapshots:  # which all workers take together
                    run.on[0].wait(run.value)
            os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(DeviceMeshError, match="was killed by SIGKILL"):
            run.on[1].wait(run.on[1].put(torch.zeros(4), TensorType(torch.float32, (4,))))
        executor.heal([("v", run.value), ("w", run.kept)])
        missed = overwritten and not snapshots
        try:
            run.check(2)
            assert not missed or where == "hosts"  # where nobody has waited for the senders
        except DeviceMeshError as error:
            assert missed and "the values that it sends have been replaced" in str(error)
            run.kept = run.on[1].recover(run.kept)
            run.check(1)
        run.hand()
        run.check(2 + overwritten)
