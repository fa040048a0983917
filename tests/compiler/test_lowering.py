"""The passes behind partitioning, text in and text out: kernels, products with kernels, and plans.

A plan's text has one line for each instruction: the slot it fills, the op over slots, `frees` for the slots that nobody
reads afterwards, `@` for offsets in the arena.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from monarch.compiler.context import Context
from monarch.compiler.graph import Graph
from monarch.compiler.kernels.fuse import FuseKernels
from monarch.compiler.kernels.join import JoinKernels
from monarch.compiler.kernels.products import FuseProducts
from monarch.compiler.plan import Instruction, Plan, Slot
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.schedule.emit import emit_plan
from monarch.compiler.text import parse_graph, print_graph

ALL = CompileOptions(kernels="all")
ON_A_GPU = CompileOptions(kernels="all", target="cuda:90")

NORM = """graph @f on mesh<data=2> partitioned<data> {
  %x = input 0                                     : f32[4, 8] of f32[8@data, 8]
  %w = state "norm.weight"                         : f32[8]
  %s = aten.mul.Tensor(%x, %x)                     : f32[4, 8] of f32[8@data, 8]  # model.py:3 in "norm"
  %m = aten.mean.dim(%s, [-1], true)               : f32[4, 1] of f32[8@data, 1]  # model.py:3 in "norm"
  %r = aten.rsqrt(%m)                              : f32[4, 1] of f32[8@data, 1]  # model.py:3 in "norm"
  %n = aten.mul.Tensor(%x, %r)                     : f32[4, 8] of f32[8@data, 8]  # model.py:4 in "norm"
  %y = aten.mul.Tensor(%n, %w)                     : f32[4, 8] of f32[8@data, 8]  # model.py:4 in "norm"
  return %y
}"""

UPDATES = """graph @f on mesh<data=2> partitioned<data> {
  %a = state "a"                                   : f32[8]
  %b = state "b"                                   : f32[2, 3]
  %g = input 0                                     : f32[8]
  %h = input 1                                     : f32[2, 3]
  %lr = scalar "lr"                                : f64[]
  %t = aten.mul.Tensor(%g, %lr)                    : f32[8]  # train.py:9
  %u = aten.mul.Tensor(%h, %lr)                    : f32[2, 3]  # train.py:9
  %c = aten.sub.Tensor(%a, %t)                     : f32[8]  # train.py:9
  %d = aten.sub.Tensor(%b, %u)                     : f32[2, 3]  # train.py:9
  update "a" = %c
  update "b" = %d
  return
}"""

SUMMED = """graph @f on mesh<data=2> partitioned<data> {
  %x = input 0                                     : bf16[4, 8] of bf16[8@data, 8]
  %y = aten.exp(%x)                                : bf16[4, 8] of bf16[8@data, 8]
  %p = aten.sum.dim_IntList(%y, [0])               : bf16[8] partial<sum: data>
  %r = all_reduce([%p], ["data"], "sum")           : (bf16[8])
  %s = getitem(%r, 0)                              : bf16[8]
  %z = aten.div.Tensor(%y, %s)                     : bf16[4, 8] of bf16[8@data, 8]
  return %z
}"""


@pytest.mark.parametrize("rounding", ["eager", "chain"])
def test_ops_between_collectives_are_kernels(expect: Callable[..., None], rounding: str) -> None:
    expect(SUMMED, FuseKernels(), CompileOptions(kernels="all", rounding=rounding))


def test_a_norm_is_one_kernel(expect: Callable[..., None]) -> None:
    expect(NORM, FuseKernels(), ALL)


def test_updates_of_several_parameters_are_one_kernel(expect_text: Callable[[str], None]) -> None:
    expect_text(print_graph(updates(), modules=True))


def updates() -> Graph:
    context = Context(ALL)
    return JoinKernels().run(FuseKernels().run(parse_graph(UPDATES), context), context)


def test_kernels_that_save_little_are_left_out(expect: Callable[..., None]) -> None:
    expect(NORM, FuseKernels(), CompileOptions(kernels="auto"))


LINEAR = """graph @f on mesh<data=2> partitioned<data> {
  %x = input 0                                     : f32[64, 32] of f32[128@data, 32]
  %w = state "fc.weight"                           : bf16[48, 32]
  %b = state "fc.bias"                             : bf16[48]
  %c = aten._to_copy(%x, dtype=bf16)               : bf16[64, 32] of bf16[128@data, 32]  # model.py:7 in "fc"
  %t = aten.t(%w)                                  : bf16[32, 48]  # model.py:8 in "fc"
  %h = aten.addmm(%b, %c, %t)                      : bf16[64, 48] of bf16[128@data, 48]  # model.py:8 in "fc"
  %k = kernel([%h], "kernel gelu(a0: bf16[64, 48]) -> (b0: bf16[64, 48])\\nnest [3072] {\\n  %0 = load a0 [1]\\n  %1 = cast f32(%0)\\n  %2 = sin f32(%1)\\n  %3 = cast bf16(%2)\\n  %4 = store b0 [1] %3\\n}\\n", [-1])  : (bf16[64, 48] of bf16[128@data, 48])  # model.py:9 in "fc"
  %y = getitem(%k, 0)                              : bf16[64, 48] of bf16[128@data, 48]  # model.py:9 in "fc"
  return %h, %y
}"""  # noqa: E501


def test_a_product_takes_in_its_bias_and_what_reads_it(expect: Callable[..., None]) -> None:
    expect(LINEAR, FuseProducts(), ON_A_GPU)


STEP = """graph @step on mesh<data=2> partitioned<data> {
  %x = input 0                                     : f32[32, 64] of f32[64@data, 64]  # train.py:3
  %w = state "fc.weight"                           : f32[64, 64]
  %lr = scalar "lr"                                : f64[]
  %c = constant "c"                                : f32[64]
  %t = aten.t(%w)                                  : f32[64, 64]  # train.py:4
  %h = aten.mm(%x, %t)                             : f32[32, 64] of f32[64@data, 64]  # train.py:4
  %b = aten.add.Tensor(%h, %c)                     : f32[32, 64] of f32[64@data, 64]  # train.py:4
  %a = aten.relu(%b)                               : f32[32, 64] of f32[64@data, 64]  # train.py:5
  %l = aten.sum(%a)                                : f32[] partial<sum: data>  # train.py:6
  %u = aten.t(%a)                                  : f32[64, 32] of f32[64, 64@data]  # train.py:7
  %g = aten.mm(%u, %x)                             : f32[64, 64] partial<sum: data>  # train.py:7
  %r = all_reduce([%g, %l], ["data"], "sum")       : (f32[64, 64], f32[])  # train.py:7
  %s = getitem(%r, 0)                              : f32[64, 64]  # train.py:7
  %e = getitem(%r, 1)                              : f32[]  # train.py:7
  %d = aten.mul.Tensor(%s, %lr)                    : f32[64, 64]  # train.py:8
  %n = aten.sub.Tensor(%w, %d)                     : f32[64, 64]  # train.py:8
  %v = aten.view(%w, [4096])                       : f32[4096]  # train.py:9
  update "fc.weight" = %n
  update "grad[fc.weight]" = %s
  return %e, %v
}"""


@pytest.mark.parametrize("target", ["cpu", "cuda:90"])
def test_a_steps_plan(expect_text: Callable[[str], None], target: str) -> None:
    expect_text(text_of(emit_plan(parse_graph(STEP), CompileOptions(target=target))))


def test_the_plan_of_kernels(expect_text: Callable[[str], None]) -> None:
    expect_text(text_of(emit_plan(updates(), ALL)))


def text_of(plan: Plan) -> str:
    lines = [f"{plan}, {plan.slots} slots, arena of {plan.arena} bytes"]
    for spec, donated in zip(plan.inputs, plan.donated, strict=True):
        lines.append(f"s{spec.slot} = {spec.kind} {spec.label!r} : {spec.type}{', donated' if donated else ''}")
    lines += [f"s{slot} = constant {label!r}" for label, slot in plan.constant_slots.items()]
    lines += [_line(instruction, plan) for instruction in plan.instructions]
    lines += [f"{spec.kind} {spec.label!r} = s{spec.slot} : {spec.type}" for spec in plan.outputs]
    return "\n".join(lines)


def _line(instruction: Instruction, plan: Plan) -> str:
    args = [_argument(each) for each in instruction.args]
    args += [f"{key}={_argument(value)}" for key, value in instruction.kwargs.items()]
    out = f"s{instruction.out} = " if instruction.out >= 0 else ""
    places = [str(region.offset) if region else "-" for region in instruction.regions]
    parts = [f"{out}{instruction.op}({', '.join(args)})"]
    parts += [f"@ {', '.join(places)}"] if places else []
    parts += [f"frees {', '.join(f's{slot}' for slot in instruction.free)}"] if instruction.free else []
    parts += [f"# {plan.sources[instruction.source]}"] if instruction.source >= 0 else []
    return "  ".join(parts)


def _argument(value: Any) -> str:
    if isinstance(value, Slot):
        return f"s{value.index}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_argument, value))}]"
    return value.partition("(")[0] if isinstance(value, str) and value.startswith("kernel ") else repr(value)
