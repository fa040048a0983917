"""The order of rows: a function of a seed, the epoch and the position, and of nothing else.

Up to `SORTED` rows are ordered by sorting hashes. More of them go through a Feistel network, which gives the row at any
position without a table: 8 rounds on the fewest bits that hold the row's number, repeated for numbers that fall outside
(cycle walking). M. Luby and C. Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", SIAM
Journal on Computing 17(2), 1988; J. Black and P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002. The
round function is the finalizer of SplitMix64: G. L. Steele, D. Lea and C. H. Flood, "Fast splittable pseudorandom
number generators", OOPSLA 2014.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from monarch.stdlib.data.draws import Draws

SORTED = 1 << 16
_ROUNDS = 8
_WRAP = 2**64
_DRAWS = 3  # tells the keys of random numbers from those of permutations


def mix(values: np.ndarray) -> np.ndarray:
    """SplitMix64's finalizer of u64 values."""
    with np.errstate(over="ignore"):
        values = values + np.uint64(0x9E3779B97F4A7C15)
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def key_of(*numbers: int) -> np.uint64:
    """One key of several whole numbers."""
    key = 0
    for number in numbers:  # `mix`, in whole numbers of Python's: fifty times as fast for one value
        key = ((key ^ number % _WRAP) + 0x9E3779B97F4A7C15) % _WRAP
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 % _WRAP
        key = (key ^ key >> 27) * 0x94D049BB133111EB % _WRAP
        key ^= key >> 31
    return np.uint64(key)


@functools.lru_cache(8)
def _sorted(length: int, key: int) -> np.ndarray:
    return np.argsort(mix(mix(np.arange(length, dtype=np.uint64)) ^ np.uint64(key)), kind="stable")


@dataclass(frozen=True)
class Permutation:
    """A permutation of `range(length)`, chosen by a key."""

    length: int
    key: int

    def at(self, positions: np.ndarray) -> np.ndarray:
        """The rows i64[n] at positions i64[n]."""
        if self.length <= SORTED:
            return _sorted(self.length, self.key)[positions]
        found = self._through(positions.astype(np.uint64))
        while (outside := found >= self.length).any():
            found[outside] = self._through(found[outside])
        return found.astype(np.int64)

    def _through(self, numbers: np.ndarray) -> np.ndarray:
        bits = (self.length - 1).bit_length()
        low = np.uint64(bits // 2)
        left, right = numbers >> low, numbers & (np.uint64(1) << low) - np.uint64(1)
        left_mask = (np.uint64(1) << np.uint64(bits - bits // 2)) - np.uint64(1)
        right_mask = (np.uint64(1) << low) - np.uint64(1)
        for turn in range(_ROUNDS):
            key = key_of(self.key, turn)
            if turn % 2:
                right = right ^ (mix(left ^ key) & right_mask)
            else:
                left = left ^ (mix(right ^ key) & left_mask)
        return (left << low) | right


@dataclass(frozen=True)
class Order:
    """The order of one epoch's rows: as the source has them without a seed."""

    seed: int | None
    epoch: int
    window: int
    drawn: int = 0
    """The origin of random numbers that rows are made with: the seed, or without one the number that the stream has
    drawn."""

    def draws(self, *position: int) -> Draws:
        """The random numbers of this epoch from a place on, for the thread in which this is entered."""
        return Draws(lambda *place: int(key_of(self.drawn, self.epoch, _DRAWS, *place)) >> 1, *position)

    def permutation(self, length: int, *purpose: int) -> Permutation:
        """A permutation of so many things. `purpose` tells those of one epoch apart."""
        assert self.seed is not None
        return Permutation(length, int(key_of(self.seed, self.epoch, *purpose)))
