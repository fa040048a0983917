"""What PyTorch computes by reading a tensor's value, and programs without."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.distributions import VonMises, Wishart

from monarch.language import Mesh, distribute, module_to_mesh, program


def test_batch_norm_averages_all_batches_alike(mesh: Mesh) -> None:
    expected = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None))
    model = module_to_mesh(copy.deepcopy(expected), mesh)

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().sum()
        model.zero_grad()
        loss.backward()
        return loss

    for number in range(5):
        x = torch.randn(8, 4, generator=torch.Generator().manual_seed(number))
        loss = expected(x).square().sum()
        expected.zero_grad()
        loss.backward()
        found = step(x) if number < 4 else model(distribute(x, mesh)).square().sum()
        torch.testing.assert_close(found.full_tensor(), loss)
        for name, buffer in expected.named_buffers():
            torch.testing.assert_close(model.get_buffer(name).full_tensor(), buffer)
        if number == 2:
            expected[1].reset_running_stats()
            model[1].reset_running_stats()


def test_angles_of_a_von_mises_distribution(mesh: Mesh) -> None:
    loc, concentration = torch.tensor([0.5, 3.0]), torch.tensor([4.0, 0.2])

    @program(mesh=mesh)
    def draw(loc: torch.Tensor, concentration: torch.Tensor) -> torch.Tensor:
        return VonMises(loc, concentration).sample((4000,))

    angles = draw(loc, concentration).full_tensor()
    assert angles.shape == (4000, 2) and (angles.abs() <= math.pi).all()
    resultant = torch.special.i1(concentration) / torch.special.i0(concentration)
    assert (angles - loc).cos().mean(0).tolist() == pytest.approx(resultant.tolist(), abs=0.05)
    assert (angles - loc).sin().mean(0).tolist() == pytest.approx([0.0, 0.0], abs=0.05)


def test_matrices_of_a_wishart_distribution(mesh: Mesh) -> None:
    scale = torch.tensor([[2.0, 0.5], [0.5, 1.0]])

    @program(mesh=mesh)
    def draw(scale: torch.Tensor) -> torch.Tensor:
        return Wishart(torch.tensor(5.0), scale).sample((4000,))

    matrices = draw(scale).full_tensor()
    assert matrices.shape == (4000, 2, 2)
    torch.testing.assert_close(matrices.mean(0), 5.0 * scale, atol=0.4, rtol=0)
    assert (torch.linalg.eigvalsh(matrices) > 0).all()
