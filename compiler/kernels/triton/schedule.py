"""How a nest's loops become programs, blocks and warps.

A program computes a tile. Its axes are flattened groups of dims: x (kept, contiguous where it can be), y (kept, where
some accesses are contiguous along another dim than x's: a transpose), r (reduced). A reduction is *persistent* where
one tile holds all that is reduced, so that every element is loaded once; else the program loops over r. Where there are
too few kept elements to fill a GPU, r is *split* among programs, each of which writes a partial result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from monarch.compiler.kernels.triton.loops import Access, levels
from monarch.compiler.loops.ir import Load, Nest, Reduce, Store
from monarch.compiler.loops.nests import live

ENOUGH_PROGRAMS = 256
"""About two for each multiprocessor of a large GPU."""
MOST_SPLITS = 512
TILE = 2048
"""Elements of a tile that a program loops with: eight for each thread of eight warps."""
PERSISTENT = 16384
"""The longest r in one tile: 32 elements for each thread of sixteen warps."""
PERSISTENT_REGISTERS = 96
"""The most that a thread may keep of such a tile; more would spill."""
LARGEST_GRID = 2**31 - 1


@dataclass(frozen=True)
class Axis:
    """One dim of the tile: its name in the source, the dims of the nest that it runs through, outermost first, their
    sizes, and the block, a power of two. `runtime` is true where its size is known to the program only when it runs."""

    name: str
    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    block: int
    runtime: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.sizes)

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block)


@dataclass(frozen=True)
class Schedule:
    """`axes` in the order of the tile's dims, contiguous last. `slice` is how much of r one of `splits` programs
    takes: a multiple of r's block where there are several."""

    axes: tuple[Axis, ...]
    persistent: bool
    splits: int
    slice: int
    warps: int

    @property
    def kept(self) -> tuple[Axis, ...]:
        return tuple(axis for axis in self.axes if axis.name != "r")

    @property
    def r(self) -> int:
        """Where r is among the axes; -1 where nothing is reduced."""
        return next((at for at, axis in enumerate(self.axes) if axis.name == "r"), -1)

    @property
    def programs(self) -> int:
        return math.prod(axis.blocks for axis in self.kept)


def ceiling(number: int) -> int:
    """The least power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()


def schedule(nest: Nest, touched: Sequence[Access]) -> Schedule:
    """The schedule of a simplified nest with these accesses."""
    return _reduction(nest, touched) if nest.reduced else _pointwise(nest, touched)


def _axis(name: str, nest: Nest, dims: Sequence[int], block: int) -> Axis:
    sizes = tuple(nest.dims[dim] for dim in dims)
    return Axis(name, tuple(dims), sizes, min(block, ceiling(math.prod(sizes))))


def _warps(elements: int, each: int = 8) -> int:
    return max(1, min(16, ceiling(elements // (32 * each))))


# Pointwise -----------------------------------------------------------------------------------------------------------


def _pointwise(nest: Nest, touched: Sequence[Access]) -> Schedule:
    dims = range(len(nest.dims))
    if not nest.dims:
        return Schedule((), False, 1, 1, 1)
    across = _transposed(nest, touched)
    if across is not None:
        rest = [dim for dim in dims if dim != across]
        axes = _axis("y", nest, [across], 64), _axis("x", nest, rest, 64)
        return Schedule(axes, False, 1, 1, _warps(axes[0].block * axes[1].block, 16))
    total = math.prod(nest.dims)
    axis = _axis("x", nest, dims, 1024 if total >= 1024 * ENOUGH_PROGRAMS else 512)
    return Schedule((axis,), False, 1, 1, _warps(axis.block, 8 if axis.block == 1024 else 4))


def _transposed(nest: Nest, touched: Sequence[Access]) -> int | None:
    """A dim along which more bytes are contiguous than along the last one only for accesses that move along both, and
    so would be read an element from each line of memory."""
    last = len(nest.dims) - 1
    bytes_along: dict[int, int] = {}
    for access in touched:
        strides = access.index.strides
        if strides[last] in (0, 1):
            continue
        for dim in range(last):
            if strides[dim] == 1 and nest.dims[dim] >= 8 and nest.dims[last] >= 8:
                bytes_along[dim] = bytes_along.get(dim, 0) + access.itemsize
    return max(bytes_along, key=lambda dim: bytes_along[dim]) if bytes_along else None


# Reductions ----------------------------------------------------------------------------------------------------------


def _reduction(nest: Nest, touched: Sequence[Access]) -> Schedule:
    kept, reduced = range(len(nest.kept)), range(len(nest.kept), len(nest.dims))
    elements, length = math.prod(nest.kept), math.prod(nest.dims[dim] for dim in reduced)
    inner, mixed = _contiguous(nest, touched)
    if not kept:
        return _with_r(nest, (), length)
    if not inner or mixed:
        across = _axis("x", nest, kept, 32 if mixed else 64)
        if length <= TILE // across.block:
            r = _axis("r", nest, reduced, ceiling(length))
            axes = (across, r) if inner else (r, across)
            return Schedule(axes, True, 1, length, _warps(across.block * r.block))
        r = _axis("r", nest, reduced, max(TILE // across.block, 1))
        axes = (across, r) if inner else (r, across)
        splits, each = _split(across.blocks, length, r.block)
        return Schedule(axes, False, splits, each, _warps(across.block * r.block))
    if ceiling(length) >= TILE // 2 or elements < 2:
        return _with_r(nest, (_axis("x", nest, kept, 1),), length)
    # Short rows: several in one tile, but not so many that few programs are left.
    rows = max(1, min(TILE // 2 // ceiling(length), elements // ENOUGH_PROGRAMS))
    across = _axis("x", nest, kept, 1 << (rows.bit_length() - 1))
    r = _axis("r", nest, reduced, ceiling(length))
    return Schedule((across, r), True, 1, length, _warps(across.block * r.block))


def _with_r(nest: Nest, kept: tuple[Axis, ...], length: int) -> Schedule:
    """One kept element, or none, a program, and all of r contiguous."""
    reduced = range(len(nest.kept), len(nest.dims))
    if ceiling(length) <= PERSISTENT and _registers(nest, ceiling(length)) <= PERSISTENT_REGISTERS:
        r = _axis("r", nest, reduced, ceiling(length))
        return Schedule((*kept, r), True, 1, length, _warps(r.block))
    r = _axis("r", nest, reduced, TILE)
    splits, each = _split(math.prod(axis.blocks for axis in kept), length, r.block)
    return Schedule((*kept, r), False, splits, each, _warps(r.block))


def _registers(nest: Nest, block: int) -> int:
    """About how many registers of a thread the values of a persistent tile take: a loaded value stays as long as it is
    used after some reduction."""
    alive, waits = live(nest.body), levels(nest)
    loads = sum(number in alive and isinstance(each, Load) for number, each in enumerate(nest.body))
    reductions = any(number in alive and isinstance(each, Reduce) for number, each in enumerate(nest.body))
    stored = any(isinstance(each, Store) and waits[at] for at, each in enumerate(nest.body))
    kept = loads if reductions and stored else 1
    return (kept + 1) * block // (32 * _warps(block))


def _split(programs: int, length: int, block: int) -> tuple[int, int]:
    """Among how many programs r is split, and how much of it each takes: several blocks, or splitting is no gain."""
    wanted = min(ENOUGH_PROGRAMS // max(programs, 1), length // (2 * block), MOST_SPLITS)
    if wanted < 2:
        return 1, length
    each = -(-length // (wanted * block)) * block
    return -(-length // each), each


def _contiguous(nest: Nest, touched: Sequence[Access]) -> tuple[bool, bool]:
    """Whether most of memory is contiguous along r rather than along x, and whether some is the other way."""
    first = len(nest.kept)
    inner = outer = 0
    for access in touched:
        strides = access.index.strides
        kept = min((stride for stride in strides[:first] if stride), default=None)
        reduced = min((stride for stride in strides[first:] if stride), default=None)
        if kept is None or reduced is None:
            continue
        if reduced <= kept:
            inner += access.itemsize
        else:
            outer += access.itemsize
    return inner >= outer, bool(inner and outer)
