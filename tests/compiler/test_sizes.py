"""Bytes as people write them."""

from __future__ import annotations

import pytest

from monarch.compiler.errors import MonarchError
from monarch.compiler.sizes import format_bytes, parse_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2 GiB", 2 << 30),
        ("2GiB", 2 << 30),
        ("2g", 2 << 30),
        ("512 MB", 512_000_000),
        ("1.5 KiB", 1536),
        ("7", 7),
        (1 << 40, 1 << 40),
        ("1TiB", 1 << 40),
        (" 3 b ", 3),
    ],
)
def test_sizes(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "much", "-1", "1 XB", "1e9", "1 2 GiB", True, None, 1.5j, [], "GiB"])
def test_what_is_no_size(text: object) -> None:
    with pytest.raises(MonarchError, match="--memory-limit is .*, not a number of bytes"):
        parse_bytes(text, "--memory-limit")  # type: ignore[arg-type]


def test_nothing_is_no_limit() -> None:
    with pytest.raises(MonarchError, match="has to be at least one byte"):
        parse_bytes("0")
    with pytest.raises(MonarchError, match="has to be at least one byte"):
        parse_bytes("0.1 B")


def test_large_sizes_are_exact() -> None:
    assert parse_bytes(str(2**62 + 1)) == 2**62 + 1


@pytest.mark.parametrize(("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")])
def test_bytes_for_people(count: int, text: str) -> None:
    assert format_bytes(count) == text
