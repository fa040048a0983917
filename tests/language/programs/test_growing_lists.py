"""Lists that a program appends to: one trace serves all lengths where it never reads them, and where it reads them each
call is traced anew and exact."""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from monarch.language import Mesh, distribute, program
from tests.language.alike import assert_alike, nothing

QUIET = pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
AGAIN = pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")

APPENDS: dict[str, Callable[[Any, Any], Any]] = {
    "tensors": lambda h, x: h.append(x.sum()),
    "one tensor twice": lambda h, x: (h.append(x), h.append(x)),
    "numbers and text": lambda h, x: h.extend([1, 2.5, "a", None]),
    "objects": lambda h, x: h.append({"loss": x.mean(), "both": [len(x), (x, 1)]}),
    "in place": lambda h, x: h.__iadd__([x * 2]),
    "by another name": lambda h, x: [h.append(each) for each in (x, x + 1)],
    "as a list": lambda h, x: h.append(x) if isinstance(h, list) else None,
}
READS: dict[str, Callable[[Any, Any], Any]] = {
    "length": lambda h, x: x * len(h),
    "entry": lambda h, x: h[0] if len(h) > 0 else x,
    "truth": lambda h, x: x * 2 if h else x,
    "entries": lambda h, x: x + sum(each.sum() for each in h),
    "unpacked": lambda h, x: x * len([*h]),
    "stacked": lambda h, x: torch.stack(h).sum(0) if h else x,
    "caught": lambda h, x: _stacked_or(h, x),
    "membership": lambda h, x: x * (None in h),
    "equality": lambda h, x: x * ([*map(type, h)] == []) + (h != 3),
    "added": lambda h, x: x * len(h + [1]),
    "removed": lambda h, x: h.pop(0) if len(h) > 3 else x,
    "text": lambda h, x: x * len(f"{h}"[:1] + str(h)[:2]),
    "type": lambda h, x: x * (2 if type(h) is list else 3),
    "type in a table": lambda h, x: x * {list: 2}.get(type(h), 3),
    "copied": lambda h, x: x * len(copy.copy(h)),
    "JSON": lambda h, x: x * len(_text_of(h)),
    "leaves": lambda h, x: x * len(pytree.tree_leaves(h)),
    "returned": lambda h, x: h,
    "kept": lambda h, x: {"all": h},
    "reversed": lambda h, x: [*reversed(h)][:1],
    "set": lambda h, x: h.__setitem__(0, x) if len(h) else None,
    "cleared": lambda h, x: h.clear() if len(h) > 2 else None,
}


def _stacked_or(history: Any, x: Any) -> Any:
    try:
        return torch.stack(history).sum(0)
    except (TypeError, RuntimeError):
        return x


def _text_of(history: Any) -> str:
    try:
        return json.dumps([len(history), history])
    except TypeError:
        return "tensors"


@QUIET
@pytest.mark.parametrize("append", APPENDS)
def test_a_program_that_only_appends_costs_two_traces(append: str, mesh: Mesh, traces: list[str]) -> None:
    def case(w):
        state = types.SimpleNamespace(history=["first"], n=0)

        def step(x):
            state.n += 1
            APPENDS[append](state.history, x)
            return x * state.n

        def change(call):
            if call == 3:
                state.history.append("mine")
            if call == 4:
                state.history = [0]

        return step, change

    assert_alike(case, mesh, calls=8)
    assert len(traces) == 2


@AGAIN
@pytest.mark.sample(10)
@pytest.mark.parametrize("read", READS)
def test_a_list_that_the_program_reads_is_a_list(read: str, mesh: Mesh) -> None:
    def case(w):
        state = types.SimpleNamespace(history=[], n=0)

        def step(x):
            state.n += 1
            found = READS[read](state.history, x)
            state.history.append(x)
            state.left = found
            return found, state.n

        return step, nothing

    assert_alike(case, mesh)


@AGAIN
def test_a_list_in_two_places_is_one_list(mesh: Mesh) -> None:
    def case(w):
        state = types.SimpleNamespace(history=[], other=[])

        def step(x):
            state.history.append(1)
            return x * len(state.other)

        return step, lambda call: setattr(state, "other", state.history if call in (2, 3) else [])

    assert_alike(case, mesh, calls=7)


@AGAIN
def test_a_list_is_an_argument_too(mesh: Mesh) -> None:
    state = types.SimpleNamespace(history=[])

    def step(x: torch.Tensor, given: list[Any]) -> torch.Tensor:
        state.history.append(1)
        return x * len(given)

    run = program(step, mesh=mesh)
    for call in range(4):
        assert run(torch.ones(1), [1] * (call % 2)).item() == call % 2
    assert state.history == [1] * 4


@QUIET
def test_a_long_list_grows_too(mesh: Mesh, traces: list[str]) -> None:
    state = types.SimpleNamespace(history=[], warm=True)

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        state.history.append(1)
        return x * 2 if state.warm else x

    for call in range(8):
        step(torch.ones(1))
        if call == 2:
            state.history += [0] * 20_000
        if call == 4:
            state.warm = False
    assert len(state.history) == 20_008 and len(traces) == 3


@QUIET
def test_a_call_that_raises_appends_nothing(mesh: Mesh, traces: list[str]) -> None:
    state = types.SimpleNamespace(history=[], bad=False)

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        state.history.append(x)
        if state.bad:
            raise KeyError("bad")
        return x

    for _ in range(4):
        step(distribute(torch.ones(1), mesh))
    state.bad = True
    for _ in range(2):
        with pytest.raises(KeyError):
            step(distribute(torch.ones(1), mesh))
    state.bad = False
    assert len(state.history) == 4
    before = len(traces)
    step(distribute(torch.ones(1), mesh))
    assert len(state.history) == 5 and len(traces) == before
