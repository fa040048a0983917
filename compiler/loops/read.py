"""Kernels from their text."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NoReturn

from monarch.compiler.loops.ir import (
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

MOST_CHARACTERS = 16_000_000

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


class Reader:
    """Reads a kernel's text, whose dtypes are those of `dtypes` by their names: without torch, as long as these are.
    Raises KernelError where it is none; `check_kernel` checks its meaning."""

    def __init__(self, text: str, dtypes: Mapping[str, Any]) -> None:
        if len(text) > MOST_CHARACTERS:
            raise KernelError(f"the text of a kernel cannot have {len(text):,} characters")
        self.dtypes = dtypes
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
            return self.constant(match[1], match[2])
        if match := _STORE.fullmatch(text):
            index = Index(int(match[4] or 0), self.numbers(match[3]))
            return Store(self.inputs + int(match[2]), index, int(match[5]), match[1] != "store")
        if match := _REDUCE.fullmatch(text):
            return Reduce(match[1], int(match[2]))
        if match := _POSITION.fullmatch(text):
            return Position(int(match[1]))
        self.fail(f"{text!a:.60} is no statement")

    def constant(self, name: str, literal: str) -> Constant:
        dtype = self.dtype(name)
        try:
            if name == "bool":
                return Constant({"true": True, "false": False}[literal], dtype)
            return Constant(float(literal) if name in ("f32", "f64") else int(literal), dtype)
        except (KeyError, ValueError):
            self.fail(f"{literal} is no constant of {name}")

    def dtype(self, name: str) -> Any:
        if name not in self.dtypes:
            self.fail(f"there is no dtype {name}")
        return self.dtypes[name]

    def numbers(self, text: str) -> tuple[int, ...]:
        if not text:
            return ()
        if not _LIST.fullmatch(text):
            self.fail(f"[{text:.60}] is no list of numbers")
        return tuple([int(number) for number in text.split(", ")])
