"""A bit that differs between workers that are to hold the same is found, named, and mended from the others."""

from __future__ import annotations

import pickle
import random
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import monarch
from monarch.compiler.plan import MeshSpec
from monarch.distributed import Mesh
from monarch.exceptions import MonarchError, ReplicaError
from monarch.runtime.shared.bits import bit_sum
from monarch.testing import chaos
from tests.healing.training import Training
from tests.runtime.building import whole
from tests.runtime.collectives.loopback import executor_on

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex128]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_one_bit_changes_the_sum(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (100 * torch.rand(5, 3)).to(dtype)
    for bit in range(8 if dtype == torch.bool else 8 * dtype.itemsize):
        other = x.clone()
        other.view(-1)[7:8].view(torch.uint8)[bit // 8] ^= 1 << bit % 8
        if dtype != torch.bool or bit == 0:
            assert bit_sum(other) != bit_sum(x)
    assert bit_sum(x.t()) == bit_sum(x)


class Replicated(Training):
    """All but one layer, which is sharded over `model`, is replicated."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__(mesh, nn.BatchNorm1d(12), {"*": None, "2.weight": "[@model, -]"})
        self.batch = torch.randn(12, 6)

    def run(self, steps: int) -> list[float]:
        return [self.step(self.batch).item() for _ in range(steps)]


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with Mesh(data=3, model=2) as mesh:
        yield mesh


def test_the_worker_that_differs_is_named_and_restored_from_the_others(mesh: Mesh) -> None:
    training = Replicated(mesh)
    training.run(2)
    before = mesh.executor.worker_pids()  # type: ignore[attr-defined]
    mesh.check_replicas()
    moment = training.optimizer.state[training.model[2].weight]["exp_avg"]
    chaos.flip(mesh, 4, moment, 77)
    with pytest.raises(ReplicaError) as raised:
        mesh.check_replicas()
    error = raised.value
    assert (error.workers, error.worker, error.decided, error.mesh_lost) == ((4,), 4, True, True)
    assert error.coordinates == {"data": 2, "model": 0}
    (name,) = error.tensors
    assert "exp_avg" in name and "2.weight" in name
    assert "worker data=2, model=0 of mesh<data=3, model=2> holds other bits than the replicas of 1 tensor" in str(
        error
    )
    assert f"{name}: f32[6@model, 12], 144 B a worker: data=2, model=0 against 2 that agree" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.facts) == (ReplicaError, error.facts)

    with pytest.raises(ReplicaError):  # it counts as lost
        training.step(training.batch)
    assert monarch.heal_mesh(mesh) is mesh
    after = mesh.executor.worker_pids()  # type: ignore[attr-defined]
    assert [one == other for one, other in zip(before, after, strict=True)] == [rank != 4 for rank in range(6)]
    mesh.check_replicas()
    assert moment.to_local(data=2).equal(moment.to_local(data=0))


def test_training_goes_on_with_the_bits_that_it_has_without_the_fault(mesh: Mesh) -> None:
    """The flipped bit is of a value that no step reads before it is found."""
    training = Replicated(mesh)
    read = training.run(3)
    mesh.check_replicas(every=1)
    chaos.flip(mesh, 3, training.model[1].num_batches_tracked, 20)
    with pytest.raises(ReplicaError) as raised:
        while len(read) < 100:
            read += training.run(1)
    assert raised.value.workers == (3,) and raised.value.tensors == ("1.num_batches_tracked",)
    monarch.heal_mesh(mesh)
    read += training.run(3)
    mesh.check_replicas()
    assert training.model[1].num_batches_tracked.item() == len(read)
    mesh.check_replicas(every=0)
    assert read == Replicated(mesh).run(len(read))


def test_of_two_replicas_both_are_named() -> None:
    with Mesh(data=2, model=2) as mesh:
        training = Replicated(mesh)
        training.run(1)
        chaos.flip(mesh, 1, training.model[2].weight, 3)
        with pytest.raises(ReplicaError) as raised:
            mesh.check_replicas()
        error = raised.value
        assert (error.workers, error.decided, error.mesh_lost) == ((1, 3), False, False)
        assert "the replicas of 1 tensor of mesh<data=2, model=2> hold different bits: worker data=0, model=1; worker "
        assert "Which of them are right nobody can say" in error.hint
        training.run(1)  # the mesh goes on


def test_what_the_background_finds_the_next_call_raises_once() -> None:
    with Mesh(data=2, model=2) as mesh:
        training = Replicated(mesh)
        training.run(1)
        mesh.check_replicas(every=2)
        training.run(4)
        chaos.flip(mesh, 2, training.model[2].weight, 29)
        with pytest.raises(ReplicaError):
            training.run(100)
        mesh.check_replicas(every=0)
        training.run(6)


def test_tensors_outside_of_programs_and_on_parts_are_checked(mesh: Mesh) -> None:
    part = mesh.slice(model=1)
    x = monarch.distribute(torch.ones(3), part)
    y = x + 1
    mesh.check_replicas()
    chaos.flip(part, 1, y)
    with pytest.raises(ReplicaError) as raised:
        part.check_replicas()
    assert raised.value.workers == (3,)
    assert "a value: f32[3]" in raised.value.hint


def test_what_each_worker_has_of_its_own_is_no_replica(mesh: Mesh) -> None:
    shards = [monarch.distribute(torch.rand(6, 4), mesh, "[@(data,model), -]")]
    with mesh.activate():
        shards.append(mesh.rank("data") + mesh.rank("model"))
    mesh.check_replicas()
    chaos.flip(mesh, 5, shards[0])
    mesh.check_replicas()


def test_random_flips_are_all_found(mesh: Mesh) -> None:
    """Each in a random tensor at a random bit, on a random worker."""
    training, chance = Replicated(mesh), random.Random(3)
    training.run(1)
    mesh.check_replicas(every=3)
    for _ in range(4):
        training.run(chance.randrange(3))
        values = [*training.model.parameters(), *training.model.buffers()]
        values += [each for state in training.optimizer.state.values() for each in state.values()]
        value, worker = chance.choice(values), chance.randrange(6)
        chaos.flip(mesh, worker, value, chance.randrange(8 * value.dtype.itemsize))
        with pytest.raises(ReplicaError) as raised:
            mesh.check_replicas()
        assert raised.value.workers == (worker,)
        monarch.heal_mesh(mesh)
        mesh.check_replicas()


def test_a_host_is_named() -> None:
    spec = MeshSpec.of(a=4)
    with executor_on("hosts", spec) as executor:
        kept = executor.put(torch.arange(4.0), whole((4,)))
        executor.check_replicas(None, lambda: [("kept", kept)])
        executor.inject(3, 11, -1, 5, kept.id)
        with pytest.raises(ReplicaError) as raised:
            executor.check_replicas(None, lambda: [("kept", kept)])
        assert raised.value.host == "host1:4242" and raised.value.tensors == ("kept",)
        assert executor.heal([("kept", kept)]) is False
        executor.check_replicas(None, list)
        assert all(torch.equal(each, torch.arange(4.0)) for each in executor.shards(kept))


def test_errors_say_what_to_do(mesh: Mesh) -> None:
    with pytest.raises(MonarchError, match="every -1 steps"):
        mesh.check_replicas(every=-1)
    x = monarch.distribute(torch.ones(3), mesh)
    with pytest.raises(MonarchError, match="no bit -1"):
        chaos.flip(mesh, 0, x, -1)
    with pytest.raises(MonarchError, match="tensors that are on the mesh"):
        chaos.flip(mesh.slice(data=0), 0, x)
