"""How workers start and end: killed workers, a killed controller, Ctrl-C, exits, exceptions. Real processes, real
signals; every wait is for an event (a process ends, a pipe closes) with a bound on it."""

from __future__ import annotations

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch

from monarch.compiler.config import settings
from monarch.compiler.execution.executor import Handle
from monarch.compiler.plan import DeviceMeshError, MeshSpec, MonarchError
from monarch.runtime.controller.executor import MeshExecutor, start_local
from monarch.runtime.processes import parent as processes
from monarch.runtime.processes import workers
from monarch.runtime.processes.workers import WORKERS_PER_CORE, Workers
from monarch.runtime.shared import memory
from monarch.testing import chaos
from tests import python
from tests.runtime.building import Building, each, whole

ROOT = Path(__file__).resolve().parents[3]
BOUND = 30.0


def ended(pid: int) -> bool:
    """Wait until a process (of anyone's) has ended."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(BOUND * 1000))
    finally:
        os.close(fd)


def all_reduces(executor: MeshExecutor, count: int) -> Handle:
    """Start a long step and give its handle."""
    build = Building(executor.mesh)
    x = build.input(each(executor.mesh, (executor.mesh.workers, 1000)))
    for _ in range(count):
        x = build.call("getitem", build.call("all_reduce", [x], list(executor.mesh.names), "max"), 0)
    build.output(x, whole((1, 1000)))
    return executor.run(build.plan(), [torch.ones(executor.mesh.workers, 1000)])[0]


def keep_busy(executor: MeshExecutor, calls: int = 3000) -> Handle:
    """Start more work than any test lasts, and give a handle of its end: many steps of so many collectives each."""
    build = Building(executor.mesh)
    x = build.input(each(executor.mesh, (executor.mesh.workers, 1000)))
    for _ in range(calls):
        x = build.call("getitem", build.call("all_reduce", [x], list(executor.mesh.names), "max"), 0, free=[x])
    build.output(x, start_type := each(executor.mesh, (executor.mesh.workers, 1000)))
    plan, handle = build.plan(), executor.put(torch.ones(executor.mesh.workers, 1000), start_type)
    for _ in range(settings.steps_ahead // 2):
        (handle,) = executor.run(plan, [handle])
    return handle


@pytest.mark.sample(1)
@pytest.mark.parametrize("workers", [2, 6])
def test_a_killed_worker_fails_everything_and_hangs_nothing(workers: int) -> None:
    mesh = MeshSpec.of(data=workers)
    with MeshExecutor(mesh) as executor:
        pids = executor.worker_pids()
        done = all_reduces(executor, 1)
        executor.wait(done)
        under_way = [keep_busy(executor), all_reduces(executor, 2)]
        os.kill(pids[1], signal.SIGKILL)
        for handle in under_way:
            for ask in (executor.wait, executor.shards, executor.recover):
                with pytest.raises(DeviceMeshError, match="has lost a worker: worker data=1 was killed by SIGKILL"):
                    ask(handle)
        executor.wait(done)  # as all others have done it
        with pytest.raises(DeviceMeshError, match="was killed by SIGKILL"):
            executor.put(torch.zeros(2), whole((2,)))
    assert all(ended(pid) for pid in pids)


def test_a_worker_killed_while_nothing_goes_on() -> None:
    with MeshExecutor(MeshSpec.of(data=2)) as executor:
        pids = executor.worker_pids()
        os.kill(pids[0], signal.SIGTERM)
        assert ended(pids[0])
        with pytest.raises(DeviceMeshError, match="worker data=0 was killed by SIGTERM"):
            executor.wait(all_reduces(executor, 1))
        os.kill(pids[1], 0)  # the other one is there until the mesh is closed
    assert ended(pids[1])


def test_a_warm_parent_that_dies_before_it_says_whose_death_it_noticed() -> None:
    with MeshExecutor(MeshSpec.of(data=2)) as executor:
        busy = keep_busy(executor)
        executor.connection.workers.mark_dead(1)
        os.kill(processes.warm_parent().pid, signal.SIGKILL)
        with pytest.raises(DeviceMeshError, match="mesh<data=2> has lost its workers"):
            executor.wait(busy)


def test_the_warm_parent_is_killed_and_the_next_mesh_has_a_new_one() -> None:
    executor = MeshExecutor(MeshSpec.of(data=2))
    pids = executor.worker_pids()
    long = keep_busy(executor)
    os.kill(processes.warm_parent().pid, signal.SIGKILL)
    with pytest.raises(DeviceMeshError, match="has lost"):
        executor.wait(long)
    assert all(ended(pid) for pid in pids)
    executor.close()
    with MeshExecutor(MeshSpec.of(data=2)) as again:
        again.wait(all_reduces(again, 1))


def test_a_warm_parent_that_was_killed_while_no_mesh_was_there_is_replaced() -> None:
    MeshExecutor(MeshSpec.of(data=2)).close()
    warm = processes.warm_parent()
    os.kill(warm.pid, signal.SIGKILL)
    os.waitid(os.P_PID, warm.pid, os.WEXITED | os.WNOWAIT)
    with MeshExecutor(MeshSpec.of(data=2)) as again:
        again.wait(all_reduces(again, 1))


def test_a_warm_parent_that_ends_while_it_is_asked_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    warm = processes.WarmParent()
    os.kill(warm.pid, signal.SIGKILL)
    os.waitid(os.P_PID, warm.pid, os.WEXITED | os.WNOWAIT)
    monkeypatch.setattr(workers, "warm_parent", lambda: warm)
    with pytest.raises(MonarchError, match="cannot start 2 workers: the process that forks them has ended meanwhile"):
        MeshExecutor(MeshSpec.of(data=2))
    warm.close()


def test_close_ends_the_workers_also_in_the_middle_of_a_step() -> None:
    executor = MeshExecutor(MeshSpec.of(data=3))
    pids = executor.worker_pids()
    long = keep_busy(executor)
    failed: list[BaseException] = []

    def wait() -> None:
        try:
            executor.wait(long)
        except MonarchError as error:
            failed.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    executor.close()
    waiter.join(BOUND)
    assert not waiter.is_alive()
    assert "is closed" in str(failed[0])
    assert all(ended(pid) for pid in pids)


def test_a_dropped_executor_ends_its_workers() -> None:
    executor = MeshExecutor(MeshSpec.of(data=2))
    pids = executor.worker_pids()
    del executor
    assert all(ended(pid) for pid in pids)


def mappings() -> int:
    return Path("/proc/self/maps").read_text().count("monarch-mesh")


def open_files() -> list[str]:
    links = []
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            links.append(os.readlink(entry))
    return sorted(link for link in links if not link.startswith("/proc"))


def test_memory_and_files_come_back_when_a_mesh_closes() -> None:
    MeshExecutor(MeshSpec.of(data=2)).close()  # the warm parent stays
    gc.collect()  # what failures in other tests have left
    mapped, files = mappings(), open_files()
    executor = MeshExecutor(MeshSpec.of(data=2))
    tensor = torch.zeros(4 << 20)
    executor.wait(executor.put(tensor, whole(tensor.shape)))
    assert mappings() == mapped + 1 and len(open_files()) == len(files) + 3
    executor.close()
    del executor
    assert mappings() == mapped and open_files() == files


def test_what_the_warm_parent_says_outlasts_an_interrupt_at_any_point(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or else whoever asks for a process's id, or waits to hear who has died, would wait for ever."""
    warm, (ours, theirs) = processes.WarmParent(), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        pool = Workers(MeshSpec.of(data=2), processes=warm)
        while len(pool.pids) < 2:
            assert pool.exits(BOUND) == []
        monkeypatch.setattr(warm, "channel", ours)
        for at in count():
            pool.pids.clear()
            pool.reported.clear()
            for said in ({"is": "started", "pid": at}, {"is": "exited", "status": 3}):
                theirs.send(json.dumps({"mesh": 0, "rank": 1, **said}).encode())
            with suppress(KeyboardInterrupt), chaos.interrupt(at) as points:
                pool.exits()
            assert [exit.status for exit in pool.exits()] == [3] and pool.pids == {1: at}, points.where
            if points.where is None:
                break
        assert at > 20
    finally:
        monkeypatch.undo()
        warm.close()
        ours.close()
        theirs.close()


# -- programs of their own -------------------------------------------------------------------------------------------

PROGRAM = """
    import os, signal, sys, time
    import torch
    from monarch.compiler.plan import MeshSpec
    from monarch.runtime.controller.executor import MeshExecutor
    from tests.runtime.processes.test_processes import all_reduces, keep_busy
    torch.randn(300, 300) @ torch.randn(300, 300)
    executor = MeshExecutor(MeshSpec.of(data=3))
    pids = executor.worker_pids()
    from monarch.runtime.processes.parent import warm_parent
    print(*pids, warm_parent().pid, flush=True)
"""


def program(rest: str) -> tuple[subprocess.Popen[str], list[int]]:
    """Run a program that starts a mesh of three; gives it, and the processes that belong to it."""
    source = textwrap.dedent(PROGRAM) + textwrap.dedent(rest)
    env = {**os.environ, "PYTHONPATH": f"{ROOT / '.src'}:{ROOT}"}
    process = python.Popen(
        "-c",
        source,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=ROOT,
        start_new_session=True,
    )
    return process, [int(pid) for pid in next_line(process).split()]


def next_line(process: subprocess.Popen[str]) -> str:
    """What a process prints next, and no byte more: what `readline` has read ahead, `communicate` does not find."""
    assert process.stdout is not None
    line = b""
    while not line.endswith(b"\n") and (byte := os.read(process.stdout.fileno(), 1)):
        line += byte
    return line.decode()


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "rest, status, said",
    [
        ("", 0, ""),
        ("raise ValueError('mine')", 1, "ValueError: mine"),
        ("sys.exit(3)", 3, ""),
        ("keep_busy(executor)", 0, ""),
        ("executor.close(); executor.close()", 0, ""),
        ("kept = executor.put(torch.zeros(3), all_reduces(executor, 1).type.__class__(torch.float32, (3,)))", 0, ""),
    ],
    ids=["end", "exception", "exit", "busy", "closed", "handles alive"],
)
def test_nothing_is_left_when_the_program_ends(rest: str, status: int, said: str) -> None:
    process, pids = program(rest)
    out, err = process.communicate(timeout=BOUND)
    assert process.returncode == status, err
    assert said in err and (said or not err)
    assert len(pids) == 4 and all(ended(pid) for pid in pids)


@pytest.mark.sample(2)
@pytest.mark.parametrize("busy", ["", "long = keep_busy(executor); "], ids=["idle", "busy"])
@pytest.mark.parametrize("signal_", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_nothing_is_left_when_the_controller_is_killed(busy: str, signal_: signal.Signals) -> None:
    process, pids = program(busy + "print('on', flush=True); time.sleep(1000)")
    assert next_line(process) == "on\n"
    process.send_signal(signal_)
    assert all(ended(pid) for pid in pids)
    process.communicate(timeout=BOUND)


def test_nothing_is_left_when_a_child_of_the_controller_outlives_it() -> None:
    """The child holds copies of the sockets, so that their ends are no sign of the controller's."""
    process, pids = program("""
        child = os.fork()
        if child == 0:
            time.sleep(1000)
        print(child, flush=True)
        time.sleep(1000)
    """)
    child = int(next_line(process))
    try:
        process.kill()
        assert all(ended(pid) for pid in pids)
        os.kill(child, 0)
    finally:
        os.kill(child, signal.SIGKILL)
        process.communicate(timeout=BOUND)


def test_ctrl_c_is_the_controllers_alone() -> None:
    """The terminal sends SIGINT to the whole process group; the wait ends, and the mesh can still be used."""
    process, pids = program("""
        long = all_reduces(executor, 500)
        try:
            print('on', flush=True)
            executor.wait(long)
            time.sleep(1000)
        except KeyboardInterrupt:
            pass
        executor.wait(long)
        print(executor.shards(all_reduces(executor, 1))[0][0, 0].item(), flush=True)
    """)
    assert next_line(process) == "on\n"
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=BOUND)
    assert out == "1.0\n", err
    assert process.returncode == 0, err
    assert all(ended(pid) for pid in pids)


def test_a_forked_child_of_the_controller_leaves_the_mesh_alone() -> None:
    process, pids = program("""
        from monarch.compiler.plan import MonarchError
        child = os.fork()
        if child == 0:
            try:
                all_reduces(executor, 1)
            except MonarchError as error:
                print(error.message, flush=True)
            with MeshExecutor(MeshSpec.of(data=2)) as own:
                own.wait(all_reduces(own, 1))
            sys.exit(0)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        executor.wait(all_reduces(executor, 1))
        print('fine', flush=True)
    """)
    out, err = process.communicate(timeout=BOUND)
    assert out.splitlines() == ["the mesh mesh<data=3> is of the process that this one was forked from", "0", "fine"], (
        err
    )
    assert all(ended(pid) for pid in pids)


def test_workers_keep_no_file_of_the_controllers_open() -> None:
    process, pids = program("""
        import fcntl, resource
        read, write = os.pipe()
        above = fcntl.fcntl(write, fcntl.F_DUPFD, 500)
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, 400))
        from monarch.runtime.processes import parent as processes
        processes._all.clear()  # a new warm parent, forked while the pipe is open
        other = MeshExecutor(MeshSpec.of(data=2))
        other.wait(all_reduces(other, 1))
        os.close(write)
        os.close(above)
        print(os.read(read, 1) == b'', flush=True)
        processes.warm_parent().close()
    """)
    out, err = process.communicate(timeout=BOUND)
    assert out == "True\n", err


def test_a_fresh_interpreter_where_forking_is_out_of_the_question(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "can_fork", lambda: False)
    warm = processes.WarmParent()
    try:
        monkeypatch.setattr(workers, "warm_parent", lambda: warm)
        with MeshExecutor(MeshSpec.of(data=2)) as executor:
            pids = executor.worker_pids()
            executor.wait(all_reduces(executor, 3))
        assert all(ended(pid) for pid in pids)
    finally:
        warm.close()
    assert ended(warm.pid)


def test_a_short_lived_thread_may_make_a_mesh() -> None:
    """The kernel's parent-death signal goes by threads: the end of the one that forked must not end the workers."""
    process, pids = program("""
        import threading
        from monarch.runtime.processes import parent as processes
        processes.warm_parent().close()
        processes._all.clear()
        made = []
        thread = threading.Thread(target=lambda: made.append(MeshExecutor(MeshSpec.of(data=2))))
        thread.start()
        thread.join()
        for _ in range(3):
            made[0].wait(all_reduces(made[0], 100))
        print('fine', flush=True)
    """)
    out, err = process.communicate(timeout=BOUND)
    assert out == "fine\n", err


# -- too much --------------------------------------------------------------------------------------------------------


def test_more_workers_than_is_sane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch.runtime.shared.signals.cores", lambda: 2)
    with pytest.raises(MonarchError) as info:
        start_local(MeshSpec.of(data=43, model=3))
    text = str(info.value)
    assert f"mesh<data=43, model=3> has 129 workers, and this machine runs 1 to {2 * WORKERS_PER_CORE}" in text
    assert "2 cores, and at most 64 workers a core" in text and "make it abstract" in text


def test_too_little_memory_for_the_workers_or_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    with MeshExecutor(MeshSpec.of(data=2)) as executor:
        small = executor.put(torch.zeros(6 << 20), whole((6 << 20,)))
        executor.wait(small)
        monkeypatch.setattr(memory, "available_bytes", lambda: 20 << 20)
        with pytest.raises(MonarchError) as info:
            executor.put(torch.zeros(6 << 20), whole((6 << 20,)))
        text = str(info.value)
        assert "not enough memory for f32[6291456] on 2 workers: it takes 48.0 MiB, and 20.0 MiB are available" in text
        assert "/dev/shm is not used" in text
        with pytest.raises(MonarchError, match=r"fetching f32\[6291456\] from 1 workers: it takes 24.0 MiB"):
            executor.shards(small, [0])
        with pytest.raises(
            MonarchError, match="not enough memory for 8 workers: it takes .* and 20.0 MiB are available"
        ):
            start_local(MeshSpec.of(data=8))
        monkeypatch.undo()
        assert executor.shards(small, [0])[0].numel() == 6 << 20


def test_many_workers_on_few_cores() -> None:
    with MeshExecutor(MeshSpec.of(w=24)) as executor:
        handle = all_reduces(executor, 5)
        assert all(bool((shard == 1).all()) for shard in executor.shards(handle, [0, 17, 23]))


def test_processes_can_fork_and_compute_where_libraries_have_threads() -> None:
    """gRPC's handlers at a fork start its threads anew in the child, if it was loaded before they were switched off,
    and a fresh interpreter has OpenBLAS's. Neither are in what actors' processes are forked from."""
    code = textwrap.dedent("""
        import os
        import grpc
        import numpy
        import monarch
        from monarch.actor import this_host

        @monarch.remote
        def compute():
            matrix = numpy.ones((600, 600))
            product = matrix @ matrix
            child = os.fork()
            if child == 0:
                os._exit(7)
            return float(product.sum()), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

        channel = grpc.insecure_channel("127.0.0.1:1")
        with this_host().spawn_procs().activate():
            print(compute.call_one().get())
    """)
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=2 * BOUND, check=False, env=environment
    )
    assert (done.returncode, done.stdout) == (0, f"({600.0**3}, 7)\n"), done.stderr
