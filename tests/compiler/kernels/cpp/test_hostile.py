"""Texts that were meant to be kernels: refused with KernelError, or kernels that stay within their buffers.

What is accepted is built with the address and undefined-behaviour sanitizers into a program that gives each buffer
exactly the memory that the IR says, and runs it.
"""

from __future__ import annotations

import math
import random
import re
import subprocess
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.kernels.cpp.build import find_compiler
from monarch.compiler.kernels.cpp.emit import emit, symbol
from monarch.compiler.loops.ir import Buffer, Kernel, KernelError
from monarch.compiler.loops.signatures import BOOL
from monarch.compiler.loops.text import parse_kernel, print_kernel
from tests.compiler.kernels.cases import cases, sums
from tests.compiler.kernels.strategies import kernels
from tests.sample import is_full

_NUMBERS = ("0", "1", "2", "3", "7", "64", "1000", "999999999999999999", "-1")
_WORDS = (
    "f64 f32 f16 bf16 i64 i32 i16 i8 u8 bool add mul exp where cast fma eq shl sum max any load store constant "
    "position reduce accumulate gather of nest kernel a0 a1 b0 b1 a9 %0 %1 %3 %9 %99999 true inf nan 1.5 -> ( ) "
    "[ ] { } | , + * = : #"
).split()


def mutated(text: str, chance: random.Random) -> str:
    """The text with a few words exchanged, taken away, doubled, or lines of it in another order."""
    for _ in range(chance.choice((1, 1, 1, 2, 4))):
        words = [match.span() for match in re.finditer(r"%?\w+|[^\s\w]", text)]
        start, end = chance.choice(words)
        match chance.randrange(6):
            case 0:
                text = text[:start] + text[end:]
            case 1:
                text = text[:end] + " " + text[start:end] + text[end:]
            case 2:
                other, stop = chance.choice(words)
                text = text[:start] + text[other:stop] + text[end:]
            case 3:
                lines = text.split("\n")
                lines.insert(chance.randrange(len(lines)), lines.pop(chance.randrange(len(lines))))
                text = "\n".join(lines)
            case _:
                pool = _NUMBERS if text[start:end].isdigit() else _WORDS
                text = text[:start] + chance.choice(pool) + text[end:]
    return text


@given(st.integers(0, 2**32))
def test_a_mangled_text_is_refused_or_a_kernel(seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(20):
        text = print_kernel(chance.choice((*cases(), *sums() * 10)).kernel)
        mangled = mutated(text, chance)
        try:
            kernel = parse_kernel(mangled)
        except KernelError:
            continue
        assert parse_kernel(print_kernel(kernel)) == kernel


@given(kernels(sums=True))
def test_a_kernel_is_read_back_from_its_text(kernel: Kernel) -> None:
    assert parse_kernel(print_kernel(kernel)) == kernel


MAIN = r"""
#include <cstdio>
#include <cstdlib>
#include <cstring>
static void* filled(size_t bytes, int kind) {
    unsigned char* memory = (unsigned char*)malloc(bytes);
    for (size_t i = 0; i < bytes; ++i) memory[i] = kind == 0 ? 0 : kind == 1 ? rand() & 1 : rand();
    return memory;
}
"""


def program(accepted: list[Kernel]) -> str:
    """A C++ program that runs each kernel on operands of zeros, of whole numbers and of noise, by one thread and
    three."""
    calls = []
    for kernel in accepted:
        buffers = (*kernel.inputs, *kernel.outputs)
        for noise in (0, 2):
            for threads in (1, 3):
                places = ", ".join(_filled(buffer, noise) for buffer in buffers)
                calls.append(f"    {{ void* p[] = {{{places}}}; {symbol(kernel)}(p, {threads}, nullptr);")
                calls.append(f"      for (int i = 0; i < {len(buffers)}; ++i) free(p[i]); }}")
    return emit(accepted) + MAIN + "int main() {\n" + "\n".join(calls) + '\n    puts("done");\n}\n'


def _filled(buffer: Buffer, noise: int) -> str:
    bools = min(noise, 1)  # anything else than 0 and 1 is no bool
    return f"filled({buffer.extent * buffer.dtype.itemsize}, {bools if buffer.dtype == BOOL else noise})"


def small(kernel: Kernel) -> bool:
    return sum(math.prod(nest.dims) * len(nest.body) for nest in kernel.nests) < 1 << 20 and all(
        buffer.extent < 1 << 20 for buffer in (*kernel.inputs, *kernel.outputs)
    )


def test_what_is_accepted_stays_within_its_buffers(tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        pytest.skip("no C++ compiler: neither g++ nor clang++ is on the path")
    chance = random.Random(5)
    base = [case.kernel for case in (*cases(), *sums()) if small(case.kernel)]
    accepted: dict[str, Kernel] = {}
    # Of those written out, and of mangled ones that are still kernels, whose indices go where theirs did not.
    for kernel in (*chance.sample(base, 30), *(case.kernel for case in sums())):
        accepted[symbol(kernel)] = kernel
    while len(accepted) < (100 if is_full() else 60):
        try:
            kernel = parse_kernel(mutated(print_kernel(chance.choice(base)), chance))
        except KernelError:
            continue
        if small(kernel):
            accepted[symbol(kernel)] = kernel
    source, made = tmp_path / "kernels.cpp", tmp_path / "kernels"
    source.write_text(program(list(accepted.values())))
    flags = "-std=c++17 -O1 -g0 -march=native -fopenmp-simd -fwrapv -fsanitize=address,undefined -fno-sanitize-recover"
    built = subprocess.run(
        [compiler.path, *flags.split(), "-fno-sanitize=float-cast-overflow", "-o", made, source],
        capture_output=True,
        text=True,
        timeout=150,
    )
    if built.returncode and "asan" in built.stderr:
        pytest.skip("the compiler has no address sanitizer")
    assert built.returncode == 0, built.stderr[:3000]
    ran = subprocess.run([made], capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and ran.stdout == "done\n", ran.stderr[:3000]


SUMS = """
kernel sums(a0: f32[6, 8], a1: bool[6, 8]) -> (b0: f32[8], b1: f32[6])
nest [6 | 8] {
  %0 = load a0 [8, 1]
  %1 = load a1 [8, 1]
  %2 = reduce sum %0
  %3 = store b1 [1, 0] %2
  %4 = accumulate sum b0 [0, 1] %0
}
"""


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("b0 [0, 1] %0", "b0 [1, 0] %0", "does not move along a reduced dim"),
        ("b0 [0, 1] %0", "b0 [0, 0] %0", "does not move along a reduced dim"),
        ("f32[8], b1", "f32[9], b1", "does not store all 9 elements"),
        ("b0 [0, 1] %0", "b0 [0, 2] %0", "reaches element 14 of 8"),
        ("b0 [0, 1] %0", "b0 [0, 1] + 1 %0", "reaches element 8 of 8"),
        ("b0 [0, 1] %0", "b0 [1, 1] %0", "reaches element 12 of 8"),
        ("b0 [0, 1] %0", "b0 [0, 1] %1", "a value of another dtype"),
        ("b0 [0, 1] %0", "b0 [0, 1] %3", "%3 is a store, which has no value"),
        ("b0 [0, 1] %0", "b1 [0, 1] %0", "output 1 is stored a second time"),
        ("b1 [1, 0] %2", "b1 [1, 0] %4", "there is no value %4 before it"),
        ("store b1 [1, 0] %2", "accumulate sum b1 [1, 0] %2", "does not move along a reduced dim"),
        ("accumulate sum", "accumulate max", "is no statement"),
        ("accumulate sum", "accumulate", "is no statement"),
    ],
)
def test_a_wrong_sum_is_refused(right: str, wrong: str, message: str) -> None:
    assert right in SUMS and parse_kernel(SUMS)
    with pytest.raises(KernelError, match=re.escape(message)):
        parse_kernel(SUMS.replace(right, wrong))


def test_no_bools_are_added_up() -> None:
    text = SUMS.replace("f32[8],", "bool[8],").replace("b0 [0, 1] %0", "b0 [0, 1] %1")
    with pytest.raises(KernelError, match="there is no sum of bool"):
        parse_kernel(text)


def test_many_statements_take_no_more_stack_than_there_is() -> None:
    """Each reduction over columns has an array on the stack; of many, none has."""
    body = ["%0 = load a0 [1, 40]"]
    for at in range(1, 3000, 2):
        body += [f"%{at} = reduce sum %{at - 1}", f"%{at + 1} = mul f32(%0, %{at})"]
    body.append(f"%{len(body)} = store b0 [1, 40] %{len(body) - 1}")
    text = "kernel many(a0: f32[30, 40]) -> (b0: f32[30, 40])\nnest [40 | 30] {\n" + "\n".join(body) + "\n}\n"
    source = emit([parse_kernel(text)])
    arrays = [int(size) for size in re.findall(r"alignas\(64\) \w+ \w+\[(\d+)\];", source)]
    assert 4 * sum(arrays) <= 1 << 20
    assert torch.float32.itemsize == 4
