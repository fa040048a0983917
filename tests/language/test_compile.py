"""The compiler's door."""

from __future__ import annotations

import gc

from monarch.language.compile import full_collections_later


def test_full_collections_wait_until_a_program_is_compiled() -> None:
    before = gc.get_threshold()
    with full_collections_later():
        assert gc.isenabled()
        assert gc.get_threshold()[:2] == before[:2] and gc.get_threshold()[2] > 1 << 20
    assert gc.get_threshold() == before


def test_thresholds_that_the_users_function_sets_stay() -> None:
    before = gc.get_threshold()
    try:
        with full_collections_later():
            gc.set_threshold(600, 5, 5)
        assert gc.get_threshold() == (600, 5, 5)
    finally:
        gc.set_threshold(*before)
