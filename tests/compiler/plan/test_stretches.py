"""Which instructions of a plan become CUDA graphs, and why others do not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from monarch.compiler.errors import MonarchError
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import Instruction, Plan, Slot
from monarch.compiler.plan.file import load_plan, save_plan
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.stretches import staying, stretches_of, why_not
from monarch.compiler.schedule.emit import emit_plan
from monarch.compiler.text import parse_graph

TEXT = """graph @f on mesh<data=2> partitioned<data> {
  %x = input 0 : f32[4]
  %w = state "weight" : f32[4]
  %k = state "kept" : f32[4]
  %a = aten.mul.Tensor(%x, %k) : f32[4]
  %b = aten.exp(%a) : f32[4]
  %s = all_reduce([%b, %a], ["data"], "sum") : (f32[4], f32[4])
  %c = getitem(%s, 0) : f32[4]
  %d = aten.add.Tensor(%b, %c) : f32[4]
  %e = getitem(%s, 1) : f32[4]
  %f = aten.permute(%k, [0]) : f32[4]
  %g = aten.sin(%f) : f32[4]
  %h = aten.sort(%e) : (f32[4], i64[4])
  %i = getitem(%h, 0) : f32[4]
  %n = aten.add.Tensor(%w, %i) : f32[4]
  update "weight" = %n
  return %d, %g
}"""


def plan_of(text: str = TEXT) -> Plan:
    return emit_plan(parse_graph(text), CompileOptions(target="cuda:90", cuda_graphs=True))


def test_stretches_end_where_the_host_takes_part() -> None:
    plan = plan_of()
    found = stretches_of(plan)
    ops = [each.op for each in plan.instructions]
    assert [(plan.instructions[at].op, why) for at, why in found.ends] == [
        ("all_reduce", "it moves tensors between workers"),
        ("commit", "the host waits for all workers"),
    ]
    first, second = found.stretches
    assert ops[first.start : first.stop] == ["aten.mul.Tensor", "aten.exp.default"]
    x, w, k = (spec.slot for spec in plan.inputs)
    assert (first.reads, first.launches) == ((x, k), 2)
    out = {name: each.out for name, each in zip("abscdefghi", plan.instructions, strict=False)}
    assert first.gives == (out["a"], out["b"])
    # What stands behind the commit is one op: a graph would spare nothing.
    assert [ops[at] for at in found.short] == ["aten.add_.Tensor"]
    # The first getitem is left where it is; the second is taken out before.
    assert ops[second.start : second.stop][0] == "aten.add_.Tensor"
    assert [plan.instructions[at].out for at in second.apart] == [out["e"]]
    assert second.reads == (out["b"], out["c"], k, out["e"]) and out["s"] in second.frees
    assert second.gives == tuple(sorted((out["d"], out["g"], out["i"])))
    assert staying(plan) == {w, k, out["f"], plan.instructions[-1].out}


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("aten.mm.default", None),
        ("aten.embedding_dense_backward.default", None),
        ("aten._scaled_dot_product_flash_attention_for_cpu.default", None),
        ("axis_index", None),
        ("wait", "it moves tensors between workers"),
        ("aten.nonzero.default", "the host waits for its result"),
        ("aten._local_scalar_dense.default", "the host waits for its result"),
        ("aten.equal.default", "the host waits for its result"),
        ("aten._linalg_eigh.default", "the host waits for its result"),
        ("aten.native_dropout.default", "it draws from torch's own generator"),
        ("mine.op.default", "whether an op of 'mine' waits for the device is not known"),
    ],
)
def test_why_an_op_is_in_none(op: str, why: str | None) -> None:
    assert why_not(Instruction(op, (), {}, 0)) == why


def test_random_numbers_are_made_of_a_seed_on_the_device() -> None:
    given = ("uniform", [2], None, Slot(0), 0, [2], [[]])
    assert why_not(Instruction("random", given, {}, 1)) is None
    assert why_not(Instruction("random", (*given[:3], 7, *given[4:]), {}, 1)) == "its seed comes from the host"


def test_a_plan_that_uses_a_slot_twice_has_none() -> None:
    plan = plan_of()
    twice = replace(plan.instructions[0], out=plan.instructions[1].out)
    found = stretches_of(replace(plan, instructions=(twice, *plan.instructions[1:])))
    assert not found.stretches and "one value after the other" in found.ends[0][1]


def test_graphs_are_for_gpus() -> None:
    graph = parse_graph("graph @f on mesh<> {\n  %x = input 0 : f32[4]\n  %y = aten.neg(%x) : f32[4]\n  return %y\n}")
    for target in ("cpu", "gfx942"):
        with pytest.raises(
            MonarchError, match=f"cuda_graphs=True is for GPUs of NVIDIA's, and the plan is for {target}"
        ):
            compile_graph(graph, CompileOptions(target=target, cuda_graphs=True))
    assert not compile_graph(graph, CompileOptions(target="cuda:90")).cuda_graphs


def test_a_file_says_so(tmp_path: Path) -> None:
    plan = plan_of()
    save_plan(plan, tmp_path / "f.mplan")
    read = load_plan(str(tmp_path / "f.mplan"))
    assert (
        read.cuda_graphs
        and read.hash == plan.hash != emit_plan(parse_graph(TEXT), CompileOptions(target="cuda:90")).hash
    )
    assert "for cuda:90, as CUDA graphs" in str(read)
