"""What `make test` runs of tests that are long by nature; `make test-full` (pytest --full) runs all of each.

    @pytest.mark.sample(n)         of this function's cases (its parameters), n chosen by a fixed seed
    @pytest.mark.sample(n, of=p)   the same of the values of its parameter p, for each case of its other parameters
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

import pytest
from hypothesis import settings

SEED = "monarch"
FULL = "TESTS_FULL"
"""Set in the environment while --full is, for the modules of tests that ask while they are imported."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run all cases of sampled tests, and the tests marked full")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "sample(n, of=None): of this function's cases, n run without --full")
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
        if mark := item.get_closest_marker("sample"):
            of = mark.kwargs.get("of")
            params = item.callspec.params if of else {}  # type: ignore[attr-defined]
            others = [(name, id(value)) for name, value in params.items() if name != of]
            function = item.nodeid.partition("[")[0]
            cases[function, *others].append(item)
        elif not item.get_closest_marker("full"):
            kept.append(item)
    for each in cases.values():
        (count,) = each[0].get_closest_marker("sample").args  # type: ignore[union-attr]
        kept += sorted(each, key=lambda item: hashlib.sha256(f"{SEED} {item.nodeid}".encode()).digest())[:count]
    chosen = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = [item for item in items if item in chosen]
