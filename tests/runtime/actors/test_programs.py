"""Programs on the processes of actors: meshes there, tensors in messages, and shards that actors make."""

from __future__ import annotations

import gc
import os
import queue
import random
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch import DistributedTensor, LayoutError, MonarchError
from monarch.actor import (
    Actor,
    ActorError,
    Channel,
    MeshFailure,
    Port,
    ProcMesh,
    concurrent_endpoint,
    current_rank,
    endpoint,
    this_host,
    this_proc,
)
from monarch.compiler.inspect.trace import load_trace
from monarch.distributed import Mesh
from monarch.runtime.actors.processes import current
from tests.runtime.actors.conftest import WAIT
from tests.runtime.actors.services import Service, lent, mesh, procs, service, values

__all__ = ["mesh", "procs", "service"]


@dataclass
class Batch:
    inputs: Any
    labels: Any


class Patient(Actor):
    """Handles several messages at once."""

    @concurrent_endpoint
    async def total(self, value: torch.Tensor) -> float:
        return float(value.sum())


# -- meshes ------------------------------------------------------------------------------------------------------------


def test_a_mesh_has_the_dims_of_its_processes_or_others() -> None:
    procs = this_host().spawn_procs({"dp": 2, "tp": 2})
    x = torch.arange(8.0).reshape(4, 2)
    for made, layout in [
        (Mesh(procs=procs), "[@dp, @tp]"),
        (Mesh(procs=procs.rename(tp="model")), "[@dp, @model]"),
        (Mesh(data=4, procs=procs), "[@data, -]"),
        (Mesh(procs=procs.slice(dp=0)), "[@tp, -]"),
    ]:
        with made:
            placed = monarch.distribute(x, made, layout)
            assert torch.equal((placed @ placed.T).full_tensor(), x @ x.T)


def test_its_workers_are_those_processes(procs: ProcMesh, service: Service, mesh: Mesh) -> None:
    assert mesh.executor.worker_pids() == values(service.pid.call())  # type: ignore[attr-defined]


def test_a_mesh_that_does_not_fit_its_processes(procs: ProcMesh, service: Service) -> None:
    with pytest.raises(LayoutError, match="has 3 workers, and the processes are {'data': 2}"):
        Mesh(data=3, procs=procs)
    with pytest.raises(LayoutError, match="`procs` says in which processes"):
        Mesh(procs=2)
    with pytest.raises(LayoutError, match=r"`procs` says in which processes(.|\n)*result of spawn_procs"):
        Mesh(procs=service)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match=r"mesh dim 'proc' has size ProcMesh(.|\n)*did you mean procs=\?"):
        Mesh(proc=procs)  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="one of hosts and procs"):
        Mesh(procs=procs, hosts=monarch.this_host())


def test_several_meshes_one_after_the_other_and_at_once(procs: ProcMesh, service: Service) -> None:
    before = values(service.maps.call())
    for _ in range(3):
        with Mesh(procs=procs) as mesh, Mesh(model=2, procs=procs) as other:
            ones = monarch.distribute(torch.ones(4), mesh, "[@data]")
            twos = monarch.distribute(torch.full((4,), 2.0), other, "[@model]")
            assert (ones.sum().item(), twos.sum().item()) == (4, 8)
            assert values(service.maps.call()) == [count + 2 for count in before]
        assert values(service.maps.call()) == before  # closing lets go of what workers have, and of nothing else


def test_a_mesh_that_is_dropped_ends_its_workers(procs: ProcMesh, service: Service) -> None:
    before = values(service.maps.call())
    mesh = Mesh(procs=procs)
    driven = current.process().programs.driven
    assert monarch.distribute(torch.ones(2), mesh, "[@data]").sum().item() == 2
    (workers,) = driven.values()
    del mesh
    gc.collect()
    workers.wait_ended(0)
    assert not driven and values(service.maps.call()) == before


def test_one_of_the_programs_own_process() -> None:
    with Mesh(procs=this_proc()) as mesh:
        x = monarch.distribute(torch.arange(3.0), mesh)
        assert torch.equal((x * 2).full_tensor(), torch.tensor([0.0, 2.0, 4.0]))
        service = this_proc().spawn("service", Service)
        assert torch.equal(service.get.call_one(x).get(WAIT), torch.arange(3.0))


def exit_at_once() -> None:
    os._exit(3)


def test_workers_start_after_the_bootstrap(faults: queue.SimpleQueue[MeshFailure]) -> None:
    procs = this_host().spawn_procs({"data": 2}, bootstrap=exit_at_once)
    with pytest.raises(MonarchError, match=r"cannot start the workers of mesh<data=2>: .* exited with status 3"):
        monarch.distribute(torch.ones(2), Mesh(procs=procs))
    assert {faults.get(timeout=WAIT).status for _ in range(2)} == {3}


def test_actors_keep_their_number_of_threads(service: Service, mesh: Mesh) -> None:
    before = values(service.threads.call())
    assert monarch.distribute(torch.ones(2), mesh, "[@data]").sum().item() == 2
    assert values(service.threads.call()) == before


# -- tensors in messages -----------------------------------------------------------------------------------------------


def test_an_actor_gets_its_workers_shard(service: Service, mesh: Mesh) -> None:
    x = torch.arange(8.0).reshape(4, 2)
    placed = monarch.distribute(x, mesh, "[@data, -]")
    assert [shard.tolist() for shard in values(service.get.call(placed))] == x.reshape(2, 2, 2).tolist()
    whole = monarch.distribute(x, mesh)
    assert all(torch.equal(shard, x) for shard in values(service.get.call(whole)))
    assert torch.equal(service.slice(data=1).get.call_one(placed + 1).get(WAIT), x[2:] + 1)  # type: ignore[attr-defined]
    assert {future.get(WAIT).sum().item() for future in service.get.stream(placed)} == {6, 22}
    service.keep.broadcast(placed)
    assert [shard.tolist() for shard in values(service.show.call())] == x.reshape(2, 2, 2).tolist()


def test_of_a_pending_sum_an_actor_gets_the_sum(service: Service, mesh: Mesh) -> None:
    x = torch.arange(8.0).reshape(4, 2)
    placed = monarch.distribute(x, mesh, "[@data, -]")
    product = placed.T @ placed
    assert str(product.tensor_type) == "f32[2, 2] partial<sum: data>"  # type: ignore[attr-defined]
    for got in (*values(service.get.call(product)), monarch.inspect(product, data=1)):
        assert torch.equal(got, x.T @ x)


def test_also_within_other_things(service: Service, mesh: Mesh) -> None:
    x = monarch.distribute(torch.arange(4.0), mesh, "[@data]")
    y = monarch.distribute(torch.arange(2), mesh, "[@data]")
    got = service.slice(data=1).get.call_one({"batch": [Batch(x, (y, x)), 3]}).get(WAIT)  # type: ignore[attr-defined]
    batch = got["batch"][0]
    assert (batch.inputs.tolist(), batch.labels[0].tolist(), got["batch"][1]) == ([2, 3], [1], 3)
    made = service.slice(data=0).make.call_one(1)  # type: ignore[attr-defined]
    assert made.get(WAIT).tolist() == [0]


def test_modules_arrive_with_parameters(service: Service, mesh: Mesh) -> None:
    module = nn.Linear(2, 2)
    weight = module.weight.detach().clone()
    monarch.module_to_mesh(module, mesh, {"weight": "[@data, -]"})
    for rank, got in enumerate(values(service.get.call(module))):
        assert isinstance(got.weight, nn.Parameter) and got.weight.requires_grad
        assert torch.equal(got.weight, weight[rank : rank + 1])


def test_constructors_get_them_too(procs: ProcMesh, mesh: Mesh) -> None:
    x = monarch.distribute(torch.arange(4.0), mesh, "[@data]")
    service = procs.spawn("fed", Service, x)  # type: ignore[arg-type]
    assert [shard.tolist() for shard in values(service.show.call())] == [[0, 1], [2, 3]]


def test_it_is_the_same_memory_and_an_ordinary_tensor(service: Service, mesh: Mesh) -> None:
    x = monarch.distribute(torch.arange(4.0).requires_grad_(), mesh, "[@data]")
    first, second = values(service.look.call(x)), values(service.look.call(x))
    assert first == second
    assert all(seen[:3] == ("Tensor", True, False) for seen in first)
    made = mesh.from_shards(service.make.shards(2), "[@data]")
    assert [seen[3] for seen in values(service.look.call(made))] == [at for (at,) in values(service.made_at.call())]


def test_it_is_what_it_was_when_it_was_sent(service: Service, mesh: Mesh) -> None:
    """A step that replaces state in place leaves alone what an actor still has."""
    weight = monarch.distribute(torch.zeros(4), mesh, "[@data]")

    @monarch.program
    def step() -> None:
        weight.add_(1)

    step()
    before = values(service.look.call(weight))
    step()
    assert values(service.look.call(weight)) == before  # nobody had it: it was replaced in place
    service.keep.broadcast(weight)
    for _ in range(3):
        step()
    assert [shard.tolist() for shard in values(service.show.call())] == [[2, 2]] * 2
    assert [shard.tolist() for shard in values(service.get.call(weight))] == [[5, 5]] * 2
    assert torch.equal(weight.full_tensor(), torch.full((4,), 5.0))
    service.forget.call().get(WAIT)
    before = values(service.look.call(weight))
    step()
    assert values(service.look.call(weight)) == before


def test_it_lives_as_long_as_an_actor_has_it(service: Service, mesh: Mesh) -> None:
    x = monarch.distribute(torch.arange(4.0), mesh, "[@data]")
    service.keep.broadcast(x)
    held = mesh.executor.held_values()  # type: ignore[attr-defined]
    del x
    assert mesh.executor.held_values() == [count - 1 for count in held]  # type: ignore[attr-defined]
    monarch.distribute(torch.full((4,), 7.0), mesh, "[@data]").wait()
    assert [shard.tolist() for shard in values(service.show.call())] == [[0, 1], [2, 3]]
    mesh.close()
    assert [shard.tolist() for shard in values(service.show.call())] == [[0, 1], [2, 3]]


def test_messages_with_tensors_come_in_the_order_sent(service: Service, mesh: Mesh) -> None:
    x = monarch.distribute(torch.zeros(2), mesh, "[@data]")
    for _ in range(20):
        x = x + 1
        service.keep.broadcast(x)
        service.keep.broadcast("between")
    service.keep.broadcast((x, x))
    assert [[a.item(), b.item()] for a, b in values(service.show.call())] == [[20, 20]] * 2


def test_actors_with_an_event_loop_get_them(procs: ProcMesh, mesh: Mesh) -> None:
    patient = procs.spawn("patient", Patient)
    x = monarch.distribute(torch.arange(4.0), mesh, "[@data]")
    replies = [patient.total.call(x * factor) for factor in range(4)]
    assert [values(reply) for reply in replies] == [[factor, 5 * factor] for factor in range(4)]


def test_actors_compute_with_parameters_and_gradients(service: Service, mesh: Mesh) -> None:
    weight = monarch.distribute(torch.arange(4.0).requires_grad_(), mesh, "[@data]")
    (weight**2).sum().div(2).backward()
    assert isinstance(weight.grad, DistributedTensor)
    ours = values(service.get.call(weight.grad))
    theirs = values(service.gradient.call(weight))
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_step_that_failed_is_told_at_the_call(service: Service, mesh: Mesh) -> None:
    table = monarch.distribute(torch.zeros(2), mesh)
    index = monarch.distribute(torch.tensor([5]), mesh)
    look = monarch.program(lambda table, index: table[index])
    reply = service.get.call(look(table, index))
    with pytest.raises(ActorError, match="a tensor of a program has no value: command .* failed"):
        reply.get(WAIT)
    assert values(service.get.call(table + 1))[0].tolist() == [1, 1]


def test_where_no_worker_of_its_mesh_is_it_cannot_go(procs: ProcMesh, service: Service, mesh: Mesh) -> None:
    other = this_host().spawn_procs({"data": 2}).spawn("other", Service)
    x = monarch.distribute(torch.arange(4.0), mesh, "[@data]")
    with pytest.raises(MonarchError, match="2 of them are in processes that mesh<data=2> does not run on"):
        other.get.call(x)
    with pytest.raises(MonarchError, match=r"f32\[3@data\] on mesh<data=2> has padding"):
        service.get.call(monarch.distribute(torch.arange(3.0), mesh, "[@data]"))
    with Mesh(data=2) as bare:
        y = monarch.distribute(torch.arange(4.0), bare, "[@data]")
        with pytest.raises(MonarchError, match=r"not in the processes of actors\n.*Mesh\(procs=procs\)"):
            service.get.call(y)
    port: Port[Any]
    port, _ = Channel[Any].open()
    port.send(x)
    assert type(received := _.recv().get(WAIT)) is torch.Tensor and received.tolist() == [0, 1, 2, 3]


def test_a_message_that_is_not_read_keeps_nothing(procs: ProcMesh, service: Service, mesh: Mesh) -> None:
    doomed = procs.spawn("doomed", Service)
    x = monarch.distribute(torch.arange(4.0), mesh, "[@data]")
    stopped = doomed.stop("enough")  # type: ignore[attr-defined]
    stopped.get(WAIT)
    with pytest.raises(monarch.actor.SupervisionError):
        doomed.get.call(x).get(WAIT)
    with pytest.raises(TypeError):
        service.get.call((x, threading.Lock()))  # cannot be pickled: nothing is lent
    left = values(service.slice(data=slice(0, 2)).get.call(x))  # type: ignore[attr-defined]
    assert left[0].tolist() == [0, 1]
    with procs.activate():
        assert values(lent.call()) == [0, 0]


def test_a_state_that_a_step_takes_while_the_message_is_pickled(service: Service, mesh: Mesh) -> None:
    """As when another thread runs the step. The message is refused, and the mesh lives."""
    weight = monarch.distribute(torch.zeros(2), mesh)

    @monarch.program
    def step() -> None:
        weight.add_(1)

    class Meanwhile:
        def __reduce__(self) -> tuple[Any, ...]:
            step()
            return int, ()

    with pytest.raises(MonarchError, match="a tensor in the message was donated to step"):
        service.get.call((weight, Meanwhile()))
    assert [shard.tolist() for shard in values(service.get.call(weight))] == [[1, 1]] * 2


def test_every_actor_has_each_version_as_it_was(procs: ProcMesh, mesh: Mesh) -> None:
    """Steps replace a state in place, while actors are sent it, keep it and drop it, at random."""
    keepers = [procs.spawn("keeper", Keeper) for _ in range(2)]
    weight = monarch.distribute(torch.zeros(20_000), mesh, "[@data]")

    @monarch.program
    def step() -> None:
        weight.add_(1)

    choice = random.Random(1)
    checks = []
    for version in range(1, 201):
        step()
        keeper = choice.choice(keepers)
        match choice.randrange(4):
            case 0:
                keeper.keep.broadcast(version, weight)
            case 1:
                keeper.drop.broadcast(choice.choice([2, 3, 5]))
            case 2:
                checks.append(keeper.wrong.call())
            case 3:
                made = mesh.from_shards(keeper.make.shards(version), "[@data]")
                keeper.keep.broadcast(version, made)
    checks += [keeper.wrong.call() for keeper in keepers]
    assert [values(check) for check in checks] == [[[], []]] * len(checks)
    assert weight[0].item() == 200


class Keeper(Actor):
    def __init__(self) -> None:
        self.kept: dict[int, torch.Tensor] = {}

    @endpoint
    def keep(self, version: int, value: torch.Tensor) -> None:
        self.kept[version] = value

    @endpoint
    def make(self, version: int) -> torch.Tensor:
        return torch.full((100,), float(version))

    @endpoint
    def drop(self, each: int) -> None:
        self.kept = {version: value for version, value in self.kept.items() if version % each}

    @endpoint
    def wrong(self) -> list[int]:
        return [version for version, value in self.kept.items() if not bool((value == version).all())]


# -- what actors return ------------------------------------------------------------------------------------------------


def test_what_actors_return_is_a_distributed_tensor(service: Service, mesh: Mesh) -> None:
    x = mesh.from_shards(service.make.shards(2, 3), "[@data, -]")
    assert str(x.tensor_type) == "f32[4@data, 3]"
    assert torch.equal(x.full_tensor(), torch.tensor([0.0, 0, 1, 1]).reshape(4, 1).expand(4, 3))
    total = mesh.from_shards(service.make.shards(3), "[-] partial<sum: data>")
    assert torch.equal(total.full_tensor(), torch.ones(3))

    @monarch.program
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    assert torch.equal(double(x).full_tensor(), 2 * x.full_tensor())
    assert values(service.waiting.call()) == [0, 0]


def test_they_come_nested_as_they_were_returned(service: Service, mesh: Mesh) -> None:
    found = mesh.from_shards(service.make_several.shards(), ("[@data, -]", "[@data]", "[@data]"))
    x, (labels, ones) = found["x"], found["labels"]
    assert [str(t.tensor_type) for t in (labels, ones, x)] == ["i64[2@data]", "f32[4@data]", "f32[4@data, 3]"]
    assert (labels.tolist(), x.sum().item()) == ([0, 1], 6)


def test_shards_that_do_not_fit(procs: ProcMesh, service: Service, mesh: Mesh) -> None:
    with pytest.raises(LayoutError, match=r"f32\[1\] was returned at data=0, and f32\[2\] at data=1"):
        mesh.from_shards(service.make_uneven.shards(), "[@data]")
    with pytest.raises(LayoutError, match=r"{'x': f32\[1\], 'y': f32\[1\]} was returned at data=0, and {'y': .*data=1"):
        mesh.from_shards(service.make_turned.shards(), "[@data]")
    with pytest.raises(ActorError, match="this endpoint returned a NoneType"):
        mesh.from_shards(service.make_nothing.shards(), "[@data]")
    with pytest.raises(ActorError, match="take plain tensors, and this endpoint returned a Picture"):
        mesh.from_shards(service.make_picture.shards(), "[@data]")
    with pytest.raises(ActorError, match="no data here"):
        mesh.from_shards(service.fail_at.shards(1), "[@data]")
    with pytest.raises(LayoutError, match="returned tensor 0 has 2 dims, and returned tensor 0 has 1"):
        mesh.from_shards(service.make.shards(1), "[@data, -]")
    for reply in (service.make.call(1), service.make.call(1).get()):
        with pytest.raises(LayoutError, match=rf"this is a {type(reply).__name__}\n(.|\n)*in place of .call"):
            mesh.from_shards(reply, "[@data]")  # type: ignore[arg-type]
    with pytest.raises(LayoutError, match="3 layouts for 1 tensors"):
        mesh.from_shards(service.make.shards(1), ("[@data]",) * 3)
    with pytest.raises(MonarchError, match="was called in 1 of the 2 processes of mesh<data=2>\n"):
        mesh.from_shards(service.slice(data=slice(0, 1)).make.shards(1), "[@data]")  # type: ignore[attr-defined]
    with Mesh(data=2) as bare, pytest.raises(MonarchError, match="not in the processes of actors"):
        bare.from_shards(service.make.shards(1), "[@data]")
    shards = service.make.shards(1)
    mesh.from_shards(shards, "[@data]")
    with pytest.raises(MonarchError, match="is on a mesh already"):
        mesh.from_shards(shards, "[@data]")


def test_shards_that_nobody_wants_are_dropped(service: Service, mesh: Mesh) -> None:
    shards = service.make.shards(1).wait(WAIT)
    assert values(service.waiting.call()) == [1, 1]
    del shards
    gc.collect()
    made = service.make.shards(1)  # a later call tells them
    assert values(service.waiting.call()) == [1, 1]
    mesh.from_shards(made, "[@data]")


def test_shards_that_are_dropped_before_they_are_made_are_not_kept(
    procs: ProcMesh, service: Service, tmp_path: Path
) -> None:
    path = tmp_path / "go"
    service.when_exists.broadcast(str(path))
    for shards in (service.make.shards(1), service.fail_at.shards(1)):
        del shards
    gc.collect()
    service.make_nothing.shards()  # tells the processes, which do not wait for the actors
    procs.initialized.get(WAIT)
    path.touch()
    assert values(service.waiting.call()) == [1, 1]  # the last call's, which failed
    left = service.make.shards(1)
    assert values(service.waiting.call()) == [1, 1]
    assert left.done()


def test_shards_that_a_closed_mesh_could_not_take_can_go_elsewhere(procs: ProcMesh, service: Service) -> None:
    shards = service.make.shards(2)
    with Mesh(procs=procs) as mesh:
        executor = mesh.executor
        x = mesh.from_shards(service.make.shards(2), "[@data]")
    with pytest.raises(MonarchError, match="closed"):
        shards.adopt(executor, [x.tensor_type])
    with Mesh(procs=procs) as mesh:
        assert mesh.from_shards(shards, "[@data]").tolist() == [0, 0, 1, 1]


def test_an_actors_own_tensor_is_not_written_to(service: Service, mesh: Mesh) -> None:
    x = mesh.from_shards(service.make.shards(2), "[@data]")
    service.keep.broadcast(x)

    @monarch.program
    def step() -> None:
        x.add_(1)

    for _ in range(3):
        step()
    assert x.tolist() == [3, 3, 4, 4]
    assert [shard.tolist() for shard in values(service.show.call())] == [[0, 0], [1, 1]]


# -- all of it ---------------------------------------------------------------------------------------------------------


class Loader(Actor):
    """Has a part of the data, and gives it out batch by batch."""

    def __init__(self, size: int) -> None:
        self.random = torch.Generator().manual_seed(current_rank().rank)
        self.size = size

    @endpoint
    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(self.size, 4, generator=self.random)
        return x, x.sum(1, keepdim=True)


class Watcher(Actor):
    """Sees what a model is at some steps."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    @endpoint
    def look(self, state: dict[str, torch.Tensor]) -> None:
        self.norms.append(sum(float(value.norm()) for value in state.values()))

    @endpoint
    def seen(self) -> list[float]:
        return self.norms


def test_a_training_loop_with_actors_on_the_same_processes(procs: ProcMesh, mesh: Mesh) -> None:
    torch.manual_seed(0)
    loaders, watchers = procs.spawn("loaders", Loader, 8), procs.spawn("watchers", Watcher)
    model = monarch.module_to_mesh(nn.Linear(4, 1), mesh, {"*": None})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    @monarch.program
    def train(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    twin = nn.Linear(4, 1)
    twin.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    expected, generators = [], [torch.Generator().manual_seed(rank) for rank in range(2)]
    norms = []
    for _ in range(20):
        x = torch.cat([torch.randn(8, 4, generator=generator) for generator in generators])
        loss = ((twin(x) - x.sum(1, keepdim=True)) ** 2).mean()
        twin.zero_grad()
        loss.backward()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter -= 0.1 * parameter.grad
        expected.append(loss.item())
        norms.append(sum(float(value.norm()) for value in twin.state_dict().values()))

    losses = []
    coming = loaders.next.shards()
    for _ in range(20):
        x, y = mesh.from_shards(coming, "[@data, -]")
        coming = loaders.next.shards()  # the next batch is made while this one is computed with
        losses.append(train(x, y))
        watchers.look.broadcast(dict(model.state_dict()))
    assert [loss.item() for loss in losses] == pytest.approx(expected, rel=1e-4)
    for seen in values(watchers.seen.call()):
        assert seen == pytest.approx(norms, rel=1e-4)
    assert losses[-1].item() < losses[0].item() / 5


def test_a_profile_has_what_was_lent_and_adopted(service: Service, mesh: Mesh, tmp_path: Path) -> None:
    with monarch.profile(tmp_path / "trace.json", mesh=mesh):
        x = mesh.from_shards(service.make.shards(2), "[@data]")
        service.get.call(x * 2).get(WAIT)
        x.wait()
    kinds = {handled.kind for handled in load_trace(str(tmp_path / "trace.json")).handled}
    assert {"lend", "adopt"} <= kinds
