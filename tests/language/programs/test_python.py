"""What Python lets one write, with changes from outside between the calls: a program gives and leaves what the same
code does without it, down to which objects are the same."""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import enum
import functools
import itertools
import types
import typing
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from monarch.language import Mesh
from tests.language.alike import assert_alike, nothing

CASES: list[Callable[..., Any]] = []
Case = Callable[..., Any]


def case(function: Case) -> Case:
    CASES.append(function)
    return function


# -- objects and classes ---------------------------------------------------------------------------------------------


@case
def dataclass_state(w):
    @dataclasses.dataclass
    class State:
        count: int = 0
        mean: Any = None
        history: list[int] = dataclasses.field(default_factory=list)

    state = State()

    def step(x):
        state.count += 1
        mean = x.detach().mean(0)
        state.mean = mean if state.mean is None else 0.9 * state.mean + 0.1 * mean
        if state.count % 2:
            state.history.append(state.count)
        return x * state.count + state.mean

    return step, lambda call: setattr(state, "count", 7) if call == 3 else None


@case
def frozen_dataclass(w):
    @dataclasses.dataclass(frozen=True)
    class Config:
        rate: float = 1.0

    state = {"config": Config()}

    def step(x):
        state["config"] = dataclasses.replace(state["config"], rate=state["config"].rate * 0.5)
        return x * state["config"].rate + sum(dataclasses.asdict(state["config"]).values())

    return step, lambda call: state.update(config=Config(3.0)) if call == 2 else None


@case
def descriptor(w):
    class Halved:
        def __set_name__(self, owner, name):
            self.name = f"_{name}"

        def __get__(self, instance, owner=None):
            return getattr(instance, self.name, 1.0)

        def __set__(self, instance, value):
            setattr(instance, self.name, value / 2)

    class Holder:
        rate = Halved()

    holder = Holder()

    def step(x):
        holder.rate = holder.rate * 3
        return x * holder.rate

    return step, lambda call: setattr(holder, "rate", 0.5)


@case
def attributes_from_a_dict(w):
    class Holder:
        def __init__(self):
            self.store = {"a": 1.0}

        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return self.__dict__["store"].get(name, 9.0)

        def __setattr__(self, name, value):
            if name == "store":
                self.__dict__[name] = value
            else:
                self.store[name] = value

    holder = Holder()

    def step(x):
        holder.c = holder.a + 1
        return x * holder.a + holder.b

    return step, lambda call: setattr(holder, "b" if call % 2 else "a", float(call))


@case
def slots_and_a_dict(w):
    class One:
        __slots__ = ("x", "y")

    class Two(One):
        __slots__ = ("__dict__", "z")

    two = Two()
    two.x, two.z = 1.0, 2

    def step(x):
        two.y = getattr(two, "y", 0) + two.x
        two.w = two.z
        return x * two.y

    return step, lambda call: setattr(two, "x", float(call))


@case
def other_bases(w):
    class A:
        def f(self, x):
            return x + 1

    class B(A):
        def f(self, x):
            return super().f(x) * 2

    class C(A):
        def f(self, x):
            return super().f(x) * 3

    class D(B, C):
        pass

    d = D()

    def change(call):
        if call == 1:
            D.__bases__ = (C, B)

    return lambda x: d.f(x), change


@case
def metaclass(w):
    class Counting(type):
        @property
        def rate(cls):
            return cls._rate

        def __call__(cls, *args):
            made = super().__call__(*args)
            cls.made += 1
            return made

    class Holder(metaclass=Counting):
        _rate, made = 2.0, 0

    def step(x):
        Holder()
        return x * Holder.rate + Holder.made

    return step, lambda call: setattr(Holder, "_rate", float(call))


@case
def operators(w):
    class Value:
        def __init__(self, number):
            self.number = number

        def __add__(self, other):
            return Value(self.number + other)

        def __rmul__(self, other):
            return self.number * other

        def __iter__(self):
            return iter([self.number, 2 * self.number])

        def __contains__(self, other):
            return other < self.number

        def __bool__(self):
            return self.number > 2

    state = {"value": Value(1.0)}

    def step(x):
        value = state["value"]
        state["value"] = value + 1
        return x * value + sum(value) + (1 if 2 in value else 0) + (10 if value else 0)

    return step, lambda call: setattr(state["value"], "number", float(call))


@case
def exchanged_class(w):
    class Doubled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    def change(call):
        if call == 2:
            w["m"].__class__ = Doubled

    return lambda x: w["m"](x), change


@case
def weak_containers(w):
    class Thing:
        pass

    state = {"thing": Thing()}
    state["thing"].rate = 1.0
    ref = weakref.ref(state["thing"])
    rates = weakref.WeakKeyDictionary({state["thing"]: 1.0})

    def step(x):
        thing = ref()
        return x * (9.0 if thing is None else thing.rate) + len(rates)

    def change(call):
        state["thing"].rate = float(call)
        if call == 2:
            state["thing"] = Thing()

    return step, change


# -- functions, iterators, variables ---------------------------------------------------------------------------------


@case
def iterators(w):
    def doubling():
        number = 1.0
        while True:
            yield number
            number *= 2

    numbers, count, listed = doubling(), itertools.count(1), iter([float(i) for i in range(9)])
    return lambda x: x * next(numbers) + next(count) - next(listed), lambda call: next(count) if call == 1 else None


@case
def mutable_defaults(w):
    def helper(x, cache=[], *, seen={}):  # noqa: B006
        cache.append(x.detach().sum())
        seen["count"] = seen.get("count", 0) + 1
        return x * len(cache) + seen["count"]

    return lambda x: helper(x), lambda call: helper.__defaults__[0].clear() if call == 3 else None


@case
def function_attribute(w):
    def step(x):
        step.count = getattr(step, "count", 0) + 1
        return x * step.count

    return step, nothing


@case
def cells_of_others(w):
    def counter():
        count = 0

        def up():
            nonlocal count
            count += 1

        return up, lambda: count

    up, get = counter()

    def step(x):
        up()
        return x * get()

    return step, lambda call: up() if call == 2 else None


@case
def dispatching(w):
    @functools.singledispatch
    def scaled(by, x):
        return x

    scaled.register(int)(lambda by, x: x * by)
    scaled.register(str)(lambda by, x: x + len(by))
    state = {"by": 2}

    def change(call):
        state["by"] = [3, "abc", 2.0, None][call % 4]
        if call == 3:
            scaled.register(type(None))(lambda by, x: x * 100)

    return lambda x: scaled(state["by"], x), change


@case
def dispatching_methods(w):
    class Holder:
        @functools.singledispatchmethod
        def scaled(self, by, x):
            return x

        def shifted(self, x, by):
            return x + by

        later = functools.partialmethod(shifted, by=2.0)

    holder = Holder()

    def change(call):
        if call == 1:
            vars(Holder)["scaled"].register(str, lambda self, by, x: x * 5)
        if call == 2:
            vars(Holder)["scaled"].register(str, lambda self, by, x: x * 7)
        if call == 3:
            vars(Holder)["later"].keywords["by"] = 3.0
        if call == 4:
            vars(Holder)["later"].keywords = {"by": 4.0}

    return lambda x: holder.later(holder.scaled("a", x)), change


@case
def cached(w):
    class Holder:
        rate = 2.0

        @functools.cached_property
        def thrice(self):
            return self.rate * 3

        def scaled(self, x, by):
            return x * by * self.rate

        doubled = functools.partialmethod(scaled, by=2.0)

    holder, twice = Holder(), functools.cache(lambda number: number * 2.0)

    def step(x):
        twice(1)
        return holder.doubled(x) * holder.thrice + twice.cache_info().hits

    def change(call):
        holder.rate = float(call)
        if call == 2:
            del holder.thrice
            Holder.doubled = functools.partialmethod(Holder.scaled, by=5.0)

    return step, change


@case
def context_variable(w):
    variable = contextvars.ContextVar("variable", default=1.0)

    def step(x):
        token = variable.set(variable.get() * 2)
        y = x * variable.get()
        variable.reset(token)
        return y

    return step, lambda call: variable.set(float(call))


@case
def exceptions(w):
    class Guard:
        depth = 0

        def __enter__(self):
            self.depth += 1

        def __exit__(self, *error):
            self.depth -= 1
            return True

    guard, state = Guard(), {"count": 0, "errors": []}

    def step(x):
        y = x
        with guard:
            y = y * guard.depth
            if state["count"] % 2:
                raise ValueError
            y = y + 5
        try:
            {}[state["count"]]
        except KeyError as error:
            state["errors"].append(str(error))
        finally:
            state["count"] += 1
        return y

    return step, nothing


@case
def containers(w):
    ordered = collections.OrderedDict(a=1.0, b=2.0)
    default = collections.defaultdict(lambda: 1.0)
    ring = collections.deque([1.0, 2.0, 3.0], maxlen=3)
    chained = collections.ChainMap({"x": 1.0}, {"x": 2.0, "y": 3.0})
    counted = collections.Counter("abca")

    def step(x):
        key, value = next(iter(ordered.items()))
        ordered.move_to_end(key)
        default["count"] += 1
        ring.rotate(1)
        return x * value * ring[0] + default["count"] + chained["x"] + counted.most_common(1)[0][1]

    def change(call):
        ring.append(float(call))
        counted.update("b" * call)
        if call == 2:
            chained.maps[0].pop("x")

    return step, change


@case
def memory_of_others(w):
    numbers, rates = array.array("f", [1.0, 2.0]), {"rate": 1.0}
    seen, raw = types.MappingProxyType(rates), bytearray(b"ab")

    def step(x):
        return x * numbers[0] * seen["rate"] + raw[0]

    def change(call):
        numbers[0] = float(call)
        rates["rate"] = call + 0.5
        raw[0] = call

    return step, change


@case
def enums(w):
    class Flags(enum.IntFlag):
        A = 1
        B = 2

    state = {"flags": Flags.A}

    def step(x):
        state["flags"] ^= Flags.B
        return x * int(state["flags"])

    return step, nothing


# -- objects that are returned ---------------------------------------------------------------------------------------


@case
def returned_state(w):
    class Pair(typing.NamedTuple):
        count: float
        total: Any = None

    total = w["make"](torch.zeros(4))
    state = {"last": total, "pair": Pair(0.0), "kept": []}

    def step(x):
        total.add_(x[0])
        state["last"] = x.mean(0)
        state["pair"] = state["pair"]._replace(count=1.0, total=state["last"])
        state["kept"].append(state["last"])
        return total, total[1:], state["last"], state["pair"], state, x * 2, [total]

    return step, lambda call: (total.mul_(2), state["last"].add_(1))


@case
def one_result_twice(w):
    state = {"gate": True}

    def step(x):
        states = []
        for _ in range(3):
            x = w["m"](x).detach() if state["gate"] else x
            states.append(x)
        return x, tuple(states)

    return step, lambda call: state.update(gate=call % 2 == 1)


@case
def masks_made_inside(w):
    bias = torch.arange(4.0)

    def step(x):
        mask = bias.clone()
        mask[0] = 5
        mask[1:3] = torch.tensor(2.0)
        return x * mask + bias

    return step, lambda call: bias.add_(1)


@case
def best_loss(w):
    state = {"best": None}

    def step(x):
        loss = x.mean()
        state["best"] = loss if state["best"] is None else torch.minimum(loss, state["best"])
        return state["best"]

    return step, nothing


@pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_it_is_what_it_is_without_a_program(case: Case, mesh: Mesh) -> None:
    assert_alike(case, mesh)
