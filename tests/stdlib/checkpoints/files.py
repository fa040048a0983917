"""Checkpoints without worker processes: an executor in this process that writes and reads as workers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from monarch.compiler.blocks import block_of, whole_of
from monarch.compiler.execution.storage import Piece, Stored, Written
from monarch.compiler.types import MeshSpec, TensorType
from monarch.runtime.controller.storing import block_text, type_text
from monarch.runtime.shared import wire
from monarch.runtime.worker.files import Files, load_value
from tests.language.dense import DenseExecutor, DenseHandle


class FileExecutor(DenseExecutor):
    def writing(self) -> WritingHere:
        return WritingHere(self.mesh)

    def read(self, tensors: Sequence[tuple[TensorType, str, Sequence[Stored]]]) -> list[DenseHandle]:
        made = []
        for type_, name, blocks in tensors:
            told = type_text(type_), name, [block_text(block) for block in blocks]
            parts = [load_value(self.mesh, rank, told) for rank in range(self.mesh.workers)]
            made.append(DenseHandle(whole_of(parts, type_, self.mesh), type_))
        return made


class WritingHere:
    def __init__(self, mesh: MeshSpec) -> None:
        self.mesh = mesh
        self._found: list[dict[str, Any]] = []

    def start(self, values: Sequence[tuple[Any, Sequence[Piece]]]) -> None:
        told = [
            (number, type_text(handle.type), [list(vars(piece).values()) for piece in pieces])
            for number, (handle, pieces) in enumerate(values)
        ]
        body = bytearray(wire.pack_json(wire.WRITE, {"save": 0, "values": told, "last": False}))
        for rank in range(self.mesh.workers):

            def block(number: int, rank: int = rank) -> torch.Tensor:
                handle = values[number][0]
                return block_of(handle.tensor, handle.type, self.mesh, rank)

            files = Files(self.mesh, rank, block)
            assert files.write(0, body) == []
            files.saves[0].run()
            self._found.append(files.saves[0].told())

    def belongs_to(self, thread: Any) -> None:
        pass

    def poll(self) -> Written:
        assert not any(each["error"] for each in self._found), self._found
        sums = {(file, offset): sums for each in self._found for file, offset, sums in each["sums"]}
        return Written(sum(each["bytes"] for each in self._found), True, sums)

    def ahead(self) -> int:
        return 0

    def end(self) -> None:
        pass
