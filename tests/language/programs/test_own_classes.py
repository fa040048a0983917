"""Containers, classes, functions and caches of one's own: what a program reads of them, also where that comes later."""

from __future__ import annotations

import collections
import enum
import functools
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch.language import Mesh, distribute, program
from tests.language.alike import assert_alike, nothing

pytestmark = pytest.mark.filterwarnings("ignore::monarch.language.errors.TracedAgainWarning")


class Registry(dict[str, float]):
    """A dict with an attribute, and a method that asks its base."""

    scale: float

    def get(self, key: str) -> float:  # type: ignore[override]
        return (super().get(key) or 0.0) * self.scale


class Recent(list[Any]):
    last: Any


class Pair(tuple[float, float]):
    bias: float

    def total(self) -> float:
        return self[0] + self.bias


@pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
def test_containers_of_one_s_own_class_have_attributes_and_methods(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    found, recent, pair = Registry(a=2.0), Recent([1.0]), Pair((1.0, 2.0))
    found.scale, recent.last, pair.bias = 1.0, None, 3.0

    def step(x: Any) -> Any:
        recent.last = x * 2
        recent[0] = x
        return x * found.get("a") + pair.total()

    traced = program(step, mesh=mesh)

    def check(calls: int) -> None:
        for call in range(calls):
            x = torch.full((2,), 1.0 + call)
            assert traced(distribute(x, mesh)).tolist() == step(x).tolist()
            traced(distribute(x, mesh))
            assert recent.last.tolist() == (x * 2).tolist() and recent[0].tolist() == x.tolist()

    check(3)
    found.scale = 5.0
    check(3)
    pair.bias = 9.0
    check(2)
    found["a"] = 1.5
    check(2)
    monkeypatch.setattr(Registry, "get", lambda self, key: 100.0)
    check(2)


class Late:
    """A class that is given an attribute later."""


def scaled(x: Any) -> Any:
    return x * getattr(Late, "scale", 1.0) * scaled.by + getattr(scaled, "more", 0.0)  # type: ignore[attr-defined]


def test_attributes_that_a_class_or_a_function_has_not_yet_are_noticed(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scaled, "by", 2.0, raising=False)

    def step(x: Any) -> Any:
        y = scaled(x)
        Late.scale = 3.0  # type: ignore[attr-defined]
        scaled.calls = getattr(scaled, "calls", 0) + 1  # type: ignore[attr-defined]
        return y

    traced, x = program(step, mesh=mesh), distribute(torch.ones(1), mesh)
    try:
        assert [traced(x).item() for _ in range(3)] == [2.0, 6.0, 6.0]
        scaled.by = 3.0  # type: ignore[attr-defined]
        assert [traced(x).item() for _ in range(2)] == [9.0, 9.0]
        scaled.more = 1.0  # type: ignore[attr-defined]
        assert [traced(x).item() for _ in range(2)] == [10.0, 10.0]
        Late.scale = 5.0  # type: ignore[attr-defined]
        del scaled.more  # type: ignore[attr-defined]
        assert [traced(x).item() for _ in range(2)] == [15.0, 9.0]
        assert scaled.calls == 9  # type: ignore[attr-defined]
    finally:
        del Late.scale, scaled.calls  # type: ignore[attr-defined]


@pytest.mark.parametrize("size", [None, 128])
@pytest.mark.parametrize("calls", [1, 2, 5])
def test_a_cache_that_is_cleared_is_asked_again(calls: int, size: int | None, mesh: Mesh) -> None:
    settings = {"base": 2.0}

    @functools.lru_cache(size)
    def scale(by: int) -> float:
        return by * settings["base"]

    traced, x = program(lambda x: x * scale(3), mesh=mesh), distribute(torch.ones(1), mesh)
    assert [traced(x).item() for _ in range(calls)] == [6.0] * calls
    settings["base"] = 5.0
    assert [traced(x).item() for _ in range(calls)] == [6.0] * calls  # as remembered
    scale.cache_clear()
    assert [traced(x).item() for _ in range(calls)] == [15.0] * calls


class Patched(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


class Slotted:
    __slots__ = ("__dict__", "scale")


def test_another_name_in_the_place_of_one_that_is_not_read_is_noticed(mesh: Mesh) -> None:
    """As many names as before, of which no code names the new one, or asks for it alone."""
    model, slotted, x = Patched(), Slotted(), torch.ones(1)
    slotted.scale, slotted.unread = 3.0, 1  # type: ignore[attr-defined]
    call = program(lambda x: model(x), mesh=mesh)
    ask = program(lambda x: x * slotted.scale * (5.0 if hasattr(slotted, "flag") else 1.0), mesh=mesh)
    Patched.unread = 1  # type: ignore[attr-defined]
    try:
        assert [call(x).item() for _ in range(6)] + [ask(x).item() for _ in range(6)] == [2.0] * 6 + [3.0] * 6
        del Patched.unread, slotted.unread  # type: ignore[attr-defined]
        Patched.__call__ = lambda self, x: x * 7  # type: ignore[method-assign, assignment]
        slotted.flag = True  # type: ignore[attr-defined]
        assert [call(x).item(), ask(x).item()] == [7.0, 15.0]
    finally:
        del Patched.__call__


class Marker:
    """An object that is itself alone."""


@pytest.mark.parametrize("asked", ["a dict", "a weak dict", "a set"])
def test_which_object_is_a_key_is_asked_of_one_that_the_program_replaces(mesh: Mesh, asked: str) -> None:
    def case(w: dict[str, Any]) -> Any:
        first, second = Marker(), Marker()
        table = {first: 2.0, second: 3.0}
        weak = weakref.WeakKeyDictionary(table)
        kept = types.SimpleNamespace(now=first)

        def step(x: Any) -> Any:
            found = table.get(kept.now, 1.0) if asked == "a dict" else weak.get(kept.now, 1.0)
            found = len({kept.now, first}) if asked == "a set" else found
            kept.now = Marker()
            return x * found

        return step, lambda call: setattr(kept, "now", (second, first, Marker())[call % 3])

    assert_alike(case, mesh)


OF_LIBRARIES: dict[str, tuple[type, Callable[[dict[str, Any]], Any]]] = {
    "a layer": (torch.nn.Linear, lambda w: w["m"]),
    "any module": (torch.nn.Module, lambda w: w["m"]),
    "an optimizer": (torch.optim.Optimizer, lambda w: w["o"]),
    "a counter": (collections.Counter, lambda w: COUNTER),
    "an enum": (enum.Enum, lambda w: Mode.ON),
}
COUNTER = collections.Counter("abc")


class Mode(enum.Enum):
    ON = 1


@pytest.mark.parametrize("of", OF_LIBRARIES)
def test_what_a_user_gives_classes_of_libraries_is_noticed(of: str, mesh: Mesh) -> None:
    kind, found = OF_LIBRARIES[of]

    def case(w: dict[str, Any]) -> Any:
        def step(x: Any) -> Any:
            return x * getattr(found(w), "users_own", 1.0) + len(COUNTER.most_common())

        def make(call: int) -> torch.Tensor:
            if call in (0, 5) and hasattr(kind, "users_own"):
                del kind.users_own
            elif 0 < call < 5:
                kind.users_own = call // 2 + 2.0  # type: ignore[attr-defined]
            return torch.ones(2)

        return step, nothing, make

    try:
        assert_alike(case, mesh)
    finally:
        if hasattr(kind, "users_own"):
            del kind.users_own


def test_a_method_of_python_s_own_library_that_is_replaced(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = collections.Counter("aab")
    step = program(lambda x: x * len(counted.most_common()), mesh=mesh)
    x = torch.ones(1)
    assert [step(x).item() for _ in range(4)] == [2.0] * 4
    monkeypatch.setattr(collections.Counter, "most_common", lambda self: [1, 2, 3])
    assert step(x).item() == 3.0
