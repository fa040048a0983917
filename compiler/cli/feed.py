"""The arguments of a plan that runs without its program: tensors by name from a safetensors file, numbers by label, and
filling for the rest."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from errno import EACCES, EISDIR, ENOENT
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from monarch.compiler.cli.screen import count
from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect.labels import input_names
from monarch.compiler.plan import Plan, TensorType, ValueSpec
from monarch.language.recorder.random import manual_seed, next_seed

FILLS = ("zeros", "random")


@dataclass(frozen=True)
class Feed:
    """A plan's arguments by the names that users have for them.

    `tensors`  for inputs and states
    `scalars`  for numbers
    `unused`   names in the file that the plan does not take
    `filled`   names that were filled
    """

    tensors: dict[str, torch.Tensor]
    scalars: dict[str, float]
    unused: tuple[str, ...]
    filled: tuple[str, ...]


def read_tensors(path: Path | None) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, by name. Raises MonarchError."""
    if path is None:
        return {}
    try:
        return load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise MonarchError(f"cannot read {path}: {reason}", hint="give a safetensors file.") from None


def check_can_write(path: Path) -> None:
    """Raise MonarchError where a file cannot be written, before its content is computed."""
    exists = path.exists()
    wrong = EISDIR if path.is_dir() else ENOENT if not path.parent.is_dir() else 0
    if not wrong and not os.access(path if exists else path.parent, os.W_OK):
        wrong = EACCES
    if wrong:
        raise MonarchError(f"cannot write {path}: {os.strerror(wrong)}", hint="give a path that can be written.")


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors as a safetensors file. Raises MonarchError."""
    try:
        save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, path)
    except (OSError, SafetensorError) as error:
        raise MonarchError(f"cannot write {path}: {error}", hint="give a path that can be written.") from None


def feed(plan: Plan, given: Mapping[str, torch.Tensor], scalars: Mapping[str, float], fill: str | None) -> Feed:
    """All inputs of `plan` but seeds. Missing ones are filled as `fill` says: "zeros", or "random" (floats uniform
    below 0.1, whole numbers 0 or 1, scalars 0.001, always the same ones). Raises MonarchError with a list of missing
    inputs, and for a tensor of another type than the plan's."""
    if fill is not None and fill not in FILLS:
        raise MonarchError(f"--fill {fill}: it is one of {', '.join(FILLS)}")
    numbers = _scalars(plan, scalars)
    generator = torch.Generator().manual_seed(0)
    tensors: dict[str, torch.Tensor] = {}
    missing: list[tuple[str, ValueSpec]] = []
    for name, spec in zip(input_names(plan), plan.inputs, strict=True):
        if spec.kind == "seed" or name in numbers:
            continue
        if spec.kind != "scalar" and name in given:
            _check(name, given[name], spec.type)
            tensors[name] = given[name]
            continue
        missing.append((name, spec))
        if fill is not None and spec.kind == "scalar":
            numbers[name] = 0.0 if fill == "zeros" else 0.001
        elif fill is not None:
            tensors[name] = _filled(spec.type, fill, generator)
    if missing and fill is None:
        raise _missing(missing, given)
    unused = tuple(name for name in given if name not in tensors)
    return Feed(tensors, numbers, unused, tuple(name for name, _ in missing))


def arguments(plan: Plan, fed: Feed) -> list[torch.Tensor | float | int]:
    """One call's arguments, in the plan's order; each call has seeds of its own (`monarch.manual_seed`)."""
    found: list[torch.Tensor | float | int] = []
    for name, spec in zip(input_names(plan), plan.inputs, strict=True):
        if spec.kind == "seed":
            found.append(next_seed())
        elif spec.kind == "scalar":
            found.append(fed.scalars[name])
        else:
            found.append(fed.tensors[name])
    return found


def restart_seeds(seed: int) -> None:
    """Draw the same random numbers as a program after `monarch.manual_seed(seed)`."""
    manual_seed(seed)


def _scalars(plan: Plan, given: Mapping[str, float]) -> dict[str, float]:
    """The numbers given, by the whole label where only its end was given: `lr` for `adamw.lr`."""
    labels = [str(spec.label) for spec in plan.inputs if spec.kind == "scalar"]
    found: dict[str, float] = {}
    for name, value in given.items():
        matching = [label for label in labels if label == name] or [
            label for label in labels if label.rpartition(".")[2] == name
        ]
        if len(matching) != 1:
            what = "names none" if not matching else f"could be {' or '.join(matching)}"
            raise MonarchError(
                f"--scalar {name}: it {what} of the plan's scalars", hint=f"they are {', '.join(labels) or 'none'}."
            )
        found[matching[0]] = value
    return found


def _check(name: str, tensor: torch.Tensor, type: TensorType) -> None:
    wanted = TensorType(type.dtype, type.shape)
    try:
        given = str(TensorType(tensor.dtype, tuple(tensor.shape)))
    except MonarchError:
        given = f"{tensor.dtype}{list(tensor.shape)}"
    if given != str(wanted):
        raise MonarchError(
            f"'{name}' is {given}, and the plan takes {wanted}", hint="give the whole tensor, of that dtype and shape."
        )


def _filled(type: TensorType, fill: str, generator: torch.Generator) -> torch.Tensor:
    if fill == "zeros":
        return torch.zeros(type.shape, dtype=type.dtype)
    if type.dtype.is_floating_point:
        return (torch.rand(type.shape, generator=generator) * 0.1).to(type.dtype)
    return torch.randint(0, 2, type.shape, generator=generator).to(type.dtype)


def _missing(missing: Sequence[tuple[str, ValueSpec]], given: Mapping[str, torch.Tensor]) -> MonarchError:
    width = max(len(name) for name, _ in missing)
    types = ["" if spec.kind == "scalar" else TensorType(spec.type.dtype, spec.type.shape) for _, spec in missing]
    lines = [f"{spec.kind:<7}{name:<{width}}  {type_}" for (name, spec), type_ in zip(missing, types, strict=True)]
    shown = 20
    if len(lines) > shown:
        lines[shown:] = [f"and {len(lines) - shown} more"]
    for name, _ in missing:
        if near := get_close_matches(name, given, n=1):
            lines.append(f"{near[0]} was given: is that {name}?")
            break
    remedies = ["give them in --inputs FILE.safetensors", "or fill them: --fill zeros, --fill random"]
    if any(spec.kind == "scalar" for _, spec in missing):
        remedies.insert(1, "scalars as --scalar NAME=VALUE")
    return MonarchError(
        f"{count(len(missing), 'value')} that the plan takes {'is' if len(missing) == 1 else 'are'} missing",
        hint="\n".join([*(text.rstrip() for text in lines), ", ".join(remedies) + "."]),
    )
