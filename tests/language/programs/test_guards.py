"""A traced program never remembers Python wrongly: each call does what the function would do now."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import gc
import os
import sys
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import lark
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monarch
from monarch.compiler.errors import ProgramError
from monarch.language import DistributedTensor, Mesh, distribute, module_to_mesh, program
from monarch.language.errors import TracedAgainWarning
from monarch.language.programs.program import Program
from tests.language.models import assert_same_parameters, make_step, mlp, square_loss, twins, vector_batch

pytestmark = pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")

SCALE = 1.0
settings = types.ModuleType("settings")
settings.__file__ = __file__


def plans(step: Program[Any, Any]) -> int:
    (signature,) = step.remembered
    return signature.plans


def numbers(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {key: numbers(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [numbers(entry) for entry in value]
    return value


class State:
    """What the patterns below read and write."""

    limit = 2.0

    def __init__(self, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.make = make
        self.m = make(torch.zeros(3))
        self.h: Any = None
        self.d = {"avg": make(torch.zeros(3))}
        self.history: list[Any] = []
        self.step = 0
        self.warm = True
        self.scale = 1.0


def rebound(s: State, x: torch.Tensor) -> Any:
    s.m = 0.9 * s.m + 0.1 * x.mean(0)
    return s.m * 2


def kept(s: State, x: torch.Tensor) -> Any:
    before = s.h
    s.h = x.sum(0).detach()
    return s.h if before is None else s.h + before


def entry(s: State, x: torch.Tensor) -> Any:
    s.d["avg"] = s.d["avg"] + x.sum(0)
    s.d["last"] = x.mean()
    return s.d["avg"]


def appended(s: State, x: torch.Tensor) -> Any:
    s.history.append(x.sum() * len(s.history))
    return s.history[-1]


def counted(s: State, x: torch.Tensor) -> Any:
    s.step += 1
    return x * s.step, s.step


def flagged(s: State, x: torch.Tensor) -> Any:
    return (x * 0.1 if s.warm else x) * s.scale * s.limit


def swapped(s: State, x: torch.Tensor) -> Any:
    s.h, s.m = s.m, s.m + x.sum(0)
    return s.m


def queued(s: State, x: torch.Tensor) -> Any:
    s.history = [*s.history[-2:], x.mean(0)]
    return sum(s.history) * 1.0


def scaled(s: State, x: torch.Tensor) -> Any:
    return x * SCALE


def configured(s: State, x: torch.Tensor) -> Any:
    return x * settings.rate


def of_the_class(s: State, x: torch.Tensor) -> Any:
    State.limit += 1
    return x * State.limit


def computed(s: State, x: torch.Tensor) -> Any:
    return x * getattr(s, "".join(["st", "ep"]))


def replaced_data(s: State, x: torch.Tensor) -> Any:
    s.m.data = s.m.data + x.sum(0)
    return s.m * 1


def keeps_the_argument(s: State, x: torch.Tensor) -> Any:
    before = 0.0 if s.h is None else s.h.sum()
    s.h = x
    return x + before


def from_the_environment(s: State, x: torch.Tensor) -> Any:
    return x * float(os.environ.get("SCALE_OF_A_TEST", "1"))


PATTERNS: list[Callable[[State, torch.Tensor], Any]] = [
    *(rebound, kept, entry, appended, counted, flagged, swapped, queued, scaled, configured, of_the_class, computed),
    *(replaced_data, keeps_the_argument, from_the_environment),
]


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: p.__name__)
def test_a_program_is_its_function(pattern: Callable[..., Any], mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve calls, with changes from outside between them, as without @program."""

    def run(make: Callable[[torch.Tensor], torch.Tensor], wrap: Callable[..., Any]) -> list[Any]:
        monkeypatch.setattr(State, "limit", 2.0)
        monkeypatch.delenv("SCALE_OF_A_TEST", raising=False)
        monkeypatch.setattr(settings, "rate", 1.0, raising=False)
        monkeypatch.setattr(sys.modules[__name__], "SCALE", 1.0)
        state = State(make)
        step = wrap(lambda x: pattern(state, x))
        seen: list[Any] = []
        for call in range(12):
            if call == 3:
                state.warm = False
            if call == 4:
                state.scale = 2  # type: ignore[assignment]
                monkeypatch.setattr(sys.modules[__name__], "SCALE", 3.0)
                monkeypatch.setattr(settings, "rate", 4.0)
                monkeypatch.setenv("SCALE_OF_A_TEST", "5")
            if call == 6:
                state.step += 10
                State.limit = 7
            if call == 7:
                state.m = make(torch.ones(3))
                state.history = []
            if call == 9:
                state.d = dict(state.d)
                state.h = make(torch.full((3,), 2.0))
            old = state.m
            seen.append(numbers(step(make(torch.full((2, 3), float(call + 1))))))
            found = {key: value for key, value in vars(state).items() if key != "make"}
            seen.append(numbers([found, old, State.limit]))
        return seen

    ours = run(lambda t: distribute(t, mesh), lambda f: program(f, mesh=mesh))
    theirs = run(lambda t: t.clone(), lambda f: f)
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        same = [
            x == pytest.approx(y, rel=1e-5) if type(x) is float else x == y
            for x, y in zip(flat(a), flat(b), strict=True)
        ]
        assert all(same), f"at call {number // 2}: {a} is not {b}"


def flat(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [item for key, entry in value.items() for item in (key, *flat(entry))]
    if isinstance(value, list):
        return [len(value), *(item for entry in value for item in flat(entry))]
    return [round(value, 3)] if type(value) is float else [value]


@pytest.mark.parametrize(
    "pattern", [rebound, kept, entry, swapped, queued, replaced_data, flagged], ids=lambda p: p.__name__
)
def test_steady_states_are_not_traced(pattern: Callable[..., Any], mesh: Mesh, traces: list[str]) -> None:
    state = State(lambda t: distribute(t, mesh))
    step = program(lambda x: pattern(state, x), mesh=mesh)
    for call in range(12):
        step(torch.full((2, 3), float(call)))
    assert len(traces) <= 5  # the queue grows three times


@pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
def test_plain_tensors_beside_what_a_program_reads_are_no_reason_to_trace_again(mesh: Mesh, traces: list[str]) -> None:
    settings = types.SimpleNamespace(rate=2.0, mask=torch.ones(3), nested=[{"table": torch.ones(300, 2)}])
    step = program(lambda x, given: (x * settings.rate * given.rate).sum(), mesh=mesh)
    for _ in range(4):
        assert step(torch.ones(2, 3), settings) == 24
    assert len(traces) == 1
    settings.rate = 3.0
    assert step(torch.ones(2, 3), settings) == 54


def test_nonlocals_and_globals(mesh: Mesh) -> None:
    total = distribute(torch.zeros(2), mesh)
    rounds = 1

    @program
    def step(x: torch.Tensor) -> torch.Tensor:
        nonlocal total
        for _ in range(rounds):
            total = total + x
        return total * 1

    for call in range(8):
        if call == 5:
            rounds = 2
        step(torch.ones(2))
    assert total.tolist() == [11.0, 11.0]


def test_another_model_behind_the_same_name(mesh: Mesh) -> None:
    """`for fold in range(3): model, optimizer = make()` around one program."""

    def make() -> Any:
        model, plain = twins(mlp, mesh)
        return model, plain, *(torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, plain))

    @program
    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return make_step(model, ours, square_loss)(x, y)

    gone = []
    for fold in range(3):
        model, plain, ours, theirs = make()
        for call in range(4):
            batch = vector_batch(10 * fold + call)
            expected = make_step(plain, theirs, square_loss)(*batch).item()
            assert step(*batch).item() == pytest.approx(expected, rel=1e-5)
        assert_same_parameters(model, plain)
        gone.append(weakref.ref(model[0].weight._ref.cell))
    assert plans(step) == 2  # the first step makes the optimizer's state; no model needs a plan of its own
    gc.collect()
    assert [ref() is None for ref in gone] == [True, True, False]
    model = ours = None
    gc.collect()
    assert gone[-1]() is None


def test_a_weight_that_is_bound_anew(mesh: Mesh) -> None:
    model = module_to_mesh(nn.Linear(2, 2, bias=False), mesh)
    step = program(lambda x: model(x))
    for call in range(6):
        model.weight = nn.Parameter(distribute(torch.full((2, 2), float(call)), mesh))
        assert step(torch.ones(1, 2)).tolist() == [[2.0 * call] * 2]
    assert plans(step) == 1


def test_rebound_functions_and_methods(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    class Layer:
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    layer = Layer()
    step = program(lambda x: F.relu(layer.forward(x)), mesh=mesh)
    x = torch.zeros(1)
    assert step(x).tolist() == [1.0]
    monkeypatch.setattr(Layer, "forward", lambda self, x: x + 2)
    assert step(x).tolist() == [2.0]
    layer.forward = lambda x: x + 3  # type: ignore[method-assign]
    assert step(x).tolist() == [3.0]
    monkeypatch.setattr(F, "relu", lambda x: x * 10)
    assert step(x).tolist() == [30.0]


def test_what_is_equal_to_a_function_of_pytorchs_is_not_that_function(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tenfold:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = object.__hash__

        def __call__(self, x: torch.Tensor, inplace: bool = False) -> torch.Tensor:
            return x * 10

    layer = nn.ReLU()
    step = program(lambda x: layer(x), mesh=mesh)
    x = torch.ones(1)
    assert [step(x).tolist() for _ in range(5)] == [[1.0]] * 5
    monkeypatch.setattr(F, "relu", Tenfold())
    assert step(x).tolist() == [10.0]


def test_equal_values_are_not_the_same(mesh: Mesh) -> None:
    state = types.SimpleNamespace(value=1)
    step = program(lambda x: x * (10 if state.value is True else repr(state.value).count("0") + 1), mesh=mesh)
    for value, expected in ((1, 1.0), (True, 10.0), (1.0, 2.0), (0.0, 3.0), (-0.0, 3.0), (float("nan"), 1.0)):
        state.value = value
        assert step(torch.ones(1)).tolist() == [expected]
        assert step(torch.ones(1)).tolist() == [expected]
    sign = program(
        lambda x: x * torch.tensor(1 / state.value if state.value else str(state.value).startswith("-")), mesh=mesh
    )
    for value, expected in ((0.0, 0.0), (-0.0, 1.0), (0.0, 0.0)):
        state.value = value
        assert sign(torch.ones(1)).tolist() == [expected]


def test_modes_are_part_of_a_signature(mesh: Mesh) -> None:
    step = program(lambda x: (x @ x, torch.zeros(1).dtype), mesh=mesh)
    x = torch.ones(2, 2)
    assert step(x)[0].dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        assert step(x)[0].dtype == torch.bfloat16
    assert step(x)[0].dtype == torch.float32
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert step(x)[1] == torch.float64
    finally:
        torch.set_default_dtype(before)
    assert step(x)[1] == torch.float32


def test_what_finds_and_parses_layouts_is_no_part_of_a_program(
    mesh: Mesh, traces: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(monarch, "layout", raising=False)  # not used before
    text = "[  - ,  -  ]"  # nor parsed
    step = program(lambda x: monarch.layout(x, text) * 2, mesh=mesh)
    assert step(torch.ones(2, 2)).tolist() == [[2, 2], [2, 2]]
    monkeypatch.setattr(lark.utils, "TextSlice", type("Other", (lark.utils.TextSlice,), {}))
    step(torch.ones(2, 2))
    assert len(traces) == 1


def test_what_cannot_be_checked_is_traced_at_each_call(mesh: Mesh) -> None:
    step = program(lambda x: x * time.perf_counter_ns(), mesh=mesh)  # monarch: ignore[M301]
    x = torch.ones(1, dtype=torch.float64)
    with pytest.warns(
        TracedAgainWarning, match=r"test_guards.py:\d+:\d+: the program .* is traced at each call.*time"
    ) as said:
        seen = [step(x).item() for _ in range(4)]
    assert len(set(seen)) == 4
    assert said[0].filename == __file__  # the line of the call
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x)  # said once
    draws = iter([1.0, 2.0, 3.0])
    drawn = program(lambda x: x * next(draws), mesh=mesh)
    assert [drawn(x).item() for _ in range(3)] == [1.0, 2.0, 3.0]


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE")
NOTHING = object()


@contextlib.contextmanager
def doubled() -> Iterator[None]:
    token = VARIABLE.set(2 * VARIABLE.get(1.0))
    try:
        yield
    finally:
        VARIABLE.reset(token)


@doubled()
def of_variable(x: torch.Tensor, other: Any = NOTHING) -> Any:
    return x * VARIABLE.get() if other is NOTHING else other


def test_context_variables_and_sentinels_are_checked(mesh: Mesh, traces: list[str]) -> None:
    @program
    def step(x: torch.Tensor) -> Any:
        return of_variable(x)

    x = distribute(torch.ones(2), mesh)
    assert [step(x).tolist() for _ in range(3)] == [[2, 2]] * 3
    assert len(traces) == 1
    token = VARIABLE.set(3.0)
    assert [step(x).tolist() for _ in range(3)] == [[6, 6]] * 3
    VARIABLE.reset(token)
    assert step(x).tolist() == [2, 2]
    assert len(traces) == 2


def test_what_a_program_sets_a_context_variable_to_is_there_after_each_call(mesh: Mesh) -> None:
    variable: contextvars.ContextVar[Any] = contextvars.ContextVar("variable", default=None)

    @program
    def step(x: torch.Tensor) -> None:
        variable.set(x * 2)

    for number in range(1, 4):
        step(distribute(torch.full((2,), float(number)), mesh))
        assert variable.get().tolist() == [2 * number, 2 * number]


def test_an_exception_leaves_python_as_it_was(mesh: Mesh) -> None:
    state = State(lambda t: distribute(t, mesh))
    state.history = [1]

    @program(mesh=mesh)
    def step(x: torch.Tensor, fail: bool) -> torch.Tensor:
        nonlocal calls
        calls += 1
        state.m = state.m + x
        state.history.append(2)
        state.d["new"] = x.sum()
        state.fresh = 1  # type: ignore[attr-defined]
        del state.warm
        State.limit = 3.0
        if fail:
            raise KeyError("the user's own")
        return state.m * 1

    calls = 0
    before = {**vars(state), "history": [1], "d": dict(state.d)}
    limit = State.limit
    try:
        with pytest.raises(KeyError):
            step(torch.ones(3), True)
        assert calls == 0 and State.limit == limit and vars(state).keys() == before.keys()
        assert all(vars(state)[key] is value for key, value in before.items() if key not in ("history", "d"))
        assert state.history == [1] and list(state.d) == ["avg"]
        assert step(torch.ones(3), False).tolist() == [1.0] * 3
        assert calls == 1 and state.history == [1, 2]
    finally:
        State.limit = limit


def test_what_is_left_with_its_history_cannot_be_read_as_if_it_had_it(mesh: Mesh) -> None:
    w = distribute(torch.ones(2, requires_grad=True), mesh)
    state = State(lambda t: distribute(t, mesh))

    @program
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * w if state.h is None else x * w + state.h
        state.h = y
        return y

    assert step(torch.ones(2)).tolist() == [1.0, 1.0]
    assert state.h.tolist() == [1.0, 1.0] and state.h.requires_grad
    with pytest.raises(ProgramError, match=r"left this tensor .*\n(.|\n)*self.h = h.detach\(\)"):
        step(torch.ones(2))
    with torch.no_grad():
        assert step(torch.ones(2)).tolist() == [2.0, 2.0]


def test_gradients_that_someone_holds_stay(mesh: Mesh) -> None:
    model, plain = twins(mlp, mesh)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    step, reference = program(make_step(model, ours, square_loss)), make_step(plain, theirs, square_loss)
    kept: list[Any] = []
    for seed in range(6):
        step(*vector_batch(seed)), reference(*vector_batch(seed))
        kept.append((model[0].weight.grad, plain[0].weight.grad))
        assert isinstance(kept[-1][0], DistributedTensor)
    for a, b in kept:
        torch.testing.assert_close(a.full_tensor(), b)


def test_a_debuggers_tracing_goes_on(mesh: Mesh) -> None:
    names: set[str] = set()

    def trace(frame: Any, event: str, argument: Any) -> None:
        names.add(frame.f_code.co_name)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        program(lambda x: inner(x), mesh=mesh)(torch.ones(1))
        assert sys.gettrace() is trace and "inner" in names
    finally:
        sys.settrace(before)


def test_the_usual_training_loop_is_not_traced_again(mesh: Mesh, traces: list[str]) -> None:
    """Gradients accumulate over two batches, are clipped and applied; a scheduler sets the rate, BatchNorm counts its
    batches, and averages of the weights are bound anew."""

    def train(model: nn.Module, wrap: Callable[..., Any], place: Callable[..., Any]) -> list[Any]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        average = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}

        def accumulate(x, y):
            loss = square_loss(model, x, y) / 2
            loss.backward()
            return loss

        def update():
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in model.named_parameters():
                average[name] = 0.9 * average[name] + 0.1 * parameter.detach()
            return norm

        accumulate, update = wrap(accumulate), wrap(update)
        seen: list[Any] = []
        for call in range(12):
            if call == 4:
                traces.clear()
            for part in range(2):
                torch.manual_seed(2 * call + part)
                seen.append(accumulate(place(torch.randn(8, 4)), place(torch.randn(8, 2))))
            seen.append(update())
            scheduler.step()
        return [*seen, *average.values(), *model.state_dict().values()]

    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
    mine = module_to_mesh(copy.deepcopy(dense), mesh)
    found = train(mine, lambda function: program(function, mesh=mesh), lambda value: distribute(value, mesh))
    assert traces == []
    for value, expected in zip(found, train(dense, lambda function: function, lambda value: value), strict=True):
        torch.testing.assert_close(value.detach().full_tensor(), expected.detach())


def test_an_interrupt_where_recording_ends_leaves_nothing_recording(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ctrl-C between two lines of a context manager's end, which then gives nothing back."""

    @contextlib.contextmanager
    def interrupted(recording: Any) -> Iterator[None]:
        module.current.recording = recording
        yield
        raise KeyboardInterrupt

    @program
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    x = distribute(torch.ones(4), mesh)
    module: Any = sys.modules["monarch.language.programs.trace"]
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(module, "tracing", interrupted)
        double(x)
    assert double(x).sum().item() == 8
