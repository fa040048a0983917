"""From the loop IR to Triton: deterministic Python text, and the launches that run it.

Each nest becomes a function, or several where a reduction is split: one for each reduction that waits for another,
and one that stores. Nests that are equal but for their buffers, and for the size of their one dim, become one function,
whose programs find their nest's pointers by their number: an optimizer's update of many tensors is one launch. A nest
that is a matrix product becomes a function with tiles (`product.py`).

`triton` itself is imported by what compiles or runs the text, not here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from monarch.compiler.errors import MonarchError
from monarch.compiler.kernels.triton.function import Function, comment
from monarch.compiler.kernels.triton.loops import accesses, levels, simplified
from monarch.compiler.kernels.triton.operations import COMBINERS, reduction_dtype
from monarch.compiler.kernels.triton.product import Product, product_of, work_of, write_product
from monarch.compiler.kernels.triton.schedule import LARGEST_GRID, Schedule, schedule
from monarch.compiler.kernels.triton.source import ERROR, Launch, Scratch, TritonSource
from monarch.compiler.kernels.triton.variants import LARGEST_TILE, Tiles, tiles_for
from monarch.compiler.loops.ir import Kernel, KernelError, Load, Nest, Reduce, Statement, Store
from monarch.compiler.loops.nests import live

MOST_POINTERS = 448
"""In one launch: CUDA takes 4,096 bytes of parameters."""

_HEAD = """import triton
import triton.language as tl
from triton.language.extra import libdevice
"""


def emit(kernel: Kernel, *, lines: bool = False, tiles: Tiles | None = None) -> TritonSource:
    """The kernel as Triton; the same text for the same kernel. `lines` puts the user's line behind each statement, for
    people: compiled text has none. `tiles` are those of its matrix products (`variants_of`).

    Arithmetic is that of the IR, rounded where it says: compile without fusing multiplications and additions.
    Raises MonarchError for a kernel of more programs than a launch can have.
    """
    return Emitter(kernel, lines, tiles).run()


def variants_of(kernel: Kernel, target: str) -> list[tuple[Tiles | None, float]]:
    """The ways to build a kernel, and the estimated seconds of each, the fastest first; [(None, 0.0)] for a kernel
    without matrix products, of which there is one."""
    works = [work_of(found, kernel, number) for number, found in _products(kernel)]
    if not works:
        return [(None, 0.0)]
    most = max(works, key=lambda work: work.batch * work.rows * work.columns * work.summed)
    return list(tiles_for(most, target))


def _products(kernel: Kernel) -> Iterator[tuple[int, Product]]:
    for number, nest in enumerate(kernel.nests):
        if (found := product_of(nest)) is not None:
            yield number, found


@dataclass(frozen=True)
class _Member:
    """A nest, simplified, and the buffers that it touches in the order in which it does."""

    number: int
    nest: Nest
    buffers: tuple[int, ...]


class Emitter:
    def __init__(self, kernel: Kernel, lines: bool, tiles: Tiles | None) -> None:
        self.kernel, self.lines, self.tiles = kernel, lines, tiles
        self.products = dict(_products(kernel))
        self.functions: list[str] = []
        self.launches: list[Launch] = []
        self.scratch: list[Scratch] = []
        self.gathers: list[str] = []
        self.combiners: dict[str, None] = {}

    def run(self) -> TritonSource:
        if any(nest.sums for nest in self.kernel.nests):
            raise KernelError(
                f"kernel {self.kernel.name!r:.100} reduces rows and adds up columns in one pass, and kernels for "
                "GPUs take two",
                hint="show the program's kernels for a GPU: --target cuda:90",
            )
        for number, product in self.products.items():
            self.emit_product(number, product)
        for group in self.groups():
            self.emit_group(group)
        helpers = [
            f"@triton.jit\ndef {name}(a, b):\n    {COMBINERS[name]}\n" for name in COMBINERS if name in self.combiners
        ]
        text = "\n\n".join([_HEAD, *helpers, *self.functions])
        return TritonSource(self.kernel.name, text, tuple(self.launches), tuple(self.scratch), tuple(self.gathers))

    def itemsize(self, buffer: int) -> int:
        return self.kernel.buffer(buffer).dtype.itemsize

    # Groups of equal nests -------------------------------------------------------------------------------------------

    def groups(self) -> Iterator[list[_Member]]:
        found: dict[object, list[_Member]] = {}
        for number, nest in enumerate(self.kernel.nests):
            if number in self.products:
                continue
            simple = simplified(nest, self.itemsize)
            member = _Member(number, simple, _buffers(simple))
            found.setdefault(self.key(member), []).append(member)
        for members in found.values():
            chunk: list[_Member] = []
            pointers: set[int] = set()
            for member in members:
                if chunk and len(pointers | set(member.buffers)) > MOST_POINTERS:
                    yield chunk
                    chunk, pointers = [], set()
                chunk.append(member)
                pointers.update(member.buffers)
            yield chunk

    def key(self, member: _Member) -> object:
        """Equal for nests that one function can compute."""
        nest = member.nest
        slots = {buffer: slot for slot, buffer in enumerate(member.buffers)}

        def anonymous(statement: Statement) -> Statement:
            if isinstance(statement, Load | Store):
                return replace(statement, buffer=slots.get(statement.buffer, -1))
            return statement

        dtypes = tuple(self.kernel.buffer(buffer).dtype for buffer in member.buffers)
        body = tuple(anonymous(statement) for statement in nest.body)
        return (None if _any_size(nest) else nest.dims), nest.reduced, dtypes, repr(body)

    # Functions -------------------------------------------------------------------------------------------------------

    def emit_product(self, number: int, product: Product) -> None:
        kernel, nest = self.kernel, product.nest
        lines = kernel.nests[number].lines if self.lines else ()
        (usual, _), *_ = tiles_for(work_of(product, kernel, number))
        written = write_product(
            product,
            kernel.dtypes[number],
            self.tiles or usual,
            {at: self.buffer_name(at) for at in _buffers(nest)},
            wide=self.reaches_far(nest),
            note=lambda at: comment(lines[at]) if lines else "",
        )
        self.function(
            written.lines, _sorted(written.pointers), written.constants, written.grid, written.warps, written.stages
        )

    def reaches_far(self, nest: Nest) -> bool:
        """Whether a product's addresses, those of its last tiles included, need 64 bits."""
        most = max(
            (s.index.last(nest.dims) + sum(s.index.strides) * LARGEST_TILE)
            for s in nest.body
            if isinstance(s, Load | Store)
        )
        return most > torch.iinfo(torch.int32).max

    def buffer_name(self, buffer: int) -> str:
        inputs = len(self.kernel.inputs)
        return f"a{buffer}" if buffer < inputs else f"b{buffer - inputs}"

    def emit_group(self, members: Sequence[_Member]) -> None:
        longest = max(members, key=lambda member: member.nest.dims)
        nest = longest.nest
        plan = schedule(nest, list(accesses(nest, self.itemsize)))
        runtime = any(member.nest.dims != nest.dims for member in members)
        if runtime:
            plan = replace(plan, axes=tuple(replace(axis, runtime=True) for axis in plan.axes))
        numbers = {}
        alive, waits = live(nest.body), levels(nest)
        for at, statement in enumerate(nest.body):
            if at in alive and isinstance(statement, Load) and statement.gather >= 0:
                self.gathers.append(self.gather_text(members[0].number, at, statement))
                numbers[at] = len(self.gathers)
        partials: dict[int, str] = {}
        work = _Work(self, members, longest, plan, numbers, partials)
        if plan.splits == 1:
            work.emit_whole()
            return
        function = work.function()
        for at, statement in enumerate(nest.body):
            if at in alive and isinstance(statement, Reduce) and not function.direct(at):
                dtype = self.kernel.dtypes[longest.number][at]
                assert dtype is not None
                partials[at] = f"s{len(self.scratch)}"
                self.scratch.append(Scratch(reduction_dtype(dtype), work.parts()))
        for level in range(max(waits, default=0) + 1):
            work.emit_level(level)

    def gather_text(self, nest: int, at: int, load: Load) -> str:
        lines = self.kernel.nests[nest].lines
        where = f"{comment(lines[at])}: " if lines and lines[at] else ""
        return f"{where}an index is out of range: there are {load.size:,} rows"

    def add(
        self, function: Function, body: Sequence[str], grid: int, start: Sequence[str], pointers: Sequence[str]
    ) -> None:
        self.function((*start, *body), pointers, function.constants, grid, function.schedule.warps)
        self.combiners |= function.combiners

    def function(
        self,
        body: Sequence[str],
        pointers: Sequence[str],
        constants: Mapping[str, int],
        grid: int,
        warps: int,
        stages: int = 1,
    ) -> None:
        if grid > LARGEST_GRID:
            raise MonarchError(
                f"kernel {self.kernel.name} would take {grid:,} programs, and a launch has at most {LARGEST_GRID:,}"
            )
        name = f"{self.kernel.name}_{len(self.launches)}"
        parameters = ", ".join([*pointers, *(f"{constant}: tl.constexpr" for constant in constants)])
        text = "\n".join(f"    {line}" for line in body)
        self.functions.append(f"@triton.jit\ndef {name}({parameters}):\n{text}\n")
        self.launches.append(Launch(name, grid, tuple(pointers), tuple(constants.items()), warps, stages))


def _buffers(nest: Nest) -> tuple[int, ...]:
    alive = live(nest.body)
    touched = (s.buffer for at, s in enumerate(nest.body) if at in alive and isinstance(s, Load | Store))
    return tuple(dict.fromkeys(touched))


def _any_size(nest: Nest) -> bool:
    """Whether a function can learn the nest's size when it runs. The sum of one value, taken n times, is a product with
    a number that is known before."""
    varying = all(nest.varies[each.arg] for each in nest.body if isinstance(each, Reduce))
    return len(nest.dims) == 1 and (not nest.reduced or varying)


class _Work:
    """The functions of some equal nests."""

    def __init__(
        self,
        emitter: Emitter,
        members: Sequence[_Member],
        shown: _Member,
        plan: Schedule,
        gather_number: Mapping[int, int],
        partials: Mapping[int, str],
    ) -> None:
        self.emitter, self.members, self.shown, self.plan = emitter, members, shown, plan
        self.gather_number, self.partials = gather_number, partials
        self.common = [
            slot for slot in range(len(shown.buffers)) if len({member.buffers[slot] for member in members}) == 1
        ]

    def buffer_name(self, buffer: int) -> str:
        return self.emitter.buffer_name(buffer)

    def function(self) -> Function:
        names = {
            buffer: self.buffer_name(buffer) if slot in self.common else f"p{slot}"
            for slot, buffer in enumerate(self.shown.buffers)
        }
        kernel, number = self.emitter.kernel, self.shown.number
        lines = kernel.nests[number].lines if self.emitter.lines else ()
        function = Function(
            self.shown.nest,
            kernel.dtypes[number],
            self.plan,
            names,
            wide=self.wide(),
            note=lambda at: comment(lines[at]) if lines else "",
            gather_number=self.gather_number,
            partials=self.partials,
        )
        function.base = "base" if self.partials and len(self.members) > 1 else ""
        return function

    def wide(self) -> bool:
        """Whether positions and addresses need 64 bits."""
        nest = self.shown.nest
        reach = [axis.blocks * axis.block for axis in self.plan.axes] + [sum(self.counts(self.plan.splits))]
        for member in self.members:
            for statement in member.nest.body:
                if isinstance(statement, Load | Store):
                    further = (
                        (statement.size - 1) * statement.stride if isinstance(statement, Load) and statement.size else 0
                    )
                    reach.append(statement.index.last(member.nest.dims) + further)
        return max(reach, default=0) + self.plan.slice * bool(nest.reduced) + 65536 > torch.iinfo(torch.int32).max

    @property
    def runtime(self) -> bool:
        return any(axis.runtime for axis in self.plan.axes)

    def counts(self, splits: int) -> list[int]:
        """How many programs each nest takes in a launch in which r is split, if `splits` is more than 1."""
        if not self.runtime:
            return [self.plan.programs * splits] * len(self.members)
        if not self.plan.kept:
            return [self.splits_of(member) if splits > 1 else 1 for member in self.members]
        return [-(-member.nest.dims[0] // self.plan.axes[0].block) for member in self.members]

    def splits_of(self, member: _Member) -> int:
        return -(-member.nest.dims[0] // self.plan.slice)

    def parts(self) -> int:
        """How many partial results each split reduction leaves."""
        kept = 1
        for axis in self.plan.kept:
            kept *= axis.size
        return kept * self.plan.splits * len(self.members)

    def emit_whole(self) -> None:
        function = self.function()
        function.begin(1, self.start())
        if function.schedule.persistent:
            function.begin_r()
        for level in range(max(function.levels, default=0) if function.nest.reduced else 0):
            function.reduce_level(level)
        self.finish(function, 1)

    def emit_level(self, level: int) -> None:
        function = self.function()
        if level == max(function.levels, default=0):
            splits = self.plan.splits if function.stores()[1] else 1
            function.begin(splits, self.start())
            function.resume(level, [s.value for s in function.nest.body if isinstance(s, Store)])
            self.finish(function, splits)
            return
        targets = [function.argument(at) for at in function.reductions(level) if not function.direct(at)]
        if targets:
            function.begin(self.plan.splits, self.start())
            function.resume(level, targets)
            function.reduce_level(level)
            self.add(function, self.plan.splits)

    def finish(self, function: Function, splits: int) -> None:
        """Store: values that do not move along r once, the others in a tile, or a loop over tiles, of it."""
        body = function.nest.body
        still, along = function.stores()
        function.compute([statement.value for at in still if isinstance(statement := body[at], Store)])
        if not (function.looped and along):
            function.compute([statement.value for at in along if isinstance(statement := body[at], Store)])
        for at in still:
            function.store(at)
        if function.looped and along:
            with function.loop_over_r():
                function.compute([statement.value for at in along if isinstance(statement := body[at], Store)])
                for at in along:
                    function.store(at)
        else:
            for at in along:
                function.store(at)
        self.add(function, splits)

    # Which nest a program is of --------------------------------------------------------------------------------------

    def start(self) -> str:
        return "start" if len(self.members) > 1 else ""

    def add(self, function: Function, splits: int) -> None:
        pointers = list(function.used)
        counts = self.counts(splits)
        choice: list[str] = []
        if len(self.members) > 1:
            own = [slot for slot in range(len(self.shown.buffers)) if f"p{slot}" in function.used]
            chosen = [self.buffer_name(member.buffers[slot]) for member in self.members for slot in own]
            pointers = [name for name in pointers if not name.startswith("p")] + list(dict.fromkeys(chosen))
            choice = ["number = tl.program_id(0)", *self.choose(0, len(self.members), counts, own)]
        self.emitter.add(function, function.lines, sum(counts), choice, _sorted(pointers))

    def choose(self, first: int, last: int, counts: Sequence[int], own: Sequence[int]) -> list[str]:
        """A tree of branches that ends at a nest: a program passes through few of them."""
        if last - first > 1:
            middle = (first + last) // 2
            return [
                f"if number < {sum(counts[:middle])}:",
                *(f"    {line}" for line in self.choose(first, middle, counts, own)),
                "else:",
                *(f"    {line}" for line in self.choose(middle, last, counts, own)),
            ]
        member = self.members[first]
        found = [f"start = tl.full([], {sum(counts[:first])}, tl.int32)"]
        if self.runtime:
            found.append(f"n = tl.full([], {member.nest.dims[0]}, tl.{'int64' if self.wide() else 'int32'})")
        if self.partials:
            found.append(f"base = tl.full([], {first * self.parts() // len(self.members)}, tl.int32)")
            if self.runtime:
                found.append(f"parts = tl.full([], {self.splits_of(member)}, tl.int32)")
        return found + [f"p{slot} = {self.buffer_name(member.buffers[slot])}" for slot in own]


def _sorted(pointers: Sequence[str]) -> list[str]:
    """Inputs, outputs and scratch, each by its number, and the error word last."""
    numbered = [name for name in pointers if name != ERROR]
    return sorted(numbered, key=lambda name: (name[0], int(name[1:]))) + [ERROR] * (ERROR in pointers)
