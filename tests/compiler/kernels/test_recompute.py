"""What kernels compute again instead of storing it, and that a loss keeps its logits and nothing else of their size."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from monarch.compiler import ops
from monarch.compiler.cli.load import load_program
from monarch.compiler.context import Context
from monarch.compiler.cost.work import graph_costs
from monarch.compiler.graph import Graph, args_of, tensor_type
from monarch.compiler.kernels.fuse import FuseKernels
from monarch.compiler.kernels.recompute import compute_again
from monarch.compiler.loops.ir import traffic
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.pipeline import fusing, lowering, partition_graph
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.schedule.emit import emit_plan
from monarch.compiler.text import parse_graph
from monarch.language.tensors.mesh import open_meshes
from tests.compiler.kernels.graphs import fused, graph_of, kernels_of
from tests.compiler.reference import run_reference

ROWS, CLASSES = 64, 96

PROGRAM = """
import torch
import torch.nn.functional as F

import monarch
from monarch.compiler.types import Layout
from monarch.distributed import Mesh

mesh = Mesh({mesh})
torch.manual_seed(0)
model = torch.nn.Linear(40, {classes}, bias=False, dtype=torch.{dtype})
model = monarch.module_to_mesh(model, mesh, layouts={{"weight": Layout.replicated(2){place}}})
rows = monarch.distribute(torch.randn({rows}, 40, dtype=torch.{dtype}), mesh, "[{batch}, -]")


@monarch.program
def step(targets: "i64[{rows}{batch}]"):
    loss = F.cross_entropy(model(rows){float}, targets{reduction})
    return loss, torch.autograd.grad(loss, [model.weight])[0]
"""

MESHES = {
    "one worker": {"mesh": "one=1", "place": "", "batch": ""},
    "data": {"mesh": "data=2", "place": "", "batch": "@data"},
    "vocabulary": {"mesh": "model=2", "place": ".place('model', 0)", "batch": ""},
    "both": {"mesh": "data=2, model=2", "place": ".place('model', 0)", "batch": "@data"},
}


def traced(folder: Path, mesh: str, dtype: str = "float32", reduction: str = "", classes: int = CLASSES) -> Graph:
    given = {**MESHES[mesh], "rows": ROWS, "classes": classes, "dtype": dtype, "reduction": reduction}
    given["float"] = "" if dtype == "float32" else ".float()"
    path = folder / "loss.py"
    path.write_text(PROGRAM.format(**given).replace('"[, -]"', '"[-, -]"'))
    before = set(open_meshes())
    try:
        return load_program(f"{path}:step", None, {}, False).graph
    finally:
        for each in set(open_meshes()) - before:  # the file's module stays, and programs of other tests would meet them
            each.close()


def lowered(graph: Graph, target: str = "cpu", kernels: str = "all") -> Graph:
    made = partition_graph(graph)
    context = Context(CompileOptions(target=target, kernels=kernels))
    for step in [*fusing(context), *lowering(context)]:
        made = step.run(made, context)
    return made


def size_of(graph: Graph) -> int:
    return ROWS * CLASSES // math.prod(size for _, size in graph.mesh.dims)


def large(graph: Graph) -> list[str]:
    """The values of as many elements as a worker's logits have, by the ops that make them."""
    found = []
    for node in graph.calls:
        type_ = node.meta["type"]
        if not isinstance(type_, tuple) and math.prod(graph.local_shape(type_)) == size_of(graph):
            maker = args_of(node)[0] if node.target is operator.getitem else node
            found.append("kernel" if maker.target is ops.kernel else str(maker.target.overloadpacket))
    return [each for each in found if each != "aten.permute"]


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
@pytest.mark.parametrize("mesh", MESHES)
def test_a_loss_keeps_the_logits_and_writes_their_gradient_over_them(tmp_path: Path, mesh: str, target: str) -> None:
    graph = lowered(traced(tmp_path, mesh), target)
    assert large(graph) == ["aten.mm", "kernel"]
    plan = emit_plan(graph, CompileOptions(target=target))
    kernels = [each for each in plan.instructions if each.op == "kernel"]
    (gradient,) = [each for each in kernels if parse_kernel(each.args[1]).outputs[-1].numel == size_of(graph)]
    assert gradient.args[2][-1] >= 0


@pytest.mark.parametrize("mesh", ["vocabulary", "both"])
def test_a_loss_over_classes_that_do_not_divide_keeps_and_sends_no_more(tmp_path: Path, mesh: str) -> None:
    odd, even = (lowered(traced(tmp_path, mesh, classes=classes)) for classes in (CLASSES - 1, CLASSES))
    assert large(odd) == ["aten.mm", "kernel"]
    assert graph_costs(odd)["collectives"] == graph_costs(even)["collectives"]


@pytest.mark.parametrize("mesh", MESHES)
def test_logits_in_half_precision_are_not_stored_in_float(tmp_path: Path, mesh: str) -> None:
    """What is computed in float32 from them is the gradient, which is rounded in the same kernel."""
    graph = lowered(traced(tmp_path, mesh, "bfloat16"))
    assert large(graph) == ["aten.mm", "kernel"]
    (gradient,) = [node for node in graph.calls if node.name == "to_copy_1"]
    assert tensor_type(gradient).dtype == torch.bfloat16


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_numbers_are_those_of_the_ops(tmp_path: Path, mesh: str, reduction: str) -> None:
    graph = traced(tmp_path, mesh, reduction=f", reduction='{reduction}'")
    generator = torch.Generator().manual_seed(1)
    inputs: dict[str | int, torch.Tensor] = {0: torch.randint(CLASSES, (ROWS,), generator=generator)}
    inputs[0][::7] = -100
    for node in graph.placeholders:
        if node.meta["kind"] == "state":
            inputs[node.meta["label"]] = torch.randn(tensor_type(node).shape, generator=generator)
    ours, _ = run_reference(lowered(graph), inputs)
    theirs, _ = run_reference(lowered(graph, kernels="off"), inputs)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_cheap_arithmetic_is_not_stored_across_a_collective() -> None:
    """But what costs more than to be moved is."""
    graph = parse_graph("""graph @f on mesh<data=2> partitioned<data> {
  %x = input 0 : f32[64, 32]
  %m = input 1 : f32[64, 1]
  %p = input 2 : f32[64, 32] of f32[64, 32] partial<sum: data>
  %d = aten.sub.Tensor(%x, %m) : f32[64, 32]
  %e = aten.exp(%d) : f32[64, 32]
  %r = all_reduce([%p], ["data"], "sum") : (f32[64, 32])
  %s = getitem(%r, 0) : f32[64, 32]
  %a = aten.mul.Tensor(%d, %s) : f32[64, 32]
  %b = aten.mul.Tensor(%e, %s) : f32[64, 32]
  return %a, %b
}""")
    made = fused(graph)
    assert [(kernel.name, len(kernel.outputs)) for kernel in kernels_of(made)] == [("sub_exp", 1), ("sub_mul", 2)]


def test_what_would_keep_more_memory_is_stored() -> None:
    """A value in half precision of one in float32: the float32 would have to be kept instead."""
    graph = parse_graph("""graph @f on mesh<data=2> partitioned<data> {
  %x = input 0 : f32[64, 32]
  %p = input 1 : bf16[64, 32] of bf16[64, 32] partial<sum: data>
  %h = aten._to_copy(%x, dtype=bf16) : bf16[64, 32]
  %e = aten.exp(%h) : bf16[64, 32]
  %r = all_reduce([%p], ["data"], "sum") : (bf16[64, 32])
  %s = getitem(%r, 0) : bf16[64, 32]
  %a = aten.mul.Tensor(%h, %s) : bf16[64, 32]
  return %a, %e
}""")
    assert len(compute_again(graph)) == 0


@pytest.mark.parametrize("classes", [1024, 32768])
def test_kernels_of_a_loss_move_its_logits_thrice(classes: int) -> None:
    """The logits once forward; backward the logits and their gradient. Beside that 28 bytes a row forward and 20
    backward at most, of targets, sums and losses: a kernel written by hand needs 20 and 16."""
    rows = 2048
    graph = parse_graph(f"""graph @f on mesh<data=2> partitioned<data> {{
  %x = input 0 : f32[{rows}, {classes}]
  %t = input 1 : i64[{rows}]
  %p = input 2 : f32[] partial<sum: data>
  %l = aten._log_softmax(%x, 1, false) : f32[{rows}, {classes}]
  %n = aten.nll_loss_forward(%l, %t, none, 2, -100) : (f32[], f32[])
  %y = getitem(%n, 0) : f32[]
  %w = getitem(%n, 1) : f32[]
  %r = all_reduce([%p], ["data"], "sum") : (f32[])
  %g = getitem(%r, 0) : f32[]
  %d = aten.nll_loss_backward(%g, %l, %t, none, 2, -100, %w) : f32[{rows}, {classes}]
  %z = aten._log_softmax_backward_data(%d, %l, 1, f32) : f32[{rows}, {classes}]
  return %y, %z
}}""")
    moved = [sum(traffic(kernel)) for kernel in kernels_of(fused(graph))]
    logits = rows * classes * 4
    assert 3 * logits <= sum(moved) <= 3 * logits + rows * 48


@pytest.mark.parametrize(("target", "sizes"), [("cpu", 3.0), ("cuda:90", 5.0)])
def test_kernels_of_a_norm_read_and_write_each_tensor_once_but_on_gpus_backward(target: str, sizes: float) -> None:
    """Forward residual, addend, sum and result once each. Backward the gradient of the weight is in the same pass; on
    GPUs it is a kernel of its own, which reads both tensors again."""
    rows, columns = 2048, 1024
    x = torch.empty(rows, columns, device="meta")
    weight, row = torch.empty(columns, device="meta"), torch.empty(rows, device="meta")

    def forward(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        summed = x + residual
        return summed, *torch.ops.aten.native_layer_norm(summed, [columns], weight, None, 1e-5)

    def backward(dy: torch.Tensor, x: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weight = torch.ones(columns)
        return torch.ops.aten.native_layer_norm_backward(dy, x, [columns], mean, rstd, weight, weight, [True] * 3)

    def moved(function: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor) -> float:
        graph = graph_of(function, *(torch.zeros(each.shape) for each in tensors))
        graph = FuseKernels().run(graph, Context(CompileOptions(target=target, kernels="all")))
        return round(sum(sum(traffic(kernel)) for kernel in kernels_of(graph)) / x.nbytes, 1)

    column = row[:, None]
    assert moved(forward, x, x, weight) == 4.0
    assert moved(backward, x, x, column, column) == sizes
