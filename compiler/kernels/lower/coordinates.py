"""Coordinates of a tensor's elements, as affine functions of a nest's loop positions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


class Unfusable(Exception):
    """A group cannot be one nest of loops, and why: never shown to a user, the ops stay apart."""


@dataclass(frozen=True)
class Affine:
    """`offset + sum(strides[d] * position[d])`. The stride along a dim of size 1 is 0."""

    offset: int
    strides: tuple[int, ...]

    def __add__(self, other: Affine) -> Affine:
        return Affine(
            self.offset + other.offset, tuple(a + b for a, b in zip(self.strides, other.strides, strict=True))
        )

    def __mul__(self, factor: int) -> Affine:
        return Affine(self.offset * factor, tuple(stride * factor for stride in self.strides))

    def shifted(self, by: int) -> Affine:
        return Affine(self.offset + by, self.strides)


@dataclass(frozen=True)
class Gathered:
    """A coordinate that is data: value number `value` of the nest, which has to be 0 <= value < size."""

    value: int
    size: int


Coordinate = Affine | Gathered
At = tuple[Coordinate, ...]


def flatten(at: Sequence[Affine], shape: Sequence[int], zero: Affine) -> Affine:
    """The row-major number of an element."""
    number = zero
    for coordinate, size in zip(at, shape, strict=True):
        number = number * size + coordinate
    return number


def unflatten(number: Affine, shape: Sequence[int], dims: Sequence[int]) -> tuple[Affine, ...]:
    """The coordinates of the element with a row-major number. Raises Unfusable where they are not affine."""
    found = []
    for size in reversed(shape[1:]):
        number, rest = split(number, size, dims)
        found.append(rest)
    return (number, *reversed(found)) if shape else ()


def split(number: Affine, size: int, dims: Sequence[int]) -> tuple[Affine, Affine]:
    """Quotient and remainder by `size`. Raises Unfusable where they are not affine."""
    zeros = [0] * len(dims)
    if size == 1:
        return number, Affine(0, tuple(zeros))
    whole, part = list(zeros), list(zeros)
    for dim, stride in enumerate(number.strides):
        if stride % size == 0:
            whole[dim] = stride // size
        else:
            part[dim] = stride
    quotient, remainder = divmod(number.offset, size)
    rest = Affine(remainder, tuple(part))
    if last(rest, dims) >= size:
        raise Unfusable(f"{number} over {list(dims)} does not split by {size}")
    return Affine(quotient, tuple(whole)), rest


def last(number: Affine, dims: Sequence[int]) -> int:
    return number.offset + sum(stride * (size - 1) for stride, size in zip(number.strides, dims, strict=True))


def reshaped(at: At, shape: Sequence[int], source: Sequence[int], dims: Sequence[int]) -> At:
    """The coordinates in a tensor of shape `source` of the element that a view of `shape` has at `at`."""
    zero = Affine(0, (0,) * len(dims))
    result: list[Coordinate] = []
    for new, old in _blocks(shape, source):
        new_sizes, old_sizes = [shape[d] for d in new], [source[d] for d in old]
        if len(new) == len(old) == 1:
            result.append(at[new[0]])
            continue
        coordinates = [at[d] for d in new]
        affine = [c for c in coordinates if isinstance(c, Affine)]
        if len(affine) == len(coordinates):
            result += unflatten(flatten(affine, new_sizes, zero), old_sizes, dims)
            continue
        # A gathered coordinate survives only beside dims of size 1.
        proper = [c for c, size in zip(coordinates, new_sizes, strict=True) if size > 1]
        if len(proper) != 1 or sum(size > 1 for size in old_sizes) != 1:
            raise Unfusable("a gathered coordinate does not go through this view")
        result += [proper[0] if size > 1 else zero for size in old_sizes]
    return tuple(result)


def _blocks(shape: Sequence[int], source: Sequence[int]) -> list[tuple[list[int], list[int]]]:
    """The least runs of dims of both shapes with equal products, in order."""
    if math.prod(shape) != math.prod(source):
        raise Unfusable(f"a view of {list(source)} as {list(shape)}")
    found: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(shape) or j < len(source):
        new, old = [], []
        a = b = 1
        if i < len(shape):
            a, new, i = shape[i], [i], i + 1
        if j < len(source):
            b, old, j = source[j], [j], j + 1
        while a != b:
            if a < b:
                a, i = a * shape[i], i + 1
                new.append(i - 1)
            else:
                b, j = b * source[j], j + 1
                old.append(j - 1)
        found.append((new, old))
    # A run that is empty on one side has sizes of 1 only on the other: it joins its neighbour.
    joined: list[tuple[list[int], list[int]]] = []
    for new, old in found:
        if joined and (not new or not old):
            joined[-1] = (joined[-1][0] + new, joined[-1][1] + old)
        else:
            joined.append((new, old))
    return joined
