"""Choosing among variants by times that a table gives."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from monarch.compiler.errors import MonarchError
from monarch.stdlib.kernels.launch import Variant
from monarch.stdlib.kernels.tuning import fastest


def test_the_fastest_by_its_median_is_chosen_and_slow_ones_are_measured_once() -> None:
    times = {
        "slow": [9.0],
        "noisy": [1.0, 3.0, 3.0],
        "steady": [2.0, 2.0, 2.0],
        "broken": [math.inf],
        "lucky": [1.4, 4, 4],
    }
    asked: Counter[str] = Counter()

    def measure(name: str) -> float:
        asked[name] += 1
        return times[name][asked[name] - 1]

    assert fastest(["slow", "noisy", "lucky", "broken"], measure) == "noisy"
    assert asked["slow"] == asked["broken"] == 1
    assert fastest(["steady"], lambda _: 2.0) == "steady"


def test_of_equals_the_first_is_chosen() -> None:
    assert fastest(["a", "b"], lambda _: 1.0) == "a"
    assert fastest(["b", "a"], lambda _: 1.0) == "b"


def test_an_outlier_does_not_decide() -> None:
    times = {"a": iter([1.0, 1.1, 1.1]), "b": iter([1.2, 1.0, 1.0])}
    assert fastest(["a", "b"], lambda name: next(times[name])) == "b"


def test_errors() -> None:
    with pytest.raises(MonarchError, match="none of the 2 variants"):
        fastest(["a", "b"], lambda _: math.inf)
    with pytest.raises(MonarchError, match="none of the 0 variants"):
        fastest([], lambda _: 1.0)
    with pytest.raises(MonarchError, match="variant BLOCK=8 warps=4 stages=3 was measured to take nan seconds"):
        fastest([Variant({"BLOCK": 8})], lambda _: math.nan)
