"""Settings that only functions show, and what functions and classes say of themselves: another value is noticed."""

from __future__ import annotations

import abc
import builtins
import decimal
import gc
import locale
import random
import sys
import types
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.random import rand

from monarch.language import Mesh, distribute, program

MODULE = "settings_of_a_test"


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    autocast, digits, limit = torch.get_autocast_dtype("cpu"), sys.get_int_max_str_digits(), sys.getrecursionlimit()
    hub, buffer = torch.hub.get_dir(), np.getbufsize()
    multiply, largest, place = torch.Tensor.__mul__, builtins.max, locale.setlocale(locale.LC_ALL)
    with decimal.localcontext(decimal.Context(prec=28)), np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_printoptions(profile="default")
    torch.set_float32_matmul_precision(precision)
    torch.set_autocast_dtype("cpu", autocast)
    torch.set_autocast_cache_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.backends.mha.set_fastpath_enabled(True)
    torch.backends.cuda.enable_math_sdp(True)
    torch._C._set_check_sparse_tensor_invariants(False)
    torch.distributions.Distribution.set_default_validate_args(__debug__)
    torch.hub.set_dir(hub)
    np.setbufsize(buffer)
    sys.set_int_max_str_digits(digits)
    sys.setrecursionlimit(limit)
    torch.__future__.set_swap_module_params_on_conversion(False)
    locale.setlocale(locale.LC_ALL, place)
    builtins.max = largest
    sys.modules.pop(MODULE, None)
    if torch.Tensor.__mul__ is not multiply:
        del torch.Tensor.__mul__


def function() -> None:
    """Its text."""


class Meta(type):
    rate = 1.0


class Plain(metaclass=Meta):
    """Its text."""

    __match_args__: Any = ("first",)

    def __init__(self) -> None:
        self.first, self.second = 1.0, 5.0


class Abstract(abc.ABC):  # noqa: B024
    pass


@typing.runtime_checkable
class Callish(typing.Protocol):
    def made_late(self) -> None: ...


def matched(value: Any) -> Any:
    match value:
        case Plain(first):
            return first
    return None


def imported() -> Any:
    import settings_of_a_test as found  # type: ignore[import-not-found]

    return found.rate


def imported_name() -> Any:
    from settings_of_a_test import rate

    return rate


def drawn() -> Any:
    from random import random

    return random()


def divided() -> Any:
    try:
        return float(np.float64(1.0) / np.float64(0.0) > 0)
    except FloatingPointError:
        return 7.0


def warned() -> Any:
    try:
        warnings.warn("of a test", stacklevel=1)
    except UserWarning:
        return 2.0
    return 1.0


THIRD = decimal.Decimal(1)
DTYPE = [torch.float32]
PLAIN = Plain()

Change = Callable[[int], Any]
CASES: dict[str, tuple[Callable[[], Any], Change]] = {
    "decimal": (lambda: float(THIRD / 3), lambda i: setattr(decimal.getcontext(), "prec", 2 + i)),
    "rounding": (
        lambda: float(round(decimal.Decimal("2.675"), 2)),
        lambda i: setattr(decimal.getcontext(), "rounding", (decimal.ROUND_UP, decimal.ROUND_DOWN)[i % 2]),
    ),
    "threads": (lambda: torch.get_num_threads(), lambda i: torch.set_num_threads(1 + i % 2)),
    "precision": (
        lambda: len(torch.get_float32_matmul_precision()),
        lambda i: torch.set_float32_matmul_precision(("high", "highest")[i % 2]),
    ),
    "products in tf32": (
        lambda: 1.0 + torch.backends.cuda.matmul.allow_tf32,
        lambda i: setattr(torch.backends.cuda.matmul, "allow_tf32", i % 2 == 0),
    ),
    "digits shown": (
        lambda: torch._tensor_str.PRINT_OPTS.precision,
        lambda i: torch.set_printoptions(precision=4 + i % 3),
    ),
    "autocast": (
        lambda: float(torch.get_autocast_dtype("cpu") is torch.float16),
        lambda i: torch.set_autocast_dtype("cpu", (torch.float16, torch.bfloat16)[i % 2]),
    ),
    "warnings in the place of errors": (
        lambda: 1.0 + torch.is_deterministic_algorithms_warn_only_enabled(),
        lambda i: torch.use_deterministic_algorithms(False, warn_only=i % 2 == 0),
    ),
    "autocast's cache": (
        lambda: 1.0 + torch.is_autocast_cache_enabled(),
        lambda i: torch.set_autocast_cache_enabled(i % 2 == 1),
    ),
    "the attention of eval mode": (
        lambda: 1.0 + torch.backends.mha.get_fastpath_enabled(),
        lambda i: torch.backends.mha.set_fastpath_enabled(i % 2 == 1),
    ),
    "which attention": (
        lambda: 1.0 + torch.backends.cuda.math_sdp_enabled(),
        lambda i: torch.backends.cuda.enable_math_sdp(i % 2 == 1),
    ),
    "sparse tensors": (
        lambda: 1.0 + torch.sparse.check_sparse_tensor_invariants.is_enabled(),
        lambda i: torch._C._set_check_sparse_tensor_invariants(i % 2 == 0),
    ),
    "validation": (
        lambda: 1.0 + torch.distributions.Normal(0.0, 1.0)._validate_args,
        lambda i: torch.distributions.Distribution.set_default_validate_args(i % 2 == 1),
    ),
    "where models are kept": (lambda: len(torch.hub.get_dir()), lambda i: torch.hub.set_dir("m" * (i + 1))),
    "numpy's buffer": (lambda: np.getbufsize() / 4096, lambda i: np.setbufsize(4096 << i)),
    "swapping": (
        lambda: 1.0 + torch.__future__.get_swap_module_params_on_conversion(),
        lambda i: torch.__future__.set_swap_module_params_on_conversion(i % 2 == 0),
    ),
    "digits": (lambda: sys.get_int_max_str_digits(), lambda i: sys.set_int_max_str_digits(5000 + i)),
    "recursion": (lambda: sys.getrecursionlimit(), lambda i: sys.setrecursionlimit(2000 + i)),
    "locale": (
        lambda: len(locale.setlocale(locale.LC_NUMERIC)),
        lambda i: locale.setlocale(locale.LC_NUMERIC, ("C.UTF-8", "C")[i % 2]),
    ),
    "numpy": (divided, lambda i: np.seterr(all=("raise", "ignore")[i % 2])),
    "printed": (
        lambda: len(np.array2string(np.array([1 / 3]))),
        lambda i: np.set_printoptions(precision=8 - i % 4),
    ),
    "warnings": (warned, lambda i: warnings.simplefilter(("error", "ignore")[i % 2])),
    "name": (lambda: len(function.__name__), lambda i: setattr(function, "__name__", "f" * (i + 1))),
    "text": (lambda: len(function.__doc__ or ""), lambda i: setattr(function, "__doc__", "f" * (i + 1))),
    "class name": (lambda: len(type(PLAIN).__name__), lambda i: setattr(Plain, "__name__", "C" * (i + 1))),
    "class text": (lambda: len(PLAIN.__doc__ or ""), lambda i: setattr(Plain, "__doc__", "C" * (i + 1))),
    "metaclass": (lambda: Plain.rate, lambda i: setattr(Meta, "rate", float(i))),
    "match": (
        lambda: matched(PLAIN),
        lambda i: setattr(Plain, "__match_args__", (("second",), ("first",))[i % 2]),
    ),
    "registered": (lambda: 1.0 + isinstance(3, Abstract), lambda i: Abstract.register(int) if i == 2 else None),
    "protocol": (
        lambda: 1.0 + isinstance(PLAIN, Callish),
        lambda i: setattr(Plain, "made_late", None) if i == 3 else None,
    ),
    "subclasses": (lambda: len(Plain.__subclasses__()), lambda i: KEPT.append(type(f"Of{i}", (Plain,), {}))),
    "import": (imported, lambda i: setattr(sys.modules[MODULE], "rate", float(i))),
    "import from": (imported_name, lambda i: setattr(sys.modules[MODULE], "rate", float(i))),
    "another module": (imported, lambda i: sys.modules.update({MODULE: module(float(i))})),
    "random": (drawn, lambda i: random.seed(i)),
    "numpy's random": (lambda: float(rand()), lambda i: np.random.seed(i)),
}
KEPT: list[type] = []


def module(rate: float) -> types.ModuleType:
    made: Any = types.ModuleType(MODULE)
    made.rate = rate
    return made


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("name", CASES)
def test_what_a_program_asks_for_is_asked_at_each_call(name: str, mesh: Mesh) -> None:
    read, change = CASES[name]
    sys.modules[MODULE] = module(1.0)
    random.seed(0)
    np.random.seed(0)

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> Any:
        return x * read()

    x = distribute(torch.ones(2), mesh)
    for i in range(6):
        states = random.getstate(), np.random.get_state()
        found = step(x).full_tensor()
        random.setstate(states[0])
        np.random.set_state(states[1])
        assert found.tolist() == [pytest.approx(float(read()))] * 2, i
        change(i)


@pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
def test_an_import_that_is_not_reached_or_is_the_first_costs_no_trace_at_each_call(
    mesh: Mesh, traces: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "first_imported.py").write_text("rate = 2.0\n")
    monkeypatch.syspath_prepend(tmp_path)
    state = Pair()

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> Any:
        if state.first:
            import no_module_of_this_name  # type: ignore[import-not-found]

            return no_module_of_this_name.found
        import first_imported  # type: ignore[import-not-found]

        return x * first_imported.rate

    for _ in range(3):
        assert step(torch.ones(1)).full_tensor().item() == 2.0
    assert len(traces) <= 2
    sys.modules["first_imported"].rate = 3.0  # type: ignore[attr-defined]
    assert step(torch.ones(1)).full_tensor().item() == 3.0
    state.first = True
    with pytest.raises(ModuleNotFoundError):
        step(torch.ones(1))
    sys.modules.pop("first_imported")


def test_a_setting_that_a_program_sets_is_set_at_each_call(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor) -> Any:
        decimal.getcontext().prec = 5
        return x * float(THIRD / 3)

    for prec in (28, 9, 7, 5):
        decimal.getcontext().prec = prec
        assert step(torch.ones(1)).full_tensor().item() == pytest.approx(0.33333)
        assert decimal.getcontext().prec == 5


def test_a_default_dtype_that_a_program_sets_is_that_of_the_call(mesh: Mesh) -> None:
    """Its ops are the same ones, and give another dtype."""
    before = torch.get_default_dtype()

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        torch.set_default_dtype(DTYPE[0])
        made = torch.ones(4) / 3 + x
        torch.set_default_dtype(before)
        return made

    for DTYPE[0] in (torch.float32, torch.float64, torch.float32):
        found = step(torch.zeros(4)).full_tensor()
        assert found.equal(torch.ones(4, dtype=DTYPE[0]) / 3)
        assert found.dtype == DTYPE[0]


@pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
def test_the_collector_s_settings_are_the_user_s(mesh: Mesh, traces: list[str]) -> None:
    """Though it waits while other code is traced. What a program sets, each call sets."""
    before = gc.get_threshold()
    look = program(lambda x: (x * 2, gc.isenabled(), gc.get_threshold()), mesh=mesh)
    stop = program(lambda x: (x * 2, gc.disable()), mesh=mesh)
    x = torch.ones(2)
    try:
        for thresholds in (before, before, (600, 5, 5)):
            gc.set_threshold(*thresholds)
            assert look(x)[1:] == (True, thresholds)
            assert gc.get_threshold() == thresholds
        for _ in range(2):
            gc.enable()
            stop(x)
            assert not gc.isenabled()
        assert len(traces) == 3
    finally:
        gc.enable()
        gc.set_threshold(*before)


def test_an_operator_of_tensors_that_is_replaced_is_noticed(mesh: Mesh) -> None:
    @program(mesh=mesh)
    def step(x: torch.Tensor) -> Any:
        return x * 2.0

    multiply = torch.Tensor.__mul__
    torch.Tensor.__mul__ = multiply  # type: ignore[method-assign]
    assert step(torch.ones(1)).full_tensor().item() == 2.0
    torch.Tensor.__mul__ = lambda self, other: self + 9.0  # type: ignore[method-assign, assignment]
    found = step(torch.ones(1)).full_tensor()
    torch.Tensor.__mul__ = multiply  # type: ignore[method-assign]
    assert found.item() == 10.0
    assert step(torch.ones(1)).full_tensor().item() == 2.0


@pytest.mark.parametrize(
    "name, run",
    [
        ("__rsub__", lambda x: 1.0 - x),  # one function wraps this and others
        ("__pow__", lambda x: x**2),
        ("__contains__", lambda x: x + float(1.0 in x.shape)),  # which is not called
        ("__neg__", lambda x: -x),
        ("__len__", lambda x: x * len(x)),
        ("__reversed__", lambda x: reversed(x)),
    ],
)
def test_each_operator_that_is_replaced_is_followed(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, name: str, run: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    step, x = program(mesh=mesh)(run), torch.arange(1.0, 4.0)
    assert step(x).tolist() == run(x).tolist()
    monkeypatch.setattr(torch.Tensor, name, lambda self, *others: 7 if name == "__len__" else self + 9.0)
    assert step(x).tolist() == run(x).tolist()
    monkeypatch.undo()
    assert step(x).tolist() == run(x).tolist()


REPLACED = [
    (torch, "tanh", torch.sin),  # which PyTorch's own code names, and the user's does not
    (torch.Tensor, "flatten", lambda x, *dims: x.reshape(-1) * 2),
    (torch.nn.Module, "__call__", lambda self, x: self.forward(x) + 5),
]


@pytest.mark.parametrize("owner, name, other", REPLACED, ids=[name for _, name, _ in REPLACED])
def test_what_is_replaced_beneath_a_module_is_followed_and_so_is_putting_it_back(
    mesh: Mesh, owner: Any, name: str, other: Any
) -> None:
    model = torch.nn.Sequential(torch.nn.Tanh(), torch.nn.Flatten(0))
    before, x = getattr(owner, name), torch.ones(1, 2)
    step = program(lambda x: model(x), mesh=mesh)
    try:
        for function in (before, other, before, other, before):
            setattr(owner, name, function)
            torch.testing.assert_close(step(x).full_tensor(), model(x))
    finally:
        setattr(owner, name, before)
        if owner is torch.Tensor:
            del torch.Tensor.flatten  # where the base has it


class Pair:
    first: Any = None
    second: Any = None


@pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
def test_a_tensor_that_is_left_in_two_places_costs_no_trace(mesh: Mesh, traces: list[str]) -> None:
    state = Pair()
    state.first = state.second = distribute(torch.zeros(2), mesh)

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> Any:
        state.first = state.second = state.first * 0.5 + x
        return state.second * 1

    for _ in range(12):
        step(torch.ones(2))
        assert state.first is state.second
    assert len(traces) <= 2


@pytest.mark.parametrize("all_read", [True, False])
def test_a_ring_of_tensors_is_traced_for_each_place_and_no_more(mesh: Mesh, traces: list[str], all_read: bool) -> None:
    """Each call leaves another tensor at the place that it has, so that all places have others in the end."""

    def run(make: Callable[[torch.Tensor], Any], wrap: Callable[[Any], Any]) -> list[list[float]]:
        state = SimpleNamespace(ring=[make(torch.zeros(2)) for _ in range(3)], at=0)

        def step(x: torch.Tensor) -> Any:
            state.ring[state.at] = state.ring[state.at] * 0.5 + x
            state.at = (state.at + 1) % 3
            return torch.stack(state.ring).sum(0) if all_read else state.ring[state.at - 1] * 2

        call = wrap(step)
        return [call(torch.full((2,), float(i))).tolist() for i in range(20)]

    assert run(lambda t: distribute(t, mesh), program(mesh=mesh)) == run(lambda t: t, lambda step: step)
    assert len(traces) <= 6


def test_which_places_have_one_tensor_is_noticed(mesh: Mesh) -> None:
    def run(make: Callable[[torch.Tensor], Any], wrap: Callable[[Any], Any]) -> list[list[float]]:
        state, fixed = Pair(), make(torch.ones(2))
        state.first, state.second = make(torch.ones(2)), make(torch.ones(2))

        def step(x: torch.Tensor) -> Any:
            same = (state.first is state.second) + 2 * (state.second is fixed) + 4 * (state.first is fixed)
            state.first = state.first * 0.5 + x
            state.second = state.second + 1
            return x * same + state.second

        call, found = wrap(step), []
        for i in range(7):
            value = call(make(torch.full((2,), float(i))))
            found.append((value.full_tensor() if hasattr(value, "full_tensor") else value).tolist())
            if i in (1, 4):
                state.second = state.first
            if i == 2:
                state.first = fixed
            if i == 3:
                state.second = fixed
        return found

    ours = run(lambda tensor: distribute(tensor, mesh), lambda step: program(step, mesh=mesh))
    assert ours == run(lambda tensor: tensor, lambda step: step)


def test_data_that_two_tensors_share_no_more_is_noticed(mesh: Mesh) -> None:
    a, b = (distribute(torch.zeros(1), mesh) for _ in range(2))
    a.data = b.data

    @program(mesh=mesh)
    def step() -> Any:
        a.add_(1.0)
        return a * 10 + b

    assert [step().full_tensor().item() for _ in range(2)] == [11.0, 22.0]
    b.data = distribute(torch.full((1,), 5.0), mesh)
    assert step().full_tensor().item() == 35.0
