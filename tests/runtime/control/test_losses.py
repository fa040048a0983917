"""Hosts and controllers that die, freeze or are slow: noticed within a bound, and nobody else's trouble."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from monarch.compiler.plan import MonarchError
from monarch.runtime.control import limits
from monarch.runtime.control.handshake import ControllerHandshake, Session
from monarch.runtime.control.host_info import release
from monarch.runtime.control.message import Message
from monarch.runtime.control.records import Attach
from monarch.runtime.control.security import split_address
from monarch.runtime.control.stream import Stream
from monarch.runtime.control.tree import HostTree
from monarch.testing import chaos
from tests.runtime.control.hosts import SECONDS, Subscriber, attached, running, token_security
from tests.runtime.control.process import process
from tests.runtime.control.raw import Proxy, raw
from tests.runtime.control.test_security import heard, sealed

BOUND = 1.0


@contextmanager
def tree_of(addresses: list[str], **more: Any) -> Iterator[HostTree]:
    tree = HostTree(addresses, token_security(), **more)
    try:
        yield tree
    finally:
        tree.close()


def test_a_killed_host_is_lost_and_the_others_go_on() -> None:
    with running(2) as hosts, process("host") as (victim, address):
        tree = HostTree([hosts[0].address, address, hosts[1].address], token_security())
        answers = Subscriber(tree)
        tree.send(Message("hello"))
        answers.several(3)
        victim.kill()
        ((host, reason),) = answers.lost(1).items()
        assert host == 1 and address in reason
        tree.send(Message("hello"))
        assert sorted(message.host for message in answers.several(2)) == [0, 2]
        tree.close()


def test_a_frozen_relay_is_lost_with_its_subtree_while_the_others_go_on() -> None:
    with running(3) as hosts, process("host") as (victim, address):
        # With a fan-out of 2: host 0 with host 1 beneath it, host 2 with host 3 beneath it.
        tree = HostTree(
            [address, hosts[0].address, hosts[1].address, hosts[2].address], token_security(), fan_out=2, timeout=BOUND
        )
        answers = Subscriber(tree)
        victim.send_signal(signal.SIGSTOP)
        for at in range(20):
            tree.send(Message("hello", head={"at": at}, data=bytes(limits.PART_BYTES)))
        found = answers.several(40)
        assert {message.host for message in found} == {2, 3}
        lost = answers.lost(2)
        assert f"nothing was heard from it for {BOUND:g} s" in lost[0]
        assert f"reached over {address}" in lost[1]
        assert hosts[0].made[0].ended.wait(SECONDS)  # which hears nothing from the one above it either
        victim.send_signal(signal.SIGCONT)
        tree.close()


def test_a_frozen_host_fills_the_queues_above_it_and_only_it_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "QUEUE_BYTES", 1 << 20)
    with running(2) as hosts, process("host") as (victim, address):
        addresses = [hosts[0].address, hosts[1].address, address]
        tree = HostTree(addresses, token_security(), fan_out=1, timeout=BOUND)
        answers = Subscriber(tree)
        victim.send_signal(signal.SIGSTOP)
        for _ in range(40):
            tree.send(Message("quiet", data=bytes(1 << 20)))
        ((host, reason),) = answers.lost(1).items()
        assert host == 2 and address in reason
        tree.send(Message("hello"))
        assert sorted(message.host for message in answers.several(2)) == [0, 1]
        assert [host.made[0].got.qsize() for host in hosts] == [41, 41]
        victim.send_signal(signal.SIGCONT)
        tree.close()


def test_a_service_that_takes_nothing_is_lost_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "QUEUE_BYTES", 1 << 20)
    with running(3) as hosts, attached(hosts, fan_out=1, timeout=BOUND) as tree:
        answers = Subscriber(tree)
        tree.send(Message("hold"), hosts=[1])
        for _ in range(4):
            tree.send(Message("hello", data=bytes(1 << 20)))
        found = answers.several(8)
        assert sorted(message.host for message in found) == [0] * 4 + [2] * 4
        ((host, reason),) = answers.lost(1).items()
        assert host == 1 and f"its service has taken nothing for {BOUND:g} s" in reason
        tree.send(Message("hello"))
        assert sorted(message.host for message in answers.several(2)) == [0, 2]
        hosts[1].made[0].let_go.set()


def test_a_service_that_is_busy_holds_up_no_other_controller_and_no_relaying() -> None:
    with running(2) as hosts, attached(hosts, fan_out=1) as one, attached(hosts, fan_out=1) as two:
        first, second = Subscriber(one), Subscriber(two)
        one.send(Message("hold"), hosts=[0])
        one.send(Message("hello"))
        two.send(Message("hello"))
        assert first.next().host == 1
        assert sorted(message.host for message in second.several(2)) == [0, 1]
        hosts[0].made[0].let_go.set()
        assert [first.next().head, first.next().head] == [{}, {}]


def test_a_large_message_of_one_mesh_does_not_hold_up_another() -> None:
    with running(1) as hosts, attached(hosts) as tree:
        large, small = Subscriber(tree, 1), Subscriber(tree, 2)
        tree.send(Message("quiet", 1, data=bytes(64 << 20)))
        tree.send(Message("hello", 2))
        small.next()
        service = hosts[0].made[0]
        assert service.got.get(timeout=SECONDS).mesh == 2
        assert len(service.got.get(timeout=SECONDS).data) == 64 << 20
        assert large.messages.empty()


def test_sending_waits_for_a_host_that_takes_nothing_and_for_no_longer_than_it_is_attached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(limits, "QUEUE_BYTES", 1 << 20)
    with running(1) as hosts, attached(hosts, timeout=BOUND) as tree:
        lost = Subscriber(tree)
        tree.send(Message("hold"))
        with pytest.raises(MonarchError, match="all 1 hosts are lost: .*has taken nothing"):
            while True:
                tree.send(Message("x", data=bytes(1 << 20)))
        assert list(lost.lost(1)) == [0]
        hosts[0].made[0].let_go.set()


def test_a_cut_connection_is_noticed_by_both_ends() -> None:
    with running(2) as hosts:
        proxy = Proxy(hosts[1].address)
        with_proxy = HostTree([hosts[0].address, proxy.address], token_security(), timeout=BOUND)
        answers = Subscriber(with_proxy)
        proxy.cut()
        assert list(answers.lost(1)) == [1]
        assert hosts[1].made[0].ended.wait(SECONDS)
        with_proxy.close()


def test_what_was_not_begun_when_the_controller_was_lost_is_not_done() -> None:
    with running(1) as (host,):
        proxy = Proxy(host.address)
        tree = HostTree([proxy.address], token_security())
        answers = Subscriber(tree)
        tree.send(Message("hello"))
        answers.next()
        tree.send(Message("hold"))
        tree.send(Message("hello", 1))
        assert host.made[0].holds.wait(SECONDS)
        with heard(logging.INFO) as lines:
            proxy.cut()
            while "detached" not in lines.get(timeout=SECONDS):
                pass
        service = host.made[0]
        service.let_go.set()
        assert service.ended.wait(SECONDS)
        assert [service.got.get().kind for _ in range(service.got.qsize())] == ["hello", "hold"]
        tree.close()


def test_what_was_sent_before_closing_is_done() -> None:
    with running(3) as hosts:
        with attached(hosts, fan_out=1) as tree:
            for _ in range(100):
                tree.send(Message("quiet"))
        assert [host.made[0].got.qsize() for host in hosts] == [100] * 3
        assert all(host.made[0].ended.is_set() for host in hosts)


def test_the_death_of_the_controller_ends_what_runs_for_it_everywhere() -> None:
    with running(3) as hosts:
        with process("controller", *(host.address for host in hosts)) as (controller, line):
            assert line == "attached"
            controller.kill()
            assert all(host.made[0].ended.wait(SECONDS) for host in hosts)


def test_a_controller_that_freezes_is_given_up() -> None:
    """One that says nothing at all, where ours would say something several times a second."""
    with running(1) as (host,), raw(host.address) as stream:
        seal = sealed(stream)
        stream.write(seal(Attach(0, (host.address,), 8, BOUND)))
        assert host.services.get(timeout=SECONDS).ended.wait(SECONDS)
        # It may go on then, as after Ctrl-Z, and hears why; over another connection too, where this one broke.
        why = f"the host has given this controller up: nothing was heard from it for {BOUND:g} s"
        assert stream.refusal() == ("ABORTED", why)
        stream.end()
        stream.begin()
        stream.write(ControllerHandshake(token_security().secret, release(), stream.session).hello())
        assert stream.refusal() == ("NOT_FOUND", why)


def test_a_controller_that_ends_without_closing_ends_quietly() -> None:
    with running(1) as hosts, process("controller", hosts[0].address) as (controller, line):
        assert line == "attached"
        assert controller.communicate(timeout=SECONDS) == ("", "")
        assert controller.returncode == 0
        assert hosts[0].made[0].ended.wait(SECONDS)


def test_a_host_that_accepts_connections_and_says_nothing_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(MonarchError, match=f"{address}: no answer within 0.5 s"):
            HostTree([address], token_security(), timeout=0.5)


def test_what_a_fork_of_the_controller_does_is_no_matter_of_the_hosts() -> None:
    with running(1) as hosts, attached(hosts) as tree:
        answers = Subscriber(tree)
        child = os.fork()
        if child == 0:
            try:
                tree.close()
                tree.send(Message("hello"))
            except MonarchError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        tree.send(Message("hello"))
        assert answers.next().kind == "echo"


def test_grpc_is_loaded_when_hosts_are_used_and_not_before() -> None:
    code = (
        "import sys, monarch, monarch.runtime.control.security, monarch.runtime.control.message\n"
        "assert not {'grpc', 'google.protobuf', 'cryptography'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=SECONDS)


def test_an_address_is_split() -> None:
    assert split_address("node1:4242") == ("node1", 4242)
    assert split_address("[fd00::1]:1") == ("fd00::1", 1)
    for wrong in ("node1", "node1:", ":1", "fd00::1:1", "a b:1", "node1:70000", "node1:x", "http://node1:1"):
        with pytest.raises(MonarchError, match="no address of a host"):
            split_address(wrong)


# -- connections that break ----------------------------------------------------------------------------------------


def test_a_session_goes_on_over_a_new_connection_and_nothing_is_lost_or_done_twice() -> None:
    with running(2) as hosts, chaos.Link(hosts[0].address) as link:
        tree = HostTree([link.address, hosts[1].address], token_security())
        answers = Subscriber(tree)
        for at in range(60):
            tree.send(Message("count", head={"at": at}, data=bytes(100_000 * (at % 3))))
            if at % 7 == 3:
                link.cut()
        found = answers.several(120)
        for host in (0, 1):
            assert [message.head["at"] for message in found if message.host == host] == list(range(60))
        assert len(hosts[0].made) == 1 and hosts[0].made[0].got.qsize() == 60
        assert answers.losses.empty()
        tree.close()
        assert all(host.made[0].ended.is_set() for host in hosts)


def test_the_connection_between_two_hosts_is_made_anew_by_the_upper_one() -> None:
    with running(2) as hosts, chaos.Link(hosts[1].address) as link:
        with tree_of([hosts[0].address, link.address], fan_out=1) as tree:
            answers = Subscriber(tree)
            for at in range(10):
                link.cut()
                tree.send(Message("count", head={"at": at}))
            found = answers.several(20)
            assert [message.head["at"] for message in found if message.host == 1] == list(range(10))
            assert answers.losses.empty()


def test_a_connection_that_something_between_has_forgotten_is_made_anew() -> None:
    """Nothing comes through any more, and nobody is told: what a firewall does that drops a flow."""
    with running(1) as hosts, chaos.Link(hosts[0].address) as link:
        with tree_of([link.address], timeout=4 * BOUND) as tree:
            answers = Subscriber(tree)
            tree.send(Message("hello"))
            answers.next()
            link.forget()
            tree.send(Message("hello"))
            assert answers.next().kind == "echo" and answers.losses.empty()


def test_a_host_that_no_connection_reaches_is_lost_within_its_bound() -> None:
    with running(2) as hosts, chaos.Link(hosts[1].address) as link:
        with tree_of([hosts[0].address, link.address], timeout=BOUND, reconnect=BOUND) as tree:
            answers = Subscriber(tree)
            link.hold()  # new connections too
            link.cut()
            assert list(answers.lost(1)) == [1]
            assert hosts[1].made[0].ended.wait(SECONDS)


def test_without_a_bound_to_reconnect_a_cut_ends_the_session() -> None:
    with running(1) as hosts, chaos.Link(hosts[0].address) as link:
        with tree_of([link.address], reconnect=0.0) as tree:
            answers = Subscriber(tree)
            link.cut()
            assert list(answers.lost(1)) == [0]
            assert hosts[0].made[0].ended.wait(SECONDS)


def test_a_connection_that_breaks_while_it_takes_over_does_not_keep_its_session(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A controller connects again, and is cut off again before the host has let go of the connection before."""
    plain, takes_over = Stream.run, threading.Event()

    async def run(self: Stream, *given: Any) -> str:
        try:
            return await plain(self, *given)
        except asyncio.CancelledError:
            takes_over.set()
            await asyncio.sleep(BOUND / 2)
            raise

    monkeypatch.setattr(Stream, "run", run)
    with running(1) as (host,), raw(host.address) as stream, raw(host.address) as second:
        seal = sealed(stream)
        stream.write(seal(Attach(0, (host.address,), 8, SECONDS, BOUND)))
        service = host.services.get(timeout=SECONDS)
        again = ControllerHandshake(token_security().secret, release(), stream.session)
        second.write(again.hello())
        second.write(again.prove(second.read()))
        assert takes_over.wait(SECONDS)
        second.end()
        assert service.ended.wait(SECONDS)


def test_a_stranger_who_names_a_session_does_not_end_its_connection() -> None:
    with running(1) as hosts, attached(hosts) as tree, raw(hosts[0].address) as stream:
        (name,) = hosts[0].agent.sessions
        answers = Subscriber(tree)
        stranger = ControllerHandshake(token_security().secret, release(), Session(name, bytes(32)))
        stream.write(stranger.hello())
        stream.write(stranger.prove(stream.read()))
        assert stream.refusal()[0] == "UNAUTHENTICATED"
        tree.send(Message("hello"))
        assert answers.next().kind == "echo" and answers.losses.empty()
