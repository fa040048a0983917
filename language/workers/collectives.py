"""Collectives of per-worker code, over named mesh dims: `reduce`, `all_gather`, `reduce_scatter`, `all_to_all`,
`permute`.

Each takes values that vary along the mesh dims that it is over. Those of `reduce` and `all_gather` are the same on all
workers along them from then on: values of the mesh as any other, which the compiler moves when they are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils import _pytree

from monarch.compiler.errors import LayoutError, ProgramError, beside, known_dims
from monarch.language.recorder import varying
from monarch.language.recorder.varying import Pairs, from_varying, to_varying, varying_of
from monarch.language.source import user_source
from monarch.language.tensors.tensor import DistributedTensor

Dims = str | Sequence[str]
T = TypeVar("T")

_REDUCTIONS = {"sum": "sum", "avg": "sum", "mean": "sum", "max": "max", "min": "min", "prod": "prod", "product": "prod"}


def vary(x: torch.Tensor, dims: Dims = ()) -> DistributedTensor:
    """The same value as each worker's own along mesh dims (all of them where none are named). Its gradient is the sum
    of the workers'. Per-worker code does so by itself where such a value meets one that varies."""
    tensor = _tensor(x, "vary")
    return varying.vary(tensor, _names(tensor, dims))


def reduce(tensors: T, dims: Dims = (), reduction: str = "sum", scatter: bool = False, mesh: Any = None) -> T:
    """The reduction of the workers' values along mesh dims: the same on all of them from then on.

        total = monarch.reduce(x, "data")                        # [n] on each worker -> [n]
        mean = monarch.reduce(loss, ("data", "model"), "avg")
        rows = monarch.reduce(x, "data", "stack")                # [n] -> [data, n], all workers' one behind the other
        mine = monarch.reduce(x, "data", scatter=True)           # [data, n] -> [n], worker i has row i of the sum
        mine = monarch.reduce(x, "data", "stack", scatter=True)  # [data, n] -> [data, n], row i goes to worker i

    `tensors` is a tensor or any nest of them, `dims` one mesh dim or several (all along which a tensor varies where
    none are named), `reduction` "sum", "avg", "max", "min", "prod" or "stack". A product has no gradient; a maximum's
    goes to the workers that have it. Raises ProgramError for a tensor that does not vary along a dim, and LayoutError
    for sizes that do not fit. `mesh` is PyTorch Monarch's: a reduction onto part of a mesh, which is refused.
    """
    if mesh is not None:
        raise ProgramError(
            "reduce() onto another mesh or part of one",
            hint="reduce on the tensor's own mesh: leave mesh= out.",
            source=user_source(),
        )
    return _pytree.tree_map_only(torch.Tensor, lambda x: _reduced(x, dims, reduction, scatter), tensors)


def _reduced(x: torch.Tensor, dims: Dims, reduction: str, scatter: bool) -> DistributedTensor:
    made: Any
    tensor, names = _own(x, dims, f"reduce(…, {reduction!r})")
    if reduction != "stack" and reduction not in _REDUCTIONS:
        raise LayoutError(
            f"unknown reduction {reduction!r}",
            hint=f"it is one of {', '.join([*_REDUCTIONS, 'stack'])}.",
            source=user_source(),
        )
    if scatter or reduction == "stack":
        return _stacked(tensor, names, reduction, scatter)
    made = tensor.to(torch.int64) if tensor.dtype == torch.bool and reduction in ("sum", "prod") else tensor
    for dim in reversed(names):
        made = from_varying(made, dim, _REDUCTIONS[reduction])
    return made / made.mesh.size(names) if reduction in ("avg", "mean") else made


def _stacked(tensor: DistributedTensor, names: tuple[str, ...], reduction: str, scatter: bool) -> DistributedTensor:
    """A reduction along one mesh dim that makes a tensor dim, or takes one out, or both."""
    made: Any
    if len(names) != 1:
        raise LayoutError(
            f"reduce() over {', '.join(names)} with {'scatter=True' if scatter else repr(reduction)}",
            hint="that is along one mesh dim: name it.",
            source=user_source(),
        )
    (dim,) = names
    workers = tensor.mesh.size(dim)
    if scatter and (not tensor.ndim or tensor.shape[0] != workers):
        raise LayoutError(
            f"reduce(…, scatter=True) over '{dim}' of {list(tensor.shape)}, whose dim 0 is not {workers}",
            hint=f"each of the {workers} workers along '{dim}' gets one entry of dim 0; "
            "monarch.reduce_scatter gives each a block.",
            source=user_source(),
        )
    if reduction == "stack":
        front: Any = tensor.unsqueeze(0)
        made = from_varying(front, dim, 0)
        made = to_varying(made, dim, 1).squeeze(1) if scatter else made
    else:
        made = to_varying(_reduced(tensor, dim, reduction, False), dim, 0).squeeze(0)
    return made


def all_gather(x: torch.Tensor, dims: Dims, dim: int = 0) -> DistributedTensor:
    """The workers' tensors one behind the other along the tensor dim `dim`: the same on all of them from then on. Of
    several mesh dims the first is outermost."""
    tensor, names = _own(x, dims, "all_gather()")
    dim = _dim(tensor, dim)
    for name in reversed(names):
        tensor = from_varying(tensor, name, dim)
    return tensor


def reduce_scatter(x: torch.Tensor, dims: Dims, dim: int = 0, reduction: str = "sum") -> DistributedTensor:
    """Each worker's own block, along the tensor dim `dim`, of the reduction of the workers' values. Raises LayoutError
    where the workers do not divide its size."""
    tensor, names = _own(x, dims, "reduce_scatter()")
    dim = _dim(tensor, dim)
    _check_divides(tensor, names, dim, "reduce_scatter()")
    tensor = _reduced(tensor, names, reduction, False)
    for name in names:
        tensor = to_varying(tensor, name, dim)
    return tensor


def all_to_all(x: torch.Tensor, dims: Dims, split: int = 0, concat: int = 0) -> DistributedTensor:
    """Each worker cuts its tensor along the tensor dim `split` into a block for each worker, and puts those that it
    gets one behind the other along `concat`: [8, 6] over 2 workers with split=0, concat=1 gives [4, 12]. Raises
    LayoutError where the workers do not divide the size of `split`."""
    tensor, names = _own(x, dims, "all_to_all()")
    split, concat = _dim(tensor, split), _dim(tensor, concat)
    _check_divides(tensor, names, split, "all_to_all()")
    if split == concat:  # blocks keep their places, so the workers have a dim of their own meanwhile
        parts: Any = tensor.unflatten(split, (tensor.mesh.size(names), -1)).unsqueeze(0)
        for name in reversed(names):
            parts = from_varying(parts, name, 0)
        for name in names:
            parts = to_varying(parts, name, split + 1)
        parts = parts.squeeze(split + 1).movedim(0, split).flatten(split, split + 1)
        return parts
    for name in reversed(names):
        tensor = from_varying(tensor, name, concat)
    for name in names:
        tensor = to_varying(tensor, name, split)
    return tensor


def permute(
    x: torch.Tensor, dims: Dims, shift: int | None = None, *, pairs: Iterable[tuple[int, int]] | None = None
) -> DistributedTensor:
    """Each worker's tensor goes to another: `shift` workers further along the mesh dims, around a ring, or, for each
    (source, target) of `pairs`, from one position to the other. Positions count along all of `dims` together, the first
    outermost; a worker that is no target gets zeros. Raises LayoutError for a position outside or one that stands
    twice.
    """
    tensor, names = _own(x, dims, "permute()")
    count = tensor.mesh.size(names)
    if (shift is None) == (pairs is None):
        raise LayoutError(
            "permute() takes a shift or pairs",
            hint='monarch.permute(x, "data", 1) or monarch.permute(x, "data", pairs=[(0, 1), (1, 0)]).',
            source=user_source(),
        )
    if shift is not None:
        pairs = [(at, (at + shift) % count) for at in range(count)]
    listed: Pairs = tuple((int(source), int(target)) for source, target in pairs or ())
    for what, places in (("source", [s for s, _ in listed]), ("target", [t for _, t in listed])):
        wrong = [at for at in places if not 0 <= at < count] or [at for at in places if places.count(at) > 1]
        if wrong:
            raise LayoutError(
                f"permute() over {count} workers has {'twice ' if 0 <= wrong[0] < count else ''}the {what} {wrong[0]}",
                hint=f"each position from 0 to {count - 1} can be a source once and a target once.",
                source=user_source(),
            )
    return varying.permute(tensor, names, listed)


# -- arguments ---------------------------------------------------------------------------------------------------------


def _tensor(x: torch.Tensor, what: str) -> DistributedTensor:
    if not isinstance(x, DistributedTensor):
        raise ProgramError(
            f"{what} of a plain tensor of shape {list(x.shape)}, which is on no mesh",
            hint="x = monarch.distribute(x, mesh, layout) places a plain tensor on a mesh.",
            source=user_source(),
        )
    return x


def _names(tensor: DistributedTensor, dims: Dims) -> tuple[str, ...]:
    mesh = tensor.mesh
    names = (dims,) if isinstance(dims, str) else tuple(dims) or mesh.mesh_dim_names
    for at, name in enumerate(names):
        if name not in mesh.spec.sizes or name in names[:at]:
            raise LayoutError(
                f"mesh dim '{name}' stands twice" if name in mesh.spec.sizes else f"unknown mesh dim '{name}'",
                hint=known_dims(name, mesh.spec, mesh.mesh_dim_names),
                source=user_source(),
            )
    return names


def _own(x: torch.Tensor, dims: Dims, what: str) -> tuple[DistributedTensor, tuple[str, ...]]:
    """The tensor, and the mesh dims that a collective is over: it varies along each of them."""
    tensor = _tensor(x, what)
    own = varying_of(tensor)
    names = _names(tensor, dims) if dims else tuple(dim for dim in tensor.mesh.mesh_dim_names if dim in own)
    same = [name for name in names if name not in own]
    if same or not names:
        along = same or list(tensor.mesh.mesh_dim_names)
        count = tensor.mesh.size(along)
        listed = ", ".join(map(repr, along))
        raise ProgramError(
            f"{what} over {listed} of {tensor._ref.type}, which is the same on all {count} workers there",
            hint=beside(
                (f"y = monarch.reduce(x, {listed})", "wrong: x does not vary"),
                (f"y = x * {count}", f"right, for {count} times x"),
                (f"y = monarch.reduce(monarch.vary(x, {listed}), {listed})", "right: the same, said so"),
            )
            if what.startswith("reduce(")
            else f"make it each worker's own first, if that is meant: monarch.vary(x, {listed}).",
            source=user_source(),
        )
    return tensor, names


def _dim(tensor: DistributedTensor, dim: int) -> int:
    if not -tensor.ndim <= dim < tensor.ndim:
        raise LayoutError(
            f"dim {dim} of a tensor of shape {list(tensor.shape)}",
            hint=f"dims count from 0 to {tensor.ndim - 1}." if tensor.ndim else "a scalar has no dims.",
            source=user_source(),
        )
    return dim % tensor.ndim


def _check_divides(tensor: DistributedTensor, names: tuple[str, ...], dim: int, what: str) -> None:
    count, size = tensor.mesh.size(names), tensor.shape[dim]
    if size % count:
        raise LayoutError(
            f"{what} splits dim {dim} of {list(tensor.shape)} into {count} equal blocks, and {count} does not divide "
            f"{size}",
            hint=f"pad it: torch.nn.functional.pad to {-(-size // count) * count}.",
            source=user_source(),
        )
