"""Ctrl-C at any point of calls that are no steps: the next call works, nothing is locked, lost or left running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch.actor import Actor, endpoint, this_host
from monarch.distributed import Mesh
from monarch.testing import chaos
from tests.sample import is_full

FEW = 8


def points(passed: int, few: int = FEW) -> Iterator[int]:
    """All that were counted or, without --full, some of them."""
    yield from range(0, passed, 1 if is_full() else max(1, passed // few))


def interrupted(call: Callable[[], Any], within: Sequence[str], check: Callable[[str], object], few: int = FEW) -> None:
    """Interrupt a call at each point of this code, and `check` what is then."""
    with chaos.interrupt(-1, within=within) as counted:
        call()
    assert counted.passed > 0
    for at in points(counted.passed, few):
        with suppress(KeyboardInterrupt), chaos.interrupt(at, within=within) as found:
            call()
        check(found.where or "nowhere")


@contextmanager
def no_threads_left() -> Iterator[None]:
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "monarch data"]
    for thread in left:
        thread.join(30)
    assert not any(thread.is_alive() for thread in left)


@pytest.mark.parametrize("placed", [True, False])
def test_a_stream_loses_no_batch(placed: bool) -> None:
    with Mesh(data=2) as mesh, no_threads_left():
        rows = torch.arange(1000)
        with monarch.data.stream(rows, mesh if placed else None, "[@data]", batch=2) as stream:
            given = 0

            def take() -> None:
                nonlocal given
                batch = next(stream)
                found = batch.full_tensor() if placed else batch
                assert found.tolist() == [2 * given, 2 * given + 1]
                given += 1

            take()

            def check(where: str) -> None:
                nonlocal given
                if stream.state_dict()["batch"] > given:  # it came behind: in the reading of what was given
                    given += 1
                take()
                assert stream.state_dict()["batch"] == given, where

            interrupted(take, ["/stdlib/data/"], check, 20)


def test_a_load_changes_all_or_may_be_done_again(tmp_path: Path) -> None:
    with Mesh(data=2) as mesh:
        model = monarch.module_to_mesh(nn.Linear(4, 4), mesh)
        monarch.save({"model": model}, tmp_path / "c").result()
        saved = [each.detach().full_tensor() for each in model.parameters()]

        def load() -> None:
            monarch.load(tmp_path / "c", into={"model": model})

        def check(where: str) -> None:
            assert (model(torch.ones(1, 4)) * 2).sum().item() == (model(torch.ones(1, 4)).sum() * 2).item(), where
            load()
            for one, other in zip(saved, model.parameters(), strict=True):
                assert torch.equal(one, other.detach().full_tensor()), where

        interrupted(load, ["/stdlib/checkpoints/", "/runtime/controller/"], check)


class Counter(Actor):
    def __init__(self) -> None:
        self.calls = 0

    @endpoint
    def add(self) -> int:
        self.calls += 1
        return self.calls


def test_a_call_of_an_actor_leaves_the_next_one_alone() -> None:
    procs = this_host().spawn_procs({"at": 2})
    try:
        counter = procs.spawn("counter", Counter)
        before = 0

        def call() -> None:
            counter.add.call().get()

        def check(where: str) -> None:
            nonlocal before
            first, second = counter.add.call().get(60).values()
            assert before < first and before < second, where
            before = max(first, second)

        interrupted(call, ["/runtime/actors/", "/runtime/future.py"], check)
    finally:
        procs.stop().get(60)


def test_awaits_that_are_given_up_leave_the_next_one_alone() -> None:
    procs = this_host().spawn_procs({"at": 2})
    try:
        counter = procs.spawn("counter", Counter)

        async def waits() -> None:
            before = 0
            for at in range(10):
                with suppress(TimeoutError):
                    async with asyncio.timeout(0 if at % 2 else 60):
                        before = max(1, *(await counter.add.call()).values())
                task = asyncio.ensure_future(_values(counter))
                await asyncio.sleep(0)
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
                now = await _values(counter)
                assert now[0] == now[1] > before
                before = now[0]

        asyncio.run(waits())
        assert all(value > 20 for value in counter.add.call().get(60).values())
    finally:
        procs.stop().get(60)


async def _values(counter: Any) -> list[int]:
    return list((await counter.add.call()).values())
