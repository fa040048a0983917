"""The text form of kernels, which parses back exactly (the form is shown in `compiler.loops.ir`)."""

from __future__ import annotations

import re
from typing import NoReturn

import torch

from monarch.compiler.alike import Memo
from monarch.compiler.loops.check import check_kernel
from monarch.compiler.loops.ir import (
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
from monarch.compiler.shown import shows_as
from monarch.compiler.types import DTYPE_NAMES, DTYPES

MOST_CHARACTERS = 16_000_000


def print_kernel(kernel: Kernel, *, lines: bool = True) -> str:
    """The kernel as text; without its source lines where `lines` is false, which then says only what it computes."""
    inputs = ", ".join(f"a{i}: {_buffer(buffer)}" for i, buffer in enumerate(kernel.inputs))
    outputs = ", ".join(f"b{i}: {_buffer(buffer)}" for i, buffer in enumerate(kernel.outputs))
    text = [f"{'sized ' if kernel.sized else ''}kernel {kernel.name}({inputs}) -> ({outputs})"]
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
        case Store(buffer, index, value, sums):
            return f"{'accumulate sum' if sums else 'store'} b{buffer - inputs} {_index(index)} %{value}"


# -- back again -------------------------------------------------------------------------------------------------------

# A kernel of an optimizer's updates has thousands of statements, and every worker reads it: one expression a line reads
# them ten times as fast as a parser of tokens.
_NUMBERS = r"\[([\d, ]*)\]"
_HEAD = re.compile(r"(sized )?kernel ([A-Za-z_]\w{0,99})\((.*)\) -> \((.*)\)", re.ASCII)
_BUFFER = re.compile(rf"([ab])(\d{{1,6}}): (\w{{1,8}}){_NUMBERS}(?: strides {_NUMBERS})?", re.ASCII)
_NEST = re.compile(r"nest \[([\d, ]*?)(?: \| ([\d, ]+))?\] \{", re.ASCII)
_LINE = re.compile(r"%(\d{1,6}) = (.*?)(?:  # (.*))?", re.ASCII)
_LOAD = re.compile(
    rf"load a(\d{{1,6}}) {_NUMBERS}(?: \+ (\d{{1,18}}))?(?: gather %(\d{{1,6}}) \* (\d{{1,18}}) of (\d{{1,18}}))?",
    re.ASCII,
)
_STORE = re.compile(rf"(store|accumulate sum) b(\d{{1,6}}) {_NUMBERS}(?: \+ (\d{{1,18}}))? %(\d{{1,6}})", re.ASCII)
_CONSTANT = re.compile(
    r"constant (\w{1,8}) (-?(?:\d+\.\d*(?:e[-+]?\d+)?|\d+e[-+]?\d+|\d+|inf|nan)|true|false)", re.ASCII
)
_POSITION = re.compile(r"position (\d{1,6})", re.ASCII)
_REDUCE = re.compile(r"reduce (\w{1,40}) %(\d{1,6})", re.ASCII)
_OP = re.compile(r"(\w{1,40}) (\w{1,8})\((%\d{1,6}(?:, %\d{1,6})*)\)", re.ASCII)
_LIST = re.compile(r"\d{1,18}(?:, \d{1,18})*", re.ASCII)


_READ: Memo[Kernel] = Memo(1024)


def parse_kernel(text: str) -> Kernel:
    """A checked kernel from its text. Raises KernelError where the text is no kernel, with the line."""
    if (known := _READ.get(text)) is not None:
        return known
    if len(text) > MOST_CHARACTERS:
        raise KernelError(f"the text of a kernel cannot have {len(text):,} characters")
    kernel = _Reader(text).kernel()
    check_kernel(kernel)
    return _READ.keep(text, kernel)


def print_checked(kernel: Kernel) -> str:
    """The text of a kernel that `check_kernel` has let pass: `parse_kernel` need not read it."""
    text = print_kernel(kernel)
    _READ.keep(text, kernel)
    return text


class _Reader:
    def __init__(self, text: str) -> None:
        lines = ((number, line.strip()) for number, line in enumerate(text.split("\n"), 1))
        self.lines = iter([(number, line) for number, line in lines if line])
        self.number = 0
        self.inputs = 0

    def fail(self, message: str) -> NoReturn:
        raise KernelError(f"no kernel's text: line {self.number}: {message}")

    def next(self) -> str | None:
        self.number, line = next(self.lines, (self.number, None))
        return line

    def kernel(self) -> Kernel:
        head = _HEAD.fullmatch(self.next() or "")
        if head is None:
            self.fail("it has to begin with kernel NAME(INPUTS) -> (OUTPUTS)")
        inputs, outputs = self.buffers(head[3], "a"), self.buffers(head[4], "b")
        self.inputs = len(inputs)
        nests = []
        while (line := self.next()) is not None:
            nests.append(self.nest(line))
        return Kernel(head[2], inputs, outputs, tuple(nests), head[1] is not None)

    def buffers(self, text: str, letter: str) -> tuple[Buffer, ...]:
        found = []
        matches = list(_BUFFER.finditer(text))
        if ", ".join(match[0] for match in matches) != text:
            self.fail("its buffers are not a list of such as a0: f32[64, 256]")
        for at, match in enumerate(matches):
            if match[1] != letter or int(match[2]) != at:
                self.fail(f"buffer {match[1]}{match[2]} stands where {letter}{at} does")
            dtype, shape = self.dtype(match[3]), self.numbers(match[4])
            strides = None if match[5] is None else self.numbers(match[5])
            found.append(Buffer.contiguous(dtype, shape) if strides is None else Buffer(dtype, shape, strides))
        return tuple(found)

    def nest(self, line: str) -> Nest:
        head = _NEST.fullmatch(line)
        if head is None:
            self.fail("a nest has to begin with nest [KEPT | REDUCED] {")
        kept = self.numbers(head[1])
        reduced = () if head[2] is None else self.numbers(head[2])
        body: list[Statement] = []
        lines: list[str] = []
        while (text := self.next()) != "}":
            match = None if text is None else _LINE.fullmatch(text)
            if match is None:
                self.fail("a statement is %NUMBER = …, and a nest ends with }")
            if int(match[1]) != len(body):
                self.fail(f"value %{match[1]} stands where %{len(body)} does")
            body.append(self.statement(match[2]))
            lines.append(match[3] or "")
        return Nest((*kept, *reduced), len(reduced), tuple(body), tuple(lines) if any(lines) else ())

    def statement(self, text: str) -> Statement:
        if match := _OP.fullmatch(text):
            args = tuple([int(arg[1:]) for arg in match[3].split(", ")])
            return Op(match[1], args, self.dtype(match[2]))
        if match := _LOAD.fullmatch(text):
            index = Index(int(match[3] or 0), self.numbers(match[2]))
            if match[4] is None:
                return Load(int(match[1]), index)
            return Load(int(match[1]), index, int(match[4]), int(match[5]), int(match[6]))
        if match := _CONSTANT.fullmatch(text):
            return self.constant(self.dtype(match[1]), match[2])
        if match := _STORE.fullmatch(text):
            index = Index(int(match[4] or 0), self.numbers(match[3]))
            return Store(self.inputs + int(match[2]), index, int(match[5]), match[1] != "store")
        if match := _REDUCE.fullmatch(text):
            return Reduce(match[1], int(match[2]))
        if match := _POSITION.fullmatch(text):
            return Position(int(match[1]))
        self.fail(f"{text!a:.60} is no statement")

    def constant(self, dtype: torch.dtype, literal: str) -> Constant:
        try:
            if dtype == BOOL:
                return Constant({"true": True, "false": False}[literal], dtype)
            return Constant(float(literal) if dtype in FLOATS else int(literal), dtype)
        except (KeyError, ValueError):
            self.fail(f"{literal} is no constant of {DTYPE_NAMES[dtype]}")

    def dtype(self, name: str) -> torch.dtype:
        if name not in DTYPES:
            self.fail(f"there is no dtype {name}")
        return DTYPES[name]

    def numbers(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        if not _LIST.fullmatch(text):
            self.fail(f"[{text:.60}] is no list of numbers")
        return tuple([int(number) for number in text.split(", ")])


shows_as(Kernel, print_kernel)
