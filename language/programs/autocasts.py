"""Programs within `torch.autocast`. PyTorch casts a weight once and keeps that until the outermost autocast ends, so a
weight that changes meanwhile has an old cast. A program casts anew at each call: it keeps nothing there, and is refused
where PyTorch would go on with an old one.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from monarch.compiler.errors import ProgramError
from monarch.compiler.execution.executor import Handle
from monarch.compiler.tape import Tape
from monarch.language.programs.kinds import Tensor
from monarch.language.programs.snapshot import Snapshot
from monarch.language.source import user_source
from monarch.language.tensors.cell import Cell

_LOW = (torch.bfloat16, torch.float16)


def weights(tape: Tape, states: Sequence[Cell], snapshot: Snapshot) -> list[int]:
    """The states, by number, of which PyTorch would keep casts: leaves that require a gradient, in f32, where the
    program casts to fewer bits."""
    if not any(op.func is torch.ops.aten._to_copy.default and dict(op.kwargs).get("dtype") in _LOW for op in tape.ops):
        return []
    found = set()
    for held in snapshot.held.values():
        if isinstance(held, Tensor):
            before = dict(zip(*held.before, strict=True))
            if before["requires_grad"] and "_ref" in before:
                found.add(id(before["_ref"].cell))
    return [n for n, cell in enumerate(states) if id(cell) in found and cell.type.dtype is torch.float32]


class _Casts:
    """What programs have cast within the outermost autocast that is open, as far as they know."""

    def __init__(self) -> None:
        self._open: weakref.ref[torch.Tensor] | None = None
        """A tensor that lives as long as PyTorch keeps casts."""
        self._values: dict[int, tuple[weakref.ref[Cell], weakref.ref[Handle]]] = {}
        """By id, the cells that were cast, and the values that they had."""

    @contextmanager
    def apart(self) -> Iterator[None]:
        """What is traced finds no casts that were made before, and leaves none."""
        known = self._is_open()
        torch.clear_autocast_cache()
        try:
            yield
        finally:
            torch.clear_autocast_cache()
            if known:
                self._open = _kept()

    def check(self, name: str, cells: list[Cell]) -> None:
        """Raise ProgramError where one of these has changed since a program first cast it."""
        if not _is_within():
            return
        if not self._is_open():
            self._values.clear()
            self._open = _kept()
        for cell in cells:
            known = self._values.get(id(cell))
            if known is None or known[0]() is not cell:
                assert cell.handle is not None
                self._values[id(cell)] = weakref.ref(cell), weakref.ref(cell.handle)
            elif known[1]() is not cell.handle:
                raise ProgramError(
                    f"'{name}' casts weights for an autocast that has cast them before, and they have changed since",
                    hint="PyTorch keeps the first casts until the outermost autocast ends, and would keep the\n"
                    "casts of the old weights. Enter it at each step, or in the program:\n"
                    "with torch.autocast('cpu'):\n"
                    "    for x in batches: step(x)            # wrong: one autocast around steps that train\n"
                    "for x in batches:\n"
                    "    with torch.autocast('cpu'): step(x)  # right",
                    source=user_source(),
                )

    def _is_open(self) -> bool:
        return self._open is not None and self._open() is not None


def _is_within() -> bool:
    """Whether an autocast is open, one that is not enabled too, whose casts within are kept."""
    depth = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return depth > 1 and torch.is_autocast_cache_enabled()


def _kept() -> weakref.ref[torch.Tensor]:
    """A tensor that PyTorch has cast, and keeps with its cast: nothing else does."""
    with torch.inference_mode(False), torch.enable_grad(), torch.autocast("cpu", torch.bfloat16):
        leaf = torch.ones(1, 1, requires_grad=True)
        torch.mm(leaf, leaf)
        return weakref.ref(leaf)


CASTS = _Casts()
