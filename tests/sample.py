"""What `make test` runs of tests that are long by nature; `make test-full` (pytest --full) runs all of each.

    @pytest.mark.sample(n)         of this function's cases (its parameters), n chosen by a fixed seed, such that they
                                   have as many values of each parameter as n cases can, and then pairs of values
    @pytest.mark.sample()          as few of its cases as have each value of each parameter
    @pytest.mark.sample(n, of=p)   n of the values of its parameter p, for each case of its other parameters
    @pytest.mark.full              with --full only
    examples(n, full)              Hypothesis tries n examples, and `full` with --full
    is_full()                      for modules that choose by themselves

The choice depends on nothing but the test's name, so it is the same in every process and run. A test that is named by
its id (pytest path::name) always runs.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from itertools import combinations

import pytest
from hypothesis import settings

SEED = "monarch"
FULL = "TESTS_FULL"
"""Set in the environment while --full is, for the modules of tests that ask while they are imported."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all cases of sampled tests, and the tests marked full")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sample(n=None, of=None): of this function's cases, n run without --full")
    config.addinivalue_line("markers", "full: runs with --full only")
    if config.getoption("--full"):
        os.environ[FULL] = "1"


def examples(few: int, many: int) -> settings:
    """A decorator for a test of Hypothesis: how many examples it tries, without and with --full."""
    return settings(max_examples=many if is_full() else few)


def is_full() -> bool:
    return FULL in os.environ


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--full") or any("::" in argument for argument in config.args):
        return
    kept: list[pytest.Item] = []
    cases: dict[tuple[object, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("full"):
            continue
        if mark := item.get_closest_marker("sample"):
            of = mark.kwargs.get("of")
            others = sorted(value for value in _values(item) if value[0] != of) if of else []
            function = item.nodeid.partition("[")[0]
            cases[function, *others].append(item)
        else:
            kept.append(item)
    for each in cases.values():
        kept += chosen_from(each, *each[0].get_closest_marker("sample").args)  # type: ignore[union-attr]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]


def chosen_from(cases: list[pytest.Item], count: int | None = None) -> list[pytest.Item]:
    """So many cases of a function, each with the most values, and pairs of values, that those before it do not have;
    without a count, until there are no such values."""
    waiting = sorted(cases, key=lambda item: hashlib.sha256(f"{SEED} {item.nodeid}".encode()).digest())
    values = {item: _values(item) for item in waiting}
    pairs = {item: set(combinations(sorted(values[item]), 2)) for item in waiting}
    taken: list[pytest.Item] = []
    seen: set[object] = set()
    while waiting and len(taken) != count:
        best = max(waiting, key=lambda item: (len(values[item] - seen), len(pairs[item] - seen)))
        if count is None and values[best] <= seen:
            break
        waiting.remove(best)
        taken.append(best)
        seen.update(values[best], pairs[best])
    return taken


def _values(item: pytest.Item) -> set[tuple[str, str]]:
    """The value of each parameter: simple ones are the same where they are equal, objects where they are one."""
    params = item.callspec.params if hasattr(item, "callspec") else {}
    simple = bool | int | float | str | tuple | None
    return {(name, repr(value) if isinstance(value, simple) else str(id(value))) for name, value in params.items()}
