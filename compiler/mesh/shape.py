"""Extents, points, and strided slices of a grid: the arithmetic under every mesh. Ranks are row-major.

Indices are NumPy's: negative ones count from the end, slices are clipped, and a position outside is an IndexError. Two
things differ: empty slices, and slices backwards, are errors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

from monarch.compiler.errors import LayoutError, known_dims
from monarch.compiler.mesh.errors import MeshDimError, MeshIndexError, MeshShapeError


def check_dims(labels: Sequence[str], sizes: Sequence[int]) -> None:
    """Raise MeshShapeError unless these are dims of a mesh: identifiers, each once, with whole sizes from 1."""
    if len(labels) != len(sizes):
        raise MeshShapeError(f"{len(labels)} names and {len(sizes)} sizes: {list(labels)} and {list(sizes)}")
    for at, (label, size) in enumerate(zip(labels, sizes, strict=True)):
        if not (isinstance(label, str) and label.isidentifier() and label.isascii()):
            raise MeshShapeError(
                f"a mesh dim cannot be named {label!r}",
                hint="its name has to be an identifier: a letter or _, then more.",
            )
        if label in labels[:at]:
            raise MeshShapeError(f"mesh dim '{label}' stands twice", hint=f"the mesh's dims are {', '.join(labels)}.")
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise MeshShapeError(f"mesh dim '{label}' has size {size!r}", hint="sizes are whole numbers from 1.")


def named_sizes(
    shape: Sequence[int] | None, names: Sequence[str] | None, dims: Mapping[str, int]
) -> tuple[tuple[str, int], ...]:
    """Names and sizes of a mesh's dims, from a shape with names or from `dims`. Raises LayoutError where both are, or
    where a shape is none."""
    if shape is None:
        return tuple(dims.items())
    if isinstance(shape, (str, Mapping)) or not isinstance(shape, Sequence):
        raise MeshShapeError(
            f"a mesh's shape is a sequence of sizes, not {shape!r}",
            hint="each dim has a name: Mesh(data=4, model=2), or Mesh(**sizes) of a dict of names and sizes.",
        )
    if dims:
        raise LayoutError("give a mesh's dims by shape and mesh_dim_names or by keyword, not both")
    if names is None:
        names = [f"dim{at}" for at in range(len(shape))]
    if isinstance(names, str):
        raise MeshShapeError(
            f"mesh_dim_names is a sequence of names, not {names!r}",
            hint=f'one name has a comma behind it: mesh_dim_names=("{names}",).',
        )
    if len(names) != len(shape):
        raise LayoutError(
            f"a mesh of shape {tuple(shape)} has {len(shape)} dims, and mesh_dim_names has {len(names)}",
            hint="give one name for each dim.",
        )
    return tuple(zip(names, shape, strict=True))


def _position(index: object, size: int, of: str) -> int:
    """The place that an index means among `size`; `of` names the indexed dim. A negative index counts from the end."""
    if isinstance(index, bool) or not hasattr(index, "__index__"):
        raise MeshDimError(f"{of} has no place {index!r}", hint="a place is a whole number, and several are a slice.")
    at = operator.index(index)  # NumPy's integers too
    if not -size <= at < size:
        raise MeshIndexError(f"position {at} is outside {of}, which has size {size}")
    return at % size


class Extent(Mapping[str, int]):
    """The names and sizes of a grid's dims: `Extent(["hosts", "gpus"], [2, 8])`. A mapping from name to size."""

    __slots__ = ("_labels", "_sizes")

    def __init__(self, labels: Sequence[str], sizes: Sequence[int]) -> None:
        check_dims(labels, sizes)
        self._labels = tuple(labels)
        self._sizes = tuple(sizes)

    @property
    def labels(self) -> list[str]:
        """The names of the dims, outermost first."""
        return list(self._labels)

    @property
    def sizes(self) -> list[int]:
        """The sizes of the dims, in the order of `labels`."""
        return list(self._sizes)

    @property
    def nelements(self) -> int:
        """The number of points: the product of the sizes."""
        return math.prod(self._sizes)

    def point_of_rank(self, rank: int) -> Point:
        """The point with this row-major rank. Raises MeshIndexError for a rank outside."""
        return Point(_position(rank, self.nelements, f"{self}"), self)

    def point(self, coords: Mapping[str, int]) -> Point:
        """The point with these coordinates. Raises MeshDimError unless each dim has one, MeshIndexError outside."""
        for label in coords:
            self.position(label)
        if missing := [label for label in self._labels if label not in coords]:
            raise MeshDimError(f"a place in {self} needs a position along '{missing[0]}' too: {dict(coords)}")
        rank = 0
        for label, size in self.items():
            rank = rank * size + _position(coords[label], size, f"'{label}'")
        return Point(rank, self)

    def __getitem__(self, label: str) -> int:
        return self._sizes[self.position(label)]

    def position(self, label: str) -> int:
        """Which dim it is, from 0. Raises MeshDimError for an unknown one."""
        if label not in self._labels:
            raise MeshDimError(f"unknown mesh dim '{label}'", hint=known_dims(label, self, self._labels))
        return self._labels.index(label)

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
    """A place in an extent: a mapping from dim to coordinate, with its row-major `rank`. Prints the coordinate and the
    size of each dim: `{'hosts': 1/2, 'gpus': 2/4}`. MeshIndexError for a rank that the extent does not have."""

    __slots__ = ("extent", "rank")

    def __init__(self, rank: int, extent: Extent) -> None:
        if not 0 <= rank < extent.nelements:
            raise MeshIndexError(f"no rank {rank}: {extent} has ranks 0 to {extent.nelements - 1}")
        self.rank = rank
        self.extent = extent

    def size(self, label: str) -> int:
        """The size of a dim of the extent."""
        return self.extent[label]

    def __getitem__(self, label: str) -> int:
        sizes, at = self.extent._sizes, self.extent.position(label)
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
        return "{" + ", ".join(f"{label!r}: {at}/{self.size(label)}" for label, at in self.items()) + "}"


@dataclass(frozen=True, init=False, repr=False)
class NDSlice:
    """Ranks `offset + sum(i * stride)`, over all `0 <= i < size` of each dim, the last dim fastest.

    Strides are positive, and nested: with a stride, one passes all that the smaller ones reach. So no rank is there
    twice, and its position is found by division. MeshShapeError for others.
    """

    offset: int
    _sizes: tuple[int, ...]
    _strides: tuple[int, ...]

    def __init__(self, *, offset: int, sizes: Sequence[int], strides: Sequence[int]) -> None:
        if len(sizes) != len(strides):
            raise MeshShapeError(f"{len(sizes)} sizes and {len(strides)} strides: {list(sizes)} and {list(strides)}")
        if offset < 0 or any(size < 1 for size in sizes) or any(stride < 1 for stride in strides):
            raise MeshShapeError(
                f"offset {offset}, sizes {list(sizes)}, strides {list(strides)}: from 0, from 1 and from 1"
            )
        if not _are_nested(sizes, strides):
            raise MeshShapeError(f"strides {list(strides)} of sizes {list(sizes)} run into each other")
        object.__setattr__(self, "offset", offset)
        object.__setattr__(self, "_sizes", tuple(sizes))
        object.__setattr__(self, "_strides", tuple(strides))

    @staticmethod
    def new_row_major(sizes: Sequence[int]) -> NDSlice:
        """All ranks of a grid of these sizes, from 0, the last dim fastest."""
        return NDSlice(offset=0, sizes=sizes, strides=[math.prod(sizes[at + 1 :]) for at in range(len(sizes))])

    @staticmethod
    def from_list(ranks: Sequence[int]) -> NDSlice | list[NDSlice]:
        """The slice whose ranks are these, in this order; where there is none, slices of one dim that have them one
        after the other (no ranks: none). Raises MeshShapeError for a negative rank."""
        if ranks and (found := _grid(ranks)) is not None:
            return NDSlice(offset=ranks[0], sizes=found[0], strides=found[1])
        runs, at = [], 0
        while at < len(ranks):
            step, length = _run(ranks[at:])
            runs.append(NDSlice(offset=ranks[at], sizes=[length], strides=[step]))
            at += length
        return runs

    @property
    def sizes(self) -> list[int]:
        """The size of each dim."""
        return list(self._sizes)

    @property
    def strides(self) -> list[int]:
        """How far apart in rank two neighbours along each dim are."""
        return list(self._strides)

    @property
    def ndim(self) -> int:
        """The number of dims."""
        return len(self._sizes)

    def __len__(self) -> int:
        return math.prod(self._sizes)

    def __iter__(self) -> Iterator[int]:
        for index in product(*map(range, self._sizes)):
            yield self.offset + sum(map(int.__mul__, index, self._strides))

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and self._index(rank) is not None

    def __getitem__(self, position: int) -> int:
        """The rank at a row-major position."""
        position = _position(position, len(self), "the slice")
        rank = self.offset
        for size, stride in zip(reversed(self._sizes), reversed(self._strides), strict=True):
            position, at = divmod(position, size)
            rank += at * stride
        return rank

    def nditem(self, coordinates: Sequence[int]) -> int:
        """The rank at these coordinates, one for each dim. MeshIndexError for coordinates that there are not."""
        if len(coordinates) != self.ndim:
            raise MeshIndexError(f"{len(coordinates)} coordinates, and {self.ndim} dims: {list(coordinates)}")
        places = [
            _position(at, size, f"dim {dim}")
            for dim, (at, size) in enumerate(zip(coordinates, self._sizes, strict=True))
        ]
        return self.offset + sum(map(int.__mul__, places, self._strides))

    def coordinates(self, rank: int) -> list[int]:
        """Where a rank is. Raises MeshShapeError for one that is not there."""
        where = self._index(rank)
        if where is None:
            raise MeshShapeError(f"rank {rank} is not among {self}")
        return where

    def index(self, rank: int) -> int:
        """The row-major position of a rank: `nd[nd.index(rank)] == rank`. MeshShapeError for one that is not there."""
        position = 0
        for at, size in zip(self.coordinates(rank), self._sizes, strict=True):
            position = position * size + at
        return position

    def _index(self, rank: int) -> list[int] | None:
        rest = rank - self.offset
        where = [0] * self.ndim
        for dim in sorted(range(self.ndim), key=lambda dim: -self._strides[dim]):
            if self._sizes[dim] > 1:
                where[dim], rest = divmod(rest, self._strides[dim])
                if not 0 <= where[dim] < self._sizes[dim]:
                    return None
        return None if rest else where

    def __reduce__(self) -> tuple[object, tuple[int, tuple[int, ...], tuple[int, ...]]]:
        return _ndslice, (self.offset, self._sizes, self._strides)

    def __repr__(self) -> str:
        return f"NDSlice(offset={self.offset}, sizes={self.sizes}, strides={self.strides})"


def _ndslice(offset: int, sizes: tuple[int, ...], strides: tuple[int, ...]) -> NDSlice:
    return NDSlice(offset=offset, sizes=sizes, strides=strides)


def _are_nested(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether with each stride one passes all that the smaller ones reach."""
    reach = 0
    for stride, size in sorted((stride, size) for stride, size in zip(strides, sizes, strict=True) if size > 1):
        if stride <= reach:
            return False
        reach += stride * (size - 1)
    return True


def _run(ranks: Sequence[int]) -> tuple[int, int]:
    """The step and the length of the longest start of `ranks` that has one step forward."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    if step < 1:
        return 1, 1
    length = 2
    while length < len(ranks) and ranks[length] - ranks[length - 1] == step:
        length += 1
    return step, length


def _grid(ranks: Sequence[int]) -> tuple[list[int], list[int]] | None:
    """The sizes and strides of the strided slice that has these ranks in this order, if one does."""
    if len(ranks) == 1:
        return [], []
    step, longest = _run(ranks)
    for length in range(longest, 1, -1):
        firsts = ranks[::length]
        if len(ranks) % length or any(
            _run(ranks[at : at + length]) != (step, length) for at in range(0, len(ranks), length)
        ):
            continue
        if (outer := _grid(firsts)) is not None:
            sizes, strides = [*outer[0], length], [*outer[1], step]
            if _are_nested(sizes, strides):
                return sizes, strides
    return None


@dataclass(frozen=True, init=False, repr=False)
class Shape:
    """Named dims over a strided slice of ranks: those that a mesh or a slice of one covers."""

    _labels: tuple[str, ...]
    ndslice: NDSlice

    def __init__(self, labels: Sequence[str], ndslice: NDSlice) -> None:
        check_dims(labels, ndslice.sizes)
        object.__setattr__(self, "_labels", tuple(labels))
        object.__setattr__(self, "ndslice", ndslice)

    @staticmethod
    def of(extent: Mapping[str, int]) -> Shape:
        """The whole grid with these dims and sizes. Raises MeshShapeError for a size that is no whole number from 1."""
        for dim, size in extent.items():
            if not isinstance(size, int) or size < 1:
                raise MeshShapeError(f"the dim '{dim}' has size {size!r}: a size is a whole number from 1")
        return Shape(list(extent), NDSlice.new_row_major(list(extent.values())))

    @staticmethod
    def unity() -> Shape:
        """One place, without dims."""
        return Shape.of({})

    @property
    def labels(self) -> list[str]:
        """The names of the dims, outermost first."""
        return list(self._labels)

    @cached_property
    def extent(self) -> Extent:
        """The names and sizes of the dims."""
        return Extent(self._labels, self.ndslice.sizes)

    def ranks(self) -> list[int]:
        """The ranks that are covered, in row-major order."""
        return list(self.ndslice)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank is, by dim. Raises MeshShapeError for one that is not covered."""
        return dict(zip(self._labels, self.ndslice.coordinates(rank), strict=True))

    def point(self, rank: int) -> Point:
        """Where a rank is, as a point of this shape's extent. Raises MeshShapeError for one that is not covered."""
        return Point(self.ndslice.index(rank), self.extent)

    def __len__(self) -> int:
        return len(self.ndslice)

    def at(self, label: str, index: int) -> Shape:
        """The places at one position along a dim, which goes. Raises MeshDimError for an unknown dim, MeshIndexError
        for a position outside."""
        dim = self.extent.position(label)
        sizes, strides = self.ndslice.sizes, self.ndslice.strides
        offset = self.ndslice.offset + _position(index, sizes[dim], f"'{label}'") * strides[dim]
        labels = self.labels
        del labels[dim], sizes[dim], strides[dim]
        return Shape(labels, NDSlice(offset=offset, sizes=sizes, strides=strides))

    def select(self, label: str, where: slice) -> Shape:
        """The places at a range of positions along a dim, which stays. Raises MeshDimError for an unknown dim,
        MeshShapeError for a range that is empty or goes backwards."""
        dim = self.extent.position(label)
        sizes, strides = self.ndslice.sizes, self.ndslice.strides
        try:
            places = range(*where.indices(sizes[dim]))
        except (TypeError, ValueError) as error:
            raise MeshShapeError(f"{label}={where}: {error}") from None
        if places.step < 1:
            raise MeshShapeError(f"{label}={where} goes backwards", hint="the step of a mesh's slice is at least 1.")
        if not places:
            raise MeshShapeError(f"{where} along '{label}', of size {sizes[dim]}, holds no place")
        offset = self.ndslice.offset + places[0] * strides[dim]
        sizes[dim] = len(places)
        strides[dim] *= places.step if len(places) > 1 else 1
        return Shape(self._labels, NDSlice(offset=offset, sizes=sizes, strides=strides))

    def slice(self, **where: int | slice) -> Shape:
        """An int takes its dim out (`at`), a slice keeps it (`select`). Raises as they do."""
        shape = self
        for label, index in where.items():
            self.extent.position(label)
            shape = shape.select(label, index) if isinstance(index, slice) else shape.at(label, index)
        return shape

    def split(self, parts: Mapping[str, Sequence[str]], given: Mapping[str, int]) -> Shape:
        """Replace a dim by several, the first the slowest; of their sizes one may be left out.

        Raises MeshDimError for an unknown dim or part, MeshShapeError for sizes that do not multiply to the dim's.
        """
        for label in parts:
            self.extent.position(label)
        for name in given:
            if name not in {name for group in parts.values() for name in group}:
                raise MeshDimError(f"'{name}' is no part of a dim that is split")
        labels: list[str] = []
        sizes: list[int] = []
        strides: list[int] = []
        for label, size, stride in zip(self._labels, self.ndslice.sizes, self.ndslice.strides, strict=True):
            group = parts.get(label)
            widths = [size] if group is None else _widths(label, size, group, given)
            labels.extend([label] if group is None else group)
            sizes.extend(widths)
            strides.extend(stride * math.prod(widths[at + 1 :]) for at in range(len(widths)))
        return Shape(labels, NDSlice(offset=self.ndslice.offset, sizes=sizes, strides=strides))

    def flatten(self, name: str) -> Shape:
        """One dim over all ranks. Raises MeshShapeError where no single stride does it."""
        kept = [
            (size, stride) for size, stride in zip(self.ndslice.sizes, self.ndslice.strides, strict=True) if size > 1
        ]
        for (_, outer), (inner_size, inner) in zip(kept, kept[1:], strict=False):
            if outer != inner_size * inner:
                raise MeshShapeError(f"{self.extent} is a slice with gaps, and cannot be flattened")
        stride = kept[-1][1] if kept else 1
        return Shape([name], NDSlice(offset=self.ndslice.offset, sizes=[len(self)], strides=[stride]))

    def rename(self, names: Mapping[str, str]) -> Shape:
        """Other names for dims. Raises MeshDimError for an unknown dim, MeshShapeError for a name that exists
        already."""
        for label in names:
            self.extent.position(label)
        return Shape([names.get(label, label) for label in self._labels], self.ndslice)

    def __reduce__(self) -> tuple[type[Shape], tuple[tuple[str, ...], NDSlice]]:
        return Shape, (self._labels, self.ndslice)

    def __repr__(self) -> str:
        return f"Shape({self.extent}, {self.ndslice})"


def _widths(label: str, size: int, group: Sequence[str], given: Mapping[str, int]) -> list[int]:
    """The sizes of the dims that a dim of this size is split into."""
    known = math.prod(given.get(name, 1) for name in group)
    unknown = sum(name not in given for name in group)
    if not group or unknown > 1 or known < 1 or size % known or (not unknown and known != size):
        sizes = ", ".join(f"{name}={given[name]}" for name in group if name in given)
        raise MeshShapeError(
            f"cannot split '{label}', of size {size}, into ({', '.join(group)}) with {sizes or 'no sizes'}",
            hint="the sizes have to multiply to that of the dim; one of them may be left out.",
        )
    return [given.get(name, size // known) for name in group]
