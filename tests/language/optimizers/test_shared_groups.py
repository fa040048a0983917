"""An optimizer around another has its parameter groups."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import nn

from monarch.language import Mesh, module_to_mesh, program


class Slow(torch.optim.Optimizer):
    def __init__(self, fast: torch.optim.Optimizer) -> None:
        self.fast, self.param_groups, self.defaults, self.state = fast, fast.param_groups, {}, defaultdict(dict)

    def step(self, closure: Any = None) -> None:
        self.fast.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.fast.zero_grad(set_to_none)


def test_a_step_that_raises_leaves_the_rate_of_shared_groups(mesh: Mesh) -> None:
    layers = nn.Linear(4, 4), nn.Linear(4, 4)
    layers[1].load_state_dict(layers[0].state_dict())
    theirs = torch.optim.SGD(layers[0].parameters(), lr=0.5)
    placed = module_to_mesh(layers[1], mesh, {})
    ours = Slow(torch.optim.SGD(placed.parameters(), lr=0.5))
    fails = False

    @program
    def step(x: torch.Tensor) -> None:
        placed(x).sum().backward()
        ours.step()
        ours.zero_grad()
        if fails:
            raise KeyError("own")

    x = torch.ones(2, 4)
    for rate in (0.5, None, 0.25):
        fails = rate is None
        if fails:
            with pytest.raises(KeyError, match="own"):
                step(x)
            assert type(ours.param_groups[0]["lr"]) is float
            continue
        theirs.param_groups[0]["lr"] = ours.param_groups[0]["lr"] = rate
        step(x)
        layers[0](x).sum().backward()
        theirs.step()
        theirs.zero_grad()
    torch.testing.assert_close(placed.weight.full_tensor(), layers[0].weight.detach())
