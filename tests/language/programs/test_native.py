"""Guards are checked in three ways: object by object, by a function written for them, and with native code for most of
it. What one says, the others say."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from hypothesis import given, seed
from torch import nn

from monarch.language import Mesh, distribute, module_to_mesh, program
from monarch.language.programs import native
from monarch.language.programs.guards import Guards
from monarch.language.programs.nodes import Node
from tests.language.models import assert_same_parameters, make_step, mlp, square_loss, twins, vector_batch
from tests.language.programs.stateful import BODIES, CHANGES, GIVEN
from tests.language.programs.test_stateful_programs import tried
from tests.sample import examples

WAYS = "object by object", "in Python", "natively"


@pytest.fixture(scope="module", autouse=True)
def built() -> Iterator[None]:
    if native.begin().result() is None:
        pytest.skip("no C++ compiler is found, or Python is free-threaded")
    gc.collect()
    gc.freeze()
    yield


class Thrice:
    """Every check of guards in each way, from the first on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.natively = 0
        self.functions: WeakKeyDictionary[Guards, list[Any]] = WeakKeyDictionary()
        self._real = Guards.check
        monkeypatch.setattr(Guards, "check", lambda guards, arguments: self.check(guards, arguments))

    def check(self, guards: Any, arguments: list[Any]) -> Any:
        each = guards.check_each(arguments)
        functions = self.functions.setdefault(guards, [])
        for way, is_native in enumerate((False, True)):
            if len(functions) == way:
                functions.append(guards.written(is_native))
            other = functions[way](arguments)
            assert (other is None) == (each is None), WAYS[1 + way]
            if other is not None:
                live, states = other
                assert all(live[spot] is each[0][spot] for spot in live)
                assert all(a is b for a, b in zip(states, each[1], strict=True))
        self.natively += "NATIVE" in functions[1].__globals__
        return self._real(guards, arguments)


@pytest.mark.parametrize("part", range(2))
def test_small_stateful_programs_are_checked_alike(part: int, monkeypatch: pytest.MonkeyPatch) -> None:
    thrice = Thrice(monkeypatch)
    seed(part)(examples(12, 400)(given(BODIES, CHANGES, GIVEN)(tried)))()
    assert thrice.natively > 5


CHANGED = [
    "m[0].weight.requires_grad_(False)",
    "m[2].bias.register_hook(lambda g: 2 * g)",
    "m[0].register_forward_hook(lambda module, inputs, result: 2 * result)",
    "m[1] = torch.nn.Sigmoid()",
    "m[2].eval().register_buffer('late', None)",
    "m[2].weight.data = 2 * m[2].weight.data",
    "m[0].bias.late = 2.0",
    "o.param_groups[0]['weight_decay'] = 0.5",
    "o.state[m[0].weight]['exp_avg'] = torch.zeros_like(o.state[m[0].weight]['exp_avg'])",
    "o.state.clear()",
    "o.load_state_dict(o.state_dict())",
    "m.load_state_dict(m.state_dict())",
    "m[2].bias.grad = None",
    "del o.param_groups[0]['params'][1]",
]


def test_what_changes_in_a_model_and_its_optimizer_is_seen_natively(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, traces: list[str]
) -> None:
    thrice = Thrice(monkeypatch)
    mine, dense = twins(mlp, mesh)
    both = [(model, torch.optim.AdamW(model.parameters(), lr=0.1)) for model in (dense, mine)]
    step, wanted = program(make_step(*both[1], square_loss), mesh=mesh), make_step(*both[0], square_loss)
    for change in ["", "", *CHANGED]:
        traces.clear()
        for model, optimizer in both:
            exec(change, {"torch": torch, "m": model, "o": optimizer})
        for number in range(3):
            batch = vector_batch(number)
            torch.testing.assert_close(step(*batch).full_tensor(), wanted(*batch), msg=change)
        assert len(traces) <= 2, change
    assert_same_parameters(mine, dense)
    assert thrice.natively > len(CHANGED)


@pytest.mark.parametrize("count", [1, 8])
def test_what_a_tensor_without_gradient_is_given_is_seen(mesh: Mesh, count: int) -> None:
    tensors = [distribute(torch.ones(3), mesh) for _ in range(count)]

    @program(mesh=mesh)
    def scaled(x):
        return sum(getattr(tensor, "scale", 1.0) * x for tensor in tensors)

    @program(mesh=mesh)
    def moved(x):
        return sum((x if tensor.grad is None else x + tensor.grad) for tensor in tensors)

    x = torch.ones(3)
    for _ in range(5):  # from the fourth check on they are one function
        assert scaled(x).tolist() == moved(x).tolist() == [count] * 3
    tensors[0].scale = 2.0
    tensors[-1].grad = distribute(torch.ones(3), mesh)
    assert scaled(x).tolist() == moved(x).tolist() == [count + 1] * 3


def test_equal_values_that_are_other_objects_are_checked_as_quickly(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    class State:
        pass

    states = [State() for _ in range(8)]

    @program(mesh=mesh)
    def step(x):
        return sum(state.scale * x for state in states)

    looked: list[Any] = []
    monkeypatch.setattr(
        Node, "read_now", lambda node, holder, real=Node.read_now: looked.append(node) or real(node, holder)
    )
    for call in range(8):
        for state in states:
            state.scale = 0.1 * float("3")
        states[0].scale = 0.1 * float("5")
        if call == 6:
            looked.clear()
        assert step(torch.ones(3)).tolist() == pytest.approx([0.5 + 7 * 0.3] * 3)
    assert looked == []


def test_nothing_is_built_for_small_programs_and_none_waits(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    real = native.begin()
    written: list[bool] = []

    def write(guards: Guards, is_native: bool, write: Any = Guards.written) -> Any:
        written.append(is_native)
        return write(guards, is_native)

    monkeypatch.setattr(Guards, "written", write)
    future: Future[Any] = Future()
    began: list[int] = []
    monkeypatch.setattr(native, "begin", lambda: began.append(1) or future)
    model = module_to_mesh(nn.Sequential(*[nn.Linear(3, 3) for _ in range(native.WORTH // 3)]), mesh)

    @program(mesh=mesh)
    def small(x):
        return 2 * x

    @program(mesh=mesh)
    def large(x):
        return model(x)

    for _ in range(6):
        small(torch.ones(3))
    assert not began
    first = [large(torch.ones(3)).tolist() for _ in range(6)]
    assert began and written == [False, False]
    future.set_result(real.result())
    assert large(torch.ones(3)).tolist() == first[0]
    assert written == [False, False, True]
    model[-1].bias.data = model[-1].bias.data + 1
    assert large(torch.ones(3)).tolist() != first[0]
