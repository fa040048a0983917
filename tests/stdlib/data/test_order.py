"""Permutations: bijections that depend on their key alone, and look random."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from monarch.stdlib.data.order import SORTED, Order, Permutation


@given(st.one_of(st.integers(1, 300), st.integers(SORTED + 1, SORTED + 3000)), st.integers(0, 2**64 - 1))
def test_each_row_comes_once(length: int, key: int) -> None:
    found = Permutation(length, key).at(np.arange(length))
    assert np.array_equal(np.sort(found), np.arange(length))


@given(st.integers(SORTED + 1, 2**50), st.integers(0, 2**64 - 1), st.data())
def test_a_row_depends_on_its_position_alone(length: int, key: int, data: st.DataObject) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=20)))
    permutation = Permutation(length, key)
    rows = permutation.at(positions)
    assert ((0 <= rows) & (rows < length)).all()
    assert rows.tolist() == [int(permutation.at(np.array([position]))[0]) for position in positions]


def test_rows_are_spread_evenly_and_do_not_follow_their_neighbours() -> None:
    length = 1_000_003
    rows = Permutation(length, 5).at(np.arange(100_000))
    counts, _ = np.histogram(rows, bins=20, range=(0, length))
    assert counts.min() > 4_700 and counts.max() < 5_300  # 5,000 each; the standard deviation is 67
    assert abs(np.corrcoef(rows[:-1], rows[1:])[0, 1]) < 0.02
    assert np.mean(np.abs(np.diff(rows)) == 1) < 1e-4


def test_seeds_epochs_and_purposes_have_orders_of_their_own() -> None:
    orders = [
        Order(seed, epoch, 8).permutation(1000, purpose) for seed in (1, 2) for epoch in (0, 1) for purpose in (1, 2)
    ]
    found = {tuple(permutation.at(np.arange(1000)).tolist()) for permutation in orders}
    assert len(found) == len(orders)


def test_an_order_does_not_change_between_releases() -> None:
    """A run that was stopped goes on with the rows that it would have had."""
    assert Order(7, 0, 8).permutation(10).at(np.arange(10)).tolist() == [8, 9, 7, 4, 6, 2, 5, 1, 0, 3]
    large = Order(7, 3, 8).permutation(10**9).at(np.array([0, 1, 10**9 - 1]))
    assert large.tolist() == [
        798705737,
        159095732,
        352821125,
    ]
