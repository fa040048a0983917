"""The first NaN of a step is named: the op, the worker, the user's line; or what came in with one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import AnomalyError, DeviceMeshError
from monarch.testing import chaos

pytestmark = pytest.mark.sample(1, of="kernels")

NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2, model=2) as mesh:
        yield mesh


def line_of(error: DeviceMeshError) -> str:
    assert error.source is not None
    with open(error.source.file) as file:
        return file.read().splitlines()[error.source.line - 1].strip()


def test_the_op_the_worker_and_the_line_of_the_first_are_named(mesh: Mesh) -> None:
    @monarch.program(mesh=mesh)
    def step(x: "f32[8@data, 4@model]") -> torch.Tensor:
        y = x * 2
        z = torch.log(y)  # the first
        return torch.sqrt(z).sum()

    bad = torch.ones(8, 4)
    bad[5, 3] = -1
    assert step(bad).isnan().item()
    with mesh.detect_anomaly():
        assert step(torch.full((8, 4), 2.0)).isfinite().item()
        with pytest.raises(AnomalyError) as raised:
            step(bad).item()
        error = raised.value
        assert (error.op, error.worker, error.coordinates) == ("aten.log", 3, {"data": 1, "model": 1})
        assert line_of(error) == "z = torch.log(y)  # the first"
        assert "worker data=1, model=1 made a NaN, the step's first, in aten.log" in str(error)
        assert step(torch.full((8, 4), 2.0)).isfinite().item()
    assert step(bad).isnan().item()


def test_a_nan_that_a_processor_makes_is_found(mesh: Mesh) -> None:
    @monarch.program(mesh=mesh)
    def step(x: "f32[8@data, 4@model]") -> torch.Tensor:
        return (x * 2).sum()

    good = torch.ones(8, 4)
    assert step(good).item() == 64
    chaos.nan(mesh, 2)
    assert step(good).isnan().item()
    assert step(good).item() == 64
    with mesh.detect_anomaly():
        assert step(good).item() == 64
        chaos.nan(mesh, 2)
        with pytest.raises(AnomalyError) as raised:
            step(good).item()
    assert raised.value.worker == 2 and raised.value.coordinates == {"data": 1, "model": 0}


def test_the_first_is_so_over_all_workers(mesh: Mesh) -> None:
    """A worker with a lower number makes a later one."""

    @monarch.program(mesh=mesh)
    def step(x: "f32[8@(data,model)]") -> torch.Tensor:
        y = torch.log(x)
        return torch.rsqrt(x + 3 * (y.nan_to_num() > 10) - 1).sum()

    with mesh.detect_anomaly(), pytest.raises(AnomalyError) as raised:
        step(torch.tensor([0.5, 1, 2, 2, 2, 2, -1, 2])).item()
    assert (raised.value.op, raised.value.worker) == ("aten.log", 3)


@pytest.mark.parametrize("layout", ["[-, -]", "[@data, -]", "[-, @model]"])
def test_a_nan_of_the_backward_pass_leaves_state_as_it_was(mesh: Mesh, layout: str) -> None:
    model = monarch.module_to_mesh(nn.Linear(4, 4), mesh, {"*": None, "weight": layout})
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)

    @monarch.program(mesh=mesh)
    def step(x: "f32[8@data, 4]") -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.sqrt(model(x).square().sum() * 0)
        loss.backward()
        optimizer.step()
        return loss

    before = [value.full_tensor() for value in model.parameters()]
    with mesh.detect_anomaly():
        for _ in range(2):
            with pytest.raises(AnomalyError) as raised:
                step(torch.ones(8, 4)).item()
            assert line_of(raised.value) == "loss = torch.sqrt(model(x).square().sum() * 0)"
    assert all(torch.equal(*pair) for pair in zip(before, (v.full_tensor() for v in model.parameters()), strict=True))
    assert not optimizer.state


def test_an_update_that_makes_one_is_not_applied(mesh: Mesh) -> None:
    w = monarch.distribute(torch.ones(4), mesh)

    @monarch.program(mesh=mesh)
    def step(x: float) -> torch.Tensor:
        w.mul_(x)
        return w.sum() * 0 + 1

    with mesh.detect_anomaly(inf=True):
        step(2.0).item()
        with pytest.raises(AnomalyError, match="a NaN or an infinity"):
            step(3e38).item()
    assert w.full_tensor().tolist() == [2.0] * 4


def test_what_comes_in_with_one_is_named(mesh: Mesh) -> None:
    w = monarch.distribute(torch.tensor([1.0, NAN]), mesh, "[@model]")

    @monarch.program(mesh=mesh)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x * y).sum() + w.sum()

    good = torch.ones(3)
    with mesh.detect_anomaly():
        with pytest.raises(AnomalyError) as raised:
            step(good, torch.tensor([1, NAN, 1])).item()
        assert (raised.value.op, raised.value.source) == ("input", None)
        assert "was given a NaN, in input 1: f32[3]" in str(raised.value)
        with pytest.raises(AnomalyError) as raised:
            step(good, good).item()
        assert (raised.value.op, raised.value.worker) == ("state", 1)
        assert "in state 'w': f32[2@model]" in str(raised.value)


def test_infinities_count_where_they_are_asked_for(mesh: Mesh) -> None:
    @monarch.program(mesh=mesh)
    def step(x: "f32[8@data]") -> torch.Tensor:
        return (1 / x).sum()

    with mesh.detect_anomaly():
        assert step(torch.zeros(8)).item() == INF
    with mesh.detect_anomaly(inf=True), pytest.raises(AnomalyError) as raised:
        step(torch.zeros(8)).item()
    assert raised.value.op == "aten.reciprocal"


def test_padding_is_not_looked_at(mesh: Mesh) -> None:
    @monarch.program(mesh=mesh)
    def step(x: "f32[7@(data,model)]") -> torch.Tensor:
        return (x / x).log().sum()  # 0/0 in the padding

    with mesh.detect_anomaly(inf=True):
        assert step(torch.ones(7)).item() == 0
        bad = torch.ones(7)
        bad[6] = 0
        with pytest.raises(AnomalyError) as raised:
            step(bad).item()
        assert (raised.value.op, raised.value.worker) == ("aten.div.Tensor", 3)


def test_ops_outside_of_programs(mesh: Mesh) -> None:
    x = monarch.distribute(torch.tensor([1.0, -1.0, 1.0, 1.0]), mesh, "[@data]")
    with mesh.detect_anomaly():
        y = x + 1
        z = torch.log(x)  # here
        with pytest.raises(AnomalyError) as raised:
            (y + z).full_tensor()
        assert (raised.value.op, raised.value.worker) == ("aten.log", 0)
        assert line_of(raised.value) == "z = torch.log(x)  # here"
        assert (x + 1).full_tensor().tolist() == [2.0, 0.0, 2.0, 2.0]
    assert torch.log(x).isnan().any().item()


def test_an_eager_training_step_is_not_applied(mesh: Mesh) -> None:
    model = monarch.module_to_mesh(nn.Linear(2, 2), mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    before = model.weight.full_tensor()
    with mesh.detect_anomaly():
        loss = torch.sqrt((model(torch.ones(3, 2)) * 0).sum())
        loss.backward()
        optimizer.step()
        with pytest.raises(AnomalyError):
            loss.item()
    assert torch.equal(model.weight.full_tensor(), before)
    model(torch.ones(3, 2)).sum().backward()
    optimizer.step()
    assert model.weight.isfinite().all().item()


def test_parts_of_a_mesh(mesh: Mesh) -> None:
    first, second = mesh.slice(data=0), mesh.slice(data=1)
    a = monarch.distribute(torch.tensor([1.0, -1.0]), first)

    @monarch.program
    def step() -> torch.Tensor:
        y = torch.log(a)
        return (y.to(second) * 2).sum()

    with mesh.detect_anomaly(), pytest.raises(AnomalyError) as raised:
        step().item()
    assert (raised.value.op, raised.value.worker) == ("aten.log", 0)

    @monarch.program(mesh=second)
    def alone(x: torch.Tensor) -> torch.Tensor:
        return torch.log(x).sum()

    with second.detect_anomaly(), pytest.raises(AnomalyError) as raised:
        alone(torch.tensor([-1.0])).item()
    assert raised.value.worker == 2 and raised.value.coordinates == {"model": 0}


def test_branches_and_loops_are_named_as_a_whole(mesh: Mesh) -> None:
    @monarch.program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        return monarch.cond(x.sum() > 0, torch.log, torch.exp, (x,)).sum()

    with mesh.detect_anomaly():
        step(torch.tensor([1.0, 2.0])).item()
        with pytest.raises(AnomalyError) as raised:
            step(torch.tensor([3.0, -1.0])).item()
    assert raised.value.op == "cond"


def test_random_programs_give_the_same_bits(mesh: Mesh) -> None:
    """Looking changes nothing but the kernels."""
    torch.manual_seed(0)
    model: Any = monarch.module_to_mesh(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8)), mesh)
    optimizer = torch.optim.AdamW(model.parameters())

    @monarch.program(mesh=mesh)
    def step(x: "f32[6@data, 8]") -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(6, 8)
    losses = []
    for at in range(6):
        if at % 2:
            with mesh.detect_anomaly(inf=True):
                losses.append(step(x).item())
        else:
            losses.append(step(x).item())
    assert losses == sorted(losses, reverse=True)
