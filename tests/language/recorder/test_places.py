"""`x[i]` of a tensor `i` without dims: PyTorch's view, at a place that only the workers know."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.func import vmap

import monarch
from monarch.compiler.errors import ProgramError
from monarch.distributed import Mesh
from tests.language.partitioned import partitioned_mesh

TABLE = torch.arange(24.0).reshape(4, 6).sin()
PLAIN = torch.arange(24.0).reshape(4, 6)
Function = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(params=[False, True], ids=["ops", "kernels"])
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    with partitioned_mesh(request.param, model=2) as made:
        yield made


def _set(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[i] = 7
    y[:, i] = torch.arange(4.0)
    y[i, [0, 2]] = -1
    y[..., i] += x[i, i]
    return y


def _through_a_view(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[i][1:3].mul_(2)
    y.select(1, i).add_(1)
    y.narrow(1, i, 1).zero_()
    return y


def _seen_through_a_view(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    row = y[i]
    y.mul_(2)
    return row + 0


def _number_changed_later(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    place, y = i.clone(), x.clone()
    row = y[place]
    place += 1
    row.zero_()
    return y


def _gradient(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    y = x * 1
    y[i] = y[i] * 3
    loss = y[i].sin().sum() + (y[:, i] ** 3).sum() + y.narrow(0, i, 1).exp().sum() + y[[0, 2], i].sum()
    return torch.autograd.grad(loss, x)[0]


def _rounds(step: Any, carried: Any, xs: torch.Tensor) -> Any:
    ys = []
    for x in xs:
        carried, y = step(carried, x)
        ys.append(y)
    return carried, torch.stack(ys)


def _looped(scan: Callable[..., Any]) -> Function:
    def run(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()

        def step(carried: Any, row: torch.Tensor) -> Any:
            at, total = carried
            return ((at + 1) % 4, total + x[at] * row.sum()), x[at, at] + row

        (_, total), rows = scan(step, (i, torch.zeros(6)), x * 2)
        return torch.autograd.grad((total * rows).square().sum(), x)[0]

    return run


def _branched(cond: Callable[..., Any]) -> Function:
    def run(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
        y = x.clone()
        row = y[i]

        def add() -> torch.Tensor:
            row.add_(1)
            return row + y[i]

        return cond(x.sum() > 0, add, lambda: row * 2) + y

    return run


CASES: dict[str, tuple[Function, Function]] = {
    name: (function, function)
    for name, function in {
        "row": lambda x, i: x[i],
        "column": lambda x, i: x[..., i],
        "element": lambda x, i: x[i, i],
        "beside others": lambda x, i: x[None, i, None] + x[i, 1:4:2].sum() + x[i, [0, 2]].sum() + x[[0, 2], i].sum(),
        "select": lambda x, i: x.select(-1, i),
        "of bools": lambda x, i: (x > 0)[i],
        "int8": lambda x, i: x[i.to(torch.int8)],
        "set": _set,
        "through a view": _through_a_view,
        "seen through a view": _seen_through_a_view,
        "number changed later": _number_changed_later,
        "gradient": _gradient,
    }.items()
} | {
    "scan": (_looped(monarch.scan), _looped(_rounds)),
    "cond": (_branched(monarch.cond), _branched(lambda p, a, b: a() if p else b())),
}
LAYOUTS = ["[-, -]", "[@model, -]", "[-, @model]"]


@pytest.mark.sample(20)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASES)
def test_a_tensor_without_dims_is_a_number_among_indices(mesh: Mesh, case: str, layout: str) -> None:
    """One trace for all numbers; those outside are an IndexError of the workers."""
    ours, theirs = CASES[case]
    x = monarch.distribute(TABLE, mesh, layout)
    program: Any = monarch.program(ours)
    for number in (2, 0, -4, 6):
        index = torch.tensor(number)
        try:
            expected = theirs(TABLE, index)
        except (IndexError, RuntimeError):
            with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds|DATA bounds)"):
                program(x, index).full_tensor()
        else:
            torch.testing.assert_close(program(x, index).full_tensor(), expected)


def test_a_view_of_a_state_is_one_of_what_the_state_is_later(mesh: Mesh) -> None:
    x = monarch.distribute(TABLE, mesh, "[@model, -]")
    row = monarch.program(lambda i: x[i])(torch.tensor(2))
    torch.testing.assert_close(row.full_tensor(), TABLE[2])
    x.mul_(2)
    torch.testing.assert_close(row.full_tensor(), TABLE[2] * 2)
    monarch.program(lambda: row.zero_())()
    assert x.full_tensor()[2].eq(0).all() and x.full_tensor()[3].ne(0).any()


def test_outside_of_programs_the_number_is_asked_for(mesh: Mesh) -> None:
    x, i = monarch.distribute(TABLE, mesh), monarch.distribute(torch.tensor(-1), mesh)
    x[i, :3] = 5
    assert x[i].full_tensor().tolist()[:3] == [5, 5, 5]
    with pytest.raises(IndexError):
        x[:, i - 9]


@pytest.mark.parametrize(
    ("function", "instead"),
    [
        (lambda x, i: PLAIN[i], "PLAIN.index_select(0, i.reshape(1)).squeeze(0)"),
        (lambda x, i: vmap(lambda row: row[i])(x), "row.index_select(0, i.reshape(1)).squeeze(0)"),
        (lambda x, i: x[:, i : i + 2], "x.narrow(1, i, n)"),
        (lambda x, i: torch.select(x, 0, i), "x.select(0, i)"),
    ],
)
def test_what_asks_for_the_number_says_what_does_not(mesh: Mesh, function: Function, instead: str) -> None:
    program: Any = monarch.program(function)
    with pytest.raises(ProgramError) as error:
        program(monarch.distribute(TABLE, mesh), torch.tensor(1))
    assert any(line.strip().startswith(instead + " ") for line in error.value.hint.splitlines())
    right: Any = monarch.program(eval(f"lambda x, i, row=TABLE[0], n=2: {instead}"))
    right(monarch.distribute(TABLE, mesh), torch.tensor(1)).full_tensor()
