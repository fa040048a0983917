"""The loop IR: a generated kernel as data that can be checked, printed and run.

A `Kernel` has input and output buffers and some `Nest`s, which are independent of each other. A nest is a set of nested
loops, `dims`, around straight-line code: `body[i]` defines value i. The last `reduced` dims are those that its
reductions run over; the others are kept. A value varies along some of the dims; a reduction's result does not vary
along the reduced ones any more, so it can be used beside values that still do (softmax is one nest).

A store may also add up: an element whose index does not move along some kept dims is then the sum over those dims. So
the gradients of a norm, of which one is reduced along rows and others down the columns, are one nest.

    %9 = accumulate sum b1 [0, 1] %8

All indices are affine: an offset and a stride for each dim. So whether a kernel stays within its buffers is decided
here, exactly, before anything is compiled; the one exception, a gather, is checked as it runs.

    kernel rms(a0: f32[64, 256], a1: f32[256]) -> (b0: f32[64, 256])
    nest [64 | 256] {
      %0 = load a0 [256, 1]
      %1 = mul f32(%0, %0)
      %2 = reduce sum %1
      %3 = constant f32 0.00390625
      %4 = mul f32(%2, %3)
      %5 = rsqrt f32(%4)
      %6 = mul f32(%0, %5)
      %7 = load a1 [0, 1]
      %8 = mul f32(%6, %7)
      %9 = store b0 [256, 1] %8
    }

Arithmetic is in f64, f32, i64, i32 and bool; the other dtypes are only loaded, cast and stored. So where a value is
rounded stands in the IR, as a cast, and no emitter has a policy of its own. Sums are taken in the dtype that they name.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from monarch.compiler.display import text_of
from monarch.compiler.errors import MonarchError
from monarch.compiler.loading import load

if TYPE_CHECKING:
    import torch

MOST_STATEMENTS = 100_000
"""In one kernel: a bound on the work that a file may ask of a compiler."""


class KernelError(MonarchError):
    """A kernel that is none, and why."""


@dataclass(frozen=True)
class Buffer:
    """A tensor's memory as a kernel sees it: `strides` in elements, none negative."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @staticmethod
    def contiguous(dtype: torch.dtype, shape: tuple[int, ...]) -> Buffer:
        return Buffer(dtype, shape, row_major(shape))

    @property
    def is_contiguous(self) -> bool:
        return self.strides == row_major(self.shape)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def extent(self) -> int:
        """How many elements of memory it spans."""
        if not self.numel:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


@dataclass(frozen=True)
class Index:
    """An address in a buffer, in elements: `offset` and, for each dim of the nest, what one step along it adds."""

    offset: int
    strides: tuple[int, ...]

    def last(self, dims: tuple[int, ...]) -> int:
        """The greatest address that loops over `dims` come to."""
        return self.offset + sum((size - 1) * stride for size, stride in zip(dims, self.strides, strict=True))


@dataclass(frozen=True)
class Load:
    """The element at `index`; where `gather` is a value (i64), `gather * stride` further, if it is 0 <= gather < size,
    and the kernel fails otherwise. Its dtype is the buffer's."""

    buffer: int
    index: Index
    gather: int = -1
    stride: int = 0
    size: int = 0


@dataclass(frozen=True)
class Constant:
    value: float | int | bool
    dtype: torch.dtype


@dataclass(frozen=True)
class Position:
    """The loop's position along a dim, as i64."""

    dim: int


@dataclass(frozen=True)
class Op:
    """A pointwise op of `signatures.POINTWISE` on values, and the dtype that it gives."""

    name: str
    args: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Reduce:
    """A reduction of `signatures.REDUCTIONS` over the nest's reduced dims, in the dtype of its operand. The order of
    its additions is each emitter's own, and the same in every run."""

    name: str
    arg: int


@dataclass(frozen=True)
class Store:
    """Writes a value to the element at `index` of an output, once; with `sums`, the sum of the values at all positions
    of the kept dims along which `index` does not move. It moves along all reduced ones then. The order of the additions
    is each emitter's own, and the same in every run. Defines no value."""

    buffer: int
    index: Index
    value: int
    sums: bool = False


Statement = Load | Constant | Position | Op | Reduce | Store


@dataclass(frozen=True)
class Nest:
    """Loops over `dims`, of which the last `reduced` are those that reductions run over, around `body`.

    `lines` has, for each statement or not at all, the user's line that it comes from, such as "train.py:12".
    """

    dims: tuple[int, ...]
    reduced: int
    body: tuple[Statement, ...]
    lines: tuple[str, ...] = field(default=(), compare=False)

    @property
    def kept(self) -> tuple[int, ...]:
        return self.dims[: len(self.dims) - self.reduced]

    @cached_property
    def varies(self) -> tuple[frozenset[int], ...]:
        """The dims along which each value varies. For a store: those of the address that it writes; for one that adds
        up all dims, for each position of theirs counts."""
        found: list[frozenset[int]] = []
        for statement in self.body:
            found.append(varies_along(statement, found, self.dims, self.reduced))
        return tuple(found)

    def on_buffers(self, numbers: Sequence[int]) -> Nest:
        """The same nest on other buffers: those with these numbers."""
        body: list[Statement] = []
        for statement in self.body:
            match statement:
                case Load(buffer, index, gather, stride, size):
                    statement = Load(numbers[buffer], index, gather, stride, size)
                case Store(buffer, index, value, sums):
                    statement = Store(numbers[buffer], index, value, sums)
            body.append(statement)
        return Nest(self.dims, self.reduced, tuple(body), self.lines)

    @cached_property
    def sums(self) -> tuple[Store, ...]:
        """The stores that add up."""
        return tuple(statement for statement in self.body if isinstance(statement, Store) and statement.sums)

    @cached_property
    def touches(self) -> tuple[tuple[Load | Store, int], ...]:
        """The loads and stores, and how many elements each comes to."""
        found: list[tuple[Load | Store, int]] = []
        for statement, along in zip(self.body, self.varies, strict=True):
            if isinstance(statement, Load | Store):
                if isinstance(statement, Store):
                    along = _moving(statement.index, self.dims)
                found.append((statement, math.prod(self.dims[dim] for dim in along)))
        return tuple(found)


def varies_along(
    statement: Statement, before: Sequence[frozenset[int]], dims: tuple[int, ...], reduced: int
) -> frozenset[int]:
    """The dims along which the value of a statement varies (see `Nest.varies`), from those of the values before it."""
    match statement:
        case Load(_, index, gather):
            along = _moving(index, dims)
            return along | before[gather] if gather >= 0 else along
        case Position(dim):
            return frozenset({dim} if dims[dim] > 1 else ())
        case Op(_, args):
            return frozenset().union(*(before[arg] for arg in args))
        case Reduce(_, arg):
            return before[arg].difference(range(len(dims) - reduced, len(dims)))
        case Store(_, index, _, sums):
            return frozenset(dim for dim, size in enumerate(dims) if size > 1) if sums else _moving(index, dims)
        case _:
            return frozenset()


def _moving(index: Index, dims: tuple[int, ...]) -> frozenset[int]:
    return frozenset(at for at, stride in enumerate(index.strides) if stride and dims[at] > 1)


@dataclass(frozen=True)
class Kernel:
    """Buffers are numbered: the inputs, then the outputs. Outputs are fresh memory of their own, every element of which
    is stored once, except where the caller passes an input's memory for one (see `may_overwrite`). The code of a kernel
    that is `sized` takes its sizes as arguments, and serves all kernels that differ in nothing else."""

    name: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    nests: tuple[Nest, ...]
    sized: bool = False

    def buffer(self, number: int) -> Buffer:
        inputs = len(self.inputs)
        return self.inputs[number] if number < inputs else self.outputs[number - inputs]

    @cached_property
    def accesses(self) -> dict[int, list[tuple[int, Load | Store]]]:
        """The loads and stores of each buffer, with their nests' numbers."""
        found: dict[int, list[tuple[int, Load | Store]]] = {}
        for number, nest in enumerate(self.nests):
            for statement in nest.body:
                if isinstance(statement, (Load, Store)):
                    found.setdefault(statement.buffer, []).append((number, statement))
        return found

    @cached_property
    def other_inputs(self) -> tuple[tuple[int, ...], ...]:
        """For each output the inputs that the nests which store it read: it cannot take the memory of others."""
        read: list[set[int]] = [set() for _ in self.nests]
        storing: list[list[int]] = [[] for _ in self.outputs]
        for buffer, accesses in self.accesses.items():
            for number, access in accesses:
                if isinstance(access, Load):
                    read[number].add(buffer)
                else:
                    storing[buffer - len(self.inputs)].append(number)
        return tuple(tuple(sorted(set().union(*(read[number] for number in numbers)))) for numbers in storing)

    @cached_property
    def dtypes(self) -> tuple[tuple[torch.dtype | None, ...], ...]:
        """The dtype of each value of each nest; None for a store."""
        return tuple(tuple(_dtypes(self, nest)) for nest in self.nests)

    def __str__(self) -> str:
        return text_of(self)


def _dtypes(kernel: Kernel, nest: Nest) -> Iterator[torch.dtype | None]:
    found: list[torch.dtype | None] = []
    for statement in nest.body:
        match statement:
            case Load(buffer):
                found.append(kernel.buffer(buffer).dtype)
            case Constant(_, dtype) | Op(_, _, dtype):
                found.append(dtype)
            case Position():
                found.append(load("torch:int64"))
            case Reduce(_, arg):
                found.append(found[arg])
            case _:
                found.append(None)
    yield from found


def may_overwrite(kernel: Kernel, output: int, operand: int) -> bool:
    """Whether output number `output` may take the memory of input number `operand`: the same dtype, shape and strides,
    and every element is read, before it is written, only where it is written.

    The caller also has to know that no other operand shares that memory, and that no op reads it afterwards.
    """
    if kernel.inputs[operand] != kernel.outputs[output]:
        return False
    stores = kernel.accesses.get(len(kernel.inputs) + output, ())
    for number, access in kernel.accesses.get(operand, ()):
        if not isinstance(access, Load) or access.gather >= 0:
            return False
        # Read at an address of another loop position, or again after the loops around the store went on.
        for where, store in stores:
            if where != number or store.index != access.index or (isinstance(store, Store) and store.sums):
                return False
            dims = kernel.nests[where].dims
            if len(_moving(store.index, dims)) != sum(size > 1 for size in dims):
                return False
    return True


def traffic(kernel: Kernel) -> tuple[int, int]:
    """How many bytes it reads and writes at least: every element that it needs once."""
    read: dict[int, int] = {}
    for nest in kernel.nests:
        for statement, elements in nest.touches:
            if isinstance(statement, Load):
                read[statement.buffer] = read.get(statement.buffer, 0) + elements
    return (
        sum(min(count, kernel.inputs[at].numel) * kernel.inputs[at].dtype.itemsize for at, count in read.items()),
        sum(output.nbytes for output in kernel.outputs),
    )
