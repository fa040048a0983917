"""What a worker writes to files while it runs steps: its values as they were when it was asked, by a thread of its own.

A value that is to be written is not copied. It is marked until it has been written, and a step that would write over it
takes a copy (see `WorkerState._run`).
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

from monarch.compiler.blocks import own_part, start_of
from monarch.compiler.execution.storage import Stored
from monarch.compiler.plan import DTYPES, Layout, MeshSpec, TensorType
from monarch.runtime.shared.files import CorruptError, Reader, explain, write


class _Stopped(Exception):
    """Nobody wants what is being written any more."""


class _Save:
    """One save. The worker's loop adds pieces, starts it, and looks; the thread does the rest."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, torch.Tensor, str, int]] = []
        self.pending: Counter[int] = Counter()
        """The handles that are still to be written, with how many pieces of each."""
        self.written = 0
        self.sums: list[tuple[str, int, list[int]]] = []
        self.error = ""
        self.done = False
        self.stopped = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="monarch save", daemon=True).start()

    def _run(self) -> None:
        with torch.inference_mode():
            files: dict[str, int] = {}
            file = ""
            try:
                for handle, piece, file, offset in self.pieces:
                    if file not in files:
                        files[file] = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
                    self.sums.append((file, offset, write(files[file], offset, piece, self._wrote)))
                    self.pending[handle] -= 1
                for fd in files.values():
                    os.fsync(fd)
            except OSError as error:
                self.error = explain(error, file)
            except MemoryError as error:
                self.error = f"{file}: {error or 'no memory left'}"
            except _Stopped:
                pass
            finally:
                for fd in files.values():
                    os.close(fd)
                self.pieces.clear()
                self.pending.clear()
                self.done = True

    def _wrote(self, size: int) -> None:
        self.written += size
        if self.stopped:
            raise _Stopped


class Saves:
    """What one worker is writing, by the number of the save."""

    def __init__(self, mesh: MeshSpec, rank: int) -> None:
        self._mesh, self._rank = mesh, rank
        self._saves: dict[int, _Save] = {}

    def add(self, number: int, values: Sequence[Any], value_of: Callable[[int], torch.Tensor], last: bool) -> None:
        """Take what this worker is to write of values: each a handle, its type, and pieces. With the `last` of them it
        begins to write."""
        save = self._saves.setdefault(number, _Save())
        for handle, type_, pieces in values:
            mine = [piece for piece in pieces if piece[0] == self._rank]
            if not mine:
                continue
            block = own_part(value_of(handle), type_from(type_), self._mesh, self._rank)
            for _, file, offset, dim, start, length in mine:
                piece = block.narrow(dim, start, length) if block.ndim else block
                save.pieces.append((handle, piece, file, offset))
                save.pending[handle] += 1
        if last:
            save.start()

    def is_held(self, handle: int) -> bool:
        """Whether a value is still to be written."""
        return any(save.pending[handle] > 0 for save in self._saves.values())

    def __bool__(self) -> bool:
        return bool(self._saves)

    def look(self, number: int) -> dict[str, Any]:
        """How far a save is: what `Written` has, and "error"."""
        save = self._saves.get(number)
        if save is None:
            return {"bytes": 0, "done": True, "sums": [], "error": "the checkpoint: the mesh was healed meanwhile"}
        return {"bytes": save.written, "done": save.done, "sums": save.sums if save.done else [], "error": save.error}

    def stop(self, number: int) -> None:
        """Write no more of a save."""
        if (save := self._saves.pop(number, None)) is not None:
            save.stopped = True

    def stop_all(self) -> None:
        for number in list(self._saves):
            self.stop(number)


def load_value(mesh: MeshSpec, rank: int, value: Sequence[Any]) -> torch.Tensor:
    """This worker's block of a tensor whose type, name and stored blocks these are, with zeros as padding. Raises
    RuntimeError."""
    described, name, stored = value
    type_ = type_from(described)
    block = torch.empty(type_.local_shape(mesh), dtype=type_.dtype)
    part = own_part(block, type_, mesh, rank)
    if part.shape != block.shape:
        block.zero_()
    try:
        with Reader() as reader:
            reader.fill(part, start_of(type_, mesh, rank), map(stored_from, stored), name)
    except OSError as error:
        raise RuntimeError(f"cannot read '{name}': {explain(error, '')}") from None
    except (CorruptError, ValueError) as error:
        raise RuntimeError(str(error)) from None
    return block


# -- what stands in the commands ---------------------------------------------------------------------------------------


def type_from(described: Sequence[Any]) -> TensorType:
    dtype, shape, shards = described
    return TensorType(DTYPES[dtype], tuple(shape), Layout(tuple(tuple(names) for names in shards)))


def stored_from(described: Sequence[Any]) -> Stored:
    file, offset, dtype, start, shape, strides, sums = described
    where = None if sums is None else (str(sums[0]), int(sums[1]))
    return Stored(file, offset, getattr(torch, dtype), tuple(start), tuple(shape), tuple(strides), where)
