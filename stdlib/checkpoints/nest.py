"""The content of a checkpoint of a nest of Python objects: tensors and values, by name.

A name is the path to it with dots in between, as `torch.distributed.checkpoint` has it: `{"model": model, "step": 3}`
holds `model.layer.weight` and `step`. An optimizer's state stands under its parameters' names
(`optimizer.state.layer.weight.exp_avg`), so that it fits whatever the order of the parameters is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from monarch.compiler.errors import CheckpointError

T = TypeVar("T")

Path = tuple[str | int, ...]

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.Size)


@dataclass
class Contents:
    """The saved content: tensors and Python values by name, with the path to each."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)

    def add(self, path: Path, value: Any) -> None:
        """Note a tensor or a value. Raises CheckpointError where its name is another's."""
        name = name_of(path)
        if name in self.paths:
            raise CheckpointError(
                f"two values of the state are called '{name}' in a checkpoint",
                hint="keys of dicts become text, and dots join them: rename one.",
            )
        self.paths[name] = path
        (self.tensors if isinstance(value, torch.Tensor) else self.values)[name] = value


def name_of(path: Path) -> str:
    """The name of a path's object in a checkpoint."""
    return ".".join(map(str, path))


def is_stateful(value: Any) -> bool:
    """Whether an object itself gives the state to save."""
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def is_value(value: Any) -> bool:
    """Whether a checkpoint holds a value as one: there is nothing in it that has a name of its own."""
    if isinstance(value, (list, tuple)):
        return all(is_value(entry) for entry in value)
    return not isinstance(value, (torch.Tensor, Mapping, torch.Generator)) and not is_stateful(value)


def contents_of(state: Any) -> Contents:
    """The tensors and values to save of a nest of dicts and lists with modules, optimizers and other objects with
    `state_dict`, tensors, generators and Python values. Raises CheckpointError."""
    found = Contents()
    _collect((), state, found, parameter_names(state))
    if not found.paths and not isinstance(state, Mapping):
        raise CheckpointError(f"there is nothing to save in a {type(state).__name__}", hint='save a dict: {"x": x}.')
    return found


def _collect(path: Path, value: Any, found: Contents, names: Mapping[int, str]) -> None:
    if isinstance(value, nn.Module):
        for name, entry in value.state_dict(keep_vars=True).items():
            if isinstance(entry, torch.Tensor) or is_value(entry) or entry == {}:  # the extra state of a module
                found.add((*path, name), entry)
            else:
                _collect((*path, name), entry, found, names)
    elif isinstance(value, Optimizer):
        _collect(path, named_state(value, names), found, names)
    elif isinstance(value, torch.Generator):
        found.add(path, value.get_state())
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            _collect((*path, str(key)), entry, found, names)
    elif isinstance(value, torch.Tensor) or is_value(value):
        found.add(path or ("value",), value)
    elif isinstance(value, (list, tuple)):
        for at, entry in enumerate(value):
            _collect((*path, at), entry, found, names)
    else:
        held = value.state_dict()
        if holds_tensors(held):
            _collect(path, held, found, names)
        else:
            found.add(path, held)


def holds_tensors(value: Any) -> bool:
    """Whether there are tensors in a nest, or objects that may have some."""
    if isinstance(value, Mapping):
        return any(map(holds_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(holds_tensors, value))
    return isinstance(value, (torch.Tensor, torch.Generator)) or is_stateful(value)


# -- optimizers --------------------------------------------------------------------------------------------------------


def parameter_names(state: Any) -> dict[int, str]:
    """The names of all modules' parameters in an optimizer's state, by identity: those of their module, with the path
    to it in front where the nest has several modules."""
    modules = list(instances(nn.Module, (), state))
    names: dict[int, str] = {}
    for path, module in modules:
        for name, parameter in module.named_parameters():
            names.setdefault(id(parameter), name if len(modules) == 1 else name_of((*path, name)))
    return names


def instances(kind: type[T], path: Path, value: Any) -> Iterator[tuple[Path, T]]:
    """The objects of a class in a nest, each with where it stands; `path` is where the nest does."""
    if isinstance(value, kind):
        yield path, value
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from instances(kind, (*path, str(key)), entry)
    elif isinstance(value, (list, tuple)):
        for at, entry in enumerate(value):
            yield from instances(kind, (*path, at), entry)


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """In the order in which `state_dict` counts them."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def named_state(optimizer: Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """`optimizer.state_dict()` with parameters' names in place of numbers; those of no module keep theirs."""
    held = optimizer.state_dict()
    called = [names.get(id(each), str(number)) for number, each in enumerate(parameters_of(optimizer))]
    return {
        **held,
        "state": {called[number]: entries for number, entries in held["state"].items()},
        "param_groups": [
            {**group, "params": [called[number] for number in group["params"]]} for group in held["param_groups"]
        ],
    }
