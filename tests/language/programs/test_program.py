"""What a program takes, closes over and gives back."""

from __future__ import annotations

import copy
import functools
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from monarch.compiler.errors import LayoutError, ProgramError
from monarch.compiler.plan import Plan
from monarch.language import (
    DistributedTensor,
    Mesh,
    OperatorError,
    distribute,
    layout,
    manual_seed,
    module_to_mesh,
    program,
)
from monarch.language.compile import compiling_with
from monarch.language.programs.program import Program
from tests.language.dense import compile_dense
from tests.language.models import assert_same_parameters, make_step, mlp, square_loss, twins, vector_batch


def traces(step: Program[Any, Any]) -> int:
    return sum(each.traces for each in step.remembered)


def test_arguments_and_results_are_pytrees(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(batch: dict[str, Any], pair: tuple[torch.Tensor, int], *, scale: torch.Tensor) -> Any:
        return {"sum": batch["x"] + pair[0] * pair[1], "rest": [scale, None, "text", pair[1]]}

    one = torch.ones(2)
    for factor in (2, 3, 2):
        result = step({"x": one}, (one, factor), scale=one * 5)
        assert result["sum"].tolist() == [1.0 + factor] * 2
        assert result["rest"][0].tolist() == [5.0, 5.0]
        assert result["rest"][1:] == [None, "text", factor]
    assert len(step.remembered) == 2  # another int is another signature


def test_float_arguments_are_inputs(mesh: Mesh) -> None:
    x = distribute(torch.ones(3), mesh)
    step = program(lambda x, a: (x * a + a**2, 2 * a))
    for a in (0.5, 0.25, 3.0, -1.0):
        y, double = step(x, a)
        assert y.tolist() == [a + a * a] * 3
        assert double == 2 * a
    assert traces(step) == 1


def test_branches_on_float_arguments_are_guarded(mesh: Mesh) -> None:
    x = distribute(torch.ones(3), mesh)

    @program
    def step(x: torch.Tensor, a: float) -> torch.Tensor:
        x = F.leaky_relu(x, 0.1) if a > 0.5 else x - 1
        return x * a

    for a, expected in ((0.6, 0.6), (0.9, 0.9), (0.4, 0.0), (0.2, 0.0), (0.7, 0.7)):
        assert step(x, a).tolist() == pytest.approx([expected] * 3)
    assert traces(step) == 2
    # An op that takes no changing number has it built in, and is traced anew for another.
    leaky = program(lambda x, a: F.leaky_relu(x, a))
    assert [leaky(-x, a).tolist()[0] for a in (0.5, 0.25, 0.5)] == [-0.5, -0.25, -0.5]
    assert traces(leaky) == 2


def test_methods_partials_and_programs_in_programs(mesh: Mesh) -> None:
    class Trainer:
        def __init__(self, start: float) -> None:
            self.total = distribute(torch.full((2,), start), mesh)

        @program
        def add(self, x: torch.Tensor) -> torch.Tensor:
            self.total += x
            return self.total * 2

    first, second = Trainer(0.0), Trainer(10.0)
    one = torch.ones(2)
    assert [first.add(one).tolist()[0], first.add(one).tolist()[0], second.add(one).tolist()[0]] == [2.0, 4.0, 22.0]
    assert first.total.tolist() == [2.0, 2.0]

    weight = distribute(torch.full((2,), 3.0), mesh)
    bound = program(functools.partial(lambda w, x: w * x, weight))
    assert bound(one).tolist() == [3.0, 3.0]

    inner = program(lambda x: x * weight)
    outer = program(lambda x: inner(x) + 1)
    assert outer(one).tolist() == [4.0, 4.0]


def test_state_is_updated_in_place(mesh: Mesh) -> None:
    average = {"w": distribute(torch.zeros(2), mesh)}
    weight = distribute(torch.ones(2), mesh)
    history: list[torch.Tensor] = []

    @program
    def step(x: torch.Tensor) -> Any:
        weight.add_(x)
        average["w"].lerp_(weight, 0.5)
        weight[0] = 7.0
        return weight, weight.view(2, 1), weight * 1

    results = [step(torch.ones(2)) for _ in range(4)]
    history.extend(result[2] for result in results)
    assert [h.tolist() for h in history] == [[7.0, float(i + 2)] for i in range(4)]  # earlier results stay
    assert all(result[0] is weight for result in results)
    assert results[0][1].tolist() == [[7.0], [5.0]]  # a view of what the last call has left
    assert weight.tolist() == [7.0, 5.0]
    assert average["w"].tolist()[1] == pytest.approx((((1 + 3) / 2 + 4) / 2 + 5) / 2)


def test_tensors_that_a_program_leaves_behind(mesh: Mesh) -> None:
    cache: dict[str, torch.Tensor] = {}

    @program
    def step(x: torch.Tensor) -> torch.Tensor:
        if "sum" not in cache:
            cache["sum"] = torch.zeros(2)
        cache["sum"] += x
        return cache["sum"] * 2

    x = distribute(torch.ones(2), mesh)
    assert [step(x).tolist()[0] for _ in range(6)] == [2.0, 4.0, 6.0, 8.0, 10.0, 12.0]
    assert cache["sum"].tolist() == [6.0, 6.0]
    assert traces(step) == 2  # with the entry and without


def test_literals_and_constants(mesh: Mesh) -> None:
    table = torch.arange(4.0)

    @program
    def step(x: torch.Tensor) -> Any:
        mask = torch.tril(torch.ones(4, 4)) * torch.tensor(2.0) + torch.tensor([1.0, 2.0, 3.0, 4.0])
        return x + mask + table[1:2] + torch.arange(0, 8, 2), torch.eye(2), torch.linspace(0, 1, 3)

    x = distribute(torch.zeros(4, 4), mesh)
    expected = torch.tril(torch.ones(4, 4)) * 2 + torch.tensor([1.0, 2, 3, 4]) + 1 + torch.arange(0, 8, 2)
    for _ in range(3):
        total, eye, line = step(x)
        assert torch.equal(total.full_tensor(), expected)
        assert torch.equal(eye.full_tensor(), torch.eye(2)) and line.tolist() == [0, 0.5, 1]


def test_frozen_and_added_parameters_are_noticed(mesh: Mesh) -> None:
    model, plain = twins(mlp, mesh)
    ours, theirs = (torch.optim.SGD(m[0].parameters(), lr=0.1) for m in (model, plain))
    step, reference = program(make_step(model, ours, square_loss)), make_step(plain, theirs, square_loss)
    for seed in range(14):
        if seed == 6:
            for m in (model, plain):
                m[0].bias.requires_grad_(False)
                m[0].bias.grad = None
        if seed == 10:
            for m, o in ((model, ours), (plain, theirs)):
                o.add_param_group({"params": list(m[2].parameters()), "lr": 0.01})
        batch = vector_batch(seed)
        assert step(*batch).item() == pytest.approx(reference(*batch).item(), rel=1e-5)
    assert_same_parameters(model, plain)


def test_an_optimizer_of_the_users(mesh: Mesh) -> None:
    class Signed(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.add_(p.grad.sign(), alpha=-group["lr"])

    model, plain = twins(mlp, mesh)
    ours, theirs = (Signed(m.parameters()) for m in (model, plain))
    step, reference = program(make_step(model, ours, square_loss)), make_step(plain, theirs, square_loss)
    for seed in range(5):
        batch = vector_batch(seed)
        step(*batch), reference(*batch)
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] *= 0.5
    assert_same_parameters(model, plain)
    assert [each.plans for each in step.remembered] == [1]  # traced without gradients and with them: the same graph


def test_updates_written_by_hand(mesh: Mesh) -> None:
    model, plain = twins(mlp, mesh)

    def by_hand(m: nn.Module) -> Any:
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = square_loss(m, x, y)
            grads = torch.autograd.grad(loss, list(m.parameters()))
            with torch.no_grad():
                for p, g in zip(m.parameters(), grads, strict=True):
                    p -= 0.1 * g
            return loss

        return step

    step, reference = program(by_hand(model)), by_hand(plain)
    for seed in range(4):
        step(*vector_batch(seed)), reference(*vector_batch(seed))
    assert_same_parameters(model, plain)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("door", ["program", "eager"])
def test_checkpointing_draws_the_same_numbers_again(door: str, mesh: Mesh) -> None:
    w = distribute(torch.ones(64, requires_grad=True), mesh)

    def block(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(F.dropout(x * w, 0.5), 0.5)

    def step(x: torch.Tensor) -> Any:
        h = checkpoint(block, checkpoint(block, x, use_reentrant=False), use_reentrant=False)
        (grad,) = torch.autograd.grad(h.sum(), w)
        return h, grad

    manual_seed(3)
    with mesh.activate("model"):  # draws each worker's own, with the seed that the next draw has too
        torch.rand_like(w.detach()), torch.rand_like(w.detach())
    mesh.flush()
    run = program(step) if door == "program" else step
    manual_seed(3)
    h, grad = run(distribute(torch.ones(64), mesh))
    torch.testing.assert_close(grad.full_tensor(), 2 * h.full_tensor())  # h = mask · w²
    assert 0 < (h.full_tensor() > 0).sum() < 16


def test_grad_modes_and_autocast(mesh: Mesh) -> None:
    model, plain = twins(mlp, mesh)
    x = vector_batch(0)[0]
    forward = program(lambda x: model(x))
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            ours = forward(x)
            torch.testing.assert_close(ours.full_tensor(), plain(x))
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = program(lambda x: model(x))(x), plain(x)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    torch.testing.assert_close(ours.full_tensor(), theirs, atol=2e-2, rtol=2e-2)


def test_nothing_is_kept_alive(mesh: Mesh) -> None:
    model, _ = twins(mlp, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    step = program(make_step(model, optimizer, square_loss))
    batch = [distribute(t, mesh) for t in vector_batch(0)]
    for _ in range(4):
        loss = step(*batch)
    (loss + batch[0].sum()).item()
    gone = [weakref.ref(t._ref.cell) for t in (loss, *batch)]
    del loss, batch
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def test_a_layout_in_a_program(mesh: Mesh) -> None:
    @program
    def step(x: torch.Tensor) -> torch.Tensor:
        y = layout(x * 2, ["data", None])
        assert str(x.sharding) == "[@model, -]"
        return layout(y, "[-, @model]")

    x = distribute(torch.ones(4, 4), mesh, "[@model, -]")
    text = str(step.trace(x).graph)
    assert ', "[@data, -]")' in text and "%x = input 0" in text
    assert "f32[4, 4@model]" in text

    with pytest.raises(ProgramError, match="this tensor has no layout yet"):
        program(lambda x: (x * 2).sharding)(x)
    with pytest.raises(LayoutError, match="unknown mesh dim 'rows'"):
        program(lambda x: layout(x, "[@rows, -]"))(x)


def test_traced_and_compiled_forms(mesh: Mesh) -> None:
    step = program(lambda x: x + 1)
    x = distribute(torch.ones(4, 4), mesh, "[@data, -]")
    traced = step.trace(x)
    assert str(traced) == str(traced.graph)
    assert [node.meta["kind"] for node in traced.graph.placeholders] == ["input"]
    assert isinstance(step.compile(x), Plan) and isinstance(traced.compile(), Plan)
    assert not step.remembered


def test_equal_programs_are_compiled_once_for_a_signature(mesh: Mesh) -> None:
    compiled: list[str] = []
    weight = distribute(torch.ones(4), mesh)
    step = program(lambda x: x * weight)
    with compiling_with(lambda graph: (compiled.append(str(graph)), compile_dense(graph))[1]):
        for _ in range(20):
            step(torch.ones(4))
        assert len(compiled) == 1
        step(torch.ones(2, 4))
        step(distribute(torch.ones(4), mesh, "[@data]"))
        assert len(compiled) == 3


def test_ops_that_cannot_be_recorded(mesh: Mesh) -> None:
    x = distribute(torch.ones(4), mesh)
    with pytest.raises(OperatorError, match="gives a tensor whose shape depends on values"):
        program(lambda x: x[x > 0])(x)
    with pytest.raises(OperatorError, match="changes a tensor's shape in place"):
        program(lambda x: x.unsqueeze_(0))(x)  # monarch: ignore[M105]
    assert x.shape == (4,)
    with pytest.raises(ProgramError, match=r"random numbers on a mesh come from counters"):
        x.bernoulli_(0.5, generator=torch.Generator())
    plain = torch.zeros(4)
    plain.copy_(x)
    assert plain.tolist() == [1.0] * 4


def test_a_module_copied_into_a_program(mesh: Mesh) -> None:
    """State dicts of plain modules load into placed ones, inside and outside of programs."""
    model = module_to_mesh(nn.Linear(4, 4), mesh)
    target = copy.deepcopy(model)

    @program
    def sync() -> None:
        with torch.no_grad():
            for ours, theirs in zip(target.parameters(), model.parameters(), strict=True):
                ours.mul_(0.5).add_(theirs, alpha=0.5)

    with torch.no_grad():
        model.weight.fill_(4.0)
        target.weight.fill_(0.0)
    for expected in (2.0, 3.0, 3.5):
        sync()
        assert isinstance(target.weight, DistributedTensor)
        assert target.weight.full_tensor().unique().tolist() == [expected]
