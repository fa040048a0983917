"""`torch.amp.GradScaler` and `torch.optim.swa_utils.AveragedModel` on a mesh, against plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn, get_swa_multi_avg_fn

from monarch.compiler.errors import ProgramError
from monarch.language import Mesh, distribute, module_to_mesh, program

KINDS: dict[str, dict[str, Any]] = {
    "swa": {},
    "ema": {"avg_fn": get_ema_avg_fn(0.9)},
    "ema-multi": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "swa-multi": {"multi_avg_fn": get_swa_multi_avg_fn()},
    "ema-buffers": {"avg_fn": get_ema_avg_fn(0.5), "use_buffers": True},
}


def models() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    return model, copy.deepcopy(model)


@pytest.mark.sample(8)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("door", ["program", "eager"])
@pytest.mark.parametrize("placed", ["before", "after"])
def test_averaged_models(mesh: Mesh, kind: str, door: str, placed: str) -> None:
    model, plain = models()
    if placed == "before":
        average = AveragedModel(module_to_mesh(model, mesh), **KINDS[kind])
    else:
        average = module_to_mesh(AveragedModel(model, **KINDS[kind]), mesh)
        module_to_mesh(model, mesh)
    wanted = AveragedModel(plain, **KINDS[kind])

    def make(model: Any, average: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step(x: torch.Tensor) -> None:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)

        return step

    ours, theirs = make(model, average), make(plain, wanted)
    ours = program(ours) if door == "program" else ours
    for _ in range(4):
        x = torch.randn(8, 4)
        ours(distribute(x, mesh))
        theirs(x)
    found = {name: tensor.full_tensor() for name, tensor in average.state_dict().items()}
    assert found["n_averaged"] == 4
    torch.testing.assert_close(found, dict(wanted.state_dict()))


def scaled(model: nn.Module, bad: int | None, door: str, mesh: Mesh | None) -> tuple[list[Any], list[float]]:
    """Five steps, one of which has gradients that are not finite: the parameters, and the scale after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def gradients(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x).square().mean()).backward()

    run: Any = program(gradients) if door == "program" else gradients
    scales = []
    for number in range(5):
        x = torch.full((8, 4), float("inf") if number == bad else 1.0 + number)
        run(x if mesh is None else distribute(x, mesh))
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return [getattr(p, "full_tensor", p.detach)() for p in model.parameters()], scales


@pytest.mark.sample(3)
@pytest.mark.parametrize("door", ["program", "eager"])
@pytest.mark.parametrize("bad", [None, 0, 2])
@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
def test_grad_scaler_steps_outside_of_programs(mesh: Mesh, door: str, bad: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    wanted = scaled(copy.deepcopy(model), bad, "eager", None)
    found = scaled(module_to_mesh(model, mesh), bad, door, mesh)
    torch.testing.assert_close(found[0], wanted[0])
    assert found[1] == wanted[1]


def test_grad_scaler_in_a_program(mesh: Mesh) -> None:
    model = module_to_mesh(nn.Linear(4, 4), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def make(scaler: torch.amp.GradScaler) -> Any:
        @program
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(x).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            return loss

        return step

    step = make(torch.amp.GradScaler("cpu", enabled=False))
    first, *_, last = (step(torch.ones(8, 4)).item() for _ in range(4))
    assert last < first
    with pytest.raises(ProgramError, match=r"GradScaler steps only where all(.|\n)*scaler.step\(optimizer\).*outside"):
        make(torch.amp.GradScaler("cpu"))(torch.ones(8, 4))
