"""A stage that fails, of a pipeline and of a program over two meshes, on workers: the error names the worker and the
line, no mesh keeps anything of the step, and all go on."""

from __future__ import annotations

import copy
import os
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import AnomalyError, DeviceMeshError
from monarch.stdlib.pipeline import pipeline
from monarch.testing import chaos
from tests.runtime.stopping import stopped


@dataclass
class Run:
    """A training step on a mesh, and the workers of its last part."""

    mesh: Mesh
    modules: list[nn.Module]
    step: Callable[[], Any]
    instructions: list[int]

    def states(self) -> list[torch.Tensor]:
        return [each.detach().full_tensor() for module in self.modules for each in module.parameters()]  # type: ignore[attr-defined]


X = torch.randn(8, 6)


def run_of(kind: str, mesh: Mesh) -> Run:
    torch.manual_seed(0)
    modules = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
    run: Any
    if kind == "pipeline":
        pipe = pipeline(list(modules), mesh, microbatches=2, layouts={})
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

        @monarch.program
        def run(x: Any) -> Any:
            optimizer.zero_grad()
            loss = pipe.step(x, target=x, loss_fn=F.mse_loss)
            optimizer.step()
            return loss
    else:
        first, second = mesh.slice(pipe=0), mesh.slice(pipe=1)
        encoder = monarch.module_to_mesh(modules[0], first, {})
        decoder = monarch.module_to_mesh(modules[1], second, {})
        optimizer = torch.optim.SGD([*encoder.parameters(), *decoder.parameters()], lr=0.1)

        @monarch.program
        def run(x: Any) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(decoder(encoder(x).to(second)), x.to(second))
            loss.backward()
            optimizer.step()
            return loss

    given = monarch.distribute(X, mesh.slice(pipe=0))
    made = Run(mesh, modules, lambda: run(given), [])
    made.step().item()
    made.instructions = [len(part.plan.instructions) for part in run.compile(given).parts]
    return made


@pytest.fixture(scope="module", params=["pipeline", "two meshes"])
def run(request: pytest.FixtureRequest) -> Iterator[Run]:
    with Mesh(pipe=2, data=2) as mesh:
        yield run_of(request.param, mesh)


def goes_on(run: Run, before: list[torch.Tensor]) -> None:
    assert all(torch.equal(found, kept) for found, kept in zip(run.states(), before, strict=True))
    assert run.step().isfinite().item()


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("place", [0.0, 0.4, 0.8])  # in the forward pass, in between, in the backward pass
def test_an_op_that_fails(run: Run, stage: int, place: float) -> None:
    before = run.states()
    chaos.fail(run.mesh, 2 * stage + 1, int(place * run.instructions[stage]))
    with pytest.raises(DeviceMeshError, match="InjectedError") as raised:
        run.step().item()
    assert raised.value.message.startswith(f"worker pipe={stage}, data=1 failed")
    goes_on(run, before)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_nan_in_a_stage(run: Run, stage: int) -> None:
    weight: Any = run.modules[stage][0].weight  # type: ignore[index]
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("inf"))
    before = run.states()
    with run.mesh.detect_anomaly(), pytest.raises(AnomalyError, match="NaN") as raised:
        run.step().item()
    assert f"worker pipe={stage}" in raised.value.message and raised.value.source is not None
    assert raised.value.source.file.endswith("test_failing.py") or "linear" in raised.value.source.file
    assert all(torch.equal(found, was) for found, was in zip(run.states(), before, strict=True))
    with torch.no_grad():
        weight.copy_(kept)
    assert run.step().isfinite().item()


@pytest.mark.parametrize("stage", [0, 1])
def test_ctrl_c_while_a_stage_stands_still(run: Run, stage: int) -> None:
    pids = run.mesh.executor.worker_pids()  # type: ignore[attr-defined]
    with stopped(pids[2 * stage]):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):  # whether it comes while the step is given or while it is waited for
            run.step().item()
    assert run.step().isfinite().item()


@torch.library.custom_op("tests_of_pipelines::limited", mutates_args=())
def limited(x: torch.Tensor) -> torch.Tensor:
    if x.max() > 50:
        raise ValueError("more than 50")
    return x.clone()


limited.register_fake(torch.empty_like)
limited.register_autograd(lambda context, gradient: gradient)  # type: ignore[no-untyped-call]
monarch.sharding_rule("tests_of_pipelines.limited", "... -> ...")


class Stage(nn.Module):
    """Looks up what one column of integers says, and adds a column of numbers that are at most 50."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = nn.Linear(6, 6), nn.Embedding(5, 6)

    def forward(self, h: Any, at: Any, added: Any) -> Any:
        return torch.tanh(self.linear(h)) + self.table(at) + limited(added)[:, None]


class Failing(nn.Module):
    def __init__(self, stages: int) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Stage() for _ in range(stages)])

    def forward(self, x: Any, at: Any, added: Any) -> Any:
        for number, stage in enumerate(self.stages):
            x = stage(x, at[:, number], added[:, number])
        return x


@pytest.mark.sample(2)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("kind", ["IndexError", "ValueError"])
@pytest.mark.parametrize("done", [0, 2])
def test_rows_that_fail_in_a_stage_at_the_first_call_and_later(schedule: str, stage: int, kind: str, done: int) -> None:
    count = 4 if schedule == "interleaved" else 2
    torch.manual_seed(0)
    model = Failing(count)
    good = torch.randn(8, 6), torch.randint(0, 5, (8, count)), torch.rand(8, count)
    bad = tuple(each.clone() for each in good)
    bad[1 if kind == "IndexError" else 2][5, stage] = 99
    with Mesh(pipe=2) as mesh:
        cuts = [f"stages.{at}" for at in range(1, count)]
        pipe = pipeline(copy.deepcopy(model), mesh, microbatches=2, schedule=schedule, split_at=cuts, layouts={})
        ours, theirs = (torch.optim.Adam(each.parameters(), lr=0.1) for each in (pipe, model))

        @monarch.program
        def step(x: Any, at: Any, added: Any) -> Any:
            ours.zero_grad()
            loss = pipe.step(x, at, added, target=x, loss_fn=F.mse_loss)
            ours.step()
            return loss

        def both() -> None:
            theirs.zero_grad()
            wanted = F.mse_loss(model(*good), good[0])
            wanted.backward()
            theirs.step()
            torch.testing.assert_close(step(*good).full_tensor(), wanted.detach())

        for _ in range(done):
            both()
        with pytest.raises(DeviceMeshError, match=rf"worker pipe={stage} failed in (.|\n)*{kind}") as raised:
            step(*bad).item()
        assert raised.value.source is not None and raised.value.source.file.endswith("test_failing.py")
        for part in range(2):
            assert torch.equal(monarch.distribute(X, mesh.slice(pipe=part)).full_tensor(), X)
        both()
        both()
        for found, wanted in zip(pipe.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found.full_tensor(), wanted.detach())  # type: ignore[attr-defined]


@pytest.mark.sample()
@pytest.mark.parametrize("kind", ["pipeline", "two meshes"])
@pytest.mark.parametrize("stage", [0, 1])
def test_a_worker_that_is_killed_loses_the_meshes_and_healing_brings_them_back(kind: str, stage: int) -> None:
    with Mesh(pipe=2, data=2) as mesh:
        run = run_of(kind, mesh)
        for place in (0, run.instructions[stage] // 2):
            before = run.states()
            chaos.kill(mesh, 2 * stage, place)
            with pytest.raises(DeviceMeshError, match="was killed by SIGKILL") as raised:
                run.step().item()
            assert f"worker pipe={stage}, data=0" in raised.value.message
            for part in (mesh.slice(pipe=0), mesh.slice(pipe=1)):
                with pytest.raises(DeviceMeshError, match="has lost a worker"):
                    monarch.distribute(X, part)
            monarch.heal_mesh(mesh)
            goes_on(run, before)
