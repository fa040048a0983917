"""A nest as a C++ function that runs a range of one of its kept loops.

Values are computed at the outermost loop along whose dims they vary. All loads of a loop's body stand before its
stores.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from monarch.compiler.kernels.cpp import expressions
from monarch.compiler.kernels.cpp.expressions import TYPES, memory_type
from monarch.compiler.kernels.cpp.schedule import TILE
from monarch.compiler.kernels.cpp.segments import BLOCK, Segment, Segments
from monarch.compiler.kernels.cpp.statements import StatementWriter
from monarch.compiler.loops.ir import Load, Reduce, Store
from monarch.compiler.loops.nests import operands
from monarch.compiler.loops.signatures import FLOATS

_CHUNK = 2048
"""Elements of a row that one lane of accumulators sums up; their sums are summed in turn, which keeps errors small."""
_ROWS = 64
"""The same for columns."""


@dataclass(frozen=True)
class Function:
    """The text of the function's body; the (buffer, offset) of each pointer, and the numbers, that it is called with;
    how many positions the loop has that is divided, and what one of them costs, roughly."""

    text: str
    pointers: tuple[tuple[int, int], ...]
    numbers: tuple[int, ...]
    units: int
    cost: float


class NestWriter(StatementWriter):
    """Writes one nest, in the form that its schedule has."""

    def __init__(self, values: Segments, *, shared: bool = False, constants: bool = False, lines: bool = False) -> None:
        super().__init__(values, shared=shared, constants=constants, lines=lines)
        self.out: list[str] = []

    def write(self) -> Function:
        scalars = [number for number in range(len(self.body)) if self.values.is_scalar(number)]
        if not self.schedule.reduced:
            self._pointwise(scalars)
        elif self.schedule.columns:
            self._columns(scalars)
        else:
            self._rows(scalars)
        return self._function()

    def _pointwise(self, scalars: list[int]) -> None:
        loops = self.schedule.kept
        tiled = loops[-2:] if self.schedule.tile >= 0 else ()
        self.out += [self._array("s", number, TILE * (TILE + 1)) for number in sorted(self.values.staged)]
        levels = self._levels(loops, scalars, set(), set())
        self.out += levels[0]
        alone = all(store.index.strides[self.schedule.vector] for store in self.nest.sums)
        for at, dim in enumerate(loops):
            self._clear(at)
            if tiled and dim == tiled[0]:
                for each in tiled:
                    self.out += self._blocks(each, TILE)
                self._stage(*tiled)
            if at == len(loops) - 1 and alone:
                self.out.append(f"#pragma omp simd{self._clauses(levels[at + 1])}")
            self.out += [self._loop(dim, in_block=dim in tiled), *levels[at + 1]]
        self.out += ["}"] * (len(loops) + len(tiled))

    def _stage(self, outer: int, vector: int) -> None:
        """Copy what vectors would read at a stride, a tile at a time, to where that takes no more than the L1 cache."""
        for number in sorted(self.values.staged):
            load = self.body[number]
            assert isinstance(load, Load)
            self.out += [
                self._loop(vector, in_block=True),
                "#pragma omp simd",
                self._loop(outer, in_block=True),
                f"s{number}[{self._tile_position()}] = "
                f"{self._pointer(load.buffer, load.index.offset, False)}[{self._address(number, load.index)}];",
                "}",
                "}",
            ]

    def _clear(self, level: int) -> None:
        """Before the kept loop at `level`: sums start from 0 where threads share the loop outside of it out, or before
        all loops."""
        split = self.schedule.split
        if level != int(split >= 0):
            return
        for number, statement in enumerate(self.body):
            if isinstance(statement, Store) and statement.sums:
                index = statement.index
                along = [dim for dim, stride in enumerate(index.strides) if stride and dim != split]
                self.out += [self._loop(dim) for dim in along]
                pointer = self._pointer(statement.buffer, index.offset, True)
                self.out += [f"{pointer}[{self._address(number, index)}] = 0;", *["}"] * len(along)]

    def _array(self, name: str, number: int, size: int) -> str:
        return f"alignas(64) {memory_type(self.dtypes[number])} {name}{number}[{size}];"

    def _reduces(self, segment: Segment) -> list[tuple[int, Reduce]]:
        return [(number, statement) for number in segment.targets if isinstance(statement := self.body[number], Reduce)]

    def _keeps_nan(self, number: int) -> bool:
        statement = self.body[number]
        return isinstance(statement, Reduce) and statement.name in ("max", "min") and self.dtypes[number] in FLOATS

    def _accumulator_type(self, number: int) -> str:
        return "int32_t" if self.dtypes[number] == torch.bool else TYPES[self.dtypes[number]]

    def _rows(self, scalars: list[int]) -> None:
        known: set[int] = set()
        for segment in self.values.segments:
            # Rows of other lengths share the text.
            room = 1 << (self.values.row - 1).bit_length() if self.shared else self.values.row
            self.out += [self._array("k", number, room) for number in sorted(segment.kept)]
        levels = self._levels(self.schedule.kept, [n for n in scalars if self.values.phases[n] == 0], set(), set())
        self.out += levels[0]
        for at, dim in enumerate(self.schedule.kept):
            self._clear(at)
            self.out += [self._loop(dim), *levels[at + 1]]
        last = max((self.values.phases[number] for number in scalars), default=0)
        last = max([last, *(segment.phase for segment in self.values.segments)])
        for phase in range(last + 1):
            if phase:
                here = [n for n in scalars if self.values.phases[n] == phase and not isinstance(self.body[n], Reduce)]
                for lines in self._levels((), here, set(), set()):
                    self.out += lines
            for segment in self.values.segments:
                if segment.phase == phase:
                    self._row(segment, known)
                    known |= segment.kept
        self.out += ["}"] * len(self.schedule.kept)

    def _row(self, segment: Segment, arrays: set[int]) -> None:
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
            self.out += [*self._blocks(vector, _CHUNK), *totals]
        self.out.append(f"#pragma omp simd{clauses}")
        self.out.append(self._loop(vector, in_block=long))
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
        for segment in self.values.segments:
            self.out += [self._array("k", number, BLOCK) for number in sorted(segment.kept)]
            for number, reduce in self._reduces(segment):
                self.out.append(f"alignas(64) {self._accumulator_type(number)} r{number}[{BLOCK}];")
                if self._in_parts(reduce):
                    self.out.append(f"alignas(64) {self._accumulator_type(number)} t{number}[{BLOCK}];")
        levels = self._levels(loops, scalars, set(), set())
        self.out += levels[0]
        for at, dim in enumerate(loops):
            self.out += [self._loop(dim), *levels[at + 1]]
        self.out += self._blocks(vector, BLOCK)
        arrays: set[int] = set()
        for segment in self.values.segments:
            if segment.reduced:
                self._column_rows(segment, arrays)
            elif segment.needed:
                self._block_loop(segment, arrays)
            arrays |= segment.kept
        self.out += ["}"] * (len(loops) + 1)

    def _in_parts(self, reduce: Reduce) -> bool:
        return reduce.name in ("sum", "prod") and self.nest.dims[self.schedule.reduced[-1]] > 2 * _ROWS

    def _vector_loop(self, lines: Sequence[str]) -> list[str]:
        vector = self.schedule.vector
        return [
            f"#pragma omp simd{self._clauses(lines)}",
            self._loop(vector, in_block=True),
            *lines,
            "}",
        ]

    def _block_loop(self, segment: Segment, arrays: set[int]) -> None:
        vector = self.schedule.vector
        used = self._used(segment, arrays)
        levels = self._levels((vector,), [*segment.needed, *used], used & arrays, segment.kept)
        self.out += [*levels[0], *self._vector_loop(levels[1])]

    def _used(self, segment: Segment, arrays: set[int]) -> set[int]:
        """The values that a segment reads from arrays: values kept by others, and earlier reductions."""
        wanted = {operand for number in segment.needed for operand in operands(self.body[number])} - segment.needed
        targets = {number for number in segment.targets if isinstance(self.body[number], Reduce)}
        return {n for n in wanted if n in arrays or isinstance(self.body[n], Reduce)} - targets

    def _column_rows(self, segment: Segment, arrays: set[int]) -> None:
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
            self.out += [*self._blocks(dim, _ROWS), *self._vector_loop(part)]
        self.out.append(self._loop(dim, in_block=bool(parts)))
        self.out += [*levels[len(loops)], *self._vector_loop(levels[-1]), "}"]
        if parts:
            self.out += [*self._vector_loop(join), "}"]
        self.out += ["}"] * (len(loops) - 1)

    # -- the function ----------------------------------------------------------------------------------------------

    def _function(self) -> Function:
        head = []
        for (buffer, _), (name, written) in self.pointers.items():
            kind = memory_type(self.values.buffers[buffer])
            kind = kind if written else f"const {kind}"
            head.append(f"{kind}* const {name} = ({kind}*)p[{name[1:]}];")
        for at in range(len(self.numbers)):
            head.append(f"const int64_t n{at} = n[{at}];")
        gathers = [n for n, s in enumerate(self.body) if isinstance(s, Load) and s.gather >= 0]
        head += [f"int64_t bad{number} = 0;" for number in gathers]
        tail = [f"if (bad{number}) return {self.values.origin[number] + 1};" for number in gathers]
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
