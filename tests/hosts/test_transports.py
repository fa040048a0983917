"""Transports between hosts: which is chosen, what loss does to it, and what a cut cable does."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from monarch.runtime.transport.endpoint import Endpoint
from monarch.runtime.transport.interface import Address, LinkLost, Region, Signal
from monarch.runtime.transport.stream import StreamLink
from tests.hosts.network import Network, Process

pytestmark = pytest.mark.usefixtures("namespaces")

SECRET = "a secret of these tests' hosts"
PATIENCE = 60.0
SIZE = 1 << 20
SMALL = 50_000  # the system's buffers hold it, so that sending returns

# Serves one region; says when a link ends. With the address of another endpoint, fills a region of that, too.
SERVE = """
import json, sys, threading
from monarch.runtime.transport.endpoint import Endpoint

def lost(link, error):
    print("lost", error.message, flush=True)

endpoint = Endpoint(sys.argv[2].encode(), bind=sys.argv[1], patience=float(sys.argv[4]), lost=lost)
registration = endpoint.register(bytearray(int(sys.argv[3])))
print("serves", json.dumps([endpoint.address.to_json(), registration.region.to_json()]), flush=True)
threading.Event().wait()
"""


@dataclass
class Served:
    net: Network
    process: Process
    address: Address
    region: Region
    endpoint: Endpoint
    link: StreamLink
    lost: threading.Event

    def cut(self) -> None:
        self.net.cut(self.net.hosts[0])


@pytest.fixture
def served(two_hosts: Network, request: pytest.FixtureRequest) -> Iterator[Served]:
    """An endpoint on a host, and one here that is joined to it; they bear with silence for 2 s, or as the test says."""
    patience = getattr(request, "param", 2.0)
    host = two_hosts.hosts[0]
    environment = {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = host.program("-c", SERVE, host.address, SECRET, SIZE, patience, environment=environment)
    address, region = json.loads(process.wait_for(r"serves (.*)\n")[1])
    lost = threading.Event()
    with Endpoint(
        SECRET.encode(), bind=two_hosts.address, patience=patience, lost=lambda link, error: lost.set()
    ) as endpoint:
        link = endpoint.connect(Address.from_json(address), timeout=PATIENCE)
        yield Served(two_hosts, process, link.peer, Region.from_json(region), endpoint, link, lost)


def test_hosts_are_told_apart(served: Served) -> None:
    assert served.address.host != served.endpoint.address.host
    assert served.link.transport == "tcp"
    assert "shm: the peer is on another host" in served.link.reasons
    served.link.put(b"x" * SIZE, served.region).wait(PATIENCE)


def test_bytes_survive_loss_and_delay(served: Served) -> None:
    served.net.lengthen(served.net.hosts[0], delay=0.01, loss=0.02)
    data, back = os.urandom(SIZE), bytearray(SIZE)
    works = [served.link.put(data[at : at + 5000], served.region, at) for at in range(0, SIZE, 5000)]
    for work in works:
        work.wait(PATIENCE)
    served.link.post(b"", served.region, 0, Signal(served.region, 0, 77))
    served.link.get(back, served.region).wait(PATIENCE)
    assert back == (77).to_bytes(8, "little") + data[8:]


def test_a_cut_cable_ends_what_is_under_way(served: Served) -> None:
    """Bytes are under way, and are never acknowledged."""
    served.cut()
    works = [served.link.put(bytes(SMALL), served.region), served.link.get(bytearray(SIZE), served.region)]
    for work in works:
        with pytest.raises(LinkLost, match=f"the link to process {served.address.process[:8]} over tcp is lost"):
            work.wait(PATIENCE)
    assert served.lost.wait(PATIENCE)
    served.process.wait_for(r"lost the link to process [0-9a-f]{8} over tcp is lost", PATIENCE)


def test_a_cut_cable_ends_who_waits_in_sending(served: Served) -> None:
    """More is sent than the system's buffers hold, so that the sender waits for room."""
    served.cut()
    with pytest.raises(LinkLost, match="over tcp is lost"):
        while True:
            served.link.post(bytes(SIZE), served.region)


def test_a_cut_cable_is_noticed_by_an_idle_link(served: Served) -> None:
    """Nothing is under way: as with a worker that waits for another's signal."""
    served.cut()
    assert served.lost.wait(PATIENCE)
    with pytest.raises(LinkLost, match="over tcp is lost"):
        served.link.put(b"x", served.region)
    served.process.wait_for(r"lost the link to process [0-9a-f]{8} over tcp is lost", PATIENCE)


@pytest.mark.parametrize("served", [PATIENCE], indirect=True, ids=["patient"])
def test_a_cable_that_is_mended_in_time_is_no_loss(served: Served) -> None:
    served.cut()
    work = served.link.put(b"y" * SMALL, served.region)
    with pytest.raises(TimeoutError):
        work.wait(0.2)
    served.net.mend(served.net.hosts[0])
    work.wait(PATIENCE)
    assert not served.lost.is_set()


def test_connecting_to_a_host_that_is_cut_off_has_an_end(served: Served) -> None:
    served.cut()
    with pytest.raises(Exception, match=r"cannot connect to process [0-9a-f]{8}: not within 0\.5 s"):
        served.endpoint.connect(served.address, timeout=0.5)
