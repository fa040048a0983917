"""Programs called where something sees each op: modes, transforms of `torch.func`, hooks of saved tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from monarch.language import Mesh, program
from tests.language.alike import assert_alike, nothing

World = dict[str, Any]


class Functions(TorchFunctionMode):
    """Doubles what torch.sigmoid gives."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.sigmoid else out


class Ops(TorchDispatchMode):
    """Doubles what the op of torch.sigmoid gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.ops.aten.sigmoid.default else out


def doubled() -> Any:
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor)


WITHIN: list[Callable[[], Any]] = [Functions, Ops, doubled, lambda: torch.device("cpu")]


@pytest.mark.parametrize("within", WITHIN)
def test_a_call_within_it_is_what_it_is_without_a_program_and_calls_behind_it_too(
    within: Callable[[], Any], mesh: Mesh
) -> None:
    def case(w: World) -> Any:
        def train(x: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = torch.sigmoid(w["m"](x)).square().mean()
            loss.backward()
            w["o"].step()
            w["o"].zero_grad()
            return loss.detach()

        train, calls = w["program"](train), [0]

        def step(x: torch.Tensor) -> torch.Tensor:
            calls[0] += 1
            with within() if calls[0] % 3 == 0 else contextlib.nullcontext():
                return train(x)

        step.own = True  # type: ignore[attr-defined]
        return step, nothing

    assert_alike(case, mesh)


def test_transforms_of_programs(mesh: Mesh) -> None:
    def case(w: World) -> Any:
        scale = [1.0]
        loss = w["program"](lambda row: (w["m"](row) * scale[0]).square().sum())

        def step(x: torch.Tensor) -> Any:
            return (
                torch.vmap(loss)(x),
                torch.func.grad(loss)(x),
                torch.func.hessian(loss)(x),
                torch.func.grad(loss)(torch.ones(3, 4)),
                loss(x).detach(),
            )

        step.own = True  # type: ignore[attr-defined]
        return step, lambda call: scale.__setitem__(0, float(call))

    assert_alike(case, mesh)


def test_arguments_are_placed_and_a_flop_counter_counts(mesh: Mesh, traces: list[str]) -> None:
    @program(mesh=mesh)
    def step(x: "f32[4@data, 8]"):  # type: ignore[no-untyped-def,syntax]
        return x @ x.t()

    for _ in range(2):
        with FlopCounterMode(display=False) as counter:
            made = step(torch.ones(4, 8))
        assert counter.get_total_flops() == 2 * 4 * 8 * 4
    assert torch.equal(made.full_tensor(), torch.full((4, 4), 8.0)) and not traces
