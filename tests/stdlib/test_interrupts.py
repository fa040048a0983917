"""Ctrl-C at any point of calls that are no steps: the next call works, nothing is locked, lost or left running."""

from __future__ import annotations

import asyncio
import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch.actor import Actor, endpoint, this_host
from monarch.distributed import Mesh
from monarch.runtime.processes.parent import warm_parent
from monarch.stdlib.models.gpt import GPT
from monarch.stdlib.pipeline.hooks import once_a_step
from monarch.testing import chaos
from tests.sample import is_full

FEW = 8


def points(passed: int, few: int = FEW) -> Iterator[int]:
    """All that were counted or, without --full, some of them."""
    yield from range(0, passed, 1 if is_full() else max(1, passed // few))


def interrupted(
    call: Callable[[], Any],
    within: Sequence[str],
    check: Callable[[str], object],
    few: int = FEW,
    act: Callable[[], object] = chaos.ctrl_c,
) -> None:
    """Interrupt a call at each point of this code, and `check` what is then."""
    with chaos.interrupt(-1, within=within) as counted:
        call()
    assert counted.passed > 0
    for at in points(counted.passed, few):
        with suppress(KeyboardInterrupt), chaos.interrupt(at, act, within) as found:
            call()
        check(found.where or "nowhere")


@contextmanager
def no_threads_left() -> Iterator[None]:
    yield
    left = [thread for thread in threading.enumerate() if thread.name == "monarch data"]
    for thread in left:
        thread.join(30)
    assert not any(thread.is_alive() for thread in left)


def test_workers_that_nobody_knows_of_have_ended() -> None:
    """Those of a mesh whose start or end was interrupted."""
    around = ["/runtime/processes/workers.py", "/runtime/processes/parent.py"]
    with Mesh(data=1) as first:
        assert monarch.distribute(torch.ones(1), first).full_tensor() == 1
        workers, before = _workers(), warm_parent().meshes

        def start() -> None:
            with Mesh(data=2) as mesh:
                assert mesh.executor.mesh.workers == 2

        def check(where: str) -> None:
            gc.collect()
            assert warm_parent().meshes == before, where

        interrupted(start, around, check, 25)
        start()  # what was asked of the warm parent before it has done by then
        deadline = time.monotonic() + 30
        while _workers() != workers and time.monotonic() < deadline:
            time.sleep(0.001)
        assert _workers() == workers


def _workers() -> list[str]:
    """The processes that the warm parent has forked."""
    found = [each.read_text() for each in Path("/proc").glob("[0-9]*/stat") if each.exists()]
    return [line.split()[0] for line in found if line.rpartition(")")[2].split()[1] == str(warm_parent().pid)]


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


def test_a_load_changes_all_or_nothing(tmp_path: Path) -> None:
    with Mesh(data=2) as mesh:
        model = monarch.module_to_mesh(nn.Linear(4, 4), mesh)
        state = {"model": model, "plain": torch.zeros(2), "step": 7}
        monarch.save(state, tmp_path / "c").result()

        def values() -> list[torch.Tensor]:
            return [each.detach().full_tensor() for each in model.parameters()] + [state["plain"].clone()]

        def load() -> None:
            monarch.load(tmp_path / "c", into=state)

        def change() -> list[torch.Tensor]:
            with torch.no_grad():
                for each in (*model.parameters(), state["plain"]):
                    each.add_(1)
            state["step"] = 8
            return values()

        def check(where: str) -> None:
            now = saved if state["step"] == 7 else changed
            assert all(map(torch.equal, values(), now)), where
            assert (model(torch.ones(1, 4)) * 2).sum().item() == (model(torch.ones(1, 4)).sum() * 2).item(), where
            load()
            assert state["step"] == 7 and all(map(torch.equal, values(), saved)), where
            change()

        saved = values()
        changed = change()
        ctrl_c = partial(signal.raise_signal, signal.SIGINT)
        interrupted(load, ["/stdlib/checkpoints/", "/runtime/controller/"], check, act=ctrl_c)
        puts_in_place = ["/placing/replacing.py", "/checkpoints/filling.py", "/language/tensors/tensor.py"]
        interrupted(load, puts_in_place, check, 16, ctrl_c)


def test_a_model_that_generates_trains_again() -> None:
    torch.manual_seed(0)
    with Mesh(data=2) as mesh:
        model = monarch.module_to_mesh(GPT(vocabulary=8, sequence=8, layers=1, width=4, heads=1), mesh)
        model.head.eval()
        training = [module.training for module in model.modules()]

        def generate() -> torch.Tensor:
            return monarch.generate(model, [[1, 2]], max_new_tokens=2)

        wanted = generate()

        def check(where: str) -> None:
            assert [module.training for module in model.modules()] == training, where
            assert torch.equal(generate(), wanted), where

        interrupted(generate, ["/torch/nn/modules/module.py"], check)
        interrupted(generate, ["/stdlib/generation.py"], check, 4)


def test_hooks_of_gradients_are_there_again() -> None:
    """And gradients, where a pipeline's step has put both aside."""
    parameters = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for each in parameters:
        each.grad = torch.ones(2)
        each.register_hook(lambda gradient: gradient * 2)
        each.register_post_accumulate_grad_hook(lambda parameter: None)
    grads = [each.grad for each in parameters]
    hooks = [dict(each._backward_hooks or {}) for each in parameters]

    def step() -> None:
        with once_a_step(parameters):
            for each in parameters:
                each.grad = torch.ones(2)

    step()
    step()
    for each in parameters:
        assert each.grad is not None and each.grad.tolist() == [5.0, 5.0]  # 1 from before, and twice a hook's
    with chaos.interrupt(-1, within=["/stdlib/pipeline/hooks.py"]) as counted:
        step()
    for at in range(counted.passed):
        with suppress(KeyboardInterrupt), chaos.interrupt(at, within=["/stdlib/pipeline/hooks.py"]) as found:
            step()
        assert [each.grad for each in parameters] == grads, found.where
        assert [dict(each._backward_hooks or {}) for each in parameters] == hooks, found.where


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


def test_a_process_that_was_being_reached_can_be_reached() -> None:
    within = ["/messages/router.py"]

    def reach(at: int) -> int:
        procs = this_host().spawn_procs({"at": 1})
        try:
            with suppress(KeyboardInterrupt), chaos.interrupt(at, within=within) as found:
                procs.spawn("first", Counter)
            assert procs.spawn("second", Counter).add.call().get(20).values() == [1], found.where
            return found.passed
        finally:
            procs.stop().get(60)

    passed = reach(-1)
    for at in range(0, passed, 1 if is_full() else 2):
        reach(at)


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
