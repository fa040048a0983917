"""Ctrl-C while processes are started: nobody has their mesh, to stop it."""

from __future__ import annotations

import signal
import threading
from time import monotonic, sleep
from typing import Any

import pytest

from monarch.actor import this_host
from monarch.runtime.actors.processes import current
from monarch.runtime.actors.processes.host import Host
from monarch.runtime.actors.processes.process import Process
from tests.runtime.actors.conftest import WAIT


@pytest.mark.parametrize("when", ["before they are there", "as they start", "when all are there"])
def test_processes_of_an_interrupted_start_end(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process: Any = current.process()
    before = process.host.places()
    told, forked, seen = threading.Event(), threading.Event(), []

    def fork(host: Host, group: Any) -> None:
        if when == "before they are there":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert told.wait(WAIT)
        plain_fork(host, group)
        seen.extend(place for place in host.places() if place not in before)
        forked.set()
        if when == "as they start":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            assert told.wait(WAIT)

    def owns(process: Process, *given: Any, **named: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    def stop(host: Host, *given: Any) -> None:
        plain_stop(host, *given)
        told.set()

    plain_fork, plain_stop = Host.fork, Host.stop
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(Host, "fork", fork)
        patched.setattr(Host, "stop", stop)
        if when == "when all are there":
            patched.setattr(Process, "owns", owns)
        this_host().spawn_procs({"gpus": 2})
    assert forked.wait(WAIT) and len(seen) == 2
    until = monotonic() + WAIT
    while process.host.places() != before:
        assert monotonic() < until, "they live on"
        sleep(0.01)
    procs = this_host().spawn_procs({"gpus": 1})
    assert procs.initialized.get(WAIT)
    procs.stop().get(WAIT)
