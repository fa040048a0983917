"""`cond`, `while_loop`, `scan`: what Python's `if`, `while` and `for` give, and their gradients, on every layout."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import monarch
from monarch.compiler.errors import ProgramError
from monarch.compiler.execution.factories import executors_by
from monarch.compiler.local_ops import CheckFailed
from monarch.compiler.pipeline import compile_graph
from monarch.language import Mesh, OperatorError
from monarch.language.compile import compiling_with
from tests.language.dense import DenseExecutor, compile_dense
from tests.language.partitioned import partitioned_mesh


@contextmanager
def dense_mesh() -> Iterator[Mesh]:
    with executors_by(DenseExecutor), compiling_with(compile_dense), Mesh(data=2, model=2) as mesh:
        yield mesh


MESHES: dict[str, Callable[[], Any]] = {
    "dense": dense_mesh,
    "partitioned": lambda: partitioned_mesh(data=2, model=2),
    "kernels": lambda: partitioned_mesh(True, data=2, model=2),
}

Function = Callable[..., tuple[torch.Tensor, ...]]


def with_gradients(function: Function) -> Callable[..., list[torch.Tensor]]:
    """What a function gives, and the gradients of all floats that it takes for a sum of what it gives."""

    def run(*given: torch.Tensor) -> list[torch.Tensor]:
        inputs = [x.detach().requires_grad_() if x.dtype.is_floating_point else x for x in given]
        results = function(*inputs)
        smooth = [each for each in results if each.requires_grad]
        wanted = [x for x in inputs if x.requires_grad]
        gradients: list[torch.Tensor] = []
        if smooth:
            total = sum((each * torch.arange(each.numel()).view(each.shape).cos()).sum() for each in smooth)
            assert isinstance(total, torch.Tensor)
            found = torch.autograd.grad(total, wanted, allow_unused=True)
            gradients = [torch.zeros_like(x) if each is None else each for x, each in zip(wanted, found, strict=True)]
        return [*(each.detach() for each in results), *gradients]

    return run


def expect_same(mesh: str, function: Function, plain: Function, given: list[torch.Tensor], layouts: Any = None) -> None:
    """A program of `function` gives what `plain` gives, and its gradients, and traces once for any values."""
    wanted = with_gradients(plain)(*given)
    with MESHES[mesh]() as made:
        program = monarch.program(with_gradients(function))
        placed = [
            monarch.distribute(x, made, layout) if layout else monarch.distribute(x, made)
            for x, layout in zip(given, layouts or [None] * len(given), strict=True)
        ]
        results = program(*placed)
        for got, want in zip(results, wanted, strict=True):
            torch.testing.assert_close(got.full_tensor(), want)


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(map(sum, shapes)))
    return [torch.randn(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize(
    ("mesh", "layouts"),
    [
        ("dense", None),
        ("partitioned", ["[@data, -]", "[-, @model]"]),
        ("kernels", ["[-, @(data,model)]", "[@model, -]"]),
    ],
)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_branch_is_that_of_an_if(mesh: str, sign: int, layouts: Any) -> None:
    x, w = tensors((4, 8), (8, 8))

    def branch(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w
        return (monarch.cond((sign * (y * y)).sum() > 0, lambda a: torch.tanh(a @ w) + y, lambda a: a * 2, (x,)), y)

    def plain(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x @ w
        return (torch.tanh(x @ w) + y if (sign * (y * y)).sum() > 0 else x * 2, y)

    expect_same(mesh, branch, plain, [x, w], layouts)


@pytest.mark.parametrize(("mesh", "layouts"), [("partitioned", None), ("kernels", ["[@data, -]", "[-, @model]"])])
@pytest.mark.parametrize("most", [5, 0])
def test_a_loop_is_that_of_a_while(mesh: str, layouts: Any, most: int) -> None:
    x, w = tensors((4, 8), (8, 8))

    def loop(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            return monarch.while_loop(
                lambda i, a: (i < most) & (a.abs().sum() < 1e6), lambda i, a: (i + 1, torch.tanh(a @ w) + a), (0, x)
            )

    def plain(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        i = 0
        with torch.no_grad():
            while i < most and x.abs().sum() < 1e6:
                i, x = i + 1, torch.tanh(x @ w) + x
        return torch.tensor(i), x.detach()

    expect_same(mesh, loop, plain, [x, w], layouts)


@pytest.mark.parametrize(
    ("mesh", "reverse", "layouts"),
    [
        ("dense", True, None),
        ("partitioned", False, ["[-, @data, -]", "[-, @model]", None]),
        ("kernels", True, ["[@data, -, @model]", "[@data, @model]", "[@data, -]"]),
    ],
)
def test_a_scan_is_that_of_a_for(mesh: str, reverse: bool, layouts: Any) -> None:
    def scanned(xs: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def combine(carry: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            carry = torch.tanh(x @ w + carry)
            return carry, carry * 2 + x

        return monarch.scan(combine, h, xs, reverse=reverse)

    def plain(xs: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ys: list[torch.Tensor] = []
        for x in reversed(xs.unbind()) if reverse else xs:
            h = torch.tanh(x @ w + h)
            ys.append(h * 2 + x)
        return h, torch.stack(ys[::-1] if reverse else ys)

    expect_same(mesh, scanned, plain, tensors((6, 4, 8), (8, 8), (4, 8)), layouts)


@pytest.mark.parametrize(("mesh", "layouts"), [("partitioned", ["[-, @data]", None, None]), ("kernels", None)])
def test_a_scan_over_nothing_gives_what_it_carries(mesh: str, layouts: Any) -> None:
    def scanned(xs: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return monarch.scan(lambda h, x: (torch.tanh(x * w + h), x * 2), h, xs)

    def plain(xs: torch.Tensor, h: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return h, xs * 2

    expect_same(mesh, scanned, plain, tensors((0, 8), (8,), (8,)), layouts)


def test_branches_and_loops_nest_with_their_gradients() -> None:
    def nested(xs: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        def combine(carry: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            def otherwise() -> torch.Tensor:
                return monarch.cond(x.sum() > 0, lambda: x - carry * 2, lambda: carry * w[0])

            made = monarch.cond(carry.sum() > 0, lambda: torch.tanh(x @ w + carry), otherwise)
            return made, {"y": made * 2 + x}

        last, ys = monarch.scan(combine, h, xs, dim=1)
        return last, ys["y"]

    def plain(xs: torch.Tensor, w: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ys = []
        for x in xs.unbind(1):
            if h.sum() > 0:
                h = torch.tanh(x @ w + h)
            elif x.sum() > 0:
                h = x - h * 2
            else:
                h = h * w[0]
            ys.append(h * 2 + x)
        return h, torch.stack(ys, 1)

    expect_same(
        "partitioned", nested, plain, tensors((4, 5, 6), (6, 6), (4, 6)), ["[@data, -, -]", "[-, @model]", None]
    )


def test_sizes_that_do_not_divide_cross_the_edge() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = monarch.cond(x.sum() > 0, lambda: torch.softmax(x @ w, 0).sum(1), lambda: (x * 2).sum(1))
        with torch.no_grad():
            (b,) = monarch.while_loop(lambda a: a.abs().max() < 100, lambda a: a * 2, (a.detach(),))
        return (a, b, *monarch.scan(lambda carry, e: (carry + e.sum(), e * carry), torch.zeros(()), x * 1))

    def plain(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.softmax(x @ w, 0).sum(1) if x.sum() > 0 else (x * 2).sum(1)
        b = a.detach()
        while b.abs().max() < 100:
            b = b * 2
        carry, ys = torch.zeros(()), []
        for e in x:
            ys.append(e * carry)
            carry = carry + e.sum()
        return a, b, carry, torch.stack(ys)

    expect_same("partitioned", function, plain, tensors((5, 7), (7, 3)), ["[@data, @model]", None])


@pytest.mark.parametrize("most", [-99.0, 99.0])
def test_a_layout_within_pads_its_dims_there_alone(most: float) -> None:
    x, w = torch.randn(5, 7), torch.randn(7, 7)
    with partitioned_mesh(data=2) as mesh:

        @monarch.program(mesh=mesh)
        def step(x: "f32[5, 7]", w: "f32[7, 7@data]"):  # type: ignore[no-untyped-def,syntax]
            made = monarch.cond(x.sum() > most, lambda: monarch.layout(x @ w, "[@data, -]"), lambda: x * 2)
            last, rows = monarch.scan(lambda h, _: (monarch.layout(h @ w, "[-, @data]"), h), x, torch.zeros(2))
            return made.exp().sum(0), last, rows

        made = ((x @ w) if x.sum() > most else x * 2).exp().sum(0)
        for found, expected in zip(step(x, w), (made, x @ w @ w, torch.stack([x, x @ w])), strict=True):
            torch.testing.assert_close(found.full_tensor(), expected)


def test_what_passes_pytorchs_modes_by_keeps_its_gradient_or_is_refused() -> None:
    """A scan that carries on what its branch reads, and a Function that is given it, also in a branch of a branch."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a * b

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            a, b = ctx.saved_tensors
            return gradient * b, gradient * a

    def step(x: torch.Tensor, branch: Any) -> Any:
        x = x.requires_grad_()
        return torch.autograd.grad(monarch.cond(x.sum() > -99, lambda: branch(x), lambda: x * 2).square().sum(), x)[0]

    def carried(x: torch.Tensor) -> Any:
        return monarch.scan(lambda h, y: (h * y, None), x, torch.arange(1.0, 3.0))[0]

    x = torch.rand(4, 3)
    with partitioned_mesh(data=2) as mesh:

        def found(branch: Any) -> torch.Tensor:
            program = monarch.program(lambda x: step(x, branch), mesh=mesh)
            gradient: torch.Tensor = program(monarch.distribute(x, mesh, "[@data, -]")).full_tensor()
            return gradient

        def nested(x: torch.Tensor) -> Any:
            y = x.sin()
            return monarch.cond(x.sum() > -99, lambda z: Product.apply(z, y) * Product.apply(x, z), torch.cos, (x,))

        for branch in (carried, lambda x: Product.apply(x, x), nested):
            torch.testing.assert_close(found(branch), step(x.clone(), branch))

        def past(x: torch.Tensor) -> Any:
            return super(torch.autograd.Function, Product).apply(x, x)  # type: ignore[misc]

        def inside(x: torch.Tensor, give: Any) -> Any:
            y = x.sin()
            return monarch.cond(x.sum() > -99, lambda: past(give(y)), lambda: y)

        for way in (lambda x, give: past(give(x)), inside):
            with pytest.raises(ProgramError, match="a tensor from outside of a branch or a loop requires a gradient"):
                found(lambda x, way=way: way(x, lambda y: y))
            right = lambda x, way=way: way(x, lambda y: y.view_as(y))  # noqa: E731  as the error says
            torch.testing.assert_close(found(right), step(x.clone(), right))


def test_a_plain_tensor_from_outside_has_its_gradient() -> None:
    linear, start = nn.Linear(3, 3), torch.linspace(-1, 1, 9).reshape(3, 3)

    def gradients(x: "f32[6@data, 3]") -> Any:
        own = start.clone().requires_grad_()

        def cell(h: torch.Tensor, row: torch.Tensor) -> Any:
            inner = start[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad((inner * row).sin().sum(), inner)
            numbers = linear.weight.detach().tolist()[0][0]
            return monarch.cond(row.sum() > 0, lambda: linear(h) + slope, lambda: linear(h) * own[1] * numbers), h + row

        last, stacked = monarch.scan(cell, own[0], own)
        branch = monarch.cond(x.sum() > 0, lambda v: linear(x) @ v, lambda v: x @ v, (own,))
        loss = last.square().sum() + stacked.sum() + branch.square().mean() + (linear(x) @ own).mean()
        return torch.autograd.grad(loss, [own, *linear.parameters()])

    x = torch.linspace(-2, 3, 18).reshape(6, 3)
    with partitioned_mesh(data=2) as mesh:
        for sign in (1, -1):
            for ours, theirs in zip(monarch.program(gradients, mesh=mesh)(sign * x), gradients(sign * x), strict=True):
                torch.testing.assert_close(ours.full_tensor(), theirs)


@pytest.mark.parametrize("kind", ["cond", "while_loop", "scan"])
def test_a_change_in_python_within_a_branch_or_a_loop_is_refused(kind: str) -> None:
    layer = nn.Linear(2, 2)
    layer.calls = 0  # type: ignore[assignment]

    def counted(x: torch.Tensor) -> torch.Tensor:
        layer.calls += 1  # type: ignore[operator]
        return x * 2

    def step(x: torch.Tensor) -> Any:
        if kind == "cond":
            return monarch.cond(x.sum() > 0, lambda: counted(x), lambda: x)
        if kind == "scan":
            return monarch.scan(lambda h, row: (counted(h) + row, None), x[0], x)[0]
        return monarch.while_loop(lambda n, x: n < 3, lambda n, x: (n + 1, counted(x)), (torch.tensor(0), x))

    with dense_mesh() as mesh, pytest.raises(ProgramError, match=f"_fn of {kind} changes 'calls' in Python"):
        monarch.program(step, mesh=mesh)(torch.ones(2, 2))
    assert layer.calls == 0


def test_a_checkpoint_within_reads_what_is_outside_and_none_stands_around_it() -> None:
    def kept(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = checkpoint(lambda x: (x @ w).tanh(), x, use_reentrant=False)
        return made

    def branch(x: torch.Tensor, w: torch.Tensor) -> Any:
        return monarch.cond(x.sum() > -99, lambda: kept(x, w), lambda: x)

    def loop(x: torch.Tensor, w: torch.Tensor) -> Any:
        return monarch.scan(lambda h, _: (kept(h, w) + x, None), x, torch.zeros(2))[0]

    def gradients(function: Any, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, w = x.requires_grad_(), w.requires_grad_()
        return torch.autograd.grad(function(x, w).square().sum(), (x, w))

    x, w = torch.randn(4, 4), torch.randn(4, 4)
    with partitioned_mesh(data=2) as mesh:

        def step(function: Any) -> Any:
            program = monarch.program(lambda x, w: gradients(function, x, w), mesh=mesh)
            return program(monarch.distribute(x, mesh, "[@data, -]"), monarch.distribute(w, mesh))

        for function in (branch, loop):
            for found, expected in zip(step(function), gradients(function, x.clone(), w.clone()), strict=True):
                torch.testing.assert_close(found.full_tensor(), expected)
        with pytest.raises(ProgramError, match="a checkpoint recomputes true_fn of cond"):
            step(lambda x, w: checkpoint(branch, x, w, use_reentrant=False))


def test_pytorchs_functions_are_these_in_programs() -> None:
    higher = torch._higher_order_ops

    def function(xs: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = torch.cond(xs.sum() > 0, lambda x: x * 2, lambda x: x * 3, (xs,))
        b = higher.map(lambda x, v: torch.tanh(x @ v), xs, w)
        c = higher.associative_scan(lambda p, q: p * q, xs, 0)
        d = higher.associative_scan(torch.add, xs, 1, reverse=True)
        return (a, b, c, d, *higher.scan(lambda carry, x: (carry + x, carry * x), xs[0], xs))

    def plain(xs: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, ...]:
        carry, ys = xs[0], []
        for x in xs:
            ys.append(carry * x)
            carry = carry + x
        a = xs * 2 if xs.sum() > 0 else xs * 3
        reverse = xs.flip(1).cumsum(1).flip(1)
        return a, torch.tanh(xs @ w), xs.cumprod(0), reverse, carry, torch.stack(ys)

    expect_same("partitioned", function, plain, tensors((5, 4, 6), (6, 6)), ["[-, @data, -]", "[-, @model]"])


def test_a_branch_writes_to_state_as_an_if_does() -> None:
    torch.manual_seed(0)
    dense = nn.ModuleList([nn.Linear(6, 6), nn.BatchNorm1d(6)])
    placed = copy.deepcopy(dense)
    x = torch.randn(4, 6)
    with partitioned_mesh(data=2) as mesh:
        monarch.module_to_mesh(placed, mesh)
        optimizer = torch.optim.SGD(placed.parameters(), lr=0.1)
        plain = torch.optim.SGD(dense.parameters(), lr=0.1)

        @monarch.program
        def step(x: torch.Tensor, go: torch.Tensor) -> torch.Tensor:
            linear, norm = placed
            loss = monarch.cond(go, lambda: norm(linear(x)), lambda: linear(x)).square().mean()
            loss.backward()
            monarch.cond(go, lambda: optimizer.step(), lambda: None)
            optimizer.zero_grad()
            return loss

        for go in (True, False, True):
            loss = step(monarch.distribute(x, mesh, "[@data, -]"), monarch.distribute(torch.tensor(go), mesh))
            linear, norm = dense
            wanted = (norm(linear(x)) if go else linear(x)).square().mean()
            wanted.backward()
            if go:
                plain.step()
            plain.zero_grad()
            torch.testing.assert_close(loss.full_tensor(), wanted.detach())
            for own, other in zip(placed.state_dict().values(), dense.state_dict().values(), strict=True):
                torch.testing.assert_close(own.full_tensor(), other)


def test_a_loop_writes_to_state_each_round() -> None:
    with partitioned_mesh(data=2) as mesh:
        total = monarch.distribute(torch.zeros(4), mesh, "[@data]")

        @monarch.program
        def step(x: torch.Tensor) -> Any:
            def body(i: torch.Tensor) -> tuple[torch.Tensor]:
                total[1:].add_(x[1:] * i)
                return (i + 1,)

            monarch.while_loop(lambda i: i < 4, body, (0,))
            return monarch.scan(lambda carry, e: (carry, total.add_(e).sum()), torch.zeros(()), x)[1]

        sums = step(monarch.distribute(torch.arange(4.0), mesh))
        assert sums.full_tensor().tolist() == [36.0, 40.0, 48.0, 60.0]
        assert total.full_tensor().tolist() == [6.0, 12.0, 18.0, 24.0]


def test_random_numbers_are_those_of_the_same_code_without_a_branch_and_others_each_round() -> None:
    x = torch.ones(4, 6)
    with partitioned_mesh(data=2) as mesh:

        @monarch.program
        def within(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a = monarch.cond(x.sum() > 0, lambda: torch.rand(4, 6) * x, lambda: x)
            return a, monarch.scan(lambda carry, e: (carry, torch.rand(6) * e), [], x)[1]

        @monarch.program
        def without(x: torch.Tensor) -> torch.Tensor:
            return torch.rand(4, 6) * x

        placed = monarch.distribute(x, mesh, "[@data, -]")
        torch.manual_seed(3)
        a, rounds = within(placed)
        torch.manual_seed(3)
        assert torch.equal(a.full_tensor(), without(placed).full_tensor())
        assert len({tuple(row.tolist()) for row in rounds.full_tensor()}) == 4
        torch.manual_seed(3)
        assert torch.equal(rounds.full_tensor(), within(placed)[1].full_tensor())


def test_the_backward_pass_of_a_round_draws_its_numbers_again() -> None:
    with partitioned_mesh(data=2) as mesh:

        @monarch.program
        def program(xs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            xs = xs.detach().requires_grad_()
            _, ys = monarch.scan(lambda carry, x: (carry, torch.dropout(x, 0.5, True)), [], xs)
            return ys.detach(), torch.autograd.grad(ys.sum(), xs)[0]

        ys, gradient = program(monarch.distribute(torch.ones(5, 8), mesh, "[-, @data]"))
        assert torch.equal(ys.full_tensor(), gradient.full_tensor())
        assert set(ys.full_tensor().unique().tolist()) == {0.0, 2.0}


def test_a_check_in_a_branch_is_made_where_the_branch_runs() -> None:
    with partitioned_mesh(data=2) as mesh:

        @monarch.program
        def program(x: torch.Tensor) -> torch.Tensor:
            def checked() -> torch.Tensor:
                if not (x < 100).all():
                    raise ValueError("too large")
                return x * 1

            monarch.cond(x.sum() > 0, checked, lambda: x * 2)  # what it gives is not read
            return x

        program(monarch.distribute(torch.full((4,), -1000.0), mesh)).full_tensor()
        with pytest.raises(CheckFailed, match=r"if not \(x < 100\).all\(\)"):
            program(monarch.distribute(torch.full((4,), 1000.0), mesh)).full_tensor()


def test_python_values_that_a_branch_reads_are_guarded() -> None:
    with partitioned_mesh(data=2) as mesh:
        factor = [2.0]

        @monarch.program
        def program(x: torch.Tensor) -> torch.Tensor:
            return monarch.cond(x.sum() > 0, lambda: x * factor[0], lambda: x)

        x = monarch.distribute(torch.ones(4), mesh)
        assert program(x).full_tensor().sum() == 8
        factor[0] = 3.0
        assert program(x).full_tensor().sum() == 12


def test_outside_of_programs_they_are_pythons_own(mesh: Mesh) -> None:
    x = monarch.distribute(torch.arange(4.0), mesh)
    assert monarch.cond(x.sum() > 0, lambda a: a * 2, lambda a: a, (x,)).full_tensor().tolist() == [0, 2, 4, 6]
    i, doubled = monarch.while_loop(lambda i, a: a.sum() < 20, lambda i, a: (i + 1, a * 2), (0, x))
    assert (int(i), doubled.full_tensor().tolist()) == (2, [0, 4, 8, 12])
    last, sums = monarch.scan(lambda carry, e: (carry + e, carry + e), torch.zeros(()), x)
    assert (last.full_tensor(), sums.full_tensor().tolist()) == (6, [0, 1, 3, 6])


def _changed_in_a_branch(y: torch.Tensor) -> torch.Tensor:
    monarch.cond(y.sum() > 0, lambda: y.mul_(2).sum(), lambda: y.sum())
    return y


WRONG: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "several": (lambda x: monarch.cond(x > 0, lambda: x, lambda: x), "has 4 elements"),
    "shapes": (lambda x: monarch.cond(x.sum() > 0, lambda: x, lambda: x[:2]), r"f32\[4\].*\n.*f32\[2\]"),
    "text": (lambda x: monarch.cond(x.sum() > 0, lambda: "a", lambda: "b"), "gives 'a', a str"),
    "numbers": (lambda x: monarch.cond(x.sum() > 0, lambda: 1, lambda: 2.0), "give different results"),
    "in place": (lambda x: _changed_in_a_branch(x.requires_grad_() * 2), "changes a tensor that was made outside"),
    "carry": (lambda x: monarch.while_loop(lambda a: a.sum() < 1, lambda a: a.double(), (x,)), r"results \(f64\[4\]\)"),
    "gradient": (
        lambda x: monarch.while_loop(lambda a: a.sum() < 1, lambda a: a * 2, (x.requires_grad_(),)),
        "no gradient",
    ),
    "pair": (lambda x: monarch.scan(lambda carry, e: carry, x.sum(), x), "has to return two"),
    "lengths": (lambda x: monarch.scan(lambda c, e: (c, c), x.sum(), [x, x[1:]]), "3, 4 elements"),
    "backward": (
        lambda x: monarch.cond(x.sum() > 0, lambda: x.requires_grad_().sum().backward(), lambda: None),
        "whichever way the workers go",
    ),
}


def test_a_plan_of_a_scan_does_not_grow_with_the_number_of_layers() -> None:
    """A training step of equal layers whose weights are stacked."""

    def instructions(layers: int) -> list[list[str]]:
        mesh = Mesh.abstract(data=2, model=2)
        w = nn.Parameter(monarch.distribute(torch.zeros(layers, 8, 8), mesh, "[-, -, @model]"))

        @monarch.program
        def step(x):  # type: ignore[no-untyped-def]
            h, _ = monarch.scan(lambda h, w: ((h @ w).tanh(), h.sum()), monarch.layout(x, "[@data, -]"), w)
            (gradient,) = torch.autograd.grad(h.sum(), w)
            return w - 0.1 * gradient

        plan = compile_graph(step.trace(torch.zeros(4, 8)).graph)
        return [[each.op for each in one.instructions] for one in (plan, *plan.functions.values())]

    assert instructions(3) == instructions(12)


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_is_refused_with_a_way_out(mesh: Mesh, case: str) -> None:
    function, words = WRONG[case]
    with pytest.raises((ProgramError, OperatorError), match=words) as raised:
        monarch.program(lambda x: function(x))(monarch.distribute(torch.arange(4.0), mesh))
    assert raised.value.hint


def test_what_a_branch_makes_stays_in_it(mesh: Mesh) -> None:
    kept: list[torch.Tensor] = []

    def branch(x: torch.Tensor) -> torch.Tensor:
        kept.append(x * 2)
        return x * 1

    x = monarch.distribute(torch.arange(4.0), mesh)
    with pytest.raises(ProgramError, match="was made in true_fn of cond, and is used outside"):
        monarch.program(lambda x: monarch.cond(x.sum() > 0, branch, lambda x: x * 3, (x,)) + kept[0])(x)
    kept.clear()
    program = monarch.program(lambda x: monarch.cond(x.sum() > 0, branch, lambda x: x * 3, (x,)))
    with pytest.raises(ProgramError, match="leaves it in Python"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program(x)
    assert kept == []


def test_an_optimizers_first_step_in_a_branch_is_refused_and_later_ones_are_not() -> None:
    torch.manual_seed(0)
    dense = nn.Linear(6, 6)
    placed = copy.deepcopy(dense)
    with partitioned_mesh(data=2) as mesh:
        monarch.module_to_mesh(placed, mesh)
        optimizer, plain = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (placed, dense))

        def step(x: torch.Tensor, go: torch.Tensor | None) -> torch.Tensor:
            loss = placed(x).square().mean()
            loss.backward()
            if go is None:
                optimizer.step()
            else:
                monarch.cond(go, lambda: optimizer.step(), lambda: None)
            optimizer.zero_grad()
            return loss.detach()

        program, x = monarch.program(step), torch.randn(4, 6)
        given = monarch.distribute(x, mesh, "[@data, -]")
        with pytest.raises(ProgramError, match="An optimizer makes its state in its first step"):
            program(given, monarch.distribute(torch.tensor(True), mesh))
        for go in (None, False, True, True):
            program(given, None if go is None else monarch.distribute(torch.tensor(go), mesh))
            dense(x).square().mean().backward()
            if go is not False:
                plain.step()
            plain.zero_grad()
        for own, other in zip(placed.state_dict().values(), dense.state_dict().values(), strict=True):
            torch.testing.assert_close(own.full_tensor(), other)
