"""Whether a kernel is one: a kernel may come from a file, and a file may come from anyone."""

from __future__ import annotations

import math
from typing import NoReturn

import torch

from monarch.compiler.loops.ir import (
    MOST_STATEMENTS,
    Buffer,
    Constant,
    Index,
    Kernel,
    KernelError,
    Load,
    Nest,
    Op,
    Position,
    Reduce,
    Statement,
    Store,
)
from monarch.compiler.loops.signatures import ARITHMETIC, BOOL, DTYPES, FLOATS, POINTWISE, REDUCTIONS
from monarch.compiler.types import DTYPE_NAMES

_MOST_ELEMENTS = 1 << 48


def check_kernel(kernel: Kernel) -> None:
    """Raise KernelError unless every statement is well typed, every address is within its buffer, and every element of
    every output is stored exactly once."""
    _Check(kernel).run()


class _Check:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.stored: set[int] = set()
        self.where = ""

    def fail(self, message: str) -> NoReturn:
        raise KernelError(f"kernel {self.kernel.name!r:.100}: {self.where}{message}")

    def run(self) -> None:
        kernel = self.kernel
        if not (kernel.name.isidentifier() and kernel.name.isascii() and len(kernel.name) <= 100):
            self.fail("its name has to be an identifier of at most 100 letters")
        if sum(len(nest.body) for nest in kernel.nests) > MOST_STATEMENTS:
            self.fail(f"it has more than {MOST_STATEMENTS:,} statements")
        for buffer in (*kernel.inputs, *kernel.outputs):
            self.check_buffer(buffer)
        for number, nest in enumerate(kernel.nests):
            self.where = f"nest {number}: "
            self.check_nest(nest)
        self.where = ""
        for number in range(len(kernel.inputs), len(kernel.inputs) + len(kernel.outputs)):
            if number not in self.stored:
                self.fail(f"output {number - len(kernel.inputs)} is never stored")

    def check_buffer(self, buffer: Buffer) -> None:
        if buffer.dtype not in DTYPES:
            self.fail(f"no buffer can be of {buffer.dtype}")
        if len(buffer.shape) != len(buffer.strides) or any(type(n) is not int or n < 0 for n in buffer.shape):
            self.fail(f"a buffer cannot have shape {buffer.shape} and strides {buffer.strides}")
        if any(type(n) is not int or n < 0 for n in buffer.strides):
            self.fail(f"a buffer cannot have strides {buffer.strides}")
        if buffer.extent > _MOST_ELEMENTS or buffer.numel > _MOST_ELEMENTS:
            self.fail(f"a buffer cannot have {max(buffer.extent, buffer.numel):,} elements")

    def check_nest(self, nest: Nest) -> None:
        if any(type(size) is not int or size < 1 for size in nest.dims) or math.prod(nest.dims) > _MOST_ELEMENTS:
            self.fail(f"loops cannot run over {list(nest.dims)}")
        if not 0 <= nest.reduced <= len(nest.dims):
            self.fail(f"it has {len(nest.dims)} dims, and {nest.reduced} of them reduced")
        if nest.lines and len(nest.lines) != len(nest.body):
            self.fail(f"it has {len(nest.lines)} source lines for {len(nest.body)} statements")
        outer = self.where
        known: list[torch.dtype | None] = []
        for number, statement in enumerate(nest.body):
            self.where = f"{outer}%{number}: "
            known.append(self.check_statement(statement, nest, known))
        for number, statement in enumerate(nest.body):
            if isinstance(statement, Store):
                self.where = f"{outer}%{number}: "
                self.check_store(statement, nest)

    def operand(self, value: int, known: list[torch.dtype | None]) -> torch.dtype:
        if type(value) is not int or not 0 <= value < len(known):
            self.fail(f"there is no value %{value} before it")
        dtype = known[value]
        if dtype is None:
            self.fail(f"%{value} is a store, which has no value")
        return dtype

    def check_statement(self, statement: Statement, nest: Nest, known: list[torch.dtype | None]) -> torch.dtype | None:
        match statement:
            case Load(buffer, index, gather, stride, size):
                if type(buffer) is not int or not 0 <= buffer < len(self.kernel.inputs):
                    self.fail(f"there is no input {buffer}")
                reach = 0
                if gather >= 0:
                    if self.operand(gather, known) != torch.int64:
                        self.fail("it gathers by a value that is not i64")
                    if size < 1 or stride < 0:
                        self.fail(f"it gathers among {size}, {stride} apart")
                    reach = (size - 1) * stride
                self.check_index(index, nest, self.kernel.inputs[buffer].extent - reach)
                return self.kernel.inputs[buffer].dtype
            case Constant(value, dtype):
                if dtype not in ARITHMETIC:
                    self.fail(f"no constant can be of {dtype}")
                if type(value) is not (bool if dtype == BOOL else float if dtype in FLOATS else int):
                    self.fail(f"{value!r} is no constant of {DTYPE_NAMES[dtype]}")
                if type(value) is int and not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max:
                    self.fail(f"{value} does not fit in {DTYPE_NAMES[dtype]}")
                return dtype
            case Position(dim):
                if type(dim) is not int or not 0 <= dim < len(nest.dims):
                    self.fail(f"there is no dim {dim}")
                return torch.int64
            case Op():
                return self.check_op(statement, known)
            case Reduce(name, arg):
                dtype = self.operand(arg, known)
                if dtype not in REDUCTIONS.get(name, ()):
                    self.fail(f"there is no {name!r:.40} of {DTYPE_NAMES[dtype]}")
                return dtype
            case Store(buffer, index, value, sums):
                number = buffer - len(self.kernel.inputs)
                if not 0 <= number < len(self.kernel.outputs):
                    self.fail(f"there is no output {number}")
                target = self.kernel.outputs[number]
                if self.operand(value, known) != target.dtype:
                    self.fail(f"a value of another dtype is stored as {DTYPE_NAMES[target.dtype]}")
                if sums and target.dtype not in REDUCTIONS["sum"]:
                    self.fail(f"there is no sum of {DTYPE_NAMES[target.dtype]}")
                if buffer in self.stored:
                    self.fail(f"output {number} is stored a second time")
                self.stored.add(buffer)
                self.check_index(index, nest, target.extent)
                return None

    def check_op(self, op: Op, known: list[torch.dtype | None]) -> torch.dtype:
        signature = POINTWISE.get(op.name)
        if signature is None:
            self.fail(f"there is no op {op.name!r:.40}")
        if len(op.args) != signature.operands:
            self.fail(f"{op.name} takes {signature.operands} operands, not {len(op.args)}")
        dtypes = [self.operand(arg, known) for arg in op.args]
        if op.name == "cast":
            if op.dtype not in DTYPES:
                self.fail(f"nothing can be cast to {op.dtype}")
            return op.dtype
        if op.name == "where" and dtypes.pop(0) != BOOL:
            self.fail("its condition is not bool")
        if len(set(dtypes)) != 1 or dtypes[0] not in signature.dtypes:
            self.fail(f"{op.name} does not take {', '.join(DTYPE_NAMES[dtype] for dtype in dtypes)}")
        given = BOOL if signature.gives_bool else dtypes[0]
        if op.dtype != given:
            self.fail(f"{op.name} gives {DTYPE_NAMES[given]}")
        return given

    def check_index(self, index: Index, nest: Nest, extent: int) -> None:
        if len(index.strides) != len(nest.dims):
            self.fail(f"it has {len(index.strides)} strides in loops over {list(nest.dims)}")
        if any(type(n) is not int or not 0 <= n <= _MOST_ELEMENTS for n in (index.offset, *index.strides)):
            self.fail("an offset or stride is negative or too large")
        if index.last(nest.dims) >= extent:
            self.fail(f"it reaches element {index.last(nest.dims):,} of {max(extent, 0):,}")

    def check_store(self, store: Store, nest: Nest) -> None:
        """Every element of the output, each by one position of the loops along which its value varies or, where it is
        a sum, by all positions of some kept ones."""
        target = self.kernel.buffer(store.buffer)
        moving = [(stride, size) for stride, size in zip(store.index.strides, nest.dims, strict=True) if size > 1]
        along = {at for at, stride in enumerate(store.index.strides) if stride and nest.dims[at] > 1}
        if store.sums:
            if any(size > 1 and not stride for stride, size in _of_reduced(store, nest)):
                self.fail("its address does not move along a reduced dim, and only kept ones are added up")
        elif not nest.varies[store.value] <= along:
            self.fail("its value varies along a dim that its address does not move along")
        reach = 0
        for stride, size in sorted(pair for pair in moving if pair[0]):
            if stride <= reach:
                self.fail("two positions of the loops store to one element")
            reach += stride * (size - 1)
        if math.prod(size for stride, size in moving if stride) != target.numel:
            self.fail(f"it does not store all {target.numel:,} elements of its output")
        if target.extent != target.numel:
            self.fail("an output's memory has to be dense")


def _of_reduced(store: Store, nest: Nest) -> list[tuple[int, int]]:
    """The strides and sizes of the reduced dims."""
    kept = len(nest.kept)
    return list(zip(store.index.strides[kept:], nest.dims[kept:], strict=True))
