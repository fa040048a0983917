"""Hosts attached as a tree: messages down, answers and progress up, losses."""

from __future__ import annotations

import queue

import pytest

from monarch.compiler.plan import MonarchError
from monarch.runtime.control import limits
from monarch.runtime.control.message import Message
from monarch.runtime.control.tree import HostTree
from tests.runtime.control.hosts import SECONDS, Subscriber, attached, running, token_security


def test_thirteen_hosts_are_attached_as_a_tree_in_the_order_given() -> None:
    with running(13) as hosts, attached(hosts, fan_out=3) as tree:
        assert [host.address for host in tree.hosts] == [host.address for host in hosts]
        assert [host.number for host in tree.hosts] == list(range(13))
        assert all(host.cores > 0 and host.memory > 0 and host.pid and host.network for host in tree.hosts)


def test_a_message_for_all_reaches_all_and_each_answers() -> None:
    with running(13) as hosts, attached(hosts, fan_out=3) as tree:
        answers = Subscriber(tree, 5)
        tree.send(Message("hello", 5, head={"deep": [1, None, {"x": True}]}, data=b"bytes"))
        found = answers.several(13)
        assert sorted(message.host for message in found) == list(range(13))
        assert {(m.kind, m.mesh, m.head["deep"][0], bytes(m.data)) for m in found} == {("echo", 5, 1, b"bytes")}


def test_thousands_of_messages_are_sent_without_waiting_for_any() -> None:
    count = 5_000
    with running(3) as hosts, attached(hosts, fan_out=1) as tree:
        answers = Subscriber(tree)
        for at in range(count):
            tree.send(Message("progress", head={"numbers": [at]}))
        answers.until(lambda message: message.progress == (count - 1,))
        assert [host.made[0].got.qsize() for host in hosts] == [count] * 3


def test_a_message_for_some_reaches_those_only() -> None:
    with running(13) as hosts, attached(hosts, fan_out=3) as tree:
        answers = Subscriber(tree)
        tree.send(Message("some"), hosts=[11, 2, 3, 7])
        assert sorted(message.host for message in answers.several(4)) == [2, 3, 7, 11]
        tree.send(Message("all"))
        assert sorted(message.host for message in answers.several(13)) == list(range(13))
        got = {number: host.made[0].got.get().kind for number, host in enumerate(hosts)}
        assert {number for number, kind in got.items() if kind == "some"} == {2, 3, 7, 11}


def test_messages_of_a_mesh_come_in_the_order_sent() -> None:
    sizes = [0, 3 * limits.PART_BYTES + 1, 5, limits.PART_BYTES, 0, limits.PART_BYTES + 1]
    with running(5) as hosts, attached(hosts, fan_out=2) as tree:
        for at, size in enumerate(sizes):
            tree.send(Message("quiet", 1, head={"at": at}, data=bytes([at]) * size))
        for host in hosts:
            service = host.services.get(timeout=SECONDS)
            for at, size in enumerate(sizes):
                message = service.got.get(timeout=SECONDS)
                assert message.head == {"at": at} and message.data == bytes([at]) * size


def test_progress_is_the_least_of_all_hosts_and_only_grows() -> None:
    with running(7) as hosts, attached(hosts, fan_out=2) as tree:
        answers = Subscriber(tree)
        tree.send(Message("quiet"))  # the mesh is on all seven
        for host in range(7):
            tree.send(Message("progress", head={"numbers": [10 - host, host]}), hosts=[host])
        tree.send(Message("progress", head={"numbers": [20, 20]}), hosts=[6])
        tree.send(Message("progress", head={"numbers": [9, 9]}), hosts=range(6))
        said = [answers.next().progress]
        while said[-1] != (9, 9):
            said.append(answers.next().progress)
        assert all(a <= c and b <= d and (a, b) != (c, d) for (a, b), (c, d) in zip(said, said[1:], strict=False))


def test_hosts_that_cannot_be_reached_are_all_named_and_none_stays_attached() -> None:
    with running(4) as hosts:
        dead = ["127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"]
        addresses = [hosts[0].address, dead[0], dead[1], hosts[1].address, hosts[2].address, dead[2], hosts[3].address]
        with pytest.raises(MonarchError, match="3 of 7 hosts cannot be attached") as error:
            HostTree(addresses, token_security(), fan_out=2)
        for address in dead:
            assert f"{address}: " in str(error.value)
        for host in hosts:
            while True:
                try:
                    service = host.services.get_nowait()
                except queue.Empty:
                    break
                assert service.ended.wait(SECONDS)


def test_a_service_that_fails_is_the_loss_of_its_host() -> None:
    with running(5) as hosts, attached(hosts, fan_out=2) as tree:
        answers = Subscriber(tree)
        tree.send(Message("fail"), hosts=[0])
        ((host, reason),) = answers.lost(1).items()
        assert host == 0 and hosts[0].address in reason and "RuntimeError: it was asked to" in reason
        assert hosts[0].made[0].ended.wait(SECONDS)
        tree.send(Message("after"))
        assert sorted(message.host for message in answers.several(4)) == [1, 2, 3, 4]


def test_what_a_service_says_before_it_fails_arrives_before_its_loss() -> None:
    with running(2) as hosts, attached(hosts, fan_out=1) as tree:
        heard: queue.SimpleQueue[object] = queue.SimpleQueue()
        tree.subscribe(0, heard.put, lambda host, reason: heard.put(host))
        tree.send(Message("fail", head={"last": 5 * limits.FRAME_BYTES}), hosts=[1])
        last = heard.get(timeout=SECONDS)
        assert isinstance(last, Message) and len(last.data) == 5 * limits.FRAME_BYTES
        assert heard.get(timeout=SECONDS) == 1


def test_a_service_whose_progress_changes_its_length_is_lost() -> None:
    with running(2) as hosts, attached(hosts, fan_out=1) as tree:
        answers = Subscriber(tree)
        tree.send(Message("progress", head={"numbers": [1, 2]}), hosts=[1])
        tree.send(Message("progress", head={"numbers": [3]}), hosts=[1])
        ((host, reason),) = answers.lost(1).items()
        assert host == 1 and "1 numbers, not 2" in reason
        tree.send(Message("hello"))
        assert answers.until(lambda message: message.kind == "echo").host == 0


def test_the_loss_of_a_relay_is_that_of_its_subtree() -> None:
    with running(7) as hosts, attached(hosts, fan_out=2) as tree:
        answers = Subscriber(tree)
        hosts[0].agent.close("somebody pulled the plug")
        lost = answers.lost(3)
        assert sorted(lost) == [0, 1, 2]
        assert all("somebody pulled the plug" in reason for reason in lost.values())
        assert f"reached over {hosts[0].address}" in lost[2]
        late = Subscriber(tree, 9)
        assert sorted(late.lost(3)) == [0, 1, 2]


def test_controllers_that_attach_the_same_hosts_know_nothing_of_each_other() -> None:
    with running(3) as hosts, attached(hosts) as one, attached(hosts) as two:
        first, second = Subscriber(one), Subscriber(two)
        one.send(Message("of", head={"the": "first"}))
        two.send(Message("of", head={"the": "second"}))
        assert {message.head["the"] for message in first.several(3)} == {"first"}
        assert {message.head["the"] for message in second.several(3)} == {"second"}
        one.close()
        assert all(host.made[0].ended.wait(SECONDS) for host in hosts)
        two.send(Message("of", head={"the": "second"}))
        second.several(3)
        assert not any(host.made[1].ended.is_set() for host in hosts)


def test_a_closed_tree_sends_nothing() -> None:
    with running(1) as hosts, attached(hosts) as tree:
        tree.close()
        with pytest.raises(MonarchError, match="detached"):
            tree.send(Message("late"))


def test_hosts_join_a_tree_and_get_the_next_numbers() -> None:
    with running(5) as hosts, attached(hosts[:3], fan_out=1) as tree:
        answers = Subscriber(tree, 5)
        tree.send(Message("hello", 5))
        assert sorted(message.host for message in answers.several(3)) == [0, 1, 2]
        for failed in ("127.0.0.1:1", "127.0.0.1:2"):
            with pytest.raises(MonarchError, match=f"1 of 1 hosts cannot be attached:\n  {failed}: "):
                tree.join(failed)
        for number in (3, 4):
            tree.join(hosts[number].address)
        with pytest.raises(MonarchError, match=f"{hosts[4].address} is twice among the hosts"):
            tree.join(hosts[4].address)
        assert [host.address for host in tree.hosts] == [host.address for host in hosts]
        assert [host.number for host in tree.hosts] == list(range(5))
        tree.send(Message("hello", 5))
        assert sorted(message.host for message in answers.several(5)) == list(range(5))
        tree.send(Message("some", 5), hosts=[3])
        assert answers.next().host == 3
        for numbers in ([1], [2]):  # the least of all is told, though others could not join
            tree.send(Message("progress", 5, head={"numbers": numbers}), hosts=range(5))
            assert answers.next().progress == tuple(numbers)
        hosts[3].agent.close()
        assert answers.lost(1).keys() == {3}
        tree.send(Message("hello", 5))
        assert sorted(message.host for message in answers.several(4)) == [0, 1, 2, 4]
    with pytest.raises(MonarchError, match="the hosts are detached"):
        tree.join("127.0.0.1:1")
