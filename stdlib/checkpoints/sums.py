"""CRC-32s of long stretches from those of their parts, as zlib's crc32_combine finds them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from monarch.compiler.execution.storage import SUM_BYTES

_POLYNOMIAL = 0xEDB88320


def crc_of(sums: Sequence[int], size: int) -> int:
    """The CRC-32 of `size` bytes, from those of each `SUM_BYTES` of them, in order."""
    total = 0
    for number, each in enumerate(sums):
        total = _apply(_behind(min(SUM_BYTES, size - number * SUM_BYTES)), total) ^ each
    return total


@lru_cache(64)
def _behind(length: int) -> tuple[int, ...]:
    """What `length` zero bytes make of a CRC-32: a linear map over its bits, as the images of the 32 of them."""
    one_bit = (_POLYNOMIAL, *(1 << bit for bit in range(31)))
    power, result = one_bit, tuple(1 << bit for bit in range(32))
    bits = 8 * length
    while bits:
        if bits & 1:
            result = tuple(_apply(power, image) for image in result)
        power = tuple(_apply(power, image) for image in power)
        bits >>= 1
    return result


def _apply(images: Sequence[int], crc: int) -> int:
    result, bit = 0, 0
    while crc:
        if crc & 1:
            result ^= images[bit]
        crc >>= 1
        bit += 1
    return result


__all__ = ["crc_of"]
