"""The executor of a mesh, local or over hosts: values, steps, backpressure, frees, threads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from monarch.compiler.blocks import block_of, holders, whole_of
from monarch.compiler.config import settings
from monarch.compiler.execution.executor import Executor, Handle
from monarch.compiler.plan import (
    DTYPES,
    DeviceMeshError,
    Layout,
    LayoutError,
    MeshSpec,
    MonarchError,
    PlanError,
    Source,
    TensorType,
)
from monarch.runtime.controller.executor import MeshExecutor, start_local
from monarch.runtime.shared.window import RESULTS_BYTES
from tests.runtime.building import Building, each, whole
from tests.runtime.collectives.loopback import executor_on

pytestmark = pytest.mark.sample(1, of="executor")

MESH = MeshSpec.of(a=2, b=2)


@pytest.fixture(scope="module", params=["local", "hosts"])
def executor(request: pytest.FixtureRequest) -> Iterator[MeshExecutor]:
    with executor_on(request.param, MESH) as executor:
        yield executor


def add_one(mesh: MeshSpec, type_: TensorType, name: str = "add_one") -> Building:
    build = Building(mesh, name)
    x = build.input(type_)
    build.output(build.call("aten.add.Tensor", x, 1, free=[x]), type_)
    return build


def test_it_is_an_executor(executor: MeshExecutor) -> None:
    assert isinstance(executor, Executor)
    assert executor.mesh == MESH
    handle: Handle = executor.put(torch.zeros(2), whole((2,)))
    assert handle.type == whole((2,))


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(((), ())),
        Layout((("a",), ())),
        Layout(((), ("b",))),
        Layout((("b",), ("a",))),
        Layout((("a", "b"), ())),
        Layout((("b", "a"), ())),
        Layout(((), ("b",)), partial=(("a", "sum"),)),
        Layout(((), ()), partial=(("b", "prod"),)),
        Layout(((), ()), partial=(("a", "max"),)),
        Layout(((), ()), varying=("a", "b")),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(4, 8), (0, 4), (4 * 600, 4 * 700)], ids=str)
def test_each_worker_gets_its_block(executor: MeshExecutor, layout: Layout, shape: tuple[int, int]) -> None:
    tensor = torch.randn(shape)
    type_ = TensorType(torch.float32, shape, layout)
    shards = executor.shards(executor.put(tensor, type_))
    for rank, shard in enumerate(shards):
        assert torch.equal(shard, block_of(tensor, type_, MESH, rank))
    if not layout.varying:
        assert torch.equal(whole_of(shards, type_, MESH), tensor)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
def test_every_dtype_and_no_dims(executor: MeshExecutor, dtype: torch.dtype) -> None:
    for tensor in (torch.tensor(3).to(dtype), torch.arange(6).to(dtype).view(2, 3).t()):
        (shard,) = executor.shards(executor.put(tensor, TensorType(dtype, tuple(tensor.shape))), [2])
        assert shard.dtype == dtype and torch.equal(shard, tensor)


def test_a_value_larger_than_the_staging_area_goes_in_pieces(executor: MeshExecutor) -> None:
    tensor = torch.randint(0, 255, (100 << 20,), dtype=torch.uint8)
    handle = executor.put(tensor, TensorType(torch.uint8, tuple(tensor.shape), Layout((("a",),))))
    first, last = executor.shards(handle, [0, 3])
    assert torch.equal(torch.cat([first, last]), tensor)


def test_arguments_may_be_handles_tensors_and_numbers(executor: MeshExecutor) -> None:
    build = Building(MESH)
    type_ = TensorType(torch.float32, (4,), Layout((("a",),)))
    x, y = build.input(type_), build.input(type_)
    scale = build.input(whole((), torch.float32), "scalar", "scale")
    seed = build.input(whole((), torch.int64), "seed", "seed")
    total = build.call("aten.mul.Tensor", build.call("aten.add.Tensor", x, y), scale)
    build.output(build.call("aten.add.Tensor", total, seed), type_)
    plan = build.plan()
    x_value, y_value = torch.randn(4), torch.randn(4)
    handle = executor.put(x_value, type_)
    for scale_value, seed_value in ((2, 1 << 40), (0.5, 3), (torch.tensor(1.5), 0)):
        (out,) = executor.run(plan, [handle, y_value, scale_value, seed_value])
        want = (x_value + y_value) * scale_value + seed_value
        assert torch.equal(whole_of(executor.shards(out), type_, MESH), want)


def test_local_ops_and_constants_and_lists(executor: MeshExecutor) -> None:
    build = Building(MESH)
    x = build.input(whole((4, 6)))
    table = build.constant("table", torch.arange(24.0).view(4, 6))
    both = build.call("aten.cat.default", [x, table], 0)
    mine = build.call("shard", build.call("shard", both, "a", 0), "b", 1)
    parts = build.call("aten.split.Tensor", mine, 2, 0)
    build.output(build.call("getitem", parts, 1), whole(()))
    build.output(build.call("axis_index", "b"), whole((), torch.int64))
    build.output(build.call("aten.full.default", [2], float("inf"), dtype=torch.float32), whole((2,)))
    x_value = torch.randn(4, 6)
    outs = executor.run(build.plan(), [x_value])
    want = torch.cat([x_value, torch.arange(24.0).view(4, 6)])
    for rank, shard in enumerate(executor.shards(outs[0])):
        a, b = MESH.point(rank)
        assert torch.equal(shard, want.chunk(2, 0)[a].chunk(2, 1)[b][2:])
    assert [int(shard) for shard in executor.shards(outs[1])] == [0, 1, 0, 1]
    assert executor.shards(outs[2], [1])[0].tolist() == [float("inf")] * 2


def test_calls_return_before_the_work_is_done_and_run_far_ahead(executor: MeshExecutor) -> None:
    """More steps than may be under way at once, each a little slower than a call: the caller is held back, not
    refused."""
    type_ = whole((64, 64))
    plan = add_one(MESH, type_).plan()
    handle = executor.put(torch.zeros(64, 64), type_)
    ahead = 0
    for _ in range(3 * settings.steps_ahead):
        (handle,) = executor.run(plan, [handle])
        executor.connection.refresh()
        ahead = max(ahead, executor.state.next_command - executor.state.finished_commands)
    assert ahead <= settings.steps_ahead + 16  # so many steps run before it is looked how far the workers are
    assert torch.equal(executor.shards(handle, [3])[0], torch.full((64, 64), 3.0 * settings.steps_ahead))


def test_steps_over_hosts_send_no_control_messages() -> None:
    """All memory is registered, and everyone knows everyone's, before the first command."""
    with executor_on("hosts", MESH) as executor:
        build = Building(MESH, "sums")
        x = build.input(each(MESH, (4, 300_000)))
        total = build.call("getitem", build.call("all_reduce", [x], ["a", "b"], "sum"), 0)
        build.output(total, whole((1, 300_000)))
        plan, value = build.plan(), torch.ones(4, 300_000)
        executor.wait(executor.run(plan, [value])[0])
        before = executor.connection.link_messages()
        assert before > 0
        for _ in range(20):
            (out,) = executor.run(plan, [value])
        executor.wait(out)
        assert executor.connection.link_messages() == before


def test_large_inputs_wait_for_room(executor: MeshExecutor) -> None:
    type_ = whole((2 << 20,))
    plan = add_one(MESH, type_).plan()
    outs = [executor.run(plan, [torch.full((2 << 20,), float(at))])[0] for at in range(24)]
    for at, out in enumerate(outs):
        shard = executor.shards(out, [at % 4])[0]
        assert shard[0] == at + 1 and shard[-1] == at + 1


def test_dropped_handles_are_freed_on_the_workers() -> None:
    with MeshExecutor(MeshSpec.of(w=2)) as executor:
        type_ = whole((3,))
        plan = add_one(executor.mesh, type_).plan()
        assert executor.held_values() == [0, 0]
        handle = executor.put(torch.zeros(3), type_)
        outs = [executor.run(plan, [handle])[0] for _ in range(10)]
        assert executor.held_values() == [11, 11]
        del handle, outs[5:]
        assert executor.held_values() == [5, 5]
        executor.run(plan, [torch.zeros(3)])  # neither the argument nor the result is kept
        assert executor.held_values() == [5, 5]
        del outs
        assert executor.held_values() == [0, 0]


def test_small_results_are_read_without_a_command() -> None:
    """Of each worker that copies them, and large ones or a copy with one."""
    with MeshExecutor(MESH) as executor:
        build = Building(MESH)
        x, y = build.input(whole((2, 3))), build.input(each(MESH, (4, 2)))
        build.output(build.call("aten.t.default", x), whole((3, 2)))
        build.output(build.call("aten.add.Tensor", x, 1), whole((2, 3)))
        build.output(build.call("aten.repeat.default", x, [500, 1]), whole((1000, 3)))
        build.output(build.call("aten.add.Tensor", y, 1), each(MESH, (4, 2)))
        build.output(build.call("aten.sum.default", x), whole(()))
        plan = build.plan()
        given, rows = torch.arange(6.0).view(2, 3), torch.arange(8.0).view(4, 2)

        def fetches(at: int, worker: int, expected: torch.Tensor) -> int:
            executor.trace_start()
            (found,) = executor.shards(executor.run(plan, [given, rows])[at], [worker])
            trace = executor.trace_stop()
            assert found.is_contiguous() and torch.equal(found, expected)
            assert [command.kind for command in trace.commands].count("fetch") == 1
            return sum(each.kind == "fetch" for each in trace.handled)

        assert fetches(0, 0, given.t()) == fetches(1, 0, given + 1) == fetches(4, 0, given.sum()) == 0
        assert fetches(0, 1, given.t()) > 0
        assert fetches(2, 0, given.repeat(500, 1)) > 0
        assert fetches(3, 0, rows[:1] + 1) == fetches(3, 3, rows[3:] + 1) == 0


@pytest.mark.sample()
@pytest.mark.parametrize(
    "type_",
    [
        TensorType(torch.float32, (6,), Layout((("a",),))),
        TensorType(torch.int64, (2, 6), Layout(((), ("b", "a")))),
        TensorType(torch.float32, (), Layout((), (("a", "sum"),))),
        TensorType(torch.float64, (3,), Layout(((),), (("a", "sum"), ("b", "sum")))),
        TensorType(torch.float32, (4, 3), Layout((("b",), ()), (("a", "max"),))),
        TensorType(torch.bfloat16, (5,), Layout(((),), (), ("a",))),
    ],
    ids=str,
)
def test_small_results_are_the_same_by_memory_and_by_command(type_: TensorType) -> None:
    with MeshExecutor(MESH) as executor:
        build = Building(MESH)
        x = build.input(type_)
        build.output(build.call("aten.mul.Tensor", x, build.input(TensorType(type_.dtype, ()), "scalar", "k")), type_)
        plan, workers = build.plan(), holders(type_, MESH)
        given = torch.testing.make_tensor(type_.shape, dtype=type_.dtype, device="cpu", low=-9, high=9)
        handle = executor.put(given, type_)
        (out,) = executor.run(plan, [handle, 3])
        executor.trace_start()
        at_once = executor.shards(out, workers)
        trace = executor.trace_stop()
        assert not any(each.kind == "fetch" for each in trace.handled)
        for _ in range(RESULTS_BYTES // 16):
            executor.run(plan, [handle, 5])
        executor.trace_start()
        later = executor.shards(out, workers)
        trace = executor.trace_stop()
        assert any(each.kind == "fetch" for each in trace.handled)
        assert len(at_once) == len(later) == len(workers)
        for first, second in zip(at_once, later, strict=True):
            assert first.dtype == second.dtype and torch.equal(first, second)
        if not type_.layout.varying:
            blocks = [torch.empty(0)] * MESH.workers
            for rank, block in zip(workers, at_once, strict=True):
                blocks[rank] = block
            assert torch.equal(whole_of(blocks, type_, MESH), given * 3)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
def test_small_results_of_every_dtype(executor: MeshExecutor, dtype: torch.dtype) -> None:
    for tensor in (torch.tensor(3).to(dtype), torch.arange(6).to(dtype).view(2, 3), torch.zeros(0, 2, dtype=dtype)):
        type_ = TensorType(dtype, tuple(tensor.shape))
        build = Building(MESH)
        x = build.input(type_)
        build.output(build.call("aten.clone.default", x), type_)
        build.output(build.call("aten.clone.default", x), type_)
        for out in executor.run(build.plan(), [tensor]):
            (found,) = executor.shards(out, [0])
            assert found.dtype == dtype and torch.equal(found, tensor)
            found.fill_(1)  # it is the reader's own
            assert torch.equal(executor.shards(out, [0])[0], tensor)


def test_results_that_pytorch_holds_conjugated(executor: MeshExecutor) -> None:
    type_, given = TensorType(torch.complex64, (2,)), torch.tensor([1 + 2j, 3 - 4j])
    build = Building(MESH)
    build.output(build.call("aten._conj.default", build.input(type_)), type_)
    (out,) = executor.run(build.plan(), [given])
    for worker in (0, 1):
        assert torch.equal(executor.shards(out, [worker])[0], given.conj().resolve_conj())


def test_small_results_last_as_long_as_their_handles(executor: MeshExecutor) -> None:
    type_ = whole((5,))
    plan = add_one(MESH, type_).plan()
    handle = executor.put(torch.zeros(5), type_)
    most, outs = RESULTS_BYTES // 32, []
    for _ in range(most + 50):
        (handle,) = executor.run(plan, [handle])
        outs.append(handle)
    for at in (0, 49, 50, most - 1, most + 49, 1):
        (found,) = executor.shards(outs[at], [0])
        assert torch.equal(found, torch.full((5,), at + 1.0))


def test_a_small_result_that_is_not_what_its_type_says(executor: MeshExecutor) -> None:
    build = Building(MESH)
    build.output(build.call("aten.repeat.default", build.input(whole((2,))), [2]), whole((2,)))
    (out,) = executor.run(build.plan(), [torch.tensor([1.0, 2.0])])
    assert executor.shards(out, [0])[0].tolist() == [1, 2, 1, 2]


def test_small_results_of_steps_that_fail_and_those_that_are_donated(executor: MeshExecutor) -> None:
    build = Building(MESH, "look_up")
    x, at = build.input(whole((3,))), build.input(whole((1,), torch.int64))
    build.output(build.call("aten.index_select.default", x, 0, at), whole((1,)))
    look_up, given = build.plan(), torch.tensor([5.0, 6.0, 7.0])
    (wrong,) = executor.run(look_up, [given, torch.tensor([3])])
    (right,) = executor.run(look_up, [given, torch.tensor([2])])
    assert executor.shards(right, [0])[0].tolist() == [7]
    with pytest.raises(DeviceMeshError, match="index out of range"):
        executor.shards(wrong, [0])

    build = Building(MESH, "replace")
    state = build.input(whole((1,)), "state", "x", donate=True)
    build.call("commit")
    build.output(build.call("aten.add_.Tensor", state, 1), whole((1,)), "state", "x")
    (new,) = executor.run(build.plan(), [right])
    with pytest.raises(DeviceMeshError, match="another step has replaced a value that it needs"):
        executor.shards(right, [0])
    assert executor.shards(new, [0])[0].tolist() == [8]


def test_a_plan_is_dropped_with_the_last_object_that_stands_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with MeshExecutor(MeshSpec.of(w=2)) as executor:
        give, given = executor.connection.command, []

        def command(step: Any, *args: Any, **kwargs: Any) -> None:
            given.append(step.name)
            give(step, *args, **kwargs)

        monkeypatch.setattr(executor.connection, "command", command)
        type_ = whole((3,))
        first, same = add_one(executor.mesh, type_).plan(), add_one(executor.mesh, type_).plan()
        executor.run(first, [torch.zeros(3)])
        executor.run(same, [torch.zeros(3)])
        assert given.count("load") == 1
        del first
        executor.held_values()
        assert "unload" not in given
        del same
        executor.held_values()
        assert given.count("unload") == 1
        plan = add_one(executor.mesh, type_).plan()
        assert executor.shards(executor.run(plan, [torch.zeros(3)])[0], [0])[0].tolist() == [1, 1, 1]


def test_donated_states_are_replaced_in_place() -> None:
    with MeshExecutor(MeshSpec.of(w=2)) as executor:
        type_ = each(executor.mesh, (2, 1000))
        build = Building(executor.mesh, "step")
        w = build.input(type_, "state", "w", donate=True)
        total = build.call("getitem", build.call("all_reduce", [w], ["w"], "sum"), 0)
        build.call("commit", into=None)
        build.output(build.call("aten.add_.Tensor", w, total, free=[total]), type_, "state", "w")
        plan = build.plan()
        value = torch.randn(2, 1000)
        state = executor.put(value, type_)
        for _ in range(3):
            old = state
            (state,) = executor.run(plan, [old])
            value = value + (value[0] + value[1])
            with pytest.raises(MonarchError, match="state 'w' of plan 'step' was donated to step .* which replaces it"):
                executor.run(plan, [old])
        assert torch.equal(torch.cat(executor.shards(state)), value)
        del old
        assert executor.held_values() == [1, 1]


def test_several_threads_may_call(executor: MeshExecutor) -> None:
    type_ = whole((50, 50))
    plan = add_one(MESH, type_).plan()
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            handle = executor.put(torch.full((50, 50), float(number)), type_)
            for at in range(60):
                (handle,) = executor.run(plan, [handle])
                if at % 7 == 0:
                    assert executor.shards(handle, [at % 4])[0][0, 0] == number + at + 1
                elif at % 5 == 0:
                    executor.wait(handle)
            assert executor.shards(handle, [1])[0][3, 3] == number + 60
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(100 * number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures and not any(thread.is_alive() for thread in threads)


def test_two_meshes_at_once_and_one_after_another() -> None:
    specs = [MeshSpec.of(w=1), MeshSpec.of(w=3), MeshSpec(())]
    executors = [start_local(spec) for spec in specs]
    type_ = whole((2, 2))
    for executor in executors:
        (out,) = executor.run(add_one(executor.mesh, type_).plan(), [torch.zeros(2, 2)])
        assert all(torch.equal(shard, torch.ones(2, 2)) for shard in executor.shards(out))
        assert len(executor.shards(out)) == executor.mesh.workers
        with pytest.raises(MonarchError, match="is not on this mesh"):
            executors[executor is executors[0]].shards(out)
    executors[0].close()
    (out,) = executors[1].run(add_one(specs[1], type_).plan(), [torch.ones(2, 2)])
    assert executors[1].shards(out, [2])[0][0, 0] == 2
    again = start_local(specs[0])
    (out,) = again.run(add_one(specs[0], type_).plan(), [torch.ones(2, 2)])
    assert again.shards(out)[0][1, 1] == 2
    for executor in (*executors, again):
        executor.close()
        executor.close()
    with pytest.raises(MonarchError, match="the mesh mesh<w=1> is closed"):
        again.shards(out)


def test_parallel_work_before_the_fork_and_after(executor: MeshExecutor) -> None:
    """OpenMP's threads do not survive a fork; a worker that used the parent's pool would wait for ever."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        big = torch.randn(600, 600)
        want = big @ big
        mesh = MeshSpec.of(w=1)  # with two cores the one worker has two threads
        with MeshExecutor(mesh) as other:
            build = Building(mesh)
            x = build.input(whole((600, 600)))
            y = build.call("aten.mm.default", x, x)
            build.output(build.call("aten.exp.default", build.call("aten.mul.Tensor", y, 1e-3)), whole((600, 600)))
            (out,) = other.run(build.plan(), [big])
            assert torch.allclose(other.shards(out)[0], (want * 1e-3).exp(), atol=1e-3)
    finally:
        torch.set_num_threads(threads)


def test_ops_registered_after_the_first_mesh(executor: MeshExecutor) -> None:
    with torch.library._scoped_library("monarch_test", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda x: x * 2, "CPU")
        mesh = MeshSpec.of(w=2)
        with MeshExecutor(mesh) as other:
            build = Building(mesh)
            build.output(build.call("monarch_test.twice.default", build.input(whole((2,)))), whole((2,)))
            (out,) = other.run(build.plan(), [torch.ones(2)])
            assert other.shards(out)[1].tolist() == [2, 2]


def test_what_is_refused_at_once(executor: MeshExecutor) -> None:
    type_ = whole((3,))
    build = add_one(MESH, type_)
    plan = build.plan()
    handle = executor.put(torch.zeros(3), type_)
    with pytest.raises(MonarchError, match="plan 'add_one' takes 1 arguments, and 2 were given"):
        executor.run(plan, [handle, handle])
    with pytest.raises(
        MonarchError, match=r"input 0 of plan 'add_one' is f32\[3\], and a handle of f32\[4\] was given"
    ):
        executor.run(plan, [executor.put(torch.zeros(4), whole((4,)))])
    with pytest.raises(MonarchError, match=r"input 0 of plan 'add_one' is f32\[3\], and a str was given"):
        executor.run(plan, ["x"])  # type: ignore[list-item]
    with pytest.raises(LayoutError, match=r"argument 0 of plan 'add_one' is i64\[3\], and f32\[3\] is to be placed"):
        executor.run(plan, [torch.zeros(3, dtype=torch.int64)])
    with pytest.raises(LayoutError, match="unknown mesh dim 'c' in the layout of the tensor"):
        executor.put(torch.zeros(3), TensorType(torch.float32, (3,), Layout((("c",),))))
    with pytest.raises(MonarchError, match="no worker 4: the mesh mesh<a=2, b=2> has workers 0 to 3"):
        executor.shards(handle, [4])
    with pytest.raises(MonarchError, match="plan 'add_one' is for mesh<w=2>, and this mesh is mesh<a=2, b=2>"):
        executor.run(add_one(MeshSpec.of(w=2), type_).plan(), [handle])
    unknown = Building(MESH, "unknown")
    unknown.output(unknown.call("aten.no_such_op.default", unknown.input(type_)), type_)
    with pytest.raises(PlanError, match="the plan calls 'aten.no_such_op.default', which the workers do not know"):
        executor.run(unknown.plan(), [handle])
    assert executor.shards(handle, [0])[0].tolist() == [0, 0, 0]  # none of it did any harm


def test_commands_are_logged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("MONARCH_LOG", "plan,commands")
    with MeshExecutor(MeshSpec.of(w=2)) as executor:
        (out,) = executor.run(add_one(executor.mesh, whole((3,))).plan(), [torch.zeros(3)])
        executor.shards(out, [1])
    said = capsys.readouterr().err
    assert "load add_one" in said and "put 1 f32[3]" in said and "run add_one (1) -> 2" in said and "from [1]" in said


def test_sources_travel_with_the_plan(executor: MeshExecutor) -> None:
    build = Building(MESH)
    x = build.input(whole((3,)))
    build.output(build.call("aten.view.default", x, [5], source=Source("model.py", 7)), whole((5,)))
    (out,) = executor.run(build.plan(), [torch.zeros(3)])
    with pytest.raises(MonarchError, match=r"^model.py:7: error: worker a=0, b=0 failed in aten.view.default"):
        executor.wait(out)


def test_an_interrupt_before_a_command_is_given_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with MeshExecutor(MeshSpec.of(w=2)) as executor:
        type_ = whole((3,))
        handle = executor.put(torch.ones(3), type_)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(executor.connection, "try_to_give", interrupt)
            with pytest.raises(KeyboardInterrupt):
                executor.put(torch.zeros(3), type_)
        assert torch.equal(executor.shards(handle)[0], torch.ones(3)) and executor.held_values() == [1, 1]


def test_an_interrupt_behind_a_command_leaves_a_step_that_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    """What follows from it (here: that its results are bound) is done by the next call."""
    with MeshExecutor(MeshSpec.of(w=2)) as executor:
        build = Building(executor.mesh)
        x = build.input(whole((3,)), "state", "x", donate=True)
        build.output(build.call("aten.add.Tensor", x, 1.0), whole((3,)), "state", "x")
        plan = build.plan()
        state: list[Handle] = [executor.put(torch.zeros(3), whole((3,)))]

        def bind(handles: list[Handle]) -> None:
            state[:] = handles

        executor.run(plan, [state[0]], bind)

        def interrupt(*_: object) -> None:
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(executor.connection, "taken", interrupt)
            with pytest.raises(KeyboardInterrupt):
                executor.run(plan, [state[0]], bind)
        executor.settle()
        assert torch.equal(executor.shards(state[0])[0], torch.full((3,), 2.0))
        executor.run(plan, [state[0]], bind)
        assert torch.equal(executor.shards(state[0])[0], torch.full((3,), 3.0))


def test_the_memory_of_an_idle_mesh_is_known(executor: MeshExecutor) -> None:
    """Also of workers on other hosts, which are asked, and answer later."""
    end = time.monotonic() + 60
    while len(memory := executor.look()[1]) < 4 and time.monotonic() < end:
        os.sched_yield()
    assert list(memory) == [0, 1, 2, 3] and min(memory.values()) > 1 << 20
