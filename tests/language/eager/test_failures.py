"""An op that fails outside a program: everything is as PyTorch leaves it, which raises at the op's line."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.distributed import Mesh
from tests.language.partitioned import partitioned_mesh

RAISED = (IndexError, RuntimeError)
GOOD, BAD = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 99])


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    with partitioned_mesh(data=2) as made:
        yield made


class Model(nn.Module):
    """A lookup, and behind it state that changes in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.head = nn.Embedding(16, 8), nn.BatchNorm1d(8), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embedding(tokens)))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> float:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "AdamW": partial(torch.optim.AdamW, lr=0.1),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.1),
    "NAdam": partial(torch.optim.NAdam, lr=0.1),
    "ASGD": partial(torch.optim.ASGD, lr=0.1),
    "Adafactor": partial(torch.optim.Adafactor, lr=0.1),
}


def compare(mine: Any, expected: Any) -> None:
    for name, value in expected.state_dict().items():
        ours = mine.state_dict()[name]
        ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        torch.testing.assert_close(ours, value, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.sample(1)
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_a_bad_batch_leaves_model_and_optimizer_as_pytorch_leaves_them(mesh: Mesh, make: Any) -> None:
    torch.manual_seed(0)
    dense = Model()
    mine = copy.deepcopy(dense)
    monarch.module_to_mesh(mine, mesh)
    ours, plain = make(mine.parameters()), make(dense.parameters())
    for x, y in ((BAD, GOOD), (GOOD, BAD), (GOOD, GOOD), (BAD, GOOD), (GOOD, GOOD), (GOOD, BAD), (GOOD, GOOD)):
        if x is GOOD and y is GOOD:
            assert step(mine, ours, x, y) == pytest.approx(step(dense, plain, x, y), rel=1e-5)
        else:
            for model, optimizer in ((dense, plain), (mine, ours)):
                with pytest.raises(RAISED, match="out of (range|bounds)"):
                    step(model, optimizer, x, y)
            assert len(ours.state) == len(plain.state)
            compare(mine, dense)
    compare(mine, dense)


def test_lbfgs_steps_after_a_bad_batch(mesh: Mesh) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    mine = copy.deepcopy(dense)
    monarch.module_to_mesh(mine, mesh)
    pairs = [(model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)) for model in (dense, mine)]

    def closure(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss = F.cross_entropy(model(x), GOOD)
        loss.backward()
        return loss

    for x in (BAD, GOOD, BAD, GOOD):
        losses = []
        for model, optimizer in pairs:
            if x is BAD:
                with pytest.raises(RAISED, match="out of range"):
                    optimizer.step(lambda model=model, x=x: closure(model, x))
                assert all(p.grad is None for p in model.parameters())
            else:
                losses.append(float(optimizer.step(lambda model=model, x=x: closure(model, x))))
        assert losses == [] or losses[1] == pytest.approx(losses[0], rel=1e-4)
    compare(mine, dense)


def test_gradients_that_were_there_stay_and_new_ones_are_none(mesh: Mesh) -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    mine = copy.deepcopy(dense)
    monarch.module_to_mesh(mine, mesh)
    for x in (BAD, GOOD, BAD, GOOD):
        for model in (dense, mine):
            try:
                loss = F.cross_entropy(model(x), GOOD)
                loss.backward()
                loss.item()
            except RAISED:
                assert x is BAD
        for p, q in zip(mine.parameters(), dense.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None)
            if q.grad is not None:
                torch.testing.assert_close(p.grad.full_tensor(), q.grad)


def test_what_does_not_depend_on_the_failed_op_keeps_its_results(mesh: Mesh) -> None:
    table = monarch.distribute(torch.arange(8.0), mesh, "[@data]")
    before = table * 2
    failed = table[BAD]
    behind = table + 1
    behind += 1
    assert behind.sum().item() == 44  # nothing is raised for what does not need the failed op
    torch.testing.assert_close(before.full_tensor(), torch.arange(8.0) * 2)
    torch.testing.assert_close((behind * 2).full_tensor(), torch.arange(8.0) * 2 + 4)
    later = table * 3
    with pytest.raises(RAISED, match="out of (range|bounds)"):
        failed.full_tensor()
    torch.testing.assert_close(later.full_tensor(), torch.arange(8.0) * 3)


def test_a_change_behind_the_failed_op_is_raised_once_and_not_made(mesh: Mesh) -> None:
    state = monarch.distribute(torch.ones(4), mesh)
    state += 1
    failed = state[BAD]
    state += 2
    twice = state * 2
    other = (torch.ones(4) * monarch.distribute(torch.ones(4), mesh)).full_tensor()  # runs everything
    assert torch.equal(other, torch.ones(4))
    with pytest.raises(RAISED, match="out of (range|bounds)"):
        state.full_tensor()  # it has not the value that the lines above give it: that is said once
    assert torch.equal(state.full_tensor(), torch.full((4,), 2.0))
    assert (state + 1).sum().item() == 12
    for lost in (failed, twice):
        with pytest.raises(RAISED, match="out of (range|bounds)"):
            lost.full_tensor()


def test_of_one_line_that_runs_often_only_the_failed_call_is_lost(mesh: Mesh) -> None:
    table = monarch.distribute(torch.arange(8.0), mesh, "[@data]")
    rows = [table[torch.tensor([entry])] for entry in (1, 2, 99, 3, 77)]
    for row, expected in ((0, 1), (1, 2), (3, 3)):
        assert rows[row].item() == expected
    for row in (2, 4):
        with pytest.raises(RAISED, match="out of (range|bounds)"):
            rows[row].item()


def test_a_program_raises_the_failure_that_its_state_depends_on_once(mesh: Mesh) -> None:
    weight = monarch.distribute(torch.ones(4), mesh)
    double = monarch.program(lambda: weight * 2)
    argument = monarch.program(lambda x: x * 2)
    assert torch.equal(double().full_tensor(), torch.full((4,), 2.0))
    argument(weight)
    for program in (double, partial(argument, weight)):
        weight.add_(weight[BAD])
        with pytest.raises(RAISED, match="out of (range|bounds)"):
            program()
        assert torch.equal(program().full_tensor(), torch.full((4,), 2.0))


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(12))
def test_random_lines_with_one_that_fails(mesh: Mesh, seed: int) -> None:
    """State is as at the failed line; values that are not lost are those of the same lines without a failure."""
    chosen = random.Random(seed)
    lines = [(chosen.choice("nnvuuwl"), chosen.randrange(99), chosen.randrange(99)) for _ in range(12)]
    fails_at = chosen.randrange(12)

    def run(states: list[torch.Tensor], stop: bool) -> list[torch.Tensor]:
        made = list(states)
        for number, (kind, first, second) in enumerate(lines):
            a, b = made[first % len(made)], made[second % len(made)]
            if number == fails_at:
                if stop:
                    break
                made.append(a[BAD])
            elif kind == "n":
                made.append(a + b)
            elif kind == "v":
                made.append(a.flip(0)[:].view(4))
            elif kind == "u":
                a.mul_(0.5).add_(b)
            elif kind == "w":
                a[1:3] = b[:2]
            else:
                made.append(a[GOOD - 1])
        return made

    starts = [torch.arange(4.0) + n for n in range(3)]
    expected = [start.clone() for start in starts]
    plain = run(expected, stop=True)
    states = [monarch.distribute(start, mesh) for start in starts]
    made = run(states, stop=False)
    with pytest.raises(RAISED, match="out of (range|bounds)"):
        made[len(plain)].full_tensor()
    for mine, value in zip(made, plain, strict=False):
        torch.testing.assert_close(mine.full_tensor(), value)
