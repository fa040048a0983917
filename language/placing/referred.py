"""`actors.step.rref(x)`: results of actors, as tensors of which each worker has its own actor's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import LayoutError, ProgramError, Source
from monarch.compiler.execution.executor import Returned
from monarch.compiler.types import Layout, TensorType
from monarch.language.placing.asked import asked_in_program
from monarch.language.placing.shards import adopted, alike, text
from monarch.language.recorder.recording import current_program
from monarch.language.recorder.varying import active
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh, open_meshes
from monarch.language.tensors.shapes import make_fake
from monarch.language.tensors.tensor import DistributedTensor


class Asked(Protocol):
    """An endpoint of actors."""

    def call(self, *args: Any, **kwargs: Any) -> Any: ...

    def shards(self, *args: Any, **kwargs: Any) -> Returned: ...


def referred(asked: Asked, propagate: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    """See `Endpoint.rref`."""
    source = user_source()
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if torch.is_grad_enabled() and any(leaf.requires_grad for leaf in leaves):
        raise ProgramError(
            f"{name}.rref() is called with a tensor that needs a gradient, and actors' results have none",
            hint="pass x.detach(), or call it in `with torch.no_grad():`.",
            source=source,
        )
    on = [leaf for leaf in leaves if isinstance(leaf, DistributedTensor)]
    program = current_program()
    if program is None:
        mesh = None if propagate == "inspect" else _mesh_of(on, name, source)
        return _called(asked, propagate, name, source, mesh, args, kwargs)
    if propagate is None:
        raise ProgramError(
            f"{name}.rref() in a program needs the types of the results before it calls the actors",
            hint="say it at the endpoint: @endpoint(propagate=lambda x: x.new_empty(3, 8)).",
            source=source,
        )
    meshes = {program.where(leaf._ref) for leaf in on} - {None}
    mesh = _mesh_of(on, name, source) if len(meshes) > 1 else next(iter(meshes), None)
    said = None if propagate == "inspect" else partial(_propagated, propagate, name, source)
    return asked_in_program(program, partial(_called, asked, propagate, name, source), said, mesh, args, kwargs, name)


def _called(
    asked: Asked,
    propagate: Any,
    name: str,
    source: Source | None,
    mesh: Mesh | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call the actors, and wait: their results as tensors that vary, or None where nothing needs them."""
    if propagate == "inspect":
        asked.call(*args, **kwargs).get()
        return None
    assert mesh is not None
    said = None if propagate is None else _propagated(propagate, name, source, mesh, args, kwargs)
    shards = asked.shards(*args, **kwargs)
    found = alike(mesh, shards, source)
    if said is not None and pytree.tree_flatten(found) != pytree.tree_flatten(said):
        raise LayoutError(
            f"{name} has returned {text(found)}, and its propagate says {text(said)}",
            hint="propagate gets each worker's shards, without data, and gives tensors of the shapes and dtypes that "
            "are returned.",
            source=source,
        )
    local, tree = pytree.tree_flatten(found)
    own = [type_.with_layout(replace(Layout.replicated(type_.ndim), varying=mesh.spec.names)) for type_ in local]
    return pytree.tree_unflatten(adopted(mesh, shards, own), tree)


def _mesh_of(tensors: list[DistributedTensor], name: str, source: Source | None) -> Mesh:
    meshes = list(dict.fromkeys(tensor.mesh for tensor in tensors))
    if not meshes:
        meshes = [active.regions[-1][0]] if active.regions else open_meshes()
    if len(meshes) != 1:
        raise LayoutError(
            f"{name}.rref() does not know the mesh of its result: "
            + (
                f"its arguments are on {len(meshes)}"
                if tensors
                else f"no argument is on one, and {len(meshes)} are open"
            ),
            hint="mesh = Mesh(procs=procs)\nwith mesh.activate():\n    y = actors.step.rref(x)",
            source=source,
        )
    return meshes[0]


def _propagated(
    propagate: Callable[..., Any],
    name: str,
    source: Source | None,
    mesh: Mesh,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The result of `propagate` for each worker's shards, without data."""

    def shard(x: torch.Tensor) -> torch.Tensor:
        return make_fake(x.tensor_type.local_shape(mesh.spec) if isinstance(x, DistributedTensor) else x.shape, x.dtype)

    given, named = pytree.tree_map_only(torch.Tensor, shard, (args, kwargs))
    with torch._C._DisableTorchDispatch():
        made = propagate(*given, **named)
    if wrong := [type(leaf).__name__ for leaf in pytree.tree_leaves(made) if not isinstance(leaf, torch.Tensor)]:
        raise LayoutError(
            f"the propagate of {name} gives {', '.join(wrong)}",
            hint="it returns tensors, nested like the endpoint's result: propagate=lambda x: x.new_empty(3, 8).",
            source=source,
        )
    return pytree.tree_map(lambda x: TensorType(x.dtype, tuple(x.shape)), made)


__all__ = ["referred"]
