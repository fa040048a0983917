"""Distributed tensors among a program's arguments are the caller's own: what the program writes to them is written, and
what it returns or keeps of them is that very tensor, or a view of it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import monarch
from monarch.compiler.errors import ProgramError
from monarch.language import Mesh, distribute, program
from tests.language.alike import assert_alike
from tests.language.partitioned import partitioned_mesh

Decorate = Callable[[Callable[..., Any]], Any]
Place = Callable[[torch.Tensor], torch.Tensor]


def some(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def cache(as_program: Decorate, place: Place) -> Any:
    @as_program
    def step(cache: dict[str, torch.Tensor], q: torch.Tensor, at: int) -> torch.Tensor:
        cache["k"][:, at] = q
        cache["v"][:, at] = q * 2
        weights = torch.softmax((cache["k"] * q[:, None]).sum(-1), -1)
        return (weights[..., None] * cache["v"]).sum(1)

    kept = {"k": place(torch.zeros(2, 4, 3)), "v": place(torch.zeros(2, 4, 3))}
    return [step(kept, some(at, 2, 3), at) for at in range(4)], kept


def optimizer(as_program: Decorate, place: Place) -> Any:
    @as_program
    def step(parameters: list[torch.Tensor], momenta: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        loss = ((x @ parameters[0]) @ parameters[1]).pow(2).mean()
        with torch.no_grad():
            for p, g, m in zip(parameters, torch.autograd.grad(loss, parameters), momenta, strict=True):
                m.mul_(0.9).add_(g)
                p.sub_(0.1 * m)
        return loss

    parameters = [place(some(1, 4, 6)).detach().requires_grad_(), place(some(2, 6, 2)).detach().requires_grad_()]
    momenta = [torch.zeros_like(p) for p in parameters]
    return [step(parameters, momenta, some(seed, 3, 4)) for seed in range(4)], parameters, momenta


def shared(as_program: Decorate, place: Place) -> Any:
    @as_program
    def step(x: torch.Tensor, v: torch.Tensor) -> Any:
        x.mul_(2)
        v.add_(1)
        return x + 1, v.clone()

    one, other, row = place(some(0, 4, 2)), place(some(1, 4, 2)), place(some(2, 2))
    found = [step(one, one[1]), step(one, one[1]), step(other, row), step(other, row), step(one, one[2])]
    return found, one, other, row


def statistics(as_program: Decorate, place: Place) -> Any:
    @as_program
    def step(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, mean, var, training=True, momentum=0.3)

    mean, var = place(torch.zeros(3)), place(torch.ones(3))
    return [step(some(seed, 8, 3), mean, var) for seed in range(3)], mean, var


def returned(as_program: Decorate, place: Place) -> Any:
    kept = types.SimpleNamespace(view=None)

    @as_program
    def step(x: torch.Tensor) -> Any:
        kept.view = x[2]
        return x, x[1], x.t(), x.view(-1)[2:6], x.detach(), {"a": x[:, 0]}, x + 1

    found: list[Any] = []
    base = place(some(9, 2, 4, 3))
    for seed in range(4):
        x = place(some(seed, 4, 3)) if seed % 2 else base[0]
        same, row, turned, flat, detached, more, after = step(x)
        row.mul_(2), turned[0].add_(1), flat.zero_(), detached.sub_(1), more["a"].add_(5), kept.view.mul_(3)
        found += [same is x, x.clone(), after]
    return found, base


def written_and_returned(as_program: Decorate, place: Place) -> Any:
    @as_program
    def step(x: torch.Tensor) -> Any:
        row = x[0]
        x.mul_(2)
        return x, row, x[1]

    found: list[Any] = []
    for seed in range(3):
        x = place(some(seed, 4, 3))
        same, row, other = step(x)
        row.add_(1), other.add_(10)
        found += [same is x, x.clone()]
    return found


def state(as_program: Decorate, place: Place) -> Any:
    total = place(torch.zeros(4, 2))

    @as_program
    def step(a: torch.Tensor) -> torch.Tensor:
        total.add_(1)
        return a * 2

    plain = place(torch.ones(2))
    return step(plain), step(total[1]), step(plain), step(total), step(total[1:3]), total


def overlapping(as_program: Decorate, place: Place) -> Any:
    @as_program
    def step(a: torch.Tensor, b: torch.Tensor) -> Any:
        a.add_(1)
        return b[0], b

    base = place(some(0, 6, 2))
    found: list[Any] = []
    for first, second in ((base[0:4], base[2:6]), (place(some(1, 4, 2)), place(some(2, 4, 2))), (base[2:6], base[0:4])):
        row, same = step(first, second)
        row.add_(5)
        found += [same is second, first.clone(), second.clone()]
    return found, base


def with_dict(as_program: Decorate, place: Place) -> Any:
    @as_program
    def step(found: dict[str, Any], x: torch.Tensor, y: torch.Tensor) -> Any:
        x.add_(y)
        found["sum"] = x.sum()
        found["n"] = 2
        return x, found["sum"], x[0]

    results: list[Any] = []
    for seed in range(4):
        x, found = place(some(seed, 4)), {}
        same, total, row = step(found, x, some(seed + 9, 4))
        row.mul_(2)
        results += [same is x, found["sum"] is total, x.clone(), total]
    return results


def asked(as_program: Decorate, place: Place) -> Any:
    held = place(some(5, 3))

    @as_program
    def step(x: torch.Tensor, found: list[Any]) -> Any:
        x.mul_(2)
        found.append(found[0] + 1)
        return x is found[0], x is held, found[-1] + held

    found: list[Any] = []
    for seed in range(8):
        x = held if seed in (2, 5) else place(some(seed, 3))
        given = [x] if seed % 2 else [place(some(seed + 9, 3))]
        found += [step(x, given), given, x.clone()]
    return found, held


def asked_unwritten(as_program: Decorate, place: Place) -> Any:
    held = [place(some(5, 3))]

    @as_program
    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if x is held[0] else x - 1

    other = place(some(6, 3))
    return [step(x) for x in (other, held[0], other, held[0], held[0][:])]


def given_data(as_program: Decorate, place: Place) -> Any:
    @as_program
    def step(a: Any, b: torch.Tensor) -> Any:
        data = a.data
        a.data, b.data = b.data, data
        a.note = getattr(a, "note", 0) + 1
        return a - b

    found: list[Any] = []
    for seed in range(3):
        a: Any = place(some(seed, 3))
        b = place(some(seed + 9, 3))
        found += [step(a, b), step(a, b), step(a, b), a, b, a.note]
    return found


def differentiated(as_program: Decorate, place: Place) -> Any:
    held, other = place(some(1, 3)).detach().requires_grad_(), place(some(2, 3)).detach().requires_grad_()

    @as_program
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((x * held * 2).sum(), held)[0]

    @as_program
    def alone(x: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((x * 2).sum(), held)[0]

    return [step(x) for x in (other, held, other, held)], alone(held)


def stepped(as_program: Decorate, place: Place) -> Any:
    ours, others = ([place(some(seed + at, 3)).detach().requires_grad_() for at in range(2)] for seed in (0, 2))
    optimizer = torch.optim.Adam(ours, lr=0.1)

    @as_program
    def step(parameters: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        loss = ((x * parameters[0]).sum() - parameters[1].sum()) ** 2
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    found = [step(each, some(seed, 3)) for seed, each in enumerate((others, others, ours, ours, others, ours))]
    return found, ours, others, [each.grad for each in (*ours, *others)]


def whole(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return [*map(whole, value.values())]
    return [*map(whole, value)] if isinstance(value, (list, tuple)) else value


EACH = [
    cache,
    optimizer,
    shared,
    statistics,
    returned,
    written_and_returned,
    state,
    overlapping,
    with_dict,
    asked,
    asked_unwritten,
    given_data,
    differentiated,
    stepped,
]


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("of", EACH)
def test_what_a_program_writes_to_its_arguments_is_written(mesh: Mesh, of: Callable[..., Any]) -> None:
    ours = whole(of(lambda function: program(function, mesh=mesh), lambda tensor: distribute(tensor, mesh)))
    theirs = whole(of(lambda function: function, lambda tensor: tensor))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_other_tensors_cost_no_trace(mesh: Mesh) -> None:
    traces: list[int] = []

    @program(mesh=mesh)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.add_(y)
        return x.sum()

    for seed in range(4):
        x = distribute(some(seed, 3), mesh)
        assert step(x, torch.ones(3)).item() == pytest.approx(some(seed, 3).sum().item() + 3, abs=1e-5)
        traces.append(sum(each.traces for each in step.remembered))
    assert traces == [1] * 4


def scaled(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    batch["x"][batch["x"] > 0] = 3
    return batch["x"].sum(0)


def scaled_in_a_branch(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return monarch.cond(batch["x"].sum() > -100, lambda: batch["x"].mul_(2), lambda: batch["x"] * 1)


@pytest.mark.parametrize("function", [scaled, scaled_in_a_branch])
def test_what_the_error_of_a_plain_argument_that_is_written_says_is_right(
    function: Callable[[Any], torch.Tensor], mesh: Mesh
) -> None:
    def copies(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        batch["x"] = batch["x"].clone()
        return function(batch)

    with pytest.raises(ProgramError) as refused:
        program(function, mesh=mesh)({"x": some(0, 4, 2)})
    for line in (
        "argument batch['x'] of the program is a plain tensor, and the program changes it in place",
        "batch['x'] = batch['x'].clone() ",
        "batch['x'] = monarch.distribute(batch['x'], mesh) ",
    ):
        assert line in str(refused.value)
    ours, theirs = {"x": distribute(some(0, 4, 2), mesh)}, {"x": some(0, 4, 2)}
    step, copying = program(function, mesh=mesh), program(copies, mesh=mesh)
    for seed in range(3):
        assert (step(ours).tolist(), ours["x"].tolist()) == (function(theirs).tolist(), theirs["x"].tolist())
        assert copying({"x": some(seed, 4, 2)}).tolist() == function({"x": some(seed, 4, 2)}).tolist()


def test_other_data_for_a_plain_argument_is_refused(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.data = y + 1
        return x * 2

    with pytest.raises(ProgramError, match="argument 0 of the program is given other data"):
        step(torch.ones(3), torch.ones(3))
    x = distribute(torch.ones(3), mesh)
    assert step(x, torch.ones(3)).tolist() == [4] * 3 and x.tolist() == [2] * 3


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
def test_a_result_that_what_the_program_makes_holds_too_is_one_tensor(mesh: Mesh) -> None:
    """A closure, whose variables no later call can make anew."""
    made: list[Any] = []

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        made.append((lambda kept: lambda: kept)(y.detach()))
        return y

    for _ in range(3):
        step(torch.ones(2)).add_(1)
        assert made[-1]().tolist() == [3.0, 3.0]


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
def test_a_tensor_of_numbers_that_a_program_leaves_in_python_has_its_value(mesh: Mesh) -> None:
    @functools.lru_cache(None)
    def table(size: int) -> torch.Tensor:
        return torch.tensor([0.5**i for i in range(size)])

    def case(w: dict[str, Any]) -> Any:
        held: dict[Any, Any] = {}

        def step(x: torch.Tensor) -> Any:
            if "scale" not in held:
                held["scale"] = torch.tensor([1.0, 2.0, 3.0, 4.0])
            held["last"] = torch.tensor([[1, 2], [3, 4]])
            held["view"] = held["last"][0]
            held["last"] += 1
            return x * held["scale"] * table(4)

        return step, lambda call: held.pop("scale") if call == 3 else None

    assert_alike(case, mesh)
    table.cache_clear()
    with partitioned_mesh(True, data=2) as of_plans:
        assert_alike(case, of_plans, calls=3)


def test_a_result_that_is_a_constant_has_its_value_where_the_program_makes_what_none_can_make_anew(mesh: Mesh) -> None:
    made: list[Any] = []

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> Any:
        made.append(lambda: x)
        lengths = torch.as_tensor([3, 2])
        return x * 2, lengths, lengths[:1], torch.tensor(5.0)

    for _ in range(2):
        assert [each.tolist() for each in step(torch.ones(2))] == [[2.0, 2.0], [3, 2], [3], 5.0]
