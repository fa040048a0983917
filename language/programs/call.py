"""One call of a program: what it is given, and what the annotations of the program's function say of that."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from monarch.compiler.errors import ArgumentWritten, LayoutError, ProgramError, Source
from monarch.compiler.symbols import Scope, has_names
from monarch.compiler.types import MeshSpec, TensorType
from monarch.language.errors import ArgumentsError
from monarch.language.programs.arrays import ARRAYS, as_annotated
from monarch.language.programs.named import bound, family_of, values_of
from monarch.language.programs.nodes import Path
from monarch.language.programs.signature import annotated_at, mesh_annotations, parameters, tensor_annotations, type_of
from monarch.language.source import user_source
from monarch.language.tensors.history import End
from monarch.language.tensors.mesh import Mesh
from monarch.language.tensors.tensor import DistributedTensor

ADVICE = "Pass the value as an argument, or keep it in a tensor on the mesh."
"""What helps a program that is traced again at each call."""
OF_DATA = ("data_ptr", "bytes", "_version", "shape", "form", "dtype")
"""What guards ask of the data of plain tensors and arrays, at the end of a path."""
_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Annotations:
    """The tensor types that a function's parameters are annotated with. Does not keep the function alive."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.types = tensor_annotations(function)
        self.meshes = mesh_annotations(function)
        self._code = getattr(inspect.unwrap(function), "__code__", None)
        self.names_sizes = any(has_names(type_.shape) for type_ in self.types.values())
        self._positions = [
            (number, parameter.name)
            for number, parameter in enumerate(parameters(function))
            if parameter.name in self.types and parameter.kind in _POSITIONAL
        ]

    def check(self, name: str, mesh: MeshSpec) -> None:
        """Raise LayoutError, at the annotation of this parameter, unless its type can be on the mesh."""
        try:
            self.types[name].check(mesh, f"'{name}'")
        except LayoutError as error:
            raise LayoutError(error.message, hint=error.hint, source=annotated_at(self._code, name)) from None

    def converted(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments, with tensors for numbers, lists and arrays where the annotation names a tensor type."""
        if not self.types:
            return args, kwargs
        for number, name in self._positions:
            if number < len(args) and isinstance(args[number], ARRAYS):
                made = as_annotated(args[number], self.types[name], name)
                args = (*args[:number], made, *args[number + 1 :])
        for name in kwargs:
            if isinstance(kwargs[name], ARRAYS) and name in self.types:
                kwargs = {**kwargs, name: as_annotated(kwargs[name], self.types[name], name)}
        return args, kwargs


def with_written(args: Any, kwargs: Any) -> list[Any]:
    """The arguments, flat, of a program that changes some of them in place, and a list of those on the mesh."""
    leaves = pytree.tree_leaves((args, kwargs))
    return [*leaves, [leaf for leaf in leaves if isinstance(leaf, DistributedTensor)]]


@dataclass
class ProgramCall:
    """What one call gives a program's function."""

    function: Callable[..., Any]
    name: str
    """The program's."""
    annotations: Annotations
    args: Any
    kwargs: Any
    leaves: list[Any]
    """The arguments, flat. Views are replaced by copies, so a leaf may be another object than the caller's."""
    _spec: Any
    """Their pytree structure, or None where they are a flat tuple."""
    moving_ints: frozenset[int]
    """The ints among the leaves, by number, that are inputs: their values change from call to call."""
    family: Any = None
    """A key that is equal for calls that differ in the values of named sizes alone, where one plan may serve those."""
    examples: bool = False
    """Whether the arguments stand for others: one that stands for two is two inputs."""
    written: bool = False
    """Whether the program changes tensors among its arguments in place: those on the mesh are read and changed as what
    it closes over is, and stand once more, as a list, behind the leaves."""

    @cached_property
    def spec(self) -> Any:
        """The pytree structure of `(args, kwargs)`."""
        return pytree.tree_flatten((self.args, self.kwargs))[1] if self._spec is None else self._spec

    def write(self) -> bool:
        """Have it read the tensors among its arguments that are on the mesh as what it closes over. False where it does
        already, or there are none."""
        if self.written or not any(isinstance(leaf, DistributedTensor) for leaf in self.leaves):
            return False
        self.leaves, self.written, self.family = with_written(self.args, self.kwargs), True, None
        return True

    @property
    def moving(self) -> set[Path]:
        """The places of these tensors, which are others at each call."""
        if not self.written:
            return set()
        at = len(self.leaves) - 1
        return {("argument", at, number) for number in range(len(self.leaves[at]))}

    def path_of(self, number: int) -> str:
        """How an argument is written in the function, by its number among the leaves: "i", "state['n']"."""
        path: Any = pytree.tree_flatten_with_path((self.args, self.kwargs))[0][number][0]
        group, first, *rest = path
        key = first.key if group.idx else first.idx
        names = [each.name for each in parameters(self.function) if each.kind in _POSITIONAL]
        name = names[key] if isinstance(key, int) and key < len(names) else key
        return f"{name}{pytree.keystr(tuple(rest))}"

    def changing(self, place: Path) -> tuple[str, str, str]:
        """What to say of a place where something else stands at each call: its name, that, and what to do."""
        is_argument = place[0] == "argument" and place[1] < len(self.given)
        names = [step for step in place[2 * is_argument :] if isinstance(step, str) and step not in OF_DATA]
        name = names[-1] if names else ""
        if not is_argument and place[-1] in OF_DATA:
            what = f"'{name}' is no tensor on a mesh, so its content is built into the plan, and differs at each call"
            return name, what, "Keep it on the mesh: monarch.distribute(torch.as_tensor(value), mesh)."
        if not is_argument:
            return name, f"'{name}' differs at each call", ADVICE
        path, kind = self.path_of(place[1]), type(self.leaves[place[1]])
        if issubclass(kind, np.ndarray):
            return "", f"the array '{path}' is built into the plan", "Pass it as a tensor: torch.as_tensor(array)."
        return (
            name,
            f"'{path}' is a {kind.__name__}, and its content ('{name}', which differs at each call) is built "
            "into the plan",
            "Pass tensors by themselves or in a tuple or dict; torch.export.register_dataclass(Class) has those of a "
            "dataclass passed so.",
        )

    @property
    def given(self) -> list[Any]:
        """The caller's own object for each leaf."""
        return pytree.tree_leaves((self.args, self.kwargs))

    @property
    def end(self) -> End:
        """Where the history of its results ends."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        return End(self.name, None if code is None else Source(code.co_filename, code.co_firstlineno))

    @cached_property
    def named(self) -> list[tuple[str, Any]]:
        """The arguments that have a tensor type as annotation."""
        types = self.annotations.types
        if not types:
            return []
        arguments = inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments
        return [(name, value) for name, value in arguments.items() if name in types]

    @cached_property
    def values(self) -> dict[str, int]:
        """What the names of sizes stand for. Raises ProgramError where one stands for two numbers."""
        return values_of(self.named, self.annotations.types) if self.annotations.names_sizes else {}

    @cached_property
    def names(self) -> dict[int, str]:
        """The parameters' names of the tensors that are arguments themselves, by their place among the leaves."""
        try:
            arguments = inspect.signature(self.function).bind(*self.args, **self.kwargs).arguments
        except TypeError:  # a wrong call: running the function says so in Python's words
            return {}
        found = {id(value): name for name, value in arguments.items() if isinstance(value, torch.Tensor)}
        return {number: found[id(leaf)] for number, leaf in enumerate(self.leaves) if id(leaf) in found}

    @cached_property
    def meshes(self) -> dict[int, Mesh]:
        """The meshes that annotations name for plain tensors among the leaves, by number."""
        known = self.annotations.meshes
        return {
            number: known[name]
            for number, name in (self.names if known else {}).items()
            if name in known and not isinstance(self.leaves[number], DistributedTensor)
        }

    def belongs(self) -> None:
        """Find the family of calls that it belongs to, if its annotations name sizes."""
        if not self.values or self.written:
            return
        if all(_is_row_major(leaf) for leaf in self.given if isinstance(leaf, torch.Tensor)):
            self.family = family_of(
                self.leaves, self._spec, self.moving_ints, self.named, self.annotations.types, self.values
            )

    def types(self, mesh: Mesh, scope: Scope | None) -> dict[int, TensorType]:
        """The types of the tensors among the leaves, by number: with the sizes of `scope`, if there is one."""
        return {
            number: self._type(leaf, mesh, scope)
            for number, leaf in enumerate(self.leaves)
            if isinstance(leaf, torch.Tensor)
        }

    def _type(self, leaf: torch.Tensor, mesh: Mesh, scope: Scope | None) -> TensorType:
        for name, argument in self.named:
            if argument is leaf and (self.annotations.names_sizes or not isinstance(leaf, DistributedTensor)):
                on = self.annotations.meshes.get(name, mesh)
                self.annotations.check(name, on.spec)
                return bound(self.annotations.types[name], self.values, scope)
        return type_of(leaf)

    def _check_arguments(self) -> None:
        try:
            takes = inspect.signature(self.function, follow_wrapped=False)
        except ValueError:  # a callable that does not say: calling it does
            return
        try:
            takes.bind(*self.args, **self.kwargs)
        except TypeError as error:
            bare = [parameter.replace(annotation=parameter.empty) for parameter in takes.parameters.values()]
            hint = f"the call is {self.name}{takes.replace(parameters=bare, return_annotation=takes.empty)}."
            raise ArgumentsError(f"{self.name}: {error}", hint=hint, source=user_source()) from None

    def check(self) -> None:
        """Raise ProgramError for arguments that the function does not take, or that are not what annotations say."""
        self._check_arguments()
        for name, value in self.named:
            wanted, on = self.annotations.types[name], self.annotations.meshes.get(name)
            if on is not None and isinstance(value, DistributedTensor) and value.mesh is not on:
                raise ProgramError(
                    f"argument '{name}' of {self.name} is on {value.mesh!r}, and its annotation says {on!r}",
                    hint=f"pass {name}.to(mesh), or change the annotation.",
                    source=user_source(),
                )
            if isinstance(value, torch.Tensor) and value.ndim == wanted.ndim:
                wanted = bound(wanted, self.values, None)
            if not isinstance(value, torch.Tensor):
                raise ProgramError(
                    f"argument '{name}' is {type(value).__name__}, and is annotated as {wanted}",
                    hint="pass a tensor: torch.as_tensor(...), or mesh.from_shards(...) of actors' results.",
                    source=user_source(),
                )
            found = type_of(value)
            if found == wanted or (
                not isinstance(value, DistributedTensor) and (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
            ):
                continue
            what, remedy = "type", f"Change the annotation, or pass a tensor of type {wanted}."
            if (found.dtype, found.shape) == (wanted.dtype, wanted.shape):
                what, remedy = (
                    "layout",
                    f"Call {name}.redistribute('{wanted.layout}') before, or change the annotation.",
                )
            raise ProgramError(
                f"argument '{name}' of {self.name} has a {what} that differs from its annotation",
                hint=f"'{name}' is {found}, and is annotated as {wanted}.\n{remedy}",
                source=user_source(),
            )


def _is_row_major(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements lie in the order of their places, though others may lie between them: copies of it
    are contiguous, and in a program of named sizes it counts as one."""
    if tensor.is_contiguous():
        return True
    strides = [stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1]
    return all(strides) and strides == sorted(strides, reverse=True)


def apart(call: ProgramCall, symbols: list[Any], as_made: list[dict[str, Any]], reached: Container[int]) -> list[int]:
    """The distributed arguments, by number, by which the program may differentiate. Raises ArgumentWritten where it has
    one of these by another way too (`reached`, by id), for in the trace they are two; and where it has given an
    argument other data."""
    found: list[int] = []
    for number, (symbol, leaf, own) in enumerate(zip(symbols, call.leaves, call.given, strict=False)):
        if not isinstance(symbol, DistributedTensor) or symbol is leaf:
            continue
        what = ""
        on_mesh = isinstance(leaf, DistributedTensor)
        if symbol._ref is not as_made[number]["_ref"]:
            what = "is given other data"
        elif on_mesh and symbol.is_leaf and symbol.requires_grad:
            found.append(number)
            is_view = own is not leaf and own.is_leaf and own.requires_grad
            what = "is differentiated by, and reached by another way too" if is_view or id(own) in reached else ""
        if what:
            raise ArgumentWritten(
                f"argument {number} of the program {what}",
                hint="its caller would not see it: place it on the mesh, x = monarch.distribute(x, mesh), and pass\n"
                "that.",
                source=user_source(),
            )
    return found


def check_leaves(call: ProgramCall, error: RuntimeError) -> None:
    """Raise ArgumentWritten where autograd has refused to write to a leaf in place, and it may be an argument that is
    none: what stands for one with a history is a leaf."""
    if "leaf Variable" in str(error) and not call.written and (found := histories(call.leaves)):
        raise ArgumentWritten(
            f"argument {found[0]} of the program is written in place", hint="pass x.detach().", source=user_source()
        ) from error


def histories(leaves: list[Any]) -> list[int]:
    """The distributed arguments, by number, that have a history, which ends at the program."""
    return [number for number, leaf in enumerate(leaves) if isinstance(leaf, DistributedTensor) and _history(leaf)]


def requiring_gradients(given: list[Any], symbols: list[Any]) -> list[int]:
    """The distributed arguments, by number, that require a gradient in the program."""
    found = zip(given, symbols, strict=False)
    return [n for n, (own, symbol) in enumerate(found) if isinstance(own, DistributedTensor) and symbol.requires_grad]


def leads_to(leaf: DistributedTensor, reached: Container[int]) -> bool:
    """Whether the history of an argument leads to one of these tensors, by id, which the program reads besides."""
    waiting, seen = [_history(leaf)], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if id(getattr(node, "variable", None)) in reached:
            return True
        waiting += [each for each, _ in node.next_functions]
    return False


def _history(leaf: DistributedTensor) -> Any:
    return leaf._history or leaf.grad_fn


def check_histories(call: ProgramCall, numbers: list[int], reached: Container[int]) -> None:
    """Raise ProgramError for an argument whose history leads to what the program reads besides: gradients would lack
    what goes through the argument."""
    for number in numbers:
        if not call.written and leads_to(call.leaves[number], reached):
            raise ProgramError(
                f"argument {number} of the program was computed from a tensor that the program reads too, and its "
                "history ends at the program",
                hint="the gradient would lack the argument's part: compute it in the program, or pass\n"
                "x.detach() where it is to be a constant.",
                source=user_source(),
            )


def differentiated(symbols: list[Any], leaves: list[Any], given: list[Any]) -> tuple[list[tuple[int, bool]], list[int]]:
    """The plain arguments whose `requires_grad` the program has changed, with the new one; and the distributed ones
    where it has, or whose gradients it reads or makes. Of `leaves`, those that are not `given` are copies that the
    caller does not see."""
    requiring: list[tuple[int, bool]] = []
    found: list[int] = []
    for number, (symbol, leaf) in enumerate(zip(symbols, leaves, strict=True)):
        if not isinstance(symbol, DistributedTensor) or symbol is leaf:
            continue
        changed = symbol.is_leaf and symbol.requires_grad != leaf.requires_grad
        grad = symbol.grad if symbol.is_leaf else None
        had = leaf.grad if leaf.is_leaf and isinstance(leaf, DistributedTensor) else None
        if grad is None and had is None and not changed:
            continue
        if grad is None and not isinstance(leaf, DistributedTensor):
            requiring.append((number, symbol.requires_grad))
            continue
        what = ""
        if not isinstance(leaf, DistributedTensor):
            what = "a plain tensor: place it on the mesh, x = monarch.distribute(x, mesh)"
        elif given[number] is not leaf:
            what = "a view of another tensor: pass a copy, x.clone()"
        elif not leaf.is_leaf:
            what = "no leaf, and its history ends at the program: pass x.detach().requires_grad_()"
        elif sum(each is leaf for each in leaves) > 1:
            what = "passed twice: pass it once"
        if what:
            raise ProgramError(
                f"argument {number} of the program is given a gradient, and is {what.partition(':')[0]}",
                hint=f"{what.partition(': ')[2]}; or return torch.autograd.grad(loss, x).",
                source=user_source(),
            )
        found.append(number)
    return requiring, found
