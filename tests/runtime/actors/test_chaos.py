"""Whatever is killed, and whenever: every call is answered, with its value or with an error that says what happened."""

from __future__ import annotations

import os
import queue
import random
import signal
import threading
from typing import Any

import pytest

from monarch.actor import (
    Actor,
    ActorError,
    Future,
    MeshFailure,
    SupervisionError,
    endpoint,
    shutdown_context,
    this_host,
)
from tests.runtime.actors.conftest import WAIT


class Worker(Actor):
    @endpoint
    def pid(self) -> int:
        return os.getpid()

    @endpoint
    def ask(self, other: "Worker") -> int:
        return other.pid.call_one().get(WAIT)

    @endpoint
    def fail(self) -> None:
        raise ValueError("as told")


class Service(Actor):
    """Has workers, and makes new ones when it loses one."""

    def __init__(self) -> None:
        self.make()

    def make(self) -> None:
        self.workers = this_host().spawn_procs(per_host={"gpus": 2}, name="service").spawn("inner", Worker)

    @endpoint
    def pids(self) -> list[int]:
        return list(self.workers.pid.call().get(WAIT).values())

    def __supervise__(self, failure: MeshFailure) -> bool:
        self.make()
        return True


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(4))
def test_everything_is_answered(faults: queue.SimpleQueue[MeshFailure], seed: int) -> None:
    choose = random.Random(seed)
    procs = this_host().spawn_procs(per_host={"gpus": 4})
    workers = procs.spawn("workers", Worker)
    service = procs.slice(gpus=0).spawn("service", Service)
    pids = list(workers.pid.call().get(WAIT).values())
    futures: list[Future[Any]] = []
    for _ in range(25):
        one, other = sorted(choose.sample(range(4), 2))  # only upwards: two that wait for each other wait for ever
        what = choose.choice(["ask", "ask", "call", "fail", "service", "kill", "kill service"])
        try:
            if what == "ask":
                futures.append(workers.slice(gpus=one).ask.call_one(workers.slice(gpus=other)))
            elif what == "call":
                futures.append(workers.pid.call())
            elif what == "fail":
                workers.slice(gpus=one).fail.broadcast()
            elif what == "service":
                futures.append(service.pids.call_one())
            elif what == "kill" and choose.random() < 0.4:
                os.kill(pids[one], signal.SIGKILL)
            elif what == "kill service":
                os.kill(choose.choice(service.pids.call_one().get(WAIT)), signal.SIGKILL)
        except (SupervisionError, ActorError, ProcessLookupError):
            continue
    for future in futures:
        error = future.exception(WAIT)
        assert error is None or isinstance(error, (SupervisionError, ActorError))
        assert "TimeoutError" not in str(error)
    shutdown_context().get(WAIT)
    for thread in threading.enumerate():
        if thread.name == "monarch fault":  # which tells of one
            thread.join(WAIT)
    while not faults.empty():
        faults.get()
