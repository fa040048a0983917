"""Every op that can be in a kernel, lowered and compared with ATen; and what cannot be, left as it is."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from monarch.compiler.graph import Graph
from monarch.compiler.kernels.lower.values import is_lowered, is_transparent
from monarch.compiler.ops.record import recorded
from monarch.compiler.text import parse_graph
from monarch.compiler.types import DTYPES, MeshSpec, TensorType
from monarch.compiler.verify import verify
from tests.compiler.kernels.graphs import fused, graph_of, kernels_of, others_of, run
from tests.compiler.reference import run_reference

aten = torch.ops.aten


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tight = {torch.float32: 1e-5, torch.bfloat16: 1.6e-2}.get(ours.dtype, 1e-9)
    torch.testing.assert_close(ours, theirs, rtol=tight, atol=tight, equal_nan=True)


def check(function: Callable[..., Any], *tensors: torch.Tensor, kernels: int = 1, left: int = 0) -> None:
    """The function's ops become so many kernels, and `left` are as they were."""
    graph = fused(graph_of(function, *tensors))
    assert len(kernels_of(graph)) == kernels, str(graph)
    assert len(others_of(graph)) == left, str(graph)
    expected = function(*tensors)
    for ours, theirs in zip(
        run(graph, *tensors), expected if isinstance(expected, tuple) else (expected,), strict=True
    ):
        close(ours, theirs)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64).to(dtype)


X, Y = randn(6, 10), randn(6, 10) * 2
P = X.abs() + 0.5
N = torch.tensor([[3, -1, 4], [1, -5, 9]])
B = X > 0

ONE = {
    "exp": aten.exp, "expm1": aten.expm1, "tanh": aten.tanh, "erf": aten.erf, "sin": aten.sin, "cos": aten.cos,
    "sigmoid": aten.sigmoid, "neg": aten.neg, "abs": aten.abs, "sign": aten.sign, "sgn": aten.sgn, "floor": aten.floor,
    "ceil": aten.ceil, "round": aten.round, "trunc": aten.trunc, "relu": aten.relu, "square": aten.square,
    "silu": aten.silu, "gelu": aten.gelu, "isnan": aten.isnan, "clone": aten.clone, "logical_not": aten.logical_not,
    "gelu_tanh": lambda x: aten.gelu(x, approximate="tanh"),
    "clamp": lambda x: aten.clamp(x, -0.5, 0.5), "clamp_low": lambda x: aten.clamp(x, min=0.1),
    "clamp_min": lambda x: aten.clamp_min(x, 0.2), "clamp_max": lambda x: aten.clamp_max(x, 0.2),
    "pow0": lambda x: aten.pow(x, 0) * x, "pow1": lambda x: aten.pow(x, 1),
    "pow2": lambda x: aten.pow(x, 2), "pow3": lambda x: aten.pow(x, 3), "pow_-1": lambda x: aten.pow(x, -1),
    "rsub": lambda x: aten.rsub(x, 2.0, 3), "cast": lambda x: x.double(), "to_bool": lambda x: x.bool(),
    "to_int": lambda x: (x * 10).int(), "full_like": lambda x: x + torch.full_like(x, 2.5),
    "arange": lambda x: x * torch.arange(3, 13), "zeros_ones": lambda x: x * torch.ones(10) + torch.zeros(6, 1),
}  # fmt: skip
POSITIVE = {
    "log": aten.log, "log1p": aten.log1p, "sqrt": aten.sqrt, "rsqrt": aten.rsqrt, "reciprocal": aten.reciprocal,
    "pow_half": lambda x: aten.pow(x, 0.5), "pow_-half": lambda x: aten.pow(x, -0.5), "pow1.7": lambda x: x**1.7,
    "base": lambda x: aten.pow(0.9, x),
}  # fmt: skip
TWO = {
    "add": aten.add, "add_alpha": lambda x, y: aten.add(x, y, alpha=0.3), "sub": aten.sub, "mul": aten.mul,
    "div": aten.div, "maximum": aten.maximum, "minimum": aten.minimum, "eq": aten.eq, "ne": aten.ne, "lt": aten.lt,
    "le": aten.le, "gt": aten.gt, "ge": aten.ge, "where": lambda x, y: aten.where(x > 0, x, y),
    "masked_fill": lambda x, y: aten.masked_fill(x, y > 0, -1.0), "lerp": lambda x, y: aten.lerp(x, y, 0.1),
    "lerp_far": lambda x, y: aten.lerp(x, y, 0.9), "lerp_tensor": lambda x, y: aten.lerp(x, y, y.abs()),
    "addcmul": lambda x, y: aten.addcmul(x, x, y, value=0.5), "addcdiv": lambda x, y: aten.addcdiv(x, x, y, value=2.0),
    "silu_backward": aten.silu_backward, "sigmoid_backward": aten.sigmoid_backward,
    "tanh_backward": aten.tanh_backward, "threshold_backward": lambda x, y: aten.threshold_backward(x, y, 0),
    "gelu_backward": aten.gelu_backward,
    "gelu_tanh_backward": lambda x, y: aten.gelu_backward(x, y, approximate="tanh"),
    "logic": lambda x, y: aten.logical_and(x > 0, y > 0).logical_or(x > 1).logical_xor(y < 0),
    "bits": lambda x, y: ((x > 0) & (y > 0)) | ~(x < 1), "pow": lambda x, y: aten.pow(x.abs(), y),
    "row": lambda x, y: x + y[0], "column": lambda x, y: x * y[:, :1], "scalar": lambda x, y: x * y[2, 3],
}  # fmt: skip


@pytest.mark.parametrize("name", ONE)
def test_of_one_operand(name: str) -> None:
    check(ONE[name], X)


@pytest.mark.parametrize("name", POSITIVE)
def test_of_one_positive_operand(name: str) -> None:
    check(POSITIVE[name], P)


@pytest.mark.parametrize("name", TWO)
def test_of_two_operands(name: str) -> None:
    check(TWO[name], X, Y)


@pytest.mark.parametrize("name", [n for n in TWO if n not in ("logic", "bits")])
def test_in_bfloat16_every_op_rounds(name: str) -> None:
    """Where one op follows another, eager mode rounds in between: bit for bit the same here."""
    x, y = X.bfloat16(), Y.bfloat16()
    graph = fused(graph_of(TWO[name], x, y))
    (ours,) = run(graph, x, y)
    if ours.dtype != torch.bool and "backward" not in name and name not in ("pow", "lerp_tensor"):
        torch.testing.assert_close(ours, TWO[name](x, y), rtol=0.008, atol=1e-6)


NUMBERS = {
    "eq": lambda x, y: aten.eq(aten.clamp(x, -0.1, 0.1), 0.1), "ge": lambda x, y: aten.ge(aten.clamp(x, 0.3, 2.0), 0.3),
    "add": lambda x, y: aten.add(x, 0.05), "sub": lambda x, y: aten.sub(x, y, alpha=0.05),
    "add_alpha": lambda x, y: aten.add(x, 1.3, alpha=0.05), "rsub": lambda x, y: aten.rsub(x, 0.05),
    "mul": lambda x, y: aten.mul(x, 0.05), "div": lambda x, y: aten.div(x, 0.05),
    "pow": lambda x, y: aten.pow(x.abs(), 0.3), "pow3": lambda x, y: aten.pow(x, 3),
    "whole": lambda x, y: x * torch.arange(1001, 1065) + torch.arange(301, 365),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_beside_bfloat16_are_rounded_where_aten_rounds_them(name: str, dtype: torch.dtype) -> None:
    x, y = randn(8, 64).to(dtype), randn(8, 64).to(dtype)  # whole vectors: ATen rounds what is beside them otherwise
    (ours,) = run(fused(graph_of(NUMBERS[name], x, y)), x, y)
    assert torch.equal(ours, NUMBERS[name](x, y))


def test_one_of_several_results_is_lowered_where_a_loop_nest_computes_it() -> None:
    assert is_lowered("aten.native_layer_norm") and is_lowered("aten.native_layer_norm#0")
    assert not is_lowered("all_gather#0") and not is_lowered("all_gather")


def test_rounding_once_a_chain() -> None:
    x, y = X.bfloat16(), Y.bfloat16()

    def chain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y) * y - x

    (eager,) = run(fused(graph_of(chain, x, y)), x, y)
    assert torch.equal(eager, chain(x, y))
    (once,) = run(fused(graph_of(chain, x, y), rounding="chain"), x, y)
    assert torch.equal(once, chain(x.float(), y.float()).bfloat16())
    assert not torch.equal(once, eager)


def test_integers() -> None:
    check(lambda n: n * 3 - n.abs(), N)
    check(lambda n: n // 2, N, kernels=0, left=1)
    check(lambda n: n / 2, N)
    check(lambda n: (n & 3) | (n ^ 5), N)
    check(lambda n: n.floor() + n.round(), N)
    check(lambda n: n + 0.5, N)
    check(lambda n: n.exp(), N)
    check(lambda n, b: n * b[:2, :3], N, B)


def test_small_integers_are_only_read() -> None:
    small = N.to(torch.int8)
    check(lambda n: n.float() * 2, small)
    check(lambda n: n * 2, small, kernels=0, left=1)


def test_scalars_on_the_worker_are_of_the_tensors_dtype() -> None:
    lr = torch.tensor(0.1, dtype=torch.float64)
    check(lambda x, lr: x - lr * x, X, lr)


VIEWS = {
    "view": lambda x: (x.view(3, 20) * 2).view(60) + 1, "transpose": lambda x: x.t() * 2,
    "permute": lambda x: x.view(2, 3, 10).permute(2, 0, 1) + 1, "slice": lambda x: x[1:5, 2:9:3] * 2,
    "select": lambda x: x[2] * x[:, 3:4], "unsqueeze": lambda x: x.unsqueeze(1) * x.unsqueeze(0),
    "expand": lambda x: x[:, :1].expand(6, 10) * x, "squeeze": lambda x: x[:, 3:4].squeeze(1) + 1,
    "view_of_transposed": lambda x: (x.t() + 0).reshape(60) * 2, "negative": lambda x: x[-3:, -1] * 2,
}  # fmt: skip


@pytest.mark.parametrize("name", VIEWS)
def test_views(name: str) -> None:
    check(VIEWS[name], X)


WEIGHT_AND_BIAS = {dtype: (X[0].to(dtype), Y[0].to(dtype)) for dtype in (torch.float32, torch.float64)}
REDUCTIONS = {
    "sum": lambda x: x.sum(), "sum0": lambda x: x.sum(0), "sum1": lambda x: x.sum(1, keepdim=True),
    "sum_all": lambda x: x.sum((0, 1)), "sum_dtype": lambda x: x.sum(0, dtype=torch.float64),
    "mean": lambda x: x.mean(),
    "mean1": lambda x: x.mean(-1), "amax": lambda x: x.amax(1), "amin": lambda x: x.amin((0, 1)),
    "max": lambda x: x.max(), "min": lambda x: x.min(), "prod": lambda x: x.prod(),
    "middle": lambda x: x.view(2, 3, 10).sum(1),
    "outer_two": lambda x: x.view(2, 3, 10).sum((0, 1)), "ends": lambda x: x.view(2, 3, 10).sum((0, 2)),
    "count": lambda x: (x > 0).sum(), "softmax": lambda x: x.softmax(1), "log_softmax": lambda x: x.log_softmax(-1),
    "softmax0": lambda x: x.softmax(0), "centred": lambda x: x - x.mean(1, keepdim=True),
    "rms": lambda x: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt(),
    "spread": lambda x: (x - x.mean(1, keepdim=True)).square().sum(1), "transposed": lambda x: x.t().sum(0),
    "flat_then_sum": lambda x: (x.view(60) * 2).view(6, 10).sum(1), "log_of_sum": lambda x: x.exp().sum(1).log() + 1,
    "layer_norm": lambda x: F.layer_norm(x, (10,), *WEIGHT_AND_BIAS[x.dtype]),
}  # fmt: skip


@pytest.mark.parametrize("name", REDUCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_reductions(name: str, dtype: torch.dtype) -> None:
    check(REDUCTIONS[name], X.to(dtype))


@pytest.mark.parametrize("backward", ["softmax", "log_softmax"])
def test_softmax_backward(backward: str) -> None:
    op = getattr(aten, f"_{backward}_backward_data")
    check(lambda g, y: op(g, y, 1, torch.float32), X, getattr(Y, backward)(1))


def test_layer_norm_backward_is_one_kernel() -> None:
    """Which reduces rows for the input, and adds up columns for weight and bias."""
    w, b = X[0].clone(), Y[0].clone()
    out, mean, rstd = aten.native_layer_norm(X, [10], w, b, 1e-5)
    check(
        lambda g, x: aten.native_layer_norm_backward(g, x, [10], mean, rstd, w, b, [True, True, True]),
        Y,
        X,
    )


def test_rms_norm() -> None:
    """ATen has this op for accelerators only: it is compared with what it is made of."""
    w = X[0].clone()
    shape = {"x": TensorType(torch.float32, (6, 10)), "w": TensorType(torch.float32, (10,))}
    scale = TensorType(torch.float32, (6, 1))

    def graph(backward: bool) -> Graph:
        made = Graph("f", MeshSpec(()))
        g, x, weight, rstd = (
            made.placeholder("input", number, type_)
            for number, type_ in enumerate([shape["x"], shape["x"], shape["w"], scale])
        )
        if backward:
            types = (shape["x"], shape["w"])
            call = made.call(aten._fused_rms_norm_backward.default, g, x, [10], rstd, weight, [True, True], type=types)
        else:
            types = (shape["x"], scale)
            call = made.call(aten._fused_rms_norm.default, x, [10], weight, 1e-5, type=types)
        made.output([made.call(operator.getitem, call, i, type=type_) for i, type_ in enumerate(types)], {})
        return fused(made)

    rstd = (X.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    forward = graph(backward=False)
    assert len(kernels_of(forward)) == 1
    for ours, theirs in zip(run(forward, Y, X, w, rstd), (X * rstd * w, rstd), strict=True):
        close(ours, theirs)
    leaves = X.clone().requires_grad_(), w.clone().requires_grad_()
    result = leaves[0] * (leaves[0].square().mean(1, keepdim=True) + 1e-5).rsqrt() * leaves[1]
    backward = graph(backward=True)
    assert [len(kernel.nests) for kernel in kernels_of(backward)] == [1]
    for ours, theirs in zip(run(backward, Y, X, w, rstd), torch.autograd.grad(result, leaves, Y), strict=True):
        close(ours, theirs)


SUMS: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "of what rows give": lambda g, y: (z := aten._softmax_backward_data(g, y, 1, g.dtype), z.sum(0)),
    "of what they are made of": lambda g, y: ((g * y).softmax(1), (g * y).sum(0), g.sum(0, keepdim=True)),
    "of rows of rows": lambda g, y: (
        (z := (g.view(2, 3, 10) * 2).softmax(2)),
        z.sum((0, 1)),
        (z * 2).view(6, 10).sum(0),
    ),
    "of what is used on": lambda g, y: ((z := g.softmax(1)), (z * y).sum(0).exp()),
}


@pytest.mark.parametrize("name", SUMS)
@pytest.mark.parametrize("shape", [(6, 10), (6, 6)])
def test_rows_are_reduced_and_columns_added_up_in_one_nest(name: str, shape: tuple[int, int]) -> None:
    """Also where there are as many of the one as of the other; but what follows such a sum is a kernel of its own."""
    x, y = randn(*shape, dtype=torch.float64), randn(*shape, dtype=torch.float64) * 2
    if name == "of rows of rows" and shape == (6, 6):
        x, y = x.repeat(1, 5)[:, :10].contiguous(), y.repeat(1, 5)[:, :10].contiguous()
    function = SUMS[name]
    check(function, x, y.softmax(1), kernels=2 if name == "of what is used on" else 1)
    (kernel, *_) = kernels_of(fused(graph_of(function, x, y)))
    assert any(nest.sums for nest in kernel.nests)
    assert not any(
        nest.sums for kernel in kernels_of(fused(graph_of(function, x, y), target="cuda:90")) for nest in kernel.nests
    )


APART: dict[str, Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]] = {
    "means": lambda g, y: ((z := g.softmax(1)), z.mean(0)),
    "largest": lambda g, y: ((z := g.softmax(1)), z.amax(0)),
    "columns that are reduced, and rows": lambda g, y: ((z := g.softmax(0)), z.sum(1)),
    "a sum that rows need": lambda g, y: ((g - g.sum(0)).softmax(1),),
}


@pytest.mark.parametrize("name", APART)
def test_other_reductions_of_rows_and_columns_stay_apart(name: str) -> None:
    check(APART[name], X, Y, kernels=2)


def test_a_sum_that_is_rounded_stays_apart() -> None:
    half = X.bfloat16()
    graph = fused(graph_of(lambda g: ((z := g.softmax(1)), z.sum(0)), half))
    assert len(kernels_of(graph)) == 2


def test_rows_that_threads_cannot_share_are_not_added_up_in_one_nest() -> None:
    """A prime number of them, of so many elements that one thread should not go through them alone."""

    def function(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        z = x.softmax(1)
        return z, z.sum(0)

    assert [len(kernels_of(fused(graph_of(function, randn(1021, size))))) for size in (32, 256)] == [1, 2]
    assert len(kernels_of(fused(graph_of(function, randn(1020, 256))))) == 1


def test_lookups() -> None:
    index = torch.tensor([3, 0, 5, 5])
    check(lambda x, i: F.embedding(i, x) + 1, X, index)
    check(lambda x, i: x.gather(1, i[:, None].expand(4, 2)[:, :1]) * 2, X[:4].clone(), index)


def test_lookups_out_of_range_are_errors() -> None:
    graph = fused(graph_of(lambda x, i: F.embedding(i, x) + 1, X, torch.tensor([1])))
    for wrong in (6, -1, 1 << 40):
        with pytest.raises(IndexError, match="there are 6 rows"):
            run(graph, X, torch.tensor([wrong]))


def test_lookups_in_a_worker_s_own_block() -> None:
    """gather_shard, and scatter_shard of one number a row: what other workers have is 0, or stays."""
    text = """graph @f on mesh<model=3> partitioned<model> {
  %x = input 0 : f32[6, 4] of f32[6, 12@model]
  %i = input 1 : i64[6, 1]
  %g = gather_shard(%x, 1, %i, "model") : f32[6, 1] of f32[6, 1] partial<sum: model>
  %y = aten.neg(%g) : f32[6, 1] of f32[6, 1] partial<sum: model>
  %s = scatter_shard(%x, -1, %i, 2.5, "model") : f32[6, 4] of f32[6, 12@model]
  %z = aten.mul.Tensor(%s, 2.0) : f32[6, 4] of f32[6, 12@model]
  return %y, %z
}"""
    inputs = {0: randn(6, 12), 1: torch.tensor([[0], [3], [4], [7], [8], [11]])}
    made = fused(parse_graph(text))
    assert not {"gather_shard", "scatter_shard"} & {str(node.target) for node in made.calls}
    verify(made, run=True)
    ours, _ = run_reference(made, inputs)
    theirs, _ = run_reference(parse_graph(text), inputs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert torch.equal(ours[0], -inputs[0].gather(1, inputs[1]))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_cross_entropy_with_its_gradient(reduction: str) -> None:
    """Targets to be ignored are: forward two kernels at most, backward one."""
    target = torch.tensor([1, 9, -100, 0, 3, 3])

    def step(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grad, loss = torch.func.grad_and_value(lambda x: F.cross_entropy(x, target, reduction=reduction))(logits)
        return loss, grad

    logits = X * 3
    graph = fused(graph_of(step, logits))
    ours, expected = run(graph, logits), step(logits)
    for a, b in zip(ours, expected, strict=True):
        close(a, b)
    assert "aten._log_softmax_backward_data" not in others_of(graph)


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f64"])
def test_random_numbers_are_the_same_bits_on_every_worker(dtype: str) -> None:
    """Dropout over blocks of two nested mesh dims, and whole numbers."""
    block = f"{dtype}[2, 5, 3] of {dtype}[12@(data,model), 5, 3]"
    uniform = f'"uniform", [2, 5, 3], {dtype}, %seed, 7, [12, 5, 3], [["data", "model"], [], []]'
    text = f"""graph @f on mesh<data=2, model=3> partitioned<data, model> {{
  %x = input 0 : {block}
  %seed = seed "seed" : i64[]
  %r = random({uniform}) : {block}
  %keep = aten.lt.Scalar(%r, 0.5) : bool[2, 5, 3] of bool[12@(data,model), 5, 3]
  %y = aten.mul.Tensor(%x, %keep) : {block}
  %n = random("bits", [4], i64, 3, 1, [8], [["data"]]) : i64[4] of i64[8@data]
  %m = aten.add.Tensor(%n, 1) : i64[4] of i64[8@data]
  return %y, %r, %m
}}"""
    inputs = {0: randn(12, 5, 3, dtype=DTYPES[dtype]), "seed": torch.tensor(42)}
    made = fused(parse_graph(text))
    assert len(kernels_of(made)) == 2 and "random" not in [node.name for node in made.calls]
    verify(made, run=True)
    ours, _ = run_reference(made, inputs)
    theirs, _ = run_reference(parse_graph(text), inputs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_what_cannot_be_said_stays() -> None:
    check(lambda x: x.cumsum(0), X, kernels=0, left=1)
    check(lambda x: torch.cat([x, x]), X, kernels=0, left=1)
    check(lambda x: x[:0] * 2, X, kernels=0, left=2)
    check(lambda x: x.max(1).values, X, kernels=0, left=1)


def test_where_coordinates_are_not_affine_it_takes_two() -> None:
    """Rows of 4 of a transposed tensor with rows of 6: no loops run over both."""
    check(lambda x: (x.t() * 2).reshape(15, 4).sum(1), X, kernels=2, left=1)


def test_constants_are_rounded_as_their_tensors_are() -> None:
    check(lambda x: x * torch.full((1,), math.pi, dtype=torch.bfloat16), X.bfloat16())


def test_every_lowered_op_is_tested_here() -> None:
    text = open(__file__).read()
    for key in recorded("lower"):
        if is_transparent(key):
            continue
        name = key.split("#")[0].rpartition(".")[2].strip("_").removesuffix("_backward_data")
        name = {"fused_rms_norm": "rms_norm", "native_layer_norm": "layer_norm", "to_copy": "cast"}.get(name, name)
        name = {"convert_element_type": "cast", "nll_loss_backward": "cross_entropy", "contiguous": "clone"}.get(
            name, name
        )
        assert name.replace("bitwise_", "").replace("logical_", "") in text, key
