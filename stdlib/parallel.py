"""Layouts for a module's parameters: data, fully sharded, tensor and expert parallel, and one nested in another.

Each function gives `{parameter's name: Layout}` for `module_to_mesh(module, mesh, layouts=…)`; nothing moves yet, and
module and mesh may be abstract. The compiler derives everything else from these layouts.

    layouts = combine(tensor_parallel(model, mesh, "model"), fully_shard(model, mesh, "data"))
    model = monarch.module_to_mesh(model, mesh, layouts=layouts)

`layouts="auto"` chooses among them (`automatic`).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Protocol

import torch
from torch import nn

from monarch.compiler.errors import LayoutError, known_dims
from monarch.compiler.graph import Graph
from monarch.compiler.passes.batches import keep_all
from monarch.compiler.types import Layout, MeshSpec, TensorType
from monarch.language import Mesh
from monarch.language.layouts import LayoutLike, as_layout
from monarch.language.placing.distribute import dim_to_shard
from monarch.language.source import user_source
from monarch.stdlib.experts import Exchange
from monarch.stdlib.factors import choose, find_groups, trace_forward, unread
from monarch.stdlib.inputs import Inputs, asked_for, described, made_up
from monarch.stdlib.models.moe import Experts
from monarch.stdlib.sequences import Between, shard_between

COLUMN, ROW = "column", "row"


class Layouts(dict[str, Layout]):
    """Layouts by the names of parameters. `why` says how they were chosen: `print(layouts.why)`."""

    why: str = ""


class HasSpec(Protocol):
    """A mesh, abstract or with workers."""

    @property
    def spec(self) -> MeshSpec:
        """The mesh's dims and their sizes."""


def data_parallel(module: nn.Module) -> Layouts:
    """Every parameter whole on every worker: only the batch is cut, and the gradients are summed."""
    return Layouts({name: Layout.replicated(parameter.ndim) for name, parameter in module.named_parameters()})


def fully_shard(module: nn.Module, mesh: HasSpec | MeshSpec, mesh_dim: str) -> Layouts:
    """Every parameter cut over `mesh_dim` along its first dim that the mesh dim's size divides, or else its longest;
    whole where all are shorter than the mesh dim. Optimizer state follows (Rajbhandari et al., "ZeRO", 2020; Zhao et
    al., "PyTorch FSDP", 2023)."""
    size = _size(mesh, mesh_dim)
    return Layouts(
        {
            name: Layout.replicated(parameter.ndim).place(mesh_dim, dim_to_shard(parameter.shape, size))
            for name, parameter in module.named_parameters()
        }
    )


def tensor_parallel(
    module: nn.Module,
    mesh: HasSpec | MeshSpec,
    mesh_dim: str,
    *,
    inputs: Inputs | None = None,
    table: Mapping[str, str] | None = None,
    sequence: LayoutLike | bool = False,
) -> Layouts:
    """Column layers and row layers cut over `mesh_dim`, as they are found in the graph of the module; all else whole.

    A column layer is cut along its outputs and a row layer along its inputs, so that it leaves a sum over the workers:
    a pair of them, with pointwise ops or attention between, costs one all_reduce. `layouts.why` says which they are,
    and why the others are whole. A projection whose outputs are cut apart into uneven blocks (query, key and value in
    one, as GPT-2 has it) is stored in shards, and gathered where it is used.

    The module's forward pass is traced, on shapes alone. `inputs` are its arguments, as a sequence or by name; without
    them they are made up from the module's layers, or from what the config of a model of `transformers` says. What they
    do not reach stays whole, and `layouts.why` names it. Raises ValueError where the module cannot be traced so, which
    says what to give, or has no such layers.

    With a `table` nothing is traced: it gives "column" or "row" for the last part of a linear layer's name, or for a
    pattern of its whole name (`"blocks.*.mlp.expand"`).

    With `sequence` activations between these layers, which have batch, time and width, are sharded along time over
    `mesh_dim`, and the module remembers it: a row layer's sum costs a reduce_scatter and a column layer's input an
    all_gather. `True` shards the batch over all mesh dims but those for tensor parallelism; `"[@data, @model, -]"` is
    another layout. What the workers do not divide (a token that is generated, say) is laid out as without it.
    """
    size = _size(mesh, mesh_dim)
    between = _between(mesh, mesh_dim, sequence)
    layouts = data_parallel(module)
    if table is not None:
        return _from_table(module, layouts, mesh_dim, table, between)
    graph, names = _traced(module, mesh_dim, inputs)
    chosen = choose(find_groups(keep_all(graph), names), size)
    for group in chosen.sharded:
        for name, dim in group.parameters.items():
            if name in layouts:
                layouts[name] = layouts[name].place(mesh_dim, dim)
    for name, dim in chosen.stored.items():
        layouts[name] = layouts[name].place(mesh_dim, dim)
    layouts.why = f"tensor_parallel over {mesh_dim}={size}:\n{chosen.text(list(layouts), unread(graph, names))}"
    if not chosen.sharded:
        raise ValueError(
            f"{type(module).__name__} has no column layers that meet row layers in its graph\n{layouts.why}"
        )
    columns = [name for group in chosen.sharded for name in group.columns] + [*chosen.stored]
    rows = [name for group in chosen.sharded for name in group.rows]
    shard_between(module, between, _layers(module, columns), _layers(module, rows))
    return layouts


def _traced(module: nn.Module, mesh_dim: str, inputs: Inputs | None) -> tuple[Graph, list[str]]:
    """The graph of the module's forward pass on `inputs`, or on the first that are made up and can be traced."""
    failed: tuple[Inputs, Exception] | None = None
    for given in made_up(module) if inputs is None else [inputs]:
        arguments, named = ((), given) if isinstance(given, Mapping) else (given, {})
        try:
            return trace_forward(module, arguments, named)
        except Exception as error:
            failed = failed or (given, error)
    ask = f"tensor_parallel(module, mesh, {mesh_dim!r}, {asked_for(module)})".replace("'", '"')
    hint = (
        f"Give the arguments of its forward pass, of which shapes and dtypes count: {ask}; "
        "or its layers by name: table={'up': 'column', 'down': 'row'}."
    )
    if failed is None:
        raise ValueError(f"{type(module).__name__} does not show the arguments of its forward pass\n  {hint}")
    on, cause = failed
    raise ValueError(
        f"tensor_parallel cannot trace {type(module).__name__} on {described(on)}: {cause}\n  {hint}"
    ) from cause


def _between(mesh: HasSpec | MeshSpec, mesh_dim: str, sequence: LayoutLike | bool) -> Between | None:
    """The argument `sequence` of `tensor_parallel`."""
    spec = _spec(mesh)
    if sequence is False:
        return None
    if sequence is True:
        others = tuple(name for name, _ in spec.dims if name not in (mesh_dim, *TENSOR_DIMS))
        return Between(mesh_dim, Layout((others, (mesh_dim,), ())))
    layout = as_layout(sequence, TensorType(torch.float32, (0, 0, 0)), spec, "sequence")
    if mesh_dim not in layout.shards[1] or layout.partial or layout.varying:
        raise LayoutError(
            f"sequence={str(layout)!r} does not shard time over '{mesh_dim}'",
            hint=f'activations are [batch, time, width]: sequence="[-, @{mesh_dim}, -]".',
        )
    return Between(mesh_dim, layout)


def _layers(module: nn.Module, parameters: Sequence[str]) -> list[str]:
    """The names of the layers whose weights these parameters are."""
    names = [name.removesuffix(".weight") for name in parameters if name.endswith(".weight")]
    return [name for name in names if not [*module.get_submodule(name).children()]]


def _from_table(
    module: nn.Module, layouts: Layouts, mesh_dim: str, table: Mapping[str, str], between: Between | None
) -> Layouts:
    found: dict[str, list[str]] = {COLUMN: [], ROW: []}
    for name, layer in module.named_modules():
        if not isinstance(layer, nn.Linear) or (cut := _lookup(table, name)) is None:
            continue
        found[cut].append(name)
        prefix = f"{name}." if name else ""
        layouts[f"{prefix}weight"] = Layout.replicated(2).place(mesh_dim, 0 if cut == COLUMN else 1)
        if layer.bias is not None and cut == COLUMN:
            layouts[f"{prefix}bias"] = Layout.replicated(1).place(mesh_dim, 0)
    if not any(found.values()):
        raise ValueError(f"no linear layer of {type(module).__name__} is in the table of tensor_parallel")
    shard_between(module, between, found[COLUMN], found[ROW])
    return layouts


def expert_parallel(
    module: nn.Module, mesh: HasSpec | MeshSpec, mesh_dim: str, *, tokens: LayoutLike | None = None
) -> Layouts:
    """Each worker along `mesh_dim` has whole experts of every mixture of experts (`models.moe.Experts`), and tokens
    come to them by all_to_all; all else whole (Lepikhin et al., "GShard", 2020).

    `tokens` is the layout in which the mixtures take batch, time and width, and has the mesh dim; by default the batch
    is sharded over it and, within, over all others but those for tensor parallelism, as "[@(expert,data), -, -]". Give
    the batch the same layout. A batch that the workers do not divide is not exchanged: the compiler shards the same
    computation. Raises ValueError for a module without such mixtures, and LayoutError where the workers do not divide
    the experts.
    """
    size, spec = _size(mesh, mesh_dim), _spec(mesh)
    if tokens is None:
        others = [name for name, _ in spec.dims if name not in (mesh_dim, *TENSOR_DIMS)]
        layout = Layout(((mesh_dim, *others), (), ()))
    else:
        layout = as_layout(tokens, TensorType(torch.float32, (0, 0, 0)), spec, "tokens")
    if mesh_dim not in layout.mesh_dims or layout.shards[2] or layout.partial or layout.varying:
        raise LayoutError(
            f"tokens in the layout {layout} do not go to experts over '{mesh_dim}'",
            hint=f'shard batch or time over it, and leave the width replicated: tokens="[@{mesh_dim}, -, -]".',
        )
    layouts, found = data_parallel(module), False
    for path, mixture in module.named_modules():
        if not isinstance(mixture, Experts):
            continue
        found = True
        if mixture.experts % size:
            raise LayoutError(
                f"'{path}' has {mixture.experts} experts, which {size} workers along '{mesh_dim}' do not divide",
                hint=f"take {-(-mixture.experts // size) * size} experts, or a mesh dim that divides them.",
            )
        mixture.exchange = Exchange(mesh_dim, layout)
        for name in ("gate", "up", "down"):
            layouts[f"{path}.{name}" if path else name] = Layout.replicated(3).place(mesh_dim, 0)
    if not found:
        raise ValueError(f"{type(module).__name__} has no mixture of experts (monarch.stdlib.models.moe.Experts)")
    layouts.why = f"expert_parallel over {mesh_dim}={size}: tokens come as {layout}"
    return layouts


def combine(*layouts: Mapping[str, Layout]) -> Layouts:
    """All of these layouts at once, each nested inside those before it.

    Where two cut the same dim of a parameter, the later one cuts the blocks that the earlier one left:
    `[@model, -]` and `[@data, -]` give `[@(model,data), -]`. Raises LayoutError where two name the same mesh dim.
    """
    combined = Layouts()
    combined.why = "\n".join(given.why for given in layouts if isinstance(given, Layouts) and given.why)
    for given in layouts:
        for name, inner in given.items():
            outer = combined.setdefault(name, Layout.replicated(inner.ndim))
            for mesh_dim in inner.mesh_dims:
                if mesh_dim in outer.mesh_dims:
                    raise LayoutError(
                        f"two of the layouts of '{name}' name mesh dim '{mesh_dim}': {outer} and {inner}",
                        hint="A mesh dim can shard a tensor once. Give each of the layouts a mesh dim of its own.",
                    )
                outer = outer.place(mesh_dim, inner.placement(mesh_dim))
            combined[name] = outer
    return combined


def automatic(module: nn.Module, mesh: Mesh, *, memory: int | None = None) -> Layouts:
    """Layouts from the mesh, the module, and a worker's memory in bytes, by default its part of this host's; `why` has
    the reasons. `module_to_mesh(module, mesh, layouts="auto")` is this.

    A mesh dim named "model", "tensor" or "tp" is for tensor parallelism, where the module has layers for it. Over the
    first other mesh dim parameters are fully sharded where whole ones, with their gradients and two moments of Adam,
    would take more than half of a worker's memory; else the mesh dim is for the batch alone.
    """
    spec = mesh.spec
    if memory is None:
        on_host = math.ceil(spec.workers / mesh.host_count)
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // on_host
    layouts, said = data_parallel(module), []
    inner = next((name for name, size in spec.dims if name in TENSOR_DIMS and size > 1), None)
    if inner is not None:
        try:
            layouts = tensor_parallel(module, mesh, inner)
            said.append(layouts.why)
        except ValueError as error:
            said.append(f"no tensor parallelism over {inner}: {error}")
    parameters = dict(module.named_parameters())
    needed = sum(
        _worker_bytes(parameter, layouts[name], spec) * (4 if parameter.requires_grad else 1)
        for name, parameter in parameters.items()
    )
    outer = next((name for name, size in spec.dims if name not in TENSOR_DIMS and size > 1), None)
    numbers = f"state in training takes {needed / 2**20:,.1f} MiB of a worker's {memory / 2**20:,.0f} MiB"
    if outer is None:
        said.append(numbers)
    elif needed <= memory / 2:
        said.append(f"data parallel over {outer}: {numbers}")
    else:
        layouts = combine(layouts, fully_shard(module, mesh, outer))
        said.append(f"fully sharded over {outer}: replicated, {numbers}")
    layouts.why = "\n".join(said)
    return layouts


TENSOR_DIMS = ("model", "tensor", "tp")
"""Names of mesh dims that `automatic` takes for tensor parallelism."""


def _worker_bytes(parameter: torch.Tensor, layout: Layout, mesh: MeshSpec) -> int:
    type_ = TensorType(parameter.dtype, tuple(parameter.shape), layout)
    return math.prod(type_.local_shape(mesh)) * parameter.dtype.itemsize


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
            hint=known_dims(mesh_dim, spec, spec.names),
            source=user_source(),
        )
    return spec.sizes[mesh_dim]
