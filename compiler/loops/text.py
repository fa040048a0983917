"""The text form of kernels, which parses back exactly (the form is shown in `compiler.loops.ir`)."""

from __future__ import annotations

from monarch.compiler.alike import Memo
from monarch.compiler.display import shows_as
from monarch.compiler.loops.check import check_kernel
from monarch.compiler.loops.ir import (
    Buffer,
    Constant,
    Index,
    Kernel,
    Load,
    Op,
    Position,
    Reduce,
    Statement,
    Store,
)
from monarch.compiler.loops.read import Reader
from monarch.compiler.loops.signatures import BOOL
from monarch.compiler.types import DTYPE_NAMES, DTYPES


def print_kernel(kernel: Kernel, *, lines: bool = True) -> str:
    """The kernel as text; without its source lines where `lines` is false: then the text is the computation alone."""
    inputs = ", ".join(f"a{i}: {_buffer(buffer)}" for i, buffer in enumerate(kernel.inputs))
    outputs = ", ".join(f"b{i}: {_buffer(buffer)}" for i, buffer in enumerate(kernel.outputs))
    text = [f"{'sized ' if kernel.sized else ''}kernel {kernel.name}({inputs}) -> ({outputs})"]
    for nest in kernel.nests:
        kept = ", ".join(map(str, nest.kept))
        reduced = ", ".join(map(str, nest.dims[len(nest.kept) :]))
        text.append(f"nest [{kept}{f' | {reduced}' if nest.reduced else ''}] {{")
        for at, statement in enumerate(nest.body):
            line = f"  %{at} = {_statement(statement, len(kernel.inputs))}"
            note = nest.lines[at] if lines and nest.lines else ""
            text.append(f"{line}  # {note}" if note else line)
        text.append("}")
    return "\n".join(text) + "\n"


def _buffer(buffer: Buffer) -> str:
    text = f"{DTYPE_NAMES[buffer.dtype]}[{', '.join(map(str, buffer.shape))}]"
    return text if buffer.is_contiguous else f"{text} strides [{', '.join(map(str, buffer.strides))}]"


def _index(index: Index) -> str:
    strides = f"[{', '.join(map(str, index.strides))}]"
    return f"{strides} + {index.offset}" if index.offset else strides


def _statement(statement: Statement, inputs: int) -> str:
    match statement:
        case Load(buffer, index, gather, stride, size):
            text = f"load a{buffer} {_index(index)}"
            return text if gather < 0 else f"{text} gather %{gather} * {stride} of {size}"
        case Constant(value, of):
            return f"constant {DTYPE_NAMES[of]} {str(value).lower() if of == BOOL else repr(value)}"
        case Position(dim):
            return f"position {dim}"
        case Op(name, args, of):
            return f"{name} {DTYPE_NAMES[of]}({', '.join(f'%{arg}' for arg in args)})"
        case Reduce(name, arg):
            return f"reduce {name} %{arg}"
        case Store(buffer, index, value, sums):
            return f"{'accumulate sum' if sums else 'store'} b{buffer - inputs} {_index(index)} %{value}"


_READ: Memo[Kernel] = Memo(1024)


def parse_kernel(text: str) -> Kernel:
    """A checked kernel from its text. Raises KernelError where the text is no kernel, with the line."""
    if (known := _READ.get(text)) is not None:
        return known
    kernel = Reader(text, DTYPES).kernel()
    check_kernel(kernel)
    return _READ.keep(text, kernel)


def print_checked(kernel: Kernel) -> str:
    """The text of a kernel that `check_kernel` has let pass: `parse_kernel` need not read it."""
    text = print_kernel(kernel)
    _READ.keep(text, kernel)
    return text


shows_as(Kernel, print_kernel)
