"""Tensors that come to a mesh with a history in autograd: the gradient goes back through `distribute`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import monarch
from monarch.compiler.errors import ProgramError
from monarch.language import Mesh
from tests.language.partitioned import partitioned_mesh


def test_a_plain_encoder_trains_through_a_mesh(mesh: Mesh) -> None:
    encoder, plain = nn.Linear(4, 6), nn.Linear(4, 6)
    plain.load_state_dict(encoder.state_dict())
    w = torch.randn(6, 3)
    x = torch.randn(8, 4)
    h = monarch.distribute(encoder(x).relu(), mesh, "[@data, -]")
    assert not h.is_leaf
    loss = (h @ monarch.distribute(w, mesh)).square().mean()
    loss.backward()
    expected = (plain(x).relu() @ w).square().mean()
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected.detach())
    for ours, theirs in zip(encoder.parameters(), plain.parameters(), strict=True):
        assert type(ours.grad) is torch.Tensor
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_a_gradient_goes_from_mesh_to_mesh() -> None:
    with partitioned_mesh(a=2) as first, partitioned_mesh(b=2) as second:
        w = monarch.distribute(torch.arange(4.0).requires_grad_(), first, "[@a]")
        moved = monarch.distribute((w * 3).sin(), second, "[@b]")
        (moved * moved).sum().backward()
        plain = torch.arange(4.0).requires_grad_()
        (plain * 3).sin().square().sum().backward()
        torch.testing.assert_close(w.grad.full_tensor(), plain.grad)


def test_leaves_and_tensors_without_gradient_stay_leaves(mesh: Mesh) -> None:
    leaf = monarch.distribute(torch.ones(4, requires_grad=True), mesh)
    assert leaf.is_leaf and leaf.requires_grad
    with torch.no_grad():
        cut = monarch.distribute(torch.ones(4, requires_grad=True) * 2, mesh)
    assert cut.is_leaf and not cut.requires_grad


def test_a_program_refuses_to_send_a_gradient_out(mesh: Mesh) -> None:
    weight = torch.ones(4, requires_grad=True)
    x = monarch.distribute(weight * 2, mesh)
    w = monarch.distribute(torch.ones(4, requires_grad=True), mesh)

    @monarch.program
    def step() -> None:
        (x * w).sum().backward()

    with pytest.raises(ProgramError, match="placed on the mesh with its history") as caught:
        step()
    assert "monarch.distribute(weight * 2, mesh)" in str(caught.value)


def test_a_buffer_with_a_history_is_refused(mesh: Mesh) -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("scale", torch.ones(2, requires_grad=True) * 2)
    with pytest.raises(ProgramError, match="'scale' has a history"):
        monarch.module_to_mesh(module, mesh)
