"""When owners and callers hear of an actor's death, also while an endpoint awaits."""

from __future__ import annotations

import asyncio
import os
import queue
import signal
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

import monarch.config
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    HostMesh,
    MeshFailure,
    Port,
    SupervisionError,
    context,
    endpoint,
    this_host,
    this_proc,
)
from monarch.runtime.actors.messages.protocol import ENDED, PLACE_ENDED
from monarch.runtime.actors.processes import current, hearing
from monarch.runtime.actors.processes.process import Process
from tests.runtime.actors.conftest import WAIT
from tests.runtime.actors.test_lifetimes import Worker, hear, say, spawn

Faults = queue.SimpleQueue[MeshFailure]


class Cancelled(Actor):
    """Its endpoint awaits something that was cancelled, which is no end of the actor."""

    @endpoint
    async def wait(self) -> None:
        raise asyncio.CancelledError

    @endpoint
    async def echo(self, value: object) -> object:
        return value


def test_a_cancelled_call_leaves_the_actor_alive() -> None:
    actor = spawn(1).slice(gpus=0).spawn("actor", Cancelled)
    with pytest.raises(ActorError, match="CancelledError"):
        actor.wait.call_one().get(WAIT)
    assert actor.echo.call_one(1).get(WAIT) == 1


class Told(Actor):
    """Calls an endpoint that kills another actor, and says how many failures it knew of when the call was answered."""

    def __init__(self) -> None:
        self.failures: list[MeshFailure] = []
        self.worker = this_host().spawn_procs().spawn("worker", Worker, "worker")

    @endpoint
    async def kill(self) -> int:
        with suppress(SupervisionError):
            await self.worker.exit.call_one()
        return len(self.failures)

    async def __supervise__(self, failure: MeshFailure) -> bool:
        self.failures.append(failure)
        return True


def test_the_owner_is_told_before_the_caller_is_answered() -> None:
    assert spawn(1).slice(gpus=0).spawn("told", Told).kill.call_one().get(WAIT) == 1


class Listed(Actor):
    """An owner in the process of what it owns."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    @endpoint
    def spawn(self) -> Any:
        return this_proc().spawn("worker", Worker, "worker")

    @endpoint
    def heard(self) -> int:
        return len(self.failures)

    @endpoint
    def pid(self) -> int:
        return os.getpid()

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.failures.append(failure.reason)
        return True


def test_an_owner_is_told_before_another_caller_is_answered() -> None:
    """Where the owner is in the process of what died: the caller's next message does not overtake the failure."""
    owner = spawn(1).slice(gpus=0).spawn("listed", Listed)
    for count in (1, 2):
        with pytest.raises(SupervisionError):
            owner.spawn.call_one().get(WAIT).exit.call_one().get(WAIT)
        assert owner.heard.call_one().get(WAIT) == count


class Ending(Actor):
    """Ends in three ways, of which an exception tells in the first only."""

    @endpoint
    def end(self, how: str) -> None:
        if how == "exit":
            raise SystemExit(3)
        if how == "abort":
            context().actor_instance.abort("enough")
        else:
            os.kill(os.getpid(), signal.SIGKILL)


class Apart(Listed):
    """An owner whose actors are in processes of their own, and whose process hears late of what ends."""

    def __init__(self) -> None:
        super().__init__()
        process = current.process()
        for kind in (ENDED, PLACE_ENDED):
            process.handle(kind, self.late(process, process.handlers[kind]))

    @staticmethod
    def late(process: Process, handler: Callable[..., None]) -> Callable[..., None]:
        return lambda *message: process.router.later(0.2, partial(handler, *message))

    @endpoint
    def spawn_apart(self) -> Any:
        return this_host().spawn_procs().spawn("ending", Ending)

    @endpoint
    def spawn_on(self, hosts: HostMesh) -> Any:
        return hosts.spawn_procs().spawn("ending", Ending)


class Asking(Actor):
    """Has an actor end, and asks its owner how many ends it knows of."""

    @endpoint
    def ask(self, ending: Any, owner: Any, how: str) -> int:
        with suppress(SupervisionError):
            ending.end.call_one(how).get(WAIT)
        heard: int = owner.heard.call_one().get(WAIT)
        return heard


def test_an_owner_elsewhere_is_told_before_the_caller_is_answered() -> None:
    """The program itself calls, which hears of the ends of its processes first, and an actor in a third process."""
    procs = spawn(2)
    owner, asking = procs.slice(gpus=0).spawn("apart", Apart), procs.slice(gpus=1).spawn("asking", Asking)
    for count, how in enumerate(["exit", "abort", "kill"]):
        assert Asking().ask(owner.spawn_apart.call_one().get(WAIT), owner, how) == 2 * count + 1
        assert asking.ask.call_one(owner.spawn_apart.call_one().get(WAIT), owner, how).get(WAIT) == 2 * count + 2


def test_an_owner_that_does_not_answer_keeps_the_caller_waiting_for_a_while_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hearing, "HEARING_SECONDS", 0.1)
    owner = spawn(1).slice(gpus=0).spawn("apart", Apart)
    ending, pid = owner.spawn_apart.call_one().get(WAIT), owner.pid.call_one().get(WAIT)
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(SupervisionError, match="SIGKILL"):
            ending.end.call_one("kill").get(WAIT)
    finally:
        os.kill(pid, signal.SIGCONT)
    assert owner.heard.call_one().get(WAIT) >= 0


class Child(Actor):
    @endpoint
    def call(self, owner: Any, how: str, port: Port[str]) -> None:
        try:
            owner.end.call_one(how).get(WAIT)
        except SupervisionError as error:
            port.send(str(error))


class Parent(Actor):
    """Ends of a call that what it owns waits for."""

    def __init__(self, generations: int) -> None:
        procs = this_host().spawn_procs()
        self.child: Any = procs.spawn("parent", Parent, generations - 1) if generations else procs.spawn("child", Child)

    @endpoint
    def call(self, owner: Any, how: str, port: Port[str]) -> None:
        self.child.call.broadcast(context().actor_instance.mesh if owner is None else owner, how, port)

    @endpoint
    def end(self, how: str) -> None:
        if how == "exit":
            raise SystemExit(3)
        context().actor_instance.abort("enough")


@pytest.mark.parametrize(("how", "generations"), [("exit", 0), ("abort", 0), ("exit", 2), ("abort", 1)])
def test_a_child_that_waits_for_its_dying_owner_has_its_answer_at_once(
    how: str, generations: int, faults: Faults
) -> None:
    """The owner ends after the child, also where there are others between them, and the child after its answer."""
    with monarch.config.configured(stop_actor_timeout="1d"):
        parent = spawn(1).slice(gpus=0).spawn("parent", Parent, generations)
    port, receiver = Channel[str].open()
    parent.call.call_one(None, how, port).get(WAIT)
    assert ("SystemExit: 3" if how == "exit" else "enough") in receiver.recv().get(WAIT)
    assert faults.get(timeout=WAIT).mesh_name == "parent"


class Waiting(Actor):
    """An endpoint that waits until something that it owns has failed."""

    def __init__(self, port: Port[Any], deal: str) -> None:
        self.port = port
        self.deal = deal
        self.heard: asyncio.Event = asyncio.Event()
        self.reasons: list[str] = []

    @endpoint
    async def watch(self, times: int = 1) -> list[str]:
        for _ in range(times):
            self.heard.clear()
            this_proc().spawn("worker", Worker, "worker").fail.broadcast()
            try:
                await self.heard.wait()
            except asyncio.CancelledError:
                if self.deal == "swallow":
                    return ["it went on"]
                if self.deal == "other":
                    raise ValueError("another error") from None
                raise
            finally:
                say(self.port, "watched", None)
        return self.reasons

    @endpoint
    async def echo(self, value: object) -> object:
        return value

    async def __supervise__(self, failure: MeshFailure) -> bool:
        await asyncio.sleep(0)
        self.reasons.append(failure.mesh_name)
        if self.deal == "raise":
            raise RuntimeError("while supervising")
        if self.deal == "deal":
            self.heard.set()
        return self.deal == "deal"


def test_an_owner_hears_of_failures_while_its_endpoint_awaits() -> None:
    port, receiver = Channel[Any].open()
    waiting = spawn(1).slice(gpus=0).spawn("waiting", Waiting, port, "deal")
    assert waiting.watch.call_one(3).get(WAIT) == ["worker"] * 3
    assert hear(receiver, 3) == [("watched", None)] * 3
    assert waiting.echo.call_one(1).get(WAIT) == 1


@pytest.mark.parametrize("deal", ["leave", "raise", "swallow", "other"])
def test_a_failure_that_is_not_dealt_with_cancels_the_endpoint_that_awaits(deal: str, faults: Faults) -> None:
    port, receiver = Channel[Any].open()
    waiting = spawn(1).spawn("waiting", Waiting, port, deal)
    reason = "__supervise__ raised RuntimeError" if deal == "raise" else "a failure of 'worker' was not dealt with"
    said = rf"'waiting\[0\]' at {{'gpus': 0/1}} takes no more messages: {reason}"
    with pytest.raises(SupervisionError, match=said) as raised:
        waiting.watch.call_one().get(WAIT)
    assert raised.value.endpoint == "waiting.watch"
    assert hear(receiver, 1) == [("watched", None)]
    failure = faults.get(timeout=WAIT)
    assert failure.mesh_name == "waiting" and failure.cause is not None and failure.cause.mesh_name == "worker"
    with pytest.raises(SupervisionError, match="takes no more messages"):
        waiting.echo.call_one(1).get(WAIT)
