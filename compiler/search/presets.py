"""Layouts as people write them: what every search is compared with."""

from __future__ import annotations

import math

from monarch.compiler.search.layouts import FoundLayouts
from monarch.compiler.search.problem import Problem
from monarch.compiler.types import Layout


def usual(problem: Problem) -> dict[str, FoundLayouts]:
    """The batch over the mesh dims that divide it, and parameters whole ("data parallel") or in shards over these
    mesh dims, along their first dim that divides ("fully sharded"). None where the batch cannot be sharded."""
    sizes = problem.graph.mesh.sizes
    placed = [(node, type_) for kind in problem.free() for node in kind.nodes if (type_ := kind.types[0]) is not None]
    inputs = [(node, type_) for node, type_ in placed if node.meta["kind"] == "input" and type_.ndim]
    dims: tuple[str, ...] = ()
    for name in problem.mesh_dims:
        parts = math.prod(sizes[each] for each in (*dims, name))
        if all(type_.shape[0] % parts == 0 for _, type_ in inputs):
            dims += (name,)
    if not inputs or not dims:
        return {}
    parts = math.prod(sizes[each] for each in dims)
    batch = {node.meta["label"]: Layout((dims, *((),) * (type_.ndim - 1))) for node, type_ in inputs}
    whole: dict[str, Layout] = {}
    sharded: dict[str, Layout] = {}
    for node, type_ in placed:
        if node.meta["kind"] == "state":
            label = str(node.meta["label"])
            at = next((at for at, length in enumerate(type_.shape) if length and length % parts == 0), None)
            whole[label] = Layout.replicated(type_.ndim)
            sharded[label] = Layout(tuple(dims if dim == at else () for dim in range(type_.ndim)))
    return {"data parallel": FoundLayouts(whole, batch), "fully sharded": FoundLayouts(sharded, batch)}
