"""A worker writes its values to files in a thread of its own, while it runs steps: as they were when the command came.

A value that is to be written is not copied. It is marked until it has been written, and a step that would write over it
takes a copy (see `WorkerState._run`). A worker reads files at the command's place in their order.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from monarch.compiler.blocks import own_part, start_of
from monarch.compiler.execution.storage import Stored
from monarch.compiler.plan import DTYPES, Layout, MeshSpec, TensorType
from monarch.runtime.shared import wire
from monarch.runtime.shared.files import CorruptError, Reader, Target, explain
from monarch.runtime.shared.large import new_block
from monarch.runtime.shared.place import ranks_of
from monarch.runtime.shared.wire import Report
from monarch.runtime.worker.messages import Fetched, Message, Missing


class _Stopped(Exception):
    """The write is given up: nothing needs it any more."""


class Save:
    """One save. The worker's loop adds pieces, starts it, and looks; the thread does the rest."""

    def __init__(self) -> None:
        self.pieces: list[tuple[int, torch.Tensor, str, int]] = []
        self.pending: Counter[int] = Counter()
        """The handles that are still to be written, with how many pieces of each."""
        self.written = 0
        self.sums: list[tuple[str, int, list[str]]] = []
        self.error = ""
        self.done = False
        self.started = False
        self.stopped = False

    def add(self, handle: int, piece: torch.Tensor, file: str, offset: int) -> None:
        self.pieces.append((handle, piece, file, offset))
        self.pending[handle] += 1

    def told(self) -> dict[str, Any]:
        """How far it is."""
        done = self.done
        return {"bytes": self.written, "done": done, "sums": self.sums if done else [], "error": self.error}

    def start(self) -> None:
        self.started = True
        threading.Thread(target=self.run, name="monarch save", daemon=True).start()

    def run(self) -> None:
        opened = ExitStack()
        with torch.inference_mode():
            files: dict[str, Target] = {}
            file = ""
            try:
                for handle, piece, file, offset in self.pieces:
                    if self.stopped:  # the job that opened the file now could make it anew, among those of another save
                        raise _Stopped
                    if file not in files:
                        files[file] = opened.enter_context(Target(file))
                    sums = files[file].write(offset, piece, self._wrote)
                    if sums:  # where there is nothing to write, another piece may stand
                        self.sums.append((file, offset, sums))
                    self.pending[handle] -= 1
                for target in files.values():
                    target.sync()
            except OSError as error:
                self.error = explain(error, file)
            except (MemoryError, RuntimeError) as error:  # PyTorch raises the second
                self.error = f"{file}: {error or 'no memory left'}"
            except _Stopped:
                pass
            finally:
                opened.close()
                self.pieces.clear()
                self.pending.clear()
                self.done = True

    def _wrote(self, size: int) -> None:
        self.written += size
        if self.stopped:
            raise _Stopped


class Files:
    """A worker's part in checkpoints. `value_of(handle)` is the worker's value."""

    def __init__(self, mesh: MeshSpec, rank: int, value_of: Callable[[int], torch.Tensor | Missing]) -> None:
        self._mesh, self._rank, self._value_of = mesh, rank, value_of
        self.saves: dict[int, Save] = {}

    @property
    def writing(self) -> bool:
        """Whether there are saves that the controller has not ended."""
        return bool(self.saves)

    def _at(self, place: Sequence[Any] | None) -> tuple[MeshSpec, int]:
        """The mesh that a command is for, which may be a part of this worker's, and this worker's number there; -1
        where it has none."""
        if place is None:
            return self._mesh, self._rank
        dims, numbers = place
        ranks = ranks_of(numbers)
        mesh = MeshSpec(tuple((name, size) for name, size in dims))
        return mesh, ranks.index(self._rank) if self._rank in ranks else -1

    def is_held(self, handle: int) -> bool:
        """Whether a value is still to be written."""
        return any(save.pending[handle] > 0 for save in self.saves.values())

    def write(self, step: int, body: bytearray) -> list[Message]:
        """Take what this worker is to write of values. With the last of them it begins to write."""
        job = wire.unpack_json(body)
        save = self.saves.setdefault(job["save"], Save())
        mesh, rank = self._at(job.get("place"))
        for handle, type_, pieces in job["values"]:
            mine = [piece for piece in pieces if piece[0] == self._rank]
            if not mine:
                continue
            value = self._value_of(handle)
            if isinstance(value, Missing):
                return [Report("dependent", self._rank, step, root=value.root)]
            block = own_part(value, type_from(type_), mesh, rank)
            for _, file, offset, dim, start, length in mine:
                save.add(handle, block.narrow(dim, start, length) if block.ndim else block, file, offset)
        if job["last"]:
            save.start()
        return []

    def tell(self, step: int, body: bytearray) -> list[Message]:
        """The progress of a save: the fields of `storage.Written`, and "error". With a 1 behind its number the save is
        ended, and is done once its thread writes no more."""
        _, number, stop = wire.unpack_numbers(body)
        save = self.saves.get(number)
        if stop and save is not None:
            save.stopped = True
            if not save.started:
                save.done = True
            if save.done:
                del self.saves[number]
        told = save.told() if save is not None else _GIVEN_UP
        return [Fetched(step, torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8))]

    def stop_all(self) -> None:
        """A new session begins: nobody asks for these saves any more."""
        for save in self.saves.values():
            save.stopped = True
        self.saves.clear()

    def read(self, step: int, body: bytearray, values: dict[int, torch.Tensor | Missing]) -> list[Message]:
        """Put what this worker is to hold of stored tensors among its values."""
        job = wire.unpack_json(body)
        mesh, rank = self._at(job["place"])
        wanted = job["tensors"] if rank >= 0 else []
        try:
            for handle, *value in wanted:
                values[handle] = load_value(mesh, rank, value)
        except RuntimeError as error:  # no memory left, or a file that cannot be read
            for handle, *_ in wanted:
                values[handle] = Missing(step)
            return [Report("failed", self._rank, step, str(error))]
        return []


_GIVEN_UP = {"bytes": 0, "done": True, "sums": [], "error": "the checkpoint: the mesh was healed meanwhile"}


def load_value(mesh: MeshSpec, rank: int, value: Sequence[Any]) -> torch.Tensor:
    """This worker's block of a tensor whose type, name and stored blocks these are, with zeros as padding. Raises
    RuntimeError."""
    described, name, stored = value
    type_ = type_from(described)
    block = new_block(type_.local_shape(mesh), type_.dtype)
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


# -- the parts of commands --------------------------------------------------------------------------------------------


def type_from(described: Sequence[Any]) -> TensorType:
    dtype, shape, shards = described
    return TensorType(DTYPES[dtype], tuple(shape), Layout(tuple(tuple(names) for names in shards)))


def stored_from(described: Sequence[Any]) -> Stored:
    file, offset, dtype, start, shape, strides, sums = described
    where = None if sums is None else (str(sums[0]), int(sums[1]))
    return Stored(file, offset, getattr(torch, dtype), tuple(start), tuple(shape), tuple(strides), where)
