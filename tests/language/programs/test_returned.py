"""What a program returns besides tensors: objects that hold its tensors, containers that stand there twice, what would
run later; and what it raises."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from monarch.compiler.errors import ProgramError
from monarch.language import Mesh, program
from tests.language.alike import assert_alike, nothing

Returned = Callable[[torch.Tensor], Any]
RETURNED: dict[str, Returned] = {
    "in an object": lambda y: (y, SimpleNamespace(y=y)),
    "a view in an object": lambda y: (y, SimpleNamespace(row=y[0])),
    "of which an object has a view": lambda y: (y[0], SimpleNamespace(y=y)),
    "in a set": lambda y: (y, {y}),
    "in an object's list": lambda y: (entries := [y, 1], SimpleNamespace(entries=entries, inner=SimpleNamespace(y=y))),
    "a list twice": lambda y: (entries := [y, 1], entries, {"again": entries}, y),
    "a dict twice": lambda y: (entries := {"y": y, 2: y[0]}, [entries], entries[2]),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Inner:
    row: torch.Tensor
    back: Any = None


class Output:
    def __init__(self, y: torch.Tensor) -> None:
        self.y, self.size, self.parts = y, tuple(y.shape), {"sum": y.sum(), "inner": Inner(y[0], self)}
        self.me = self


class Fields(collections.OrderedDict[str, Any]):
    __getattr__ = collections.OrderedDict.__getitem__


OBJECTS: dict[str, Returned] = {
    "an object that leads back to itself": Output,
    "a dataclass with slots": lambda y: Inner(y * 2, Inner(y[1:])),
    "a dict of one's own": lambda y: Fields(loss=y.sum(), y=y),
    "a namespace in a list": lambda y: [y, SimpleNamespace(y=y, twice=y * 2)],
}


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_it_makes_is_made_anew_without_a_trace(name: str, mesh: Mesh, traces: list[str]) -> None:
    def case(w: Any) -> Any:
        kept = SimpleNamespace(seen=[])
        inner = w["program"](lambda x: OBJECTS[name](x * 2))

        def step(x: torch.Tensor) -> Any:
            found = inner(x)
            assert all(found is not each for each in kept.seen)
            kept.seen = [*kept.seen, found]
            return found

        step.own = True  # type: ignore[attr-defined]
        return step, nothing

    assert_alike(case, mesh, 3)
    assert len(traces) == 1


def test_an_object_that_it_puts_in_the_place_of_another_is_read_by_the_next_call(mesh: Mesh, traces: list[str]) -> None:
    def case(w: Any) -> Any:
        kept = SimpleNamespace(state=Inner(w["make"](torch.zeros(4)), 0))

        def step(x: torch.Tensor) -> Any:
            kept.state = dataclasses.replace(kept.state, row=0.5 * kept.state.row + x.sum(0))
            return kept.state.row * (kept.state.back + 1)

        def change(call: int) -> None:
            if call == 3:
                kept.state = Inner(w["make"](torch.ones(4)), 2)

        step.kept = kept  # type: ignore[attr-defined]
        return step, change

    assert_alike(case, mesh, 8)
    assert len(traces) == 3


SHARED: dict[str, Returned] = {
    "a view": lambda y: (y, y[0]),
    "detached": lambda y: (y, {"y": y.detach()}),
    "of one that is none": lambda y: (y[1:], y[:2].T),
    "of numbers": lambda y: (t := torch.tensor([1.0, 2.0]), t[1:], torch.Tensor([3, 4])),
    "apart": lambda y: y.unbind(0),
}


@pytest.mark.parametrize("name", SHARED)
def test_results_that_share_memory_show_a_change_in_place(name: str, mesh: Mesh) -> None:
    def case(w: Any) -> Any:
        inner = w["program"](lambda x: SHARED[name](x * 2))

        def step(x: torch.Tensor) -> Any:
            found = inner(x)
            found[0].add_(1)
            return found

        step.own = True  # type: ignore[attr-defined]
        return step, nothing

    assert_alike(case, mesh, 3)


@pytest.mark.parametrize("name", RETURNED)
def test_it_is_one_object_in_all_places(name: str, mesh: Mesh) -> None:
    def case(w: Any) -> Any:
        def fresh(x: torch.Tensor) -> Any:
            return RETURNED[name](x * 2)

        inner = w["program"](fresh)

        def step(x: torch.Tensor) -> Any:
            found = inner(x)
            first = found[0]
            tensor = first if isinstance(first, torch.Tensor) else first["y"] if isinstance(first, dict) else first[0]
            tensor.add_(1)  # which all places show
            return found

        step.own = True  # type: ignore[attr-defined]
        return step, nothing

    assert_alike(case, mesh, 3)


@pytest.mark.parametrize("placed", [True, False])
def test_a_result_beside_an_object_that_has_it_may_be_read(mesh: Mesh, placed: bool) -> None:
    weight = torch.nn.Parameter(torch.ones(4))

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> Any:
        y = x * weight
        return (SimpleNamespace(y=y), y) if placed else (SimpleNamespace(y=y * 1), y)

    @program(mesh=mesh)
    def twice(y: torch.Tensor) -> torch.Tensor:
        return y * 2

    held, y = step(torch.ones(2, 4))
    assert (held.y is y) is placed
    assert y.requires_grad
    assert twice(y).sum().item() == 16


def _rows(x: torch.Tensor) -> Iterator[torch.Tensor]:
    yield from x


def _no_tensors() -> Iterator[int]:
    yield 1


async def _later(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@pytest.mark.parametrize(
    ("function", "args", "told"),
    [
        (_rows, 1, r"a generator.*\n +def _rows.*\n +return a list of its values: return \[\*rows\(x\)\]"),
        (_no_tensors, 0, "a generator"),
        (_later, 1, r"a coroutine.*\n +async def _later.*\n +have a plain function be the program"),
        (lambda x: [1, (row * 2 for row in x)], 1, "a generator"),
        (lambda x: {"rows": _rows(x)}, 1, "a generator"),
    ],
)
def test_what_would_run_later_is_refused(function: Any, args: int, told: str, mesh: Mesh) -> None:
    with pytest.raises(ProgramError, match=f"the program returns {told}"):
        program(function, mesh=mesh)(*[torch.ones(2, 4)] * args)


def test_a_generator_that_was_there_may_be_returned(mesh: Mesh) -> None:
    held = (number for number in range(3))
    step = program(lambda x: (x * next(held), held), mesh=mesh)
    for number in range(3):
        y, generator = step(torch.ones(2))
        assert y.sum().item() == 2 * number
        assert generator is held


def test_it_may_raise_stop_iteration(mesh: Mesh) -> None:
    log: list[int] = []

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        log.append(1)
        if stops:
            raise StopIteration(7)
        return x * len(log)

    for stops in (True, False, True):
        if stops:
            with pytest.raises(StopIteration) as caught:
                step(torch.ones(2))
            assert caught.value.value == 7
        else:
            assert step(torch.ones(2)).sum().item() == 2
    assert log == [1]


def test_the_line_that_seeds_is_named(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(3)
        return x + torch.rand(2)

    with pytest.raises(ProgramError, match=r"leaves it so\n +torch\.manual_seed\(3\)\n"):
        step(torch.ones(2))


def test_a_leaf_that_requires_a_gradient_is_one(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor) -> Any:
        return torch.nn.Parameter(x * 2), [(x * 3).requires_grad_()], x * 4

    for _ in range(2):
        parameter, (leaf,), other = step(torch.ones(4))
        (parameter * leaf * other).sum().backward()
        assert isinstance(parameter, torch.nn.Parameter)
        assert (parameter.is_leaf, leaf.is_leaf, other.requires_grad) == (True, True, False)
        assert (parameter.grad.tolist(), leaf.grad.tolist()) == ([12] * 4, [8] * 4)
