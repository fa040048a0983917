"""Programs of several meshes on workers, which send each other what the reference executor only copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.errors import DeviceMeshError, ProgramError
from monarch.language import Mesh

pytestmark = pytest.mark.sample(1, of="kernels")


@pytest.fixture(scope="module")
def root() -> Iterator[Mesh]:
    with Mesh(stage=2, data=2) as mesh:
        yield mesh


def placed(takes: int, gives: int, mesh: Mesh) -> tuple[Any, nn.Linear]:
    """A layer on a mesh, and the same without one."""
    ours, dense = monarch.module_to_mesh(nn.Linear(takes, gives), mesh), nn.Linear(takes, gives)
    dense.load_state_dict({name: value.full_tensor() for name, value in ours.state_dict().items()})  # type: ignore[attr-defined]
    return ours, dense


def same(pairs: list[tuple[Any, nn.Linear]]) -> None:
    for ours, dense in pairs:
        for name, value in dense.state_dict().items():
            torch.testing.assert_close(ours.state_dict()[name].full_tensor(), value)


def test_two_stages_with_a_skip_train_as_one_model(root: Mesh) -> None:
    a, b = root.slice(stage=0), root.slice(stage=1)
    torch.manual_seed(0)
    pairs = [placed(8, 16, a), placed(16, 16, b), placed(16, 4, a)]
    first, middle, last = (ours for ours, _ in pairs)
    optimizer = torch.optim.AdamW([p for ours, _ in pairs for p in ours.parameters()], lr=0.05)
    theirs = torch.optim.AdamW([p for _, dense in pairs for p in dense.parameters()], lr=0.05)

    @monarch.program
    def step(x: "f32[10@data, 8]", y: "f32[10@data, 4]") -> Any:
        optimizer.zero_grad()
        h = torch.relu(first(x))
        skip = torch.tanh(middle(h.to(b))).to(a)
        loss = F.mse_loss(last(h + skip), y)
        loss.backward()
        optimizer.step()
        return loss, skip

    for _ in range(6):
        x, y = torch.randn(10, 8), torch.randn(10, 4)
        loss, _ = step(x, y)
        theirs.zero_grad()
        h = torch.relu(pairs[0][1](x))
        wanted = F.mse_loss(pairs[2][1](h + torch.tanh(pairs[1][1](h))), y)
        wanted.backward()
        theirs.step()
        torch.testing.assert_close(loss.full_tensor(), wanted.detach())
    same(pairs)
    assert len(step.remembered) == 1 and step.remembered[0].traces <= 2


def test_meshes_with_other_dims(root: Mesh) -> None:
    a, b = root.slice(stage=0), root.slice(stage=1).rename(data="model")
    torch.manual_seed(1)
    pairs = [placed(8, 16, a), placed(16, 4, b)]

    @monarch.program
    def step(x: "f32[7@data, 8]") -> Any:
        y = pairs[1][0](pairs[0][0](x).to(b, "[-, @model]")).square().sum()
        y.backward()
        return y

    x = torch.randn(7, 8)
    found = step(x)
    wanted = pairs[1][1](pairs[0][1](x)).square().sum()
    wanted.backward()
    torch.testing.assert_close(found.full_tensor(), wanted.detach())
    for ours, dense in pairs:
        torch.testing.assert_close(ours.weight.grad.full_tensor(), dense.weight.grad)


def test_a_failure_on_one_mesh_fails_the_step_on_all(root: Mesh) -> None:
    a, b = root.slice(stage=0), root.slice(stage=1)
    torch.manual_seed(2)
    first, _ = placed(4, 4, a)
    table = monarch.distribute(torch.randn(5, 4), b)
    count = monarch.distribute(torch.zeros(()), b)

    @monarch.program
    def step(x: Any, rows: Any) -> Any:
        with torch.no_grad():
            first.weight.mul_(2.0)
            count.add_(1.0)
        return (first(x).to(b) + F.embedding(rows, table)).sum().to(a)

    x = monarch.distribute(torch.ones(2, 4), a)
    good = monarch.distribute(torch.tensor([0, 1]), b)
    before = first.weight.full_tensor()
    step(x, good).full_tensor()
    with pytest.raises(DeviceMeshError, match="index"):
        step(x, monarch.distribute(torch.tensor([0, 9]), b)).full_tensor()
    torch.testing.assert_close(first.weight.full_tensor(), 2 * before)
    assert count.item() == 1.0
    step(x, good).full_tensor()
    torch.testing.assert_close(first.weight.full_tensor(), 4 * before)
    assert count.item() == 2.0


def test_outside_of_programs(root: Mesh) -> None:
    a, b = root.slice(stage=0), root.slice(stage=1)
    x = monarch.distribute(torch.arange(12.0).reshape(4, 3), a, "[@data, -]").requires_grad_()
    y = x.to(b)
    (y * y).sum().backward()
    torch.testing.assert_close(y.full_tensor(), torch.arange(12.0).reshape(4, 3))
    torch.testing.assert_close(x.grad.full_tensor(), 2 * torch.arange(12.0).reshape(4, 3))
    assert y.mesh is b and x.grad.mesh is a
    with pytest.raises(ProgramError, match="the argument after the mesh is a layout"):
        x.to(b, torch.bfloat16)


def test_a_tied_weight_over_three_meshes_of_one_worker() -> None:
    with Mesh(stage=3) as root:
        a, b, c = (root.slice(stage=at) for at in range(3))
        torch.manual_seed(3)
        table = nn.Embedding(10, 8)
        weight = monarch.distribute(table.weight.detach(), a).requires_grad_()
        ours, dense = placed(8, 8, b)
        tokens = torch.randint(0, 10, (4, 6))

        @monarch.program
        def step(tokens: "i64[4, 6]") -> Any:
            h = torch.tanh(ours(F.embedding(tokens, weight).to(b)))
            logits = F.linear(h.to(c), weight.to(c))
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
            loss.backward()
            return loss

        loss = step(tokens)
        logits = F.linear(torch.tanh(dense(table(tokens))), table.weight)
        wanted = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        wanted.backward()
        torch.testing.assert_close(loss.full_tensor(), wanted.detach())
        assert weight.grad is not None and table.weight.grad is not None
        torch.testing.assert_close(weight.grad.full_tensor(), table.weight.grad)  # type: ignore[attr-defined]
        assert loss.mesh is c and weight.grad.mesh is a  # type: ignore[attr-defined]
