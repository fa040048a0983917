"""Which ops become one kernel, and that the program computes the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.graph import Graph
from monarch.compiler.kernels.fuse import WORTHWHILE
from monarch.compiler.text import parse_graph
from monarch.compiler.verify import verify
from tests.compiler.kernels.graphs import fused, graph_of, kernels_of, others_of, run
from tests.sample import examples

aten = torch.ops.aten
Tensor = torch.Tensor


def test_the_rewrite_as_text() -> None:
    graph = parse_graph("""graph @f on mesh<> {
  %x = input 0 : f32[64, 32]
  %y = input 1 : f32[32]
  %a = aten.mul.Tensor(%x, 2.0) : f32[64, 32]  # train.py:3
  %b = aten.add.Tensor(%a, %y) : f32[64, 32]  # train.py:4
  %c = aten.view(%b, [2048]) : f32[2048]
  return %c
}""")
    text = r"""kernel mul_add(a0: f32[64, 32], a1: f32[32]) -> (b0: f32[64, 32])
nest [64, 32] {
  %0 = load a0 [32, 1]  # train.py:3
  %1 = constant f32 2.0  # train.py:3
  %2 = mul f32(%0, %1)  # train.py:3
  %3 = load a1 [0, 1]  # train.py:4
  %4 = add f32(%2, %3)  # train.py:4
  %5 = store b0 [32, 1] %4  # train.py:4
}
"""
    (kernel,) = kernels_of(made := fused(graph))
    assert str(kernel) == text
    assert [node.name for node in made.calls] == ["mul_add_kernel", "b", "c"]
    assert str(parse_graph(str(made))) == str(made)


def test_off_and_auto() -> None:
    """A small program keeps its ops, a large one of the same ops does not."""

    def function(x: Tensor) -> Tensor:
        return (x * 2 + 1).relu()

    def count(rows: int, when: str) -> int:
        return len(kernels_of(fused(graph_of(function, torch.ones(rows, 1024)), kernels=when)))

    assert [count(4, "off"), count(4, "auto"), count(4, "all")] == [0, 0, 1]
    assert [count(WORTHWHILE // 4096, "off"), count(WORTHWHILE // 4096, "auto")] == [0, 1]


def test_one_op_alone_stays_aten_s_where_that_is_as_fast() -> None:
    large = torch.ones(2048, 2048)
    assert others_of(fused(graph_of(lambda x: x + 1, large), kernels="auto")) == ["aten.add"]


def test_values_that_others_read_are_stored_and_the_rest_is_not() -> None:
    x = torch.randn(16, 16)
    (kernel,) = kernels_of(fused(graph_of(lambda x: (x * 2, (x * 2).exp() + 1), x)))
    assert len(kernel.outputs) == 2
    (kernel,) = kernels_of(fused(graph_of(lambda x: (x * 2).exp() + 1, x)))
    assert len(kernel.outputs) == 1


def test_a_matmul_between_keeps_two_ops_apart() -> None:
    """x + 1 and what reads both it and the product cannot be one: the product would have to come in between."""

    def function(x: Tensor) -> Tensor:
        a = x + 1
        return (a @ a) * a

    x = torch.randn(8, 8)
    graph = fused(graph_of(function, x))
    assert len(kernels_of(graph)) == 2
    torch.testing.assert_close(run(graph, x)[0], function(x))


def test_kernels_do_not_reach_across_a_collective() -> None:
    graph = parse_graph("""graph @f on mesh<data=2> partitioned<data> {
  %x = input 0 : f32[64] of f32[64] partial<sum: data>
  %y = input 1 : f32[64]
  %a = aten.exp(%y) : f32[64]
  %r = all_reduce([%x], ["data"], "sum") : (f32[64])
  %s = getitem(%r, 0) : f32[64]
  %b = aten.neg(%a) : f32[64]
  %c = aten.add.Tensor(%b, %s) : f32[64]
  return %c
}""")
    made = fused(graph)
    assert [kernel.name for kernel in kernels_of(made)] == ["exp", "neg_add"]


def test_kernels_reach_across_a_collective_that_nobody_waits_for() -> None:
    """Its result is read behind a product, as a gradient's sum is."""
    graph = parse_graph("""graph @f on mesh<data=2> partitioned<data> {
  %x = input 0 : f32[64, 64] of f32[64, 64] partial<sum: data>
  %y = input 1 : f32[64, 64]
  %a = aten.exp(%y) : f32[64, 64]
  %r = all_reduce([%x], ["data"], "sum") : (f32[64, 64])
  %s = getitem(%r, 0) : f32[64, 64]
  %b = aten.neg(%a) : f32[64, 64]
  %c = aten.mm(%b, %b) : f32[64, 64]
  %d = aten.add.Tensor(%c, %s) : f32[64, 64]
  return %d
}""")
    assert [kernel.name for kernel in kernels_of(fused(graph))] == ["exp_neg", "add"]


def test_equal_updates_are_one_kernel() -> None:
    def update(*tensors: Tensor) -> tuple[Tensor, ...]:
        step = tensors[-1] + 1
        return tuple((p.mul(0.9) - g * step) for p, g in zip(tensors[:3], tensors[3:6], strict=True)) + (step,)

    shapes = [(8, 4), (7,), (3, 5, 2)]
    tensors = [torch.randn(shape) for shape in shapes * 2] + [torch.tensor(3.0)]
    graph = fused(graph_of(update, *tensors))
    kernels = kernels_of(graph)
    assert sorted(len(kernel.nests) for kernel in kernels) == [1, 3]
    for ours, theirs in zip(run(graph, *tensors), update(*tensors), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_one_result_that_atens_op_has_to_give_keeps_all_of_them() -> None:
    """What cannot be lowered needs native_layer_norm's mean: then the kernel of the rest would compute it twice."""

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y, mean, _ = aten.native_layer_norm(x, [8], None, None, 1e-5)
        return y * 2, mean

    x = torch.randn(4, 8)
    graph = fused(graph_of(function, x))
    assert others_of(graph) == []
    assert len(kernels_of(graph)) == 1
    graph = graph_of(lambda x: aten.native_layer_norm(x.view(2, 2, 8), [8], None, None, 1e-5)[0].cumsum(0), x)
    torch.testing.assert_close(run(fused(graph), x)[0], run(graph, x)[0])


@pytest.mark.parametrize("third", ["none", "f32[32]"])
@pytest.mark.parametrize("wanted", ["true", "false"])
def test_a_result_that_is_not_there_and_that_nobody_reads(third: str, wanted: str) -> None:
    types = f"(f32[64, 32], f32[32], {third})"
    graph = parse_graph(f"""graph @f on mesh<> {{
  %g = input 0 : f32[64, 32]
  %x = input 1 : f32[64, 32]
  %m = input 2 : f32[64, 1]
  %r = input 3 : f32[64, 1]
  %w = input 4 : f32[32]
  %d = aten.neg(%g) : f32[64, 32]
  %n = aten.native_layer_norm_backward(%d, %x, [32], %m, %r, %w, %w, [true, true, {wanted}]) : {types}
  %a = getitem(%n, 0) : f32[64, 32]
  %b = getitem(%n, 1) : f32[32]
  %c = getitem(%n, 2) : none
  return %a, %b
}}""")
    tensors = [torch.randn(shape) for shape in ((64, 32), (64, 32), (64, 1), (64, 1), (32,))]
    made = fused(graph)
    assert [(len(kernel.outputs), len(kernel.nests)) for kernel in kernels_of(made)] == [(2, 1)]
    assert others_of(made) == []
    for ours, theirs in zip(run(made, *tensors), run(graph, *tensors), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_kernels_verify_and_lies_about_them_do_not() -> None:
    graph = fused(graph_of(lambda x: x.softmax(1) * 2, torch.randn(4, 8)))
    verify(graph, run=True)
    from monarch.compiler import ops
    from monarch.compiler.errors import GraphError

    (call,) = [node for node in graph.calls if node.target is ops.kernel]
    good = call.args
    for wrong, message in [
        (([good[0][0]] * 2, good[1], good[2]), "takes other tensors"),
        ((good[0], good[1].replace("[4, 8]", "[8, 4]"), good[2]), "takes other tensors"),
        ((good[0], good[1].replace("exp", "expo"), good[2]), "there is no op 'expo'"),
        ((good[0], good[1], [0, 0]), "cannot have its results over"),
    ]:
        call.args = wrong
        with pytest.raises(GraphError, match=message):
            verify(graph)


# -- random programs ---------------------------------------------------------------------------------------------------

UNARY: list[Callable[[Tensor], Tensor]] = [
    torch.exp, torch.tanh, torch.relu, lambda x: x * 0.5 + 1, lambda x: x.softmax(-1),
    lambda x: x.mean(-1, keepdim=True),
    lambda x: x.sum(0), lambda x: x.transpose(-1, -2).contiguous() if x.dim() > 1 else x, lambda x: x.reshape(-1),
    lambda x: x.amax(-1), lambda x: x - x.mean(-1, keepdim=True), lambda x: x[..., ::2] if x.dim() else x,
    lambda x: x.transpose(0, -1) * 2, lambda x: x.cumsum(-1),
]  # fmt: skip
BINARY: list[Callable[[Tensor, Tensor], Tensor]] = [torch.add, torch.mul, torch.maximum, lambda x, y: x - 0.3 * y]


@st.composite
def programs(draw: st.DrawFn) -> Callable[..., tuple[Tensor, ...]]:
    steps = draw(
        st.lists(st.tuples(st.integers(0, 1 << 30), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12)
    )
    kept = draw(st.sets(st.integers(0, 12), max_size=3))

    def program(*tensors: Tensor) -> tuple[Tensor, ...]:
        values = list(tensors)
        for which, a, b in steps:
            x, y = values[a % len(values)].tanh(), values[b % len(values)]
            which %= len(UNARY) + 2 * len(BINARY)
            if which < len(UNARY):
                values.append(UNARY[which](x) if x.dim() else x * 2)
                continue
            fits = all(1 in sizes or len(set(sizes)) == 1 for sizes in zip(x.shape[::-1], y.shape[::-1], strict=False))
            values.append(BINARY[which % len(BINARY)](x, y) if fits else x + 1)
        return (values[-1], *(values[k] for k in sorted(kept) if len(tensors) <= k < len(values) - 1))

    return program


@given(programs(), st.sampled_from([(4, 6), (3, 4, 2), (1, 5), (6,)]))
@examples(40, 200)
def test_random_programs(program: Callable[..., tuple[Tensor, ...]], shape: tuple[int, ...]) -> None:
    tensors = [torch.randn(shape, generator=torch.Generator().manual_seed(s), dtype=torch.float64) for s in (1, 2)]
    graph: Graph = fused(graph_of(program, *tensors))
    verify(graph)
    for ours, theirs in zip(run(graph, *tensors), program(*tensors), strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True)
