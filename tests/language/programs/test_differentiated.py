"""Gradients of a program's arguments: what the caller sees of them is what plain PyTorch leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import monarch
from monarch.compiler.errors import ProgramError
from monarch.language import Mesh, distribute, program

WEIGHT = torch.linspace(-1, 1, 12).reshape(3, 4)


def returned(w: torch.Tensor, x: torch.Tensor) -> Any:
    """Asked for with `torch.autograd.grad`."""
    x.requires_grad_()
    loss = (w * x).square().sum()
    return loss, torch.autograd.grad(loss, x)[0]


def left(w: torch.Tensor, x: torch.Tensor) -> Any:
    """Left in `.grad`, which the program reads too."""
    x.requires_grad_()
    loss = (w * x).square().sum()
    loss.backward()
    assert x.grad is not None
    return loss, x + 0.1 * x.grad.sign()


def replaced(w: torch.Tensor, x: torch.Tensor) -> Any:
    x.requires_grad_(True)
    x.grad = None
    (w * x).sin().sum().backward()
    return x.detach() * 2


def doubled(w: torch.Tensor, x: torch.Tensor) -> Any:
    """A gradient penalty: a gradient of a gradient."""
    x.requires_grad_()
    (slope,) = torch.autograd.grad((w * x).tanh().sum(), x, create_graph=True)
    penalty = (slope.norm() - 1) ** 2
    penalty.backward()
    return penalty


def stopped(w: torch.Tensor, x: torch.Tensor) -> Any:
    x.requires_grad_(False)
    return (w * x).requires_grad


@pytest.mark.parametrize("function", [returned, left, replaced, doubled, stopped])
@pytest.mark.parametrize("required", [False, True])
def test_an_argument_on_the_mesh_is_left_as_pytorch_leaves_it(
    function: Callable[..., Any], required: bool, mesh: Mesh
) -> None:
    weight = monarch.distribute(WEIGHT, mesh)
    program: Any = monarch.program(lambda x: function(weight, x))
    for _ in range(4):
        plain = torch.randn(3, 4).requires_grad_(required)
        placed = monarch.distribute(plain.detach(), mesh).requires_grad_(required)
        for _ in range(3):  # the gradients of further calls are added up
            same(program(placed), function(WEIGHT, plain))
            assert placed.requires_grad == plain.requires_grad
            same(placed.grad, plain.grad)


def same(ours: Any, theirs: Any) -> None:
    if isinstance(theirs, tuple):
        for a, b in zip(ours, theirs, strict=True):
            same(a, b)
    elif isinstance(theirs, torch.Tensor):
        torch.testing.assert_close(ours.full_tensor(), theirs.detach())
    else:
        assert ours == theirs and type(ours) is type(theirs)


def test_gradients_of_further_arguments_cost_no_further_trace(mesh: Mesh) -> None:
    weight = monarch.distribute(WEIGHT, mesh)

    def step(x: torch.Tensor) -> torch.Tensor:
        loss = (weight * x).square().sum()
        loss.backward()
        return loss

    program: Any = monarch.program(step)
    for call in range(5):
        x = monarch.distribute(torch.full((3, 4), 1.0 + call), mesh).requires_grad_()
        program(x)
        same(x.grad, 2 * WEIGHT * WEIGHT * (1.0 + call))
    assert [each.traces for each in program.remembered] == [1]


def test_a_plain_argument_requires_a_gradient_behind_the_call_and_is_given_none(mesh: Mesh) -> None:
    weight = monarch.distribute(WEIGHT, mesh)
    program: Any = monarch.program(lambda x: returned(weight, x))
    for _ in range(3):
        x, plain = torch.ones(3, 4), torch.ones(3, 4)
        same(program(x), returned(WEIGHT, plain))
        assert x.requires_grad and x.grad is None
    with pytest.raises(ProgramError, match="given a gradient, and is a plain tensor"):
        monarch.program(lambda x: left(weight, x))(torch.ones(3, 4))


def test_where_the_caller_could_not_see_a_gradient_it_is_refused(mesh: Mesh) -> None:
    weight = monarch.distribute(WEIGHT, mesh)
    program: Any = monarch.program(lambda x: left(weight, x))
    base = monarch.distribute(torch.ones(2, 3, 4), mesh)
    with pytest.raises(ProgramError, match="is a view"):
        program(base[0])
    history = monarch.distribute(torch.ones(3, 4), mesh).requires_grad_() * 2
    with pytest.raises(ProgramError, match="is no leaf"):
        program(history)
    twice: Any = monarch.program(lambda x, y: (left(weight, x), y))
    x = monarch.distribute(torch.ones(3, 4), mesh)
    with pytest.raises(ProgramError, match="passed twice"):
        twice(x, x)


def test_zeros_of_forward_derivatives_are_tensors_that_workers_add_to(mesh: Mesh) -> None:
    """Autograd's own have no memory, and are written to by no op."""
    weight = distribute(torch.eye(4), mesh)
    step = program(lambda x: torch.func.hessian(lambda v: (v @ weight).tanh().sum())(x), mesh=mesh)
    assert "zerotensor" not in str(step.trace(torch.ones(4)).graph)


def test_derivatives_forward_are_traced_again(mesh: Mesh) -> None:
    weight, scale = distribute(torch.linspace(-1, 1, 9).reshape(3, 3), mesh), [2.0]
    plain, x = weight.full_tensor(), torch.linspace(-1, 1, 6).reshape(2, 3)

    def curved(v: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return ((v @ weight).tanh() * scale[0]).sum()

    step = program(lambda x: torch.func.hessian(lambda v: curved(v, weight))(x[1]), mesh=mesh)
    for scale[0] in (2.0, 3.0, 4.0):
        torch.testing.assert_close(step(x).full_tensor(), torch.func.hessian(lambda v: curved(v, plain))(x[1]))
