"""The statements of a nest in C++: names, addresses, and in which of the loops each of them stands."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from monarch.compiler.kernels.cpp import expressions
from monarch.compiler.kernels.cpp.expressions import TYPES
from monarch.compiler.kernels.cpp.ranges import exponentials
from monarch.compiler.kernels.cpp.schedule import TILE
from monarch.compiler.kernels.cpp.segments import Segments
from monarch.compiler.loops.ir import Constant, Index, Load, Op, Position, Reduce, Store
from monarch.compiler.loops.signatures import FLOATS

_PLAIN = frozenset((-2, -1, -0.5, 0, 0.5, 1, 2))
"""Constants that are better known when a nest is compiled, and hardly follow from sizes."""


class StatementWriter:
    """Words and lines for the values of a nest. With `shared`, sizes and strides are numbers that the caller gives, so
    that nests that differ in nothing else have the same text; with `constants`, so are constants, of which some follow
    from sizes, as a mean's count does. With `lines`, the user's lines are comments."""

    def __init__(self, values: Segments, *, shared: bool, constants: bool, lines: bool) -> None:
        self.values = values
        self.nest = values.nest
        self.schedule = values.schedule
        self.body = values.body
        self.dtypes = values.dtypes
        self.varies = values.varies
        self.shared = shared
        self.constants = constants
        self.lines = lines
        self.exponentials = exponentials(values.body, values.dtypes)
        self.pointers: dict[tuple[int, int], tuple[str, bool]] = {}
        self.numbers: dict[tuple[object, ...], tuple[str, int]] = {}

    def _number(self, key: tuple[object, ...], value: int) -> str:
        """A size or a stride: as it is or, where the text is shared, the name of the caller's argument."""
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
            case Constant(value, dtype) as constant:
                if self.constants and dtype != torch.bool and math.isfinite(value) and value not in _PLAIN:
                    name = self._number(("constant", number), expressions.bits(constant))
                    return f"({TYPES[dtype]}){f'number_({name})' if dtype in FLOATS else name}"
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
        return (
            self._row_position() if self.varies[number] & self.values.reduced else self._of_block(self.schedule.vector)
        )

    def _tile_position(self) -> str:
        """The position in a tile, whose rows are one longer than they need be: so columns do not share cache sets."""
        tile, vector = self.schedule.tile, self.schedule.vector
        return f"(i{tile} - b{tile}) * {TILE + 1} + i{vector} - b{vector}"

    # -- statements ------------------------------------------------------------------------------------------------

    def _define(self, number: int, read_arrays: set[int]) -> list[str]:
        """The lines that define a value; from its array if it is among those."""
        statement, dtype = self.body[number], self.dtypes[number]
        head = f"const {TYPES[dtype]} v{number} = "
        if number in read_arrays:
            return [f"{head}k{number}[{self._array_position(number)}];"]
        if number in self.values.staged:
            truth = " != 0" if dtype == torch.bool else ""
            return [f"{head}s{number}[{self._tile_position()}]{truth};"]
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
                if number in self.exponentials:
                    return [f"{head}{self.exponentials[number]}({words[0]});{note}"]
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
        where, value = self._address(number, statement.index), self._name(statement.value)
        return f"{pointer}[{where}] {'+=' if statement.sums else '='} {value};{self._note(number)}"

    def _levels(
        self, loops: Sequence[int], numbers: Iterable[int], read_arrays: set[int], kept: set[int]
    ) -> list[list[str]]:
        """The statements of each loop, from outside all of them to the innermost: loads and values, then stores to
        arrays, then stores."""
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

    def _range(self, dim: int) -> tuple[str, str]:
        return ("begin", "end") if dim == self.schedule.split else ("0", self._size(dim))

    def _loop(self, dim: int, *, in_block: bool = False) -> str:
        """The head of the loop over a dim, or over the part of it that a loop of `_blocks` gives."""
        start, end = (f"b{dim}", f"e{dim}") if in_block else self._range(dim)
        return f"for (int64_t i{dim} = {start}; i{dim} < {end}; ++i{dim}) {{"

    def _blocks(self, dim: int, step: int) -> list[str]:
        start, end = self._range(dim)
        return [
            f"for (int64_t b{dim} = {start}; b{dim} < {end}; b{dim} += {step}) {{",
            f"const int64_t e{dim} = b{dim} + {step} < {end} ? b{dim} + {step} : {end};",
        ]
