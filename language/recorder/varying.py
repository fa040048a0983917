"""Values that vary: where per-worker code begins and ends, what moves between, and the gradients of all three.

A tensor that varies along mesh dims (`f32[3] varying<data>`) is one of this shape on each worker along them. Values
computed from it vary too; every other tensor is the same on all workers, whatever its layout. The gradient of a value
has the value's layout, so each step from one to the other has one that goes back:

    to_varying(x, dim, d)         blocks become each worker's own           its gradient: from_varying(g, dim, d)
    to_varying(x, dim, None)      the same value becomes each worker's own  its gradient: the sum over the workers
    from_varying(x, dim, d)       each worker's own become blocks           its gradient: to_varying(g, dim, d)
    from_varying(x, dim, "sum")   each worker's own are added               its gradient: to_varying(g, dim, None)
    permute(x, dims, pairs)       workers send theirs to others             its gradient: the way back

This is JAX's type system for `shard_map` ("varying manual axes"; `to_varying(x, dim, None)` is its `pvary`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from monarch.compiler import ops
from monarch.compiler.errors import ProgramError
from monarch.compiler.types import MeshSpec
from monarch.language.recorder.checkpoints import checkpoint_part
from monarch.language.recorder.recording import Recording, recording_for
from monarch.language.source import user_source
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.tensor import DistributedTensor

Pairs = tuple[tuple[int, int], ...]


class _Active(threading.local):
    regions: tuple[tuple[Mesh, tuple[str, ...]], ...] = ()


active = _Active()
"""The per-worker code that each thread is in, outermost first: its mesh, and the mesh dims along which it is."""


def active_dims(mesh: Mesh) -> tuple[str, ...]:
    """The mesh dims along which this thread writes per-worker code of `mesh`, in the mesh's order."""
    found = {dim for other, dims in active.regions if other is mesh for dim in dims}
    return tuple(dim for dim in mesh.mesh_dim_names if dim in found)


class plainly:
    """The controller's own work within per-worker code: the plain tensors that it makes stay plain."""

    # No generator, which takes four times as long: each call of a program enters one.

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before, active.regions = active.regions, ()

    def __exit__(self, *error: object) -> None:
        active.regions = self._before


def varying_of(tensor: DistributedTensor) -> tuple[str, ...]:
    """The mesh dims along which a tensor varies."""
    return tensor._ref.cell.type.layout.varying


def varying_together(tensors: Iterable[DistributedTensor]) -> tuple[str, ...]:
    """The mesh dims along which values computed from these vary."""
    found = dict.fromkeys(dim for tensor in tensors for dim in varying_of(tensor))
    return tuple(sorted(found))


def vary(tensor: DistributedTensor, dims: Iterable[str]) -> DistributedTensor:
    """The tensor as each worker's own along these mesh dims, along which it may vary already."""
    for dim in dims:
        if dim not in varying_of(tensor):
            tensor = to_varying(tensor, dim, None)
    return tensor


def to_varying(tensor: DistributedTensor, mesh_dim: str, dim: int | None) -> DistributedTensor:
    """Each worker's own block of `dim` along the mesh dim, which has to divide it; with None the whole tensor."""
    made: DistributedTensor = _ToVarying.apply(recording_for(tensor.mesh).taken(tensor), mesh_dim, dim)
    return made


def from_varying(tensor: DistributedTensor, mesh_dim: str, placement: int | str) -> DistributedTensor:
    """The workers' own values along the mesh dim as one value: blocks of the dim `placement`, or their reduction by
    `placement`."""
    made: DistributedTensor = _FromVarying.apply(recording_for(tensor.mesh).taken(tensor), mesh_dim, placement)
    return made


def permute(tensor: DistributedTensor, mesh_dims: tuple[str, ...], pairs: Pairs) -> DistributedTensor:
    """For each (source, target) of `pairs` the target gets the source's value; others get zeros."""
    made: DistributedTensor = _Permute.apply(recording_for(tensor.mesh).taken(tensor), mesh_dims, pairs)
    return made


def position(mesh: Mesh, mesh_dim: str) -> DistributedTensor:
    """Each worker's position along a mesh dim, an i64[] that varies along it."""
    return recording_for(mesh).own(ops.axis_index, (mesh_dim,), (), torch.int64, (mesh_dim,))


def _resized(
    shape: Sequence[int], dim: int | str | None, mesh: MeshSpec, mesh_dim: str, *, longer: bool
) -> tuple[int, ...]:
    sizes = list(shape)
    if isinstance(dim, int):
        sizes[dim] = sizes[dim] * mesh.sizes[mesh_dim] if longer else sizes[dim] // mesh.sizes[mesh_dim]
    return tuple(sizes)


class _ToVarying(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh_dim: str, dim: int | None) -> torch.Tensor:
        assert isinstance(tensor, DistributedTensor)
        ctx.where = mesh_dim, dim
        recording = recording_for(tensor.mesh)
        shape = _resized(tensor.shape, dim, tensor.mesh.spec, mesh_dim, longer=False)
        varying = (*varying_of(tensor), mesh_dim)
        value = recording.value_of(tensor._ref)
        return recording.own(ops.to_varying, (value, mesh_dim, dim), shape, tensor.dtype, varying)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        mesh_dim, dim = ctx.where
        return from_varying(vary(gradient, [mesh_dim]), mesh_dim, "sum" if dim is None else dim), None, None


class _FromVarying(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh_dim: str, placement: int | str) -> torch.Tensor:
        assert isinstance(tensor, DistributedTensor)
        ctx.where = mesh_dim, placement
        recording = recording_for(tensor.mesh)
        shape = _resized(tensor.shape, placement, tensor.mesh.spec, mesh_dim, longer=True)
        varying = tuple(dim for dim in varying_of(tensor) if dim != mesh_dim)
        value = recording.value_of(tensor._ref)
        made = recording.own(ops.from_varying, (value, mesh_dim, placement), shape, tensor.dtype, varying)
        if placement in ("max", "min"):
            ctx.save_for_backward(tensor, made)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        mesh_dim, placement = ctx.where
        if mesh_dim in varying_of(gradient):
            raise ProgramError(
                f"the gradient of a value that is the same on all workers along '{mesh_dim}' varies along it",
                hint="an autograd.Function mixes values that vary with such as do not: give it monarch.vary(x, "
                f"{mesh_dim!r}) of those.",
                source=user_source(),
            )
        if isinstance(placement, int) or placement == "sum":
            return to_varying(gradient, mesh_dim, None if placement == "sum" else placement), None, None
        if placement == "prod":
            raise ProgramError(
                f"a product over '{mesh_dim}' has no gradient",
                hint="y = monarch.reduce(x, dims, 'stack').prod(0)   # right: gathered, with a gradient",
                source=user_source(),
            )
        tensor, made = ctx.saved_tensors  # as amax: those that are equal share the gradient
        own = (tensor == to_varying(made, mesh_dim, None)).to(gradient.dtype)
        share = gradient / from_varying(own, mesh_dim, "sum")
        return own * to_varying(share, mesh_dim, None), None, None


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh_dims: tuple[str, ...], pairs: Pairs) -> torch.Tensor:
        assert isinstance(tensor, DistributedTensor)
        ctx.where = mesh_dims, pairs
        recording = recording_for(tensor.mesh)
        value = recording.value_of(tensor._ref)
        return recording.own(
            ops.permute, (value, mesh_dims, pairs), tuple(tensor.shape), tensor.dtype, varying_of(tensor)
        )

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        mesh_dims, pairs = ctx.where
        back = tuple((target, source) for source, target in pairs)
        return permute(vary(gradient, mesh_dims), mesh_dims, back), None, None


# -- values computed from both kinds -----------------------------------------------------------------------------


def check_gradients(tensors: Sequence[DistributedTensor], varying: tuple[str, ...]) -> None:
    """Refuse an op that reads a value which varies and one which does not, and needs a gradient: the sum over the
    workers would be missing from it. Within `mesh.activate()` such operands are made to vary first (see
    `made_to_vary`)."""
    if not torch.is_grad_enabled():
        return
    for tensor in tensors:
        if tensor.requires_grad and varying_of(tensor) != varying:
            if torch._C._current_autograd_node() is not None and checkpoint_part() == "unpack_hook":
                return  # gradients go through the ops that computed these values first
            missing = [dim for dim in varying if dim not in varying_of(tensor)]
            raise ProgramError(
                f"a value that varies along '{missing[0]}' meets {tensor._ref.type}, which does not, and needs a "
                "gradient",
                hint="with mesh.activate():          # right: the gradient is summed over the workers\n"
                "    y = x * w\n"
                f"y = x * monarch.vary(w, {missing[0]!r})   # right: the same for one tensor",
                source=user_source(),
            )


_GRADIENTS = frozenset(["backward", "grad", "__set__", "register_hook", "retain_grad", "requires_grad_"])
"""Functions of torch that take tensors and compute nothing from them."""


class _Placed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, recording: Recording, tensor: torch.Tensor) -> DistributedTensor:
        ref = recording.constant(tensor)._ref
        return DistributedTensor(ref.fake, ref)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient


def placed(recording: Recording, tensor: torch.Tensor) -> DistributedTensor:
    """A plain tensor as one of the mesh, with its gradient."""
    made: DistributedTensor = _Placed.apply(recording, tensor)
    return made


def made_to_vary(function: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a torch function with those made to vary that need a gradient, where others vary: their
    gradients are then summed over the workers. Raises ProgramError where the function writes to such an argument."""
    tensors = list(distributed((args, kwargs)))
    varying = varying_together(tensors)
    name = getattr(function, "__name__", "")
    if not varying or not torch.is_grad_enabled() or name in _GRADIENTS:
        return args, kwargs
    written = _written(name, args, kwargs)
    recording = recording_for(next(tensor.mesh for tensor in tensors if varying_of(tensor)))

    def made(value: Any) -> Any:
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.requires_grad:
            taken = recording.taken(value)
            value = taken if isinstance(taken, DistributedTensor) else placed(recording, taken)
        if isinstance(value, DistributedTensor) and value.requires_grad and varying_of(value) != varying:
            if any(value is each for each in written):
                raise ProgramError(
                    f"{value._ref.type}, which is the same on all workers and needs a gradient, is changed in place "
                    f"by a value that varies along '{varying[0]}'",
                    hint="use the form of the op that returns a new tensor.",
                    source=user_source(),
                )
            return vary(value, varying)
        if type(value) in (list, tuple):
            return type(value)(map(made, value))
        return {key: made(entry) for key, entry in value.items()} if type(value) is dict else value

    return made(args), made(kwargs)


def _written(name: str, args: Any, kwargs: dict[str, Any]) -> list[Any]:
    """The arguments that a torch function writes to, by its name."""
    in_place = name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    found = [*args[:1]] if in_place or kwargs.get("inplace") else []
    found += [kwargs["out"]] if "out" in kwargs else []
    return [each for value in found for each in (value if isinstance(value, (list, tuple)) else [value])]


def distributed(value: Any) -> Iterator[DistributedTensor]:
    """The distributed tensors among arguments, nested in lists, tuples and dicts."""
    if isinstance(value, DistributedTensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from distributed(entry)
    elif isinstance(value, dict):
        for entry in value.values():
            yield from distributed(entry)


def refuse_write(tensor: DistributedTensor, varying: tuple[str, ...]) -> ProgramError:
    """The error of a write of a value that varies to a tensor that does not, and that outlives the program."""
    missing = [dim for dim in varying if dim not in varying_of(tensor)]
    return ProgramError(
        f"{tensor._ref.type}, which is the same on all workers along '{missing[0]}', is changed in place by a value "
        "that varies along it",
        hint=f"buffer.copy_(x)                                        # wrong: x varies along {missing[0]!r}\n"
        f"buffer.copy_(monarch.reduce(x, {missing[0]!r}, 'avg'))      # right: one value for all workers\n"
        f"buffer = monarch.vary(torch.zeros(3), {missing[0]!r})       # right: a buffer of each worker's own",
        source=user_source(),
    )
