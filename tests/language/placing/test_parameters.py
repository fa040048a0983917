"""What a parameter has besides its value is there on the mesh too, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch.compiler.errors import ProgramError
from monarch.language import Mesh


def double(parameter: torch.Tensor) -> None:
    parameter.grad.mul_(2)  # type: ignore[union-attr]


def test_attributes_hooks_and_gradients(mesh: Mesh) -> None:
    plain = nn.Linear(4, 4)
    plain.register_buffer("scale", torch.ones(4))
    model: Any = copy.deepcopy(plain)
    handles = []
    for each in (plain, model):
        each.weight.decays = False  # type: ignore[attr-defined]
        each.scale.kept = "so"  # type: ignore[union-attr]
        each.weight.grad = torch.ones(4, 4)
        handles.append(each.weight.register_hook(lambda gradient: gradient * 3))
        each.weight.register_post_accumulate_grad_hook(double)
    monarch.module_to_mesh(model, mesh)
    assert model.weight.decays is False and model.scale.kept == "so"
    for _ in range(2):
        for each in (plain, model):
            each(torch.ones(2, 4) if each is plain else monarch.distribute(torch.ones(2, 4), mesh)).sum().backward()
        torch.testing.assert_close(model.weight.grad.full_tensor(), plain.weight.grad)
        for handle in handles:
            handle.remove()


def test_a_class_of_parameters_is_refused(mesh: Mesh) -> None:
    class Quantized(nn.Parameter):
        pass

    model = nn.Linear(4, 4)
    model.weight = Quantized(model.weight.data)
    with pytest.raises(ProgramError, match="'weight' is a Quantized, and on a mesh it would be none"):
        monarch.module_to_mesh(model, mesh)


@pytest.mark.parametrize("traced", [False, True])
def test_an_optimizer_that_was_made_before_the_module_was_placed_is_refused(traced: bool, mesh: Mesh) -> None:
    model = nn.Linear(4, 4)
    before = torch.optim.SGD(model.parameters(), lr=0.1)
    monarch.module_to_mesh(model, mesh)

    def step(x: torch.Tensor) -> None:
        model(x).sum().backward()
        before.step()

    with pytest.raises(ProgramError, match="the optimizer has not 'weight', but the plain parameter"):
        (monarch.program(step, mesh=mesh) if traced else step)(monarch.distribute(torch.ones(2, 4), mesh))
