"""Fixtures of the transports' suite. See `peers`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from monarch.runtime.transport import process_vm
from monarch.runtime.transport.endpoint import Endpoint
from monarch.runtime.transport.stream import StreamLink
from monarch.runtime.transport.verbs import adapter
from tests.runtime.transport.libcuda import standin
from tests.runtime.transport.peers import PATIENCE, WAYS, Peer, Way, peers, write_certificates


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    write_certificates(folder)
    return folder


@pytest.fixture(scope="session")
def libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the stand-in of the CUDA driver."""
    folder = tmp_path_factory.mktemp("libcuda")
    standin.build(folder)
    return folder


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Way]:
    """Each way to be joined, in turn."""
    way: Way = request.param
    why = way.missing()
    if why is not None:
        pytest.skip(why)
    if way.staged:
        monkeypatch.setattr(process_vm, "probe", lambda pid, address, expected: "not permitted in this test")
    if way.library:
        monkeypatch.setattr(adapter, "LIBRARIES", (way.library,))
    if way.tls:
        way = way.within(request.getfixturevalue("certificates"))
    if way.gpu == "stand-in":
        way = way.within(request.getfixturevalue("libcuda"))
    end = way.begin()
    yield way
    end()


@pytest.fixture
def peer(way: Way) -> Iterator[Peer]:
    """Another process with an endpoint."""
    with peers(way) as (peer,):
        yield peer


@pytest.fixture
def endpoint(way: Way, peer: Peer) -> Iterator[Endpoint]:
    """This process's. Made after the peer was forked."""
    with way.endpoint() as endpoint:
        yield endpoint


@pytest.fixture
def link(endpoint: Endpoint, peer: Peer) -> StreamLink:
    return endpoint.connect(peer.address(), timeout=PATIENCE)
