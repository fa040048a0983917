"""Masks and indices that a program makes itself are known while it is traced."""

from __future__ import annotations

import pytest
import torch

import monarch
from monarch.compiler.errors import ProgramError
from monarch.language import Mesh


def test_a_branch_on_a_mask_that_the_program_makes(mesh: Mesh) -> None:
    x = monarch.distribute(torch.ones(4, 4), mesh)

    def step(x: torch.Tensor) -> torch.Tensor:
        mask = torch.triu(torch.ones(4, 4), 1)
        view = mask[1]
        view[0] = 5.0
        if mask[1, 0] == 5 and not mask.bool().all() and torch.equal(mask, mask):
            x = x * 2
        rows, columns = torch.where(mask > 0)
        return x[rows, columns] + mask.sum().item()

    def plain(x: torch.Tensor) -> torch.Tensor:
        return step(x)

    assert torch.equal(monarch.program(step)(x).full_tensor(), plain(torch.ones(4, 4)))


def test_entries_are_selected_by_a_mask_that_is_known(mesh: Mesh) -> None:
    rows = torch.tensor([True, False, True, True])

    def select(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        found = (
            x.masked_select(rows[:, None]),
            x[0, :1].masked_select(rows),
            torch.combinations(x[:, 0]),
            x[0, 0].masked_select(torch.arange(1)[0] == 0),
        )
        return *found, *torch.autograd.grad(sum(y.square().sum() for y in found), x)

    x = torch.arange(12.0).view(4, 3)
    program = monarch.program(mesh=mesh)(select)
    for row in (1, 0):
        for got, want in zip(program(x), select(x), strict=True):
            assert torch.equal(got.full_tensor(), want)
        rows[row] ^= True  # noticed: what was computed from it is built in


def test_what_depends_on_an_argument_is_not_known(mesh: Mesh) -> None:
    x = monarch.distribute(torch.ones(4), mesh)

    def step(x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(4)
        mask[:2] = x[:2]
        return x * 2 if mask.sum() > 1 else x

    def drawn(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.rand(()) > 0.5 else x

    for function in (step, drawn):
        with pytest.raises(ProgramError, match="cannot branch"):
            monarch.program(function)(x)


def test_plain_tensors_that_are_made_inside_are_written_to_and_those_from_outside_are_not(mesh: Mesh) -> None:
    x, outside = monarch.distribute(torch.ones(4), mesh), torch.tensor([True, False, True, False])

    def step(x: torch.Tensor) -> torch.Tensor:
        mine = outside.float()
        mine[0] += 2
        mine.view(2, 2)[1].mul_(4)
        return x * mine

    program = monarch.program(step)
    assert program(x).tolist() == [3, 0, 4, 0]
    outside[1] = True  # noticed: what was computed from it is built in
    assert program(x).tolist() == [3, 1, 4, 0]
    with pytest.raises(ProgramError, match="changed in place"):
        monarch.program(lambda x: x + outside.logical_not_())(x)  # monarch: ignore[M106]


def test_libraries_are_told_that_they_are_compiled(mesh: Mesh) -> None:
    @monarch.program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 3 if torch.compiler.is_compiling() else x

    assert step(torch.ones(2)).tolist() == [3, 3]
    assert not torch.compiler.is_compiling()
