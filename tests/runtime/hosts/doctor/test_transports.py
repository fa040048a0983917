"""Transports are measured between two real processes, and what does not work says why."""

from __future__ import annotations

import multiprocessing
import os

import pytest

from monarch.runtime.hosts.doctor import transports
from monarch.runtime.transport import plug

SIZE = 1 << 20


def test_transports_of_this_machine() -> None:
    measured = transports.measure_transports(size=SIZE)
    assert [each.transport for each in measured] == list(plug.TRANSPORTS)
    for each in measured:
        assert bool(each.missing) != bool(each.write and each.read), each
    (tcp,) = (each for each in measured if each.transport == "tcp")
    assert not tcp.missing
    assert multiprocessing.active_children() == []


def test_a_copy_in_memory() -> None:
    assert transports.measure_copy(SIZE) > 0


def test_what_cannot_be_used_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    from monarch.runtime.transport.tcp import TcpTransport

    monkeypatch.setattr(TcpTransport, "available", lambda self: "there is no network")
    (measured,) = transports.measure_transports(["tcp"], SIZE)
    assert measured.missing == "there is no network"


def test_a_partner_that_ends_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transports, "serve", lambda *_: os._exit(1))
    first, second = transports.measure_transports(["tcp", "tcp"], SIZE)
    assert first.missing == second.missing == "the other process ended"


def test_bytes_that_are_not_read_back_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    from monarch.runtime.transport.stream import StreamLink

    put = StreamLink.put
    monkeypatch.setattr(StreamLink, "put", lambda self, source, *rest: put(self, bytes(len(source)), *rest))
    (measured,) = transports.measure_transports(["tcp"], SIZE)
    assert "the bytes read back differ" in measured.missing
