"""Text that every machine with Python has: the source files of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch


def corpus(limit: int = 8 << 20, folder: Path | None = None) -> torch.Tensor:
    """The `.py` files of Python's standard library (or of `folder`), one after the other, as u8[n] with n <= `limit`.

    Files come in the order of their paths, so the same installation gives the same bytes; installed packages
    (site-packages) and the library's own tests are left out. Raises FileNotFoundError where there is no such file.
    """
    folder = folder or Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).parts
        if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(parts[:-1]):
            continue
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if not text:
        raise FileNotFoundError(f"no Python source files in {folder}: corpus(folder=…) can read others")
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batches(
    text: torch.Tensor, *, batch: int, sequence: int, steps: int, seed: int = 0
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """`steps` random batches of windows of `text` u8[n]: tokens and targets, both i64[batch, sequence].

    A target is the token after. The same seed gives the same batches, and the first ones do not depend on `steps`.
    Raises ValueError for a text that is no longer than a window.
    """
    if len(text) <= sequence:
        raise ValueError(f"the text has {len(text)} tokens: too few for windows of {sequence} and a target each")
    generator = torch.Generator().manual_seed(seed)
    within = torch.arange(sequence + 1)
    for _ in range(steps):
        starts = torch.randint(len(text) - sequence, (batch, 1), generator=generator)
        window = text[starts + within].long()
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def encode(text: str) -> torch.Tensor:
    """The text's UTF-8 bytes as tokens i64[n]."""
    return torch.tensor(list(text.encode()), dtype=torch.int64)


def decode(tokens: torch.Tensor) -> str:
    """The text of byte tokens [n]; bytes that are no UTF-8 become replacement characters."""
    return bytes(tokens.tolist()).decode(errors="replace")
