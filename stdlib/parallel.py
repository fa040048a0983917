"""Layouts for a module's parameters: data parallel, fully sharded, tensor parallel, and one nested in another.

Each function gives `{parameter's name: Layout}` for `module_to_mesh(module, mesh, layouts=…)`; nothing moves yet, and
module and mesh may be abstract. The compiler derives everything else from these layouts.

    layouts = combine(tensor_parallel(model, mesh, "model"), fully_shard(model, mesh, "data"))
    model = monarch.module_to_mesh(model, mesh, layouts=layouts)
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Protocol

from torch import nn

from monarch.compiler.errors import LayoutError
from monarch.compiler.types import Layout, MeshSpec
from monarch.language.placing.distribute import dim_to_shard

Layouts = dict[str, Layout]

COLUMN, ROW = "column", "row"

LINEAR_LAYERS: Mapping[str, str] = {
    **dict.fromkeys(("q", "k", "v", "query", "key", "value", "q_proj", "k_proj", "v_proj"), COLUMN),
    **dict.fromkeys(("up", "gate", "fc1", "w1", "w3", "up_proj", "gate_proj"), COLUMN),
    **dict.fromkeys(("o", "out", "o_proj", "out_proj"), ROW),
    **dict.fromkeys(("down", "fc2", "w2", "down_proj"), ROW),
}
"""How `tensor_parallel` cuts the `nn.Linear` layers of attention and MLP blocks, by the last part of their name. A
*column* layer cuts its outputs (dim 0 of its weight), a *row* layer its inputs (dim 1) and so leaves a sum over the
workers: a column layer followed by a row layer costs one all_reduce (Shoeybi et al., "Megatron-LM", 2019)."""


class HasSpec(Protocol):
    """A mesh, abstract or with workers."""

    @property
    def spec(self) -> MeshSpec:
        """The mesh's dims and their sizes."""


def data_parallel(module: nn.Module) -> Layouts:
    """Every parameter whole on every worker: only the batch is cut, and the gradients are summed."""
    return {name: Layout.replicated(parameter.ndim) for name, parameter in module.named_parameters()}


def fully_shard(module: nn.Module, mesh: HasSpec | MeshSpec, mesh_dim: str) -> Layouts:
    """Every parameter cut over `mesh_dim` along its first dim that the mesh dim's size divides, or else its longest;
    whole where all are shorter than the mesh dim. Optimizer state follows (Rajbhandari et al., "ZeRO", 2020; Zhao et
    al., "PyTorch FSDP", 2023)."""
    size = _size(mesh, mesh_dim)
    return {
        name: Layout.replicated(parameter.ndim).place(mesh_dim, dim_to_shard(parameter.shape, size))
        for name, parameter in module.named_parameters()
    }


def tensor_parallel(
    module: nn.Module, mesh: HasSpec | MeshSpec, mesh_dim: str, *, table: Mapping[str, str] = LINEAR_LAYERS
) -> Layouts:
    """The linear layers of attention and MLP blocks cut over `mesh_dim`, everything else whole.

    `table` says how: the last part of a layer's name, or a pattern for its whole name (`"blocks.*.mlp.expand"`), to
    "column" or "row"; extend it as `{**LINEAR_LAYERS, "expand": "column"}`. Raises ValueError where no layer of the
    module is in the table.
    """
    _size(mesh, mesh_dim)
    layouts = data_parallel(module)
    found = False
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear) or (cut := _lookup(table, name)) is None:
            continue
        found = True
        prefix = f"{name}." if name else ""
        layouts[f"{prefix}weight"] = Layout.replicated(2).place(mesh_dim, 0 if cut == COLUMN else 1)
        if layer.bias is not None and cut == COLUMN:
            layouts[f"{prefix}bias"] = Layout.replicated(1).place(mesh_dim, 0)
    if not found:
        raise ValueError(
            f"no linear layer of {type(module).__name__} is in the table of tensor_parallel: "
            "add its layers' names, as table={**LINEAR_LAYERS, 'expand': 'column', 'contract': 'row'}"
        )
    return layouts


def combine(*layouts: Mapping[str, Layout]) -> Layouts:
    """All of these layouts at once, each nested inside those before it.

    Where two cut the same dim of a parameter, the later one cuts the blocks that the earlier one left:
    `[@model, -]` and `[@data, -]` give `[@(model,data), -]`. Raises LayoutError where two name the same mesh dim.
    """
    combined: Layouts = {}
    for given in layouts:
        for name, inner in given.items():
            outer = combined.setdefault(name, Layout.replicated(inner.ndim))
            for mesh_dim in inner.mesh_dims:
                if mesh_dim in outer.mesh_dims:
                    raise LayoutError(
                        f"two of the layouts of '{name}' name mesh dim '{mesh_dim}': {outer} and {inner}",
                        hint="A mesh dim can cut a tensor once. Give each of the layouts a mesh dim of its own.",
                    )
                outer = outer.place(mesh_dim, inner.placement(mesh_dim))
            combined[name] = outer
    return combined


def _lookup(table: Mapping[str, str], name: str) -> str | None:
    last = name.rsplit(".", 1)[-1]
    for pattern, cut in table.items():
        if pattern == last or fnmatchcase(name, pattern):
            if cut not in (COLUMN, ROW):
                raise ValueError(f"the table gives {cut!r} for {pattern!r}: it must be 'column' or 'row'")
            return cut
    return None


def _spec(mesh: HasSpec | MeshSpec) -> MeshSpec:
    return mesh if isinstance(mesh, MeshSpec) else mesh.spec


def _size(mesh: HasSpec | MeshSpec, mesh_dim: str) -> int:
    spec = _spec(mesh)
    if mesh_dim not in spec.sizes:
        raise LayoutError(
            f"unknown mesh dim '{mesh_dim}'",
            hint=f"The mesh is {spec}: its dims are {', '.join(spec.names) or 'none'}.",
        )
    return spec.sizes[mesh_dim]
