"""What the parts of a plan send each other from host to host."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import DeviceMeshError
from monarch.testing import chaos
from tests.healing.test_lost_hosts import mesh_on
from tests.runtime.stopping import stopped

ROWS = 600_000  # of 6 numbers: more pieces than a worker has slots


@pytest.fixture(scope="module", params=[1, 2])
def root(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    with mesh_on(2, 0, role=2, each=request.param) as (mesh, _):
        yield mesh


def names(mesh: Mesh) -> tuple[Mesh, Mesh]:
    return mesh.slice(role=0), mesh.slice(role=1)


LAYOUTS = [
    ("[@each, -]", "[@each, -]"),
    ("[@each, -]", "[-, @each]"),
    ("[-, -]", "[@each, -]"),
    ("[@each, -]", "[-, -]"),
]


def test_a_sync_to_another_host_gives_the_values(root: Mesh) -> None:
    trainers, readers = names(root)
    value = torch.randn(ROWS, 6)
    source = {str(at): monarch.distribute(value * at, trainers, mine) for at, (mine, _) in enumerate(LAYOUTS)}
    target = {str(at): monarch.distribute(value, readers, theirs) for at, (_, theirs) in enumerate(LAYOUTS)}
    source["few"], target["few"] = (monarch.distribute(torch.ones(3) * at, each) for at, each in enumerate(names(root)))
    source["one"], target["one"] = (monarch.distribute(torch.tensor(at), each) for at, each in enumerate(names(root)))
    for version in (1, 2):
        monarch.sync(source, target)
        assert monarch.version(target) == version
        for at in range(len(LAYOUTS)):
            assert torch.equal(target[str(at)].full_tensor(), value * at)
        assert target["few"].full_tensor().tolist() == [0, 0, 0] and target["one"].item() == 0
        value = value + 1
        for at, (mine, _) in enumerate(LAYOUTS):
            source[str(at)].copy_(monarch.distribute(value * at, trainers, mine))


def test_a_source_goes_on_beside_a_sync_to_a_host_that_is_busy(root: Mesh) -> None:
    trainers, readers = names(root)
    source = {"w": monarch.distribute(torch.zeros(ROWS, 6), trainers, "[@each, -]")}
    target = {"w": monarch.distribute(torch.zeros(ROWS, 6), readers, "[@each, -]")}

    @monarch.program(mesh=trainers)
    def step() -> Any:
        source["w"].add_(1.0)
        return source["w"][0].sum()

    step()
    monarch.sync(source, target)
    with stopped(*readers.executor.worker_pids()):  # type: ignore[attr-defined]
        monarch.sync(source, target)
        for _ in range(3):  # these write over what was not sent yet
            step()
    found = target["w"].full_tensor()
    assert monarch.version(target) == 2 and found.eq(1).all(), (found.min(), found.max())
    monarch.sync(source, target)
    assert target["w"].full_tensor().eq(4).all()


def test_a_sync_to_another_host_that_fails_leaves_the_target(root: Mesh) -> None:
    trainers, readers = names(root)
    source = {"w": monarch.distribute(torch.ones(ROWS, 6), trainers)}
    target = {"w": monarch.distribute(torch.zeros(ROWS, 6), readers)}
    for part in (trainers, readers):
        chaos.fail(part, 0)
        monarch.sync(source, target)
        with pytest.raises(DeviceMeshError, match="InjectedError"):
            monarch.version(target)
        assert monarch.version(target) == 0 and target["w"].full_tensor().eq(0).all()
    monarch.sync(source, target, version=3)
    assert monarch.version(target) == 3 and target["w"].full_tensor().eq(1).all()


def test_a_value_goes_to_another_host_and_back_in_a_step(root: Mesh) -> None:
    first, second = names(root)
    x = torch.randn(ROWS, 6, dtype=torch.float64)

    @monarch.program
    def there_and_back(x: Any) -> Any:
        return x * 2, (x.to(second, "[-, @each]") + 1).to(first, "[-, -]")

    twice, more = there_and_back(monarch.distribute(x, first, "[@each, -]"))
    assert torch.equal(twice.full_tensor(), x * 2) and torch.equal(more.full_tensor(), x + 1)
