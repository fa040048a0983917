"""The relays' state machine, over simulated links with every order of arrival."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.runtime.control import limits
from monarch.runtime.control.records import (
    Attach,
    Attached,
    Close,
    Forget,
    HostPart,
    Lost,
    Malformed,
    Progress,
    Start,
    ranges,
)
from monarch.runtime.control.relay import PARENT, Dial, Down, Drop, Gone, Ready, Relay, Send, Up
from monarch.runtime.shared.tree import split
from tests.runtime.control.simulated import CONTROLLER, Simulation, info

TREES = st.tuples(st.integers(1, 40), st.integers(1, 9))


@given(st.integers(0, 200), st.integers(1, 20))
def test_numbers_are_split_evenly(count: int, most: int) -> None:
    parts = split(count, most)
    assert [number for start, stop in parts for number in range(start, stop)] == list(range(count))
    sizes = [stop - start for start, stop in parts]
    assert len(parts) == min(count, most) and (not sizes or max(sizes) - min(sizes) <= 1)


@given(TREES, st.data())
def test_every_host_is_attached_once_and_told_of_in_order(tree: tuple[int, int], data: st.DataObject) -> None:
    simulation = Simulation(*tree)
    simulation.settle(lambda count: data.draw(st.integers(0, count - 1)))
    assert simulation.attached == list(range(tree[0])) and not simulation.failures


def test_the_depth_grows_with_the_logarithm() -> None:
    for hosts, fan_out, depth in [(8, 8, 1), (9, 8, 2), (72, 8, 2), (4096, 8, 4), (15, 2, 4)]:
        simulation = Simulation(hosts, fan_out)
        simulation.settle()
        assert max(simulation.depth.values()) <= depth, (hosts, fan_out)


@given(TREES, st.data())
def test_hosts_that_cannot_be_reached_are_all_told_of(tree: tuple[int, int], data: st.DataObject) -> None:
    dead = data.draw(st.frozensets(st.integers(0, tree[0] - 1)))
    simulation = Simulation(*tree, dead=dead)
    simulation.settle(lambda count: data.draw(st.integers(0, count - 1)))
    assert sorted(simulation.failures) == sorted(dead)
    assert sorted(simulation.attached) == sorted(set(range(tree[0])) - dead)


@given(TREES, st.lists(st.none() | st.sets(st.integers(0, 39), min_size=1), min_size=1, max_size=6), st.data())
def test_messages_reach_whom_they_are_for_once_and_in_order(
    tree: tuple[int, int], sent: list[set[int] | None], data: st.DataObject
) -> None:
    simulation = Simulation(*tree)
    simulation.settle()
    simulation.frames.clear()
    hosts = range(tree[0])
    for at, targets in enumerate(sent):
        chosen = None if targets is None else ranges(targets & set(hosts))
        simulation.feed(CONTROLLER, Down(Start("x", 1, 0, chosen, b"%d" % at)))
    simulation.settle(lambda count: data.draw(st.integers(0, count - 1)))
    for host in hosts:
        assert simulation.heads(host) == [b"%d" % at for at, to in enumerate(sent) if to is None or host in to]
    assert all(frames <= len(sent) for frames in simulation.frames.values())


def test_a_message_for_all_costs_the_controller_one_record_a_child() -> None:
    simulation = Simulation(100, 8)
    simulation.settle()
    simulation.frames.clear()
    simulation.feed(CONTROLLER, Down(Start("x")))
    simulation.settle()
    assert [frames for (above, _), frames in simulation.frames.items() if above == CONTROLLER] == [1] * 8


@given(TREES, st.data())
def test_progress_is_the_least_of_all_and_never_shrinks(tree: tuple[int, int], data: st.DataObject) -> None:
    simulation = Simulation(*tree)
    simulation.settle()
    simulation.feed(CONTROLLER, Down(Start("x", 3)))
    simulation.settle()
    latest: dict[int, tuple[int, int]] = {}
    for _ in range(data.draw(st.integers(0, 60))):
        host = data.draw(st.integers(0, tree[0] - 1))
        before = latest.get(host, (0, 0))
        latest[host] = tuple(number + data.draw(st.integers(0, 3)) for number in before)
        simulation.feed(host, Up(-2, Progress("p", 3, latest[host])))
        for _ in range(data.draw(st.integers(0, 5))):
            simulation.step(lambda count: data.draw(st.integers(0, count - 1)))
    simulation.settle()
    said = simulation.progress("p")
    assert all(a != b and all(map(int.__le__, a, b)) for a, b in zip(said, said[1:], strict=False))
    if len(latest) == tree[0]:
        assert said[-1] == tuple(map(min, zip(*latest.values(), strict=True)))
    else:
        assert not said


def test_progress_counts_the_hosts_that_the_mesh_is_on_and_no_others() -> None:
    simulation = Simulation(9, 2)
    simulation.settle()
    simulation.feed(CONTROLLER, Down(Start("x", 1, 0, ((2, 3), (6, 8)))))
    simulation.settle()
    for host, number in ((2, 5), (6, 4), (7, 9)):
        simulation.feed(host, Up(-2, Progress("p", 1, (number,))))
    simulation.settle()
    assert simulation.progress("p") == [(4,)]
    simulation.feed(CONTROLLER, Down(Forget(1)))
    simulation.settle()
    simulation.feed(6, Up(-2, Progress("p", 1, (8,))))
    simulation.settle()
    assert simulation.progress("p") == [(4,)]


def test_what_a_lost_host_has_not_done_does_not_pass_for_done() -> None:
    simulation = Simulation(4, 2)
    simulation.settle()
    simulation.feed(CONTROLLER, Down(Start("x")))
    simulation.settle()
    for host in range(4):
        simulation.feed(host, Up(-2, Progress("p", 0, (host,))))
    simulation.settle()
    simulation.lose(1, "cut")
    for host in (0, 2, 3):
        simulation.feed(host, Up(-2, Progress("p", 0, (50,))))
    simulation.settle()
    assert simulation.progress("p")[-1] == (1,)


@given(TREES, st.data())
def test_a_loss_names_the_whole_subtree_and_every_host_once(tree: tuple[int, int], data: st.DataObject) -> None:
    simulation = Simulation(*tree)
    simulation.settle()
    gone: set[int] = set()
    beneath = {host: {host} for host in range(tree[0])}
    for host in reversed(range(tree[0])):
        if simulation.parent[host] != CONTROLLER:
            beneath[simulation.parent[host]] |= beneath[host]
    for host in data.draw(st.lists(st.integers(0, tree[0] - 1), max_size=5, unique=True)):
        simulation.lose(host, "cut")
        simulation.settle(lambda count: data.draw(st.integers(0, count - 1)))
        gone |= beneath[host]
        assert sorted(simulation.lost) == sorted(gone)


def test_what_is_lost_is_sent_nothing_and_the_others_go_on() -> None:
    simulation = Simulation(7, 2)
    simulation.settle()
    simulation.lose(0, "cut")
    simulation.feed(CONTROLLER, Down(Start("x")))
    simulation.settle()
    assert [len(simulation.got[host]) for host in range(7)] == [0, 0, 0, 1, 1, 1, 1]


def test_thousands_of_hosts_are_told_of_in_records_of_a_bounded_size() -> None:
    simulation = Simulation(1200, 8)
    simulation.settle()
    assert simulation.attached == list(range(1200))
    assert all(len(each.hosts) <= limits.HOSTS_A_RECORD for each in simulation.said if isinstance(each, Attached))


# -- what is not allowed -------------------------------------------------------------------------------------------


def relay() -> Relay:
    """Host 3, with hosts 4, 5 beneath it as its children."""
    made = Relay()
    actions = made.handle(Down(Attach(3, ("a", "b", "c"), 2, 1.0)))
    assert [action.attach.number for action in actions if isinstance(action, Dial)] == [4, 5]
    return made


@pytest.mark.parametrize(
    "record",
    [Attach(0, ("x",), 2, 1.0), Lost(1, 2, ""), Attached(()), Progress("p", 0, (1,)), Close(), HostPart(0, 0, b"x")],
)
def test_what_does_not_come_from_above_is_malformed(record: object) -> None:
    with pytest.raises(Malformed):
        relay().handle(Down(record))  # type: ignore[arg-type]


def test_messages_of_one_mesh_do_not_overlap_on_the_way_down() -> None:
    machine = relay()
    machine.handle(Down(Start("x", 1, size=10, data=b"1234")))
    machine.handle(Down(Start("x", 2, size=10, data=b"1234")))
    with pytest.raises(Malformed, match="before the last one's end"):
        machine.handle(Down(Start("x", 1)))
    with pytest.raises(Malformed, match="more parts"):
        machine.handle(Down(HostPart(2, 0, b"1234567")))


def test_nothing_comes_before_the_attach() -> None:
    with pytest.raises(Malformed, match="before anything was attached"):
        Relay().handle(Down(Start("x")))


@pytest.mark.parametrize(
    "record",
    [
        Start("x", 0, 5),
        HostPart(0, 3, b"x"),
        Lost(3, 5, ""),
        Attached((info(5),)),
        Attached((), ((3, "no"),)),
        Attached((info(4), info(4))),
        Attach(4, ("x",), 2, 1.0),
        Forget(1),
    ],
)
def test_a_child_that_speaks_for_others_is_dropped(record: object) -> None:
    (action,) = relay().handle(Up(0, record))  # type: ignore[arg-type]
    assert isinstance(action, Drop) and action.child == 0


def test_progress_of_another_length_is_no_progress() -> None:
    machine = relay()
    machine.handle(Ready(info(3)))
    machine.handle(Down(Start("x")))
    assert machine.handle(Up(0, Progress("p", 0, (1, 2)))) == []
    (action,) = machine.handle(Up(1, Progress("p", 0, (1,))))
    assert isinstance(action, Drop) and "1 numbers, not 2" in action.reason


def test_a_child_lost_while_attaching_is_a_failure_and_later_a_loss() -> None:
    machine = Relay()
    machine.handle(Down(Attach(0, ("a", "b", "c"), 1, 1.0)))
    (call,) = machine.handle(Gone(0, "refused"))
    assert isinstance(call, Dial) and call.attach == Attach(2, ("c",), 1, 1.0)
    machine.handle(Ready(info(0)))
    hosts, failures = machine.handle(Up(1, Attached((info(2),))))
    assert hosts == Send(PARENT, Attached((info(0), info(2))))
    assert failures == Send(PARENT, Attached((), ((1, "refused"),)))
    assert machine.handle(Gone(1, "cut")) == [Send(PARENT, Lost(2, 3, "cut"))]
    assert machine.handle(Gone(1, "again")) == []
