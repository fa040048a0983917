"""State that two meshes share by name: `monarch.sync` and `monarch.version`.

A sync is a program of transfers between two parts of one mesh: it is compiled once for a pair of models, workers send
one another the blocks that their layouts have in common, and it commits on all workers of the target or on none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from monarch.compiler.errors import ProgramError
from monarch.language import DistributedTensor, distribute, program
from monarch.language.recorder.recording import current_program
from monarch.language.source import user_source
from monarch.runtime.shared.bits import bit_sum

State = nn.Module | Mapping[str, torch.Tensor]

Pair = tuple[DistributedTensor, DistributedTensor]
"""A tensor of a source, and that of the target with its name."""

_KNOWN = "_monarch_synced"
"""The attribute of a target's first tensor that has its `_Target`: both end together."""


@dataclass
class _Target:
    """The state of a target of syncs: on its mesh its `version`, which changes with its tensors, the `last` version
    that was given, and for each source the tensors that were joined, and the program that does it."""

    version: DistributedTensor
    last: int = 0
    programs: list[tuple[list[Pair], Callable[[torch.Tensor], None]]] = field(default_factory=list)

    def program(self, pairs: list[Pair]) -> Callable[[torch.Tensor], None]:
        """The program that brings the first of each pair to the second, compiled before where it can be."""
        for known, run in self.programs:
            if len(known) == len(pairs) and all(map(_same, known, pairs)):
                return run
        self.programs.append((pairs, made := _program(pairs, self.version)))
        return made


def _same(one: Pair, other: Pair) -> bool:
    return one[0] is other[0] and one[1] is other[1]


def sync(source: State, target: State, *, version: int | None = None) -> int:
    """Copy a model's parameters and buffers to those of the same names on another part of the mesh; gives the target's
    new version.

        monarch.sync(trainer, generator, version=step)
        tokens = monarch.generate(generator, prompts, max_new_tokens=32)        # with the new parameters
        print(monarch.version(generator))

    Both are modules, or mappings from names to tensors, on two parts of one mesh that share no workers, each in its own
    layouts and dtypes; a side that is a pipeline's model (`pipe.model`) is on several such parts. Workers of the source
    send those of the target what these need, each byte once, in the narrower
    dtype of the two. The call returns at once. Programs on the target that are called behind it see all of the new
    state, those before it all of the old; the source's state is that of its last call before. The source goes on while
    the target is busy, until it is to send the same target a next version. Both sides add up the bits of each tensor,
    and where their sums differ the sync fails: then, as after any failure of a worker, the target keeps its state and
    its version, and the error is raised where something that depends on it is read.

    `version` is a number of your own, such as the step, or by default one more than the last.

    Raises ProgramError in a program, where a name is missing or has another shape on one of the sides, and for tensors
    that are on no mesh or on one that shares workers.
    """
    if current_program() is not None:
        raise ProgramError(
            "monarch.sync() inside a program", hint="sync between calls of programs.", source=user_source()
        )
    pairs = _pairs(_tensors(source, "source"), _tensors(target, "target"))
    first = pairs[0][1]
    known: _Target | None = getattr(first, _KNOWN, None)
    if known is None:
        known = _Target(distribute(torch.zeros((), dtype=torch.int64), first.mesh))
        setattr(first, _KNOWN, known)
    known.last = known.last + 1 if version is None else version
    known.program(pairs)(torch.tensor(known.last))
    return known.last


def version(target: State) -> int:
    """The version of a model's state: that of the last `monarch.sync` to it, and 0 before the first. Waits for that
    sync."""
    known: _Target | None = getattr(next(iter(_tensors(target, "target").values())), _KNOWN, None)
    return 0 if known is None else int(known.version.item())


def _program(pairs: list[Pair], version: DistributedTensor) -> Callable[[torch.Tensor], None]:
    @torch.no_grad()
    def sync(number: torch.Tensor) -> None:
        sums: dict[Any, tuple[list[Any], list[Any]]] = {}
        for source, target in pairs:
            mine: Any = source.detach()
            if target.dtype.itemsize < source.dtype.itemsize:
                mine = mine.to(target.dtype)
            theirs: Any = mine.to(target.mesh, target.sharding)
            sent, arrived = sums.setdefault((source.mesh, target.mesh), ([], []))
            sent.append(bit_sum(mine))
            arrived.append(bit_sum(theirs))
            target.copy_(theirs)
        for (_, there), (sent, arrived) in sums.items():
            wanted: Any = torch.stack(sent)
            same = wanted.to(there, "[-]") == torch.stack(arrived)
            assert same.all(), "monarch.sync: the received bytes differ from those sent"
        version.copy_(number)

    return program(sync, mesh=version.mesh)


def _tensors(state: State, what: str) -> dict[str, DistributedTensor]:
    """The tensors by name."""
    named = state.state_dict(keep_vars=True) if isinstance(state, nn.Module) else state
    found: dict[str, DistributedTensor] = {}
    for name, tensor in named.items():
        if not isinstance(tensor, DistributedTensor):
            raise ProgramError(
                f"'{name}' of the {what} of monarch.sync is on no mesh",
                hint="monarch.module_to_mesh(model, mesh) places a model.",
                source=user_source(),
            )
        found[name] = tensor
    if not found:
        raise ProgramError(f"the {what} of monarch.sync has no tensors", source=user_source())
    return found


def _pairs(source: Mapping[str, DistributedTensor], target: Mapping[str, DistributedTensor]) -> list[Pair]:
    """The source of each tensor of the target. Raises ProgramError where the sides do not fit."""
    problems = [f"'{name}' is in the target, and not in the source" for name in target if name not in source]
    problems += [f"'{name}' is in the source, and not in the target" for name in source if name not in target]
    for name in target:
        if name in source and source[name].shape != target[name].shape:
            shapes = f"{list(source[name].shape)} in the source, and {list(target[name].shape)} in the target"
            problems.append(f"'{name}' is {shapes}")
    once: dict[int, tuple[str, DistributedTensor]] = {}
    for name, tensor in target.items():
        first, _ = once.setdefault(id(tensor), (name, tensor))
        if first in source and name in source and source[first] is not source[name]:
            problems.append(f"'{first}' and '{name}' are one tensor in the target, and two in the source")
    if problems:
        shown = "\n".join(problems[:16]) + (f"\nand {len(problems) - 16} more" if len(problems) > 16 else "")
        raise ProgramError("monarch.sync of states that do not fit", hint=shown, source=user_source())
    pairs = [(source[name], tensor) for name, tensor in once.values()]
    for mine, theirs in pairs:
        if mine.mesh is theirs.mesh:
            raise ProgramError(
                f"monarch.sync from {mine.mesh} to itself",
                hint="on one mesh: target.load_state_dict(source.state_dict()).",
                source=user_source(),
            )
    return pairs
