"""Guards of objects that are alike, which one loop checks, notice a change in one of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from monarch.language import Mesh, module_to_mesh, program


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = 1.0
        self.on, self.off = nn.Dropout(0.0), nn.Tanh()
        self.options = {"add": 0.0, "times": 1.0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inner(x) * self.scale + self.options["add"]
        return self.on(y * self.options["times"])


def _in_place_of(layer: Layer) -> None:
    layer.options = {"times": 1.0, "add": 0.0}  # in another order, which iterating would show


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "a number": lambda layer: setattr(layer, "scale", 2.0),
    "an equal number of another type": lambda layer: setattr(layer, "scale", 1),
    "a module": lambda layer: setattr(layer, "on", nn.Tanh()),
    "modules in another order": lambda layer: layer._modules.update(on=layer._modules.pop("on")),
    "an entry": lambda layer: layer.options.update(add=1.0),
    "entries in another order": _in_place_of,
    "another entry": lambda layer: layer.options.update(more=1.0),
    "a hook": lambda layer: layer.inner.register_forward_hook(lambda module, args, out: out * 2),
    "a hook without a method": lambda layer: layer.inner._forward_hooks.update({-1: lambda module, args, out: out * 2}),
    "a mode": lambda layer: layer.on.eval(),
    "a parameter": lambda layer: setattr(layer.inner, "weight", nn.Parameter(layer.inner.weight.detach() * 2)),
    "no parameter": lambda layer: setattr(layer.inner, "bias", None),
    "no gradient": lambda layer: layer.inner.weight.requires_grad_(False),
    "an attribute": lambda layer: setattr(layer.inner, "forward", lambda x: x),
    "a class": lambda layer: setattr(layer, "__class__", type("Other", (Layer,), {})),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_in_one_of_many_like_objects_is_noticed(mesh: Mesh, traces: list[str], change: str) -> None:
    model = module_to_mesh(nn.Sequential(*(Layer() for _ in range(6))), mesh)
    step = program(lambda x: model(x), mesh=mesh)
    x = torch.ones(1, 2)
    for _ in range(6):
        step(x)
    before = len(traces)
    assert before == 1
    CHANGES[change](model[4])
    got = step(x)
    assert len(traces) == before + 1
    assert torch.allclose(got.full_tensor(), model(x).full_tensor())


def test_dicts_that_are_alike_beside_a_long_list(mesh: Mesh, traces: list[str]) -> None:
    """However the nodes are numbered, a constant of one of them is no variable of another."""
    model = module_to_mesh(nn.Sequential(*(Layer() for _ in range(4))), mesh)
    weights = [0.01] * 200
    step = program(lambda x: model(x) * sum(weights), mesh=mesh)
    x = torch.ones(1, 2)
    for _ in range(6):
        step(x)
    assert len(traces) == 1
    weights[150] = 1.01
    torch.testing.assert_close(step(x).full_tensor(), model(x).full_tensor() * 3)
    assert len(traces) == 2
