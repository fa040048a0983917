"""What a trace says, of traces made by hand: two workers, whose step is an op, an all_reduce, an op and a commit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from monarch.compiler.inspect.timeline import (
    Measured,
    Shares,
    Skew,
    Stretch,
    collective_dims,
    coordinates,
    critical_path,
    length,
    measured,
    meetings,
    runs,
    shares,
    skews,
    steps_of,
)
from monarch.compiler.inspect.trace import Handled, Span, Step, Trace, TracedPlan
from monarch.compiler.plan import Instruction, MeshSpec, Plan, Slot, TensorType, ValueSpec

MESH = MeshSpec.of(data=2)
X = TensorType(torch.float32, (4,))
PLAN = Plan(
    name="step",
    mesh=MESH,
    inputs=(ValueSpec("input", 0, X, 0),),
    outputs=(ValueSpec("return", 0, X, 3),),
    instructions=(
        Instruction("aten.neg.default", (Slot(0),), {}, 1),
        Instruction("all_reduce", ([Slot(1)], ["data"], "sum"), {}, 2),
        Instruction("getitem", (Slot(2), 0), {}, 3),
        Instruction("commit", (), {}, -1),
    ),
    slots=4,
    donated=(False,),
    hash="5e7",
)


def step(worker: int, *spans: tuple[int, int, int], start: int = 0, end: int = 100, number: int = 1) -> Step:
    """Of a span for each instruction: start, end, and waited."""
    made = tuple(Span(at, first, last, 8, waited) for at, (first, last, waited) in enumerate(spans))
    return Step(0, number, worker, start, end, made)


# Worker 1 is late at the all_reduce, and worker 0 at the commit.
FAST = step(0, (2, 10, 0), (11, 40, 18), (42, 80, 0), (80, 90, 1), end=92)
SLOW = step(1, (5, 30, 0), (31, 41, 1), (41, 50, 0), (51, 89, 30), start=1, end=90)


def trace(*steps: Step, **more: object) -> Trace:
    return replace(Trace(MESH, (TracedPlan("step", "5e7"),), steps, ()), **more)


def test_medians_are_over_steps_and_workers() -> None:
    third = step(0, (200, 210, 0), number=2)
    assert measured([FAST, SLOW, third]) == {
        0: Measured(0, 3, 10, 0),  # of 8, 25 and 10
        1: Measured(1, 2, 19.5, 9.5),
        2: Measured(2, 2, 23.5, 0),
        3: Measured(3, 2, 24, 15.5),
    }
    assert measured([]) == {}


def test_a_run_is_whole_or_none() -> None:
    late = step(0, (200, 210, 0), number=3)
    failed = [replace(step(rank, (300, 310, 0), number=4), failed=rank == 1) for rank in range(2)]
    assert runs([SLOW, late, FAST, *failed]) == [(FAST, SLOW)]
    assert length((FAST, SLOW)) == 92
    assert runs([]) == []


def test_steps_are_found_by_their_plans_hash() -> None:
    other = replace(FAST, plan=1)
    both = trace(FAST, other, plans=(TracedPlan("step", "5e7"), TracedPlan("step", "0dd")))
    assert steps_of(both, PLAN) == (FAST,)
    assert steps_of(both, replace(PLAN, hash="unknown")) == ()


def test_the_critical_path_goes_through_the_last_to_come_to_a_collective() -> None:
    path = critical_path((FAST, SLOW), PLAN)
    assert path == (
        Stretch(1, -1, 1, 5),
        Stretch(1, 0, 5, 30),
        Stretch(1, -1, 30, 31),
        Stretch(0, 1, 31, 40),  # starts when worker 1 comes, and worker 0's end is the one that counts
        Stretch(0, -1, 40, 42),
        Stretch(0, 2, 42, 80),
        Stretch(0, 3, 80, 90),
    )
    assert all(before.end == after.start for before, after in zip(path, path[1:], strict=False))


def test_the_critical_path_of_one_worker_is_its_step() -> None:
    alone = replace(PLAN, mesh=MeshSpec.of(data=1))
    path = critical_path((FAST,), alone)
    assert [stretch.instruction for stretch in path] == [-1, 0, -1, 1, -1, 2, 3]
    assert (path[0].start, path[-1].end) == (FAST.start, FAST.spans[-1].end)
    assert critical_path((replace(FAST, spans=()),), alone) == () == critical_path((), alone)


def test_a_collective_over_part_of_the_mesh_waits_for_its_group_alone() -> None:
    mesh = MeshSpec.of(data=2, model=2)
    plan = replace(PLAN, mesh=mesh)
    one = (step(0, (0, 10, 0), (10, 60, 45)), step(2, (0, 55, 0), (55, 59, 0)))  # the group of data
    late = step(1, (0, 90, 0), (90, 91, 0), end=92)  # of the other group, as is worker 3
    path = critical_path((*one, late, step(3, (0, 90, 0), (90, 91, 0), end=92)), plan)
    assert {stretch.worker for stretch in path} == {1} and path[-1] == Stretch(1, 1, 90, 91)
    path = critical_path(one, plan)
    assert path == (Stretch(2, 0, 0, 55), Stretch(0, 1, 55, 60))


def test_workers_meet_in_the_order_in_which_they_come() -> None:
    found = list(meetings((FAST, SLOW), PLAN))
    assert [(each.instruction, list(each.spans), each.last, each.skew) for each in found] == [
        (1, [0, 1], 1, 20),
        (3, [1, 0], 0, 29),
    ]
    assert list(meetings((FAST,), PLAN)) == [], "the other worker was not seen"
    failed = replace(SLOW, spans=SLOW.spans[:2], failed=True)
    assert [each.instruction for each in meetings((FAST, failed), PLAN)] == [1]
    assert list(meetings((FAST,), replace(PLAN, mesh=MeshSpec.of(data=1)))) == []


def test_skew_is_a_median_over_steps_and_names_who_comes_last_most_often() -> None:
    steps = [FAST, SLOW]
    for number, (first, second) in enumerate([(10, 16), (17, 10)], 2):  # at the all_reduce, workers 0 and 1
        ends = (50, 60), (60, 70)
        steps.append(step(0, (0, 5, 0), (first, 40, 0), *((*end, 0) for end in ends), number=number))
        steps.append(step(1, (0, 5, 0), (second, 40, 0), *((*end, 0) for end in ends), number=number))
    assert skews(steps, PLAN) == [
        Skew(1, (0, 1), last=1, times=2, runs=3, late=7),  # of 20, 6 and 7
        Skew(3, (0, 1), last=1, times=2, runs=3, late=0),  # of 29, 0 and 0
    ]


def test_each_group_of_a_collective_has_a_skew_of_its_own_and_a_parts_workers_numbers_of_theirs() -> None:
    mesh = MeshSpec.of(data=2, model=2)
    plan = replace(PLAN, mesh=mesh, instructions=PLAN.instructions[:2])
    arrivals = {4: 10, 5: 20, 6: 13, 7: 90}  # a part's workers: 4 and 6 are one group of data, 5 and 7 the other
    steps = [step(worker, (0, 5, 0), (at, 95, 0)) for worker, at in arrivals.items()]
    assert [(skew.workers, skew.last, skew.late) for skew in skews(steps, plan)] == [((5, 7), 7, 70), ((4, 6), 6, 3)]


def test_what_meets_others() -> None:
    by_name = replace(PLAN.instructions[1], args=([Slot(1)],), kwargs={"mesh_dims": ["data"], "reduction": "sum"})
    plan = replace(PLAN, instructions=(*PLAN.instructions[:1], by_name, *PLAN.instructions[2:]))
    for each in (PLAN, plan):
        assert [collective_dims(each, at) for at in range(5)] == [None, ("data",), None, ("data",), ("data",)]


def test_shares_add_up_to_the_whole_time() -> None:
    later = [
        step(rank, (210, 220, 0), (220, 230, 0), (230, 240, 0), (240, 250, 0), start=200, end=260, number=2)
        for rank in range(2)
    ]
    handled = (Handled("put", 0, 0, -50, -10), Handled("put", 2, 0, 110, 140), Handled("put", 2, 1, 110, 130))
    found = shares(trace(FAST, SLOW, *later, handled=handled), [PLAN])
    assert found[0] == Shares(
        compute=8 + 38 + 20, communication=11 + 9 + 20, waiting=18 + 1, between=7 + 20, commands=30, idle=78
    )
    assert found[0].total == found[1].total == 260
    assert found[1].waiting == 31 and found[1].commands == 20
    assert shares(trace(), [PLAN]) == {}


def test_of_a_plan_that_is_not_known_everything_is_computing() -> None:
    found = shares(trace(FAST), [None])
    assert (found[0].communication, found[0].waiting, found[0].compute) == (0, 0, 8 + 29 + 38 + 10)


@pytest.mark.parametrize(("mesh", "said"), [(MESH, "data=1"), (MeshSpec.of(a=1, b=2), "a=0, b=1"), (MeshSpec(()), "0")])
def test_workers_are_named_by_their_coordinates(mesh: MeshSpec, said: str) -> None:
    assert coordinates(mesh, mesh.workers - 1) == said
