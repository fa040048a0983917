"""Lists and dicts among a program's arguments are the caller's own: what the program does to them, each call does."""

from __future__ import annotations

import collections
import copy
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch.compiler.errors import ProgramError
from monarch.language import DistributedTensor, Mesh, distribute, program
from monarch.language.errors import TracedAgainWarning

Decorate = Callable[[Callable[..., Any]], Any]


def row(seed: int) -> torch.Tensor:
    return torch.arange(4.0) + seed


def batch(as_program: Decorate) -> Any:
    @as_program
    def step(batch: dict[str, Any]) -> torch.Tensor:
        labels = batch.pop("labels")
        batch["seen"] = batch["x"] * 2
        batch["x"] = batch.pop("x")  # stands last
        return (batch["x"] - labels).sum()

    found: list[Any] = []
    for seed in range(4):
        given = {"x": row(seed), "labels": row(2 * seed)}
        found += [step(given), list(given), given]
    return found


def state(as_program: Decorate) -> Any:
    @as_program
    def step(state: dict[str, Any], x: torch.Tensor) -> torch.Tensor:
        state["h"] = torch.tanh(state["h"] + x)
        state["rate"] *= 0.5
        state["n"] += 1
        return state["h"] * state["rate"]

    kept = {"h": torch.zeros(4), "rate": 8.0, "n": 0}
    return [step(kept, row(seed)) for seed in range(4)], kept


def lists(as_program: Decorate) -> Any:
    @as_program
    def step(found: list[Any], more: dict[str, Any], x: torch.Tensor) -> None:
        found.append(x * 2)
        found.insert(0, found[-1] + 1)
        del found[1]
        more["all"].extend([1, "b", None, x.sum()])
        more["last"] = more["all"][-1]

    got: list[Any] = []
    for seed in range(4):
        found, more = [row(seed)], {"all": [seed], "last": None}
        step(found, more, row(1))
        got += [found, more, more["last"] is more["all"][-1]]
    return got


def others(as_program: Decorate) -> Any:
    @as_program
    def step(groups: Any, last: Any, order: Any, x: torch.Tensor) -> Any:
        groups["a"].append(x)
        last.append(x.mean())
        order.move_to_end("one")
        return sum(last)

    groups, order = collections.defaultdict[str, list[Any]](list), collections.OrderedDict(one=1, two=2)
    last: collections.deque[Any] = collections.deque(maxlen=2)
    found = [step(groups, last, order, row(seed)) for seed in range(4)]
    return found, dict(groups), list(last), list(order), groups.default_factory is list, last.maxlen


def one_list_twice(as_program: Decorate) -> Any:
    @as_program
    def step(a: list[Any], b: list[Any]) -> Any:
        a.append(a[0] * 2)
        return a is b, len(b), b[-1] + b[0]

    one, other = [row(0)], [row(0)]
    return step(one, one), step(one, other), step(other, other), step(other, other), len(one), len(other)


def returned(as_program: Decorate) -> Any:
    held = types.SimpleNamespace(batch=None)

    @as_program
    def step(batch: dict[str, Any], *, unchanged: list[Any]) -> Any:
        held.batch = batch
        batch["y"] = batch["x"] * 2
        return batch, [unchanged, batch]

    found: list[Any] = []
    for seed in range(3):
        given, more = {"x": row(seed)}, [1, row(seed)]
        first, (second, third) = step(given, unchanged=more)
        found += [first is given, second is more, third is given, held.batch is given, given]
    return found


def whole(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: whole(entry) for key, entry in value.items()}
    return [*map(whole, value)] if isinstance(value, (list, tuple)) else value


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("of", [batch, state, lists, others, one_list_twice, returned])
def test_what_a_program_does_to_lists_and_dicts_that_it_is_given_is_done(mesh: Mesh, of: Callable[..., Any]) -> None:
    assert whole(of(lambda function: program(function, mesh=mesh))) == whole(of(lambda function: function))


def test_what_stays_in_a_list_is_the_callers_own(mesh: Mesh) -> None:
    table = distribute(torch.arange(8.0).view(2, 4), mesh)

    @program(mesh=mesh)
    def step(found: list[Any]) -> torch.Tensor:
        found.append(found[0] * 2)
        return found[-1]

    for _ in range(3):
        view, plain = table[1], torch.ones(4)
        found = [view, plain]
        step(found)
        assert found[0] is view and found[1] is plain and isinstance(found[2], DistributedTensor)


def test_a_call_that_fails_leaves_them_as_they_were(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(found: dict[str, Any], x: torch.Tensor, fail: bool) -> torch.Tensor:
        found["y"] = x + 1
        del found["x"]
        if fail:
            raise KeyError("later")
        return found["y"] @ x.view(2, 2)  # no product

    given = {"x": 1}
    for fail in (True, False):
        with pytest.raises((KeyError, RuntimeError)):
            step(given, torch.ones(4), fail)
        assert given == {"x": 1}
    with pytest.raises(RuntimeError):
        step.trace(given, torch.ones(4), False)
    assert given == {"x": 1}


def test_looking_at_a_program_changes_no_list(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(found: list[Any], x: torch.Tensor) -> torch.Tensor:
        found.append(x)
        return x * 2

    found: list[Any] = []
    step.trace(found, torch.ones(2))
    assert found == []


def test_a_list_that_grows_is_named_once(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(found: list[Any], x: torch.Tensor) -> torch.Tensor:
        found.append(x.sum())
        return x * 2

    found: list[Any] = []
    with pytest.warns(TracedAgainWarning, match="'step' is traced and compiled for each length of a list") as said:
        for _ in range(12):
            step(found, torch.ones(2))
    assert len(said) == 1 and len(found) == 12
    assert said[0].filename == __file__  # the line of the call


def test_what_holds_itself_is_refused(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(found: Any) -> torch.Tensor:
        return found["x"] + 1

    given: dict[str, Any] = {"x": torch.ones(3)}
    given["more"] = [given]
    with pytest.raises(ProgramError, match="an argument of 'step' holds itself"):
        step(given)
    del given["more"]
    assert step(given).tolist() == [2] * 3


@pytest.mark.parametrize("first", [True, False])
def test_one_that_the_program_also_reads_from_python_and_changes_is_refused(mesh: Mesh, first: bool) -> None:
    held: dict[str, Any] = {"n": 1, "all": []}

    @program(mesh=mesh)
    def through_argument(given: dict[str, Any], x: torch.Tensor) -> Any:
        given["n"] += 1
        return x * held["n"]

    @program(mesh=mesh)
    def through_python(given: list[Any], x: torch.Tensor) -> Any:
        held["all"].append(x * 2)
        return x * len(given)

    @program(mesh=mesh)
    def asks(given: dict[str, Any], x: torch.Tensor) -> Any:
        return x + 1 if given is held else x

    @program(mesh=mesh)
    def reads(given: dict[str, Any], x: torch.Tensor) -> Any:
        return x * given["n"] * held["n"]

    x = torch.ones(2)
    for step, mine in ((through_argument, held), (through_python, held["all"]), (asks, held)):
        if not first:
            for _ in range(4):
                step(copy.deepcopy(mine), x)
        held["n"], before = 1, len(held["all"])
        with pytest.raises(ProgramError, match="also reads from Python"):
            step(mine, x)
        assert held["n"] == 1 and len(held["all"]) == before
        step(copy.deepcopy(mine), x)
    assert reads(held, x).tolist() == [1.0, 1.0]


def test_one_that_the_program_keeps_may_come_again(mesh: Mesh) -> None:
    held = types.SimpleNamespace(last=None)

    @program(mesh=mesh)
    def step(given: dict[str, Any], x: torch.Tensor) -> None:
        given["h"] = given["h"] + x
        held.last = given

    first, second = {"h": torch.zeros(2)}, {"h": torch.zeros(2)}
    for given in (first, first, first, first, second, second, first):
        step(given, torch.ones(2))
        assert held.last is given
    assert first["h"].tolist() == [5.0] * 2 and second["h"].tolist() == [2.0] * 2
