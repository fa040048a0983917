"""What a mesh tells to those who have subscribed: its workers' start and end, commands, failures."""

from __future__ import annotations

import gc
import os
import signal

import pytest
import torch

from monarch.compiler.execution.events import Event, Failure, Log, Span, WorkersStatus, heard, running, subscribe
from monarch.compiler.plan import DeviceMeshError, MeshSpec, Plan
from monarch.runtime.controller.executor import MeshExecutor
from tests.runtime.building import Building, whole

MESH = MeshSpec.of(w=2)


def look_up() -> Plan:
    build = Building(MESH, "look_up")
    x, at = build.input(whole((3,))), build.input(whole((1,), torch.int64))
    build.output(build.call("aten.index_select.default", x, 0, at), whole((1,)))
    return build.plan()


def test_starts_commands_failures_and_ends_are_told_in_order() -> None:
    found: list[Event] = []
    stop = subscribe(found.append, WorkersStatus, Span, Failure)
    plan = look_up()
    with MeshExecutor(MESH) as executor:
        handles = [executor.put(torch.ones(3), whole((3,))), executor.put(torch.tensor([3]), whole((1,), torch.int64))]
        (out,) = executor.run(plan, handles)
        with pytest.raises(DeviceMeshError) as raised:
            executor.wait(out)
        assert executor in running()
    stop()
    assert executor not in running()
    first, *spans, failure, wait, last = found
    assert first == WorkersStatus(executor, True) and last == WorkersStatus(executor, False)
    kinds = [(each.kind, each.label) for each in [*spans, wait] if isinstance(each, Span)]
    assert kinds == [("put", "f32[3]"), ("put", "i64[1]"), ("load", "look_up"), ("run", "look_up"), ("wait", "look_up")]
    assert all(
        each.executor is executor and each.start <= each.end for each in [*spans, wait] if isinstance(each, Span)
    )
    assert isinstance(failure, Failure) and failure.mesh == MESH and str(failure.error) == str(raised.value)


def test_a_lost_mesh_is_told_once() -> None:
    found: list[Event] = []
    with MeshExecutor(MESH) as executor:
        stop = subscribe(found.append, WorkersStatus, Failure)
        os.kill(executor.worker_pids()[1], signal.SIGKILL)
        for _ in range(2):
            with pytest.raises(DeviceMeshError, match="was killed by SIGKILL"):
                executor.held_values()
    stop()
    failure, place = found
    assert isinstance(failure, Failure) and "has lost a worker: worker w=1 was killed" in failure.error.message
    assert place == WorkersStatus(executor, False)


def test_commands_are_told_though_nothing_prints_them(capsys: pytest.CaptureFixture[str]) -> None:
    found: list[Log] = []
    with MeshExecutor(MESH) as executor:
        stop = subscribe(found.append, Log)
        handle = executor.put(torch.ones(3), whole((3,)))
        stop()
        executor.wait(handle)
    assert [(log.topic, log.text.partition(": ")[2]) for log in found] == [("commands", "put 1 f32[3]")]
    assert "put" not in capsys.readouterr().err


def test_a_mesh_that_is_dropped_while_it_is_traced_hears_no_more() -> None:
    executor = MeshExecutor(MESH)
    executor.trace_start()
    assert heard(Span)
    del executor
    gc.collect()
    assert not heard(Span)
