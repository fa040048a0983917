"""Extents, points, and strided slices of a grid: the arithmetic under every mesh. Ranks are row-major."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product


class Extent(Mapping[str, int]):
    """The names and sizes of a grid's dims: `Extent(["hosts", "gpus"], [2, 8])`. A mapping from name to size."""

    __slots__ = ("_labels", "_sizes")

    def __init__(self, labels: Sequence[str], sizes: Sequence[int]) -> None:
        if len(labels) != len(sizes):
            raise ValueError(f"{len(labels)} names and {len(sizes)} sizes: {list(labels)} and {list(sizes)}")
        if len(set(labels)) != len(labels):
            raise ValueError(f"a dim is named twice: {list(labels)}")
        for label, size in zip(labels, sizes, strict=True):
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"dim '{label}' has size {size!r}: a size is a whole number from 1")
        self._labels = tuple(labels)
        self._sizes = tuple(sizes)

    @property
    def labels(self) -> list[str]:
        return list(self._labels)

    @property
    def sizes(self) -> list[int]:
        return list(self._sizes)

    @property
    def nelements(self) -> int:
        return math.prod(self._sizes)

    def point_of_rank(self, rank: int) -> Point:
        """The point with this row-major rank. Raises IndexError for a rank outside."""
        return Point(rank, self)

    def point(self, coords: Mapping[str, int]) -> Point:
        """The point with these coordinates. TypeError unless there is one for each dim, IndexError for one outside."""
        if set(coords) != set(self._labels):
            raise TypeError(f"a point of {self} has the dims {self.labels}, not {list(coords)}")
        rank = 0
        for label, size in self.items():
            at = coords[label]
            if not 0 <= at < size:
                raise IndexError(f"{label}={at} is outside {self}")
            rank = rank * size + at
        return Point(rank, self)

    def __getitem__(self, label: str) -> int:
        if label not in self._labels:
            raise KeyError(label)
        return self._sizes[self._labels.index(label)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._labels)

    def __len__(self) -> int:
        return len(self._labels)

    def __hash__(self) -> int:
        return hash((self._labels, self._sizes))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Extent):
            return self._labels == other._labels and self._sizes == other._sizes
        return isinstance(other, Mapping) and dict(self) == dict(other)

    def __reduce__(self) -> tuple[type[Extent], tuple[list[str], list[int]]]:
        return Extent, (self.labels, self.sizes)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label!r}: {size}" for label, size in self.items()) + "}"


class Point(Mapping[str, int]):
    """A place in an extent: a mapping from dim to coordinate, with its row-major `rank`."""

    __slots__ = ("extent", "rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        if not 0 <= rank < extent.nelements:
            raise IndexError(f"no rank {rank}: {extent} has ranks 0 to {extent.nelements - 1}")
        self.rank = rank
        self.extent = extent

    def size(self, label: str) -> int:
        """The size of a dim of the extent."""
        return self.extent[label]

    def __getitem__(self, label: str) -> int:
        labels, sizes = self.extent._labels, self.extent._sizes
        if label not in labels:
            raise KeyError(label)
        at = labels.index(label)
        return self.rank // math.prod(sizes[at + 1 :]) % sizes[at]

    def __iter__(self) -> Iterator[str]:
        return iter(self.extent)

    def __len__(self) -> int:
        return len(self.extent)

    def __hash__(self) -> int:
        return hash((self.rank, self.extent))

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Point):
            return self.rank == other.rank and self.extent == other.extent
        return isinstance(other, Mapping) and dict(self) == dict(other)

    def __reduce__(self) -> tuple[type[Point], tuple[int, Extent]]:
        return Point, (self.rank, self.extent)

    def __repr__(self) -> str:
        return "{" + ", ".join(f"{label!r}: {at}" for label, at in self.items()) + "}"


@dataclass(frozen=True, init=False)
class NDSlice:
    """Ranks `offset + sum(i * stride)`, over all `0 <= i < size` of each dim, the last dim fastest.

    Strides are positive, and nested: with a stride, one passes all that the smaller ones reach. So no rank is there
    twice, and its position is found by division.
    """

    offset: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    def __init__(self, *, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> None:
        if len(sizes) != len(strides):
            raise ValueError(f"{len(sizes)} sizes and {len(strides)} strides: {list(sizes)} and {list(strides)}")
        if offset < 0 or any(size < 1 for size in sizes) or any(stride < 1 for stride in strides):
            raise ValueError(
                f"offset {offset}, sizes {list(sizes)}, strides {list(strides)}: from 0, from 1 and from 1"
            )
        reach = 0
        for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1):
            if stride <= reach:
                raise ValueError(f"strides {list(strides)} of sizes {list(sizes)} run into each other")
            reach += stride * (size - 1)
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "sizes", tuple(sizes))
        object.__setattr__(self, "strides", tuple(strides))

    @staticmethod
    def new_row_major(sizes: Sequence[int]) -> NDSlice:
        return NDSlice(offset=0, sizes=sizes, strides=[math.prod(sizes[at + 1 :]) for at in range(len(sizes))])

    @property
    def ndim(self) -> int:
        return len(self.sizes)

    def __len__(self) -> int:
        return math.prod(self.sizes)

    def __iter__(self) -> Iterator[int]:
        for index in product(*map(range, self.sizes)):
            yield self.offset + sum(map(int.__mul__, index, self.strides))

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self._index(rank) is not None

    def __getitem__(self, position: int) -> int:
        """The rank at a row-major position."""
        if not 0 <= position < len(self):
            raise IndexError(f"no position {position} among {len(self)}")
        rank = self.offset
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            position, at = divmod(position, size)
            rank += at * stride
        return rank

    def nditem(self, coordinates: Sequence[int]) -> int:
        """The rank at these coordinates, one for each dim."""
        if len(coordinates) != self.ndim or not all(
            0 <= at < size for at, size in zip(coordinates, self.sizes, strict=True)
        ):
            raise IndexError(f"no place {list(coordinates)} in sizes {list(self.sizes)}")
        return self.offset + sum(map(int.__mul__, coordinates, self.strides))

    def coordinates(self, rank: int) -> list[int]:
        """Where a rank is. Raises ValueError for one that is not there."""
        where = self._index(rank)
        if where is None:
            raise ValueError(f"rank {rank} is not among {self}")
        return where

    def index(self, rank: int) -> int:
        """The row-major position of a rank: `nd[nd.index(rank)] == rank`. ValueError for one that is not there."""
        position = 0
        for at, size in zip(self.coordinates(rank), self.sizes, strict=True):
            position = position * size + at
        return position

    def _index(self, rank: int) -> list[int] | None:
        rest = rank - self.offset
        where = [0] * self.ndim
        for dim in sorted(range(self.ndim), key=lambda dim: -self.strides[dim]):
            if self.sizes[dim] > 1:
                where[dim], rest = divmod(rest, self.strides[dim])
                if not 0 <= where[dim] < self.sizes[dim]:
                    return None
        return None if rest else where

    def __reduce__(self) -> tuple[object, tuple[int, tuple[int, ...], tuple[int, ...]]]:
        return _ndslice, (self.offset, self.sizes, self.strides)


def _ndslice(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> NDSlice:
    return NDSlice(offset=offset, sizes=sizes, strides=strides)


@dataclass(frozen=True, init=False)
class Shape:
    """Named dims over a strided slice of ranks: what a mesh or a slice of one covers."""

    labels: tuple[str, ...]
    ndslice: NDSlice
    extent: Extent = field(compare=False, repr=False)

    def __init__(self, labels: Sequence[str], ndslice: NDSlice) -> None:
        if len(labels) != ndslice.ndim:
            raise ValueError(f"{len(labels)} names for {ndslice.ndim} dims: {list(labels)}")
        object.__setattr__(self, "labels", tuple(labels))
        object.__setattr__(self, "ndslice", ndslice)
        object.__setattr__(self, "extent", Extent(labels, ndslice.sizes))

    @staticmethod
    def of(extent: Mapping[str, int]) -> Shape:
        return Shape(list(extent), NDSlice.new_row_major(list(extent.values())))

    @staticmethod
    def unity() -> Shape:
        return Shape.of({})

    def ranks(self) -> list[int]:
        """The ranks that are covered, in row-major order."""
        return list(self.ndslice)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is, by dim. Raises ValueError for one that is not covered."""
        return dict(zip(self.labels, self.ndslice.coordinates(rank), strict=True))

    def point(self, rank: int) -> Point:
        """Where a rank is, as a point of this shape's extent. Raises ValueError for one that is not covered."""
        return Point(self.ndslice.index(rank), self.extent)

    def __len__(self) -> int:
        return len(self.ndslice)

    def slice(self, **where: int | slice) -> Shape:
        """An int takes its dim out, a slice keeps it.

        Raises TypeError for an unknown dim, IndexError for an index outside (a negative one is), ValueError for an
        empty slice.
        """
        labels, sizes, strides = list(self.labels), list(self.ndslice.sizes), list(self.ndslice.strides)
        offset = self.ndslice.offset
        for label, index in where.items():
            if label not in labels:
                raise TypeError(f"there is no dim '{label}': the dims are {list(self.labels)}")
            at = labels.index(label)
            if isinstance(index, slice):
                start, step = index.start or 0, 1 if index.step is None else index.step
                stop = sizes[at] if index.stop is None else index.stop
                if step < 1:
                    raise ValueError(f"{label}={start}:{stop}:{step} has no step forward")
                if not (0 <= start <= sizes[at] and 0 <= stop <= sizes[at]):
                    raise IndexError(f"{label}={start}:{stop} is outside '{label}', which has size {sizes[at]}")
                if start >= stop:
                    raise ValueError(f"{label}={start}:{stop} is empty: '{label}' has size {sizes[at]}")
                offset += start * strides[at]
                sizes[at] = len(range(start, stop, step))
                strides[at] *= step
            else:
                if isinstance(index, bool) or not isinstance(index, int):
                    raise TypeError(f"{label}={index!r}: a place is an int, and several are a slice")
                if not 0 <= index < sizes[at]:
                    raise IndexError(f"{label}={index} is outside '{label}', which has size {sizes[at]}")
                offset += index * strides[at]
                del labels[at], sizes[at], strides[at]
        return Shape(labels, NDSlice(offset=offset, sizes=sizes, strides=strides))

    def split(self, parts: Mapping[str, Sequence[str]], given: Mapping[str, int]) -> Shape:
        """Replace a dim by several, the first the slowest; of their sizes one may be left out.

        Raises TypeError for an unknown dim or part, ValueError for sizes that do not multiply to the dim's.
        """
        labels: list[str] = []
        sizes: list[int] = []
        strides: list[int] = []
        for label in parts:
            if label not in self.labels:
                raise TypeError(f"there is no dim '{label}': the dims are {list(self.labels)}")
        names = {name for group in parts.values() for name in group}
        for name in given:
            if name not in names:
                raise TypeError(f"'{name}' is no part of a dim that is split")
        for label, size, stride in zip(self.labels, self.ndslice.sizes, self.ndslice.strides, strict=True):
            group = parts.get(label, (label,))
            if not group:
                raise ValueError(f"dim '{label}' is split into nothing")
            unknown = [name for name in group if name not in given] if label in parts else []
            known = math.prod(given[name] for name in group if name in given) if label in parts else size
            if len(unknown) > 1:
                raise ValueError(f"sizes are missing for {unknown}: at most one can be worked out")
            if known < 1 or size % known or (not unknown and known != size):
                raise ValueError(f"'{label}' has size {size}, which cannot be split into parts of {dict(given)}")
            widths = [given.get(name, size // known) for name in group] if label in parts else [size]
            labels.extend(group)
            sizes.extend(widths)
            strides.extend(stride * math.prod(widths[at + 1 :]) for at in range(len(widths)))
        return Shape(labels, NDSlice(offset=self.ndslice.offset, sizes=sizes, strides=strides))

    def flatten(self, name: str) -> Shape:
        """One dim over all ranks. Raises ValueError where no single stride does it."""
        sizes, strides = self.ndslice.sizes, self.ndslice.strides
        kept = [(size, stride) for size, stride in zip(sizes, strides, strict=True) if size > 1]
        for (_, outer), (inner_size, inner) in zip(kept, kept[1:], strict=False):
            if outer != inner_size * inner:
                raise ValueError(f"{self.extent} is a slice with gaps, and cannot be flattened")
        stride = kept[-1][1] if kept else 1
        return Shape([name], NDSlice(offset=self.ndslice.offset, sizes=[len(self)], strides=[stride]))

    def rename(self, names: Mapping[str, str]) -> Shape:
        """Other names for dims. Raises TypeError for an unknown dim, ValueError for a name that is there already."""
        for label in names:
            if label not in self.labels:
                raise TypeError(f"there is no dim '{label}': the dims are {list(self.labels)}")
        return Shape([names.get(label, label) for label in self.labels], self.ndslice)

    def __reduce__(self) -> tuple[type[Shape], tuple[tuple[str, ...], NDSlice]]:
        return Shape, (self.labels, self.ndslice)
