"""A program's arguments for tracing it: from `--arg`, from an example in the file, from annotations.

In this order: what `--arg` says of a parameter; what `<program>_inputs()` (or `example_inputs()`) of the file returns,
a tuple of the arguments in order or a dict by name; the tensor type that the parameter is annotated with; its default.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import torch

from monarch.compiler.errors import LayoutError, MonarchError, ProgramError, did_you_mean
from monarch.compiler.symbols import is_named
from monarch.compiler.text import parse_type
from monarch.compiler.types import DTYPES, TensorType
from monarch.language.layouts import from_annotation
from monarch.language.placing.distribute import place
from monarch.language.programs.environment import find_environment
from monarch.language.programs.program import Program
from monarch.language.tensors.mesh import Mesh

_SEVERAL = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def arguments_of(
    program: Program[Any, Any], path: str, module: ModuleType, given: Mapping[str, str]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, int]]:
    """The arguments to trace `program` with, tensors without data where only a type is known; and the named sizes that
    nothing gives a value, with an example of each. `path` is what errors call it. Raises MonarchError for one that is
    missing, unknown or does not parse."""
    signature = inspect.signature(program.__wrapped__)
    parameters = {name: p for name, p in signature.parameters.items() if p.kind not in _SEVERAL}
    for name in given:
        if name not in parameters:
            meant = did_you_mean(name, parameters, "\n")
            raise ProgramError(
                f"--arg {name}: {path} has no parameter '{name}'",
                hint=f"{meant}its parameters are {', '.join(parameters) or 'none'}.",
            )
    mesh = program._mesh or find_environment(program.__wrapped__).mesh()
    example = _example(program, module, signature)
    bound = signature.bind_partial()
    bound.arguments.update(example)
    examples: dict[str, int] = {}
    for name, parameter in parameters.items():
        if name in given:
            bound.arguments[name] = _argument(name, given[name], mesh, path)
        elif name not in example:
            type_ = _annotated(parameter)
            if type_ is not None:
                type_ = type_.at(_examples(type_, mesh, examples))
                bound.arguments[name] = torch.empty(type_.shape, dtype=type_.dtype, device="meta")
            elif parameter.default is parameter.empty:
                raise _missing(parameter, path, mesh)
    return bound.args, bound.kwargs, examples


def _examples(type: TensorType, mesh: Mesh | None, known: dict[str, int]) -> dict[str, int]:
    """Examples of the names of a type's sizes, beside those that are `known`: all different, and such that the mesh
    divides them."""
    for size in type.shape:
        if is_named(size):
            workers = 1 if mesh is None else mesh.spec.workers
            known.setdefault(str(size), workers * (_LEAST // workers + 1 + len(known)))
    return known


_LEAST = 63
"""Examples are larger, and so unlike most of the sizes that a program has itself."""


def _example(program: Program[Any, Any], module: ModuleType, signature: inspect.Signature) -> dict[str, Any]:
    own = f"{program.__wrapped__.__name__}_inputs"
    maker = getattr(module, own, None) or getattr(module, "example_inputs", None)
    if not callable(maker):
        return {}
    name = getattr(maker, "__name__", own)
    made = maker()
    if isinstance(made, torch.Tensor):
        made = (made,)
    try:
        if isinstance(made, Mapping):
            return dict(signature.bind_partial(**made).arguments)
        if isinstance(made, tuple | list):
            return dict(signature.bind_partial(*made).arguments)
    except TypeError as error:
        raise ProgramError(f"the result of {name}() does not fit the program: {error}") from None
    raise ProgramError(
        f"{name}() returns a {type(made).__name__}", hint="it returns the arguments as a tuple, or a dict by name."
    )


def _argument(name: str, text: str, mesh: Mesh | None, path: str) -> Any:
    """The value of `--arg name=text`: a tensor of a type, or a Python value."""
    if text.partition("[")[0].strip() in DTYPES:
        type_ = _parse(f"--arg {name}", text)
        if mesh is None:
            if type_.layout.is_replicated:
                return torch.empty(type_.shape, dtype=type_.dtype, device="meta")
            raise LayoutError(
                f"--arg {name}: {type_} names a mesh dim, and {path} has no mesh",
                hint="give it one: --mesh data=2,model=2.",
            )
        try:
            type_.check(mesh.spec, f"'{name}'")
        except LayoutError as error:
            raise LayoutError(f"--arg {name}: {error.message}", hint=error.hint) from None
        return place(torch.empty(type_.shape, dtype=type_.dtype, device="meta"), mesh, type_)
    try:
        return ast.literal_eval({"true": "True", "false": "False", "none": "None"}.get(text, text))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        if "[" in text:
            _parse(f"--arg {name}", text)
        raise ProgramError(
            f"--arg {name}: {text!r} is neither a tensor type nor a value",
            hint="write a type, f32[64@data, 1024], a number, true, false, none, or a 'string' in quotes.",
        ) from None


def _parse(what: str, text: str) -> TensorType:
    try:
        return parse_type(text)
    except MonarchError as error:
        raise LayoutError(f"{what}: {error.message}", hint=error.hint) from None


def _annotated(parameter: inspect.Parameter) -> TensorType | None:
    try:
        return from_annotation(parameter.annotation)
    except MonarchError as error:
        raise type(error)(f"parameter '{parameter.name}': {error.message}", hint=error.hint) from None


def _missing(parameter: inspect.Parameter, path: str, mesh: Mesh | None) -> ProgramError:
    name, annotation = parameter.name, parameter.annotation
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    text = text.strip("'\" ")
    note = ""
    if text in ("int", "float", "bool", "str"):
        value = {"int": "1", "float": "0.1", "bool": "true", "str": "'text'"}[text]
        hint = f"say it: --arg {name}={value}"
    else:
        where = f"@{mesh.mesh_dim_names[0]}" if mesh is not None and mesh.mesh_dim_names else ""
        hint = f'give its type: --arg {name}="f32[64{where}, 1024]"\nor annotate it: {name}: "f32[64{where}, 1024]"'
        if text and "[" in text and text.isascii() and parameter.annotation is not parameter.empty:
            try:
                parse_type(text)
            except MonarchError as error:
                note = f"its annotation is no tensor type: {error.message}\n{error.hint}\n"
    example = f"\nor return it from {path.rpartition('.')[2].removesuffix('()')}_inputs() in the file."
    return ProgramError(f"{path} takes '{name}', and its type is unknown", hint=note + hint + example)
