"""A nest as a C++ function that runs a range of one of its kept loops.

Values are computed at the outermost loop along whose dims they vary. Reductions that depend on each other follow each
other as *segments* of loops; a value that varies along reduced dims and is needed by several segments is kept in a
small array, or computed again where that is cheaper. All loads of a loop's body stand before its stores, and what an
output may overwrite is not stored before it was loaded for the last time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from monarch.compiler.kernels.cpp import expressions
from monarch.compiler.kernels.cpp.expressions import TYPES, memory_type
from monarch.compiler.kernels.cpp.schedule import TILE, Schedule
from monarch.compiler.kernels.cpp.simplify import Simple, operands
from monarch.compiler.kernels.ir import FLOATS, Constant, Index, Load, Op, Position, Reduce, Store

_BLOCK = 512
"""Columns that are reduced at a time: their accumulators stay in the L1 cache."""
_CHUNK = 2048
"""Elements of a row that one lane of accumulators sums up; their sums are summed in turn, which keeps errors small."""
_ROWS = 64
"""The same for columns."""
_MOST_KEPT = 256 << 10
"""Bytes of a thread's stack for values that later segments need again."""
_CHEAP = 3
"""What computing a value again may cost instead of keeping it."""


@dataclass(frozen=True)
class Function:
    """The text of the function's body; the (buffer, offset) of each pointer, and the numbers, that it is called with;
    how many positions the loop has that is divided, and what one of them costs, roughly."""

    text: str
    pointers: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]
    units: int
    cost: float


@dataclass
class _Segment:
    """Loops that run one after the other within the kept loops: `reduced` ones or, for columns, those along the block.

    `targets` are the statements for which it is there, `needed` all that it computes, `kept` what of that is written
    to arrays for later segments."""

    phase: int
    reduced: bool
    targets: list[int] = field(default_factory=list)
    needed: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)


class NestWriter:
    """Writes one nest. `early` has, for each store, the inputs whose memory it may be given. With `shared`, sizes and
    strides are taken as numbers at run time, so that nests that differ in nothing else share the text."""

    def __init__(
        self,
        simple: Simple,
        dtypes: Sequence[torch.dtype],
        schedule: Schedule,
        overwrites: dict[int, frozenset[int]],
        *,
        shared: bool = False,
        lines: bool = False,
    ) -> None:
        self.nest = simple.nest
        self.origin = simple.origin
        self.schedule = schedule
        self.shared = shared
        self.lines = lines
        self.buffers = dtypes
        self.overwrites = overwrites
        self.body = self.nest.body
        self.dtypes = self._dtypes()
        self.reduced = frozenset(schedule.reduced)
        self.row = math.prod(self.nest.dims[dim] for dim in schedule.reduced)
        self.varies = self._varies()
        self.phases = self._phases()
        self.segments = self._segments()
        self.pointers: dict[tuple[int, int], tuple[str, bool]] = {}
        self.numbers: dict[tuple[object, ...], tuple[str, int]] = {}
        self.out: list[str] = []

    # -- what is known of the values ------------------------------------------------------------------------------

    def _dtypes(self) -> list[torch.dtype]:
        found: list[torch.dtype] = []
        for statement in self.body:
            match statement:
                case Load(buffer) | Store(buffer):
                    found.append(self.buffers[buffer])
                case Constant(_, dtype) | Op(_, _, dtype):
                    found.append(dtype)
                case Position():
                    found.append(torch.int64)
                case Reduce(_, arg):
                    found.append(found[arg])
        return found

    def _varies(self) -> list[frozenset[int]]:
        """As in `Nest`; but results of reductions are arrays along a block of columns."""
        along_block = frozenset({self.schedule.vector} if self.schedule.columns else ())
        found: list[frozenset[int]] = []
        for number, statement in enumerate(self.body):
            own = self.nest.varies[number]
            for operand in operands(statement):
                own |= found[operand]
            if isinstance(statement, Reduce):
                own = (own - self.reduced) | along_block
            found.append(own)
        return found

    def _phases(self) -> list[int]:
        """How many reductions that depend on each other come before a value."""
        found: list[int] = []
        for statement in self.body:
            phase = max((found[operand] for operand in operands(statement)), default=0)
            found.append(phase + isinstance(statement, Reduce))
        return found

    def _is_scalar(self, number: int) -> bool:
        """Whether a value is computed outside all segments, once and for all."""
        along = self.varies[number]
        return not along & self.reduced and not (self.schedule.columns and self.schedule.vector in along)

    def _loaded_later(self, store: int, after: int) -> int:
        """The last segment beyond `after` that loads from what a store may overwrite, or -1."""
        target = self.body[store]
        assert isinstance(target, Store)
        inputs = self.overwrites.get(target.buffer, frozenset())
        last = -1
        for at in range(after + 1, len(self.segments)):
            for number in self.segments[at].needed:
                statement = self.body[number]
                if isinstance(statement, Load) and statement.buffer in inputs:
                    last = at
        return last

    def _segments(self) -> list[_Segment]:
        if not self.schedule.reduced:
            return []
        late: dict[int, int] = {}
        while True:
            self.segments = self._plan(late)
            for at, segment in enumerate(self.segments):
                for number in segment.targets:
                    if isinstance(self.body[number], Store):
                        if (to := self._loaded_later(number, at)) >= 0:
                            late[number] = self.segments[to].phase
            again = {number: phase for number, phase in late.items() if phase > self._segment_of(number).phase}
            if not again:
                return self.segments

    def _segment_of(self, target: int) -> _Segment:
        return next(segment for segment in self.segments if target in segment.targets)

    def _plan(self, late: dict[int, int]) -> list[_Segment]:
        found: dict[tuple[int, bool], _Segment] = {}
        for number, statement in enumerate(self.body):
            gathers = isinstance(statement, Load) and statement.gather >= 0
            if not isinstance(statement, (Reduce, Store)) and not gathers:
                continue
            along = self.varies[number]
            if isinstance(statement, Reduce):
                place = self.phases[number] - 1, True
            elif self._is_scalar(number):
                continue
            else:
                place = late.get(number, self.phases[number]), bool(along & self.reduced)
            found.setdefault(place, _Segment(*place)).targets.append(number)
        # A phase has the loops along the block before those that reduce.
        segments = [found[place] for place in sorted(found)]
        if self.schedule.columns:
            for phase in range(max((segment.phase for segment in segments), default=0) + 1):
                if (phase, False) not in found:
                    found[phase, False] = _Segment(phase, False)
            segments = [found[place] for place in sorted(found)]
        self.computed: dict[int, _Segment] = {}
        self.keeper: dict[int, _Segment] = {}
        self.kept_bytes = 0
        for at, segment in enumerate(segments):
            self._need(segment.targets, at, segments)
        return segments

    def _need(self, numbers: Iterable[int], at: int, segments: list[_Segment]) -> None:
        """Have values computed in segment `at`, with all that they take, or kept from earlier ones."""
        segment, pending = segments[at], set(numbers)
        for number in range(max(pending, default=-1), -1, -1):
            if number not in pending or number in segment.needed or number in self.keeper:
                continue
            statement = self.body[number]
            if number not in segment.targets and (isinstance(statement, Reduce) or self._is_scalar(number)):
                continue
            if self._costs[number] > _CHEAP and self._room_to_keep(number):
                before = self.computed.get(number)
                if before is None and not self.varies[number] & self.reduced:
                    # For columns: computed once along the block, not once in each row.
                    place = next(i for i, s in enumerate(segments) if not s.reduced and s.phase == self.phases[number])
                    if place < at:
                        self._need([number], place, segments)
                        before = segments[place]
                if before is not None and before is not segment:
                    before.kept.add(number)
                    self.keeper[number] = before
                    self.kept_bytes += self._bytes_to_keep(number)
                    continue
            segment.needed.add(number)
            self.computed.setdefault(number, segment)
            pending.update(operands(statement))

    def _room_to_keep(self, number: int) -> bool:
        along = self.varies[number]
        if isinstance(self.body[number], (Store, Reduce)) or self.schedule.vector not in along:
            return False
        if self.schedule.columns and along & self.reduced:
            return False
        return self.kept_bytes + self._bytes_to_keep(number) <= _MOST_KEPT

    def _bytes_to_keep(self, number: int) -> int:
        return self.dtypes[number].itemsize * (_BLOCK if self.schedule.columns else self.row)

    @cached_property
    def _costs(self) -> list[float]:
        """What computing each value again in another segment comes to."""
        found: list[float] = []
        for number, statement in enumerate(self.body):
            cost = sum(found[operand] for operand in operands(statement))
            match statement:
                case Load(_, index, gather):
                    vector = self.schedule.vector
                    cost += 8 if gather >= 0 or index.strides[vector] > 1 else 1
                case Op(name):
                    cost += expressions.COSTS.get(name, 1)
                case Reduce():
                    cost = 1
            found.append(0.0 if self._is_scalar(number) else float(min(cost, 1e6)))
        return found

    # -- words ---------------------------------------------------------------------------------------------------

    def _number(self, key: tuple[object, ...], value: int) -> str:
        """A size or a stride: as it is or, where the text is shared, the name of what the caller gives."""
        if not self.shared:
            return str(value)
        name, _ = self.numbers.setdefault(key, (f"n{len(self.numbers)}", value))
        return name

    def _size(self, dim: int) -> str:
        return self._number(("size", dim), self.nest.dims[dim])

    def _address(self, number: int, index: Index) -> str:
        terms = []
        for dim, stride in enumerate(index.strides):
            if stride == 1:
                terms.append(f"i{dim}")
            elif stride:
                terms.append(f"i{dim} * {self._number(('stride', number, dim), stride)}")
        return " + ".join(terms) or "0"

    def _pointer(self, buffer: int, offset: int, written: bool) -> str:
        name, _ = self.pointers.setdefault((buffer, offset), (f"p{len(self.pointers)}", written))
        return name

    def _name(self, number: int) -> str:
        match self.body[number]:
            case Constant() as constant:
                return expressions.literal(constant)
            case Position(dim):
                return f"i{dim}"
        return f"v{number}"

    def _of_block(self, dim: int) -> str:
        return f"i{dim} - b{dim}"

    def _row_position(self) -> str:
        """The position in a row that is kept whole."""
        text = ""
        for dim in self.schedule.reduced:
            text = f"({text}) * {self._size(dim)} + i{dim}" if text else f"i{dim}"
        return text

    def _array_position(self, number: int) -> str:
        return self._row_position() if self.varies[number] & self.reduced else self._of_block(self.schedule.vector)

    # -- statements ------------------------------------------------------------------------------------------------

    def _define(self, number: int, read_arrays: set[int]) -> list[str]:
        """The lines that define a value; from its array if it is among those."""
        statement, dtype = self.body[number], self.dtypes[number]
        head = f"const {TYPES[dtype]} v{number} = "
        if number in read_arrays:
            return [f"{head}k{number}[{self._array_position(number)}];"]
        note = self._note(number)
        match statement:
            case Load(buffer, index, gather, stride, size):
                where = self._address(number, index)
                pointer = self._pointer(buffer, index.offset, False)
                lines = []
                if gather >= 0:
                    picked = self._name(gather)
                    bound = self._number(("gathered", number), size)
                    step = self._number(("apart", number), stride)
                    lines.append(f"const bool in{number} = (uint64_t){picked} < (uint64_t){bound};")
                    lines.append(f"bad{number} |= !in{number};")
                    where = f"{where} + (in{number} ? {picked} : 0) * {step}"
                truth = " != 0" if dtype == torch.bool else ""
                return [*lines, f"{head}{pointer}[{where}]{truth};{note}"]
            case Op(name, args):
                words = [self._name(arg) for arg in args]
                text = expressions.operation(name, words, [self.dtypes[arg] for arg in args], dtype)
                return [f"{head}{text};{note}"]
            case Reduce():
                return [f"{head}r{number}[{self._of_block(self.schedule.vector)}];"]
        return []

    def _note(self, number: int) -> str:
        return f"  // {self.nest.lines[number]}" if self.lines and self.nest.lines else ""

    def _store(self, number: int) -> str:
        statement = self.body[number]
        assert isinstance(statement, Store)
        pointer = self._pointer(statement.buffer, statement.index.offset, True)
        return (
            f"{pointer}[{self._address(number, statement.index)}] = {self._name(statement.value)};{self._note(number)}"
        )

    def _levels(
        self, loops: Sequence[int], numbers: Iterable[int], read_arrays: set[int], kept: set[int]
    ) -> list[list[str]]:
        """What stands in each of the loops, from outside all of them to the innermost: loads and values, then what
        goes to arrays, then stores."""
        place = {dim: at + 1 for at, dim in enumerate(loops)}
        levels: list[list[str]] = [[] for _ in range(len(loops) + 1)]
        last: list[list[str]] = [[] for _ in levels]
        for number in sorted(numbers):
            level = max((place.get(dim, 0) for dim in self.varies[number]), default=0)
            if isinstance(self.body[number], Store):
                last[level].append(self._store(number))
                continue
            levels[level] += self._define(number, read_arrays)
            if number in kept:
                last[level].insert(0, f"k{number}[{self._array_position(number)}] = v{number};")
        return [lines + ends for lines, ends in zip(levels, last, strict=True)]

    def _clauses(self, lines: Sequence[str]) -> str:
        """Reductions of an innermost loop: whether a gather in it failed."""
        failed = [line.split(" ")[0] for line in lines if line.startswith("bad")]
        return "".join(f" reduction(|:{name})" for name in failed)

    def _loop(self, dim: int, start: str = "", end: str = "") -> str:
        if dim == self.schedule.split and not start:
            start, end = "begin", "end"
        return f"for (int64_t i{dim} = {start or '0'}; i{dim} < {end or self._size(dim)}; ++i{dim}) {{"

    # -- the three forms -----------------------------------------------------------------------------------------

    def write(self) -> Function:
        scalars = [number for number in range(len(self.body)) if self._is_scalar(number)]
        if not self.schedule.reduced:
            self._pointwise(scalars)
        elif self.schedule.columns:
            self._columns(scalars)
        else:
            self._rows(scalars)
        return self._function()

    def _pointwise(self, scalars: list[int]) -> None:
        loops = self.schedule.kept
        levels = self._levels(loops, scalars, set(), set())
        tiles = [dim for dim in loops if dim == self.schedule.tile or dim == self.schedule.vector]
        if self.schedule.tile < 0:
            tiles = []
        self.out += levels[0]
        if tiles:
            levels = self._tiled(loops, tiles, levels)
            loops = tuple(dim for dim in loops if dim not in tiles)
        for at, dim in enumerate(loops):
            if at == len(loops) - 1 and not tiles:
                self.out.append(f"#pragma omp simd{self._clauses(levels[at + 1])}")
            self.out += [self._loop(dim), *levels[at + 1]]
        if tiles:
            self._tiles(tiles, levels[-1])
        self.out += ["}"] * len(loops)

    def _tiled(self, loops: Sequence[int], tiles: Sequence[int], levels: list[list[str]]) -> list[list[str]]:
        """The levels where the tiled loops stand innermost."""
        outer = tuple(dim for dim in loops if dim not in tiles)
        scalars = range(len(self.body))
        inside = self._levels((*outer, *tiles), scalars, set(), set())
        self.out[:] = inside[0]
        self.tile_levels = inside[len(outer) + 1 :]
        return inside[: len(outer) + 1]

    def _tiles(self, tiles: Sequence[int], _: list[str]) -> None:
        for dim in tiles:
            split = dim == self.schedule.split
            start, end = ("begin", "end") if split else ("0", self._size(dim))
            self.out.append(f"for (int64_t b{dim} = {start}; b{dim} < {end}; b{dim} += {TILE}) {{")
            self.out.append(f"const int64_t e{dim} = b{dim} + {TILE} < {end} ? b{dim} + {TILE} : {end};")
        for at, dim in enumerate(tiles):
            if at == len(tiles) - 1:
                self.out.append(f"#pragma omp simd{self._clauses(self.tile_levels[at])}")
            self.out += [self._loop(dim, f"b{dim}", f"e{dim}"), *self.tile_levels[at]]
        self.out += ["}"] * (2 * len(tiles))

    def _array(self, name: str, number: int, size: int) -> str:
        return f"alignas(64) {memory_type(self.dtypes[number])} {name}{number}[{size}];"

    def _reduces(self, segment: _Segment) -> list[tuple[int, Reduce]]:
        return [(number, statement) for number in segment.targets if isinstance(statement := self.body[number], Reduce)]

    def _keeps_nan(self, number: int) -> bool:
        statement = self.body[number]
        return isinstance(statement, Reduce) and statement.name in ("max", "min") and self.dtypes[number] in FLOATS

    def _accumulator_type(self, number: int) -> str:
        return "int32_t" if self.dtypes[number] == torch.bool else TYPES[self.dtypes[number]]

    def _rows(self, scalars: list[int]) -> None:
        known: set[int] = set()
        for segment in self.segments:
            self.out += [self._array("k", number, self.row) for number in sorted(segment.kept)]
        levels = self._levels(self.schedule.kept, [n for n in scalars if self.phases[n] == 0], set(), set())
        self.out += levels[0]
        for at, dim in enumerate(self.schedule.kept):
            self.out += [self._loop(dim), *levels[at + 1]]
        last = max((self.phases[number] for number in scalars), default=0)
        last = max([last, *(segment.phase for segment in self.segments)])
        for phase in range(last + 1):
            if phase:
                here = [n for n in scalars if self.phases[n] == phase and not isinstance(self.body[n], Reduce)]
                for lines in self._levels((), here, set(), set()):
                    self.out += lines
            for segment in self.segments:
                if segment.phase == phase:
                    self._row(segment, known)
                    known |= segment.kept
        self.out += ["}"] * len(self.schedule.kept)

    def _row(self, segment: _Segment, arrays: set[int]) -> None:
        """One segment: loops over the reduced dims, and the reductions' results behind them."""
        reduces = self._reduces(segment)
        loops = self.schedule.reduced
        vector = self.schedule.vector
        readable = {n for n in arrays if n not in segment.needed}
        used = {o for n in segment.needed for o in operands(self.body[n])} & readable
        numbers = [n for n in segment.needed if not isinstance(self.body[n], Reduce)]
        levels = self._levels(loops, [*numbers, *used], used, segment.kept)
        long = len(loops) > 1 or self.nest.dims[vector] > 2 * _CHUNK
        clauses = self._clauses(levels[-1])
        totals: list[str] = []
        for number, reduce in reduces:
            kind, dtype = self._accumulator_type(number), self.dtypes[number]
            start = expressions.reduction_start(reduce.name, dtype)
            if dtype == torch.bool:
                start = str(int(start == "true"))
            self.out.append(f"{kind} r{number} = {start};")
            name = f"t{number}" if long else f"r{number}"
            clauses += f" reduction({expressions.REDUCTION_CLAUSE[reduce.name]}:{name})"
            value = self._name(reduce.arg)
            levels[-1].append(expressions.combine(reduce.name, name, value))
            if long:
                totals.append(f"{kind} t{number} = {start};")
            if self._keeps_nan(number):
                nan = "int64_t" if dtype == torch.float64 else "int32_t"
                self.out.append(f"{nan} nan{number} = 0;")
                clauses += f" reduction(|:nan{number})"
                levels[-1].append(f"nan{number} |= {value} != {value};")
        for at, dim in enumerate(loops[:-1]):
            self.out += [*levels[at], self._loop(dim)]
        self.out += levels[len(loops) - 1]
        if long:
            size = self._size(vector)
            self.out.append(f"for (int64_t b{vector} = 0; b{vector} < {size}; b{vector} += {_CHUNK}) {{")
            self.out.append(f"const int64_t e{vector} = b{vector} + {_CHUNK} < {size} ? b{vector} + {_CHUNK} : {size};")
            self.out += totals
        self.out.append(f"#pragma omp simd{clauses}")
        self.out.append(self._loop(vector, *((f"b{vector}", f"e{vector}") if long else ())))
        self.out += [*levels[-1], "}"]
        if long:
            self.out += [expressions.combine(reduce.name, f"r{n}", f"t{n}") for n, reduce in reduces]
            self.out.append("}")
        self.out += ["}"] * (len(loops) - 1)
        for number, _ in reduces:
            total = f"r{number}"
            if self._keeps_nan(number):
                suffix = "f" if self.dtypes[number] == torch.float32 else ""
                total = f'nan{number} ? __builtin_nan{suffix}("") : {total}'
            self.out.append(f"const {TYPES[self.dtypes[number]]} v{number} = {total};{self._note(number)}")

    def _columns(self, scalars: list[int]) -> None:
        vector = self.schedule.vector
        loops = self.schedule.kept[:-1]
        for segment in self.segments:
            self.out += [self._array("k", number, _BLOCK) for number in sorted(segment.kept)]
            for number, reduce in self._reduces(segment):
                self.out.append(f"alignas(64) {self._accumulator_type(number)} r{number}[{_BLOCK}];")
                if self._in_parts(reduce):
                    self.out.append(f"alignas(64) {self._accumulator_type(number)} t{number}[{_BLOCK}];")
        levels = self._levels(loops, scalars, set(), set())
        self.out += levels[0]
        for at, dim in enumerate(loops):
            self.out += [self._loop(dim), *levels[at + 1]]
        start, end = ("begin", "end") if self.schedule.split == vector else ("0", self._size(vector))
        self.out.append(f"for (int64_t b{vector} = {start}; b{vector} < {end}; b{vector} += {_BLOCK}) {{")
        self.out.append(f"const int64_t e{vector} = b{vector} + {_BLOCK} < {end} ? b{vector} + {_BLOCK} : {end};")
        arrays: set[int] = set()
        for segment in self.segments:
            if segment.reduced:
                self._column_rows(segment, arrays)
            elif segment.needed:
                self._block_loop(segment, arrays, ())
            arrays |= segment.kept
        self.out += ["}"] * (len(loops) + 1)

    def _in_parts(self, reduce: Reduce) -> bool:
        return reduce.name in ("sum", "prod") and self.nest.dims[self.schedule.reduced[-1]] > 2 * _ROWS

    def _vector_loop(self, lines: Sequence[str]) -> list[str]:
        vector = self.schedule.vector
        return [
            f"#pragma omp simd{self._clauses(lines)}",
            self._loop(vector, f"b{vector}", f"e{vector}"),
            *lines,
            "}",
        ]

    def _block_loop(self, segment: _Segment, arrays: set[int], extra: Sequence[str]) -> None:
        vector = self.schedule.vector
        used = self._used(segment, arrays)
        levels = self._levels((vector,), [*segment.needed, *used], used & arrays, segment.kept)
        self.out += [*levels[0], *self._vector_loop([*levels[1], *extra])]

    def _used(self, segment: _Segment, arrays: set[int]) -> set[int]:
        """What a segment reads from arrays: values kept by others, and earlier reductions."""
        wanted = {operand for number in segment.needed for operand in operands(self.body[number])} - segment.needed
        targets = {number for number in segment.targets if isinstance(self.body[number], Reduce)}
        return {n for n in wanted if n in arrays or isinstance(self.body[n], Reduce)} - targets

    def _column_rows(self, segment: _Segment, arrays: set[int]) -> None:
        """The reduced loops around the loop along the block."""
        vector, loops = self.schedule.vector, self.schedule.reduced
        reduces = self._reduces(segment)
        used = self._used(segment, arrays)
        numbers = [n for n in segment.needed if not isinstance(self.body[n], Reduce)]
        read = used & arrays
        levels = self._levels((*loops, vector), [*numbers, *used], read, segment.kept)
        parts = [number for number, reduce in reduces if self._in_parts(reduce)]
        place = self._of_block(vector)
        fill, part, join = [], [], []
        for number, reduce in reduces:
            dtype = self.dtypes[number]
            start = expressions.reduction_start(reduce.name, dtype)
            fill.append(f"r{number}[{place}] = {start};")
            name = "t" if number in parts else "r"
            levels[-1].append(
                expressions.combine_with_nan(reduce.name, dtype, f"{name}{number}[{place}]", self._name(reduce.arg))
            )
            if number in parts:
                part.append(f"t{number}[{place}] = {start};")
                join.append(expressions.combine(reduce.name, f"r{number}[{place}]", f"t{number}[{place}]"))
        if fill:
            self.out += self._vector_loop(fill)
        dim = loops[-1]
        for at, outer in enumerate(loops[:-1]):
            self.out += [*levels[at], self._loop(outer)]
        self.out += levels[len(loops) - 1]
        if parts:
            size = self._size(dim)
            self.out.append(f"for (int64_t b{dim} = 0; b{dim} < {size}; b{dim} += {_ROWS}) {{")
            self.out.append(f"const int64_t e{dim} = b{dim} + {_ROWS} < {size} ? b{dim} + {_ROWS} : {size};")
            self.out += self._vector_loop(part)
        self.out.append(self._loop(dim, *((f"b{dim}", f"e{dim}") if parts else ())))
        self.out += [*levels[len(loops)], *self._vector_loop(levels[-1]), "}"]
        if parts:
            self.out += [*self._vector_loop(join), "}"]
        self.out += ["}"] * (len(loops) - 1)

    # -- the function ----------------------------------------------------------------------------------------------

    def _function(self) -> Function:
        head = []
        for (buffer, _), (name, written) in self.pointers.items():
            kind = memory_type(self.buffers[buffer])
            kind = kind if written else f"const {kind}"
            head.append(f"{kind}* const {name} = ({kind}*)p[{name[1:]}];")
        for at in range(len(self.numbers)):
            head.append(f"const int64_t n{at} = n[{at}];")
        gathers = [n for n, s in enumerate(self.body) if isinstance(s, Load) and s.gather >= 0]
        head += [f"int64_t bad{number} = 0;" for number in gathers]
        tail = [f"if (bad{number}) return {self.origin[number] + 1};" for number in gathers]
        split = self.schedule.split
        units = self.nest.dims[split] if split >= 0 else 1
        work = float(len(self.body))
        for size in self.nest.dims:
            work *= size
        return Function(
            "\n".join(_indented([*head, *self.out, *tail, "return 0;"])) + "\n",
            tuple(self.pointers),
            tuple(value for _, value in self.numbers.values()),
            units,
            work / units,
        )


def _indented(lines: Sequence[str]) -> list[str]:
    depth, out = 1, []
    for line in lines:
        if line == "}":
            depth -= 1
        out.append(line if line.startswith("#") else "    " * depth + line)
        if line.endswith("{"):
            depth += 1
    return out
