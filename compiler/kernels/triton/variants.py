"""The tiles of matrix products, and the estimated time of each on a GPU.

The estimate is a roofline over waves of tiles: all multiprocessors work on one tile each, and the last wave takes as
long as a full one. The part of the peak that a kernel reaches is assumed, not measured (`_REACHED`): it decides which
variants a plan carries, in which order, and whether there is a template at all, until `monarchc tune` has measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from monarch.compiler.cost.machine import MACHINES
from monarch.compiler.types import DTYPE_NAMES

HALVES = (torch.bfloat16, torch.float16)
SMALLEST = 16
"""The least rows, columns and summands of matrix units."""


@dataclass(frozen=True)
class Tiles:
    """How a product is cut: a program makes [rows, columns], `inner` summed elements at a time; `group` tiles down are
    made before the next column of tiles; loads run `stages` ahead."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    group: int = 8

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}x{self.inner}, {self.warps} warps, {self.stages} stages"


_HALF = (
    Tiles(128, 256, 64, 8, 3),
    Tiles(128, 128, 64, 8, 3),
    Tiles(128, 64, 64, 4, 4),
    Tiles(64, 64, 64, 4, 4),
    Tiles(32, 64, 64, 4, 4),
    Tiles(16, 64, 64, 4, 4),
    Tiles(64, 64, 32, 4, 2),
)
_SINGLE = (
    Tiles(128, 128, 32, 8, 2),
    Tiles(128, 64, 32, 8, 3),
    Tiles(64, 64, 32, 4, 3),
    Tiles(32, 64, 32, 4, 3),
    Tiles(16, 64, 32, 4, 3),
)
LARGEST_TILE = 256
"""The most along one dim."""

MOST_VARIANTS = 3
"""As many as a plan carries of one kernel: each takes some tenths of a second to compile."""


_REACHED: dict[str, tuple[float, float]] = {"cuda:80": (0.75, 0.7), "cuda:90": (0.75, 0.5), "cuda:100": (0.75, 0.35)}
"""The part of the peak in bf16 and f16 that a vendor's library and this template are assumed to reach: about alike on
the A100, as Triton's tutorial on matrix products has it, and further apart the more of a GPU's speed comes from units
(the tensor memory accelerator, warps of different roles) that the template does not use."""
_REACHED_ELSEWHERE = (0.7, 0.5)
_REACHED_SINGLE = (0.8, 0.4)
"""In f32, which the template multiplies without matrix units."""
_COMPUTED = 0.7
"""How much of that is left where a factor goes through registers rather than straight to the matrix units."""


@dataclass(frozen=True)
class ProductSize:
    """A product of a batch of [rows, summed] by [summed, columns] in factors of `dtype`; `moved` are the bytes that it
    reads and writes at least, and `registers` those of a thread that its sums may take: an epilogue of exponentials and
    the like wants more of its own than one of sums. where a factor is
    not multiplied as it is loaded, `computed` is how many bytes are loaded for an element of it."""

    batch: int
    rows: int
    columns: int
    summed: int
    dtype: torch.dtype
    moved: int
    registers: int = 128
    computed: int = 0


def tiles_for(work: ProductSize, target: str | None = None) -> list[tuple[Tiles, float]]:
    """The variants for a product and the estimated seconds of each, the fastest first; without a target one of
    a middling size."""
    known = _HALF if work.dtype in HALVES else _SINGLE
    fitting = list(dict.fromkeys(_fitting(tiles, work) for tiles in known))
    if target is None:
        return [(_fitting(known[1], work), 0.0)]
    room = MACHINES[target].shared
    fitting = [
        tiles
        for tiles in fitting
        if _shared(tiles, work, target) <= room and tiles.rows * tiles.columns <= work.registers * tiles.warps * 32
    ]
    timed = [(tiles, template_seconds(work, tiles, target)) for tiles in fitting]
    return sorted(timed, key=lambda each: each[1])


def _fitting(tiles: Tiles, work: ProductSize) -> Tiles:
    """The tiles, no larger than the product."""

    def least(size: int, tile: int) -> int:
        return max(SMALLEST, min(tile, 1 << max(size - 1, 0).bit_length()))

    rows, columns = least(work.rows, tiles.rows), least(work.columns, tiles.columns)
    warps = min(tiles.warps, rows * columns // 256)
    return Tiles(rows, columns, least(work.summed, tiles.inner), warps, tiles.stages, tiles.group)


def _shared(tiles: Tiles, work: ProductSize, target: str) -> int:
    """About the bytes of the tiles of both factors in flight, and of those that are computed once more. A kernel's real
    use is known when it is compiled."""
    elements = (tiles.rows + tiles.columns) * tiles.inner
    again = work.dtype.itemsize if work.computed else 0
    ahead = max(1, tiles.stages - 1) if target.startswith("gfx") else tiles.stages
    return elements * (max(work.dtype.itemsize, work.computed) * ahead + again)


def template_seconds(work: ProductSize, tiles: Tiles, target: str) -> float:
    """The seconds of a product with its epilogue in one launch."""
    return _seconds(work, tiles, target, _reached(work, target)[1] * (_COMPUTED if work.computed else 1.0))


def library_seconds(work: ProductSize, target: str) -> float:
    """The seconds of ATen's product: a library has a tile for every size."""
    known = _HALF if work.dtype in HALVES else _SINGLE
    return min(_seconds(work, _fitting(tiles, work), target, _reached(work, target)[0]) for tiles in known)


def _reached(work: ProductSize, target: str) -> tuple[float, float]:
    return _REACHED.get(target, _REACHED_ELSEWHERE) if work.dtype in HALVES else _REACHED_SINGLE


def _seconds(work: ProductSize, tiles: Tiles, target: str, reached: float) -> float:
    machine = MACHINES[target]
    down, across = -(-work.rows // tiles.rows), -(-work.columns // tiles.columns)
    waves = -(-work.batch * down * across // machine.processors)
    rate = machine.rate(DTYPE_NAMES[work.dtype]) / machine.processors * reached
    # Small tiles read the factors more often, out of the L2 cache, until that takes longer than multiplying them.
    smaller = min(tiles.rows, tiles.columns)
    rate *= min(1.0, smaller / (128 if work.dtype in HALVES else 64)) ** 0.5
    if target in ("cuda:90", "cuda:100") and work.dtype in HALVES and (tiles.rows < 64 or tiles.warps < 4):
        rate /= 2  # four warps and 64 rows make one wgmma or tcgen05.mma; less than that is left to mma.sync
    arithmetic = waves * 2.0 * tiles.rows * tiles.columns * work.summed / rate
    return machine.start + max(arithmetic, work.moved / machine.memory)
