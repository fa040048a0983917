"""What every mesh can do, of hosts, processes, actors or values: be sliced, split, flattened, renamed, measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from monarch.compiler.mesh.shape import Extent, Point, Shape

if TYPE_CHECKING:
    from typing import Self


class MeshAlgebra:
    """A grid of things with a name for each dim. What these methods give are references to the same things.

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
        """Part of the mesh: an int takes its dim out, a slice keeps it."""
        return self._over(self._shape.slice(**where))

    def split(self, **how: Sequence[str] | int) -> Self:
        """Split dims: `mesh.split(host=("dp", "pp"), pp=2)`. Of a dim's parts the size of one may be left out."""
        parts: dict[str, Sequence[str]] = {}
        sizes: dict[str, int] = {}
        for name, value in how.items():
            if isinstance(value, int):
                sizes[name] = value
            elif isinstance(value, str):
                raise ValueError(f"{name}={value!r}: a dim is split into several names, as in {name}=('a', 'b')")
            else:
                parts[name] = value
        return self._over(self._shape.split(parts, sizes))

    def flatten(self, name: str) -> Self:
        """All dims as one."""
        return self._over(self._shape.flatten(name))

    def rename(self, **names: str) -> Self:
        """Other names for dims: `mesh.rename(gpus="tp")`."""
        return self._over(self._shape.rename(names))

    @property
    def extent(self) -> Extent:
        return self._shape.extent

    @property
    def sizes(self) -> dict[str, int]:
        return dict(self._shape.extent)

    def size(self, dim: str | Sequence[str] | None = None) -> int:
        """How many there are, along one dim, several, or all."""
        if dim is None:
            return len(self._shape)
        total = 1
        for label in [dim] if isinstance(dim, str) else dim:
            if label not in self._shape.labels:
                raise KeyError(f"there is no dim '{label}': the dims are {list(self._shape.labels)}")
            total *= self._shape.extent[label]
        return total

    def __len__(self) -> int:
        return len(self._shape)

    def to_table(self) -> str:
        """A table with a line for each place: its rank and coordinates, and what is there."""
        rows = [("rank", *self._shape.labels, self._column())]
        for rank, base in enumerate(self._shape.ranks()):
            at = Point(rank, self.extent).values()
            rows.append((str(rank), *map(str, at), self._describe(base)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
