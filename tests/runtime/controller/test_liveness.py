"""A mesh that does not come further is reported, with who has not arrived; it is lost where a worker stays stopped."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import monarch
import monarch.config
from monarch.compiler.plan import DeviceMeshError, MeshSpec, TensorType
from monarch.runtime.controller import liveness
from monarch.runtime.controller.executor import MeshExecutor, start_local
from monarch.runtime.controller.liveness import TICK_SECONDS, Stall, behind, report
from monarch.runtime.controller.state import ControllerState
from monarch.runtime.controller.steps import Step
from monarch.runtime.processes.looking import WorkerProgress
from tests.runtime.actors.agents import TOKEN, hosts_here
from tests.runtime.building import Building, each
from tests.runtime.processes.test_processes import all_reduces, keep_busy

BOUND = 30.0


class Said:
    """What is reported, in any thread."""

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        self.text = ""

    def write(self, text: str) -> None:
        os.write(self._in, text.encode())

    def until(self, wanted: str) -> str:
        while wanted not in self.text:
            ready, _, _ = select.select([self._out], [], [], BOUND)
            assert ready, f"{wanted!r} was not said, but {self.text!r}"
            self.text += os.read(self._out, 1 << 16).decode()
        return self.text


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Said:
    found = Said()
    monkeypatch.setattr(liveness, "say", found.write)
    return found


@pytest.fixture
def soon() -> Iterator[None]:
    with monarch.config.configured(stall_warning="100ms", stopped_worker_timeout="365d"):
        yield


# -- the decision ------------------------------------------------------------------------------------------------------


def test_a_stall_is_reported_once_until_something_changes() -> None:
    stall = Stall(0.0)
    looks = [(at / 2, (1, 2), True) for at in range(30)]
    assert [now for now, marks, busy in looks if stall.look(now, marks, busy, 5.0)] == [5.0]
    assert not stall.look(15.0, (1, 3), True, 5.0)
    assert [at / 2 for at in range(31, 50) if stall.look(at / 2, (1, 3), True, 5.0)] == [20.0]


def test_a_mesh_without_work_does_not_stall() -> None:
    stall = Stall(0.0)
    assert not any(stall.look(at / 2, (1, 2), False, 5.0) for at in range(100))


def test_time_in_which_the_program_did_not_run_does_not_count() -> None:
    stall = Stall(0.0)
    assert not stall.look(TICK_SECONDS, (1,), True, 5.0)
    assert not stall.look(1000.0, (1,), True, 5.0)  # Ctrl-Z, say
    assert not stall.look(1001.0, (1,), True, 5.0)


def test_those_behind_have_not_arrived() -> None:
    step = 7 << 24
    seen = {
        0: WorkerProgress(10, 7, step | 6, "S", "thread 'worker 0': in all_reduce (train.py:12)\n"),
        1: WorkerProgress(11, 7, step | 4, "T", ""),
        2: WorkerProgress(12, 7, step | 6, "S", "thread 'worker 2': in all_reduce (train.py:12)\n"),
        3: WorkerProgress(13, 7, step | 4, "R", "thread 'worker 3': in aten.mm (train.py:11)\n  File ..."),
    }
    assert behind(seen) == [1, 3]
    made = Step("train")
    made.sequence = 7
    assert report(ControllerState(MeshSpec.of(data=4)), made, seen, 60.4) == (
        "monarch: step 7 ('train') on mesh<data=4> has made no progress for 60 s.\n"
        "  worker data=1 (process 11) has not arrived: a signal has stopped it (SIGSTOP, say); "
        "kill -CONT 11 resumes it\n"
        "  worker data=3 (process 13) has not arrived: it is in aten.mm (train.py:11)\n"
        "    thread 'worker 3': in aten.mm (train.py:11)\n"
        "      File ...\n"
        "  worker data=0 waits in all_reduce (train.py:12)\n"
        "  worker data=2 waits in all_reduce (train.py:12)\n"
    )


# -- processes ---------------------------------------------------------------------------------------------------------


def test_a_stopped_worker_is_named_and_goes_on_where_it_is_continued(soon: None, said: Said) -> None:
    executor = start_local(MeshSpec.of(w=2))
    pid = executor.worker_pids()[1]
    handle = all_reduces(executor, 300)
    os.kill(pid, signal.SIGSTOP)
    more = [all_reduces(executor, 300) for _ in range(3)]
    text = said.until(f"worker w=1 (process {pid}) has not arrived: a signal has stopped it")
    assert "has made no progress" in text and "worker w=0 waits in all_reduce" in said.until("worker w=0 waits")
    os.kill(pid, signal.SIGCONT)
    executor.wait(handle)
    executor.wait(more[-1])
    executor.close()


def test_a_worker_that_stays_stopped_is_the_end_of_the_mesh(said: Said) -> None:
    with monarch.config.configured(stall_warning="100ms", stopped_worker_timeout="100ms"):
        executor = start_local(MeshSpec.of(w=2))
        pid = executor.worker_pids()[1]
        handle = keep_busy(executor)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(DeviceMeshError, match="worker w=1 has been stopped by a signal for"):
            executor.wait(handle)
        executor.close()


def test_a_long_op_is_shown_with_its_stack(soon: None, said: Said) -> None:
    executor = start_local(MeshSpec.of(w=2))
    build, size = Building(executor.mesh), 5000
    x = build.input(each(executor.mesh, (2, size, size)))
    build.output(build.call("aten.bmm.default", x, x), each(executor.mesh, (2, size, size)))
    executor.run(build.plan(), [torch.ones(2, size, size)])
    said.until("has not arrived: it is in aten.bmm")
    said.until("in step")
    executor.close()


def test_a_death_is_told_where_nobody_calls(said: Said) -> None:
    executor = start_local(MeshSpec.of(w=2))
    os.kill(executor.worker_pids()[0], signal.SIGKILL)
    assert "worker w=0 was killed by SIGKILL" in said.until("What uses the mesh next raises this as DeviceMeshError.")
    with pytest.raises(DeviceMeshError, match="SIGKILL"):
        executor.put(torch.ones(2), TensorType(torch.float32, (2,)))
    executor.close()


def test_workers_on_other_hosts_are_looked_at_there(soon: None, said: Said, tmp_path: Path) -> None:
    with hosts_here(2, tmp_path) as two, monarch.hosts(two.addresses, token=TOKEN) as hosts:
        executor = hosts.start(MeshSpec.of(w=2))
        assert isinstance(executor, MeshExecutor)
        pid = executor.worker_pids()[1]
        os.kill(pid, signal.SIGSTOP)
        handle = all_reduces(executor, 300)
        said.until(f"worker w=1 (process {pid}) has not arrived: a signal has stopped it")
        os.kill(pid, signal.SIGCONT)
        executor.wait(handle)
        executor.close()
