"""Random programs whose workers die at random points end with the bits of a run without deaths; and ops outside of
programs are applied, or told not to be."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
import torch

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import DeviceMeshError
from tests.healing.randomly import Deaths, run, scaled


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2, model=2) as mesh:
        yield mesh


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", [7, 16])
def test_deaths_change_no_bit(mesh: Mesh, seed: int) -> None:
    deaths = Deaths(mesh, seed, 0.15)
    found = run(mesh, seed, 40, deaths)
    with Mesh(data=2, model=2) as other:
        expected = run(other, seed, 40, None)
    assert deaths.heals
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


def kill(mesh: Mesh) -> None:
    """And wait until the mesh knows."""
    executor = mesh.executor
    os.kill(executor.worker_pids()[1], signal.SIGKILL)  # type: ignore[attr-defined]
    with pytest.raises(DeviceMeshError, match="SIGKILL"):
        while True:
            monarch.distribute(torch.zeros(1), mesh, "[-]").full_tensor()


def test_ops_before_a_call_that_raises_are_applied(mesh: Mesh) -> None:
    x = monarch.distribute(torch.ones(2), mesh, "[-]")
    scaled(x, 1.0)
    kill(mesh)
    x.mul_(3)
    with pytest.raises(DeviceMeshError) as info:
        scaled(x, 1.0)
    assert info.value.mesh_lost and info.value.program == "scaled"
    monarch.heal_mesh(mesh)
    assert scaled(x, 1.0).full_tensor().tolist() == [3.5, 3.5]
    assert x.full_tensor().tolist() == [3, 3]


def test_ops_whose_result_raises_are_not_applied(mesh: Mesh) -> None:
    """Reading a tensor that they had changed in place gave its value from before, without an error."""
    x = monarch.distribute(torch.ones(2), mesh, "[-]")
    kill(mesh)
    x.mul_(3)
    y = x + 1
    with pytest.raises(DeviceMeshError) as info:
        x.full_tensor()
    assert info.value.mesh_lost
    monarch.heal_mesh(mesh)
    assert x.full_tensor().tolist() == [1, 1]
    with pytest.raises(DeviceMeshError):
        y.full_tensor()
    x.mul_(3)
    assert x.full_tensor().tolist() == [3, 3]
