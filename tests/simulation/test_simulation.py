"""The real controller, relays and healing on a simulated cluster in which workers die, links break, connections of the
control plane are reset and go on over others, and hosts are lost and join, in any order of events that a seed gives:
nothing hangs, no step is half applied, no state is lost of which a copy lives, and nothing is left behind.
`make simulate` runs a hundred thousand schedules."""

from __future__ import annotations

import pytest

from tests.sample import is_full
from tests.simulation.schedule import run, simulated

FOUND = {
    "healing that asks a worker again and again whose place was to be filled anew": 3,
    "a done step's result that is said to be lost, before the survivors were asked": 33,
    "state that is said to be lost, for a step that needed what a failed one was to make": 208,
}
"""Seeds of schedules in which something was wrong."""

FOUND_WITH_JOINS = {
    "workers left behind on a host that joined, where another worker died while they started": 1003,
    "a second answer to the last session's end that was taken for this one's": 1187,
}
"""Likewise, where hosts join."""


@pytest.mark.parametrize("what", FOUND)
def test_what_was_found_once(what: str) -> None:
    with simulated():
        run(FOUND[what], resets=False, joins=False)


@pytest.mark.parametrize("what", FOUND_WITH_JOINS)
def test_what_was_found_once_where_hosts_join(what: str) -> None:
    with simulated():
        run(FOUND_WITH_JOINS[what])


@pytest.mark.parametrize("part", range(10 if is_full() else 1))
def test_schedules(part: int) -> None:
    with simulated():
        for seed in range(1000 + 300 * part, (1300 if is_full() else 1100) + 300 * part):
            try:
                run(seed)
            except Exception as error:
                raise AssertionError(f"the schedule with the seed {seed}") from error
