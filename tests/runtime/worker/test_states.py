"""The pure parts: what the controller and a worker do about each event, with no process, socket or clock."""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.plan import ArenaRange, DeviceMeshError, MeshSpec, MonarchError, Plan, PlanError, Slot, Source
from monarch.compiler.plan.options import CompileOptions
from monarch.runtime.collectives.sending import Sending
from monarch.runtime.controller.state import ControllerState
from monarch.runtime.controller.steps import PlanRecord, RemoteTensor, Step
from monarch.runtime.processes.looking import Exit, stopping
from monarch.runtime.shared import memory, wire
from monarch.runtime.shared.blocks import Flat, cut, rounds
from monarch.runtime.shared.checking import check
from monarch.runtime.shared.ring import Full, Space
from monarch.runtime.shared.signals import Aborted, Stopped
from monarch.runtime.shared.window import Geometry, Window
from monarch.runtime.shared.wire import Report
from monarch.runtime.worker.device import gpu
from monarch.runtime.worker.frame import Frame
from monarch.runtime.worker.messages import Count, Fetched, Message, Missing
from monarch.runtime.worker.state import Actors, WorkerState
from monarch.runtime.worker.tracing import Tracer
from tests.runtime.building import Building, whole

MESH = MeshSpec.of(a=2, b=2)
GEOMETRY = Geometry.of(4)

# -- a worker ------------------------------------------------------------------------------------------------------


class Alone:
    """Stands in for the collectives: a commit that can be told to be aborted."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.commits = 0
        self.abort = False
        self.stopped = 0
        self.on_begin: Callable[[], None] = lambda: None
        self.on_commit: Callable[[], None] = lambda: None

    me = 2
    ranks = range(4)
    mirror = None
    sending = Sending(Window(GEOMETRY, Window.create(GEOMETRY)), 2, None)

    @property
    def at(self) -> Alone:
        return self

    def begin(self, step: int) -> None:
        self.steps.append(step)
        self.on_begin()

    def is_stopped(self, step: int) -> bool:
        return self.stopped > step

    def halt(self) -> None:
        if self.is_stopped(self.steps[-1]):
            raise Stopped(2)

    def passed(self, command: int, ranks: object = None) -> bool:
        return True

    def await_passed(self, command: int, ranks: object = None) -> bool:
        return True

    def by(self, backend: str) -> Alone:
        return self

    def commit(self) -> Callable[[], None]:
        def run() -> None:
            if self.abort:
                raise Aborted(3, died=False)
            self.commits += 1
            self.on_commit()

        return run


def words_of(buffer: torch.Tensor) -> memoryview:
    return memoryview(buffer.numpy()).cast("B").cast("q")


class Worker:
    """A worker's state machine, fed with commands as the controller would write them."""

    def __init__(self, actors: Actors | None = None) -> None:
        self.alone = Alone()
        self.staged = torch.arange(200, dtype=torch.uint8)
        self.file = b""  # that comes with the next plan
        self.state = WorkerState(MESH, 2, self.alone, self._staging, self._new_tracer, lambda _: self.file, actors)
        self.buffer = torch.zeros(0, dtype=torch.int64)
        self.time = 0
        self.step = -1

    def _staging(self, offset: int, size: int) -> torch.Tensor:
        return self.staged[offset : offset + size]

    def _new_tracer(self, words: int) -> Tracer | None:
        """Into a buffer of its own, by a clock that goes on by one with every look."""
        if not words:
            return None
        self.buffer = torch.zeros(words, dtype=torch.int64)
        return Tracer(words_of(self.buffer), self._clock)

    def _clock(self) -> int:
        self.time += 1
        return self.time

    def do(self, body: bytes) -> list[Message]:
        self.step += 1
        return self.state.handle(self.step, bytearray(body))

    def load(self, number: int, plan: Plan) -> list[Message]:
        self.file = pickle.dumps((plan, None, ()))
        return self.do(wire.numbers(wire.LOAD, number))

    def run(self, number: int, plan: Plan, base: int, *arguments: float) -> list[Message]:
        dtypes = [spec.type.dtype if spec.kind == "scalar" else None for spec in plan.inputs]
        return self.do(wire.run_struct(dtypes).pack(wire.RUN, number, base, len(plan.outputs), 0, 0, *arguments))


def scaled(donate: bool = False, bad: bool = False) -> Plan:
    build = Building(MESH, "scaled")
    x = build.input(whole((2,)), "state", "x", donate=donate)
    factor = build.input(whole((), torch.float32), "scalar", "factor")
    y = build.call("aten.view.default", x, [3]) if bad else build.call("aten.mul.Tensor", x, factor)
    if donate:
        build.call("commit")
        y = build.call("aten.copy_.default", x, y)
    build.output(y, whole((2,)), "state", "x")
    return build.plan()


def test_a_worker_runs_a_plan_and_sends_the_value() -> None:
    worker, plan = Worker(), scaled()
    assert worker.load(7, plan) == []
    worker.state.values[1] = torch.tensor([1.0, 2.0])
    assert worker.run(7, plan, 5, 1, 2.5) == []
    assert worker.alone.steps == [worker.step]
    (value,) = worker.do(wire.numbers(wire.FETCH, 5, 0, 2))
    assert isinstance(value, Fetched) and value.tensor.tolist() == [2.5, 5.0]
    assert worker.do(wire.numbers(wire.FETCH, 5, 0, 1)) == []  # not asked for this worker's
    assert worker.do(wire.numbers(wire.COUNT)) == [Count(worker.step, 2)]
    worker.do(wire.numbers(wire.FREE, 1, 5, 99))
    assert worker.do(wire.numbers(wire.COUNT)) == [Count(worker.step, 0)]
    worker.do(wire.numbers(wire.UNLOAD, 7))
    assert not worker.state.plans


def test_plans_share_an_arena_that_grows() -> None:
    """A plan that was loaded before a larger one, and has its values in the arena too, goes on as it did."""
    worker = Worker()
    small, large = in_the_arena(4), in_the_arena(400)
    worker.load(1, small)
    worker.state.values[1] = torch.arange(4.0)
    worker.state.values[2] = torch.arange(400.0)
    assert worker.run(1, small, 10, 1) == []
    assert worker.state.arena.size == small.arena
    worker.load(2, large)
    assert worker.state.arena.size == large.arena
    for base in (20, 30):
        assert worker.run(1, small, base, 1) == [] and worker.run(2, large, base + 1, 2) == []
    for handle in (10, 20, 30):
        assert torch.equal(worker.state.values[handle], torch.arange(4.0).mul(2).exp().neg())
        assert worker.state.values[handle].untyped_storage().nbytes() == 16
    assert torch.equal(worker.state.values[31], torch.arange(400.0).mul(2).exp().neg())
    worker.do(wire.numbers(wire.UNLOAD, 2))
    assert worker.run(1, small, 40, 1) == []
    worker.do(wire.numbers(wire.UNLOAD, 1))
    assert worker.state.arena.size == 0


def test_a_plan_for_whose_values_there_is_no_memory() -> None:
    """It fails alone: plans before and after it run in the arena that there was."""
    worker = Worker()
    first, second = in_the_arena(400), in_the_arena(4)
    worker.load(1, first)
    (report,) = worker.load(2, replace(in_the_arena(4), arena=2**62))
    assert isinstance(report, Report) and "plan 'arena 4' needs 4,398,046,511,104.0 MiB" in report.error
    assert worker.load(3, second) == []
    worker.state.values[1], worker.state.values[2] = torch.arange(400.0), torch.arange(4.0)
    assert worker.run(1, first, 10, 1) == [] and worker.run(3, second, 11, 2) == []
    for handle in (1, 2):
        expected = worker.state.values[handle].mul(2).exp().neg()
        assert torch.equal(worker.state.values[9 + handle], expected)


def test_a_plan_for_which_memory_was_short_runs_when_there_is_some(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, plan = Worker(), replace(scaled(), arena=4096)
    worker.state.values[1] = torch.tensor([1.0, 2.0])

    def full(size: int) -> None:
        raise OSError("Cannot allocate memory")

    with monkeypatch.context() as patch:
        patch.setattr("monarch.runtime.worker.arena._mapped", full)
        worker.load(3, plan)
        (report,) = worker.run(3, plan, 10, 1, 2.5)
        assert isinstance(report, Report) and report.kind == "failed" and report.step == worker.step
        assert "needs 0.0 MiB for its ops' results" in report.error
    assert worker.run(3, plan, 20, 1, 2.5) == []
    (value,) = worker.do(wire.numbers(wire.FETCH, 20, 0, 2))
    assert isinstance(value, Fetched) and value.tensor.tolist() == [2.5, 5.0]


def test_a_step_that_fails_leaves_nothing_behind_in_the_arena() -> None:
    worker, plan, bad = Worker(), in_the_arena(4), in_the_arena(4, bad=True)
    worker.load(1, plan)
    worker.load(2, bad)
    worker.state.values[1] = torch.arange(4.0)
    (report,) = worker.run(2, bad, 10, 1)
    assert isinstance(report, Report) and report.op == "aten.view.default"
    assert worker.run(1, plan, 11, 1) == []
    assert torch.equal(worker.state.values[11], torch.arange(4.0).mul(2).exp().neg())


def test_what_a_failed_step_left_on_a_gpu_is_forgotten_before_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it was aborted before it looked, or did not get as far itself."""

    class Ready:
        device = torch.device("cpu")
        forgotten = 0

        def __init__(self, plan: Plan, device: torch.device) -> None:
            self.plan = plan

        def binds(self, rest: Callable[..., object]) -> Callable[..., object]:
            return rest

        def check(self) -> None:
            pass

        def forget(self) -> None:
            Ready.forgotten += 1

    monkeypatch.setattr(gpu, "OnGpu", Ready)
    monkeypatch.setattr(gpu, "device_for", lambda plan, worker: torch.device("cpu"))
    worker = Worker()
    for number, plan in enumerate((scaled(donate=True), scaled(bad=True))):
        plan = replace(plan, options=CompileOptions(target="cuda:90"))
        worker.load(number, plan)
        worker.state.values[1] = torch.ones(2)
        worker.alone.abort = True
        (report,) = worker.run(number, plan, 10, 1, 2.0)
        assert isinstance(report, Report) and report.kind == ("failed" if number else "aborted")
        assert Ready.forgotten == number
        worker.alone.abort = False
        for base in (20, 30):
            worker.state.values[1] = torch.ones(2)
            worker.run(number, plan, base, 1, 2.0)
            assert Ready.forgotten == number + 1 + (number and base == 30)


def test_what_fails_on_a_gpu_is_told_by_the_plans_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "device_for", lambda plan, worker: torch.device("cpu"))
    worker = Worker()
    build = Building(MESH, "attend")
    q = build.input(whole((1, 1, 4, 8)))
    both = build.call("aten._scaled_dot_product_flash_attention_for_cpu.default", q, q, q, 0.1)
    build.output(build.call("getitem", both, 0), whole((1, 1, 4, 8)))
    plan = replace(build.plan(), options=CompileOptions(target="cuda:90"))
    assert worker.load(1, plan) == []
    worker.state.values[1] = torch.ones(1, 1, 4, 8)
    (report,) = worker.run(1, plan, 10, 1)
    assert isinstance(report, Report) and "attention with dropout 0.1 on a GPU" in report.error
    assert report.op == "aten._scaled_dot_product_flash_attention_for_cpu.default"


def in_the_arena(length: int, bad: bool = False) -> Plan:
    """-exp(2 x), of which the product and the power lie in the arena."""
    build = Building(MESH, f"arena {length}")
    x = build.input(whole((length,)))
    doubled = build.call("aten.mul.Tensor", x, 2.0)
    power = build.call("aten.exp.default", doubled, free=[doubled])
    if bad:
        build.call("aten.view.default", power, [length + 1])
    build.output(build.call("aten.neg.default", power, free=[power]), whole((length,)))
    plan = build.plan()
    step = 64 * -(-length * 4 // 64)
    at = {doubled.index: 0, power.index: step}
    regions = {slot: (ArenaRange(offset, torch.float32, (length,)),) for slot, offset in at.items()}
    instructions = [replace(each, regions=regions.get(each.out, ())) for each in plan.instructions]
    return replace(plan, instructions=tuple(instructions), arena=2 * step)


def test_a_worker_places_its_block() -> None:
    worker = Worker()
    code = wire.DTYPE_CODES[torch.uint8]
    inline = wire.PUT_HEAD.pack(wire.PUT, 1, code, 1, 4, wire.INLINE, 0, 4, 4) + wire.numbers(4, 0, 0, 1, 1)
    assert worker.do(inline + bytes(range(8))) == []
    for piece in (slice(0, 3), slice(3, 4)):
        head = wire.PUT_HEAD.pack(wire.PUT, 2, code, 1, 4, 100, piece.start, piece.stop, 4)
        assert worker.do(head + wire.numbers(4, 0, 0, 1, 1)) == []
    first, second = worker.state.values[1], worker.state.values[2]
    assert isinstance(first, torch.Tensor) and first.tolist() == [4, 5, 6, 7]
    assert isinstance(second, torch.Tensor) and second.tolist() == [103, 104, 105, 101]


def test_a_failed_step_keeps_what_it_would_have_replaced() -> None:
    worker, plan, bad = Worker(), scaled(donate=True), scaled(donate=True, bad=True)
    worker.load(1, plan)
    worker.load(2, bad)
    worker.state.values[1] = torch.ones(2)
    (report,) = worker.run(2, bad, 10, 1, 2.0)
    assert isinstance(report, Report) and report.kind == "failed" and not report.committed
    assert report.op == "aten.view.default" and report.operands == ("f32[2]",) and "shape '[3]'" in report.error
    (follows,) = worker.run(1, plan, 11, 10, 2.0)
    assert isinstance(follows, Report) and (follows.kind, follows.root) == ("dependent", report.step)
    worker.alone.abort = True
    (aborted,) = worker.run(1, plan, 12, 1, 2.0)
    assert isinstance(aborted, Report) and aborted.kind == "aborted" and worker.state.values[12] == Missing(worker.step)
    worker.alone.abort = False
    assert worker.run(1, plan, 13, 1, 3.0) == [] and worker.alone.commits == 1
    replaced = worker.state.values[13]
    assert 1 not in worker.state.values and isinstance(replaced, torch.Tensor) and replaced.tolist() == [3, 3]


def test_a_step_is_given_up_before_its_commit_and_not_behind_it() -> None:
    """Where the controller was interrupted: also one that has not begun, and between two instructions."""
    worker, plan = Worker(), scaled(donate=True)
    worker.load(1, plan)
    worker.state.values[1] = torch.ones(2)
    worker.alone.stopped = worker.step + 2
    (report,) = worker.run(1, plan, 10, 1, 2.0)
    assert isinstance(report, Report) and report.kind == "stopped" and worker.alone.commits == 0

    worker.alone.stopped = 0

    def stop() -> None:
        worker.alone.stopped = worker.step + 1
        stopping.append(1)

    worker.alone.on_begin = stop
    (report,) = worker.run(1, plan, 11, 1, 2.0)
    assert isinstance(report, Report) and (report.kind, report.committed) == ("stopped", False)
    assert worker.alone.commits == 0 and isinstance(worker.state.values[1], torch.Tensor)

    worker.alone.on_begin, worker.alone.on_commit = lambda: None, stop
    assert worker.run(1, plan, 12, 1, 2.0) == [] and worker.alone.commits == 1
    replaced = worker.state.values[12]
    assert isinstance(replaced, torch.Tensor) and replaced.tolist() == [2, 2]


def test_a_plan_that_replaces_state_commits_even_if_it_does_not_say_so() -> None:
    worker = Worker()
    build = Building(MESH)
    x = build.input(whole((2,)), "state", "x", donate=True)
    build.output(build.call("aten.neg.default", x), whole((2,)), "state", "x")
    plan = build.plan()
    worker.load(1, plan)
    worker.state.values[1] = torch.ones(2)
    assert worker.run(1, plan, 2, 1) == [] and worker.alone.commits == 1 and list(worker.state.values) == [2]


# -- the controller ------------------------------------------------------------------------------------------------


def accepted(state: ControllerState, step: Step) -> Step:
    """A step, given to the workers."""
    step.sequence, state.last = state.next_command, step
    state.note(step)
    return step


def remote(state: ControllerState, step_name: str = "put") -> RemoteTensor:
    return RemoteTensor(state.handles(1), whole((2,)), accepted(state, Step(step_name)), state, deque())


def test_reports_become_one_error_that_names_the_first_cause() -> None:
    state = ControllerState(MESH)
    first, second = remote(state, "first"), remote(state, "second")
    state.report(Report("aborted", 0, 0, error="worker 3 failed"))
    state.report(Report("failed", 3, 0, error="ValueError: no", op="aten.mm.default", source=Source("a.py", 4)))
    state.report(Report("failed", 2, 0, error="ValueError: no"))
    state.report(Report("dependent", 1, 1, root=0))
    state.finished(1)
    with pytest.raises(DeviceMeshError, match="^worker a=1, b=0 failed: ValueError: no") as info:
        state.check(first.step)
    assert "2 of 4 workers failed: a=1, b=1; a=1, b=0" in str(info.value)
    error = info.value
    assert (error.worker, error.coordinates, error.step, error.program) == (2, {"a": 1, "b": 0}, 0, "first")
    assert (error.source, error.exit_status, error.signal) == (None, None, "")
    state.check(second.step)  # not finished yet, so nothing is known of it
    state.finished(2)
    with pytest.raises(DeviceMeshError, match="worker a=1, b=0 failed"):
        state.check(second.step)


def test_donation_is_taken_back_when_the_step_fails() -> None:
    state = ControllerState(MESH)
    plan = scaled(donate=True)
    record = PlanRecord(0, plan, {})
    old = remote(state)
    freed: deque[int] = deque()

    def run(argument: RemoteTensor) -> RemoteTensor:
        base = state.handles(1)
        step = accepted(state, Step("scaled", (argument,)))
        step.previous = (record, base, [argument, 2.0])
        return RemoteTensor(base, whole((2,)), step, state, freed)

    new = run(old)
    with pytest.raises(MonarchError, match="x was donated to step 1"):
        state.refuse_donated(old, "x")
    state.report(Report("failed", 0, 1, error="no"))
    newer = run(new)
    state.report(Report("dependent", 0, 2, root=1))
    state.finished(3)
    state.refuse_donated(old, "x")
    assert state.recover(newer) is old and state.recover(new) is old
    good = run(old)
    state.finished(4)
    assert state.recover(good) is good and good.step.previous is None and not good.step.donated
    del old, good
    assert list(freed) == [4]  # of the two only the one that no step has taken


def test_a_death_fails_everything_once() -> None:
    state = ControllerState(MESH)
    handle = remote(state)
    state.finished(1)
    state.check(handle.step)
    state.died([])
    state.check(handle.step)
    state.died([Exit(1, "was killed by SIGKILL", -9)])
    state.died([Exit(2, "was killed by SIGTERM", -15)])
    with pytest.raises(
        DeviceMeshError, match=r"the mesh mesh<a=2, b=2> has lost a worker: worker a=0, b=1 was killed"
    ) as info:
        state.check(handle.step)
    for error in (info.value, pickle.loads(pickle.dumps(info.value))):
        assert (error.worker, error.coordinates, error.exit_status) == (1, {"a": 0, "b": 1}, -9)
        assert (error.signal, error.host, error.step, error.op) == ("SIGKILL", "", None, "")


# -- frames --------------------------------------------------------------------------------------------------------


def bind(name: str, *arguments: object) -> Callable[..., object]:
    return lambda *values: (name, arguments, values)


def test_a_frame_is_straight_python() -> None:
    build = Building(MESH)
    x, y = build.input(whole((2,))), build.input(whole((2,)))
    z = build.call("aten.add.Tensor", x, y, free=[x, y], alpha=-2)
    total = build.call("all_reduce", [z], ["a"], "sum", free=[z])
    build.output(total, whole((2,)))
    frame_ = Frame(build.plan(), bind)
    assert frame_.source().splitlines() == [
        "def step(arguments):",
        "    s0, s1, = arguments",
        "    arguments.clear()",
        "    s2 = g0(s0, s1, alpha=(-2))",
        "    s0 = s1 = None",
        "    s3 = g1([s2])",
        "    s2 = None",
        "    return (s3, )",
    ]
    arguments = [torch.ones(2), torch.ones(2)]
    ((name, bound, values),) = frame_.run(arguments)
    assert (name, bound) == ("all_reduce", (["a"], "sum")) and values[0][0].tolist() == [-1, -1] and not arguments


def test_plans_that_make_no_sense_are_refused() -> None:
    def plan(op: str, *args: object, out: int = 0) -> Plan:
        build = Building(MESH, "odd")
        build.input(whole((2,)))
        build.output(build.call(op, *args), whole((2,)))
        return build.plan()

    for op in ("os.system", "aten.mm", "aten.mm.nothing", "aten.__class__.default", "import os", "builtins.eval.x"):
        with pytest.raises(PlanError, match="which the workers do not know"):
            check(plan(op, Slot(0)))
    with pytest.raises(PlanError, match="reads empty slot 9"):
        check(plan("aten.neg.default", Slot(9)))
    with pytest.raises(PlanError, match="cannot hold a (set|object|function)"):
        Frame(plan("aten.neg.default", {1}), bind)
    with pytest.raises(
        PlanError, match="takes .tensors, mesh_dims, reduction., and the plan gives .tensors, mesh_dims."
    ):
        Frame(plan("all_reduce", [Slot(0)], ["a"]), bind)


# -- bookkeeping ---------------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 40), max_size=60),
    lag=st.integers(0, 6),
    restart=st.booleans(),
)
def test_space_never_gives_out_what_is_in_use(sizes: list[int], lag: int, restart: bool) -> None:
    space = Space(64, restart)
    live: list[tuple[int, int, int]] = []
    for command, size in enumerate(sizes):
        finished = max(0, command - lag)
        while True:
            live = [block for block in live if block[0] >= finished]
            try:
                at = space.reserve(size, finished)
                break
            except Full as full:
                assert full.sequence >= finished
                finished = full.sequence + 1
        offset = at % 64
        assert offset + size <= 64
        assert all(offset + size <= start or end <= offset for _, start, end in live)
        space.take(at, size, command)
        live.append((command, offset, offset + size))


@given(shape=st.lists(st.integers(0, 9), min_size=1, max_size=4), limit=st.integers(1, 50))
def test_cuts_cover_a_tensor_once(shape: list[int], limit: int) -> None:
    seen = torch.zeros(shape, dtype=torch.int64)
    for index in cut(shape, limit):
        block = seen if index is None else seen[index]
        assert block.numel() <= limit
        block += 1
    assert bool((seen == 1).all())


@given(
    shapes=st.lists(st.lists(st.integers(0, 30), min_size=1, max_size=3), max_size=5),
    limit=st.sampled_from([256, 1024]),
)
def test_rounds_hold_every_piece_once_and_fit(shapes: Sequence[list[int]], limit: int) -> None:
    packed = rounds([tuple(shape) for shape in shapes], [4] * len(shapes), limit)
    seen = [torch.zeros(shape, dtype=torch.int64) for shape in shapes]
    for pieces_ in packed:
        end = 0
        for piece in pieces_:
            assert piece.offset >= end and piece.offset % 64 == 0
            block = piece.of(seen[piece.tensor])
            assert tuple(block.shape) == piece.shape
            block += 1
            end = piece.offset + 4 * block.numel()
        assert end <= limit
    assert all(bool((each == 1).all()) for each in seen)


def test_flat_spans() -> None:
    flat = Flat([torch.arange(3), torch.empty(0, dtype=torch.int64), torch.arange(3, 8).view(5, 1)])
    assert [(row.tolist(), low, high) for row, low, high in flat.spans(1, 6)] == [([1, 2], 0, 2), ([3, 4, 5], 2, 5)]
    assert flat.length == 8


def test_reports_survive_the_wire() -> None:
    report = Report(
        "failed",
        3,
        9,
        "é" * 40_000,
        "line\n" * 9_000,
        "aten.mm.default",
        Source("a.py", 1, 2, 3, Source("b.py", 4)),
        ("f32[2]",),
        4,
        True,
    )
    encoded = report.encode()
    assert len(encoded) < wire.PACKET_BYTES
    again = Report.decode(encoded[wire.UP_HEAD.size :])
    assert again.source == report.source and again.operands == report.operands and again.committed
    assert again.error.startswith("é" * 6000) and "(cut)" in again.error


def test_memory_is_what_the_tighter_limit_leaves(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from pathlib import Path

    folder = Path(str(tmp_path))
    monkeypatch.setattr(memory, "CGROUP", folder)
    (folder / "memory.max").write_text("104857600\n")
    (folder / "memory.current").write_text("94371840\n")
    assert memory.cgroup("memory.max", "memory.current", folder) == 10 << 20
    (folder / "memory.max").write_text("max\n")
    assert memory.cgroup("memory.max", "memory.current", folder) is None
    assert memory.cgroup("memory.max", "memory.current", folder / "nothing") is None
    memory.require(5, "a test", lambda: None)
    memory.require(5, "a test", lambda: 5)
    with pytest.raises(MonarchError, match="not enough memory for a test: it takes 2.0 MiB, and 1.0 MiB are available"):
        memory.require(2 << 20, "a test", lambda: 1 << 20)
