"""Blocks of tensors in files: each worker's pieces, and their places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

SUM_BYTES = 1 << 20
"""A stored block has a checksum for each so many bytes, from its beginning."""
SUM_DIGITS = 32
"""So many hexadecimal digits a checksum has."""


@dataclass(frozen=True)
class Piece:
    """What worker `rank` writes of its block of a tensor: `length` elements from `start` on along `dim`, in front of
    which the block's sizes are 1, so that a row-major block has them in one stretch. Padding is not part of a block.

    `file`    an absolute path, on each host the same
    `offset`  in bytes, of the first element
    """

    rank: int
    file: str
    offset: int
    dim: int
    start: int
    length: int


@dataclass(frozen=True)
class Stored:
    """A block of a tensor in a file.

    `offset`   in bytes, of its first element
    `start`    where in the tensor the block begins, by dim; `shape`: its sizes
    `strides`  in elements, as the file has them
    `sums`     the file with the checksums of the block, as digits in a row, and the offset of the first; None where
               the file's writer left none
    """

    file: str
    offset: int
    dtype: torch.dtype
    start: tuple[int, ...]
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sums: tuple[str, int] | None = None


@dataclass(frozen=True)
class Written:
    """How far the workers are with what they write.

    `sums`  once all is written: the checksums of each piece, by file and offset
    """

    bytes: int
    done: bool
    sums: Mapping[tuple[str, int], list[str]]


__all__ = ["SUM_BYTES", "SUM_DIGITS", "Piece", "Stored", "Written"]
