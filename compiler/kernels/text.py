"""The text form of kernels, which parses back exactly (the form is shown in `compiler.kernels.ir`)."""

from __future__ import annotations

from functools import cache, lru_cache
from typing import Any

import torch
from lark import Lark, Transformer, v_args
from lark.exceptions import LarkError, VisitError

from monarch.compiler.kernels.check import check_kernel
from monarch.compiler.kernels.ir import (
    BOOL,
    FLOATS,
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
from monarch.compiler.types import DTYPE_NAMES, DTYPES

MOST_CHARACTERS = 16_000_000


def print_kernel(kernel: Kernel, *, lines: bool = True) -> str:
    """The kernel as text; without its source lines where `lines` is false, which then says only what it computes."""
    inputs = ", ".join(f"a{i}: {_buffer(buffer)}" for i, buffer in enumerate(kernel.inputs))
    outputs = ", ".join(f"b{i}: {_buffer(buffer)}" for i, buffer in enumerate(kernel.outputs))
    text = [f"kernel {kernel.name}({inputs}) -> ({outputs})"]
    for number, nest in enumerate(kernel.nests):
        kept = ", ".join(map(str, nest.kept))
        reduced = ", ".join(map(str, nest.dims[len(nest.kept) :]))
        text.append(f"nest [{kept}{f' | {reduced}' if nest.reduced else ''}] {{")
        for at, (statement, dtype) in enumerate(zip(nest.body, kernel.dtypes[number], strict=True)):
            line = f"  %{at} = {_statement(statement, dtype, len(kernel.inputs))}"
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


def _statement(statement: Statement, dtype: torch.dtype | None, inputs: int) -> str:
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
            assert dtype is not None
            return f"reduce {name} %{arg}"
        case Store(buffer, index, value):
            return f"store b{buffer - inputs} {_index(index)} %{value}"


_GRAMMAR = r"""
kernel: "kernel" NAME "(" buffers ")" "->" "(" buffers ")" nest*
buffers: [buffer ("," buffer)*]
buffer: REFERENCE ":" DTYPE numbers ["strides" numbers]
nest: "nest" "[" sizes ["|" sizes] "]" "{" statement* "}"
sizes: [INTEGER ("," INTEGER)*]
numbers: "[" sizes "]"
statement: VALUE "=" what [LINE]
?what: "load" REFERENCE index ["gather" VALUE "*" INTEGER "of" INTEGER] -> load
     | "constant" DTYPE LITERAL                                        -> constant
     | "position" INTEGER                                              -> position
     | "store" REFERENCE index VALUE                                   -> store
     | "reduce" NAME VALUE                                             -> reduce
     | NAME DTYPE "(" VALUE ("," VALUE)* ")"                           -> op
index: numbers ["+" INTEGER]

DTYPE.3: /(f64|f32|f16|bf16|i64|i32|i16|i8|u8|bool)\b/
LITERAL.2: /-?(\d+\.\d*(e[-+]?\d+)?|\d+e[-+]?\d+|\d+|inf|nan)|true|false/
VALUE: /%\d{1,6}/
REFERENCE.2: /[ab]\d{1,6}\b/
INTEGER.3: /\d{1,18}(?![\d.e])/
NAME: /[A-Za-z_]\w{0,99}/
LINE: /# [^\n]*/
%ignore /[ \t\n]+/
"""


@v_args(inline=True)
class _Build(Transformer[Any, Kernel]):
    """From the parse to the kernel."""

    inputs = 0

    def VALUE(self, token: str) -> int:
        return int(token[1:])

    def INTEGER(self, token: str) -> int:
        return int(token)

    def DTYPE(self, token: str) -> torch.dtype:
        return DTYPES[token]

    def LINE(self, token: str) -> str:
        return str(token)[2:].rstrip()

    def sizes(self, *sizes: int | None) -> tuple[int, ...]:
        return tuple(size for size in sizes if size is not None)

    def numbers(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return sizes

    def index(self, strides: tuple[int, ...], offset: int | None) -> Index:
        return Index(offset or 0, strides)

    def buffer(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...] | None
    ) -> tuple[str, Buffer]:
        if strides is None:
            return str(name), Buffer.contiguous(dtype, shape)
        return str(name), Buffer(dtype, shape, strides)

    def buffers(self, *buffers: tuple[str, Buffer] | None) -> list[tuple[str, Buffer]]:
        return [buffer for buffer in buffers if buffer is not None]

    def load(
        self, name: str, index: Index, gather: int | None, stride: int | None, size: int | None
    ) -> tuple[Any, ...]:
        at = _number(name, "a")
        return (Load(at, index) if gather is None else Load(at, index, gather, stride or 0, size or 0),)

    def constant(self, dtype: torch.dtype, literal: str) -> tuple[Any, ...]:
        if dtype == BOOL:
            return (Constant({"true": True, "false": False}[literal], dtype),)
        return (Constant(float(literal) if dtype in FLOATS else int(literal), dtype),)

    def position(self, dim: int) -> tuple[Any, ...]:
        return (Position(dim),)

    def store(self, name: str, index: Index, value: int) -> tuple[Any, ...]:
        return (("store", _number(name, "b"), index, value),)

    def reduce(self, name: str, value: int) -> tuple[Any, ...]:
        return (Reduce(str(name), value),)

    def op(self, name: str, dtype: torch.dtype, *args: int) -> tuple[Any, ...]:
        return (Op(str(name), args, dtype),)

    def statement(self, value: int, what: tuple[Any, ...], line: str | None) -> tuple[int, Any, str]:
        return value, what[0], line or ""

    def nest(self, kept: tuple[int, ...], reduced: tuple[int, ...] | None, *statements: Any) -> Any:
        for at, (value, _, _) in enumerate(statements):
            if value != at:
                raise KernelError(f"value %{value} stands where %{at} does")
        return kept, reduced or (), statements

    def kernel(self, name: str, inputs: Any, outputs: Any, *nests: Any) -> Kernel:
        for letter, buffers in (("a", inputs), ("b", outputs)):
            for at, (found, _) in enumerate(buffers):
                if found != f"{letter}{at}":
                    raise KernelError(f"buffer {found} stands where {letter}{at} does")
        count = len(inputs)
        made = []
        for kept, reduced, statements in nests:
            body = tuple(_finished(what, count) for _, what, _ in statements)
            lines = tuple(line for _, _, line in statements)
            made.append(Nest((*kept, *reduced), len(reduced), body, lines if any(lines) else ()))
        return Kernel(str(name), tuple(b for _, b in inputs), tuple(b for _, b in outputs), tuple(made))


def _number(name: str, letter: str) -> int:
    if name[0] != letter:
        raise KernelError(f"{name} is no {'input' if letter == 'a' else 'output'}")
    return int(name[1:])


def _finished(what: Any, inputs: int) -> Statement:
    return Store(inputs + what[1], what[2], what[3]) if isinstance(what, tuple) else what


@cache
def _parser() -> Lark:
    return Lark(_GRAMMAR, start="kernel", parser="lalr", maybe_placeholders=True)


@lru_cache(maxsize=1024)
def parse_kernel(text: str) -> Kernel:
    """A checked kernel from its text. Raises KernelError where the text is no kernel, with the line and column."""
    if len(text) > MOST_CHARACTERS:
        raise KernelError(f"the text of a kernel cannot have {len(text):,} characters")
    try:
        kernel: Kernel = _Build().transform(_parser().parse(text))
    except VisitError as error:
        if isinstance(error.orig_exc, KernelError):
            raise error.orig_exc from None
        raise KernelError(f"no kernel's text: {error.orig_exc}") from None
    except LarkError as error:
        at = f"line {getattr(error, 'line', '?')}, column {getattr(error, 'column', '?')}"
        raise KernelError(f"no kernel's text: unexpected words at {at}") from None
    check_kernel(kernel)
    return kernel
