"""Writing blocks past the system's cache, and the memory that blocks are read into."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch.runtime.shared import files
from monarch.runtime.shared.files import Target
from monarch.runtime.shared.large import new_block

MIB = 1 << 20


@pytest.mark.parametrize("without", ["", "open", "write"])
def test_blocks_at_any_offset_leave_their_neighbours_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without: str
) -> None:
    plain_open, plain_write = os.open, os.pwrite
    direct: set[int] = set()

    def open_(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT and without == "open":
            raise OSError(errno.EINVAL, "no direct writes")
        fd = plain_open(path, flags, mode)
        if flags & os.O_DIRECT:
            direct.add(fd)
        return fd

    def write(fd: int, data: Any, offset: int) -> int:
        if fd in direct and without == "write":
            raise OSError(errno.EINVAL, "no direct writes")
        return plain_write(fd, data, offset)

    monkeypatch.setattr(files.os, "open", open_)
    monkeypatch.setattr(files.os, "pwrite", write)
    path = tmp_path / "blocks"
    blocks = [
        torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (64, 5 * MIB + 77, 3, MIB, MIB + 4096, 1000)
    ]
    blocks.append(torch.randint(0, 256, (1030, 2048), dtype=torch.uint8).T)  # copied in rows
    at, ends = 64, []
    for block in blocks:
        ends.append((at, block))
        at += block.numel()
    sums = {}
    with Target(str(path)) as first, Target(str(path)) as second:  # two writers, each of every other block
        for number, (start, block) in enumerate(ends):
            sums[start] = (first, second)[number % 2].write(start, block, lambda size: None)
        first.sync()
        second.sync(at)
    assert path.read_bytes() == bytes(64) + b"".join(bytes(block.contiguous().view(-1).numpy()) for block in blocks)
    for start, block in ends:
        rows = memoryview(bytes(block.contiguous().view(-1).numpy()))
        assert sums[start] == [files.checksum(rows[low : low + MIB]) for low in range(0, len(rows), MIB)]


def test_a_large_block_has_the_memory_of_one_that_is_gone_and_never_that_of_one_that_is_viewed() -> None:
    block = new_block((3, MIB), torch.float32).fill_(1)
    where, view = block.data_ptr(), block[1:, :5]
    del block
    other = new_block((3, MIB), torch.float32).fill_(2)
    assert other.data_ptr() != where and view.eq(1).all()
    del view
    assert new_block((6, MIB), torch.bfloat16).data_ptr() == where
