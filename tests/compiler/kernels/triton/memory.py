"""What a launch may touch, and which of its programs touched it: out-of-bounds accesses and races between programs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

NOBODY, SEVERAL = -1, -2


class MemoryFault(AssertionError):
    """A kernel touched memory that it was not given, or two of its programs race for an element."""


@dataclass
class Storage:
    """One allocation, with a note for each of its bytes: whether an element starts there, and who read and wrote it."""

    names: list[str]
    start: int
    element: np.ndarray
    reader: np.ndarray
    writer: np.ndarray


class Memory:
    """The memory behind a launch's tensors. `program` is the running one: its number, and its place in the grid."""

    program: tuple[int, tuple[int, ...]] = (0, (0, 0, 0))

    def __init__(self, kernel: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.kernel = kernel
        self.storages: dict[int, Storage] = {}
        for name, tensor in tensors.items():
            if not tensor.numel():
                continue
            memory = tensor.untyped_storage()
            start, size = memory.data_ptr(), memory.nbytes()
            if start not in self.storages:
                nobody = np.full(size, NOBODY, dtype=np.int32)
                self.storages[start] = Storage([], start, np.zeros(size, dtype=bool), nobody, nobody.copy())
            storage = self.storages[start]
            storage.names.append(name)
            width = tensor.element_size()
            strides = [stride * width for stride in tensor.stride()]
            starts = torch.from_numpy(storage.element).as_strided(
                tensor.shape, strides, tensor.storage_offset() * width
            )
            starts.fill_(True)

    def load(self, pointers: np.ndarray, mask: np.ndarray) -> None:
        number, _ = self.program
        for storage, at in self.check(pointers, mask, "loads"):
            writer = storage.writer[at]
            self._race(storage, at, (writer != NOBODY) & (writer != number), writer, "loads", "stored")
            reader = storage.reader[at]
            storage.reader[at] = np.where((reader == NOBODY) | (reader == number), number, SEVERAL)

    def store(self, pointers: np.ndarray, mask: np.ndarray) -> None:
        number, _ = self.program
        for storage, at in self.check(pointers, mask, "stores"):
            for other, did in ((storage.writer[at], "stored"), (storage.reader[at], "loaded")):
                self._race(storage, at, (other != NOBODY) & (other != number), other, "stores", did)
            storage.writer[at] = number

    def check(self, pointers: np.ndarray, mask: np.ndarray, does: str) -> list[tuple[Storage, np.ndarray]]:
        """The storages under `pointers`, with the offsets into each; MemoryFault for what is in none of them."""
        pointers, mask = np.broadcast_arrays(pointers, mask)
        left = pointers[mask].astype(np.int64)
        found = []
        for storage in self.storages.values():
            at = left - storage.start
            inside = (at >= 0) & (at < storage.element.size)
            if inside.any():
                self._gaps(storage, at[inside], does)
                found.append((storage, at[inside]))
                left = left[~inside]
            if not left.size:
                return found
        if not left.size:
            return found
        nearest = min(
            self.storages.values(), key=lambda s: min(abs(left[0] - s.start), abs(left[0] - s.start - s.element.size))
        )
        raise MemoryFault(
            f"{self._where()} {does} {left.size} elements outside of every tensor it was given: the first is at byte "
            f"{left[0] - nearest.start} of the {nearest.element.size} bytes under {' and '.join(nearest.names)}"
        )

    def _gaps(self, storage: Storage, at: np.ndarray, does: str) -> None:
        gaps = ~storage.element[at]
        if gaps.any():
            raise MemoryFault(
                f"{self._where()} {does} byte {at[gaps][0]} under {' and '.join(storage.names)}, "
                "where no element starts"
            )

    def _race(
        self, storage: Storage, at: np.ndarray, clash: np.ndarray, other: np.ndarray, does: str, did: str
    ) -> None:
        if clash.any():
            who = "several others" if other[clash][0] == SEVERAL else f"program {other[clash][0]}"
            raise MemoryFault(
                f"{self._where()} {does} byte {at[clash][0]} of {' and '.join(storage.names)}, "
                f"which {who} {did} in the same launch"
            )

    def _where(self) -> str:
        number, place = self.program
        return f"{self.kernel}: program {number} {tuple(map(int, place))}"
