"""Giving a nest of Python objects the values of a checkpoint: first the entries that it wants are found and checked,
then they are read, and only then does anything change."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from monarch.compiler.errors import CheckpointError
from monarch.language import DistributedTensor
from monarch.stdlib.checkpoints.catalog import Catalog
from monarch.stdlib.checkpoints.nest import Path, instances, is_value, name_of, parameter_names, parameters_of

_EXTRA = "_extra_state"


@dataclass
class Wanted:
    """A tensor of the checkpoint that is to be read: into `target`, or into a new tensor, which has the layout of
    `like` where it has its shape, and is plain otherwise."""

    target: torch.Tensor | None = None
    like: torch.Tensor | None = None


@dataclass
class Filling:
    """`find` the entries of a checkpoint that a nest wants, and `fill` them in, once `tensors` has all of them.

    With `strict`, modules and checkpoint have the same names, as `load_state_dict(strict=True)` has it."""

    catalog: Catalog
    strict: bool
    wanted: dict[str, Wanted] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    _values: dict[str, Any] = field(default_factory=dict)
    """Python values that are wanted, read."""
    _names: Mapping[int, str] = field(default_factory=dict)
    _problems: list[str] = field(default_factory=list)

    def find(self, state: Any) -> None:
        """Find the entries that a nest wants. Raises CheckpointError for those that the checkpoint lacks or has in
        other shapes."""
        self._names = parameter_names(state)
        self._find((), state)
        if self._problems:
            raise CheckpointError(
                f"the checkpoint {self.catalog.path} does not fit:\n\t" + "\n\t".join(self._problems),
                hint="make the model with the sizes of the checkpoint, or load the part that fits: "
                "into={...} with fewer entries; strict=False passes over names that one side lacks.",
            )

    def _find(self, path: Path, value: Any) -> None:
        if isinstance(value, nn.Module):
            self._find_module(path, value)
        elif isinstance(value, Optimizer):
            self._find_optimizer(path, value)
            for number, entries in self._slots(path, value).items():
                parameter = parameters_of(value)[number]
                have = value.state.get(parameter, {})
                for key, name in _leaves(entries):
                    held = have.get(key) if isinstance(key, str) else None
                    if name in self.catalog.tensors:
                        self._want(name, held if _same_shape(held, self.catalog, name) else None, parameter)
        elif isinstance(value, torch.Generator):
            if self._has(path):
                self._want(name_of(path))
        elif isinstance(value, Mapping):
            for key, entry in value.items():
                self._find((*path, str(key)), entry)
        elif isinstance(value, torch.Tensor):
            path = path or ("value",)
            if self._has(path):
                self._want(name_of(path), value)
        elif is_value(value):
            name = name_of(path or ("value",))
            if self._has(path or ("value",)):
                self._read_values([name])
            if name in self.catalog.tensors:
                self._want(name)
        elif isinstance(value, (list, tuple)):
            for at, entry in enumerate(value):
                self._find((*path, at), entry)
        elif name_of(path) not in self.catalog.values:
            own = {name_of((*path, *at)): held for at, held in instances(torch.Tensor, (), value.state_dict())}
            names = self.catalog.under(path)
            self._read_values(names)
            if not names:
                self._has(path)
            for name in names:
                if name in self.catalog.tensors:
                    held = own.get(name)
                    self._want(name, held if isinstance(held, DistributedTensor) else None)
        else:
            self._read_values([name_of(path)])

    def _read_values(self, names: Iterable[str]) -> None:
        for name in names:
            if name in self.catalog.values:
                self._values[name] = self.catalog.value(name)

    def _find_optimizer(self, path: Path, optimizer: Optimizer) -> None:
        for name in self.catalog.under(path):
            if name in self.catalog.tensors:
                self._want(name)
            else:
                self._read_values([name])
        groups = self._tree((*path, "param_groups"), lambda name: name)
        if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
            count = len(groups) if isinstance(groups, list) else 0
            self._problems.append(
                f"'{name_of(path)}' has {count} groups of parameters in it, and {len(optimizer.param_groups)} here"
            )

    def _find_module(self, path: Path, module: nn.Module) -> None:
        expected = module.state_dict(keep_vars=True)
        start = name_of(path) + "." if path else ""
        found = {name[len(start) :]: name for name in self.catalog.under(path)}
        for name in expected:
            if name.rpartition(".")[2] == _EXTRA:  # a value, or a nest of its own
                inside = [each for each in found if each.startswith(f"{name}.")]
                for saved in [found.pop(each) for each in inside]:
                    self._read_values([saved])
                    if saved in self.catalog.tensors:
                        self._want(saved)
                if inside:
                    expected = {each: held for each, held in expected.items() if each != name}
        present = {id(held) for name, held in expected.items() if name in found}
        missing = [name for name, held in expected.items() if name not in found and id(held) not in present]
        missing = [name for name in missing if self.catalog.ties.get(start + name) not in found.values()]
        unexpected = [name for name in found if name not in expected and found[name] not in self.catalog.ties.values()]
        if self.strict and (missing or unexpected):
            self._problems.append(f"Error(s) in loading state_dict for {type(module).__name__}:")
            for what, names in (("Missing", missing), ("Unexpected", unexpected)):
                if names:
                    shown = ", ".join(f'"{name}"' for name in names[:16]) + (", ..." if len(names) > 16 else "")
                    self._problems.append(f"{what} key(s) in state_dict: {shown}.")
        for name, held in expected.items():
            saved = found.get(name, self.catalog.ties.get(start + name, name))
            self._read_values([saved])
            if isinstance(held, torch.Tensor) and saved in self.catalog.tensors:
                self._want(saved, held)

    def _has(self, path: Path) -> bool:
        name = name_of(path)
        if name in self.catalog.tensors or name in self.catalog.values:
            return True
        self._problems.append(f"'{name}' is not in it")
        return False

    def _want(self, name: str, target: torch.Tensor | None = None, like: torch.Tensor | None = None) -> None:
        entry = self.catalog.tensors.get(name)
        if entry is None:
            self._problems.append(f"'{name}' is a Python value in it, and a tensor here")
        elif target is not None and tuple(target.shape) != entry.shape:
            self._problems.append(
                f"size mismatch for {name}: copying a param with shape {list(entry.shape)} from checkpoint, "
                f"the shape in current model is {list(target.shape)}."
            )
        elif name not in self.wanted or self.wanted[name].target is None:
            self.wanted[name] = Wanted(target, like)

    def _slots(self, path: Path, optimizer: Optimizer) -> dict[int, dict[str, Any]]:
        """The state that was saved for each parameter of an optimizer, by number: names in the checkpoint."""
        held = self._tree((*path, "state"), lambda name: name) or {}
        found: dict[int, dict[str, Any]] = {}
        for number, parameter in enumerate(parameters_of(optimizer)):
            entries = held.pop(self._names.get(id(parameter), ""), None) or held.pop(str(number), None)
            if entries:
                found[number] = entries
        if held and self.strict:
            named = ", ".join(list(held)[:8])
            self._problems.append(
                f"'{name_of(path)}' has state for parameters that the optimizer does not have: {named}"
            )
        return found

    def _tree(self, path: Path, get: Callable[[str], Any]) -> Any:
        """The saved tree under a path, nested as it was: keys of dicts are text."""
        name = name_of(path)
        if name in self.catalog.tensors or name in self.catalog.values:
            return get(name)
        whole: Any = None
        for name in self.catalog.under(path):
            whole = _put(whole, self.catalog.paths[name][len(path) :], get(name))
        return whole

    # -- once all is read ----------------------------------------------------------------------------------------------

    def fill(self, path: Path, value: Any) -> Any:
        """Give a nest the values read; gives the object for its place, which is mostly itself."""
        if isinstance(value, nn.Module):
            for prefix, module in value.named_modules():
                extra = (*path, f"{prefix}.{_EXTRA}".lstrip("."))
                if name_of(extra) in self._values or name_of(extra) in self.tensors:
                    module.set_extra_state(self._get(name_of(extra)))
                elif self.catalog.under(extra):
                    module.set_extra_state(_with_keys_of(self._tree(extra, self._get), module.get_extra_state()))
        elif isinstance(value, Optimizer):
            self._fill_optimizer(path, value)
        elif isinstance(value, torch.Generator):
            value.set_state(self._get(name_of(path)))
        elif isinstance(value, torch.Tensor):
            pass
        elif isinstance(value, Mapping):
            for key, entry in list(value.items()):
                new = self.fill((*path, str(key)), entry)
                if new is not entry and isinstance(value, MutableMapping):
                    value[key] = new
        elif is_value(value):
            return self._get(name_of(path or ("value",)))
        elif isinstance(value, (list, tuple)):
            made = [self.fill((*path, at), entry) for at, entry in enumerate(value)]
            if isinstance(value, list):
                value[:] = made
            elif any(new is not old for new, old in zip(made, value, strict=True)):
                return type(value)(*made) if hasattr(value, "_fields") else tuple(made)
        else:
            value.load_state_dict(_with_keys_of(self._tree(path, self._get), value.state_dict()))
        return value

    def _fill_optimizer(self, path: Path, optimizer: Optimizer) -> None:
        own = optimizer.state_dict()
        state = {
            number: _with_keys_of(_each(entries, self._get), own["state"].get(number))
            for number, entries in self._slots(path, optimizer).items()
        }
        groups = self._tree((*path, "param_groups"), self._get)
        groups = [{**old, **new, "params": old["params"]} for old, new in zip(own["param_groups"], groups, strict=True)]
        optimizer.load_state_dict({**own, "state": state, "param_groups": groups})

    def _get(self, name: str) -> Any:
        return self.tensors[name] if name in self.tensors else self._values[name]


def _same_shape(held: Any, catalog: Catalog, name: str) -> bool:
    return isinstance(held, torch.Tensor) and tuple(held.shape) == catalog.tensors[name].shape


def _leaves(tree: Any, key: Any = None) -> Iterator[tuple[Any, str]]:
    """The names in a tree of them, each with the key or number under which it stands."""
    if isinstance(tree, str):
        yield key, tree
    for at, entry in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield from _leaves(entry, at)


def _each(tree: Any, get: Callable[[str], Any]) -> Any:
    if isinstance(tree, dict):
        return {key: _each(entry, get) for key, entry in tree.items()}
    return [_each(entry, get) for entry in tree] if isinstance(tree, list) else get(tree)


def _put(tree: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    key, rest = path[0], path[1:]
    if isinstance(key, int):
        tree = [] if tree is None else tree
        tree.extend([None] * (key + 1 - len(tree)))
        tree[key] = _put(tree[key], rest, value)
        return tree
    tree = {} if tree is None else tree
    tree[key] = _put(tree.get(key), rest, value)
    return tree


def _with_keys_of(tree: Any, like: Any) -> Any:
    """A tree whose dicts' keys are text, with the keys that an object's own state has in their place."""
    if isinstance(tree, dict) and isinstance(like, Mapping):
        keys = {str(key): key for key in like}
        return {keys.get(key, key): _with_keys_of(entry, like.get(keys.get(key))) for key, entry in tree.items()}
    if isinstance(tree, list) and isinstance(like, (list, tuple)) and len(tree) == len(like):
        made = [_with_keys_of(entry, other) for entry, other in zip(tree, like, strict=True)]
        return tuple(made) if isinstance(like, tuple) else made
    return tree


__all__ = ["Filling", "Wanted"]
