"""Kernels of the loop IR as Triton: what they compute, in the interpreter, and what they are compiled to."""

from __future__ import annotations

import math
import subprocess
import sys

import pytest
import torch

from monarch.compiler.kernels.triton import schedule
from monarch.compiler.kernels.triton.emit import emit
from monarch.compiler.loops.ir import Kernel
from monarch.compiler.loops.signatures import BOOL, DTYPES, FLOATS, POINTWISE, REDUCTIONS
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.types import DTYPE_NAMES
from tests.compiler.kernels.cases import softmax_text
from tests.compiler.kernels.triton.emitted import check, launch_all


def data(kernel: Kernel, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found = []
    for buffer in kernel.inputs:
        if buffer.dtype.is_floating_point:
            found.append(torch.randn(buffer.shape, generator=generator, dtype=torch.float64).to(buffer.dtype))
        else:
            found.append(
                torch.randint(0, 2 if buffer.dtype == BOOL else 7, buffer.shape, generator=generator).to(buffer.dtype)
            )
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("rows", "columns", "how"),
    [
        (520, 96, "several short rows in one tile"),
        (5, 1000, "a row in one tile, of a length that is no power of two"),
        (3, 40_000, "rows split among programs"),
        (1, 20_000, "nothing kept"),
    ],
)
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_softmax(rows: int, columns: int, how: str, dtype: str) -> None:
    kernel = parse_kernel(softmax_text(rows, columns, dtype))
    check(kernel, data(kernel))


def test_one_function_loops_where_rows_are_long_and_many_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    (launch,) = emit(parse_kernel(softmax_text(200, 20_000))).launches
    assert launch.grid == 200
    assert dict(launch.constants) == {"RBLOCK": 2048}
    monkeypatch.setattr(schedule, "ENOUGH_PROGRAMS", 4)  # fewer rows, for the interpreter
    kernel = parse_kernel(softmax_text(3, 20_000))
    assert [launch.grid for launch in emit(kernel).launches] == [3]
    check(kernel, data(kernel))


def test_few_long_rows_are_split_and_the_parts_are_combined() -> None:
    source = emit(parse_kernel(softmax_text(3, 40_000)))
    assert [launch.grid for launch in source.launches] == [21, 21, 21]
    assert [scratch.numel for scratch in source.scratch] == [21, 21]


REDUCED = """
kernel reduced(a0: {dtype}[{a}, {b}, {c}]) -> (b0: {dtype}[{shape}])
nest [{kept} | {reduced}] {{
  %0 = load a0 [{strides}]
  %1 = reduce {name} %0
  %2 = store b0 [{out}] %1
}}
"""

SUMMED_OVER = {  # of [a, b, c]: the kept dims, the reduced ones, and the input's strides along them
    "the last": lambda a, b, c: ([a, b], [c], [b * c, c, 1]),
    "the first": lambda a, b, c: ([b, c], [a], [c, 1, b * c]),
    "the middle": lambda a, b, c: ([a, c], [b], [b * c, 1, c]),
    "the outer two": lambda a, b, c: ([c], [a, b], [1, b * c, c]),
    "the first and last": lambda a, b, c: ([b], [a, c], [c, b * c, 1]),
    "all": lambda a, b, c: ([], [a, b, c], [b * c, c, 1]),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("over", SUMMED_OVER)
@pytest.mark.parametrize("shape", [(4, 5, 6), (3, 64, 40), (40, 3, 700), (700, 2, 33), (1, 7, 1), (2, 1, 20_000)])
def test_sums_over_each_choice_of_dims(over: str, shape: tuple[int, int, int]) -> None:
    kept, reduced, strides = SUMMED_OVER[over](*shape)
    check_reduction("sum", "f32", shape, kept, reduced, strides)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("columns", [37, 20_001])
def test_each_reduction_of_each_dtype(name: str, columns: int) -> None:
    for dtype in REDUCTIONS[name]:
        check_reduction(name, DTYPE_NAMES[dtype], (2, 3, columns), [2, 3], [columns], [3 * columns, columns, 1])


def check_reduction(
    name: str, dtype: str, shape: tuple[int, int, int], kept: list[int], reduced: list[int], strides: list[int]
) -> None:
    out = [math.prod(kept[at + 1 :]) for at in range(len(kept))] + [0] * len(reduced)
    text = REDUCED.format(
        dtype=dtype,
        name=name,
        **dict(zip("abc", shape, strict=True)),
        shape=", ".join(map(str, kept)),
        kept=", ".join(map(str, kept)),
        reduced=", ".join(map(str, reduced)),
        strides=", ".join(map(str, strides)),
        out=", ".join(map(str, out)),
    )
    kernel = parse_kernel(text)
    (operand,) = data(kernel)
    if name == "prod" and operand.is_floating_point():
        operand = 1 + operand / 1000
    if name in ("any", "all"):  # rows of each kind
        operand = torch.full_like(operand, name == "all")
        operand[0, 1, -1] = name == "any"
    check(kernel, [operand], atol=1e-6 * max(operand.numel(), 1) ** 0.5)
    if operand.is_floating_point() and name in ("max", "min"):
        operand[1, 2, 3] = math.nan
        (found,), _ = launch_all(kernel, [operand])
        assert found.isnan().sum() == 1


POINT = """
kernel point({inputs}) -> (b0: {to}[{n}])
nest [{n}] {{
{loads}
  %{last} = {name} {to}({args})
  %{end} = store b0 [1] %{last}
}}
"""


def pointwise(name: str, dtypes: list[torch.dtype], to: torch.dtype, n: int = 300) -> Kernel:
    count = len(dtypes)
    return parse_kernel(
        POINT.format(
            inputs=", ".join(f"a{at}: {DTYPE_NAMES[dtype]}[{n}]" for at, dtype in enumerate(dtypes)),
            to=DTYPE_NAMES[to],
            loads="\n".join(f"  %{at} = load a{at} [1]" for at in range(count)),
            name=name,
            args=", ".join(f"%{at}" for at in range(count)),
            last=count,
            end=count + 1,
            n=n,
        )
    )


@pytest.mark.parametrize("name", [name for name in POINTWISE if name != "cast"])
def test_each_pointwise_op_of_each_dtype(name: str) -> None:
    signature = POINTWISE[name]
    for dtype in signature.dtypes:
        dtypes = [dtype] * signature.operands
        if name == "where":
            dtypes[0] = BOOL
        kernel = pointwise(name, dtypes, BOOL if signature.gives_bool else dtype)
        operands = data(kernel)
        if dtype in FLOATS:
            if name in ("log", "sqrt", "rsqrt", "pow", "log1p"):
                operands[0] = operands[0].abs()
            special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 0.5, 1.5, -2.5], dtype=dtype)
            for at, operand in enumerate(operands):
                if operand.dtype == dtype:
                    operand[:64] = special.repeat_interleave(8) if at % 2 else special.repeat(8)
        check(kernel, operands)


@pytest.mark.parametrize("of", DTYPES, ids=DTYPE_NAMES.get)
def test_each_cast(of: torch.dtype) -> None:
    for to in DTYPES:
        kernel = pointwise("cast", [of], to)
        (operand,) = data(kernel)
        if of.is_floating_point:
            operand = operand * 20 if of != to else operand
            operand = operand.abs() if to == torch.uint8 else operand
        check(kernel, [operand])


LAYOUTS = """
kernel layouts(a0: f32[{a}, {b}], a1: f32[{b}], a2: f32[{b}, {a}], a3: f32[]) -> (b0: f32[{a}, {b}], b1: f32[{b}, {a}])
nest [{a}, {b}] {{
  %0 = load a0 [{b}, 1]
  %1 = load a1 [0, 1]
  %2 = load a2 [1, {a}]
  %3 = load a3 [0, 0]
  %4 = add f32(%0, %1)
  %5 = mul f32(%4, %2)
  %6 = add f32(%5, %3)
  %7 = store b0 [{b}, 1] %6
  %8 = store b1 [1, {a}] %4
}}
"""


@pytest.mark.parametrize(("a", "b"), [(3, 5), (64, 64), (100, 130), (1, 33), (200, 1), (6, 600)])
def test_broadcast_and_transposed(a: int, b: int) -> None:
    kernel = parse_kernel(LAYOUTS.format(a=a, b=b))
    check(kernel, data(kernel))


def test_dims_that_cannot_be_joined_are_found_by_division() -> None:
    kernel = parse_kernel("""
        kernel heads(a0: f32[4, 10, 3, 8], a1: f32[4, 30, 8] strides [500, 10, 1]) -> (b0: f32[4, 3, 10, 8])
        nest [4, 3, 10, 8] {
          %0 = load a0 [240, 8, 24, 1]
          %1 = load a1 [500, 10, 30, 1]
          %2 = add f32(%0, %1)
          %3 = store b0 [240, 80, 8, 1] %2
        }
    """)
    check(kernel, data(kernel))
    assert "//" in emit(kernel).text


def test_what_is_stored_from_fewer_dims_is_stored_once() -> None:
    outputs = "b0: f32[700], b1: f32[700, 30], b2: f32[30], b3: f32[]"
    kernel = parse_kernel(f"""
        kernel fewer(a0: f32[700], a1: f32[700, 30], a2: f32[30]) -> ({outputs})
        nest [700, 30] {{
          %0 = load a0 [1, 0]
          %1 = exp f32(%0)
          %2 = store b0 [1, 0] %1
          %3 = load a1 [30, 1]
          %4 = mul f32(%3, %1)
          %5 = store b1 [30, 1] %4
          %6 = load a2 [0, 1]
          %7 = neg f32(%6)
          %8 = store b2 [0, 1] %7
          %9 = constant f32 2.5
          %10 = store b3 [0, 0] %9
        }}
    """)
    check(kernel, data(kernel))


GATHER = """
kernel embed(a0: i64[40], a1: f32[100, 24]) -> (b0: f32[40, 24])
nest [40, 24] {
  %0 = load a0 [1, 0]
  %1 = load a1 [0, 1] gather %0 * 24 of 100  # train.py:7
  %2 = store b0 [24, 1] %1
}
"""


def test_gather() -> None:
    kernel = parse_kernel(GATHER)
    check(kernel, [torch.randint(0, 100, (40,)), torch.randn(100, 24)])


@pytest.mark.parametrize("wrong", [-1, 100, 2**40])
def test_a_gather_out_of_range_touches_nothing_and_is_reported(wrong: int) -> None:
    kernel = parse_kernel(GATHER)
    rows = torch.randint(0, 100, (40,))
    rows[17] = wrong
    table = torch.randn(100, 24)
    (found,), error = launch_all(kernel, [rows, table])
    assert emit(kernel).gathers[error - 1] == "train.py:7: an index is out of range: there are 100 rows"
    right = [at for at in range(40) if at != 17]
    assert torch.equal(found[right], table[rows[right]])


def test_cross_entropy_gathers_within_a_reduction() -> None:
    kernel = parse_kernel("""
        kernel loss(a0: bf16[30, 500], a1: i64[30]) -> (b0: f32[])
        nest [ | 30] {
          %0 = load a1 [1]
          %1 = load a0 [500] gather %0 * 1 of 500
          %2 = cast f32(%1)
          %3 = reduce sum %2
          %4 = store b0 [0] %3
        }
    """)
    check(kernel, [torch.randn(30, 500).bfloat16(), torch.randint(0, 500, (30,))])


def test_random_numbers_are_exact_64_bit_arithmetic() -> None:
    kernel = parse_kernel("""
        kernel random(a0: i64[]) -> (b0: f32[7, 300], b1: i64[7, 300])
        nest [7, 300] {
          %0 = load a0 [0, 0]
          %1 = position 0
          %2 = position 1
          %3 = constant i64 300
          %4 = mul i64(%1, %3)
          %5 = add i64(%4, %2)
          %6 = xor i64(%5, %0)
          %7 = constant i64 -7046029254386353131
          %8 = mul i64(%6, %7)
          %9 = constant i64 29
          %10 = shr i64(%8, %9)
          %11 = xor i64(%8, %10)
          %12 = constant i64 16777215
          %13 = and i64(%11, %12)
          %14 = cast f32(%13)
          %15 = constant f32 5.9604644775390625e-08
          %16 = mul f32(%14, %15)
          %17 = store b0 [300, 1] %16
          %18 = store b1 [300, 1] %11
        }
    """)
    check(kernel, [torch.tensor(2**61 + 12345)])


def test_reductions_of_what_does_not_vary() -> None:
    kernel = parse_kernel("""
        kernel still(a0: f32[5], a1: i64[]) -> (b0: f32[5], b1: f32[5], b2: i64[], b3: f32[5])
        nest [5 | 2, 3] {
          %0 = load a0 [1, 0, 0]
          %1 = reduce sum %0
          %2 = store b0 [1, 0, 0] %1
          %3 = reduce prod %0
          %4 = store b1 [1, 0, 0] %3
          %5 = load a1 [0, 0, 0]
          %6 = reduce sum %5
          %7 = store b2 [0, 0, 0] %6
          %8 = reduce max %0
          %9 = store b3 [1, 0, 0] %8
        }
    """)
    check(kernel, data(kernel))


def test_scalars() -> None:
    kernel = parse_kernel("""
        kernel scalars(a0: f32[], a1: i64[]) -> (b0: f32[], b1: bool[])
        nest [] {
          %0 = load a0 []
          %1 = constant f32 0.9
          %2 = pow f32(%1, %0)
          %3 = constant f32 1.0
          %4 = sub f32(%3, %2)
          %5 = store b0 [] %4
          %6 = load a1 []
          %7 = constant i64 0
          %8 = gt bool(%6, %7)
          %9 = store b1 [] %8
        }
    """)
    check(kernel, data(kernel))


def adamw(sizes: list[int]) -> Kernel:
    """Equal nests, one for each parameter; they share the learning rate."""
    count = len(sizes)
    inputs = [f"a{4 * at + part}: f32[{size}]" for at, size in enumerate(sizes) for part in range(4)] + [
        f"a{4 * count}: f32[]"
    ]
    outputs = [f"b{3 * at + part}: f32[{size}]" for at, size in enumerate(sizes) for part in range(3)]
    nests = [
        f"""nest [{size}] {{
          %0 = load a{4 * at} [1]
          %1 = load a{4 * at + 1} [1]
          %2 = load a{4 * at + 2} [1]
          %3 = load a{4 * at + 3} [1]
          %4 = load a{4 * count} [0]
          %5 = constant f32 0.9
          %6 = mul f32(%2, %5)
          %7 = constant f32 0.1
          %8 = mul f32(%1, %7)
          %9 = add f32(%6, %8)
          %10 = mul f32(%1, %1)
          %11 = constant f32 0.999
          %12 = mul f32(%3, %11)
          %13 = constant f32 0.001
          %14 = mul f32(%10, %13)
          %15 = add f32(%12, %14)
          %16 = abs f32(%15)
          %17 = sqrt f32(%16)
          %18 = constant f32 1e-08
          %19 = add f32(%17, %18)
          %20 = div f32(%9, %19)
          %21 = mul f32(%20, %4)
          %22 = sub f32(%0, %21)
          %23 = store b{3 * at} [1] %22
          %24 = store b{3 * at + 1} [1] %9
          %25 = store b{3 * at + 2} [1] %15
        }}"""
        for at, size in enumerate(sizes)
    ]
    return parse_kernel(f"kernel adamw({', '.join(inputs)}) -> ({', '.join(outputs)})\n" + "\n".join(nests))


def test_many_updates_are_one_launch() -> None:
    kernel = adamw([700, 2, 1024, 33, 2000])
    source = emit(kernel)
    assert [launch.grid for launch in source.launches] == [2 + 1 + 2 + 1 + 4]
    check(kernel, data(kernel))


def test_updates_in_place() -> None:
    kernel = adamw([700, 100])
    check(kernel, data(kernel), (0, 2, 3, 4, 6, 7))


def test_equal_nests_with_a_reduction_are_one_function_also_where_it_is_split() -> None:
    def norms(columns: int, rows: list[int]) -> Kernel:
        inputs = ", ".join(f"a{at}: f32[{row}, {columns}]" for at, row in enumerate(rows))
        outputs = ", ".join(f"b{at}: f32[{row}]" for at, row in enumerate(rows))
        return parse_kernel(
            f"kernel norms({inputs}) -> ({outputs})\n"
            + "\n".join(
                f"""nest [{row} | {columns}] {{
              %0 = load a{at} [{columns}, 1]
              %1 = mul f32(%0, %0)
              %2 = reduce sum %1
              %3 = sqrt f32(%2)
              %4 = store b{at} [1, 0] %3
            }}"""
                for at, row in enumerate(rows)
            )
        )

    short = norms(300, [4, 4, 4])
    assert [launch.grid for launch in emit(short).launches] == [12]
    check(short, data(short))
    long = norms(20_000, [2, 2, 3])
    assert len(emit(long).launches) == 4
    check(long, data(long))


@pytest.mark.parametrize(
    ("sizes", "launches"),
    [([5000, 8000, 300], [3]), ([70_000, 8000, 1, 300, 41_000], [12 + 2 + 1 + 7, 4, 1]), ([500, 500], [2])],
)
def test_norms_of_many_tensors_are_one_function(sizes: list[int], launches: list[int]) -> None:
    inputs = ", ".join(f"a{at}: f32[{size}]" for at, size in enumerate(sizes))
    outputs = ", ".join(f"b{at}: f32[]" for at in range(len(sizes)))
    nests = [
        f"""nest [ | {size}] {{
          %0 = load a{at} [1]
          %1 = mul f32(%0, %0)
          %2 = reduce sum %1
          %3 = sqrt f32(%2)
          %4 = store b{at} [0] %3
        }}"""
        for at, size in enumerate(sizes)
        if size > 1
    ]
    nests += [f"nest [] {{\n%0 = load a{at} []\n%1 = store b{at} [] %0\n}}" for at, n in enumerate(sizes) if n == 1]
    kernel = parse_kernel(f"kernel norms({inputs}) -> ({outputs})\n" + "\n".join(nests))
    assert [launch.grid for launch in emit(kernel).launches] == launches
    check(kernel, data(kernel))


def test_a_loop_over_sizes_that_differ_and_what_is_stored_from_it() -> None:
    kernel = parse_kernel(
        "kernel scaled(a0: f32[50000], a1: f32[9000]) -> (b0: f32[50000], b1: f32[9000])\n"
        + "\n".join(
            f"""nest [ | {size}] {{
              %0 = load a{at} [1]
              %1 = reduce max %0
              %2 = div f32(%0, %1)
              %3 = store b{at} [1] %2
            }}"""
            for at, size in enumerate((50_000, 9000))
        )
    )
    assert [launch.grid for launch in emit(kernel).launches] == [9 + 2, 9 + 2]
    check(kernel, data(kernel))


def test_arithmetic_is_in_64_bits_only_where_it_must_be() -> None:
    def copy(n: int) -> str:
        return emit(
            parse_kernel(
                f"kernel k(a0: i8[{n}]) -> (b0: i8[{n}])\nnest [{n}] {{\n%0 = load a0 [1]\n%1 = store b0 [1] %0\n}}"
            )
        ).text

    assert "int64" not in copy(2**30)
    assert "int64" in copy(2**31)


def test_the_text_is_the_same_in_another_process() -> None:
    source = emit(parse_kernel(softmax_text(3, 40_000, "bf16")))
    script = (
        "import sys\n"
        "from monarch.compiler.loops.text import parse_kernel\n"
        "from monarch.compiler.kernels.triton.emit import emit\n"
        "print(emit(parse_kernel(sys.stdin.read())).sha256, 'triton' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        input=softmax_text(3, 40_000, "bf16"),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert done.stdout.split() == [source.sha256, "False"]


def test_lines_are_comments_that_nothing_escapes_from() -> None:
    kernel = parse_kernel(GATHER)
    (nest,) = kernel.nests
    from dataclasses import replace

    hostile = replace(kernel, nests=(replace(nest, lines=("", "a\rimport os\x0cexit()", "b.py:2")),))
    text = emit(hostile, lines=True).text
    assert "# a?import os?exit()" in text
    assert "# b.py:2" in text
    assert "\r" not in text
    assert emit(hostile).text == emit(kernel).text
