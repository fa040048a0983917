"""The methods of every mesh, of workers, hosts, processes, actors or values: slice, split, flatten, rename."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch.compiler.mesh.errors import MeshShapeError
from monarch.compiler.mesh.shape import Extent, Point, Shape

if TYPE_CHECKING:
    from typing import Self


class MeshAlgebra:
    """A grid of things with a name for each dim. The results of these methods refer to the same things.

    All raise MeshDimError (a TypeError and a KeyError) for a dim that the mesh does not have.

    A mesh has `_shape` (the base ranks that it covers), `_over` (itself over another shape of the same base ranks),
    and, for tables, `_describe` (what is at a base rank).
    """

    _shape: Shape

    def _over(self, shape: Shape) -> Self:
        raise NotImplementedError

    def _describe(self, base: int) -> str:
        raise NotImplementedError

    def _column(self) -> str:
        """The heading over what `_describe` says."""
        return "value"

    def slice(self, **where: int | slice) -> Self:
        """Part of the mesh: an int takes its dim out, a slice keeps it, and negative positions count from the end.

            mesh.slice(hosts=0)                 # what is on the first host
            mesh.slice(gpus=slice(-2, None))    # the last two of each

        Raises MeshIndexError (an IndexError) for a position outside, MeshShapeError (a ValueError) for an empty slice.
        """
        return self._over(self._shape.slice(**where))

    def split(self, **how: Sequence[str] | int) -> Self:
        """Split dims, first major: `mesh.split(host=("dp", "pp"), pp=2)`. Of a dim's parts the size of one may be left
        out. Raises MeshShapeError (a ValueError) for sizes that do not multiply to the dim's."""
        parts: dict[str, Sequence[str]] = {}
        sizes: dict[str, int] = {}
        for name, value in how.items():
            if isinstance(value, int):
                sizes[name] = value
            elif isinstance(value, str):
                raise MeshShapeError(f"{name}={value!r}: a dim is split into several names, as in {name}=('a', 'b')")
            else:
                parts[name] = value
        return self._over(self._shape.split(parts, sizes))

    def flatten(self, name: str) -> Self:
        """All dims as one. Raises MeshShapeError (a ValueError) for a slice with gaps."""
        return self._over(self._shape.flatten(name))

    def rename(self, **names: str) -> Self:
        """Other names for dims: `mesh.rename(gpus="tp")`. Raises MeshShapeError (a ValueError) for a name that another
        dim has."""
        return self._over(self._shape.rename(names))

    @property
    def extent(self) -> Extent:
        """The names and sizes of the dims."""
        return self._shape.extent

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of the dims, by name."""
        return dict(self._shape.extent)

    def size(self, dim: str | int | Sequence[str] | None = None) -> int:
        """How many there are: along one dim (by name, or by number as in torch), several, or all."""
        if dim is None:
            return len(self._shape)
        if isinstance(dim, int):
            return self._shape.ndslice.sizes[dim]
        return math.prod(self.extent[label] for label in ([dim] if isinstance(dim, str) else dim))

    def __len__(self) -> int:
        return len(self._shape)

    def to_table(self) -> str:
        """A table with a line for each place: its rank and coordinates, and its content."""
        rows = [("rank", *self._shape.labels, self._column())]
        for rank, base in enumerate(self._shape.ranks()):
            at = Point(rank, self.extent).values()
            rows.append((str(rank), *map(str, at), self._describe(base)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
