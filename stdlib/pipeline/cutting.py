"""Stages of a model: which of its modules each has, from a list, from names, or balanced by cost (`costs`)."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence

from torch import nn

from monarch.compiler.errors import ProgramError
from monarch.language.source import user_source

Cost = Callable[[Sequence[nn.Module]], list[float]]
"""The cost of each of some modules."""


class Stages:
    """The stages of a model.

    `count`   how many there are
    `of`      the stage of each parameter and buffer, by its name
    `enters`  the stage of each module that its inputs are brought to: modules that have parameters or buffers, all of
              one stage, and those by which the model was cut. A deep copy has those of the copied model
    """

    def __init__(self, model: nn.Module, cuts: Sequence[str]) -> None:
        """Each module that `cuts` names begins a stage, and those behind it in `model.named_modules()` are on it.
        Raises ProgramError for names that are none, or in another order."""
        names = dict(model.named_modules())
        for name in cuts:
            if name not in names or not name:
                close = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
                raise ProgramError(
                    f"no module of {type(model).__name__} is called {name!r}",
                    hint=(f"did you mean {' or '.join(map(repr, close))}? " if close else "")
                    + "model.named_modules() has the names.",
                    source=user_source(),
                )
        order = list(names)
        if sorted(cuts, key=order.index) != list(cuts) or len(set(cuts)) < len(cuts):
            raise ProgramError(
                f"stages begin at {', '.join(map(repr, cuts))}, and the model has these modules in another order",
                hint="name each once, in the order of model.named_modules().",
                source=user_source(),
            )
        self.count = len(cuts) + 1
        self.of: dict[str, int] = {}
        at: dict[str, int] = {}
        stage = 0
        for name, module in names.items():
            stage += name in cuts
            at[name] = stage
            for key in (*module._parameters, *module._buffers):
                self.of[f"{name}.{key}" if name else key] = stage
        self.enters: dict[nn.Module, int] = {}
        for name, module in names.items():
            inside = {at[each] for each in names if each == name or not name or each.startswith(f"{name}.")}
            holds = any(True for _ in (*module.parameters(), *module.buffers()))
            if len(inside) == 1 and (holds or name in cuts):
                self.enters[module] = at[name]


def balanced(model: nn.Module, count: int, cost: Cost | None = None) -> list[str]:
    """Where to cut a model into `count` stages, so that the costliest costs as little as can be. `cost` says what the
    modules cost between which it can be cut; without, each has what it has parameters, but for tables of embeddings,
    which cost nothing to read. Lists and sequences of modules are cut between their modules; nothing else is.
    Raises ProgramError for a model of fewer modules."""
    units = _units(model, "")
    if len(units) < count:
        raise ProgramError(
            f"{type(model).__name__} has {len(units)} modules between which to split it, and {count} stages need more",
            hint="name the modules at which stages begin: split_at=['encoder.layers.4', …].",
            source=user_source(),
        )
    modules = [module for _, module in units]
    costs = [float(_parameters(module)) for module in modules] if cost is None else cost(modules)
    best: dict[tuple[int, int], tuple[float, int]] = {(0, 0): (0.0, 0)}
    for stages in range(1, count + 1):
        for end in range(stages, len(costs) + 1):
            best[stages, end] = min(
                (max(best[stages - 1, start][0], sum(costs[start:end])), start)
                for start in range(stages - 1, end)
                if (stages - 1, start) in best
            )
    cuts, end = [], len(units)
    for stages in range(count, 1, -1):
        end = best[stages, end][1]
        cuts.append(units[end][0])
    return cuts[::-1]


def _units(module: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """The modules between which a model can be cut, by name, in order."""
    children = [(f"{prefix}{name}", child) for name, child in module.named_children()]
    found = []
    for name, child in children:
        if isinstance(child, (nn.ModuleList, nn.Sequential)) or (len(children) == 1 and any(child.children())):
            found += _units(child, f"{name}.")
        else:
            found.append((name, child))
    return found


def _parameters(module: nn.Module) -> int:
    """How many it has, but for tables of embeddings."""
    own = sum(each.numel() for each in module.parameters(recurse=False))
    return (0 if isinstance(module, nn.Embedding) else own) + sum(map(_parameters, module.children()))
