"""Per-worker code: what it computes and its gradients, beside ordinary code, and the mistakes that it refuses."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import monarch
from monarch.compiler.text import parse_graph, print_graph
from monarch.distributed import Mesh
from monarch.exceptions import LayoutError, MonarchError, ProgramError
from tests.language.partitioned import partitioned_mesh


def close(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.detach().full_tensor(), expected.detach())


class Normed(nn.Module):
    """A linear layer whose result is divided by the largest of the whole batch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).tanh()
        return h / self.largest(h)

    def largest(self, h: torch.Tensor) -> torch.Tensor:
        return h.detach().abs().amax()


class NormedOnWorkers(Normed):
    def largest(self, h: torch.Tensor) -> torch.Tensor:
        return monarch.reduce(super().largest(h), "data", "max")


@pytest.mark.sample(3)
@pytest.mark.parametrize("layouts", [("[-, -]", "[-]"), ("[@model, -]", "[@data]"), ("[-, @data]", "[@model]")])
@pytest.mark.parametrize("dims", ["data", ("data", "model")])
def test_training_with_per_worker_code_in_the_middle_is_the_dense_training(dims: Any, layouts: tuple[str, str]) -> None:
    torch.manual_seed(0)
    dense, model = Normed(), NormedOnWorkers()
    model.load_state_dict(dense.state_dict())
    head = nn.Linear(4, 1)
    x, y = torch.randn(8, 4), torch.randn(8, 1)
    optimizer = torch.optim.SGD([*dense.parameters(), *head.parameters()], lr=0.1)
    expected = []
    with partitioned_mesh(data=2, model=2) as mesh:
        monarch.module_to_mesh(model, mesh, {"linear.weight": layouts[0], "linear.bias": layouts[1]})
        placed = nn.Linear(4, 1)
        placed.load_state_dict(head.state_dict())
        monarch.module_to_mesh(placed, mesh, {})
        of_mesh = torch.optim.SGD([*model.parameters(), *placed.parameters()], lr=0.1)
        inner = monarch.local(model, "[@data, -]", "[@data, -]", mesh=mesh, dims=dims)

        @monarch.program(mesh=mesh)
        def step(x: "f32[8@data, 4]", y: "f32[8@data, 1]"):  # type: ignore[no-untyped-def,syntax]
            of_mesh.zero_grad()
            loss = (placed(inner(x * 2)) - y).square().mean()
            loss.backward()
            of_mesh.step()
            return loss

        for _ in range(2):
            optimizer.zero_grad()
            loss = (head(dense(x * 2)) - y).square().mean()
            loss.backward()
            optimizer.step()
            expected.append(loss)
            close(step(x, y), loss)
        for found, wanted in zip(model.parameters(), dense.parameters(), strict=True):
            close(found, wanted)


def test_the_other_mesh_dims_are_sharded_as_everywhere() -> None:
    with partitioned_mesh(data=2, model=2) as mesh:

        @monarch.local(in_layouts="[@data, -]", out_layouts="[@data, -]", mesh=mesh, dims="data")
        def body(x: torch.Tensor) -> torch.Tensor:
            assert x.shape == (4, 4)
            return x.exp() / monarch.reduce(x.sum(), "data")

        @monarch.program(mesh=mesh)
        def step(x: "f32[8@data, 4@model]"):  # type: ignore[no-untyped-def,syntax]
            return body(x)

        x = torch.rand(8, 4)
        close(step(x), x.exp() / x.sum())
        text = "\n".join(line.split(" # ")[0].rstrip() for line in str(step.trace(x).partition().graph).splitlines())
        assert text == TEXT
        assert print_graph(parse_graph(text)) == text


TEXT = """\
graph @step on mesh<data=2, model=2> partitioned<data, model> {
  %x = input 0                                               : f32[4, 2] of f32[8@data, 4@model]
  %to_varying = to_varying(%x, "data", 0)                    : f32[4, 2] of f32[4, 4@model] varying<data>
  %exp = aten.exp(%to_varying)                               : f32[4, 2] of f32[4, 4@model] varying<data>
  %sum_1 = aten.sum(%to_varying)                             : f32[] partial<sum: model> varying<data>
  %sum_1_all_reduce = all_reduce([%sum_1], ["model"], "sum") : (f32[] varying<data>)
  %getitem = getitem(%sum_1_all_reduce, 0)                   : f32[] varying<data>
  %from_varying = from_varying(%getitem, "data", "sum")      : f32[] partial<sum: data>
  %from_varying_all_reduce = all_reduce([%from_varying], ["data"], "sum") : (f32[])
  %getitem_1 = getitem(%from_varying_all_reduce, 0)          : f32[]
  %div = aten.div.Tensor(%exp, %getitem_1)                   : f32[4, 2] of f32[4, 4@model] varying<data>
  %from_varying_1 = from_varying(%div, "data", 0)            : f32[4, 2] of f32[8@data, 4@model]
  return %from_varying_1
}"""


def test_uneven_sizes_along_other_mesh_dims_and_refused_along_its_own() -> None:
    x = torch.rand(8, 5)
    with partitioned_mesh(data=2, model=2) as mesh:
        body = monarch.local(lambda x: x / x.sum(1, True), "[@data, -]", "[@data, -]", mesh=mesh, dims="data")
        close(body(monarch.distribute(x, mesh, "[@data, @model]")), x / x.sum(1, True))
        body = monarch.local(lambda x: x, "[-, @data]", "[-, @data]", mesh=mesh)
        with pytest.raises(LayoutError, match=r"dim 1 of argument 0 has size 5, which 2 workers along 'data' do not"):
            body(monarch.distribute(x, mesh, "[@data, -]"))


def test_parameters_and_values_that_meet_what_varies_have_the_sum_of_the_workers_gradients() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 3), torch.randn(3)
    dense = w.clone().requires_grad_()
    (dense.sin() * x).square().sum().backward()
    with partitioned_mesh(data=4) as mesh:
        weight = monarch.distribute(w, mesh, "[-]").requires_grad_()
        placed = monarch.distribute(x, mesh, "[@data, -]")

        def body(x: torch.Tensor) -> torch.Tensor:
            return monarch.reduce((weight.sin() * x).square().sum(), "data")

        monarch.local(body, "[@data, -]", mesh=mesh)(placed).backward()
        assert weight.grad is not None
        close(weight.grad, dense.grad)  # type: ignore[arg-type]

        # The gradient of what varies is that of the sum over the workers.
        weight.grad = None
        with mesh.activate():
            own = monarch.vary(placed, "data") * (mesh.rank("data") + 1)
            (weight.sin() * own).sum().backward()
        again = w.clone().requires_grad_()
        (again.sin() * x * 10).sum().backward()
        close(weight.grad, again.grad)  # type: ignore[arg-type]


def test_a_checkpointed_block_has_the_same_gradients() -> None:
    x, w = torch.randn(8, 4), torch.randn(4)
    dense, weight = x.clone().requires_grad_(), w.clone().requires_grad_()
    (dense.exp() * weight.sin() * dense.exp().sum()).tanh().sum().backward()
    with partitioned_mesh(data=4) as mesh:
        parameter = monarch.distribute(w, mesh).requires_grad_()

        def block(x: torch.Tensor) -> torch.Tensor:
            return (x.exp() * parameter.sin() * monarch.reduce(x.exp().sum(), "data")).tanh()

        @monarch.local(in_layouts="[@data, -]", out_layouts="[@data, -]", mesh=mesh)
        def body(x: torch.Tensor) -> Any:
            return checkpoint(block, x, use_reentrant=False)

        @monarch.program(mesh=mesh)
        def step(x: "f32[8@data, 4]"):  # type: ignore[no-untyped-def,syntax]
            x.requires_grad_()
            return torch.autograd.grad(body(x).sum(), (x, parameter))

        for found, wanted in zip(step(x), (dense, weight), strict=True):
            close(found, wanted.grad)  # type: ignore[arg-type]


def test_a_checkpoint_draws_each_workers_numbers_again() -> None:
    with partitioned_mesh(data=2, model=2) as mesh:

        def block(x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(x.exp() * torch.rand(4)).exp()

        def gradients(recomputed: bool) -> tuple[torch.Tensor, torch.Tensor]:
            @monarch.local(in_layouts="[@data, -]", out_layouts="[@(data,model), -]", mesh=mesh)
            def body(x: torch.Tensor) -> Any:
                return checkpoint(block, x, use_reentrant=False) if recomputed else block(x)

            @monarch.program(mesh=mesh)
            def step(x: "f32[8@data, 4]"):  # type: ignore[no-untyped-def,syntax]
                x = x.detach().requires_grad_()
                y = body(x)
                return y, torch.autograd.grad(y.sum(), x)[0]

            torch.manual_seed(1)
            made, gradient = step(torch.ones(8, 4))
            return made.full_tensor(), gradient.full_tensor()

        for first, second in zip(gradients(False), gradients(True), strict=True):
            assert torch.equal(first, second)
        with mesh.activate(), pytest.raises(ProgramError, match="draws random numbers that are like no tensor"):
            checkpoint(block, monarch.distribute(torch.ones(4), mesh).requires_grad_(), use_reentrant=False)


@pytest.mark.parametrize("form", ["not reentrant", "reentrant", "nested"])
def test_what_is_drawn_and_seeded_between_its_passes_changes_nothing_of_a_checkpoint(form: str) -> None:
    with partitioned_mesh(data=2, model=2) as mesh:
        scale = monarch.distribute(torch.ones(4), mesh)

        def block(x: torch.Tensor) -> torch.Tensor:
            return (nn.functional.dropout(x) * torch.rand_like(scale)).exp()

        def recomputed(x: torch.Tensor) -> Any:
            if form == "nested":
                return checkpoint(lambda x: checkpoint(block, x * 1, use_reentrant=False) * 1, x, use_reentrant=False)
            return checkpoint(block, x, use_reentrant=form == "reentrant")

        def gradients(block: Any, between: bool) -> tuple[torch.Tensor, torch.Tensor]:
            body = monarch.local(block, "[@data, -]", "[@data, -]", mesh=mesh, dims="data")
            x = monarch.distribute(torch.ones(8, 4), mesh, "[@data, -]").requires_grad_()
            torch.manual_seed(1)
            y: Any = body(x)
            with mesh.activate("model") if between else nullcontext():
                if between:
                    torch.manual_seed(1)
                    for _ in range(3):
                        torch.rand_like(scale)
                y.sum().backward()
            return y.full_tensor(), x.grad.full_tensor()  # type: ignore[union-attr]

        expected = gradients(block, between=False)
        for found in (gradients(recomputed, between=False), gradients(recomputed, between=True)):
            assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_a_checkpoint_with_draws_that_it_cannot_tell_apart_is_refused() -> None:
    with partitioned_mesh(data=2, model=2) as mesh:
        scale = monarch.distribute(torch.ones(4), mesh)

        def block(x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(1)
            with mesh.activate("data"):
                first = torch.rand_like(scale)
            torch.manual_seed(1)
            return x.exp() * monarch.reduce(first, "data") * torch.rand_like(scale)

        with pytest.raises(ProgramError, match="seeds PyTorch's generator twice alike"):
            checkpoint(block, monarch.distribute(torch.ones(4), mesh).requires_grad_(), use_reentrant=False)


# -- random numbers, in-place writes, nesting --------------------------------------------------------------------------


def test_each_worker_draws_numbers_of_its_own_and_the_same_again_from_the_same_seed() -> None:
    def drawn(**dims: int) -> Any:
        with partitioned_mesh(**dims) as mesh:

            @monarch.local(in_layouts="[@data, -]", out_layouts=("[@data, -]", "[@data]"), mesh=mesh, dims="data")
            def body(x: torch.Tensor) -> Any:
                return nn.functional.dropout(x), torch.distributions.Gamma(x[0] + 1, x[0] + 1).sample()

            @monarch.program(mesh=mesh)
            def step(x: "f32[8@data, 64]"):  # type: ignore[no-untyped-def,syntax]
                return body(x)

            torch.manual_seed(3)
            dropped, gamma = step(torch.ones(8, 64))
            again = step(torch.ones(8, 64))
            assert not torch.equal(dropped.full_tensor(), again[0].full_tensor())
            return dropped.full_tensor(), gamma.full_tensor()

    dropped, gamma = drawn(data=4)
    assert {0.0, 2.0} == set(dropped.unique().tolist())
    assert len({tuple(block.flatten().tolist()) for block in dropped.chunk(4)}) == 4
    assert len({tuple(block.tolist()) for block in gamma.chunk(4)}) == 4
    for first, second in zip((dropped, gamma), drawn(data=4), strict=True):
        assert torch.equal(first, second)
    for first, second in zip((dropped, gamma), drawn(data=4, model=2), strict=True):
        assert torch.equal(first, second)


def test_buffers_that_are_made_in_it_take_what_varies_and_state_does_not() -> None:
    x = torch.rand(8, 3)
    with partitioned_mesh(data=4) as mesh:
        kept = monarch.distribute(torch.zeros(3), mesh, "[-]")

        @monarch.local(in_layouts="[@data, -]", out_layouts=("[@data]", None), mesh=mesh)
        def body(x: torch.Tensor) -> Any:
            buffer = torch.zeros(2, 3)
            buffer[0] = x[1]
            buffer[1] += x[0] * mesh.rank("data")
            kept.copy_(monarch.reduce(x.sum(0), "data"))
            return buffer.sum(1), kept * 1

        @monarch.program(mesh=mesh)
        def step(x: "f32[8@data, 3]"):  # type: ignore[no-untyped-def,syntax]
            return body(x)

        rows, total = step(x)
        factors = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 2.0, 1.0, 3.0])
        close(rows, x[[1, 0, 3, 2, 5, 4, 7, 6]].sum(1) * factors)
        close(total, x.sum(0))
        close(kept, x.sum(0))

        @monarch.program(mesh=mesh)
        def wrong(x: "f32[8@data, 3]"):  # type: ignore[no-untyped-def,syntax]
            return monarch.local(lambda x: kept.add_(x.sum(0)), "[@data, -]", mesh=mesh)(x)

        with pytest.raises(ProgramError, match=r"f32\[3\], which is the same on all workers along 'data', is changed"):
            wrong(x)


def test_per_worker_code_nests_along_other_mesh_dims() -> None:
    x = torch.rand(8, 4)
    with partitioned_mesh(data=2, model=2) as mesh:

        def inner(x: torch.Tensor) -> torch.Tensor:
            assert x.shape == (4, 2)
            return monarch.reduce(x, "model") * monarch.reduce(x.sum(), ("data", "model"))

        def outer(x: torch.Tensor) -> torch.Tensor:
            assert x.shape == (4, 4)
            nested = monarch.local(inner, "[-, @model]", "[-, -]", mesh=mesh, dims="model")
            made: torch.Tensor = nested(x)
            return made

        body = monarch.local(outer, "[@data, -]", "[@data, -]", mesh=mesh, dims="data")
        close(body(monarch.distribute(x, mesh, "[@data, -]")), (x[:, :2] + x[:, 2:]) * x.sum())
        with pytest.raises(LayoutError, match="per-worker code along 'data' within per-worker code along it"):
            monarch.local(body, "[@data, -]", "[@data, -]", mesh=mesh, dims="data")(monarch.distribute(x, mesh))


@pytest.mark.parametrize("region", ["cond", "scan"])
def test_in_a_branch_or_a_loop_it_has_the_same_gradients(region: str) -> None:
    """As does layout(), which is no function of PyTorch's either."""

    def share(x: torch.Tensor, w: torch.Tensor, total: Any) -> torch.Tensor:
        weights = (x * w).exp()
        shares: torch.Tensor = weights / total(weights.sum())
        return shares

    def run(x: torch.Tensor, w: torch.Tensor, body: Any, laid_out: Any) -> torch.Tensor:
        made: torch.Tensor
        if region == "cond":
            made = monarch.cond(x.sum() > 0, lambda x: body(laid_out(x), w), lambda x: x * 3, (x,))
        else:
            made = monarch.scan(lambda carry, _: (body(carry, laid_out(w)) + x, carry), x, torch.zeros(2))[0]
        return made.square().sum()

    x, w = torch.rand(8, 3, requires_grad=True), torch.rand(3, requires_grad=True)
    loss = run(x, w, lambda x, w: share(x, w, lambda total: total), lambda x: x)
    expected = torch.autograd.grad(loss, (x, w))
    with partitioned_mesh(data=4) as mesh:
        in_layouts = ("[@data, -]", None)
        body = monarch.local(
            lambda x, w: share(x, w, lambda total: monarch.reduce(total, "data")), in_layouts, "[@data, -]", mesh=mesh
        )

        @monarch.program(mesh=mesh)
        def step(x: "f32[8, 3]", w: "f32[3]"):  # type: ignore[no-untyped-def,syntax]
            x, w = x.requires_grad_(), w.requires_grad_()
            loss = run(x, w, body, lambda x: monarch.layout(x, "[@data, -]" if x.ndim > 1 else "[-]"))
            return loss, *torch.autograd.grad(loss, (x, w))

        made = step(x.detach(), w.detach())
        for found, wanted in zip(made, (loss, *expected), strict=True):
            close(found, wanted)


def test_a_dict_of_layouts_is_for_a_dict() -> None:
    x = torch.rand(8, 3)
    with partitioned_mesh(data=4) as mesh:

        def body(both: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"rows": both["x"] * both["w"], "sum": monarch.reduce(both["x"].sum(), "data")}

        run = monarch.local(body, ({"x": "[@data, -]", "w": None},), {"rows": "[@data, -]", "sum": None}, mesh=mesh)
        made = run({"x": monarch.distribute(x, mesh), "w": torch.arange(3)})
        close(made["rows"], x * torch.arange(3))
        close(made["sum"], x.sum())


def test_outside_of_programs_it_takes_literals_reads_values_and_calls_programs() -> None:
    x = torch.rand(8, 3)
    with partitioned_mesh(data=4) as mesh:

        @monarch.program(mesh=mesh)
        def double(x: "f32[8@data, 3]"):  # type: ignore[no-untyped-def,syntax]
            return x * 2

        with mesh.activate():
            close(double(x) + torch.tensor([[1.0, 2.0, 3.0]]), x * 2 + torch.tensor([1.0, 2.0, 3.0]))
            placed = monarch.distribute(x, mesh, "[@data, -]")
            assert torch.equal((placed + 1).full_tensor(), x + 1)
            with pytest.raises(ProgramError, match="branch on a value that varies along 'data'") as error:
                bool(mesh.rank("data") == 0)
            assert error.value.source is not None and error.value.source.file == __file__


# -- mistakes ----------------------------------------------------------------------------------------------------------


def refused(mesh: Mesh, body: Any, ins: Any = "[@data, -]", outs: Any = None) -> str:
    x = monarch.distribute(torch.rand(8, 4), mesh, "[@data, -]")
    with pytest.raises(MonarchError) as error:
        monarch.local(body, ins, outs, mesh=mesh)(x)
    assert error.value.source is not None and error.value.source.file == __file__
    assert error.value.hint
    return error.value.message


def test_mistakes_that_would_give_wrong_numbers_are_refused_with_the_right_code() -> None:
    with partitioned_mesh(data=4) as mesh:
        assert refused(mesh, lambda x: x.sum()) == (
            "result 0 of this per-worker code is f32[] varying<data>: it varies along 'data', and out_layouts says "
            "that it is the same there: []"
        )
        assert refused(mesh, lambda x: monarch.reduce(monarch.reduce(x, "data"), "data")) == (
            "reduce(…, 'sum') over 'data' of f32[2, 4], which is the same on all 4 workers there"
        )
        assert refused(mesh, lambda x: monarch.reduce(x.sum(), "data"), outs="[] partial<sum: data>") == (
            "result 0 of this per-worker code is f32[], the same on all 4 workers along 'data', and out_layouts says "
            "[] partial<sum: data>"
        )
        assert "all_gather() over 'data' of f32[8@data, 4]" in refused(
            mesh, lambda x: monarch.all_gather(x, "data"), None
        )
        assert "twice the target 0" in refused(mesh, lambda x: monarch.permute(x, "data", pairs=[(0, 0), (1, 0)]))
        assert "has the source 4" in refused(mesh, lambda x: monarch.permute(x, "data", pairs=[(4, 0)]))
        assert "4 does not divide 2" in refused(mesh, lambda x: monarch.reduce_scatter(x, "data"))
        assert "unknown mesh dim 'gpu'" in refused(mesh, lambda x: monarch.reduce(x, "gpu"))
        assert "in_layouts has 2 layouts, and there is 1 argument" in refused(mesh, lambda x: x, (None, None))
        assert "in_layouts gives argument 0 as" in refused(mesh, lambda x: x, "[-, -] partial<sum: data>")


@pytest.mark.parametrize("door", [monarch.program, lambda **options: lambda step: step])
def test_a_branch_on_what_varies_says_how_each_worker_chooses_for_itself(door: Any) -> None:
    def branching(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else -x

    def read(x: torch.Tensor) -> torch.Tensor:
        return x * x.amax().item()

    def choosing(x: torch.Tensor) -> torch.Tensor:
        return torch.where(x.sum() > 0, x * 2, -x)

    with partitioned_mesh(data=4) as mesh:
        x = monarch.distribute(torch.tensor([1.0, -2.0, 3.0, -4.0]), mesh, "[@data]")
        for body in (branching, read):
            with pytest.raises(ProgramError, match="cannot branch on a value that varies along 'data'") as error:
                door(mesh=mesh)(monarch.local(body, "[@data]", "[@data]", mesh=mesh))(x)
            assert error.value.hint is not None and "torch.where(x > 0, a, b)" in error.value.hint
        made = door(mesh=mesh)(monarch.local(choosing, "[@data]", "[@data]", mesh=mesh))(x)
        assert made.full_tensor().tolist() == [2.0, 2.0, 6.0, 4.0]


def test_what_varies_is_refused_at_the_edge_of_a_branch_or_a_loop() -> None:
    """Before its function runs, where it would be taken for a value that is the same on all workers."""
    with partitioned_mesh(data=4) as mesh:

        def rows(x: torch.Tensor) -> Any:
            return monarch.scan(lambda total, row: (total + monarch.reduce(row, "data"), row), torch.zeros(4), x)[0]

        def branch(x: torch.Tensor) -> Any:
            return monarch.cond(monarch.reduce(x.sum(), "data") > 0, lambda: x * 2, lambda: x * 3)

        for body, inside in ((rows, "combine_fn of scan"), (branch, "true_fn of cond")):

            @monarch.program(mesh=mesh)
            def step(x: "f32[8@data, 4]"):  # type: ignore[no-untyped-def,syntax]
                return monarch.local(body, "[@data, -]", "[@data, -]", mesh=mesh)(x)  # noqa: B023

            with pytest.raises(ProgramError, match=rf"varies along 'data', and goes into {inside}"):
                step(torch.rand(8, 4))


def test_what_needs_a_gradient_does_not_meet_what_varies_outside_of_per_worker_code() -> None:
    with partitioned_mesh(data=4) as mesh:
        weight = monarch.distribute(torch.rand(3), mesh).requires_grad_()
        own = monarch.vary(monarch.distribute(torch.rand(3), mesh), "data")
        assert (own * weight.detach()).shape == (3,)
        with pytest.raises(ProgramError, match=r"a value that varies along 'data' meets f32\[3\], which does not"):
            own * weight
        with mesh.activate(), pytest.raises(ProgramError, match="needs a gradient, is changed in place"):
            (weight * 1).add_(own)


def test_a_function_whose_backward_mixes_is_noticed_where_its_gradient_is_read() -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> Any:
            x, w = ctx.saved_tensors
            return gradient * w, gradient * x

    with partitioned_mesh(data=4) as mesh, mesh.activate():
        weight = monarch.distribute(torch.rand(3), mesh).requires_grad_()
        own = monarch.vary(monarch.distribute(torch.rand(3), mesh), "data")
        mean = monarch.reduce(monarch.vary(weight, "data"), "data", "avg")
        with pytest.raises(ProgramError, match="the gradient of a value that is the same on all workers"):
            Product.apply(own, mean).sum().backward()
