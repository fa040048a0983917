"""The signature of a call: what of its arguments a trace depends on."""

from __future__ import annotations

import ast
import datetime
import functools
import inspect
import linecache
import re
import uuid
from collections.abc import Callable, Container, Mapping
from decimal import Decimal
from fractions import Fraction
from types import CodeType
from typing import Annotated, Any, get_origin

import numpy as np
import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import MonarchError, ProgramError, Source
from monarch.compiler.types import TensorType
from monarch.language.layouts import from_annotation
from monarch.language.programs.classify import kind_of
from monarch.language.programs.held import PLAIN
from monarch.language.programs.own import Belongings
from monarch.language.programs.passed import repeated
from monarch.language.source import user_source
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.history import end_of
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.plain import check_dense
from monarch.language.tensors.tensor import DistributedTensor

_HISTORY = "with a history"
_ENDED = "a program's result"
_LEAVES = frozenset((DistributedTensor, torch.Tensor, torch.nn.Parameter, float, int, bool, str))
"""Types of arguments that are known to hold no others."""


def signature(args: Any, kwargs: Any, program: str, moving: Container[int] = ()) -> tuple[Any, list[Any], Any]:
    """A key that is equal for calls that one trace serves, the flat arguments, and their pytree structure (None where
    the arguments are a flat tuple). The key ends with the values of ints, but for those that are inputs (`moving`, by
    the leaf's number)."""
    leaves = list(args)
    spec: Any = None
    if kwargs or not _LEAVES.issuperset(map(type, leaves)):
        nested = [leaf for leaf in leaves if type(leaf) not in _LEAVES]
        if kwargs or any(
            isinstance(leaf, (list, tuple, dict)) or type(leaf) in pytree.SUPPORTED_NODES for leaf in nested
        ):
            try:
                leaves, spec = pytree.tree_flatten((args, kwargs))
            except RecursionError:
                raise ProgramError(
                    f"an argument of '{program}' holds itself, or lists and dicts in too many levels",
                    hint="pass its parts as arguments of their own, or have the program close over it.",
                    source=user_source(),
                ) from None
    repeats = repeats_of(leaves) if len(leaves) > 1 else ()
    key: list[Any] = [modes(), spec, repeats if spec is None else (repeats, repeated(args, kwargs))]
    ints: list[tuple[int, int]] = []
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, DistributedTensor):
            owner, ref = leaf, leaf._ref
            cell = ref.cell
            if cell.mesh.pending is not None:
                cell.mesh.flush(program)
            if cell.failure is not None:
                cell.raise_failure()
            if ref.parent is not None or (cell.recording is not None and cell.handle is None):
                leaves[number] = leaf = materialized(leaf)
                cell = leaf._ref.cell
            requires_grad = leaf.requires_grad
            key += (id(cell.mesh), cell.type, requires_grad)
            if not ref.fake.is_contiguous():
                key.append(ref.fake.stride())
            if owner.grad_fn is not None:
                key.append(_HISTORY if end_of(owner) is None else _ENDED)
            if requires_grad or len(owner.__dict__) > 1:
                key.append(Belongings.of(owner))
        elif isinstance(leaf, torch.Tensor):
            key += (leaf.dtype, leaf.shape, leaf.requires_grad, type(leaf))
            if not leaf.is_contiguous():
                key.append(leaf.stride())
            if leaf.requires_grad or leaf.__dict__:
                key.append(Belongings.of(leaf))
        elif type(leaf) is int:
            key.append(int)
            if number not in moving:
                ints.append((number, leaf))
        else:
            add_plain(key, leaf)
    key.append(tuple(ints))
    for number, first in repeats:  # a copy of a view is one too
        leaves[number] = leaves[first]
    return tuple(key), leaves, spec


def without_ints(key: tuple[Any, ...], moving: Container[int]) -> tuple[Any, ...]:
    """A signature's key without the values of ints that have become inputs."""
    return (*key[:-1], tuple([(number, value) for number, value in key[-1] if number not in moving]))


def repeats_of(leaves: list[Any]) -> tuple[tuple[int, int], ...]:
    """Which arguments, by number, are the very object that an earlier one is; not of plain values, which cannot
    change."""
    if len({*map(id, leaves)}) == len(leaves):
        return ()
    first: dict[int, int] = {}
    found = [(number, first.setdefault(id(leaf), number)) for number, leaf in enumerate(leaves)]
    return tuple([pair for pair in found if pair[0] != pair[1] and type(leaves[pair[0]]) not in PLAIN])


def add_plain(key: list[Any], leaf: Any) -> None:
    """Add what a trace depends on of an argument that is no tensor to a signature's key."""
    if type(leaf) is float:
        key.append(float)
    elif type(leaf) is complex:
        key += (complex, repr(leaf))
    elif type(leaf) in PLAIN and type(leaf) is not slice:
        key += (type(leaf), leaf)
    else:
        key.append(type(leaf))
        if type(leaf) in _BY_TEXT or isinstance(leaf, np.generic) and not isinstance(leaf, np.void):
            key.append(repr(leaf))
        elif isinstance(leaf, _VALUES):  # of the rest of such an object guards know
            key += [base.__repr__(leaf) for base in _VALUES if isinstance(leaf, base)]
        elif type(leaf) is slice or isinstance(kind_of(leaf), str):
            key.append(_Same(leaf))  # guards cannot look into it


_BY_TEXT = (Fraction, Decimal, datetime.date, datetime.datetime, datetime.time, datetime.timedelta, uuid.UUID)
"""Types whose text says all that there is of a value."""
_VALUES: tuple[Any, ...] = (int, float, complex, str, bytes)


class _Same:
    """An object in a signature's key: another one is another argument."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def materialized(leaf: DistributedTensor) -> DistributedTensor:
    ref = leaf._materialized()
    if ref is leaf._ref:
        return leaf
    made = DistributedTensor(ref.fake, ref, requires_grad=leaf.requires_grad)
    made._source, made._history = leaf._ref.cell, leaf.grad_fn
    return made


def source_of(leaf: DistributedTensor) -> Cell:
    """The storage of an argument as its caller has it: of a view, whose leaf is a copy, that which it looks at."""
    return leaf._source or leaf._ref.cell


def modes() -> tuple[Any, ...]:
    """PyTorch's settings that change what Python code traces to."""
    autocast = torch._C._is_any_autocast_enabled()  # which is quicker to ask than one device's
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.get_default_dtype(),
        autocast and torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        autocast and torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.are_deterministic_algorithms_enabled(),
    )


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a callable that does not say
        return []


def written(parameter: inspect.Parameter) -> str:
    """A parameter's annotation, where it is no tensor type, and default, as written."""
    annotation = parameter.annotation
    text = "" if annotation is parameter.empty else inspect.formatannotation(annotation).strip("'")
    return text if parameter.default is parameter.empty else f"{text} = {parameter.default!r}".strip()


def no_function(function: Any) -> ProgramError:
    """The error of a program of what is no function."""
    what, hint = repr(function), "write @monarch.program above a function, with options by name."
    if isinstance(function, Mesh):
        hint = "pass its mesh by name: @monarch.program(mesh=mesh)."
    elif isinstance(function, type):
        what = f"the class '{function.__name__}'"
        hint = "write @monarch.program above the method that is a step, or make a program of an object: program(model)."
    return ProgramError(f"a program is a function, not {what}", hint=hint, source=user_source())


def tensor_annotations(function: Callable[..., Any]) -> dict[str, TensorType]:
    found: dict[str, TensorType] = {}
    while isinstance(function, functools.partial):
        function = function.func
    for name, annotation in getattr(function, "__annotations__", {}).items():
        try:
            type_ = from_annotation(annotation, getattr(function, "__globals__", {}))
        except MonarchError as error:
            source = annotated_at(getattr(inspect.unwrap(function), "__code__", None), name)
            raise type(error)(f"parameter '{name}': {error.message}", hint=error.hint, source=source) from None
        if type_ is not None and name != "return":
            found[name] = type_
    return found


def annotated_at(code: CodeType | None, name: str) -> Source | None:
    """Where a parameter stands in its function's source: the name, or the function's first line where that is not
    found."""
    if code is None:
        return None
    for number in range(code.co_firstlineno, max(line or 0 for *_, line in code.co_lines()) + 1):
        line = linecache.getline(code.co_filename, number)
        if (found := re.search(rf"\b{re.escape(name)}\s*:", line)) is not None:
            return Source(code.co_filename, number, found.start() + 1, found.start() + 1 + len(name))
    return Source(code.co_filename, code.co_firstlineno)


def mesh_annotations(function: Callable[..., Any]) -> dict[str, Mesh]:
    """The meshes that parameters' annotations name, `x: Annotated[torch.Tensor, "f32[64@data, 8]", mesh]`: of a
    program of several meshes the one on which an argument is placed."""
    while isinstance(function, functools.partial):
        function = function.func
    names = getattr(function, "__globals__", {})
    found = {name: _mesh_in(annotation, names) for name, annotation in getattr(function, "__annotations__", {}).items()}
    return {name: mesh for name, mesh in found.items() if mesh is not None}


def _mesh_in(annotation: object, names: Mapping[str, Any]) -> Mesh | None:
    if get_origin(annotation) is Annotated:
        return next((entry for entry in annotation.__metadata__ if isinstance(entry, Mesh)), None)  # type: ignore[attr-defined]
    if not isinstance(annotation, str):
        return None
    try:
        written = ast.parse(annotation.strip(), mode="eval")
    except SyntaxError:
        return None
    for each in (names.get(node.id) for node in ast.walk(written) if isinstance(node, ast.Name)):
        if isinstance(each, Mesh):
            return each
        if get_origin(each) is Annotated and (mesh := _mesh_in(each, {})) is not None:
            return mesh
    return None


def type_of(leaf: torch.Tensor) -> TensorType:
    """The type of an argument: a distributed tensor's own, else replicated. Raises LayoutError for a sparse tensor."""
    if isinstance(leaf, DistributedTensor):
        return leaf.tensor_type
    check_dense(leaf)
    return TensorType(leaf.dtype, tuple(leaf.shape))
