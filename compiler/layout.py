"""Meshes and layouts as values: where a tensor's elements are on a mesh. Without torch, so that code that only reads
plans is quick.

A *placement* is a value's layout on one mesh dim:

    None          replicated: every worker along the dim holds the whole value
    int d         sharded: the k workers along the dim hold the k equal blocks of tensor dim d, in order; where k does
                  not divide the dim, the blocks have the next larger size, and padding stands at the end of the last
    "sum" | ...   partial: every worker holds a summand (or "max", "min", "prod"); the value is their reduction
    "varying"     each worker holds a value of its own, with no global meaning

A `Layout` has one placement for each mesh dim.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

from monarch.compiler.display import html_of
from monarch.compiler.errors import LayoutError
from monarch.compiler.mesh import check_dims

Placement = int | str | None

REDUCTIONS = ("sum", "max", "min", "prod")
VARYING = "varying"

ITEM_SIZES = {
    "f64": 8, "f32": 4, "f16": 2, "bf16": 2,
    "i64": 8, "i32": 4, "i16": 2, "i8": 1, "u8": 1, "bool": 1,
    "c64": 8, "c128": 16,
}  # fmt: skip
"""The bytes of an element, by the names of dtypes (`types.DTYPES`)."""


def is_partial(placement: Placement) -> bool:
    return isinstance(placement, str) and placement != VARYING


@dataclass(frozen=True)
class MeshSpec:
    """A mesh's named dims and sizes: all that the compiler knows of it. Prints as `mesh<data=4, model=2>`.

    Workers are numbered row-major: the last dim varies fastest.
    """

    dims: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        check_dims([name for name, _ in self.dims], [size for _, size in self.dims])

    def __getstate__(self) -> dict[str, object]:
        return {"dims": self.dims}  # no cached attributes: equal meshes have equal pickles, by which plans are known

    @staticmethod
    def of(**sizes: int) -> MeshSpec:
        """The mesh of these dims, outermost first: MeshSpec.of(data=2, model=4)."""
        return MeshSpec(tuple(sizes.items()))

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """The size of each mesh dim by its name, outermost first."""
        return dict(self.dims)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the mesh dims, outermost first."""
        return tuple(name for name, _ in self.dims)

    @property
    def workers(self) -> int:
        """The number of workers: the product of the sizes."""
        return math.prod(size for _, size in self.dims)

    def coordinates(self) -> Iterator[dict[str, int]]:
        """The coordinates of worker 0, 1, 2, …"""
        for point in product(*(range(size) for _, size in self.dims)):
            yield dict(zip(self.names, point, strict=True))

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """The number of the worker at `coordinates`. Raises KeyError where they leave out a mesh dim."""
        rank = 0
        for name, size in self.dims:
            rank = rank * size + coordinates[name]
        return rank

    def group(self, rank: int, dims: Sequence[str]) -> tuple[int, ...]:
        """The ranks that share a collective over `dims` with `rank`, first of `dims` slowest."""
        here = dict(zip(self.names, self.point(rank), strict=True))
        return tuple(
            self.rank({**here, **dict(zip(dims, point, strict=True))})
            for point in product(*(range(self.sizes[dim]) for dim in dims))
        )

    def point(self, rank: int) -> tuple[int, ...]:
        """The position of worker `rank` along each mesh dim, in the order of `names`."""
        point: list[int] = []
        for _, size in reversed(self.dims):
            rank, at = divmod(rank, size)
            point.append(at)
        return tuple(reversed(point))

    def __str__(self) -> str:
        return f"mesh<{', '.join(f'{name}={size}' for name, size in self.dims)}>"


@dataclass(frozen=True)
class Layout:
    """Where a tensor's elements are on a mesh; mesh dims that are not named replicate it.

    `shards`   for each tensor dim, the mesh dims that shard it, major first
    `partial`  (mesh dim, reduction) pairs: the value is the reduction of what the workers along it hold
    `varying`  mesh dims along which each worker holds a value of its own

    The order of `partial` and of `varying` means nothing, so both are kept sorted: equal layouts compare equal.
    """

    shards: tuple[tuple[str, ...], ...]
    partial: tuple[tuple[str, str], ...] = ()
    varying: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if len(self.partial) > 1:
            object.__setattr__(self, "partial", tuple(sorted(self.partial)))
        if len(self.varying) > 1:
            object.__setattr__(self, "varying", tuple(sorted(self.varying)))

    @staticmethod
    @cache
    def replicated(ndim: int) -> Layout:
        """The layout of a tensor of `ndim` dims that every worker has whole."""
        return Layout(((),) * ndim)

    @property
    def ndim(self) -> int:
        """The number of tensor dims that it is a layout of."""
        return len(self.shards)

    def placement(self, mesh_dim: str) -> Placement:
        """The effect of `mesh_dim` on the tensor: the number of the tensor dim that it shards, the name of the
        reduction that is pending over it, VARYING, or None where all along it have the same."""
        for dim, names in enumerate(self.shards):
            if mesh_dim in names:
                return dim
        for name, reduction in self.partial:
            if name == mesh_dim:
                return reduction
        return VARYING if mesh_dim in self.varying else None

    def place(self, mesh_dim: str, placement: Placement) -> Layout:
        """This layout with `mesh_dim` placed anew; as a shard it is nested inside (minor to) those already there.

        Raises LayoutError for a tensor dim out of range and for an unknown reduction.
        """
        shards = [tuple(name for name in names if name != mesh_dim) for names in self.shards]
        partial = tuple(entry for entry in self.partial if entry[0] != mesh_dim)
        varying = tuple(name for name in self.varying if name != mesh_dim)
        if placement == VARYING:
            varying += (mesh_dim,)
        elif isinstance(placement, str):
            if placement not in REDUCTIONS:
                raise LayoutError(f"unknown reduction '{placement}'", hint=f"it is one of {', '.join(REDUCTIONS)}.")
            partial += ((mesh_dim, placement),)
        elif placement is not None:
            if not 0 <= placement < self.ndim:
                raise LayoutError(
                    f"cannot shard dim {placement} over mesh dim '{mesh_dim}': the layout {self} has {self.ndim} dims",
                    hint=f"dims count from 0 to {self.ndim - 1}." if self.ndim else "a scalar cannot be sharded.",
                )
            shards[placement] += (mesh_dim,)
        return Layout(tuple(shards), partial, varying)

    def only(self, mesh_dims: Collection[str]) -> Layout:
        """This layout over some of the mesh dims, whole over the others."""
        layout = self
        for name in self.mesh_dims:
            if name not in mesh_dims:
                layout = layout.place(name, None)
        return layout

    @property
    def is_replicated(self) -> bool:
        """Whether every worker has the whole value: nothing is sharded, partial or varying."""
        return not (any(self.shards) or self.partial or self.varying)

    @property
    def mesh_dims(self) -> tuple[str, ...]:
        """Every mesh dim that this layout names."""
        sharding = tuple(name for names in self.shards for name in names)
        return sharding + tuple(name for name, _ in self.partial) + self.varying

    def dims_text(self, heads: Sequence[object]) -> str:
        """`heads`, one for each tensor dim, in brackets, each with the mesh dims that shard it: [16@data, 128]."""
        parts = []
        for head, names in zip(heads, self.shards, strict=True):
            where = "" if not names else f"@{names[0]}" if len(names) == 1 else f"@({','.join(names)})"
            parts.append(f"{head}{where}")
        return f"[{', '.join(parts)}]"

    def tail_text(self) -> str:
        """` partial<sum: model> varying<data>`, or "" where there is neither."""
        text = ""
        for reduction in dict.fromkeys(op for _, op in self.partial):
            names = ",".join(name for name, op in self.partial if op == reduction)
            text += f" partial<{reduction}: {names}>"
        if self.varying:
            text += f" varying<{','.join(self.varying)}>"
        return text

    def __str__(self) -> str:
        heads = ["" if names else "-" for names in self.shards]
        return self.dims_text(heads) + self.tail_text()

    def _repr_html_(self) -> str | None:
        """A drawing of a tensor with this layout, for a notebook."""
        return html_of(self)


def local_shape(shape: Sequence[int], layout: Layout, mesh: MeshSpec) -> tuple[int, ...]:
    """The shape of one worker's block of a tensor, with padding: the same on all workers."""
    return tuple(
        size // parts if size % (parts := parts_of(names, mesh)) == 0 else -(-size // parts)
        for size, names in zip(shape, layout.shards, strict=True)
    )


def parts_of(names: Sequence[str], mesh: MeshSpec) -> int:
    """The number of blocks that these mesh dims make."""
    return math.prod(mesh.sizes[name] for name in names)


def nested_index(mesh_dims: Sequence[str], position: Mapping[str, int], sizes: Mapping[str, int]) -> int:
    """A worker's block number along nested mesh dims, major first."""
    index = 0
    for name in mesh_dims:
        index = index * sizes[name] + position[name]
    return index
