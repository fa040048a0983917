"""Programs within `torch.autocast`, which keeps casts of weights until the outermost ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monarch import ProgramError, program
from monarch.distributed import Mesh
from tests.language.models import mlp, twins, vector_batch

pytestmark = pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
BF16 = {"device_type": "cpu", "dtype": torch.bfloat16}


def trained(model: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(x).float().square().mean()
        loss.backward()
        optimizer.step()
        return loss

    return step


def test_an_autocast_around_each_step_costs_no_trace(mesh: Mesh, traces: list[str]) -> None:
    model, plain = twins(mlp, mesh)
    ours, theirs, x = program(trained(model)), trained(plain), vector_batch(0)[0]
    for _ in range(5):
        with torch.autocast(**BF16):
            torch.testing.assert_close(ours(x).full_tensor(), theirs(x).detach(), atol=2e-2, rtol=2e-2)
    assert len(traces) <= 2  # before and after there are gradients


@pytest.mark.parametrize("enabled", [True, False])
def test_one_autocast_around_calls_that_change_no_weights_costs_no_trace(
    mesh: Mesh, traces: list[str], enabled: bool
) -> None:
    model, plain = twins(mlp, mesh)
    x = vector_batch(0)[0]

    @program
    def forward(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(**BF16):
            found: torch.Tensor = model(x)
        return found

    with torch.no_grad(), torch.autocast(**BF16, enabled=enabled):
        wanted = plain(x) if enabled else plain(x).bfloat16()
        for _ in range(4):
            torch.testing.assert_close(forward(x).full_tensor(), wanted, atol=2e-2, rtol=2e-2)
    assert len(traces) == 1


@pytest.mark.parametrize("outside", [True, False], ids=["outside the program", "in the program"])
def test_one_autocast_around_calls_that_change_weights_is_refused(mesh: Mesh, outside: bool) -> None:
    """PyTorch goes on with the casts of the old weights."""
    model, _ = twins(mlp, mesh)
    step, x = program((lambda x: model(x)) if outside else trained(model)), vector_batch(0)[0]

    def change() -> None:
        if outside:
            with torch.no_grad():
                next(model.parameters()).mul_(2)

    for _ in range(2):  # traced, and not
        with torch.autocast(**BF16):
            step(x)
            change()
            before = [parameter.full_tensor() for parameter in model.parameters()]
            with pytest.raises(ProgramError, match="casts weights for an autocast that has cast them before"):
                step(x)
            assert all(map(torch.equal, before, [parameter.full_tensor() for parameter in model.parameters()]))
    for _ in range(3):
        with torch.autocast(**BF16):
            step(x)
            change()
    with torch.autocast(**BF16, cache_enabled=False):
        for _ in range(3):
            step(x)
            change()
