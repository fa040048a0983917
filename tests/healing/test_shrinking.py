"""Meshes that get another size, after a death and without one: training goes on with PyTorch's numbers."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import DeviceMeshError, LostError, MonarchError
from monarch.testing import chaos

STEPS = 8
BATCHES = [(torch.randn(12, 8), torch.randint(4, (12,))) for _ in range(STEPS)]


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 18), nn.ReLU(), nn.Linear(18, 4))


def in_pytorch() -> tuple[list[float], list[torch.Tensor]]:
    """The losses of plain PyTorch, and what it leaves."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for x, y in BATCHES:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, left(model, optimizer)


def left(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [
        optimizer.state[parameter][name] for parameter in model.parameters() for name in ("exp_avg", "exp_avg_sq")
    ]
    values: list[Any] = [*model.parameters(), *moments]
    return [value.full_tensor() if hasattr(value, "full_tensor") else value.detach() for value in values]


class Training:
    """A model, an optimizer and a program that closes over both."""

    def __init__(self, mesh: Mesh, layouts: dict[str, Any]) -> None:
        self.model = monarch.module_to_mesh(copy.deepcopy(network()), mesh, layouts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

        @monarch.program
        def step(x: "f32[12@data, 8]", y: "i64[12@data]") -> torch.Tensor:  # type: ignore[name-defined, valid-type]
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            return loss

        self.step: Any = step

    def left(self) -> list[torch.Tensor]:
        return left(self.model, self.optimizer)


def kill(mesh: Mesh, *workers: int) -> None:
    pids = mesh.executor.worker_pids()  # type: ignore[attr-defined]
    for worker in workers:
        os.kill(pids[worker], signal.SIGKILL)


WAYS: dict[str, tuple[dict[str, int], dict[str, Any], Any, tuple[int, ...], int, dict[str, int]]] = {
    "replicated": ({"data": 4}, {"*": None}, "shrink", (1,), 0, {"data": 3}),
    "fully sharded": ({"data": 4}, {"*.weight": "[@data, -]"}, "shrink", (3,), 2, {"data": 3}),
    "two dims": ({"data": 2, "model": 2}, {"*.weight": "[@model, -]"}, "shrink", (1,), 0, {"data": 1, "model": 2}),
    "the dim that shards": (
        {"data": 2, "model": 2},
        {"*.weight": "[@model, -]"},
        monarch.Shrink("model"),
        (1,),
        0,
        {"data": 2, "model": 1},
    ),
    "both dims shard": (
        {"data": 2, "model": 2},
        {"*.weight": "[@(model,data), -]"},
        {"data": 1},
        (3,),
        2,
        {"data": 1, "model": 2},
    ),
    "two at once": ({"data": 4}, {"*": None}, "shrink", (1, 2), 0, {"data": 2}),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
def test_training_goes_on_smaller_and_grows_again(way: str) -> None:
    dims, layouts, policy, dead, every, sizes = WAYS[way]
    losses, expected = in_pytorch()
    with Mesh(**dims) as mesh:
        training = Training(mesh, layouts)
        if every:
            mesh.snapshots(every)
        types = [parameter.tensor_type for parameter in training.model.parameters()]  # type: ignore[attr-defined]
        read = []
        for number, batch in enumerate(BATCHES):
            if number in (2, 6):
                kill(mesh, *dead)
            if number == 4:
                assert monarch.resize_mesh(mesh, **dims) is mesh and mesh.spec.sizes == dims
            try:
                read.append(training.step(*batch).item())
            except DeviceMeshError:
                assert monarch.heal_mesh(mesh, policy) is mesh
                assert mesh.spec.sizes == sizes
                read.append(training.step(*batch).item())
        torch.testing.assert_close(read, losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(training.left(), expected, rtol=1e-4, atol=1e-5)
        assert [parameter.tensor_type for parameter in training.model.parameters()] == types  # type: ignore[attr-defined]
        # Each shape has its plans: growing and shrinking again makes no new ones.
        (known,) = training.step.remembered
        for again in (dims, sizes):
            monarch.resize_mesh(mesh, **again)
            training.step(*BATCHES[0]).item()
        assert training.step.remembered[0].plans <= known.plans + 1  # the first workers may be others than those before
        held = mesh.executor.whole.held_values()  # type: ignore[attr-defined]
        assert {held[rank] for rank in range(len(held)) if rank not in mesh.ranks} == {0}


def test_results_that_are_read_late_and_values_of_all_layouts_go_on() -> None:
    with Mesh(data=4) as mesh:
        training = Training(mesh, {"*": None})
        numbers = torch.arange(30.0).reshape(10, 3)
        values = [monarch.distribute(numbers, mesh, layout) for layout in ("[@data, -]", "[-, @data]", "[-, -]")]
        view, pending = values[0][2:5].t(), (values[0] * 2).sum(0)
        losses = [training.step(*batch) for batch in BATCHES[:4]]
        assert str(pending.tensor_type) == "f32[3] partial<sum: data>"
        kill(mesh, 0)
        with pytest.raises(DeviceMeshError):
            while True:
                training.step(*BATCHES[4])
        monarch.heal_mesh(mesh, "shrink")
        assert len(mesh) == 3
        for value in values:
            assert torch.equal(value.full_tensor(), numbers)
        assert [str(value.sharding) for value in values] == ["[@data, -]", "[-, @data]", "[-, -]"]
        assert torch.equal(view.full_tensor(), numbers[2:5].t())
        torch.testing.assert_close([loss.item() for loss in losses], in_pytorch()[0][:4], rtol=1e-4, atol=1e-5)
        assert torch.equal(pending.full_tensor(), (numbers * 2).sum(0))  # from copies: worker 0 alone had its summand
        total = (values[0] * 2).sum(0).wait()
        monarch.resize_mesh(mesh, data=2)
        assert torch.equal(total.full_tensor(), (numbers * 2).sum(0))


def test_a_policy_of_the_users_own_is_told_what_was_lost() -> None:
    seen: list[monarch.MeshFailure] = []

    def policy(failure: monarch.MeshFailure) -> Mapping[str, int] | str:
        seen.append(failure)
        return "respawn" if failure.lost else {"data": 1}

    with Mesh(data=2, model=2) as mesh:
        training = Training(mesh, {"0.weight": "[@(model,data), -]"})
        training.step(*BATCHES[0]).item()
        kill(mesh, 1, 3)
        with pytest.raises(DeviceMeshError):
            training.step(*BATCHES[1]).item()
        with pytest.raises(LostError, match="cannot be restored"):
            monarch.heal_mesh(mesh, policy)
        (failure,) = seen
        assert failure.workers == (1, 3) and failure.coordinates[1] == {"data": 1, "model": 1}
        assert failure.how == ("was killed by SIGKILL",) * 2 and failure.hosts == ("", "")
        assert any(line.startswith("0.weight: f32[18@(model,data), 8]") for line in failure.lost)


def test_a_worker_dies_while_the_mesh_shrinks() -> None:
    losses, expected = in_pytorch()
    with Mesh(data=4) as mesh:
        training = Training(mesh, {"*.weight": "[@data, -]"})
        mesh.snapshots(1)
        read = [training.step(*batch).item() for batch in BATCHES[:3]]
        chaos.kill(mesh, 2, 0)  # at the first instruction of the next plan, which gathers a parameter
        with pytest.raises(DeviceMeshError) as info:
            monarch.resize_mesh(mesh, data=3)
        assert info.value.mesh_lost and len(mesh) == 4
        monarch.heal_mesh(mesh, {"data": 3})
        read += [training.step(*batch).item() for batch in BATCHES[3:]]
        torch.testing.assert_close(read, losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(training.left(), expected, rtol=1e-4, atol=1e-5)


def test_a_worker_dies_while_it_is_asked_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    with Mesh(data=4) as mesh:
        x = monarch.distribute(torch.arange(12.0), mesh)
        assert (x + 1).sum().item() == 78
        connection: Any = mesh.executor.connection  # type: ignore[attr-defined]
        ask, pid = connection.ask_survivors, mesh.executor.worker_pids()[2]  # type: ignore[attr-defined]

        def ask_and_kill(records: Any) -> Any:
            if len(records) == 3:
                os.kill(pid, signal.SIGKILL)
            return ask(records)

        monkeypatch.setattr(connection, "ask_survivors", ask_and_kill)
        failures: list[monarch.MeshFailure] = []
        kill(mesh, 1)
        with pytest.raises(DeviceMeshError, match="SIGKILL"):
            while True:
                (x + 1).sum().item()

        def policy(failure: monarch.MeshFailure) -> Any:
            failures.append(failure)
            return {"data": 2}

        monarch.heal_mesh(mesh, policy)
        assert failures[0].workers == (1, 2) and mesh.spec.sizes == {"data": 2}
        assert (x + 1).sum().item() == 78


def test_an_interrupt_leaves_one_size_or_the_other() -> None:
    with Mesh(data=2) as mesh:
        values = [monarch.distribute(torch.arange(6.0), mesh, "[@data]"), monarch.distribute(torch.ones(3), mesh)]
        with chaos.interrupt(-1) as counted:
            monarch.resize_mesh(mesh, data=1)
        points = counted.passed
        for point in range(3, points, max(1, points // 12)):
            wanted = 3 - len(mesh)
            try:
                with chaos.interrupt(point):
                    monarch.resize_mesh(mesh, data=wanted)
            except KeyboardInterrupt:
                pass
            assert torch.equal(values[0].full_tensor(), torch.arange(6.0)), point
            assert torch.equal((values[1] + 1).full_tensor(), torch.full((3,), 2.0)), point
            monarch.resize_mesh(mesh, data=wanted)
            assert len(mesh) == wanted


def test_a_stream_goes_on_over_a_mesh_of_another_size() -> None:
    rows = torch.arange(40.0)
    with Mesh(data=4) as mesh, monarch.data.stream(rows, mesh, "[@data]", batch=4) as stream:
        seen = []
        for number, batch in enumerate(stream):
            seen.append((batch + 0).full_tensor())
            if number in (2, 5):
                monarch.resize_mesh(mesh, data=3 if number == 2 else 4)
        assert torch.equal(torch.cat(seen), rows)


def test_what_cannot_be_is_said() -> None:
    with Mesh(data=2, model=2) as mesh:
        with pytest.raises(MonarchError, match=r"cannot have 3 workers along 'data': it was made with 2"):
            monarch.resize_mesh(mesh, data=3)
        with pytest.raises(MonarchError, match="unknown mesh dim 'rows'"):
            monarch.resize_mesh(mesh, rows=1)
        with pytest.raises(MonarchError, match="is a part of"):
            monarch.resize_mesh(mesh.slice(data=0), model=1)
        with mesh.activate("data"):
            own = monarch.distribute(torch.ones(2), mesh) + mesh.rank("data")
        own.wait()
        with pytest.raises(MonarchError, match="a value of each worker's own"):
            monarch.resize_mesh(mesh, data=1)
        del own
        kill(mesh, 0, 3)
        with pytest.raises(DeviceMeshError):
            while True:
                monarch.distribute(torch.ones(2), mesh).full_tensor()
        with pytest.raises(MonarchError, match="no policy 'shrug'"):
            monarch.heal_mesh(mesh, "shrug")  # type: ignore[arg-type]
        with pytest.raises(MonarchError, match="cannot shrink along 'model': each slice has lost a worker"):
            monarch.heal_mesh(mesh, monarch.Shrink("model"))
        with pytest.raises(MonarchError, match="cannot shrink along 'rows': it has no such dim"):
            monarch.heal_mesh(mesh, monarch.Shrink("rows"))
        assert monarch.heal_mesh(mesh, "shrink") is mesh and len(mesh) == 4  # no dim keeps a slice


def test_a_worker_that_is_stopped_is_named_and_the_mesh_heals_when_it_goes_on() -> None:
    with Mesh(data=3) as mesh:
        x = monarch.distribute(torch.arange(6.0), mesh)
        pids = mesh.executor.worker_pids()  # type: ignore[attr-defined]
        os.kill(pids[1], signal.SIGSTOP)
        kill(mesh, 0)
        try:
            with pytest.raises(DeviceMeshError):
                while True:
                    (x + 1).wait()
            for _ in range(2):
                with pytest.raises(MonarchError, match=r"its workers 1 \(stopped by a signal\) do not answer"):
                    monarch.heal_mesh(mesh, "shrink")
        finally:
            os.kill(pids[1], signal.SIGCONT)
        monarch.heal_mesh(mesh, "shrink")
        assert len(mesh) == 2 and torch.equal(x.full_tensor(), torch.arange(6.0))
