"""ValueMesh: a value for each place of a mesh, such as the replies to a `call`."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from monarch.compiler.mesh import MeshAlgebra, Point, Shape

T = TypeVar("T", covariant=True)


class ValueMesh(MeshAlgebra, Generic[T]):
    """Values over a mesh, in rank order; iterating gives pairs of a point and its value.

    losses = trainers.step.call(batch).get()
    losses.item(hosts=0, gpus=3)
    losses.slice(hosts=0).flatten("rank").values()

    ValueError for another number of values than there are places.
    """

    def __init__(self, shape: Shape, values: Sequence[T]) -> None:
        if len(shape) != len(values):
            raise ValueError(f"{len(values)} values for the {len(shape)} places of {shape.extent}")
        self._shape = shape
        self._values = list(values)

    @staticmethod
    def from_indexed(shape: Shape, pairs: Iterable[tuple[int, T]]) -> ValueMesh[T]:
        """A value mesh from pairs of rank (from 0, row-major in `shape`) and value, in any order.

        Raises IndexError for a rank outside, ValueError for one that is missing or there twice.
        """
        found: dict[int, T] = {}
        for rank, value in pairs:
            if not 0 <= rank < len(shape):
                raise IndexError(f"no rank {rank}: {shape.extent} has ranks 0 to {len(shape) - 1}")
            if rank in found:
                raise ValueError(f"rank {rank} of {shape.extent} is there twice")
            found[rank] = value
        missing = [rank for rank in range(len(shape)) if rank not in found]
        if missing:
            raise ValueError(f"no value for ranks {reprlib.repr(missing)} of {shape.extent}")
        return ValueMesh(shape, [found[rank] for rank in range(len(shape))])

    def get(self, rank: int) -> T:
        """The value at a row-major rank of this mesh, from 0. IndexError for a rank that it does not have."""
        if not 0 <= rank < len(self._values):
            raise IndexError(f"no rank {rank}: {self.extent} has ranks 0 to {len(self._values) - 1}")
        return self._values[rank]

    def item(self, **coordinates: int) -> T:
        """The value at a place: a coordinate for each dim, none where there is one value without dims.

        Raises KeyError for a dim that is unknown or missing, IndexError for a coordinate outside.
        """
        if coordinates.keys() != self.extent.keys():
            raise KeyError(f"a place in {self.extent} has the dims {self.extent.labels}, not {list(coordinates)}")
        return self._values[self.extent.point(coordinates).rank]

    def __getitem__(self, place: Mapping[str, int] | int) -> T:
        """The value at a point, such as `context().actor_instance.rank`, or at a row-major rank. Raises as `item` and
        `get`."""
        return self.get(place) if isinstance(place, int) else self.item(**place)

    def items(self) -> Iterator[tuple[Point, T]]:
        """Pairs of a point of this mesh and its value, in rank order."""
        for rank, value in enumerate(self._values):
            yield Point(rank, self.extent), value

    def values(self) -> list[T]:
        """The values, in rank order."""
        return list(self._values)

    def __iter__(self) -> Iterator[tuple[Point, T]]:
        return self.items()

    def _over(self, shape: Shape) -> ValueMesh[T]:
        return ValueMesh(shape, [self._at(base) for base in shape.ranks()])

    def _at(self, base: int) -> T:
        return self._values[self._shape.ndslice.index(base)]

    def _describe(self, base: int) -> str:
        return reprlib.repr(self._at(base))

    def __reduce__(self) -> tuple[type[ValueMesh[T]], tuple[Shape, list[T]]]:
        return ValueMesh, (self._shape, self._values)

    def __repr__(self) -> str:
        return f"ValueMesh({self.extent}):\n" + "\n".join(f"  {point}: {value!r}" for point, value in self.items())
