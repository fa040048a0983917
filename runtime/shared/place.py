"""The place of plans and values: all of a mesh's workers, or some of them as a mesh with dims of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from monarch.compiler.mesh import NDSlice, Shape
from monarch.compiler.plan import MeshSpec


@dataclass(frozen=True, eq=False)
class Place:
    """Some workers of a started mesh, with dims of their own: those of `mesh`, in whose order `ranks` are their numbers
    in the started mesh. Places are equal where they are one object."""

    mesh: MeshSpec
    ranks: Sequence[int]
    shape: Shape

    @staticmethod
    def of(shape: Shape) -> Place:
        """The workers that a shape covers."""
        return Place(MeshSpec(tuple(shape.extent.items())), tuple(shape.ndslice), shape)

    @staticmethod
    def whole(mesh: MeshSpec) -> Place:
        """All workers of a started mesh."""
        return Place(mesh, range(mesh.workers), Shape.of(mesh.sizes))

    def name_of(self, rank: int) -> str:
        """A worker's coordinates: "data=0, model=1"."""
        return ", ".join(f"{name}={at}" for name, at in self.coordinates_of(rank).items()) or "0"

    def coordinates_of(self, rank: int) -> dict[str, int]:
        """Where along each mesh dim a worker is."""
        return self.shape.coordinates(rank)

    @cached_property
    def members(self) -> frozenset[int]:
        """The ranks, to look for one."""
        return frozenset(self.ranks)

    def numbers(self) -> tuple[int, ...]:
        """The workers as the LOAD command names them: as many numbers for a million of them as for two."""
        where = self.shape.ndslice
        return where.offset, *where.sizes, *where.strides


def ranks_of(numbers: Sequence[int]) -> NDSlice:
    """The workers that `Place.numbers` names."""
    offset, *rest = numbers
    dims = len(rest) // 2
    return NDSlice(offset=offset, sizes=rest[:dims], strides=rest[dims:])
