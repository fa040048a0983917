"""Timetables of schedules: whole, in an order that works, and with the bubble that the formula says."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.inspect.stages import Action, StageTime, bubble_of, order_of
from monarch.compiler.tape import Timetable
from monarch.stdlib.pipeline import order

GROUPS, MICROBATCHES = st.integers(1, 6), st.integers(1, 12)


@st.composite
def timetables(draw: st.DrawFn) -> Timetable:
    schedule = draw(st.sampled_from(["gpipe", "1f1b", "zero-bubble", "interleaved"]))
    groups, microbatches, virtual = draw(GROUPS), draw(MICROBATCHES), 1
    if schedule == "interleaved":
        virtual = draw(st.integers(1, 3))
        microbatches = microbatches * groups if virtual > 1 else microbatches
    return order(schedule, groups, microbatches, virtual)


@given(timetables())
def test_every_action_stands_there_once_behind_what_it_needs(table: Timetable) -> None:
    names = "FBW" if table.name == "zero-bubble" else "FB"
    done = {(entry.action, entry.stage, entry.microbatch): entry for entry in table.entries}
    assert len(done) == len(table.entries)
    assert set(done) == {(n, s, k) for n in names for s in range(table.stages) for k in range(table.microbatches)}
    for (name, stage, k), entry in done.items():
        needs = {"F": [("F", stage - 1, k)], "B": [("F", stage, k), ("B", stage + 1, k)], "W": [("B", stage, k)]}[name]
        assert all(done[each].end <= entry.start for each in needs if each in done)
    for group in range(table.groups):
        own = table.of_group(group)
        assert all(a.end <= b.start for a, b in zip(own, own[1:], strict=False))


@given(GROUPS, MICROBATCHES, st.integers(1, 3))
def test_bubbles_are_the_formulas(p: int, m: int, v: int) -> None:
    assert order("gpipe", p, m).bubble == pytest.approx((p - 1) / (m + p - 1))
    assert order("1f1b", p, m).bubble == pytest.approx((p - 1) / (m + p - 1))
    many = m * p
    assert order("interleaved", p, many, v).bubble == pytest.approx((p - 1) / (v * many + p - 1))
    if m >= p:
        assert order("zero-bubble", p, m).bubble == pytest.approx((p - 1) / (3 * m + p - 1))
    assert order("zero-bubble", p, m).bubble <= order("1f1b", p, m).bubble


@given(timetables())
def test_played_with_equal_stages_an_order_has_its_schedules_bubble(table: Timetable) -> None:
    actions = order_of(json.loads(json.dumps(table.facts)))
    equal = [StageTime(stage, "", 1.0, 2.0) for stage in range(table.stages)]
    assert bubble_of(actions, equal) == pytest.approx(table.bubble)
    uneven = [replace(each, forward=3.0, backward=6.0) if each.stage == 0 else each for each in equal]
    found = bubble_of(actions, uneven)
    assert found is not None and found >= (0.3 if table.groups == table.stages > 1 else 0.0)
    assert bubble_of(actions, equal[1:]) is None


def test_an_order_that_waits_for_ever_has_no_bubble() -> None:
    actions: list[list[Action]] = [[("B", 0, 0), ("F", 0, 0)], [("F", 1, 0), ("B", 1, 0)]]
    assert bubble_of(actions, [StageTime(0, "", 1.0, 1.0), StageTime(1, "", 1.0, 1.0)]) is None


@given(GROUPS, MICROBATCHES)
def test_a_group_holds_as_many_microbatches_as_its_schedule_says(p: int, m: int) -> None:
    for group in range(p):
        assert order("gpipe", p, m).held(group) == m
        assert order("1f1b", p, m).held(group) == min(m, p - group)
        assert order("zero-bubble", p, m).held(group) <= min(m, p)


@given(timetables())
def test_what_is_sent_waits_for_nothing_that_has_not_begun(table: Timetable) -> None:
    """In the one order of everything a value is sent behind the action that makes it, before the one that reads it, and
    before none that starts earlier on the receiver."""
    places = table.places
    entries = {(entry.action, entry.stage, entry.microbatch): entry for entry in table.entries}
    for (name, stage, k), (_, sent) in places.items():
        reader = ("F", stage + 1, k) if name == "F" else ("B", stage - 1, k)
        if name != "W" and reader in places:
            assert places[name, stage, k][0] < sent < places[reader][0]
        for key, other in entries.items():
            if other.start < entries[name, stage, k].end:
                assert places[key][0] < sent


def test_a_timetable_draws_itself() -> None:
    assert str(order("1f1b", 2, 3)) == (
        "group 0: F0 F1 .  .  B0 -- F2 B1 -- .  B2 --\n"  # B2 waits for the last stage
        "group 1: .  F0 B0 -- F1 B1 -- F2 B2 --"
    )
    assert str(order("zero-bubble", 2, 2)).splitlines()[1] == "group 1: .  F0 B0 F1 B1 W0 W1"
    assert "F0/2" in str(order("interleaved", 2, 2, 2))


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("2f2b", 2, 2), "unknown schedule '2f2b': it must be one of 'gpipe', '1f1b'"),
        (("1f1b", 2, 0), "2 groups, 0 microbatches"),
        (("1f1b", 2, 4.0), "2 groups, 4.0 microbatches, .* whole numbers"),
        (("1f1b", 2, 2, 2), "only the schedule 'interleaved' takes several"),
        (("interleaved", 2, 3, 2), "3 microbatches over 2 groups: .* a multiple of 2"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: tuple[str, int, int], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        order(*arguments)
