"""Placing plain tensors and modules on a mesh."""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType, NoneType
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from monarch.compiler.errors import LayoutError, ProgramError, Source
from monarch.compiler.execution.events import say
from monarch.compiler.execution.presets import choose_layouts
from monarch.compiler.types import Layout, TensorType
from monarch.language.layouts import LayoutLike, as_layout
from monarch.language.placing.beginning import give_values, unmade_parts
from monarch.language.recorder.constrain import constrain
from monarch.language.recorder.dispatch import zeros
from monarch.language.recorder.recording import current_program, outside_programs
from monarch.language.source import user_source
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.plain import put
from monarch.language.tensors.shapes import like
from monarch.language.tensors.tensor import DistributedTensor, Ref

M = TypeVar("M", bound=nn.Module)

moved = WeakTensorKeyDictionary()
"""Plain parameters that `module_to_mesh` has replaced, with their names."""


def distribute(
    tensor: torch.Tensor,
    mesh: Mesh,
    layout: LayoutLike | None = None,
    *,
    sharding_spec: Sequence[Any] | None = None,
    placements: Sequence[Any] | None = None,
    name: str = "the tensor",
) -> DistributedTensor:
    """Place a plain tensor on a mesh: replicated, or as a layout says.

        distribute(x, mesh, "[@data, -]")                      # text, one entry for each tensor dim
        distribute(x, mesh, sharding_spec=["data", None])      # the same as a list
        distribute(x, mesh, placements=[Shard(0), Replicate()])  # DTensor's: one for each mesh dim

    The result is a leaf that requires grad if `tensor` does. Of a tensor that autograd has computed, plain or on
    another mesh, it has the history: the gradient goes back there. A tensor that is on the mesh already is
    redistributed. Returns at once. Raises LayoutError where the layout does not fit the tensor or the mesh, and
    ProgramError in a program.
    """
    source = user_source()
    given = [spec for spec in (layout, sharding_spec, placements) if spec is not None]
    if len(given) > 1:
        raise LayoutError("give one of layout, sharding_spec and placements", source=source)
    if current_program() is not None and not isinstance(tensor, DistributedTensor):
        raise ProgramError(
            "distribute() inside a program: its data would be built into the program",
            hint="place the tensor before the program runs, and pass it as an argument or close over it.",
            source=source,
        )
    check_mesh(mesh, "distribute(tensor, mesh, layout)", source)
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(
            f"{name} is a {type(tensor).__name__}, and meshes hold tensors",
            hint="place a model with monarch.module_to_mesh(model, mesh)."
            if isinstance(tensor, nn.Module)
            else "make one of it: torch.as_tensor(...).",
            source=source,
        )
    type_ = TensorType(tensor.dtype, tuple(tensor.shape))
    spec = as_layout(given[0], type_, mesh.spec, name, source) if given else Layout.replicated(tensor.ndim)
    if isinstance(tensor, DistributedTensor):
        if tensor.mesh is mesh:
            return tensor.redistribute(spec)
    if tensor.grad_fn is not None and torch.is_grad_enabled():
        return _Moved.apply(tensor, mesh, type_.with_layout(spec))
    placed = place(
        _fetched(tensor).requires_grad_(tensor.is_leaf and tensor.requires_grad), mesh, type_.with_layout(spec)
    )
    placed._ref.cell.free = not given
    return placed


def check_mesh(mesh: object, call: str, source: Source | None) -> None:
    """Raise LayoutError for an object that is no mesh; `call` shows the right call."""
    if not isinstance(mesh, Mesh):
        raise LayoutError(
            f"the mesh is a {type(mesh).__name__}",
            hint=f"the call is {call}, with a mesh such as Mesh(data=2).",
            source=source,
        )


class _Moved(torch.autograd.Function):
    """A plain tensor, or one of another mesh, placed on a mesh; its gradient goes back to where it came from."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, mesh: Mesh, type: TensorType) -> torch.Tensor:
        ctx.home = (tensor.mesh, tensor.tensor_type) if isinstance(tensor, DistributedTensor) else None
        ctx.source = user_source()
        return place(_fetched(tensor), mesh, type)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if current_program() is not None:
            raise ProgramError(
                "a program gives a gradient to a tensor that was placed on the mesh with its history",
                hint="the history is outside of the mesh. Place x.detach().requires_grad_() instead, return its "
                "gradient from the program,\nand continue outside: x.backward(gradient.full_tensor()).",
                source=ctx.source,
            )
        found = _fetched(gradient)
        return found if ctx.home is None else place(found, *ctx.home), None, None


def _fetched(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's data, plain, without history."""
    return tensor.full_tensor() if isinstance(tensor, DistributedTensor) else tensor.detach()


def place(tensor: torch.Tensor, mesh: Mesh, type: TensorType) -> DistributedTensor:
    """A leaf on the mesh with the data of a plain tensor, and its requires_grad. A meta tensor, which has no data, is
    made on the workers, of zeros."""
    if not tensor.is_meta or mesh.is_abstract or tensor.layout is not torch.strided:
        return put(tensor, mesh, type)
    fake = like(tensor)
    return DistributedTensor(fake, Ref(_zeros(mesh, type), fake), requires_grad=tensor.requires_grad)


def _zeros(mesh: Mesh, type: TensorType) -> Cell:
    """A cell of zeros that the workers have made."""
    with outside_programs(), torch.no_grad():
        laid_out = constrain(zeros(mesh, type.shape, type.dtype), type.layout)
        mesh.flush()
    return laid_out._ref.cell


def module_to_mesh(
    module: M,
    mesh: Mesh,
    layouts: Mapping[str, LayoutLike | Mapping[int, LayoutLike] | None] | str | None = None,
    *,
    meshes: Mapping[str, Mesh] = MappingProxyType({}),
) -> M:
    """Place a module's parameters and buffers on a mesh, in place; returns the module.

    `layouts` maps patterns of parameter and buffer names to layouts: a glob ("blocks.*.up.weight"), or a regular
    expression between slashes ("/blocks\\.[0-3]\\..*/"); of several that match, the last counts. A layout may also be
    given for each rank ({1: "[-]", 2: "[@model, -]"}); None means replicated. Parameters that no pattern names are
    replicated. "auto" chooses layouts from the mesh, the module and the workers' memory, and prints what it chose
    (`monarch.stdlib.parallel.automatic`).

    Without `layouts` every parameter is sharded over the first mesh dim as `dim_to_shard` says, and what is smaller is
    replicated, as fully sharded data parallel does. Tied parameters stay tied. Buffers that no pattern names are
    replicated. `meshes` has by name the parameters and buffers that go to other meshes, of the same dims: a tied one
    to that of its first name.

    A module that was made on PyTorch's meta device gets its values on the workers: from its own `_init_weights(part)`,
    as models of `transformers` have it, called with each module that has tensors there, or else from these modules'
    `reset_parameters()`. `monarch.load` then reads a checkpoint in place; buffers that are in none keep their values.
    Tensors of the state dict that get no value so hold NaN until they are loaded, and a warning names them.

    Raises LayoutError for a pattern that matches nothing, a layout that does not fit, and a module that is on a mesh
    made before, or on this one in another layout; ProgramError for a tensor that cannot be given its values, and that
    no checkpoint has.
    """
    source = user_source()
    check_mesh(mesh, "module_to_mesh(module, mesh, layouts=layouts)", source)
    if not isinstance(module, nn.Module):
        raise LayoutError(
            f"the module is a {type(module).__name__}"
            if not isinstance(module, type)
            else f"{module.__name__} is a class",
            hint="give the nn.Module itself, model; one tensor is placed by monarch.distribute(tensor, mesh, layout).",
            source=source,
        )
    if not isinstance(layouts, (Mapping, str, NoneType)):
        raise LayoutError(f"layouts={layouts!r}", hint=_LAYOUTS, source=source)
    if isinstance(layouts, str):
        layouts = _preset(layouts, module, mesh)
    names = _names(module)
    chosen: Chosen
    if layouts is None:
        chosen = {
            name: ("", _fully_sharded(tensor, mesh))
            for name, tensor in names.items()
            if isinstance(tensor, nn.Parameter) and not isinstance(tensor, DistributedTensor)
        }
        bound = set[int]()
    else:
        chosen = _chosen(layouts, module, names, source)
        bound = {id(names[name]) for name in chosen}
    unmade = unmade_parts(module)
    types = _types(names, chosen, mesh, source)
    placed: dict[int, DistributedTensor] = {}
    there = [tensor.mesh for tensor in names.values() if isinstance(tensor, DistributedTensor)]
    if there and not types and all(other._root is not mesh._root for other in there):
        raise LayoutError(
            f"the module is already on another mesh, {there[0]!r}, and not on {mesh!r}",
            hint="make the mesh once, where a cell or a function runs again; or place a new module, and give it the "
            "values:\nnew.load_state_dict({name: x.full_tensor() for name, x in module.state_dict().items()})",
            source=source,
        )
    for name, tensor in names.items():
        if id(tensor) in types and id(tensor) not in placed:
            made: Any = place(tensor.detach(), meshes.get(name, mesh), types[id(tensor)][1])
            made._ref.cell.free = id(tensor) not in bound
            if isinstance(tensor, nn.Parameter):
                made = nn.Parameter(made, requires_grad=tensor.requires_grad)
                _take_over(made, tensor)
                moved[tensor] = name
            vars(made).update({key: value for key, value in vars(tensor).items() if key not in vars(made)})
            placed[id(tensor)] = made
    for owner in module.modules():
        for slots in (owner._parameters, owner._buffers):
            for key, held in slots.items():
                if held is not None and id(held) in placed:
                    slots[key] = placed[id(held)]  # type: ignore[assignment]
    if not mesh.is_abstract:
        give_values(module, unmade, mesh)
    return module


Chosen = Mapping[str, tuple[str, LayoutLike | None]]
"""For the names of tensors: the pattern that counts, and the layout that it gives."""


def _chosen(
    layouts: Mapping[str, LayoutLike | Mapping[int, LayoutLike] | None],
    module: nn.Module,
    names: Mapping[str, torch.Tensor],
    source: Source | None,
) -> Chosen:
    """The layouts that patterns give. Raises LayoutError for a pattern that matches no name."""
    chosen: dict[str, tuple[str, LayoutLike | None]] = {}
    for pattern, layout in layouts.items():
        matching = _matching(pattern, names)
        if not matching:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.3) or list(names)[:3]
            raise LayoutError(
                f"no parameter or buffer matches '{pattern}'",
                hint=f"did you mean {' or '.join(repr(name) for name in close)}? "
                f"{type(module).__name__} has {len(names)} parameters and buffers.",
                source=source,
            )
        for name in matching:
            chosen[name] = pattern, _of_rank(layout, names[name], name)
    return chosen


def _types(
    names: Mapping[str, torch.Tensor], chosen: Chosen, mesh: Mesh, source: Source | None
) -> dict[int, tuple[str, TensorType]]:
    """For each plain tensor, by its id, its first name and its type on the mesh. Raises LayoutError where layouts do
    not fit, and ProgramError for a tensor that cannot be moved."""
    types: dict[int, tuple[str, TensorType]] = {}
    for name, tensor in names.items():
        layout = chosen[name][1] if name in chosen else None
        if isinstance(tensor, DistributedTensor):
            if layout is not None and tensor.mesh is mesh:
                _check_as_it_is(tensor, name, _type(name, names, chosen, mesh, source))
            continue
        _check_movable(name, tensor, source)
        type_ = _type(name, names, chosen, mesh, source)
        first, known = types.get(id(tensor), (name, type_))
        if known != type_:
            if layout is None:
                continue
            if first in chosen and chosen[first][1] is not None:
                raise LayoutError(
                    f"'{first}' and '{name}' are one tied parameter, and have two layouts",
                    hint=f"{known} and {type_}: give one of them.",
                    source=source,
                )
        types[id(tensor)] = (name, type_)
    return types


def _type(
    name: str, names: Mapping[str, torch.Tensor], chosen: Chosen, mesh: Mesh, source: Source | None
) -> TensorType:
    """The type of one of these tensors in its chosen layout, or replicated."""
    tensor = names[name]
    type_ = TensorType(tensor.dtype, tuple(tensor.shape))
    pattern, layout = chosen.get(name, ("", None))
    if layout is None:
        return type_
    try:
        return type_.with_layout(as_layout(layout, type_, mesh.spec, f"'{name}'", source))
    except LayoutError as error:
        ranks = sorted({names[each].ndim for each in _matching(pattern, names)})
        if len(ranks) < 2 or not error.message.endswith(f"has {tensor.ndim}"):
            raise
        raise LayoutError(
            error.message,
            hint=f"'{pattern}' names tensors of {' and '.join(map(str, ranks))} dims; each rank may have its "
            f"layout: {{'{pattern}': {{{', '.join(f'{rank}: ...' for rank in ranks)}}}}}.",
            source=source,
        ) from None


def _check_movable(name: str, tensor: torch.Tensor, source: Source | None) -> None:
    """Raise ProgramError for a tensor that would lose its history, or its class, on a mesh."""
    if tensor.grad_fn is not None:
        raise ProgramError(
            f"'{name}' has a history in autograd, which a module on a mesh would lose",
            hint="compute it in forward(), or keep it without history: register_buffer(name, x.detach()).",
            source=source,
        )
    if nn.Parameter in type(tensor).__mro__[1:] and not is_lazy(tensor):
        raise ProgramError(
            f"'{name}' is a {type(tensor).__name__}, and on a mesh it would be none",
            hint=f"make it an nn.Parameter: attributes that it has (module.{name}.tag = ...) are kept.",
            source=source,
        )


def _check_as_it_is(tensor: DistributedTensor, name: str, said: TensorType) -> None:
    """Raise LayoutError for a tensor that is on the mesh already, in another layout than the given one."""
    if tensor.tensor_type != said:
        raise LayoutError(
            f"'{name}' is on the mesh already, as {tensor.tensor_type}, and layouts say {said}",
            hint="place a new module, with layouts for all of it, and give it the values:\n"
            "new.load_state_dict({name: x.full_tensor() for name, x in module.state_dict().items()})",
            source=user_source(),
        )


def _take_over(made: DistributedTensor, tensor: torch.Tensor) -> None:
    """Give a parameter on a mesh the gradient and the hooks of the plain one that it replaces."""
    if tensor.grad is not None:
        made.grad = place(tensor.grad, made.mesh, made.tensor_type)
    made._backward_hooks = tensor._backward_hooks
    made._post_accumulate_grad_hooks = tensor._post_accumulate_grad_hooks


_LAYOUTS = """give "auto", or a dict from names to layouts: {"*.weight": "[@data, -]"}, or what
fully_shard(model, mesh, "data") or another function of monarch.stdlib.parallel returns."""


def _preset(name: str, module: nn.Module, mesh: Mesh) -> Mapping[str, LayoutLike]:
    if name != "auto":
        raise LayoutError(f"layouts={name!r}", hint=_LAYOUTS, source=user_source())
    layouts = choose_layouts(module, mesh)
    say("layouts", layouts.why)
    return layouts


def _names(module: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer by name, tied ones under each of their names."""
    found: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    found.update(module.named_buffers(remove_duplicate=False))
    return found


def _matching(pattern: str, names: Collection[str]) -> list[str]:
    """The names that a pattern matches. A preset gives each name by itself: these are not tried one by one."""
    if len(pattern) > 1 and pattern[0] == pattern[-1] == "/":
        return [name for name in names if re.fullmatch(pattern[1:-1], name)]
    if not any(letter in pattern for letter in "*?["):
        return [pattern] if pattern in names else []
    return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


def _of_rank(layout: Any, tensor: torch.Tensor, name: str) -> LayoutLike | None:
    if isinstance(layout, Mapping):
        if tensor.ndim not in layout:
            raise LayoutError(
                f"no layout for '{name}', which has {tensor.ndim} dims", hint=f"the dict has ranks {sorted(layout)}."
            )
        return layout[tensor.ndim]
    return layout


def _fully_sharded(tensor: torch.Tensor, mesh: Mesh) -> Layout | None:
    if not mesh.spec.dims:
        return None
    name, size = mesh.spec.dims[0]
    return Layout.replicated(tensor.ndim).place(name, dim_to_shard(tensor.shape, size))


def dim_to_shard(shape: Sequence[int], parts: int) -> int | None:
    """The dim along which to cut a parameter into so many blocks: its first that divides, or else its longest, of which
    padding adds the least; None where all are shorter than that."""
    divides = (dim for dim, length in enumerate(shape) if length and length % parts == 0)
    longest = max(range(len(shape)), key=lambda dim: shape[dim], default=None)
    return next(divides, longest if longest is not None and shape[longest] >= parts else None)
