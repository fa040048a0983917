"""`redundancy=1`: state that is on one worker alone survives the loss of any one, without a lost step."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch.compiler.plan import MeshSpec
from monarch.compiler.survival import Cluster, copies_for, worker_bytes
from monarch.distributed import Mesh
from monarch.exceptions import DeviceMeshError, MonarchError
from monarch.testing import chaos
from tests.healing.training import Training
from tests.runtime.building import Building, each, whole
from tests.runtime.collectives.loopback import executor_on

STEPS = 9
SHARDED = {"*weight": "[@data, -]", "*bias": "[@data]"}


def training(mesh: Mesh, layouts: Any = SHARDED, redundancy: int = 1) -> Training:
    return Training(mesh, nn.ReLU(), layouts, redundancy=redundancy)


def run(trained: Training, mesh: Mesh, kills: dict[int, int]) -> list[float]:
    """The losses of training in which at these steps these workers are killed."""
    read: list[float] = []
    while len(read) < STEPS:
        try:
            if len(read) in kills:
                chaos.kill(mesh, kills.pop(len(read)), instruction=20)
            read.append(trained.step(torch.full((12, 6), float(len(read)))).item())
        except DeviceMeshError:
            monarch.heal_mesh(mesh)
    return read


@pytest.fixture(scope="module")
def undisturbed() -> list[float]:
    with Mesh(data=3) as mesh:
        return run(training(mesh, redundancy=0), mesh, {})


@pytest.mark.sample(1)
@pytest.mark.parametrize("first", range(3))
def test_any_one_worker_of_fully_sharded_training_may_die(first: int, undisturbed: list[float]) -> None:
    with Mesh(data=3) as mesh:
        assert run(training(mesh), mesh, {2: first, 6: (first + 1) % 3}) == undisturbed


def test_what_layouts_replicate_is_not_copied() -> None:
    with Mesh(data=2) as mesh:
        replicated = training(mesh, {"*": None})
        run(replicated, mesh, {})
        assert mesh.executor.kept_snapshots is None  # type: ignore[attr-defined]
        assert str(replicated.step.survives(torch.ones(12, 6))).endswith(
            "redundancy=1: no single loss is fatal without copies"
        )


def test_what_the_user_has_said_of_snapshots_stands() -> None:
    with Mesh(data=2) as mesh:
        mesh.snapshots(every=0)
        run(training(mesh), mesh, {})
        assert mesh.executor.kept_snapshots is None  # type: ignore[attr-defined]


def test_its_cost_is_said() -> None:
    with Mesh.abstract(data=2) as mesh:
        survival = training(mesh).step.survives(torch.ones(12, 6))
        assert survival.copies is not None and set(survival.copies.tensors) == set(survival.lost("1 worker"))
        sizes = {name: worker_bytes(type_, mesh.spec) for name, type_ in survival.states.items()}
        held, sent = sum(sizes.values()), sum(sizes[name] for name in survival.copies.tensors)
        assert (survival.copies.memory, survival.copies.sent) == (2 * (held + sent), sent)
        assert "so that no single loss is fatal" in str(survival) and "every 10 steps" in str(survival)


def test_there_has_to_be_another_worker() -> None:
    with Mesh(data=1) as mesh, pytest.raises(MonarchError, match="no other worker to keep copies"):
        training(mesh).step(torch.ones(12, 6))
    with pytest.raises(MonarchError, match="redundancy='2'"):
        monarch.program(lambda x: x, redundancy=2)


def test_a_host_counts_as_one_loss() -> None:
    """What only the workers of one host hold is copied to another, though two of them hold it."""
    mesh = MeshSpec.of(a=2, b=2)
    along = whole((4,))
    sharded = each(MeshSpec.of(a=2), (4,))
    assert copies_for({"x": sharded, "y": along}, Cluster(mesh, 2)).tensors == ("x",)
    assert copies_for({"x": sharded, "y": along}, Cluster(mesh)).tensors == ()
    with executor_on("hosts", mesh) as executor:
        value = torch.arange(4.0)
        # Made by the workers: what the controller has placed it can place again.
        build = Building(mesh, "make")
        x = build.input(sharded)
        build.output(build.call("aten.add.Tensor", x, 1.0), sharded)
        (made,) = executor.run(build.plan(), [value])
        executor.snapshots(5, 1)
        pids = executor.worker_pids()
        for rank in (0, 1):  # all of one host's
            os.kill(pids[rank], signal.SIGKILL)
        with pytest.raises(DeviceMeshError):
            while True:
                executor.put(value, along)
        executor.heal([("made", made)])
        assert torch.equal(torch.cat(executor.shards(made, [0, 2])), value + 1)
