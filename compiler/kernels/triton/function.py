"""The text of one Triton function: a program of a nest's schedule.

Statements go into the innermost scope that they need: those that vary along r into the loop over r, where there is one,
and all others before it. Each value is computed once in a scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from monarch.compiler.kernels.triton.loops import levels
from monarch.compiler.kernels.triton.operations import (
    INFIX,
    TYPES,
    accumulate,
    full,
    identity,
    literal,
    operation,
    reduce_tile,
    reduction_dtype,
)
from monarch.compiler.kernels.triton.schedule import Axis, Schedule, ceiling
from monarch.compiler.kernels.triton.source import ERROR
from monarch.compiler.loops.ir import Constant, Index, Load, Nest, Op, Position, Reduce, Store
from monarch.compiler.loops.nests import live, operands
from monarch.compiler.loops.signatures import BOOL, FLOATS

Shape = tuple[bool, ...]
"""Along which dims of the tile a value extends: it has size 1 along the others. () for a scalar."""

_INDENT = "    "


@dataclass
class _Scope:
    lines: list[str] = field(default_factory=list)
    known: dict[object, str] = field(default_factory=dict)


class Function:
    """Writes the body of one function. `names` are the pointers of the nest's buffers, `partials` those of the scratch
    of reductions that are split; `note` gives a statement's comment, `gather_number` what the error word gets, `other`
    what a load gives where there is nothing, which is left open without it."""

    def __init__(
        self,
        nest: Nest,
        dtypes: Sequence[torch.dtype | None],
        schedule: Schedule,
        names: Mapping[int, str],
        *,
        wide: bool,
        note: Callable[[int], str],
        gather_number: Mapping[int, int],
        partials: Mapping[int, str],
        other: str = "",
    ) -> None:
        self.nest, self.dtypes, self.schedule, self.names = nest, dtypes, schedule, names
        self.wide, self.note, self.gather_number, self.partials = wide, note, gather_number, partials
        self.other = f", other={other}" if other else ""
        self.alive, self.levels = live(nest.body), levels(nest)
        self.tile = tuple(axis for axis in schedule.axes if axis.block > 1)
        self.of_dim = {dim: axis for axis in schedule.axes for dim in axis.dims}
        self.scopes = [_Scope()]
        self.shapes: dict[int, Shape] = {}
        self.masks: dict[str, str] = {}
        self.used: dict[str, None] = {}
        self.combiners: dict[str, None] = {}
        self.constants: dict[str, int] = {f"{axis.name.upper()}BLOCK": axis.block for axis in self.tile}
        self.counts: dict[str, int] = {}
        self.split = self.base = ""

    # Text ------------------------------------------------------------------------------------------------------------

    @property
    def lines(self) -> list[str]:
        return self.scopes[0].lines

    def write(self, text: str, note: str = "", *, inner: bool = False) -> None:
        scope = self.scopes[-1 if inner else 0]
        scope.lines.append(f"{text}  # {note}" if note else text)

    def known(self, key: object) -> str | None:
        return next((scope.known[key] for scope in reversed(self.scopes) if key in scope.known), None)

    def define(self, key: object, name: str, text: str, note: str = "", *, inner: bool = False) -> str:
        self.write(f"{name} = {text}", note, inner=inner)
        self.scopes[-1 if inner else 0].known[key] = name
        return name

    @contextmanager
    def loop(self, header: str) -> Iterator[None]:
        inner = _Scope()
        self.scopes.append(inner)
        yield
        self.scopes.pop()
        self.lines.append(header)
        self.lines.extend(_INDENT + line for line in inner.lines)

    @contextmanager
    def loop_over_r(self) -> Iterator[None]:
        """A loop over r or, in a program of a split, over its slice of it."""
        r, each = self.schedule.axes[self.schedule.r], self.schedule.slice
        start, stop = ("0", self.length(r))
        if self.split:
            start, stop = f"split * {each}", f"split * {each} + {each}"
        with self.loop(f"for start_r in range({start}, {stop}, RBLOCK):"):
            self.begin_r("start_r")
            yield

    def pointer(self, name: str) -> str:
        self.used[name] = None
        return name

    # Shapes ----------------------------------------------------------------------------------------------------------

    @property
    def looped(self) -> bool:
        return self.schedule.r >= 0 and not self.schedule.persistent

    def shape(self, axes: Iterable[Axis]) -> Shape:
        """The shape of a value that varies along some axes."""
        names = {axis.name for axis in axes}
        along = tuple(axis.name in names for axis in self.tile)
        return along if any(along) else ()

    def joined(self, *shapes: Shape) -> Shape:
        full_rank = [shape for shape in shapes if shape]
        return tuple(map(any, zip(*full_rank, strict=True)))

    def block(self, shape: Shape) -> str:
        sizes = (f"{axis.name.upper()}BLOCK" if on else "1" for axis, on in zip(self.tile, shape, strict=True))
        return f"[{', '.join(sizes)}]"

    def suffix(self, name: str) -> str:
        """The index that turns a vector into one along an axis of the tile."""
        if len(self.tile) < 2:
            return ""
        return f"[{', '.join(':' if axis.name == name else 'None' for axis in self.tile)}]"

    def axes_of(self, index: Index) -> list[Axis]:
        return [
            axis
            for axis in self.schedule.axes
            if any(index.strides[dim] and self.nest.dims[dim] > 1 for dim in axis.dims)
        ]

    def inner(self, axes: Iterable[Axis]) -> bool:
        return len(self.scopes) > 1 and any(axis.name == "r" for axis in axes)

    # Programs, axes and coordinates ----------------------------------------------------------------------------------

    def begin(self, splits: int, start: str = "") -> None:
        """The place of this program: its block along each kept axis and, of `splits`, its split."""
        program = f"tl.program_id(0){'.to(tl.int64)' if self.wide else ''}{f' - {start}' if start else ''}"
        factors = [(axis.name, axis.blocks) for axis in reversed(self.schedule.kept) if axis.runtime or axis.blocks > 1]
        factors += [("split", splits)] if splits > 1 else []
        at: dict[str, str] = {}
        if factors:
            self.write(f"program = {program}")
        done = 1
        for number, (name, count) in enumerate(factors):
            text = "program" if done == 1 else f"program // {done}"
            at[name] = text if number == len(factors) - 1 else f"{text} % {count}"
            done *= count
        for axis in self.schedule.kept:
            self._begin_axis(axis, at.get(axis.name))
        if splits > 1:
            self.split = self.define("split", "split", at["split"])

    def _begin_axis(self, axis: Axis, block: str | None) -> None:
        name = axis.name
        if axis.block == 1:
            self.define(name, name, block or "0")
            return
        lanes = self.lanes(name, f"{name.upper()}BLOCK")
        if block is None:
            self.define(name, name, lanes)
        else:
            block = block if block == "program" else self.define(f"{name}_block", f"{name}_block", block)
            self.scopes[0].known[f"{name}_block"] = block
            self.define(name, name, f"{block} * {name.upper()}BLOCK + {lanes}")
        if axis.runtime or axis.size % axis.block:
            self.masks[name] = self.define(f"{name}_in", f"{name}_in", f"{name} < {self.length(axis)}")

    def lanes(self, name: str, block: str) -> str:
        return f"tl.arange(0, {block}){self.suffix(name)}{'.to(tl.int64)' if self.wide else ''}"

    def length(self, axis: Axis) -> str:
        return "n" if axis.runtime else str(axis.size)

    def begin_r(self, start: str = "") -> None:
        """r in this scope, from `start`."""
        axis = self.schedule.axes[self.schedule.r]
        lanes = self.lanes("r", "RBLOCK")
        self.define("r", "r", f"{start} + {lanes}" if start else lanes, inner=True)
        covered = self.schedule.slice * self.schedule.splits if self.looped else axis.block
        if axis.runtime or covered != axis.size or axis.size % axis.block:
            self.masks["r"] = self.define("r_in", "r_in", f"r < {self.length(axis)}", inner=True)

    def coordinate(self, axis: Axis, first: int, last: int) -> str:
        """The position along the joined dims `first` to `last` of an axis, as a variable."""
        inside, whole = 1, 1
        for size in axis.sizes[last + 1 :]:
            inside *= size
        for size in axis.sizes[first : last + 1]:
            whole *= size
        text = axis.name if inside == 1 else f"{axis.name} // {inside}"
        if first:
            text = f"{text} % {whole}"
        if text == axis.name:
            return text
        found = self.known(text)
        if found is not None:
            return found
        number = self.counts.get(axis.name, 0)
        self.counts[axis.name] = number + 1
        return self.define(text, f"{axis.name}{number}", text, inner=self.inner([axis]))

    def address(self, index: Index) -> str:
        terms = []
        for axis in self.schedule.axes:
            at = len(axis.dims) - 1
            while at >= 0:
                stride = index.strides[axis.dims[at]]
                first = at
                reach = stride * axis.sizes[at]
                while stride and first and index.strides[axis.dims[first - 1]] == reach:
                    first -= 1
                    reach *= axis.sizes[first]
                if stride:
                    where = self.coordinate(axis, first, at)
                    terms.append(where if stride == 1 else f"{where} * {stride}")
                at = first - 1
        if index.offset:
            terms.append(str(index.offset))
        return " + ".join(terms)

    def mask(self, axes: Iterable[Axis], *more: str) -> str:
        """The condition that the elements along some axes exist, and more; "" for none."""
        terms = [self.masks[axis.name] for axis in axes if axis.name in self.masks]
        terms.extend(text for text in more if text)
        return " & ".join(terms)

    # Values ----------------------------------------------------------------------------------------------------------

    def needed(self, targets: Iterable[int]) -> list[int]:
        """The values that have still to be computed for `targets`, in order. A reduction is computed already, or not
        needed yet."""
        found: set[int] = set()
        left = list(targets)
        while left:
            number = left.pop()
            if number in found or self.known(number) is not None:
                continue
            found.add(number)
            if not isinstance(self.nest.body[number], Reduce) or not self.nest.reduced:
                left.extend(operands(self.nest.body[number]))
        return sorted(found)

    def compute(self, targets: Iterable[int]) -> None:
        for number in self.needed(targets):
            self.value(number)

    def varies_along_r(self, number: int) -> bool:
        return any(dim >= len(self.nest.kept) for dim in self.nest.varies[number])

    def value(self, number: int) -> None:
        statement = self.nest.body[number]
        inner = len(self.scopes) > 1 and self.varies_along_r(number)
        match statement:
            case Load():
                self.shapes[number] = self.load(number, statement, inner)
                return
            case Constant():
                self.shapes[number] = ()
                return  # stands where it is used
            case Position(dim):
                axis = self.of_dim[dim]
                place = axis.dims.index(dim)
                self.shapes[number] = self.shape([axis])
                where = self.coordinate(axis, place, place)
                text = f"{where}.to(tl.int64)"
            case Op(name, args, to):
                self.shapes[number] = self.joined(*(self.shapes[arg] for arg in args))
                of = self.dtypes[args[-1]]
                assert of is not None
                text = operation(name, self.arguments(name, args), of, to)
            case Reduce(_, arg):  # over nothing
                self.shapes[number] = self.shapes[arg]
                text = self.variable(arg)
            case _:
                raise AssertionError(f"{statement} has no value")
        if text.isidentifier():  # a cast to the dtype that it has
            self.scopes[-1 if inner else 0].known[number] = text
        else:
            self.define(number, f"v{number}", text, self.note(number), inner=inner)

    def arguments(self, name: str, args: Sequence[int]) -> list[str]:
        """An op's operands: variables, and literals where those are as good."""
        constants = [self.nest.body[arg] for arg in args]
        infix = name in INFIX and not all(isinstance(each, Constant) for each in constants)
        texts = []
        for arg, constant in zip(args, constants, strict=True):
            text = literal(constant) if infix and isinstance(constant, Constant) else None
            texts.append(self.variable(arg) if text is None else text)
        return texts

    def variable(self, number: int) -> str:
        """The variable that holds a value, which has been computed."""
        statement = self.nest.body[number]
        found = self.known(number)
        if found is None:
            assert isinstance(statement, Constant), f"%{number} is used before it is there"
            found = self.define(number, f"c{number}", full(statement))
        return found

    def load(self, number: int, load: Load, inner: bool) -> Shape:
        axes = self.axes_of(load.index)
        shape = self.shape(axes)
        address = self.address(load.index)
        pointer = self.pointer(self.names[load.buffer])
        inside = ""
        moving = axes
        if load.gather >= 0:
            picked = self.variable(load.gather)
            along = self.nest.varies[load.gather]
            axes = [axis for axis in self.schedule.axes if axis in axes or any(dim in along for dim in axis.dims)]
            shape = self.joined(shape, self.shapes[load.gather])
            inside = self.define(
                ("inside", number), f"v{number}_in", f"({picked} >= 0) & ({picked} < {load.size})", inner=inner
            )
            self.report(number, inside, axes, shape, inner)
            moving = axes if load.stride else moving
            step = picked if self.wide else f"{picked}.to(tl.int32)"
            if load.stride:
                gathered = step if load.stride == 1 else f"{step} * {load.stride}"
                address = f"{address} + {gathered}" if address else gathered
        where = at(pointer, address)
        mask = self.mask(moving, inside if load.stride else "")
        text = f"tl.load({where}{f', mask={mask}{self.other}' if mask else ''})"
        self.define(number, f"v{number}", text, self.note(number), inner=inner)
        return shape

    def report(self, number: int, inside: str, axes: Sequence[Axis], shape: Shape, inner: bool) -> None:
        """Leave the number of a gather in the error word where an index is out of range."""
        word = self.pointer(ERROR)
        if shape:
            word = f"{word} + tl.zeros({self.block(shape)}, tl.int32)"
        outside = self.mask(axes, f"~{inside}")
        code = self.gather_number[number]
        self.write(f'tl.atomic_max({word}, {code}, mask={outside}, sem="relaxed")', inner=inner)

    # Reductions ------------------------------------------------------------------------------------------------------

    def reductions(self, level: int) -> list[int]:
        """The live reductions that wait for `level` others."""
        return [
            number
            for number, statement in enumerate(self.nest.body)
            if number in self.alive and isinstance(statement, Reduce) and self.levels[number] == level + 1
        ]

    def reduce_level(self, level: int) -> None:
        """All reductions of a level, each to a value or, where r is split, to a partial result in scratch."""
        over_r = []
        for number in self.reductions(level):
            if not self.direct(number):
                over_r.append(number)
            elif not self.partials:
                self.compute([self.argument(number)])
                self.reduce_direct(number)
        if not over_r:
            return
        if not self.looped:
            self.compute(self.argument(number) for number in over_r)
            for number in over_r:
                self.finish(number, self.masked(number, self.widened(number)))
            return
        sums = {number: f"s{number}_" for number in over_r}
        for number, name in sums.items():
            of = self.reduced_dtype(number)
            unit = identity(self.reduce(number).name, of)
            self.define(
                ("sum", number), name, f"tl.full({self.block(self.reduced_shape(number))}, {unit}, {TYPES[of]})"
            )
        with self.loop_over_r():
            self.compute(self.argument(number) for number in over_r)
            for number, name in sums.items():
                reduce = self.reduce(number)
                taken = self.masked(number, self.widened(number))
                text = accumulate(reduce.name, self.reduced_dtype(number), name, taken)
                self.write(f"{name} = {text}", self.note(number), inner=True)
        for number, name in sums.items():
            self.finish(number, name)

    def reduce(self, number: int) -> Reduce:
        statement = self.nest.body[number]
        assert isinstance(statement, Reduce)
        return statement

    def argument(self, number: int) -> int:
        return self.reduce(number).arg

    def reduced_dtype(self, number: int) -> torch.dtype:
        dtype = self.dtypes[number]
        assert dtype is not None
        return reduction_dtype(dtype)

    def direct(self, number: int) -> bool:
        """Whether a reduction is of one value r times, and that has a formula."""
        return not self.varies_along_r(self.argument(number)) and self.reduce(number).name != "prod"

    def reduce_direct(self, number: int) -> None:
        reduce = self.reduce(number)
        text = self.variable(reduce.arg)
        if reduce.name == "sum":
            length = self.schedule.axes[self.schedule.r].size
            text = f"{text} * {float(length) if self.dtypes[number] in FLOATS else length}"
        self.shapes[number] = self.shapes[reduce.arg]
        self.define(number, f"v{number}", text, self.note(number))

    def reduced_shape(self, number: int) -> Shape:
        """The shape of a reduction's operand: with r, also where it does not vary along it."""
        r = self.schedule.axes[self.schedule.r]
        dims = self.nest.varies[self.argument(number)]
        return self.shape([r, *(axis for axis in self.schedule.axes if any(dim in dims for dim in axis.dims))])

    def widened(self, number: int) -> str:
        """A reduction's operand as its accumulator holds it."""
        text = self.variable(self.argument(number))
        return f"{text}.to(tl.int32)" if self.dtypes[number] == BOOL else text

    def masked(self, number: int, value: str) -> str:
        reduce = self.reduce(number)
        mask = self.masks.get("r", "")
        if not self.varies_along_r(reduce.arg):
            mask = mask or "r >= 0"  # to have its shape
        return f"tl.where({mask}, {value}, {identity(reduce.name, self.reduced_dtype(number))})" if mask else value

    def finish(self, number: int, tile: str) -> None:
        """Reduce a tile along r, and keep the result or, where r is split, leave it as this program's part."""
        shape = self.reduced_shape(number)
        text = self.reduced_text(number, tile)
        self.shapes[number] = self.without_r(shape)
        if number not in self.partials:
            self.define(number, f"v{number}", self.narrowed(number, text), self.note(number))
            return
        self.define(("part", number), f"v{number}_part", text, self.note(number))
        pointer, mask = self.partial_pointer(number, self.split), self.mask(self.schedule.kept)
        self.write(f"tl.store({pointer}, v{number}_part{f', mask={mask}' if mask else ''})")

    def without_r(self, shape: Shape) -> Shape:
        kept = tuple(on and axis.name != "r" for axis, on in zip(self.tile, shape, strict=True))
        return kept if len(self.tile) > 1 else ()

    def reduced_text(self, number: int, tile: str) -> str:
        place = next(at for at, axis in enumerate(self.tile) if axis.name == "r")
        text, combiner = reduce_tile(
            self.reduce(number).name, self.reduced_dtype(number), tile, place, len(self.tile) > 1
        )
        if combiner:
            self.combiners[combiner] = None
        return text

    def narrowed(self, number: int, text: str) -> str:
        return f"{text} != 0" if self.dtypes[number] == BOOL else text

    def partial_pointer(self, number: int, split: str) -> str:
        terms, step = [self.base] if self.base else [], 1
        for axis in reversed(self.schedule.kept):
            terms.append(axis.name if step == 1 else f"{axis.name} * {step}")
            step *= axis.size
        terms.append(split if step == 1 else f"{split} * {step}")
        return at(self.pointer(self.partials[number]), " + ".join(terms))

    def resume(self, level: int, targets: Iterable[int]) -> None:
        """The reductions of earlier launches, up to a level, that `targets` depend on."""
        seen: set[int] = set()
        left = list(targets)
        while left:
            number = left.pop()
            if number not in seen:
                seen.add(number)
                left.extend(() if number in self.partials else operands(self.nest.body[number]))
        for earlier in range(level):
            for number in self.reductions(earlier):
                if number in seen and self.direct(number):
                    self.compute([self.argument(number)])
                    self.reduce_direct(number)
                elif number in seen:
                    self.combine(number)

    def combine(self, number: int) -> None:
        """A reduction from the parts that the programs of an earlier launch left."""
        if self.known("part") is None:
            block = ceiling(self.schedule.splits)
            self.constants["PBLOCK"] = block
            self.define("part", "part", self.lanes("r", "PBLOCK"))
            runtime = self.schedule.axes[self.schedule.r].runtime
            if runtime or block != self.schedule.splits:
                parts = "parts" if runtime else str(self.schedule.splits)
                self.masks["part"] = self.define("part_in", "part_in", f"part < {parts}")
        mask = self.mask(self.schedule.kept, self.masks.get("part", ""))
        parts, pointer = f"v{number}_parts", self.partial_pointer(number, "part")
        self.write(f"{parts} = tl.load({pointer}{f', mask={mask}' if mask else ''})")
        if "part" in self.masks:
            unit = identity(self.reduce(number).name, self.reduced_dtype(number))
            parts = f"tl.where({self.masks['part']}, {parts}, {unit})"
        r = self.schedule.axes[self.schedule.r]
        self.shapes[number] = self.without_r(self.shape([*self.schedule.kept, r]))
        text = self.narrowed(number, self.reduced_text(number, parts))
        self.define(number, f"v{number}", text, self.note(number))

    # Stores ----------------------------------------------------------------------------------------------------------

    def stores(self) -> tuple[list[int], list[int]]:
        """Those whose address does not move along r, and those whose address does."""
        numbers = [number for number, statement in enumerate(self.nest.body) if isinstance(statement, Store)]
        along = [number for number in numbers if self.varies_along_r(number)]
        return [number for number in numbers if number not in along], along

    def store(self, number: int) -> None:
        store = self.nest.body[number]
        assert isinstance(store, Store)
        axes = self.axes_of(store.index)
        value = self.variable(store.value)
        conditions: list[str] = []
        for axis in self.schedule.axes:
            still = [at for at, dim in enumerate(axis.dims) if not store.index.strides[dim]]
            if len(still) < len(axis.dims):
                conditions.extend(f"({self.coordinate(axis, at, at)} == 0)" for at in still)
            elif axis.name == "r":
                conditions.extend([f"({self.split} == 0)"] if self.split else [])
            elif axis.block == 1 and axis.blocks > 1:
                conditions.append(f"({axis.name} == 0)")
            elif (block := self.known(f"{axis.name}_block")) is not None:
                conditions.append(f"({block} == 0)")
        address = self.address(store.index)
        if self.shapes[store.value] and not self.shape(axes):
            ones = f"[{', '.join('1' for _ in self.tile)}]"
            address = f"{address} + tl.zeros({ones}, tl.int32)" if address else f"tl.zeros({ones}, tl.int32)"
        pointer = self.pointer(self.names[store.buffer])
        pointer = at(pointer, address)
        mask = self.mask(axes, *conditions)
        text = f"tl.store({pointer}, {value}{f', mask={mask}' if mask else ''})"
        self.write(text, self.note(number), inner=self.inner(axes))


def at(pointer: str, address: str) -> str:
    if not address:
        return pointer
    return f"{pointer} + ({address})" if " " in address else f"{pointer} + {address}"


def comment(text: str) -> str:
    """One line that nothing after it can leave, for a comment."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:200])
