"""Two and four hosts to test with, where they can be made."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.hosts.network import Network, network, why_not


@pytest.fixture(scope="session")
def namespaces() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def two_hosts(namespaces: None) -> Iterator[Network]:
    with network(2) as made:
        yield made


@pytest.fixture
def four_hosts(namespaces: None) -> Iterator[Network]:
    with network(4) as made:
        yield made
