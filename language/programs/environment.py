"""What a function reaches without being passed it: the modules, optimizers and tensors that it closes over or names.

From it come the mesh of a program, the names of its state, and the facts of the Python side that its trace depends on.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch
from torch import nn

from monarch.compiler.errors import ProgramError
from monarch.compiler.states import StateKey
from monarch.language.programs.held import is_program
from monarch.language.recorder.optimizer_state import parameters
from monarch.language.source import belongs_to_user, user_source
from monarch.language.tensors.cell import Cell
from monarch.language.tensors.mesh import Mesh, open_meshes
from monarch.language.tensors.tensor import DistributedTensor

_DEPTH = 6
_VALUES = 20_000
"""How far a scan goes: a dataset held in a list is not worth looking through."""


@dataclass
class Environment:
    """What was found, by the names that the function has for it."""

    modules: dict[str, nn.Module] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    tensors: dict[str, DistributedTensor] = field(default_factory=dict)
    meshes: list[Mesh] = field(default_factory=list)

    def mesh(self) -> Mesh | None:
        """The mesh that something in the environment lies on."""
        for _, tensor in self.named_tensors():
            return tensor.mesh
        return self.meshes[0] if self.meshes else None

    def named_tensors(self) -> Iterator[tuple[str, DistributedTensor]]:
        """Every distributed tensor with the name that a program's state gets: a module's parameters by their names in
        the module (prefixed by the module's own where there are several), then tensors, then what only optimizers
        hold."""
        for name, module in self.modules.items():
            prefix = f"{name}." if len(self.modules) > 1 else ""
            for slots in (module.named_parameters(prefix=""), module.named_buffers(prefix="")):
                for key, tensor in slots:
                    if isinstance(tensor, DistributedTensor):
                        yield prefix + key, tensor
        yield from self.tensors.items()
        for name, optimizer in self.optimizers.items():
            for tensor in parameters(optimizer):
                if isinstance(tensor, DistributedTensor):
                    yield f"{name}.param", tensor


def find_environment(function: Callable[..., Any]) -> Environment:
    """Scan a function's closure, the globals that it names, its bound object, defaults and partial arguments."""
    found = Environment()
    _Scan(found).callable(function, "", 0)
    return found


class _Scan:
    def __init__(self, found: Environment) -> None:
        self.found = found
        self.seen: set[int] = set()

    def callable(self, function: Any, name: str, depth: int) -> None:
        if depth > _DEPTH:
            return
        if isinstance(function, functools.partial):
            for value in (*function.args, *function.keywords.values()):
                self.value(value, name, depth + 1)
            self.callable(function.func, name, depth)
            return
        if isinstance(function, MethodType):
            self.value(function.__self__, "", depth)
            function = function.__func__
        inner = getattr(function, "__wrapped__", None)  # also that of another program
        if inner is not None and inner is not function:
            self.callable(inner, name, depth)
        if not isinstance(function, FunctionType) or id(function) in self.seen:
            return
        self.seen.add(id(function))
        if not belongs_to_user(function.__code__):
            return
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            try:
                value = cell.cell_contents
            except ValueError:  # a variable that has no value yet
                continue
            self.value(value, variable, depth + 1)
        for variable in _global_names(function.__code__):
            if variable in function.__globals__:
                self.value(function.__globals__[variable], variable, depth + 1)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.value(value, name, depth + 1)

    def value(self, value: Any, name: str, depth: int) -> None:
        if isinstance(value, (int, float, str, bytes, type, ModuleType, type(None))):
            return
        if depth > _DEPTH or len(self.seen) > _VALUES:
            return
        if isinstance(value, (FunctionType, MethodType, functools.partial)) or is_program(cast("Any", type(value))):
            self.callable(value, name, depth)
            return
        if id(value) in self.seen:
            return
        self.seen.add(id(value))
        if isinstance(value, DistributedTensor):
            self.found.tensors[self._free(name or "tensor", self.found.tensors)] = value
        elif isinstance(value, Mesh):
            self.found.meshes.append(value)
        elif isinstance(value, nn.Module):
            self._module(value, name, depth)
        elif isinstance(value, torch.optim.Optimizer):
            label = self._free(type(value).__name__.lower(), self.found.optimizers)
            self.found.optimizers[label] = value
        elif isinstance(value, (list, tuple, set, frozenset)):
            for index, entry in enumerate(value):
                self.value(entry, f"{name}.{index}", depth + 1)
        elif isinstance(value, dict):
            for key, entry in list(value.items()):
                self.value(entry, f"{name}.{key}", depth + 1)
        elif isinstance(getattr(value, "__dict__", None), dict) and not isinstance(value, torch.Tensor):
            if type(value).__module__.partition(".")[0] in ("torch", "monarch", "builtins"):
                return
            for key, entry in list(vars(value).items()):
                self.value(entry, f"{name}.{key}" if name else key, depth + 1)

    def _module(self, module: nn.Module, name: str, depth: int) -> None:
        for known in self.found.modules.values():
            if any(child is module for child in known.modules()):
                return
        for label in [label for label, known in self.found.modules.items() if _holds(module, known)]:
            del self.found.modules[label]
        self.found.modules[self._free(name or "module", self.found.modules)] = module
        for child in module.modules():
            self.seen.add(id(child))
            for key, entry in vars(child).items():
                if key not in ("_parameters", "_buffers", "_modules") and not key.startswith("_"):
                    self.value(entry, key, depth + 2)

    @staticmethod
    def _free(name: str, taken: dict[str, Any]) -> str:
        if name not in taken:
            return name
        number = 2
        while f"{name}{number}" in taken:
            number += 1
        return f"{name}{number}"


def _holds(module: nn.Module, child: nn.Module) -> bool:
    return any(entry is child for entry in module.modules())


@functools.cache
def _global_names(code: CodeType) -> tuple[str, ...]:
    """The names that code, and the functions and comprehensions inside it, may read as globals."""
    names = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.update(dict.fromkeys(_global_names(constant)))
    return tuple(names)


# -- names of state --------------------------------------------------------------------------------------------------


def state_names(environment: Environment, optimizers: list[torch.optim.Optimizer]) -> dict[int, str]:
    """Names of cells, by id(cell): parameters and buffers, optimizer state ("adamw.exp_avg[fc.weight]"), gradients
    ("grad[fc.weight]"). The first name that a cell has counts."""
    names: dict[int, str] = {}
    keep: list[Cell] = []

    def add(tensor: Any, name: str) -> None:
        if isinstance(tensor, DistributedTensor):  # also a view: a weight's gradient is often a transposed product
            keep.append(tensor._ref.cell)
            names.setdefault(id(tensor._ref.cell), name)

    tensors = list(environment.named_tensors())
    for name, tensor in tensors:
        add(tensor, name)
    for name, tensor in tensors:
        if tensor.requires_grad and tensor.is_leaf:
            add(tensor.grad, str(StateKey(name, "grad")))
    labels = {id(optimizer): label for label, optimizer in environment.optimizers.items()}
    for optimizer in optimizers:
        label = labels.get(id(optimizer), type(optimizer).__name__.lower())
        for number, parameter in enumerate(parameters(optimizer)):
            owner = names.get(id(parameter._ref.cell)) if isinstance(parameter, DistributedTensor) else None
            owner = owner or f"{number}"
            add(parameter, str(StateKey(owner, "param", label)))
            if isinstance(parameter, DistributedTensor) and parameter.requires_grad and parameter.is_leaf:
                add(parameter.grad, str(StateKey(owner, "grad")))
            for key, entry in optimizer.state.get(parameter, {}).items():
                add(entry, str(StateKey(owner, key, label)))
    return names


def labelled(cells: list[tuple[str | None, Cell]], taken: set[str], fallback: str) -> list[tuple[str, Cell]]:
    """A label of its own for every cell."""
    found: list[tuple[str, Cell]] = []
    for number, (name, cell) in enumerate(cells):
        label = base = name or f"{fallback}{number}"
        count = 2
        while label in taken:
            label, count = f"{base}#{count}", count + 1
        taken.add(label)
        found.append((label, cell))
    return found


def only_mesh(program: str) -> Mesh:
    """The mesh of a script that has one. Raises ProgramError where it has none, or several; `program` is its name."""
    meshes = open_meshes()
    if len(meshes) == 1:
        return meshes[0]
    if meshes:
        listed = "\n".join(f"  {mesh!r}" for mesh in meshes)
        raise ProgramError(
            f"{program} has no mesh, and this process has {len(meshes)}",
            hint="none of its arguments is on one, and nothing that it closes over is. The open meshes:\n"
            f"{listed}\nSay which: @monarch.program(mesh=...), or pass it a distributed tensor.",
            source=user_source(),
        )
    raise ProgramError(
        f"{program} has no mesh",
        hint="none of its arguments is on one, nothing that it closes over is, and this process has no open mesh.\n"
        "Make one: mesh = Mesh(data=4), and say @monarch.program(mesh=mesh) where there are several.",
        source=user_source(),
    )
