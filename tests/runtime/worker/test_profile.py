"""Measured steps: the records of a worker, what it holds, and traces of real meshes, also of those that fail or die."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import monarch
from monarch.compiler.inspect.trace import load_trace
from monarch.compiler.plan import DeviceMeshError, MeshSpec, MonarchError, Plan, Step, Trace
from monarch.compiler.plan.trace import HANDLED
from monarch.distributed import Mesh
from monarch.runtime.controller import executor as controller
from monarch.runtime.controller import recorder
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.shared import wire
from monarch.runtime.shared.measured import HEAD, STEPS, records
from monarch.runtime.worker.frame import Frame
from monarch.runtime.worker.messages import Buffer
from monarch.runtime.worker.tracing import CountedValues, HeldBytes, Tracer
from tests.runtime.building import Building, each, whole
from tests.runtime.collectives.loopback import executor_on
from tests.runtime.controller.test_failures import fail_where
from tests.runtime.processes.test_processes import ended, keep_busy
from tests.runtime.worker.test_states import Worker, bind, words_of

MESH = MeshSpec.of(a=2, b=2)

# -- what a worker holds -----------------------------------------------------------------------------------------------


def storages(*values: object) -> int:
    """The bytes of the distinct storages of tensors in (lists of) values."""
    found: dict[int, int] = {}

    def look(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        elif isinstance(value, (list, tuple)):
            for entry in value:
                look(entry)

    look(values)
    return sum(found.values())


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from(["new", "view", "share", "list", "none", "pop"]))))
def test_bytes_held_are_those_of_the_distinct_storages(doings: list[tuple[int, str]]) -> None:
    held = HeldBytes()
    first: dict[int, object] = {0: torch.zeros(3)}
    values = CountedValues(first, held)
    slots: dict[int, object] = {}
    for at, (number, what) in enumerate(doings):
        known = [value for value in (*values.values(), *slots.values()) if isinstance(value, torch.Tensor)]
        made: dict[str, object] = {
            "new": torch.zeros(number),
            "view": known[0].view(-1) if known else None,
            "share": known[-1] if known else None,
            "list": [torch.zeros(2, number), *known[:1]],
            "none": None,
        }
        if what == "pop":
            values.pop(number, None)
            slots.pop(number, None)
            held.clear((number,))
        elif at % 2:
            values[number] = made[what]
        else:
            slots[number] = made[what]
            held.fill(number, made[what])
        assert held.bytes == storages(*values.values(), *slots.values())
    held.clear_all()
    assert held.bytes == storages(*values.values())


# -- records -----------------------------------------------------------------------------------------------------------


@given(st.integers(8, 80), st.lists(st.integers(0, 6), max_size=30))
def test_a_buffer_keeps_the_last_records_that_fit(room: int, steps: list[int]) -> None:
    buffer = torch.zeros(HEAD + room, dtype=torch.int64)
    times = iter(range(1, 10_000))
    tracer = Tracer(words_of(buffer), lambda: next(times))
    written = []
    for number, spans in enumerate(steps):
        tracer.enter((), ())
        for at in range(spans):
            tracer.ran(at, 2 * at, 2 * at + 1, 0, torch.zeros(1))
        tracer.step(number, 7, 100 + number, failed=number % 3 == 0)
        words = [word for at in range(spans) for word in (at, 2 * at, 2 * at + 1, 4, 0)]
        written.append([wire.RUN, number, 100 + number, number + 1, 7, int(number % 3 == 0), *words])
    kept, used = [], 0
    for row in reversed(written):
        used += len(row) + 1
        if used > room:
            break
        kept.append(row)
    assert records(buffer) == kept[::-1]
    assert int(buffer[STEPS]) == len(steps)


def test_a_record_that_is_being_written_hides_what_it_overwrites() -> None:
    buffer = torch.zeros(HEAD + 20, dtype=torch.int64)
    tracer = Tracer(words_of(buffer), lambda: 9)
    for number in range(4):  # of five words each
        tracer.other(wire.PUT, number, 5)
    assert [row[1] for row in records(buffer)] == [0, 1, 2, 3]
    buffer[0] += 5  # the next one has begun, and is not done
    assert records(buffer) == [[wire.PUT, number, 5, 9] for number in (1, 2, 3)]


# -- frames and workers ------------------------------------------------------------------------------------------------


def test_a_measured_frame_is_the_plain_one_with_observations_between() -> None:
    build = Building(MESH)
    x, y = build.input(whole((2,))), build.input(whole((2,)), "state", "y", donate=True)
    table = build.constant("table", torch.ones(2))
    z = build.call("aten.add.Tensor", x, table, free=[x])
    total = build.call("all_reduce", [z], ["a"], "sum", free=[z])
    build.output(total, whole((2,)))
    build.output(y, whole((2,)), "state", "y")
    frame = Frame(build.plan(), bind)
    lines = frame.source(measured=True).splitlines()
    assert lines == [
        "def step(arguments, now, enter, ran, met, freed):",
        "    s0, s1, = arguments",
        "    arguments.clear()",
        "    s2 = g3",
        "    enter((0, 1, 2, ), (s0, s1, s2, ))",
        "    t = now()",
        "    s3 = g0(s0, s2)",
        "    ran(0, t, now(), 3, s3)",
        "    s0 = None",
        "    freed((0, ))",
        "    t = now()",
        "    s4 = g1([s3])",
        "    met(1, t, now(), 4, s4)",
        "    s3 = None",
        "    freed((3, ))",
        "    t = now()",
        "    g2()",
        "    met(2, t, now())",
        "    return (s4, s1, )",
    ]
    observing = ("t = now()", "enter(", "ran(", "met(", "freed(")
    plain = [line for line in lines[1:] if not line.strip().startswith(observing)]
    assert frame.source().splitlines() == ["def step(arguments):", *plain]


def with_state() -> Plan:
    """w <- w * x, in place behind a commit; gives x + 1. Values of 4 bytes, the state of 12."""
    build = Building(MESH, "with_state")
    w, x = build.input(whole((3,)), "state", "w", donate=True), build.input(whole(()))
    y = build.call("aten.add.Tensor", x, 1)
    scaled = build.call("aten.mul.Tensor", w, x, free=[x])
    build.call("commit")
    new = build.call("aten.copy_.default", w, scaled, free=[scaled])
    build.output(y, whole(()))
    build.output(new, whole((3,)), "state", "w")
    return build.plan()


def test_a_worker_measures_while_it_is_asked_to() -> None:
    worker = Worker()
    plain = worker.state.handlers
    worker.load(1, with_state())
    worker.state.values |= {1: torch.ones(3), 2: torch.tensor(2.0)}
    (said,) = worker.do(wire.numbers(wire.TRACE, 500))
    assert isinstance(said, Buffer) and said.step == worker.step
    assert worker.run(1, with_state(), 5, 1, 2) == []
    worker.do(wire.numbers(wire.FREE, 2))
    worker.load(2, with_state())
    found = records(worker.buffer)
    assert [row[0] for row in found] == [wire.RUN, wire.FREE, wire.LOAD]
    _, number, start, end, plan, failed, *words = found[0]
    spans = [words[at : at + 5] for at in range(0, len(words), 5)]
    assert (plan, failed, number) == (1, 0, 2) and [span[0] for span in spans] == [0, 1, 2, 3]
    times = [start, *(time for span in spans for time in span[1:3]), end]
    assert times == sorted(times) and len(set(times)) == len(times)
    # w and x; with y; with the product, before x is freed in the frame (the controller holds it); ...
    assert [span[3] for span in spans] == [12 + 4 + 4, 12 + 4 + 4 + 12, 12 + 4 + 4 + 12, 12 + 4 + 4 + 12]
    assert worker.do(wire.numbers(wire.TRACE, 0)) == []
    assert worker.state.handlers is plain and type(worker.state.values) is dict
    worker.run(1, with_state(), 9, 6, 5)
    assert records(worker.buffer) == found and worker.state.values[10].tolist() == [6.0] * 3


def test_every_command_that_workers_measure_has_a_name() -> None:
    measured = set(Worker().state.handlers) - {wire.RUN, wire.COUNT, wire.TRACE}
    assert measured == set(recorder.KINDS)
    assert set(recorder.KINDS.values()) == set(HANDLED)


def test_a_buffer_that_cannot_be_had_is_told_and_changes_nothing() -> None:
    worker = Worker()

    def refuse(words: int) -> Tracer | None:
        raise OSError("no memory left")

    worker.state.new_tracer = refuse
    (report,) = worker.do(wire.numbers(wire.TRACE, 500))
    assert isinstance(report, wire.Report) and "no memory left" in report.error
    worker.load(1, with_state())
    worker.state.values |= {1: torch.ones(3), 2: torch.tensor(2.0)}
    assert worker.run(1, with_state(), 5, 1, 2) == []


# -- meshes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def executor() -> Iterator[MeshExecutor]:
    with MeshExecutor(MESH) as executor:
        yield executor


def sums(mesh: MeshSpec, name: str = "sums") -> Plan:
    """The sum of the workers' rows, and the rows plus it."""
    build = Building(mesh, name)
    x = build.input(each(mesh, (mesh.workers, 64)))
    total = build.call("getitem", build.call("all_reduce", [x], list(mesh.names), "sum"), 0)
    build.output(build.call("aten.add.Tensor", x, total, free=[x, total]), each(mesh, (mesh.workers, 64)))
    return build.plan()


def check_times(trace: Trace) -> None:
    """Everything is in order on the one clock, and no step begins before its command."""
    commands = {command.number: command for command in trace.commands if command.kind == "run"}
    last: dict[int, int] = {}
    for step in trace.steps:
        times = [step.start, *(time for span in step.spans for time in (span.start, span.end)), step.end]
        assert times == sorted(times)
        assert last.get(step.worker, 0) <= step.start
        assert commands[step.number].start <= step.start
        assert all(0 <= span.waited <= span.end - span.start and span.held > 0 for span in step.spans)
        last[step.worker] = step.end
    for command in trace.commands:
        assert 0 <= command.start <= command.end


def test_every_step_on_every_worker_is_measured(executor: MeshExecutor) -> None:
    plan, value = sums(MESH), torch.randn(4, 64)
    (before,) = executor.run(plan, [value])
    executor.trace_start()
    outs = [executor.run(plan, [value])[0] for _ in range(3)]
    executor.shards(outs[-1], [1])
    executor.wait(outs[-1])
    trace = executor.trace_stop()
    (after,) = executor.run(plan, [value])
    check_times(trace)
    assert trace.mesh == MESH and [traced.plan for traced in trace.plans] == [plan] and trace.dropped == 0
    numbers = sorted({step.number for step in trace.steps})
    assert len(numbers) == 3
    assert sorted((step.number, step.worker) for step in trace.steps) == [(n, w) for n in numbers for w in range(4)]
    for step in trace.steps:
        assert [span.instruction for span in step.spans] == [0, 1, 2] and not step.failed
        assert step.spans[0].waited > 0 or step.spans[1].waited == step.spans[2].waited == 0
    assert sorted(command.kind for command in trace.commands) == sorted(["put", "run"] * 3 + ["fetch", "wait"])
    assert {each.kind for each in trace.handled} >= {"put"}  # the value that was read lay in shared memory
    shards = [executor.shards(handle) for handle in (before, *outs, after)]
    for others in shards[1:]:
        assert all(torch.equal(a, b) for a, b in zip(shards[0], others, strict=True))


def test_a_plan_first_run_while_tracing_shows_its_load(executor: MeshExecutor) -> None:
    executor.trace_start()
    plan = sums(MESH, "late")
    executor.run(plan, [torch.zeros(4, 64)])
    trace = executor.trace_stop()
    assert [command.label for command in trace.commands if command.kind == "load"] == ["late"]
    assert len([each for each in trace.handled if each.kind == "load"]) == 4
    check_times(trace)


def test_starting_twice_and_stopping_twice_are_errors(executor: MeshExecutor) -> None:
    executor.trace_start()
    with pytest.raises(MonarchError, match="being traced already"):
        executor.trace_start()
    executor.trace_stop()
    with pytest.raises(MonarchError, match="not being traced"):
        executor.trace_stop()


def test_a_small_buffer_keeps_the_last_steps_and_says_what_it_dropped(
    executor: MeshExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller, "buffer_words", lambda workers: 100)
    plan, handle = sums(MESH), executor.put(torch.zeros(4, 64), each(MESH, (4, 64)))
    executor.trace_start()
    for _ in range(10):
        executor.run(plan, [handle])
    trace = executor.trace_stop()
    last = sorted(command.number for command in trace.commands if command.kind == "run")[-4:]
    assert {step.number for step in trace.steps} <= set(last) and last[-1] in {step.number for step in trace.steps}
    assert trace.dropped == 4 * 10 - len(trace.steps)


def test_a_failed_step_is_in_the_trace_and_fails_as_ever() -> None:
    mesh = MeshSpec.of(a=2, b=3)
    build = Building(mesh, "bad")
    x = build.input(whole((6, 6)))
    y = build.call("aten.add.Tensor", x, fail_where(build, x, [4]))
    build.output(build.call("getitem", build.call("all_reduce", [y], ["a", "b"], "sum"), 0), whole(()))
    with MeshExecutor(mesh) as executor:
        executor.trace_start()
        (out,) = executor.run(build.plan(), [torch.zeros(6, 6)])
        with pytest.raises(DeviceMeshError, match="train.py:12: error: worker a=1, b=1 failed in aten.index_select"):
            executor.wait(out)
        executor.run(plan := sums(mesh), [torch.zeros(6, 64)])
        trace = executor.trace_stop()
    assert [traced.plan for traced in trace.plans][1:] == [plan]
    bad = {step.worker: step for step in trace.steps if step.plan == 0}
    assert sorted(bad) == list(range(6)) and all(step.failed for step in bad.values())
    done = {worker: len(step.spans) for worker, step in bad.items()}
    assert done == {worker: 6 if worker == 4 else 8 for worker in range(6)}
    assert [step.failed for step in trace.steps if step.plan == 1] == [False] * 6


@pytest.mark.sample(1)
@pytest.mark.parametrize("where", ["local", "hosts"])
def test_what_ran_before_a_worker_died_is_not_lost(where: str) -> None:
    with executor_on(where, MESH) as executor:
        executor.trace_start()
        (out,) = executor.run(plan := sums(MESH), [torch.zeros(4, 64)])
        executor.wait(out)
        pid = executor.worker_pids()[2]
        busy = keep_busy(executor, calls=1000)  # hosts answer once they have read this plan, and have a bound for it
        os.kill(pid, signal.SIGKILL)
        assert ended(pid)
        with pytest.raises(DeviceMeshError, match="worker a=1, b=0 (on host host1:4242 )?was killed by SIGKILL"):
            executor.wait(busy)
        trace = executor.trace_stop()
    assert trace.plans[0].plan is plan
    assert sorted(step.worker for step in trace.steps if step.plan == 0) == [0, 1, 2, 3]


@pytest.mark.parametrize("where", ["local", "hosts"])
def test_a_mesh_that_is_closed_while_it_is_traced_keeps_what_it_did(where: str) -> None:
    with executor_on(where, MESH) as executor:
        executor.trace_start()
        (out,) = executor.run(sums(MESH), [torch.zeros(4, 64)])
        executor.wait(out)
        executor.close()
        trace = executor.trace_stop()
    assert sorted(step.worker for step in trace.steps) == [0, 1, 2, 3]
    (command,) = [command for command in trace.commands if command.kind == "run"]
    slack = 0 if where == "local" else 100_000_000  # hosts' clocks are known as well as messages are quick
    assert all(command.start - slack <= step.start <= step.end for step in trace.steps)


# -- monarch.profile ---------------------------------------------------------------------------------------------------


def test_a_block_measures_every_mesh_that_runs_in_it(tmp_path: Path) -> None:
    with Mesh(data=2) as first:
        x = monarch.distribute(torch.ones(4), first, "[@data]")
        assert x.sum().item() == 4  # its workers run already
        path = tmp_path / "trace.json.gz"
        with monarch.profile(path) as profile:
            assert (x * 2).sum().item() == 8
            with Mesh(model=1) as second:
                assert monarch.distribute(torch.ones(3), second).sum().item() == 3
        assert x.sum().item() == 4
    assert [trace.mesh for trace in profile.traces] == [first.spec, second.spec]
    assert profile.paths == (path, tmp_path / "trace-2.json.gz")
    assert tuple(load_trace(each) for each in profile.paths) == profile.traces
    with pytest.raises(MonarchError, match="2 meshes have been measured"):
        _ = profile.trace


def test_saving_loading_and_comparing_replicas_are_in_the_trace(tmp_path: Path) -> None:
    with Mesh(data=2) as mesh, monarch.profile(tmp_path / "trace.json") as profile:
        state = {"x": monarch.distribute(torch.arange(4.0), mesh)}
        monarch.save(state, tmp_path / "saved").result()
        monarch.load(tmp_path / "saved", into=state)
        mesh.check_replicas()
        assert state["x"].sum().item() == 6
    assert {"save", "read files", "check replicas"} <= {each.kind for each in profile.trace.handled}
    assert load_trace(tmp_path / "trace.json") == profile.trace


def test_one_mesh_can_be_chosen_and_nothing_need_be_written() -> None:
    with Mesh(data=2) as mesh, Mesh(model=2) as other, monarch.profile(mesh=mesh) as profile:
        assert monarch.distribute(torch.ones(2), other).sum().item() == 2
        assert monarch.distribute(torch.ones(3), mesh).sum().item() == 3
    assert profile.trace.mesh == mesh.spec and profile.paths == ()
    assert len(steps(profile.trace)) == 1


def steps(trace: Trace) -> dict[int, list[Step]]:
    found: dict[int, list[Step]] = {}
    for step in trace.steps:
        found.setdefault(step.number, []).append(step)
    return found


def test_what_is_compiled_in_the_block_has_a_report() -> None:
    with Mesh(data=2) as mesh:
        x = monarch.distribute(torch.ones(4), mesh, "[@data]")

        @monarch.program
        def double(y: torch.Tensor) -> torch.Tensor:
            return y * 2

        @monarch.program
        def triple(y: torch.Tensor) -> torch.Tensor:
            return y * 3

        double(x)
        with monarch.profile() as profile:
            double(x), triple(x)
    names = {traced.name: traced.plan for traced in profile.trace.plans}
    assert names["triple"] is not None and names["triple"].report is not None
    assert [value.op for value in names["triple"].report.values] == ["input", "aten.mul.Tensor"]


def test_a_mesh_that_was_closed_or_lost_before_is_none_to_measure() -> None:
    with Mesh(data=2) as closed, Mesh(data=2) as lost, Mesh(data=2) as mesh:
        for each in (closed, lost, mesh):
            assert monarch.distribute(torch.ones(2), each).sum().item() == 2
        closed.close()
        executor = lost.executor
        assert isinstance(executor, MeshExecutor)
        pid = executor.worker_pids()[1]
        busy = keep_busy(executor)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(DeviceMeshError, match="has lost a worker"):
            executor.wait(busy)
        with monarch.profile() as profile:
            assert monarch.distribute(torch.ones(2), mesh).sum().item() == 2
            with pytest.raises(MonarchError, match="being traced already"), monarch.profile():
                raise AssertionError("the block has been entered")
    assert profile.trace.mesh == mesh.spec


def test_a_mesh_that_was_lost_unnoticed_is_none_to_measure_either() -> None:
    with Mesh(data=2) as lost, Mesh(data=2) as mesh:
        for each in (lost, mesh):
            assert monarch.distribute(torch.ones(2), each).sum().item() == 2
        executor = lost.executor
        assert isinstance(executor, MeshExecutor)
        pid = executor.worker_pids()[1]
        watch = os.pidfd_open(pid)
        os.kill(pid, signal.SIGKILL)
        assert select.select([watch], [], [], 60)[0]
        os.close(watch)
        with monarch.profile() as profile:
            assert monarch.distribute(torch.ones(2), mesh).sum().item() == 2
    assert profile.trace.mesh == mesh.spec


def test_an_error_in_the_block_is_the_users_and_the_trace_is_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with Mesh(data=2) as mesh:
        with pytest.raises(ZeroDivisionError), monarch.profile(path):
            monarch.distribute(torch.ones(2), mesh).sum().item()
            _ = 1 / 0
        assert len(load_trace(path).steps) == 2
        with monarch.profile() as again:  # the mesh is traced no more, so it can be once more
            monarch.distribute(torch.ones(2), mesh).sum().item()
        with pytest.raises(MonarchError, match="has been used"), again:
            pass


def test_a_path_that_cannot_be_written_is_told_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(MonarchError, match="there is no folder"), monarch.profile(tmp_path / "no" / "trace.json"):
        raise AssertionError("the block has been entered")
    with monarch.profile() as profile:
        pass
    with pytest.raises(MonarchError, match="no mesh has been measured"):
        _ = profile.trace
