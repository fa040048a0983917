"""`with mesh.activate():` and `monarch.local`: code that each worker runs on tensors of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree

from monarch.compiler.errors import LayoutError, ProgramError, Source, known_dims
from monarch.compiler.types import Layout, TensorType
from monarch.language.layouts import LayoutLike, as_layout
from monarch.language.recorder.modes import per_worker
from monarch.language.recorder.recording import current_program, recording_for
from monarch.language.recorder.varying import active_dims, distributed, from_varying, to_varying, vary, varying_of
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh, open_meshes
from monarch.language.tensors.tensor import DistributedTensor


@contextmanager
def activate(mesh: Mesh, dims: Sequence[str] = ()) -> Iterator[None]:
    """See `Mesh.activate`."""
    names = _dims_of(mesh, dims)
    with per_worker(mesh, names):
        yield


def local(
    function: Callable[..., Any] | None = None,
    in_layouts: Any = None,
    out_layouts: Any = None,
    *,
    mesh: Mesh | None = None,
    dims: str | Sequence[str] = (),
) -> Callable[..., Any]:
    """`function` as per-worker code: each worker calls it with its own blocks, as JAX's `shard_map`.

        def attend(q, k, v): ...                                # [batch, 64, width] on each of 4 workers
        attend = monarch.local(attend, "[-, @seq, -]", "[-, @seq, -]", mesh=mesh)
        y = attend(q, k, v)                                     # [batch, 256, width]

        @monarch.local(in_layouts=("[@data, -]", None), out_layouts="[]", mesh=mesh)
        def loss(x, w):
            return monarch.reduce((x @ w).square().sum(), "data")

    `in_layouts` says which block of each tensor a worker gets: a tuple has a layout for each positional argument (for
    all tensors in it, or a dict of layouts for a dict), one layout is for all arguments, and None gives every worker
    the whole. `out_layouts` says how the workers' values make the results, in the same form: blocks (`"[@data, -]"`),
    summands (`"[] partial<sum: data>"`), or one value that is the same on all (None). The code is per-worker along
    `dims`, all of the mesh's where none are named; along the others the compiler shards what is computed as everywhere.
    `mesh` may be left out where an argument is on it or a program is.

    It runs in programs and outside of them, and has gradients. What it reads besides its arguments (parameters, say) is
    whole on every worker, and its gradient is summed over them. Raises LayoutError for a layout that does not fit, or a
    size that the workers do not divide, and ProgramError for a result that varies along a mesh dim that its layout does
    not name.
    """
    if function is None:
        return functools.partial(local, in_layouts=in_layouts, out_layouts=out_layouts, mesh=mesh, dims=dims)

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        source = user_source()
        on = mesh if mesh is not None else _mesh_of(args, kwargs)
        names = _dims_of(on, (dims,) if isinstance(dims, str) else dims)
        layouts = _for_each(in_layouts, len(args), "argument", "in_layouts", source)
        begin = functools.partial(_begin, mesh=on, dims=names, source=source)
        own = [_each(begin, *each) for each in zip(args, layouts, range(len(args)), strict=True)]
        with per_worker(on, names):
            made = function(*own, **kwargs)
        several = type(made) is tuple
        parts = made if several else (made,)
        layouts = _for_each(out_layouts, len(parts), "result", "out_layouts", source)
        end = functools.partial(_end, mesh=on, dims=names, source=source)
        results = tuple(_each(end, *each) for each in zip(parts, layouts, range(len(parts)), strict=True))
        return results if several else results[0]

    return run


def _each(change: Callable[..., DistributedTensor], nest: Any, layout: LayoutLike | None, at: int) -> Any:
    """A nest of tensors, each as `change` makes it of the tensor, its layout and its number. A dict of layouts is for a
    dict with the same keys."""
    if isinstance(layout, dict) and isinstance(nest, dict) and layout.keys() == nest.keys():
        return {key: _each(change, entry, layout[key], at) for key, entry in nest.items()}
    return _pytree.tree_map_only(torch.Tensor, lambda x: change(x, layout, at), nest)


def _dims_of(mesh: Mesh, dims: Sequence[str]) -> tuple[str, ...]:
    """The mesh dims along which code becomes per-worker code. LayoutError where it is already."""
    names = tuple(dims) or mesh.mesh_dim_names
    if unknown := [name for name in names if name not in mesh.spec.sizes]:
        raise LayoutError(
            f"unknown mesh dim '{unknown[0]}'",
            hint=known_dims(unknown[0], mesh.spec, mesh.mesh_dim_names),
            source=user_source(),
        )
    if twice := [name for name in names if name in active_dims(mesh)]:
        raise LayoutError(
            f"per-worker code along '{twice[0]}' within per-worker code along it",
            hint=f"name the mesh dims of each: dims=({', '.join(repr(n) for n in names if n not in twice)},)."
            if len(twice) < len(names)
            else "call the function itself: each worker has its own tensors here already.",
            source=user_source(),
        )
    return names


def _mesh_of(args: Any, kwargs: Any) -> Mesh:
    found = next(distributed((args, kwargs)), None)
    if found is not None:
        return found.mesh
    program = current_program()
    meshes = [program.mesh] if program is not None else open_meshes()
    if len(meshes) != 1:
        raise ProgramError(
            f"monarch.local does not know its mesh: no argument is on one, and there are {len(meshes)}",
            hint="say which: monarch.local(function, in_layouts, out_layouts, mesh=mesh).",
            source=user_source(),
        )
    return meshes[0]


def _for_each(layouts: Any, count: int, what: str, name: str, source: Source | None) -> list[Any]:
    """The layout of each argument or result."""
    if type(layouts) is not tuple:
        return [layouts] * count
    if len(layouts) != count:
        raise LayoutError(
            f"{name} has {len(layouts)} layouts, and there {'is' if count == 1 else 'are'} {count} {what}s",
            hint=f"give one for each {what}, in a tuple, or one layout for all.",
            source=source,
        )
    return list(layouts)


def _layout(
    x: torch.Tensor, layout: LayoutLike | None, mesh: Mesh, dims: tuple[str, ...], name: str, source: Any
) -> Layout:
    """A tensor's layout in `in_layouts` or `out_layouts`, which speaks of the dims of the per-worker code alone."""
    type_ = TensorType(x.dtype, tuple(x.shape))
    found = Layout.replicated(x.ndim) if layout is None else as_layout(layout, type_, mesh.spec, name, source)
    if found.varying or (other := [dim for dim in found.mesh_dims if dim not in dims]):
        raise LayoutError(
            f"the layout {found} of {name} "
            + ("says varying" if found.varying else f"names '{other[0]}', along which this is no per-worker code"),
            hint=f"say which blocks workers have along {', '.join(dims)}.",
            source=source,
        )
    return found


def _begin(
    x: torch.Tensor, layout: LayoutLike | None, at: int, *, mesh: Mesh, dims: tuple[str, ...], source: Source | None
) -> DistributedTensor:
    """A worker's block of argument number `at`."""
    name = f"argument {at}"
    tensor = _placed(x, mesh, name, source)
    found = _layout(tensor, layout, mesh, dims, name, source)
    if found.partial:
        raise LayoutError(
            f"in_layouts gives {name} as {found}",
            hint="a worker gets blocks, or the whole tensor: leave out partial<…>.",
            source=source,
        )
    if already := [dim for dim in found.mesh_dims if dim in varying_of(tensor)]:
        raise LayoutError(
            f"in_layouts shards {name} over '{already[0]}', along which it varies: {tensor._ref.type}",
            hint="each worker along it has a tensor of its own already: leave it out.",
            source=source,
        )
    for dim, names in enumerate(found.shards):
        count = mesh.size(names)
        if names and tensor.shape[dim] % count:
            size = tensor.shape[dim]
            raise LayoutError(
                f"dim {dim} of {name} has size {size}, which {count} workers along "
                f"{', '.join(map(repr, names))} do not divide",
                hint="per-worker code sees blocks of one size, without padding.\n"
                f"Pad the dim to {-(-size // count) * count}, and mask the entries from {size} on; or give each "
                "worker the whole tensor (None).",
                source=source,
            )
        for mesh_dim in names:
            tensor = to_varying(tensor, mesh_dim, dim)
    return tensor


def _placed(x: torch.Tensor, mesh: Mesh, name: str, source: Source | None) -> DistributedTensor:
    if isinstance(x, DistributedTensor):
        return x
    if x.requires_grad:
        raise ProgramError(
            f"{name} of monarch.local is a plain tensor that needs a gradient, and is on no mesh",
            hint="x = monarch.distribute(x, mesh, layout) places it on the mesh.",
            source=source,
        )
    return recording_for(mesh).constant(x)


def _end(
    y: torch.Tensor, layout: LayoutLike | None, at: int, *, mesh: Mesh, dims: tuple[str, ...], source: Source | None
) -> DistributedTensor:
    """Result number `at` as one value of the mesh."""
    name = f"result {at}"
    tensor = _placed(y, mesh, name, source)
    found = _layout(tensor, layout, mesh, dims, name, source)
    own = varying_of(tensor)
    if missing := [dim for dim in dims if dim in own and dim not in found.mesh_dims]:
        blocks = ", ".join(["@" + missing[0], *["-"] * (tensor.ndim - 1)])
        right = [f"return monarch.reduce(y, {missing[0]!r})", f'out_layouts="[{blocks}]"']
        if not tensor.ndim:
            right[1] = f'return y.reshape(1), out_layouts="[@{missing[0]}]"'
        width = max(map(len, right))
        raise ProgramError(
            f"{name} of this per-worker code is {tensor._ref.type}: it varies along '{missing[0]}', and out_layouts "
            f"says that it is the same there: {found}",
            hint=f"{right[0]:{width}}  # right: the workers' sum, the same on all\n"
            f"{right[1]:{width}}  # right: each worker's is a block of the result",
            source=source,
        )
    for mesh_dim, reduction in found.partial:
        if mesh_dim not in own:
            raise ProgramError(
                f"{name} of this per-worker code is {tensor._ref.type}, the same on all {mesh.size(mesh_dim)} workers "
                f"along '{mesh_dim}', and out_layouts says {found}",
                hint=f"leave partial<…> out for the value itself; for the {reduction} of {mesh.size(mesh_dim)} copies "
                f"return monarch.vary(y, {mesh_dim!r}).",
                source=source,
            )
        tensor = from_varying(tensor, mesh_dim, reduction)
    for dim, names in enumerate(found.shards):
        for mesh_dim in reversed(names):
            tensor = from_varying(vary(tensor, [mesh_dim]), mesh_dim, dim)
    return tensor
