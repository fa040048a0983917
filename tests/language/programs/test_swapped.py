"""Weights that change places, or are computed, between the calls of a program: it reads what is there then."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from monarch.compiler.errors import ProgramError
from monarch.language import Mesh, distribute, module_to_mesh, program


@pytest.fixture
def by_swapping() -> Any:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.tensor(2.0))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * self.by


def linear(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(4, 3)


def scaled(seed: int) -> nn.Linear:
    made = linear(seed)
    parametrize.register_parametrization(made, "weight", Scaled())
    return made


def both(mesh: Mesh, make: Callable[[int], nn.Linear], run: Callable[..., list[Any]]) -> list[list[Any]]:
    """What `run` gives of two modules and a call of the first, with a program and without."""
    found: list[list[Any]] = []
    for on_mesh in (True, False):
        m, n = (module_to_mesh(make(seed), mesh, {}) if on_mesh else make(seed) for seed in (1, 2))
        step = program(m.__call__, mesh=mesh) if on_mesh else m
        with torch.no_grad():
            found.append([each.tolist() for each in run(m, n, lambda seed, step=step: step(torch.ones(2, 4) * seed))])
    return found


def test_tensors_that_are_swapped_are_read_where_they_are(mesh: Mesh) -> None:
    def run(m: nn.Linear, n: nn.Linear, call: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        found = [call(1)]
        torch.utils.swap_tensors(m.weight, n.weight)
        found.append(call(2))
        n.weight.add_(1)
        found.append(call(3))
        torch.utils.swap_tensors(m.weight, n.weight)
        return [*found, call(4), m.weight, n.weight]

    ours, theirs = both(mesh, linear, run)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("by_swapping")
def test_a_module_that_swaps_its_parameters_keeps_them(mesh: Mesh) -> None:
    def run(m: nn.Linear, n: nn.Linear, call: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        found, weight = [call(1)], m.weight
        m.load_state_dict({name: value * 2 for name, value in n.state_dict().items()})
        found.append(call(2))
        assert m.weight is weight
        return found

    ours, theirs = both(mesh, linear, run)
    torch.testing.assert_close(ours, theirs)


def test_a_tensor_that_another_watches_is_not_swapped(mesh: Mesh) -> None:
    x, y = (distribute(torch.full((2,), value), mesh) for value in (1.0, 2.0))
    program(lambda z: z * x, mesh=mesh)(torch.ones(2))
    watching = weakref.ref(x)
    with pytest.raises(RuntimeError, match="Cannot swap t1 because it has weakref"):
        torch.utils.swap_tensors(x, y)
    assert watching() is x and x.tolist() == [1, 1]


def test_weights_that_are_computed_once_are_so_for_programs_too(mesh: Mesh, traces: list[str]) -> None:
    def run(m: Any, n: nn.Linear, call: Callable[[int], torch.Tensor]) -> list[torch.Tensor]:
        found = [call(1)]
        with parametrize.cached():
            found.append(call(2))
            m.parametrizations.weight[0].by.add_(1)
            found += [call(3), call(4), m.weight]
        return [*found, call(5), m.weight]

    ours, theirs = both(mesh, scaled, run)
    torch.testing.assert_close(ours, theirs)

    m: Any = module_to_mesh(scaled(1), mesh, {})

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            return m(x) + m(x)

    del traces[:]
    for _ in range(4):
        with torch.no_grad():
            assert step(torch.ones(2, 4)).tolist() == (m(torch.ones(2, 4)) * 2).tolist()
            m.parametrizations.weight[0].by.add_(1)
    assert len(traces) == 1

    with parametrize.cached(), pytest.raises(ProgramError, match="with the history that autograd had of it"):
        for _ in range(2):  # the weight that the first has left is none that the second can differentiate by
            step(torch.ones(2, 4))
