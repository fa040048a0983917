"""Matrix products with what is computed from them as one kernel: which, and that the program computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from monarch.compiler.context import Context
from monarch.compiler.graph import Graph
from monarch.compiler.kernels.products import FuseProducts
from monarch.compiler.loops.contraction import contraction
from monarch.compiler.loops.ir import Kernel
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.text import parse_graph
from monarch.compiler.verify import verify
from tests.compiler.kernels.graphs import fused, graph_of, kernels_of, others_of, run

aten = torch.ops.aten


def joined(graph: Graph, when: str = "all", target: str = "cuda:90", rounding: str = "eager") -> Graph:
    options = CompileOptions(target=target, rounding=rounding, kernels="all")
    graph = FuseProducts().run(fused(graph, rounding=rounding), Context(options, templates=when))
    verify(graph, after="fuse-products")
    return graph


def product_of(graph: Graph) -> Kernel:
    """The only kernel with a matrix product."""
    (found,) = (kernel for kernel in kernels_of(graph) if any(contraction(nest) for nest in kernel.nests))
    return found


def test_the_rewrite_as_text() -> None:
    graph = parse_graph("""graph @f on mesh<> {
  %x = input 0 : bf16[64, 32]
  %w = input 1 : bf16[128, 32]
  %t = aten.t(%w) : bf16[32, 128]
  %h = aten.mm(%x, %t) : bf16[64, 128]  # train.py:3
  %v = aten.view(%h, [2, 32, 128]) : bf16[2, 32, 128]
  %y = aten.relu(%v) : bf16[2, 32, 128]  # train.py:4
  return %y
}""")
    made = joined(graph)
    text = """kernel mm_relu(a0: bf16[64, 32], a1: bf16[32, 128] strides [1, 32]) -> (b0: bf16[2, 32, 128])
nest [64, 128 | 32] {
  %0 = load a0 [32, 0, 1]  # train.py:3
  %1 = cast f32(%0)  # train.py:3
  %2 = load a1 [0, 32, 1]  # train.py:3
  %3 = cast f32(%2)  # train.py:3
  %4 = mul f32(%1, %3)  # train.py:3
  %5 = reduce sum %4  # train.py:3
  %6 = cast bf16(%5)  # train.py:3
  %7 = cast f32(%6)  # train.py:3
"""
    kernel = product_of(made)
    assert str(kernel)[: len(text)] == text
    assert [node.name for node in made.calls] == ["t", "mm_relu_kernel", "y"]
    assert str(parse_graph(str(made))) == str(made)
    assert parse_kernel(str(kernel)) == kernel


def test_a_value_that_others_read_is_stored_too() -> None:
    graph = joined(graph_of(lambda x, w: (F.gelu(h := x @ w), h @ h.mT), torch.randn(32, 64), torch.randn(64, 48)))
    assert len(product_of(graph).outputs) == 2
    assert others_of(graph) == ["aten.mm"]


def test_of_several_products_the_last_takes_in_what_reads_them() -> None:
    """The others' factors would have to be kept until then."""
    tensors = tensors_of(((48, 32), (32, 80), (48, 64), (64, 80)), torch.float32)
    graph = graph_of(lambda x, w, y, v: (x @ w).relu() + (y @ v).relu(), *tensors)
    made = joined(graph)
    assert others_of(made) == ["aten.mm"]
    assert [buffer.shape for buffer in product_of(made).inputs] == [(48, 64), (64, 80), (48, 80)]
    torch.testing.assert_close(run(made, *tensors), run(graph, *tensors))


CASES: dict[str, tuple[Callable[..., object], tuple[tuple[int, ...], ...]]] = {
    "gelu": (lambda x, w: F.gelu(x @ w), ((48, 32), (32, 80))),
    "bias": (lambda x, w, b: torch.tanh(F.linear(x, w, b)), ((48, 32), (80, 32), (80,))),
    "bias of one row": (lambda x, w, b: torch.addmm(b, x, w).sigmoid(), ((48, 32), (32, 80), (1, 80))),
    "bias of one column": (lambda x, w, b: torch.addmm(b, x, w).sigmoid(), ((48, 32), (32, 80), (48, 1))),
    "residual": (lambda x, w, r: F.silu(x @ w) * 0.5 + r, ((48, 32), (32, 80), (48, 80))),
    "gate": (lambda x, w, g: F.silu(x @ w) * g[:, None], ((48, 32), (32, 80), (48,))),
    "of three dims": (lambda x, w, r: F.gelu(x @ w) + r, ((3, 16, 32), (32, 80), (16, 80))),
    "heads": (lambda x, w: (x @ w).view(4, 16, 5, 16).permute(0, 2, 1, 3).contiguous() * 2, ((64, 32), (32, 80))),
    "transposed": (lambda x, w: (x @ w).t().contiguous().exp(), ((48, 32), (32, 80))),
    "batch": (lambda x, w: torch.bmm(x, w).relu() + 1, ((3, 48, 32), (3, 32, 80))),
    "a batch of transposes": (lambda x, w: torch.bmm(x.mT, w.mT).relu(), ((3, 32, 48), (3, 80, 32))),
    "its own factor": (lambda x, w: x @ w + x, ((48, 48), (48, 48))),
    "two results": (lambda x, w: ((h := x @ w).relu(), h.cos()), ((48, 32), (32, 80))),
    "the slope": (lambda x, w, h: aten.gelu_backward(x @ w, h), ((48, 32), (32, 80), (48, 80))),
    "sizes of no tile": (lambda x, w: (x @ w).exp(), ((37, 45), (45, 51))),
}
"""For each case the function, and the shapes that it takes."""


def tensors_of(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    return [(torch.randn(shape, generator=generator) / 4).to(dtype) for shape in shapes]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("name", CASES)
def test_the_program_computes_the_same(name: str, dtype: torch.dtype) -> None:
    function, shapes = CASES[name]
    tensors = tensors_of(shapes, dtype)
    graph = graph_of(function, *tensors)
    made = joined(graph)
    product_of(made)
    assert not {"aten.mm", "aten.bmm", "aten.addmm"} & set(others_of(made))
    # What is summed in another order may be rounded to the next number.
    tolerance = 2e-2 if dtype == torch.bfloat16 else 2e-6
    for found, wanted in zip(run(made, *tensors), run(graph, *tensors), strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


def test_rounded_once_or_as_eager_does() -> None:
    tensors = tensors_of(((48, 32), (32, 80)), torch.bfloat16)
    graph = graph_of(lambda x, w: (x @ w).sin().sin(), *tensors)
    eager, chain = (str(product_of(joined(graph, rounding=each))).count("cast bf16") for each in ("eager", "chain"))
    assert eager > chain
    assert "sin f32(%5)" in str(product_of(joined(graph, rounding="chain")))


BEFORE: dict[str, tuple[Callable[..., object], tuple[tuple[torch.dtype, tuple[int, ...]], ...]]] = {
    "a cast weight": (
        lambda x, w: F.gelu(x @ w.to(torch.bfloat16)),
        ((torch.bfloat16, (48, 32)), (torch.float32, (32, 80))),
    ),
    "a cast weight, transposed": (
        lambda x, w: F.linear(x, w.to(torch.bfloat16)).relu(),
        ((torch.bfloat16, (48, 32)), (torch.float32, (80, 32))),
    ),
    "nothing after it": (
        lambda x, w: x @ w.to(torch.bfloat16),
        ((torch.bfloat16, (37, 45)), (torch.float32, (45, 51))),
    ),
    "whole numbers with a scale for each column": (
        lambda x, w, s: (x @ (w.to(torch.bfloat16) * s)).relu(),
        ((torch.bfloat16, (48, 32)), (torch.int8, (32, 80)), (torch.bfloat16, (80,))),
    ),
    "whole numbers with a scale for each row": (
        lambda x, w, s: torch.addmm(x[0, :1], x, w.t().to(torch.bfloat16) * s[:, None]),
        ((torch.bfloat16, (48, 32)), (torch.int8, (80, 32)), (torch.bfloat16, (32,))),
    ),
    "both factors": (
        lambda x, w: ((x * 0.5 - 1).view(48, 32) @ (w + w)).exp(),
        ((torch.float32, (3, 16, 32)), (torch.float32, (32, 80))),
    ),
    "a batch": (
        lambda x, w: torch.bmm(x.to(torch.float16), w.mT.to(torch.float16)).relu(),
        ((torch.float32, (3, 48, 32)), (torch.float32, (3, 80, 32))),
    ),
}
"""For each case the function, and the dtypes and shapes that it takes."""


def operands_before(name: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(name))
    return [
        torch.randint(-9, 9, shape, generator=generator, dtype=dtype)
        if dtype == torch.int8
        else (torch.randn(shape, generator=generator) / 4).to(dtype)
        for dtype, shape in BEFORE[name][1]
    ]


@pytest.mark.parametrize("name", BEFORE)
def test_what_makes_a_factor_is_computed_where_it_is_read(name: str) -> None:
    tensors = operands_before(name)
    graph = graph_of(BEFORE[name][0], *tensors)
    made = joined(graph)
    product_of(made)
    assert set(others_of(made)) <= {"aten.select", "aten.slice"} and len(kernels_of(made)) == 1
    tolerance = 2e-2 if any(each.itemsize < 4 for each in tensors) or name == "a batch" else 2e-6
    for found, wanted in zip(run(made, *tensors), run(graph, *tensors), strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


KEPT: dict[str, Callable[..., object]] = {
    "two readers": lambda x, w: (x @ (c := w.to(torch.bfloat16)), x @ (c + 1)),
    "dear ops": lambda x, w: x @ w.tanh().to(torch.bfloat16),
    "a part": lambda x, w: x[:, :16] @ w.to(torch.bfloat16)[:16],
}


@pytest.mark.parametrize("name", KEPT)
def test_a_factor_that_is_dear_or_shared_is_made_once(name: str) -> None:
    tensors = operands_before("a cast weight")
    graph = joined(graph_of(KEPT[name], *tensors))
    assert len(others_of(graph)) + len(kernels_of(graph)) > 1


LEFT: dict[str, tuple[Callable[..., object], tuple[tuple[int, ...], ...]]] = {
    "nothing after it": (lambda x, w: x @ w, ((48, 32), (32, 80))),
    "a reduction after it": (lambda x, w: (x @ w).softmax(-1), ((48, 32), (32, 80))),
    "another product after it": (lambda x, w: (x @ w) @ w.mT, ((48, 32), (32, 80))),
    "read by an op before its kernel": (lambda x, w: ((h := x @ w) @ w.mT).sum() * h.exp(), ((48, 32), (32, 80))),
    "few rows": (lambda x, w: (x @ w).exp(), ((8, 32), (32, 80))),
    "a part of it": (lambda x, w: (x @ w)[:, :16].exp(), ((48, 32), (32, 80))),
    "more than it": (lambda x, w, r: x @ w + r, ((48, 32), (32, 80), (5, 48, 80))),
    "scaled by the op itself": (lambda x, w, b: torch.addmm(b, x, w, beta=2).exp(), ((48, 32), (32, 80), (80,))),
}


@pytest.mark.parametrize("name", LEFT)
def test_what_the_template_does_not_take_stays_atens(name: str) -> None:
    function, shapes = LEFT[name]
    graph = joined(graph_of(function, *tensors_of(shapes, torch.float32)))
    assert not any(contraction(nest) for kernel in kernels_of(graph) for nest in kernel.nests)


def test_float64_stays_atens() -> None:
    graph = joined(graph_of(lambda x, w: (x @ w).exp(), *tensors_of(((48, 32), (32, 80)), torch.float64)))
    assert "aten.mm" in others_of(graph)


def test_the_estimate_decides() -> None:
    """Where the product is most of the work the library's own is better; where memory is, one launch is."""

    def products(rows: int, inner: int, when: str, target: str = "cuda:90") -> int:
        graph = parse_graph(f"""graph @f on mesh<> {{
  %x = input 0 : bf16[{rows}, {inner}]
  %w = input 1 : bf16[{inner}, {rows}]
  %h = aten.mm(%x, %w) : bf16[{rows}, {rows}]
  %y = aten.gelu(%h) : bf16[{rows}, {rows}]
  return %y
}}""")
        return "aten.mm" not in others_of(joined(graph, when, target))

    assert products(4096, 256, "auto") and not products(8192, 8192, "auto")
    assert products(8192, 8192, "all") and not products(4096, 256, "off")
    assert products(8192, 1024, "auto", "cuda:80")
    graph = joined(graph_of(lambda x, w: (x @ w).exp(), *tensors_of(((48, 32), (32, 80)), torch.float32)), "auto")
    (reason,) = (node.meta["why"] for node in graph.calls if "why" in node.meta)
    assert "one kernel of aten.mm and exp, in tiles of " in reason and "us estimated, apart " in reason
