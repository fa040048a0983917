"""Tensor types as values: dtype, global shape, layout. Without torch, so that what only reads plans is quick."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from monarch.compiler.display import html_of
from monarch.compiler.errors import LayoutError, known_dims
from monarch.compiler.layout import ITEM_SIZES, REDUCTIONS, Layout, MeshSpec, Placement, local_shape, parts_of
from monarch.compiler.symbols import is_named, value_at

if TYPE_CHECKING:
    import torch


class SeenDtype(NamedTuple):
    """What stands for a dtype where torch is not loaded: its name, and the bytes of an element."""

    name: str
    itemsize: int


SEEN_DTYPES: dict[str, Any] = {name: SeenDtype(name, size) for name, size in ITEM_SIZES.items()}

_NAMES: dict[Any, str] = {dtype: name for name, dtype in SEEN_DTYPES.items()}


def known_as(names: Mapping[torch.dtype, str]) -> None:
    """Register torch's dtypes with their names: `types` does, where torch is loaded."""
    _NAMES.update(names)


def name_of(dtype: torch.dtype) -> str:
    """A dtype as texts have it: "f32"."""
    return _NAMES[dtype]


@dataclass(frozen=True)
class TensorType:
    """A tensor's dtype, *global* shape and layout. Prints as `f32[64@data, 1024]`.

    `padding`  only in graphs behind the pass `pad-for-divisibility`: how many elements at the end of each dim of
               `shape` are padding; () where none are. Prints as `f32[10+2@data, 1024]`. It says what `shape` stands
               for, and does not enter comparisons.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    layout: Layout = field(default=None)  # type: ignore[assignment]
    padding: tuple[int, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        if self.layout is None:
            object.__setattr__(self, "layout", Layout.replicated(len(self.shape)))
        if self.padding and not any(self.padding):
            object.__setattr__(self, "padding", ())
        if self.dtype not in _NAMES:
            raise LayoutError(
                f"tensors of {self.dtype} cannot be on a mesh yet", hint=f"dtypes are {', '.join(ITEM_SIZES)}."
            )

    @property
    def dtype_name(self) -> str:
        """The dtype as texts have it: "f32"."""
        return _NAMES[self.dtype]

    @property
    def ndim(self) -> int:
        """The number of tensor dims."""
        return len(self.shape)

    @property
    def numel(self) -> int:
        """The number of elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """The bytes of the whole tensor."""
        return self.numel * self.dtype.itemsize

    @property
    def unpadded(self) -> TensorType:
        """This type with the sizes that users see."""
        if not self.padding:
            return self
        return TensorType(
            self.dtype, tuple(size - pad for size, pad in zip(self.shape, self.padding, strict=True)), self.layout
        )

    def padded(self, mesh: MeshSpec) -> TensorType:
        """This type, which users see, with the sizes that equal blocks have together: the next multiples of the
        number of blocks."""
        shape = tuple(
            local * parts_of(names, mesh)
            for local, names in zip(self.local_shape(mesh), self.layout.shards, strict=True)
        )
        padding = tuple(padded - size for padded, size in zip(shape, self.shape, strict=True))
        return TensorType(self.dtype, shape, self.layout, padding)

    def local_shape(self, mesh: MeshSpec) -> tuple[int, ...]:
        """The shape of what one worker holds, with padding: the same on all workers."""
        return local_shape(self.shape, self.layout, mesh)

    def at(self, values: Mapping[str, int]) -> TensorType:
        """This type where named sizes have these values."""
        shape: tuple[int, ...] = value_at(self.shape, values)
        return TensorType(self.dtype, shape, self.layout, value_at(self.padding, values))

    def with_layout(self, layout: Layout) -> TensorType:
        """The same tensor in another layout."""
        return TensorType(self.dtype, self.shape, layout, self.padding)

    def varying_along(self, mesh_dims: tuple[str, ...]) -> TensorType:
        """This type, varying along these mesh dims and no others."""
        layout = self.layout
        return self if mesh_dims == layout.varying else self.with_layout(replace(layout, varying=mesh_dims))

    def place(self, mesh_dim: str, placement: Placement) -> TensorType:
        """This type with `mesh_dim` placed anew, as `Layout.place` does it. Raises LayoutError as that does."""
        return self.with_layout(self.layout.place(mesh_dim, placement))

    def check(self, mesh: MeshSpec, name: str = "the tensor") -> None:
        """Raise LayoutError unless this type can lie on `mesh`."""
        if self.layout.ndim != self.ndim:
            raise LayoutError(
                f"the layout of {name} has {self.layout.ndim} dims, and {name} has {self.ndim}",
                hint=f"{name} is {self.dtype_name}{list(self.shape)}: give one entry for each of its dims.",
            )
        for size in self.shape:
            if is_named(size) and str(size) in mesh.sizes:
                raise LayoutError(
                    f"a size of {name} is named '{size}', as a mesh dim is: {self}",
                    hint=f"to shard a dim over '{size}' write its size before: 64@{size}, n@{size}. "
                    "A size that changes needs another name.",
                )
        seen: set[str] = set()
        for mesh_dim in self.layout.mesh_dims:
            if mesh_dim not in mesh.sizes:
                raise LayoutError(
                    f"unknown mesh dim '{mesh_dim}' in the layout of {name}",
                    hint=known_dims(mesh_dim, mesh, mesh.names),
                )
            if mesh_dim in seen:
                raise LayoutError(
                    f"mesh dim '{mesh_dim}' stands twice in the layout {self.layout} of {name}",
                    hint="a mesh dim can shard one tensor dim, or hold partial values, but not two things at once.",
                )
            seen.add(mesh_dim)
        reductions = sorted({reduction for _, reduction in self.layout.partial})
        if unknown := [reduction for reduction in reductions if reduction not in REDUCTIONS]:
            raise LayoutError(
                f"unknown reduction '{unknown[0]}' in the layout of {name}",
                hint=f"it is one of {', '.join(REDUCTIONS)}.",
            )
        if len(reductions) > 1:
            raise LayoutError(
                f"{name} waits for a {reductions[0]} and for a {reductions[1]}: {self.layout}",
                hint="which comes first would matter, so all partial placements of a value have one reduction.",
            )

    def __str__(self) -> str:
        sizes = [f"{size - pad}+{pad}" if pad else str(size) for size, pad in zip(self.shape, self._pads, strict=True)]
        return self.dtype_name + self.layout.dims_text(sizes) + self.layout.tail_text()

    @property
    def _pads(self) -> tuple[int, ...]:
        return self.padding or (0,) * self.ndim

    def _repr_html_(self) -> str | None:
        """A drawing of the tensor, for a notebook."""
        return html_of(self)
