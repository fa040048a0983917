"""Training steps as programs and as eager loops, against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from monarch.language import DistributedTensor, Mesh, manual_seed, module_to_mesh, program
from monarch.language.eager.flush import cached_plans
from monarch.language.tensors.cell import Cell
from tests.language.models import (
    CNN,
    TinyGPT,
    assert_same_parameters,
    make_step,
    mlp,
    square_loss,
    token_batch,
    token_loss,
    twins,
    vector_batch,
)

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd-nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}


@pytest.mark.sample()
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("door", ["program", "eager"])
def test_optimizers_agree_with_plain_torch(name: str, door: str, mesh: Mesh) -> None:
    model, plain = twins(mlp, mesh)
    ours, theirs = (OPTIMIZERS[name](m.parameters()) for m in (model, plain))
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (i + 1)) for o in (ours, theirs)]
    step = make_step(model, ours, square_loss)
    if door == "program":
        step = program(step)
    else:
        step = _on(step, mesh)
    reference = make_step(plain, theirs, square_loss)
    for seed in range(5):
        batch = vector_batch(seed)
        assert step(*batch).item() == pytest.approx(reference(*batch).item(), rel=2e-5)
        for schedule in schedules:
            schedule.step()
    assert_same_parameters(model, plain, atol=2e-5)


def _on(step: Callable[..., Any], mesh: Mesh) -> Callable[..., Any]:
    from monarch.language import distribute

    return lambda *batch: step(*(distribute(x, mesh) for x in batch))


def test_gpt_with_adamw_and_a_schedule(mesh: Mesh) -> None:
    model, plain = twins(TinyGPT, mesh)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda i: 1 / (i + 1)) for o in (ours, theirs)]
    step, reference = program(make_step(model, ours, token_loss)), make_step(plain, theirs, token_loss)
    graphs = []
    for seed in range(5):
        batch = token_batch(seed)
        graphs.append(str(step.trace(*batch).graph))
        assert step(*batch).item() == pytest.approx(reference(*batch).item(), rel=1e-5)
        for schedule in schedules:
            schedule.step()
    assert_same_parameters(model, plain)
    assert graphs[1] == graphs[2] == graphs[3] == graphs[4]
    assert graphs[0] != graphs[1]  # the first step makes the optimizer's state, the others read it
    assert model.head.weight is model.tokens.weight
    # One learning rate, and one step counter for all parameters.
    assert graphs[1].count("= scalar ") == 1
    assert graphs[1].count('"adamw.step[') == 2  # the placeholder and its update


def test_cycled_momentum_is_read_at_every_call(mesh: Mesh) -> None:
    model, plain = twins(mlp, mesh)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    schedules = [torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1e-2, total_steps=12) for o in (ours, theirs)]
    step, reference = program(make_step(model, ours, square_loss)), make_step(plain, theirs, square_loss)
    traces: list[int] = []
    for seed in range(10):
        batch = vector_batch(seed)
        assert step(*batch).item() == pytest.approx(reference(*batch).item(), rel=1e-5)
        traces += [each.traces for each in step.remembered]
        for schedule in schedules:
            schedule.step()
    assert_same_parameters(model, plain)
    assert len(traces) == 10 and len(set(traces[3:])) == 1


def test_cnn_in_training_mode(mesh: Mesh) -> None:
    model, plain = twins(CNN, mesh)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))

    def loss_of(m: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(m(images), labels)

    step, reference = program(make_step(model, ours, loss_of)), make_step(plain, theirs, loss_of)
    for seed in range(4):
        torch.manual_seed(seed)
        batch = torch.randn(4, 1, 8, 8), torch.randint(0, 10, (4,))
        assert step(*batch).item() == pytest.approx(reference(*batch).item(), rel=1e-4)
    assert_same_parameters(model, plain, atol=1e-5)
    assert int(model.features[1].num_batches_tracked.item()) == 4

    evaluate = program(lambda images: model(images))
    model.eval(), plain.eval()
    torch.testing.assert_close(evaluate(batch[0]).full_tensor(), plain(batch[0]), atol=1e-5, rtol=1e-5)


def test_eager_loop_program_and_dense_are_equal(mesh: Mesh) -> None:
    """A plain loop, mixed with calls of a program on the same parameters and optimizer."""
    model, plain = twins(TinyGPT, mesh)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))
    eager, reference = _on(make_step(model, ours, token_loss), mesh), make_step(plain, theirs, token_loss)
    compiled = program(make_step(model, ours, token_loss))
    for seed in range(8):
        batch = token_batch(seed)
        run = compiled if seed in (3, 4, 6) else eager
        assert run(*batch).item() == pytest.approx(reference(*batch).item(), rel=1e-5)
    assert_same_parameters(model, plain)


def test_eager_loop_reuses_one_plan(mesh: Mesh) -> None:
    model, _ = twins(mlp, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 1 / (i + 1))
    step = _on(make_step(model, optimizer, square_loss), mesh)
    counts = []
    for seed in range(6):
        step(*vector_batch(seed)).item()
        schedule.step()
        counts.append(cached_plans())
    assert counts[2] == counts[-1]


def test_gradients_are_seen_after_a_step(mesh: Mesh) -> None:
    model, plain = twins(mlp, mesh)

    def backward(m: nn.Module) -> Callable[..., torch.Tensor]:
        def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = square_loss(m, x, y)
            loss.backward()
            return loss

        return run

    step, reference = program(backward(model)), backward(plain)
    for seed in range(7):  # gradients accumulate over the calls
        batch = vector_batch(seed)
        step(*batch), reference(*batch)
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)
        if seed == 3:  # and are dropped outside the program
            model.zero_grad(), plain.zero_grad()


def test_gradient_clipping(mesh: Mesh) -> None:
    model, plain = twins(mlp, mesh)

    def clipped(m: nn.Module) -> Callable[..., Any]:
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)

        def step(x: torch.Tensor, y: torch.Tensor) -> Any:
            optimizer.zero_grad()
            loss = square_loss(m, x, y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(m.parameters(), 0.1)
            optimizer.step()
            return {"loss": loss, "norm": norm}

        return step

    step, reference = program(clipped(model)), clipped(plain)
    for seed in range(3):
        batch = vector_batch(seed)
        ours, theirs = step(*batch), reference(*batch)
        assert ours["norm"].item() == pytest.approx(theirs["norm"].item(), rel=1e-5)
    assert_same_parameters(model, plain)


def test_train_and_eval_are_two_traces(mesh: Mesh) -> None:
    model = module_to_mesh(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), mesh)
    forward = program(lambda x: model(x))
    x = torch.ones(64, 4)
    dense = x @ model[0].weight.full_tensor().T + model[0].bias.full_tensor()
    for _ in range(3):
        model.train()
        dropped = forward(x).full_tensor()
        assert ((dropped == 0) | torch.isclose(dropped, 2 * dense)).all()
        assert 0.3 < (dropped == 0).float().mean() < 0.7
        model.eval()
        torch.testing.assert_close(forward(x).full_tensor(), dense)
    assert [each.traces for each in forward.remembered] == [2]


def test_random_numbers_follow_the_seed(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def sample(x: torch.Tensor) -> Any:
        return F.dropout(x, 0.5), torch.randn(4, 4), torch.randint(0, 10, (100,)), torch.rand_like(x)

    def draw() -> list[torch.Tensor]:
        return [t.full_tensor() for _ in range(2) for t in sample(torch.ones(8, 8))]

    manual_seed(7)
    first = draw()
    manual_seed(7)
    again = draw()
    manual_seed(8)
    other = draw()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    assert not torch.equal(first[1], first[5])  # two calls of one program differ
    assert first[2].min() >= 0 and first[2].max() <= 9 and len(first[2].unique()) == 10


def test_a_replaced_parameter_and_loaded_state_are_noticed(mesh: Mesh) -> None:
    model, plain = twins(mlp, mesh)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain))
    step, reference = program(make_step(model, ours, square_loss)), make_step(plain, theirs, square_loss)
    for seed in range(4):
        batch = vector_batch(seed)
        step(*batch), reference(*batch)
    fresh = {name: torch.randn_like(value) for name, value in plain.state_dict().items()}
    model.load_state_dict(fresh), plain.load_state_dict(fresh)
    for seed in range(4, 8):
        batch = vector_batch(seed)
        assert step(*batch).item() == pytest.approx(reference(*batch).item(), rel=1e-5)
    ours.load_state_dict(ours.state_dict())  # copies the state
    step(*batch), reference(*batch)
    assert_same_parameters(model, plain)


@pytest.mark.parametrize("door", [program, lambda step: step], ids=["program", "eager"])
@pytest.mark.parametrize("name", ["adamw", "sgd-nesterov"])
def test_an_optimizers_plain_state_goes_on_as_its_parameters_lie(mesh: Mesh, name: str, door: Any) -> None:
    _, plain = twins(mlp, mesh)
    theirs = OPTIMIZERS[name](plain.parameters())
    reference = make_step(plain, theirs, square_loss)
    reference(*vector_batch(0))
    model = copy.deepcopy(plain)
    module_to_mesh(model, mesh, {"0.weight": "[@data, -]"})
    ours = OPTIMIZERS[name](model.parameters())
    ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
    step = door(make_step(model, ours, square_loss))
    for seed in range(1, 3):
        assert step(*vector_batch(seed)).item() == pytest.approx(reference(*vector_batch(seed)).item(), rel=1e-5)
    assert_same_parameters(model, plain)
    weight = dict(model.named_parameters())["0.weight"]
    key = "exp_avg" if name == "adamw" else "momentum_buffer"
    assert ours.state[weight][key].tensor_type.layout == weight.tensor_type.layout


def test_state_is_named_after_the_module_and_the_optimizer(mesh: Mesh) -> None:
    model, _ = twins(mlp, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = program(make_step(model, optimizer, square_loss))
    step(*vector_batch(0))
    text = str(step.trace(*vector_batch(0)).graph)
    for label in ("0.weight", "adamw.exp_avg[0.weight]", "grad[2.bias]", "adamw.lr"):
        assert f'"{label}"' in text


def test_a_trace_changes_nothing(mesh: Mesh) -> None:
    model, plain = twins(mlp, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    step = program(make_step(model, optimizer, square_loss))
    before = [p._ref.cell.handle for p in model.parameters()]
    step.trace(*vector_batch(0))
    step.compile(*vector_batch(0))
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert before == [p._ref.cell.handle for p in model.parameters()]
    assert optimizer.param_groups[0]["lr"] == 1e-2
    assert_same_parameters(model, plain)


def test_results_hold_no_graph_and_are_not_waited_for(mesh: Mesh) -> None:
    model, _ = twins(mlp, mesh)
    loss = program(lambda x: model(x).sum())(torch.randn(4, 8))
    assert isinstance(loss, DistributedTensor)
    assert loss.requires_grad and not loss.grad_fn.next_functions[1:]  # it leads to nothing that the call has read
    assert isinstance(loss._ref.cell, Cell)
    assert loss._ref.cell.handle is not None
