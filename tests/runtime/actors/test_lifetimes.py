"""How actors and processes end, who hears of it, and what ends with them. In real processes."""

from __future__ import annotations

import asyncio
import errno
import os
import queue
import select
import signal
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

import monarch.config
from monarch.actor import (
    Actor,
    ActorError,
    ActorMesh,
    Channel,
    MeshFailure,
    Port,
    PortReceiver,
    ProcMesh,
    Shape,
    SupervisionError,
    context,
    endpoint,
    this_host,
    this_proc,
)
from monarch.exceptions import MonarchError
from monarch.runtime.actors.messages.message import Payload
from monarch.runtime.actors.messages.protocol import CALL, SPAWN
from monarch.runtime.actors.processes import current
from monarch.runtime.actors.processes.ports import One
from monarch.runtime.processes.parent import WarmParent, warm_parent
from tests.runtime.actors.conftest import WAIT

Faults = queue.SimpleQueue[MeshFailure]


def say(port: Port[Any], what: str, value: object) -> None:
    port.send((monotonic(), what, value))


def hear(receiver: PortReceiver[Any], count: int) -> list[tuple[str, Any]]:
    """What was said, in the order in which it was, which several processes need not be heard in."""
    said = sorted((receiver.recv().get(WAIT) for _ in range(count)), key=lambda told: told[0])
    return [(what, value) for _, what, value in said]


class Worker(Actor):
    """Tells a port what happens to it."""

    def __init__(self, name: str, port: Port[Any] | None = None) -> None:
        self.name = name
        self.port = port
        if name == "broken":
            raise ValueError("cannot be made")

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def fail(self) -> None:
        raise ValueError("as told")

    @endpoint
    def exit(self) -> None:
        raise SystemExit(3)

    @endpoint
    def die(self, status: int) -> None:
        print("about to die")
        os.write(2, b"without a line's end")
        os._exit(status)

    @endpoint
    def wait(self) -> None:
        threading.Event().wait()

    @endpoint
    def echo(self, value: object) -> object:
        return value

    def __cleanup__(self, exc: Exception | None) -> None:
        if self.port is not None:
            say(self.port, self.name, None if exc is None else str(exc))


class Owner(Actor):
    """Spawns workers, in processes of its own and beside itself, and deals with their failures as it is told to."""

    def __init__(self, port: Port[Any], deal: str) -> None:
        self.port = port
        self.deal = deal
        self.procs = this_host().spawn_procs(per_host={"gpus": 2}, name="owned")
        self.workers = self.procs.spawn("workers", Worker, "worker", port)
        self.beside = this_proc().spawn("beside", Worker, "beside", port)

    @endpoint
    def fail_one(self) -> None:
        self.workers.slice(gpus=1).fail.broadcast()

    @endpoint
    def pids(self) -> list[int]:
        return list(self.workers.pid.call().get(WAIT).values())

    @endpoint
    def fail(self) -> None:
        raise ValueError("the owner")

    @endpoint
    def again(self) -> list[int]:
        self.workers = self.procs.spawn("workers", Worker, "again", self.port)
        return self.pids()

    @endpoint
    def renew(self) -> list[int]:
        self.procs = this_host().spawn_procs(per_host={"gpus": 2}, name="owned")
        return self.again()

    def __supervise__(self, failure: MeshFailure) -> bool:
        say(self.port, "supervise", failure)
        if self.deal == "raise":
            raise RuntimeError("while supervising")
        if self.deal == "exit":
            raise SystemExit(4)
        return self.deal == "deal"

    def __cleanup__(self, exc: Exception | None) -> None:
        say(self.port, "owner", None if exc is None else str(exc))


class AsyncOwner(Actor):
    def __init__(self, port: Port[Any]) -> None:
        self.port = port
        self.beside = this_proc().spawn("beside", Worker, "beside", port)

    @endpoint
    async def fail_one(self) -> None:
        self.beside.fail.broadcast()

    async def __supervise__(self, failure: MeshFailure) -> bool:
        await asyncio.sleep(0)
        say(self.port, "supervise", failure.mesh_name)
        return True

    async def __cleanup__(self, exc: Exception | None) -> None:
        await asyncio.sleep(0)
        say(self.port, "owner", exc)


def spawn(gpus: int = 2, name: str = "procs") -> ProcMesh:
    return this_host().spawn_procs(per_host={"gpus": gpus}, name=name)


def gone(pid: int) -> bool:
    """Whether no process has this number, or only a dead one has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pids: list[int]) -> None:
    """Wait for the end of processes that are not ours to wait for."""
    for pid in pids:
        try:
            descriptor = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        ready, _, _ = select.select([descriptor], [], [], WAIT)
        os.close(descriptor)
        assert ready, f"process {pid} still runs"


def test_a_stopped_mesh_handles_what_was_sent_before_and_nothing_after() -> None:
    port, receiver = Channel[Any].open()
    procs = spawn()
    workers = procs.spawn("workers", Worker, "worker", port)
    before = workers.echo.call(1)
    workers.stop("no longer needed").get(WAIT)
    assert list(before.get(WAIT).values()) == [1, 1]
    assert hear(receiver, 2) == [("worker", None)] * 2
    with pytest.raises(SupervisionError, match="no longer needed"):
        workers.echo.call(1).get(WAIT)
    with pytest.raises(SupervisionError, match="no longer needed"):
        workers.echo.broadcast(1)
    workers.stop().get(WAIT)
    assert len(procs.spawn("others", Worker, "other").pid.call().get(WAIT)) == 2


def test_stopping_processes_ends_their_actors_first() -> None:
    port, receiver = Channel[Any].open()

    async def main() -> list[int]:
        async with spawn() as procs:
            return list((await procs.spawn("workers", Worker, "worker", port).pid.call()).values())

    pids = asyncio.run(main())
    assert hear(receiver, 2) == [("worker", None)] * 2
    assert all(map(gone, pids))


def test_processes_that_were_stopped_take_no_messages() -> None:
    procs = spawn()
    workers = procs.spawn("workers", Worker, "worker")
    workers.initialized.get(WAIT)
    procs.stop().get(WAIT)
    with pytest.raises(SupervisionError, match="stopped"):
        workers.pid.call().get(WAIT)
    with pytest.raises(SupervisionError, match="stopped"):
        workers.pid.broadcast()
    with pytest.raises(SupervisionError, match="stopped"):
        procs.spawn("more", Worker, "more")


def test_a_constructor_that_raises_is_a_failure(faults: Faults) -> None:
    procs = spawn()
    workers = procs.spawn("workers", Worker, "broken")
    with pytest.raises(SupervisionError, match="constructor raised ValueError: cannot be made"):
        workers.pid.call().get(WAIT)
    with pytest.raises(SupervisionError):
        workers.initialized.get(WAIT)
    for _ in range(2):
        failure = faults.get(timeout=WAIT)
        assert failure.mesh_name == "workers" and "cannot be made" in failure.reason
        assert failure.is_of(workers.slice(gpus=0)) and not failure.is_of(procs)


def test_an_exception_that_nobody_is_told_of_ends_the_actor(faults: Faults) -> None:
    port, receiver = Channel[Any].open()
    workers = spawn().spawn("workers", Worker, "worker", port)
    workers.slice(gpus=1).fail.broadcast()
    failure = faults.get(timeout=WAIT)
    assert (failure.mesh_name, failure.rank) == ("workers", 1)
    assert "ValueError: as told" in failure.reason and "in fail" in failure.reason
    assert hear(receiver, 1) == [("worker", "as told")]
    with pytest.raises(SupervisionError, match="as told"):
        workers.slice(gpus=1).echo.call_one(1).get(WAIT)
    with pytest.raises(SupervisionError, match="as told"):
        while True:  # the first may go out before it is known here
            workers.echo.broadcast(1)
            workers.slice(gpus=0).echo.call_one(1).get(WAIT)
    workers.slice(gpus=0).echo.broadcast(1)
    assert workers.slice(gpus=0).echo.call_one(1).get(WAIT) == 1


def test_a_base_exception_ends_the_actor_and_is_told(faults: Faults) -> None:
    worker = spawn(1).slice(gpus=0).spawn("worker", Worker, "worker")
    with pytest.raises(SupervisionError, match=r"'worker' died: worker.exit raised SystemExit: 3") as raised:
        worker.exit.call_one().get(WAIT)
    assert raised.value.endpoint == "worker.exit" and "raise SystemExit(3)" in str(raised.value)
    assert "SystemExit" in faults.get(timeout=WAIT).reason
    with pytest.raises(SupervisionError, match="takes no more messages"):
        worker.echo.call_one(1).get(WAIT)


def test_failures_go_to_the_owner() -> None:
    port, receiver = Channel[Any].open()
    owner = spawn(1).slice(gpus=0).spawn("owner", Owner, port, "deal")
    owner.fail_one.call_one().get(WAIT)
    told = dict(hear(receiver, 2))
    assert told["worker"] == "as told"
    assert (told["supervise"].mesh_name, told["supervise"].rank) == ("workers", 1)
    assert len(owner.again.call_one().get(WAIT)) == 2


def test_failures_that_are_not_dealt_with_go_up(faults: Faults) -> None:
    port, receiver = Channel[Any].open()
    owner = spawn(1).slice(gpus=0).spawn("owner", Owner, port, "leave")
    owner.fail_one.call_one().get(WAIT)
    failure = faults.get(timeout=WAIT)
    assert failure.mesh_name == "owner" and failure.cause is not None and failure.cause.mesh_name == "workers"
    assert "as told" in failure.report()
    with pytest.raises(SupervisionError, match="owner"):
        owner.pids.call_one().get(WAIT)
    said = [what for what, _ in hear(receiver, 5)]
    assert sorted(said) == ["beside", "owner", "supervise", "worker", "worker"] and said[-1] == "owner"


def test_what_supervise_raises_is_a_failure_chained_to_the_old(faults: Faults) -> None:
    port, _receiver = Channel[Any].open()
    owner = spawn(1).slice(gpus=0).spawn("owner", Owner, port, "raise")
    owner.fail_one.call_one().get(WAIT)
    failure = faults.get(timeout=WAIT)
    assert "RuntimeError: while supervising" in failure.reason
    assert failure.cause is not None and "as told" in failure.cause.reason


def test_an_exit_within_supervise_is_a_failure_too(faults: Faults) -> None:
    port, _receiver = Channel[Any].open()
    owner = spawn(1).slice(gpus=0).spawn("owner", Owner, port, "exit")
    owner.fail_one.call_one().get(WAIT)
    assert "SystemExit: 4" in faults.get(timeout=WAIT).reason


def test_an_owners_end_is_that_of_what_it_owns() -> None:
    port, receiver = Channel[Any].open()
    owner = spawn(1).slice(gpus=0).spawn("owner", Owner, port, "deal")
    pids = owner.pids.call_one().get(WAIT)
    owner.stop().get(WAIT)
    said = hear(receiver, 4)
    assert sorted(said[:3]) == [("beside", None), ("worker", None), ("worker", None)]
    assert said[3] == ("owner", None)
    assert all(map(gone, pids))


def test_async_supervise_and_cleanup() -> None:
    port, receiver = Channel[Any].open()
    owner = this_proc().spawn("owner", AsyncOwner, port)
    owner.fail_one.call_one().get(WAIT)
    assert set(hear(receiver, 2)) == {("beside", "as told"), ("supervise", "beside")}
    owner.stop().get(WAIT)
    assert hear(receiver, 1) == [("owner", None)]


@pytest.mark.parametrize("how", ["kill", "exit"])
def test_the_death_of_a_process_is_a_failure_with_its_status_and_last_lines(
    faults: Faults, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    workers = spawn(2, "mine").spawn("workers", Worker, "worker")
    pids = list(workers.pid.call().get(WAIT).values())
    waiting = workers.slice(gpus=1).wait.call_one()
    if how == "kill":
        os.kill(pids[1], signal.SIGKILL)
    else:
        spawned = this_proc().spawn("caller", Caller)
        workers = workers.slice(gpus=1)
        os.kill(pids[1], 0)
        del spawned
        os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(SupervisionError, match="SIGKILL"):
        waiting.get(WAIT)
    failure = faults.get(timeout=WAIT)
    assert (failure.status, failure.rank, failure.mesh_name) == (-9, 1, "workers")
    with pytest.raises(SupervisionError, match="SIGKILL"):
        workers.pid.call().get(WAIT)


class Caller(Actor):
    @endpoint
    def call(self, worker: Worker) -> object:
        try:
            return worker.die.call_one(7).get(WAIT)
        except SupervisionError as error:
            return str(error)


def test_the_report_of_an_end_has_as_many_lines_as_is_set(faults: Faults) -> None:
    with monarch.config.configured(tail_log_lines=1):
        worker = spawn(1).spawn("worker", Worker, "worker")
    with pytest.raises(SupervisionError):
        worker.die.call(7).get(WAIT)
    assert faults.get(timeout=WAIT).log == ("without a line's end",)


def test_processes_that_do_not_end_are_killed_after_the_time_that_is_set() -> None:
    procs = spawn(1)
    worker = procs.spawn("worker", Worker, "worker")
    (pid,) = worker.pid.call().get(WAIT).values()
    os.kill(pid, signal.SIGSTOP)  # it would never end by itself
    with monarch.config.configured(process_exit_timeout="0s"):
        stopped = procs.stop()
    stopped.get(WAIT)
    (address,) = procs._addresses
    assert current.process().dead[address].reason == "was killed, because it had not ended 0 s after the request to end"


class Own(Actor):
    """Waits for the end of its process, or of its mesh, or for nothing."""

    @endpoint
    def hang(self, port: Port[str]) -> None:
        port.send("hangs")
        threading.Event().wait()

    @endpoint
    def wait_for(self, what: str) -> None:
        (this_proc() if what == "processes" else context().actor_instance.mesh).stop().get(WAIT)  # type: ignore[union-attr]


def test_an_actor_that_does_not_end_is_given_up_before_its_process_would_be_killed() -> None:
    procs = spawn(1)
    port, receiver = Channel[str].open()
    procs.spawn("own", Own).hang.broadcast(port)
    assert receiver.recv().get(WAIT) == "hangs"
    with monarch.config.configured(process_exit_timeout="2s"):
        procs.stop().get(WAIT)
    (address,) = procs._addresses
    assert current.process().dead[address].reason == "was stopped"


@pytest.mark.parametrize("what", ["processes", "actors"])
def test_an_actor_cannot_wait_for_its_own_end(what: str) -> None:
    own = spawn(1).spawn("own", Own)
    with pytest.raises(ActorError, match=f"was told to stop from one of its {what}, and ends once the code"):
        own.wait_for.call(what).get(WAIT)
    with pytest.raises(SupervisionError):
        own.wait_for.call(what).get(WAIT)


def test_a_process_that_forks_others_and_was_stopped_goes_on() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    os.kill(warm_parent().pid, signal.SIGSTOP)
    procs.stop().get(WAIT)


def test_that_the_process_that_forks_others_has_ended_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork(*_: object) -> int:
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    monkeypatch.setattr(WarmParent, "fork", fork)
    with pytest.raises(MonarchError, match="the process that forks them has ended\n  Try again"):
        this_host().spawn_procs().initialized.get(WAIT)


def test_whoever_waits_for_a_process_that_dies_is_told(faults: Faults, capsys: pytest.CaptureFixture[str]) -> None:
    procs = spawn(2)
    worker = procs.slice(gpus=0).spawn("worker", Worker, "worker")
    caller = procs.slice(gpus=1).spawn("caller", Caller)
    assert "exited with status 7" in caller.call.call_one(worker).get(WAIT)
    failure = faults.get(timeout=WAIT)
    assert failure.status == 7 and failure.log == ("about to die", "without a line's end")
    said = capsys.readouterr()
    assert "[procs gpus=0] about to die\n" in said.out and "[procs gpus=0] without a line's end\n" in said.err


def test_what_a_dead_process_owned_ends(faults: Faults) -> None:
    port, receiver = Channel[Any].open()
    procs = spawn(1)
    worker = procs.slice(gpus=0).spawn("pid", Worker, "worker")
    owner = procs.slice(gpus=0).spawn("owner", Owner, port, "deal")
    pids = owner.pids.call_one().get(WAIT)
    os.kill(worker.pid.call_one().get(WAIT), signal.SIGKILL)
    assert {faults.get(timeout=WAIT).mesh_name for _ in range(2)} == {"owner", "pid"}
    assert hear(receiver, 2) == [("worker", None)] * 2
    procs.stop().get(WAIT)
    wait_until_gone(pids)


class Late(Actor):
    """Spawns workers in processes that it is given, and tells a port of their failures and of its own end."""

    def __init__(self, port: Port[tuple[str, str]]) -> None:
        self.port = port

    @endpoint
    def spawn(self, procs: ProcMesh) -> None:
        procs.spawn("late", Worker, "late")

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.port.send(("failed", failure.report()))
        return True

    def __cleanup__(self, exc: Exception | None) -> None:
        self.port.send(("ended", str(exc)))


def test_who_is_younger_than_a_death_hears_of_it_by_spawning_there(faults: Faults) -> None:
    """Nobody has told it; what it spawned has to end all the same, or it could not end itself."""
    port, receiver = Channel[tuple[str, str]].open()
    gone = this_host().spawn_procs(name="gone")
    workers = gone.spawn("workers", Worker, "worker")
    workers.die.broadcast(3)
    assert "exited with status 3" in faults.get(timeout=WAIT).report()
    told = threading.Event()
    current.process().router.soon(told.set)  # the same thread has told the others by then
    assert told.wait(WAIT)
    young = this_host().spawn_procs(name="young")
    young.spawn("late", Late, port).spawn.call_one(gone).get(WAIT)
    what, report = receiver.recv().get(WAIT)
    assert what == "failed" and "its process is gone" in report
    young.stop().get(WAIT)
    assert receiver.recv().get(WAIT) == ("ended", "None")


def test_a_service_survives_the_death_of_its_workers() -> None:
    port, receiver = Channel[Any].open()
    owner = spawn(1).slice(gpus=0).spawn("owner", Owner, port, "deal")
    pids = owner.pids.call_one().get(WAIT)
    os.kill(pids[0], signal.SIGKILL)
    ((what, failure),) = hear(receiver, 1)
    assert what == "supervise" and failure.status == -9
    assert set(owner.renew.call_one().get(WAIT)).isdisjoint(pids)


def test_the_death_of_the_process_that_forks_them_is_that_of_all(faults: Faults) -> None:
    workers = spawn(2).spawn("workers", Worker, "worker")
    pids = list(workers.pid.call().get(WAIT).values())
    os.kill(warm_parent().pid, signal.SIGKILL)
    assert {faults.get(timeout=WAIT).rank for _ in range(2)} == {0, 1}
    with pytest.raises(SupervisionError, match="SIGKILL"):
        workers.pid.call().get(WAIT)
    assert len(spawn(2).spawn("workers", Worker, "worker").pid.call().get(WAIT)) == 2
    wait_until_gone(pids)


def test_a_call_that_is_faster_than_what_spawns_its_actor_waits_for_it(faults: Faults) -> None:
    procs = spawn(2)
    (first, second), process = procs._addresses, current.process()

    def call_early(actor: str) -> One[object]:
        """As a reference does that came by way of another process."""
        early: One[object] = One(first)
        head = CALL, actor, (process.address, process.ports.open(early), 0), "echo", False, None
        assert process.router.send(first, head, Payload.of((("early",), {})))
        return early

    actor = process.new_id()
    early = call_early(actor)
    mesh = ActorMesh(actor, "late", Worker, (first,), Shape.unity())
    process.owns("", mesh, processes=False)
    payload = Payload.of((mesh, process.client.originates(procs), ("late",), {}))
    process.router.send(first, (SPAWN, actor, None, 0, "late", (process.address, "")), payload)
    assert early.future.get(WAIT) == "early"
    never = call_early(f"{second}.77")
    pid = procs.slice(gpus=1).spawn("worker", Worker, "worker").pid.call_one().get(WAIT)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(SupervisionError, match="its spawner ended"):
        never.future.get(WAIT)
    assert faults.get(timeout=WAIT).mesh_name == "worker"
    with pytest.raises(SupervisionError, match="its spawner ended"):
        call_early(f"{second}.78").future.get(WAIT)


def test_bootstrap_that_raises_ends_the_process(faults: Faults, capsys: pytest.CaptureFixture[str]) -> None:
    def bootstrap() -> None:
        raise OSError("no such device")

    procs = this_host().spawn_procs(bootstrap=bootstrap, name="boot")
    for _ in range(2):  # also once it has ended
        with pytest.raises(ActorError, match="bootstrap of boot raised OSError: no such device") as raised:
            procs.initialized.get(WAIT)
        assert isinstance(raised.value.exception, OSError)
    failure = faults.get(timeout=WAIT)
    assert failure.log[-1] == "OSError: no such device"
    capsys.readouterr()
