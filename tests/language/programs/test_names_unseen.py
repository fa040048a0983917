"""Attributes that a program reads by names that its code does not show, and objects that it finds under names of their
own: what changes there is noticed."""

from __future__ import annotations

import builtins
import collections
import copy
import dataclasses
import functools
import inspect
import operator
import pickle
import string
import sys
import types
import typing
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from monarch.language import Mesh, distribute, program
from tests.language.alike import assert_alike, nothing

pytestmark = pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")

LAZY = types.ModuleType("lazy")
FOUND: list[Any] = []
LAZY.__dict__["__getattr__"] = lambda name: FOUND[0]
NAME = "hidden_rate"


class Settings:
    """Something with numbers."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Matched(Settings):
    __match_args__ = ("hidden_rate",)


def by_position(settings: Any) -> float:
    match settings:
        case Matched(rate):
            return float(rate)
    return 0.0


@typing.runtime_checkable
class HasRate(typing.Protocol):
    hidden_rate: float


def scaled(x: Any) -> Any:
    return x * scaled.options.rate  # type: ignore[attr-defined]


FOUND_AS = ["found"]


def named(value: Any) -> Any:
    holder = Settings()
    setattr(holder, FOUND_AS[0], value)
    return holder


def raised(pool: list[Any]) -> float:
    def last() -> Any:
        yield 1
        return pool[0]

    rows = last()
    next(rows)
    try:
        next(rows)
    except StopIteration as stop:
        return float(stop.value.rate)
    return 0.0


READS: dict[str, Callable[[Any], float]] = {
    "a pattern by position": by_position,
    "getattr of a module": lambda settings: float(builtins.getattr(settings, NAME)),
    "a method of C's": lambda settings: float(METHOD[0](NAME)),
    "getattr_static": lambda settings: float(inspect.getattr_static(settings, NAME)),
    "a copy's bytes": lambda settings: float(pickle.dumps(settings)[-20]) + len(pickle.dumps(settings)),
    "a text's field": lambda settings: float(TEXT.format(settings)),
    "a text's method": lambda settings: float((TEXT.format,)[0](settings)),
    "a formatter": lambda settings: float(string.Formatter().format(TEXT, settings)),
    "a protocol": lambda settings: float(isinstance(settings, HasRate)),
}
METHOD: list[Callable[[str], Any]] = []
TEXT = "{0.hidden_rate}"


@pytest.mark.parametrize("read", READS)
def test_what_is_read_by_a_name_that_no_code_shows_is_noticed(mesh: Mesh, read: str) -> None:
    def case(w: dict[str, Any]) -> Any:
        settings = Matched(hidden_rate=2.0)
        method = settings.__getattribute__

        def step(x: Any) -> Any:
            return x * READS[read](settings)

        def change(call: int) -> None:
            if call == 4:
                del settings.hidden_rate
            if call < 4:
                settings.hidden_rate = 3.0**call + 0.1

        def make(call: int) -> torch.Tensor:
            METHOD[:] = [method]
            return torch.ones(2)

        return step, change, make

    assert_alike(case, mesh, 4 if read != "a protocol" else 6)


@dataclasses.dataclass
class Registered:
    field_rate: float


torch.export.register_dataclass(Registered)
REGISTERED = Registered(1.0)

OF_MODULES: dict[str, Callable[[], float]] = {
    "the leaves of a registered dataclass": lambda: float(sum(pytree.tree_leaves(REGISTERED))),
    "the globals of a function": lambda: float(by_position.__globals__["SET_" + "LATER"]),
    "an import": lambda: float(__import__("made_later").rate),
    "the module of a class": lambda: float(len(HasRate.__module__) + len(by_position.__module__)),
}
SET_LATER = 0.0


@pytest.mark.parametrize("read", OF_MODULES)
def test_what_is_read_of_modules_is_noticed(mesh: Mesh, read: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def case(w: dict[str, Any]) -> Any:
        def make(call: int) -> torch.Tensor:
            made = types.ModuleType("made_later")
            made.rate = REGISTERED.field_rate = call + 1.0  # type: ignore[attr-defined]
            monkeypatch.setitem(globals(), "SET_LATER", call + 1.0)
            monkeypatch.setitem(sys.modules, "made_later", made)
            monkeypatch.setattr(HasRate if call % 2 else by_position, "__module__", "tests" * call)
            return torch.ones(2)

        return lambda x: x * OF_MODULES[read](), nothing, make

    assert_alike(case, mesh)


UNDER: dict[str, Callable[[Any, list[Any]], Any]] = {
    "a function's attribute": lambda x, pool: scaled(x),
    "an attribute of a list": lambda x, pool: x * ROWS.options.rate,
    "a namespace's keyword": lambda x, pool: x * types.SimpleNamespace(options=pool[0]).options.rate,
    "setattr": lambda x, pool: (setattr(scaled, "other", pool[0]), x * scaled.other.rate)[1],  # type: ignore[attr-defined, func-returns-value]
    "a computed name": lambda x, pool: x * named(pool[0]).found.rate,
    "computed keywords": lambda x, pool: x * types.SimpleNamespace(**dict(zip(FOUND_AS, pool, strict=True))).found.rate,
    "a module's __getattr__": lambda x, pool: x * LAZY.options.rate,
    "a partial's function": lambda x, pool: x * functools.partial(pool[0]).func.rate,
    "what a generator returns": lambda x, pool: x * raised(pool),
}


class Rows(list[Any]):
    options: Any


ROWS = Rows()


class Rated(Settings):
    def __call__(self) -> None:
        """Nothing; a partial wants one."""


@pytest.mark.parametrize("under", UNDER)
def test_an_object_that_is_found_under_another_name_is_read_anew(mesh: Mesh, under: str) -> None:
    def case(w: dict[str, Any]) -> Any:
        pool = [Rated(rate=2.0)]

        def step(x: Any) -> Any:
            return UNDER[under](x, pool)

        def change(call: int) -> None:
            pool[0].rate = call + 3.0

        def make(call: int) -> torch.Tensor:
            scaled.options = pool[0]  # type: ignore[attr-defined]
            scaled.other = None  # type: ignore[attr-defined]
            FOUND[:] = pool
            ROWS.options = pool[0]
            return torch.ones(2)

        return step, change, make

    assert_alike(case, mesh)


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_a_copy_that_a_program_leaves_has_what_the_object_has_then(mesh: Mesh, make: Callable[[Any], Any]) -> None:
    def case(w: dict[str, Any]) -> Any:
        kept = Settings(best=None, now=Settings(unread=1))

        def step(x: Any) -> Any:
            kept.best = make(kept.now)
            return x * 2

        return step, lambda call: setattr(kept.now, "unread", call + 2)

    assert_alike(case, mesh)


def test_namespaces_that_c_code_shows_or_compares_are_read_whole(mesh: Mesh) -> None:
    def case(w: dict[str, Any]) -> Any:
        first, second, same = types.SimpleNamespace(q=1.5), types.SimpleNamespace(q=1.5), operator.eq

        def step(x: Any) -> Any:
            return x * len("%s" % first) + operator.eq(first, second) + any(map(same, [first], [second]))  # noqa: UP031

        def change(call: int) -> None:
            first.q = 10.0**call + 0.5 if call != 2 else 1.5

        return step, change

    assert_alike(case, mesh)


class Answering(type):
    """A class of its classes has any attribute."""

    def __getattr__(cls, name: str) -> float:
        return 3.0


class Answered(metaclass=Answering):
    def __init__(self, x: Any) -> None:
        self.x = x


def test_a_class_that_answers_any_attribute_is_no_program(mesh: Mesh) -> None:
    made = Answered(2.0)
    step = program(lambda x: Answered(x).x * made.x * Answered.rate, mesh=mesh)
    assert step(distribute(torch.ones(2), mesh)).tolist() == [6.0, 6.0]


def test_another_method_of_the_same_object_of_c_is_noticed(mesh: Mesh) -> None:
    def case(w: dict[str, Any]) -> Any:
        rows = [3.0, 5.0, 3.0]
        ask: list[Callable[..., Any]] = [rows.count, rows.__len__]

        def step(x: Any) -> Any:
            return x * ask[0](5.0) + ask[1]()

        def change(call: int) -> None:
            if call == 1:
                ask[0] = rows.index
            elif call == 2:
                ask[1] = collections.Counter(rows).__len__
            elif call == 3:
                rows.insert(0, 1.0)

        return step, change

    assert_alike(case, mesh)


@pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
def test_getattr_of_a_constant_name_reads_that_name_alone(mesh: Mesh, traces: list[str]) -> None:
    counted = Settings(rate=2.0, label="")

    def step(x: Any) -> Any:
        return x * getattr(counted, "rate", 1.0)

    traced = program(step, mesh=mesh)
    for call in range(5):
        counted.label = f"call {call}"
        assert traced(distribute(torch.ones(1), mesh)).item() == 2.0
    assert traces == ["step"]
