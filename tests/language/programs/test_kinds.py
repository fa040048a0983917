"""Kinds of Python's state, one a row: what a program reads of it, and how it changes between calls."""

from __future__ import annotations

import array
import collections
import contextlib
import functools
import logging
import operator
import queue
import sys
import threading
import types
import typing
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from monarch.language import Mesh, program
from monarch.language.programs.snapshot import Snapshot
from tests.language.alike import assert_alike


class Point(typing.NamedTuple):
    a: float


Row = tuple[Callable[[], Any], Callable[[Any, Any], Any], Callable[[Any], Any]]


def of(**state: Any) -> Callable[[], Any]:
    """State that is made anew for each world."""
    return lambda: SimpleNamespace(**{name: make() for name, make in state.items()})


def aliases(make: Callable[[], Any]) -> Callable[[], Any]:
    """The same container at two places."""

    def both() -> Any:
        made = make()
        return SimpleNamespace(one=made, two=made)

    return both


def put(holder: str, key: Any, value: Any) -> Callable[[Any], None]:
    return lambda s: getattr(s, holder).__setitem__(key, value)


def set_(holder: str, name: str, value: Any) -> Callable[[Any], None]:
    return lambda s: setattr(getattr(s, holder), name, value)


def emptied(s: Any, x: Any) -> Any:
    s.one.append(1)
    read = x * (1.0 + len(s.two))
    s.one.clear()
    return read


def replaced(s: Any, x: Any) -> Any:
    s.one["a"] = 2.0
    read = x * s.two["a"]
    s.one["a"] = 1.0
    return read


class Base:
    pass


ROWS: dict[str, Row] = {
    "how long a deque may be": (
        of(q=lambda: collections.deque([1.0, 2.0], 2)),
        lambda s, x: (s.q.append(3.0), x * len(s.q))[1],
        lambda s: setattr(s, "q", collections.deque(s.q, 3)),
    ),
    "what makes entries": (
        of(d=lambda: collections.defaultdict(lambda: 2.0)),
        lambda s, x: (s.d.pop("u", None), x * s.d["u"])[1],
        set_("d", "default_factory", lambda: 5.0),
    ),
    "an ordered dict's order": (
        of(d=lambda: collections.OrderedDict(a=1.0, b=2.0)),
        lambda s, x: x * next(iter(s.d.values())),
        lambda s: s.d.move_to_end("a"),
    ),
    "an instance's order": (
        of(o=lambda: SimpleNamespace(a=1.0, b=2.0)),
        lambda s, x: x * next(iter(vars(s.o).values())),
        lambda s: vars(s.o).update(a=vars(s.o).pop("a")),
    ),
    "a counter's attribute": (
        of(c=lambda: collections.Counter("a")),
        lambda s, x: x * getattr(s.c, "scale", 1),
        set_("c", "scale", 3),
    ),
    "a partial's attribute": (
        of(f=lambda: functools.partial(max, 1)),
        lambda s, x: x * getattr(s.f, "scale", s.f(2)),
        set_("f", "scale", 3),
    ),
    "one list at two places": (aliases(list), emptied, lambda s: setattr(s, "two", list(s.two))),
    "two lists at one place": (of(one=list, two=list), emptied, lambda s: setattr(s, "two", s.one)),
    "two dicts at one place": (
        of(one=lambda: {"a": 1.0}, two=lambda: {"a": 1.0}),
        replaced,
        lambda s: setattr(s, "two", s.one),
    ),
    "which list it is": (
        of(one=list, two=list),
        lambda s, x: x * (2.0 if s.one is s.two else 1.0),
        lambda s: setattr(s, "two", s.one),
    ),
    "which tuple it is": (
        aliases(lambda: tuple(map(float, "12"))),
        lambda s, x: x * (2.0 if s.one is s.two else 1.0),
        lambda s: setattr(s, "two", tuple(map(float, "12"))),
    ),
    "which tuple it is, of those in a list": (
        of(all=lambda: [tuple(map(float, "1")), tuple(map(float, "1"))]),
        lambda s, x: x * len({id(each) for each in s.all}),
        lambda s: s.all.__setitem__(1, s.all[0]),
    ),
    "which frozenset it is": (
        aliases(lambda: frozenset([1.0])),
        lambda s, x: x * (2.0 if operator.is_(s.one, s.two) else 1.0),
        lambda s: setattr(s, "two", frozenset([1.0])),
    ),
    "which method it is": (
        aliases(lambda: [].append),
        lambda s, x: x * (2.0 if s.one is s.two else 1.0),
        lambda s: setattr(s, "two", s.one.__self__.append),
    ),
    "an event": (of(e=threading.Event), lambda s, x: x * (2.0 if s.e.is_set() else 1.0), lambda s: s.e.set()),
    "an event that it sets": (
        of(e=threading.Event),
        lambda s, x: (s.e.set(), x * 2.0)[1],
        lambda s: s.e.clear(),
    ),
    "a lock": (of(e=threading.Lock), lambda s, x: x * (2.0 if s.e.locked() else 1.0), lambda s: s.e.acquire()),
    "a semaphore": (of(e=lambda: threading.Semaphore(3)), lambda s, x: x * s.e._value, lambda s: s.e.acquire()),
    "a queue": (of(q=queue.Queue), lambda s, x: x * (1 + s.q.qsize()), lambda s: s.q.put(3)),
    "a logger's level": (
        of(log=lambda: logging.Logger("own", 30)),
        lambda s, x: x * (2.0 if s.log.isEnabledFor(logging.INFO) else 1.0),
        lambda s: s.log.setLevel(logging.DEBUG),
    ),
    "a list of a library's": (of(), lambda s, x: x * len(sys.argv), lambda s: sys.argv.append("more")),
    "a backend's flag": (
        of(),
        lambda s, x: x * (2.0 if torch.backends.cudnn.benchmark else 1.0),
        lambda s: setattr(torch.backends.cudnn, "benchmark", True),
    ),
    "a mode of PyTorch's": (
        of(),
        lambda s, x: x * len(torch.get_float32_matmul_precision()),
        lambda s: torch.set_float32_matmul_precision("high"),
    ),
    "a generator of PyTorch's": (
        of(g=torch.Generator),
        lambda s, x: x * float(s.g.initial_seed() % 7),
        lambda s: s.g.manual_seed(3),
    ),
    "a named tuple": (of(p=lambda: Point(2.0)), lambda s, x: x * s.p.a, lambda s: setattr(s, "p", Point(3.0))),
    "bytes": (of(b=lambda: bytearray(b"ab")), lambda s, x: x * memoryview(s.b)[0], put("b", 0, 5)),
    "an array": (of(b=lambda: array.array("d", [1.0, 2.0])), lambda s, x: x * sum(s.b), put("b", 0, 5.0)),
    "a NumPy array": (of(b=lambda: np.ones(3)), lambda s, x: x * float(s.b.sum()), put("b", 0, 5.0)),
    "bases": (
        of(o=lambda: type("Made", (type("First", (Base,), {"k": 1.0}),), {})()),
        lambda s, x: x * s.o.k,
        lambda s: setattr(type(s.o), "__bases__", (type("Second", (Base,), {"k": 2.0}),)),
    ),
}


@pytest.fixture
def restored() -> Any:
    """The settings of the process that rows change."""
    argv, flag, precision = list(sys.argv), torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision()
    yield
    sys.argv[:] = argv
    torch.backends.cudnn.benchmark = flag
    torch.set_float32_matmul_precision(precision)


@pytest.mark.usefixtures("restored")
@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("name", ROWS)
def test_a_change_is_seen_at_the_next_call(name: str, mesh: Mesh) -> None:
    make, use, change = ROWS[name]
    flags = torch.backends.cudnn.benchmark, torch.get_float32_matmul_precision(), list(sys.argv)

    def case(world: Any) -> Any:
        torch.backends.cudnn.benchmark = flags[0]
        torch.set_float32_matmul_precision(flags[1])
        sys.argv[:] = flags[2]
        state = make()
        return lambda x: use(state, x), lambda call: change(state) if call == 4 else None

    # What both worlds share is changed by the first one: the program has to see it at the same call.
    assert_alike(case, mesh)


@pytest.mark.parametrize(
    ("make", "change", "read"),
    [
        (lambda: bytearray(b"ab"), lambda b: b.append(7), bytes),
        (lambda: array.array("d", [1.0]), lambda a: a.append(2.0), list),
        (lambda: np.ones(2), lambda a: a.fill(3.0), list),
        (lambda: collections.OrderedDict(a=1, b=2), lambda d: d.move_to_end("a"), list),
        (lambda: collections.deque([1, 2], 2), lambda q: q.append(3), list),
        (lambda: collections.defaultdict(int), lambda d: setattr(d, "default_factory", str), lambda d: d["u"]),
    ],
)
def test_an_exception_takes_a_change_back(make: Any, change: Any, read: Any, mesh: Mesh) -> None:
    state = make()

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        change(state)
        raise KeyError("the user's own")

    with pytest.raises(KeyError):
        step(torch.ones(2))
    assert read(state) == read(make())


def test_the_user_s_own_methods_are_not_called_to_look() -> None:
    class Strict(dict[str, int]):
        def __setitem__(self, key: str, value: int) -> None:
            raise AssertionError

        def clear(self) -> None:
            raise AssertionError

    class Counted(list[int]):
        def __iter__(self) -> Any:
            raise AssertionError

        def extend(self, values: Any) -> None:
            raise AssertionError

    one, two = Strict(a=1), Counted()
    list.append(two, 1)
    snapshot = Snapshot()
    snapshot.visit(one)
    snapshot.visit(two)
    dict.__setitem__(one, "a", 2)
    list.clear(two)
    snapshot.restore()
    assert one["a"] == 1
    assert two[0] == 1


def test_a_namespace_is_globals_and_data(mesh: Mesh) -> None:
    names: dict[str, Any] = {"rate": 1.0, "other": 2.0}
    exec("def scaled(x):\n    return x * rate", names)

    @program(mesh=mesh)
    def step(x: torch.Tensor) -> Any:
        return names["scaled"](x) + names["other"]

    assert step(torch.ones(1)).tolist() == [3.0]
    names["other"] = 5.0
    assert step(torch.ones(1)).tolist() == [6.0]
    names["rate"] = 2.0
    assert step(torch.ones(1)).tolist() == [7.0]
    holder = types.SimpleNamespace(names=names)

    @program(mesh=mesh)
    def counting(x: torch.Tensor) -> Any:
        holder.names["other"] = holder.names["other"] + 1
        return names["scaled"](x)

    for expected in (6.0, 7.0, 8.0):
        counting(torch.ones(1))
        assert names["other"] == expected


def test_code_in_a_namespace_of_the_call_gives_a_view_of_an_argument(mesh: Mesh) -> None:
    row = program(lambda x: eval("x[1]", {"x": x}), mesh=mesh)
    assert row(torch.arange(4.0).view(2, 2)).tolist() == [2.0, 3.0]


@pytest.mark.parametrize("keys", [("a", "b"), (torch.nn.ReLU(), torch.nn.ReLU())], ids=["names", "objects"])
def test_a_defaultdicts_factory_keys_and_entries_are_expected(
    keys: tuple[Any, Any], mesh: Mesh, traces: list[str]
) -> None:
    """Also by the check that is one function, which takes over after some calls."""
    first, second = keys
    table: collections.defaultdict[Any, float] = collections.defaultdict(float, {first: 2.0, second: 3.0})

    def factor() -> float:
        places = sum(place * (entry is first) for place, entry in enumerate(table))
        return 100 * table[first] + 10 * len(table) + places + 0.5 * (table.default_factory is None)

    step = program(lambda x: x * factor(), mesh=mesh)
    changes: list[Callable[[], object]] = [
        dict,
        lambda: table.update({first: 5.0}),
        lambda: table.pop(second),
        lambda: setattr(table, "default_factory", None),
        lambda: table.update({"c": 1.0}),
        lambda: table.update({first: table.pop(first)}),
    ]
    for number, change in enumerate(changes):
        change()
        assert [step(torch.ones(1)).item() for _ in range(6)] == [factor()] * 6
        assert len(traces) == number + 1


def test_names_that_a_program_computes_are_taken_back(mesh: Mesh) -> None:
    """A namespace that only `globals` gives it: an exception leaves no name, and no number, behind."""
    names: dict[str, Any] = {"fail": False}
    exec(
        "def count(x):\n    globals().setdefault('new', 0)\n    globals()['new'] += 1\n"
        "    if fail: raise KeyError\n    return x * new",
        names,
    )
    step = program(names["count"], mesh=mesh)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for fail, left in ((True, None), (False, 1), (True, 1), (False, 2)):
            names["fail"] = fail
            with pytest.raises(KeyError) if fail else contextlib.nullcontext():
                assert step(torch.ones(1)).item() == left
            assert names.get("new") == left
