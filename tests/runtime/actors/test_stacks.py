"""What processes are doing, on request and when a call takes too long."""

from __future__ import annotations

import os
import queue
import sys
import threading
from types import SimpleNamespace

import pytest

import monarch.config
from monarch.actor import Actor, Channel, Port, endpoint, report_slow_calls, shutdown_context, this_host
from tests.runtime.actors.conftest import WAIT


class Sleeper(Actor):
    """Sleeps until it is woken at the port that it gives."""

    @endpoint
    def fall_asleep(self, port: Port[Port[None]]) -> None:
        self.dream(port)

    def dream(self, port: Port[Port[None]]) -> None:
        wake, woken = Channel[None].open()
        port.send(wake)
        woken.recv().get()


class Dreamer(Actor):
    @endpoint
    async def fall_asleep(self, port: Port[Port[None]]) -> None:
        await self.dream(port)

    async def dream(self, port: Port[Port[None]]) -> None:
        wake, woken = Channel[None].open()
        port.send(wake)
        await woken.recv()


def test_stacks_on_request() -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2})
    port, receiver = Channel[Port[None]].open()
    procs.slice(gpus=0).spawn("sleeper", Sleeper).fall_asleep.call_one(port)
    procs.slice(gpus=0).spawn("dreamer", Dreamer).fall_asleep.call_one(port)
    wake = [receiver.recv().get(WAIT) for _ in range(2)]
    asleep = "in dream\n    woken.recv().get()", "in dream\n    await woken.recv()"
    busy = ""
    while not all(where in busy for where in asleep):  # each has said that it is about to be there
        busy, idle = (text for _, text in procs.stacks().get(WAIT))
    assert "thread 'sleeper'" in busy and "of 'dreamer'" in busy
    assert "in dream" not in idle
    for port in wake:
        port.send(None)


def test_calls_that_take_too_long_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    procs = this_host().spawn_procs(per_host={"gpus": 2}, name="slow")
    port, receiver = Channel[Port[None]].open()
    sleeper = procs.slice(gpus=1).spawn("sleeper", Sleeper)
    asleep = sleeper.fall_asleep.call_one(port)
    wake = receiver.recv().get(WAIT)
    reports: queue.SimpleQueue[str] = queue.SimpleQueue()  # pytest's own capturing loses what comes while it is read
    monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=reports.put, flush=lambda: None))
    report_slow_calls(0.01)
    said = ""
    while "in dream" not in said:
        said += reports.get(timeout=WAIT)
    report_slow_calls(None)
    wake.send(None)
    asleep.get(WAIT)
    while not reports.empty():
        said += reports.get()
    assert said.count("monarch: sleeper.fall_asleep has not been answered after") == 1
    with pytest.raises(ValueError, match="above 0"):
        report_slow_calls(0)


def test_what_is_stuck_is_reported_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    def bootstrap() -> None:
        threading.Event().wait()

    shutdown_context().get(WAIT)  # how often is looked depends on the setting when that begins
    reports: queue.SimpleQueue[str] = queue.SimpleQueue()
    with monarch.config.configured(slow_call_warning="100ms"):
        procs = this_host().spawn_procs(bootstrap=bootstrap, name="boot")
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=reports.put, flush=lambda: None))
        ready, said = procs.initialized, ""
        while "in bootstrap" not in said:
            said += reports.get(timeout=WAIT)
    assert "monarch: boot.initialized has not been answered after" in said and not ready.done()
    procs.stop().get(WAIT)


class Child(Actor):
    @endpoint
    def fall(self) -> None:
        os._exit(3)


class Boss(Sleeper):
    """Of a child that ends, with which it deals until it is woken. Nobody waits for that."""

    @endpoint
    def begin(self, port: Port[Port[None]]) -> None:
        self.port = port
        self.child = this_host().spawn_procs(name="inner").spawn("child", Child)
        self.child.fall.broadcast()

    def __supervise__(self, failure: object) -> bool:
        self.dream(self.port)
        return True


class DreamingBoss(Dreamer):
    @endpoint
    async def begin(self, port: Port[Port[None]]) -> None:
        self.port = port
        self.child = this_host().spawn_procs(name="inner").spawn("child", Child)
        self.child.fall.broadcast()

    async def __supervise__(self, failure: object) -> bool:
        await self.dream(self.port)
        return True


@pytest.mark.parametrize("boss", [Boss, DreamingBoss])
def test_a_supervise_that_is_stuck_is_reported_once(monkeypatch: pytest.MonkeyPatch, boss: type[Actor]) -> None:
    reports: queue.SimpleQueue[str] = queue.SimpleQueue()
    port, receiver = Channel[Port[None]].open()
    with monarch.config.configured(slow_call_warning="100ms"):
        procs = this_host().spawn_procs(name="outer")
        monkeypatch.setattr(sys, "stderr", SimpleNamespace(write=reports.put, flush=lambda: None))
        procs.spawn("boss", boss).begin.call_one(port).get(WAIT)  # type: ignore[attr-defined]
        wake, said = receiver.recv().get(WAIT), ""
        while "in dream" not in said:
            said += reports.get(timeout=WAIT)
    wake.send(None)
    procs.stop().get(WAIT)
    assert said.count("monarch: __supervise__ of 'boss' has dealt for") == 1
    assert "child[0]: its process ended: exited with status 3" in said
