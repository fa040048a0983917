"""What a pipeline's plans say of themselves: each stage's memory, the schedule and its bubble."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.inspect.costs import costs_by
from monarch.compiler.inspect.labels import schedule_text
from monarch.compiler.inspect.stages import estimated_bubble, order_of, stage_times
from monarch.compiler.plan import Plan
from monarch.compiler.plan.check_parts import wrong_parts
from monarch.compiler.plan.file import load_plan, save_plan
from monarch.compiler.plan.report import peak
from monarch.language import Mesh
from monarch.stdlib.pipeline import pipeline

ROWS, WIDTH = 1024, 16
KEPT = 3 * ROWS * WIDTH * 4
"""Bytes of a microbatch that a stage keeps for its backward pass: what it receives, and what its two layers give."""


def inspected(schedule: str, microbatches: int) -> Any:
    stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    pipe = pipeline(stages, Mesh.abstract(pipe=4), microbatches=microbatches, schedule=schedule, layouts={})

    @monarch.program
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        return pipe.step(x, target=y, loss_fn=F.mse_loss)

    x = torch.zeros(ROWS * microbatches, WIDTH)
    return step.inspect(x, x)


def inner_peaks(plan: Plan) -> list[int]:
    """The peaks of the stages that hold neither the batch nor its targets."""
    return [peak(part.plan)[0] for part in plan.parts[1:3]]


def test_1f1b_holds_activations_of_a_microbatch_less_at_each_stage_and_gpipe_those_of_all() -> None:
    four, six = (inner_peaks(inspected("gpipe", count).plan) for count in (4, 6))
    assert [more - less for more, less in zip(six, four, strict=True)] == [2 * KEPT] * 2
    four, six = (inner_peaks(inspected("1f1b", count).plan) for count in (4, 6))
    assert four == six  # however many microbatches there are
    assert four[0] - four[1] == KEPT  # stage 1 holds one more than stage 2


@pytest.mark.sample(1)
@pytest.mark.parametrize(("schedule", "bubble"), [("1f1b", "42.9%"), ("zero-bubble", "20.0%")])
def test_a_plan_names_its_schedule_and_fits_together(schedule: str, bubble: str) -> None:
    found = inspected(schedule, 4)
    assert wrong_parts(found.plan) is None
    assert f"{schedule}: 4 stages, 4 microbatches, {bubble} bubble; activations of 4, " in repr(found)


def test_the_report_says_where_microbatches_wait_for_one_another_and_what_it_costs() -> None:
    layers = [nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)]
    pipe = pipeline(nn.Sequential(*layers), Mesh.abstract(pipe=2), microbatches=4, split_at=["2"], layouts={})

    @monarch.program
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        return pipe.step(x, target=y, loss_fn=F.mse_loss)

    x = torch.zeros(8, 6)
    facts = step.inspect(x, x).plan.costs["schedule"]
    assert facts["barriers"] == [[0, "batch_norm"]] and facts["held"] == [4, 4]
    # Half of the first stage, for all four; then the other half and the second stage, for all four.
    assert facts["bubble"] == pytest.approx(1 - 2 * 4 / (2 * (0.5 * 4 + 1.5 + 3)))
    assert schedule_text(facts).endswith("; all 4 wait for one another in batch_norm (stage 0)")


def test_a_report_has_each_stages_time_and_the_bubble_with_these(tmp_path: Path) -> None:
    stages = [nn.Linear(WIDTH, WIDTH) for _ in range(2)] + [nn.Linear(WIDTH, 16 * WIDTH), nn.Linear(16 * WIDTH, WIDTH)]
    mesh = Mesh.abstract(pipe=2)
    pipe = pipeline(stages, mesh, microbatches=4, schedule="interleaved", layouts={})
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)

    @monarch.program
    def step(x: torch.Tensor, y: torch.Tensor) -> Any:
        optimizer.zero_grad()
        loss = pipe.step(x, target=y, loss_fn=F.mse_loss)
        optimizer.step()
        return loss

    x = torch.zeros(4 * ROWS, WIDTH)
    plan = step.inspect(x, x).plan
    times = stage_times(plan)
    assert [(each.stage, each.part) for each in times] == [(0, "pipe0"), (1, "pipe1"), (2, "pipe0"), (3, "pipe1")]
    assert times[2].forward > 2 * times[0].forward and times[3].backward > 2 * times[1].backward
    bubble = estimated_bubble(plan)
    assert bubble is not None and bubble > pipe.timetable.bubble
    for part in plan.parts:
        rows = {row["name"]: row for row in costs_by(part.plan, "stage")}
        own = {f"stage {each.stage}" for each in times if each.part == part.name}
        assert own <= set(rows) <= own | {"(no stage)"}
        assert sum(row["ops"] for row in rows.values()) == sum(row["ops"] for row in costs_by(part.plan, "op"))
    save_plan(plan, tmp_path / "step.mplan")
    read = load_plan(tmp_path / "step.mplan")
    assert stage_times(read) == times and estimated_bubble(read) == bubble


@pytest.mark.parametrize(
    "facts", [{"order": 1}, {"order": [1]}, {"order": [[["F", 0]]]}, {"order": [[["X", 0, 0]]]}, 1]
)
def test_costs_that_say_nothing_of_an_order(facts: Any) -> None:
    assert order_of(facts) == []


@pytest.mark.parametrize("facts", [None, {}, {"bubble": "0"}, [1]])
def test_costs_that_say_nothing_of_a_schedule(facts: Any) -> None:
    assert schedule_text(facts) == ""
