"""What tensors among a program's arguments have of their own: attributes, hooks and gradients. Those of a distributed
one are as in PyTorch; a program that needs those of a plain one is refused, with the line and a way out that works."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch.compiler.errors import ArgumentWritten
from monarch.language import Mesh, distribute, program

Place = Callable[[torch.Tensor], torch.Tensor]
Decorate = Callable[[Callable[..., Any]], Any]


def reads(as_program: Decorate, place: Place) -> Any:
    @as_program
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * getattr(x, "scale", 2) if hasattr(x, "scale") else x

    x: Any = place(torch.ones(3))
    found = [step(x), step(x)]
    for scale in (3, 3, 4):
        x.scale = scale
        found += [step(x), step(place(torch.ones(3)))]
    del x.scale
    return [*found, step(x)]


def hooks(as_program: Decorate, place: Place) -> Any:
    @as_program
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((x * x).sum(), x)[0]

    x = place(torch.ones(3)).requires_grad_()
    found = [step(x), step(x)]
    hook = x.register_hook(lambda grad: grad * 100)
    found += [step(x), step(x)]
    hook.remove()
    return [*found, step(x)]


def gradient(as_program: Decorate, place: Place) -> Any:
    @as_program
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 0 if x.grad is None else x.grad * 2

    x = place(torch.ones(3)).requires_grad_()
    found = [step(x), step(x)]
    x.grad = place(torch.full((3,), 7.0))
    found += [step(x), step(x)]
    x.grad = None
    return [*found, step(x)]


def parameter(as_program: Decorate, place: Place) -> Any:
    @as_program
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if isinstance(x, torch.nn.Parameter) else x * 3

    x = place(torch.ones(3))
    return [step(each) for each in (x, torch.nn.Parameter(x), x, torch.nn.Parameter(x, requires_grad=False))]


def only_a_deque(as_program: Decorate, place: Place) -> Any:
    @as_program
    def step(last: collections.deque[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        last.append(x)
        return torch.stack([*last])

    last: collections.deque[torch.Tensor] = collections.deque(maxlen=2)
    return [step(last, place(torch.full((3,), float(number)))) for number in range(4)]


@pytest.mark.parametrize("of", [parameter, only_a_deque])
def test_plain_arguments_are_as_in_pytorch(mesh: Mesh, of: Callable[..., Any]) -> None:
    ours, theirs = (
        of(lambda function: program(function, mesh=mesh), lambda tensor: tensor),
        of(lambda x: x, lambda x: x),
    )
    assert [each.tolist() for each in ours] == [each.tolist() for each in theirs]


@pytest.mark.parametrize("of", [reads, hooks, gradient, parameter, only_a_deque])
def test_those_of_a_distributed_argument_are_as_in_pytorch(mesh: Mesh, of: Callable[..., Any]) -> None:
    ours = of(lambda function: program(function, mesh=mesh), lambda tensor: distribute(tensor, mesh))
    theirs = of(lambda function: function, lambda tensor: tensor)
    assert [each.tolist() for each in ours] == [each.tolist() for each in theirs]


@pytest.mark.parametrize(
    ("of", "what", "names"),
    [
        (reads, "reads an attribute 'scale' of argument 0, which is a plain tensor", "scale"),
        (hooks, "argument 0 of the program has hooks, and the program differentiates", "found += "),
        (gradient, "a plain tensor with a gradient, which the program may read", "x.grad is None"),
    ],
)
def test_those_of_a_plain_argument_are_refused(mesh: Mesh, of: Callable[..., Any], what: str, names: str) -> None:
    with pytest.raises(ArgumentWritten, match=what) as refused:
        of(lambda function: program(function, mesh=mesh), lambda tensor: tensor)
    assert refused.value.source is not None and names in refused.value.source.excerpt()


def test_what_a_program_gives_a_plain_argument_is_refused(mesh: Mesh) -> None:
    def attribute(x: Any) -> torch.Tensor:
        x.note = 1
        return x * 2

    def hook(x: torch.Tensor) -> torch.Tensor:
        x.register_hook(lambda grad: grad * 2)
        return torch.autograd.grad((x * x).sum(), x)[0]

    for function, line in ((attribute, "x.note = 1"), (hook, "x.register_hook(")):
        for _ in range(2):
            x = torch.ones(3, requires_grad=True)
            with pytest.raises(ArgumentWritten, match="argument 0 of the program is given a") as refused:
                program(function, mesh=mesh)(x)
            assert refused.value.source is not None and line in refused.value.source.excerpt()
            assert not vars(x) and not x._backward_hooks


def test_attributes_that_no_program_reads_cost_nothing(mesh: Mesh, traces: list[str]) -> None:
    double = program(lambda x: x * 2, mesh=mesh)
    for number in range(3):
        x: Any = torch.ones(3)
        x.number = number
        assert double(x).tolist() == [2] * 3
    assert len(traces) == 1


def test_whether_an_argument_is_a_leaf_is_so_as_without_a_program(mesh: Mesh) -> None:
    step = program(lambda x: (x * 2, x.is_leaf, x.grad_fn is None), mesh=mesh)
    leaf = distribute(torch.ones(2), mesh).requires_grad_()
    for x in (leaf, leaf * 2, leaf):
        assert step(x)[1:] == (x.is_leaf, x.grad_fn is None)
    with pytest.raises(ArgumentWritten, match=r"(?s)argument 0 .* has a history.*monarch.distribute\(x, mesh\)"):
        step(torch.ones(2).requires_grad_() * 2)


def test_an_attribute_of_an_argument_is_deleted_or_refused_with_the_line(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(x: Any) -> Any:
        del x.scale
        return x * 2

    for _ in range(3):
        x: Any = distribute(torch.ones(2), mesh)
        x.scale = 1
        step(x)
        assert not hasattr(x, "scale")
    plain: Any = torch.ones(2)
    plain.scale = 1
    with pytest.raises(ArgumentWritten, match=r"test_own.py:\d+:.*deletes an attribute 'scale' of argument 0"):
        step(plain)
    assert plain.scale == 1
