"""Graphs of several meshes: their text, the cut, what the verifier finds, and their results and plans against dense
PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import monarch
from monarch.compiler import ops
from monarch.compiler.errors import GraphError, LayoutError, MonarchError
from monarch.compiler.graph import Graph
from monarch.compiler.mesh import NDSlice, Shape
from monarch.compiler.pipeline import compile_graph, compile_template, graph_after, partition_graph, run_passes
from monarch.compiler.plan.check_parts import wrong_parts
from monarch.compiler.plan.file import plan_bytes, plan_from_bytes
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.text import parse_graph
from monarch.compiler.types import MeshSpec
from monarch.compiler.verify import verify
from monarch.distributed import Mesh
from tests.compiler.programs import Program, programs
from tests.compiler.reference import run_reference
from tests.sample import examples

STEP = """\
graph @step on mesh<stage=2, data=2> with a: mesh<data=2>, b: mesh<data=2> {
  %x = input 0                             : f32[8@data, 4] on a
  %v = state "v"                           : f32[4, 6] on a
  %w = state "w"                           : f32[6, 2] on b
  %h = aten.mm(%x, %v)                     : f32[8, 6] on a
  %t = transfer(%h, "b", none)             : f32[8, 6] on b
  %y = aten.mm(%t, %w)                     : f32[8, 2] on b
  %two = aten.full([2, 6], 2.0, dtype=f32) : f32[2, 6]
  %g = aten.mm(%y, %two)                   : f32[8, 6] on b
  %r = transfer(%g, "a", none)             : f32[8, 6] on a
  %xt = aten.permute(%x, [1, 0])           : f32[4, 8] on a
  %gv = aten.mm(%xt, %r)                   : f32[4, 6] on a
  %n = aten.sub.Tensor(%v, %gv)            : f32[4, 6] on a
  update "v" = %n
  return %y, %g, %r
}"""


def values() -> dict[str | int, torch.Tensor]:
    torch.manual_seed(0)
    return {0: torch.randn(8, 4), "v": torch.randn(4, 6), "w": torch.randn(6, 2)}


def check(graph: Graph) -> None:
    given_ = values()
    returns, updates = run_reference(graph, given_)
    y = given_[0] @ given_["v"] @ given_["w"]
    g = y @ torch.full((2, 6), 2.0)
    for got, wanted in zip([*returns, updates["v"]], [y, g, g, given_["v"] - given_[0].T @ g], strict=True):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize(
    "head",
    [
        "a: mesh<data=2>, b: mesh<data=2>",
        "b: mesh<data=2>, a: mesh<data=2> at 0",
        "a: mesh<data=2> at 2, b: mesh<data=2> at 0",
        "a: mesh<data=2> at 0 by (2), b: mesh<data=2> at 1 by (2)",
        "a: mesh<data=1>, b: mesh<>",
    ],
)
def test_the_text_of_several_meshes_parses_back(head: str) -> None:
    text = STEP.replace("a: mesh<data=2>, b: mesh<data=2>", head)
    graph = parse_graph(text)
    assert str(graph) == str(parse_graph(str(graph)))
    assert parse_graph(str(graph)).parts == graph.parts
    check(graph)


def test_the_graph_prints_as_it_is_written() -> None:
    assert str(parse_graph(STEP)) == STEP


def test_a_graph_is_cut_and_partitioned_part_by_part(expect_text: Callable[[str], None]) -> None:
    partitioned = partition_graph(parse_graph(STEP))
    verify(partitioned, run=True)
    check(partitioned)
    expect_text(str(partitioned))


def test_a_layout_that_is_asked_for_is_received() -> None:
    text = STEP.replace('transfer(%h, "b", none)', 'transfer(%h, "b", "[-, @data]")')
    partitioned = partition_graph(parse_graph(text))
    check(partitioned)
    received = next(node for node in partitioned.fragments["b"].calls if node.target is ops.recv)
    assert str(received.meta["type"]) == "f32[8, 6@data]"


def test_a_pending_sum_is_sent_in_blocks_of_it() -> None:
    """Reducing and scattering moves half of what an all_reduce does."""
    graph = parse_graph("""
        graph @sum on mesh<stage=2, data=2> with a: mesh<data=2>, b: mesh<data=2> {
          %x = input 0                 : f32[4, 8@data] on a
          %y = input 1                 : f32[8@data, 6] on a
          %s = aten.mm(%x, %y)         : f32[4, 6] on a
          %t = transfer(%s, "b", none) : f32[4, 6] on b
          return %t
        }""")
    partitioned = partition_graph(graph)
    x, y = torch.randn(4, 8), torch.randn(8, 6)
    torch.testing.assert_close(run_reference(partitioned, {0: x, 1: y})[0][0], x @ y)
    assert "reduce_scatter" in str(partitioned.fragments["a"]) and "all_reduce" not in str(partitioned)


def test_a_value_is_sent_once_to_a_mesh_that_reads_it_twice() -> None:
    text = STEP.replace("%y = aten.mm(%t, %w)", '%q = transfer(%h, "b", none) : f32[8, 6] on b\n  %y = aten.mm(%q, %w)')
    plan = compile_graph(parse_graph(text))
    assert [transfer.name for transfer in plan.transfers] == ["t", "r"]


def test_the_plan_of_several_meshes(expect_text: Callable[[str], None]) -> None:
    plan = compile_graph(parse_graph(STEP), report=True)
    assert wrong_parts(plan) is None
    again = plan_from_bytes(plan_bytes(plan))
    assert (again.hash, again.transfers, again.inputs, again.outputs) == (
        plan.hash,
        plan.transfers,
        plan.inputs,
        plan.outputs,
    )
    lines = [str(plan), *(f"{spec.kind} {spec.label} {spec.type} of part {spec.part}" for spec in plan.inputs)]
    lines += [f"{spec.kind} {spec.label} {spec.type} of part {spec.part}" for spec in plan.outputs]
    lines += [f"{t.name}: {t.sent} -> {t.received}" for t in plan.transfers]
    for part in plan.parts:
        lines.append(f"{part.name}: {', '.join(each.op for each in part.plan.instructions)}")
    lines.append(f"transfers: {plan.costs['transfers']}")
    expect_text("\n".join(lines))


def test_a_scalar_that_both_read_is_an_input_of_both() -> None:
    text = (
        STEP.replace("  %h = ", '  %s = scalar "lr" : f32[]\n  %h = ')
        .replace("%h = aten.mm(%x, %v) ", "%p = aten.mul.Tensor(%x, %s) : f32[8, 4] on a\n  %h = aten.mm(%p, %v)")
        .replace("%y = aten.mm(%t, %w)", "%m = aten.mul.Tensor(%t, %s) : f32[8, 6] on b\n  %y = aten.mm(%m, %w)")
    )
    plan = compile_graph(parse_graph(text))
    assert [(spec.label, spec.part) for spec in plan.inputs if spec.kind == "scalar"] == [("lr", 0), ("lr", 1)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("aten.mm(%t, %w)", "aten.mm(%h, %w)"), "has operands on several meshes: a, b"),
        (('transfer(%h, "b", none)             : f32[8, 6]', 'transfer(%h, "b", none) : f32[8, 5]'), "gives f32"),
        (('transfer(%h, "b", none)', 'transfer(%h, "c", none)'), "which is not the mesh that it is on"),
        (
            ('transfer(%h, "b", none)             : f32[8, 6] on b', 'transfer(%h, "a", none) : f32[8, 6] on a'),
            "what is there",
        ),
        (('transfer(%h, "b", none)', 'transfer(%h, "b", "[@model, -]")'), "unknown mesh dim 'model'"),
        (("f32[4, 6] on a\n  update", "f32[4, 6] on b\n  update"), "is computed on a"),
        (('update "v" = %n', 'update "v" = %g'), "which is on another mesh"),
        (("return %y", "return %two"), "which is on no mesh"),
    ],
)
def test_the_verifier_finds_what_is_wrong(change: tuple[str, str], message: str) -> None:
    assert change[0] in STEP
    with pytest.raises(GraphError) as error:
        verify(parse_graph(STEP.replace(*change)))
    assert message in error.value.message


def test_the_text_names_meshes_that_there_are() -> None:
    with pytest.raises(GraphError, match="unknown mesh 'c'"):
        parse_graph(STEP.replace("f32[8@data, 4] on a", "f32[8@data, 4] on c"))
    with pytest.raises(GraphError, match="stands twice"):
        parse_graph(STEP.replace("b: mesh<data=2>", "a: mesh<data=2>"))


def test_parts_that_wait_for_one_another_are_an_error() -> None:
    graph = partition_graph(parse_graph(STEP))
    first = graph.fragments["a"]
    sent, received = (next(n for n in first.calls if n.target is op) for op in (ops.send, ops.recv))
    sent.prepend(received)  # a receives what b computes from what a sends
    with pytest.raises(GraphError, match="wait for one another: a for transfer 1, b for transfer 0"):
        run_reference(graph, values())


def test_what_is_not_for_several_meshes_says_so() -> None:
    graph = parse_graph(STEP)
    with pytest.raises(MonarchError, match="run on CPUs alone"):
        compile_graph(graph, CompileOptions(target="cuda:90"))


def test_a_template_of_several_meshes_gives_the_plan_that_is_compiled_for_a_size() -> None:
    mesh = Mesh.abstract(stage=2, data=2)
    first, second = mesh.slice(stage=0), mesh.slice(stage=1)

    @monarch.program
    def named(x: "f32[b, 4]") -> Any:
        hidden = monarch.layout(x.to(first), "[@data, -]") * 2
        return hidden.to(second, "[@data, -]").sum(1).to(first) + hidden[:, 0]

    traced = named.trace_named(torch.zeros(8, 4))
    assert traced is not None
    template = compile_template(traced[0], CompileOptions(), traced[1])
    for rows in (8, 12):
        plan, wanted = template.at({"b": rows}), compile_graph(named.trace(torch.zeros(rows, 4)).graph)
        assert plan.inputs == wanted.inputs and plan.outputs == wanted.outputs
        assert plan.costs["transfers"] == wanted.costs["transfers"]
        for ours, theirs in zip(plan.transfers, wanted.transfers, strict=True):
            assert (ours.sent, ours.received) == (theirs.sent, theirs.received)
        for made, compiled in zip(plan.parts, wanted.parts, strict=True):
            assert made.plan.outputs == compiled.plan.outputs and made.plan.arena == compiled.plan.arena


def test_an_argument_on_no_mesh_is_read_where_its_layout_fits() -> None:
    text = STEP.replace("f32[8@data, 4] on a", "f32[8@data, 4]").replace("b: mesh<data=2>", "b: mesh<model=2>")
    check(partition_graph(parse_graph(text)))
    wrong = text.replace("aten.mm(%t, %w)", "aten.mm(%t, %w) : f32[8, 2] on b\n  %z = aten.mm(%x, %k)").replace(
        "  %w = ", '  %k = state "k" : f32[4, 2] on b\n  %w = '
    )
    with pytest.raises(LayoutError, match="unknown mesh dim 'data' in the layout of input 0, which b reads"):
        partition_graph(parse_graph(wrong))


def test_passes_run_by_name_on_every_part() -> None:
    graph = run_passes(parse_graph(STEP), ["partition-by-mesh"])
    check(graph)
    check(graph_after(parse_graph(STEP), "fuse-kernels"))


@st.composite
def spread(draw: st.DrawFn, uneven: bool) -> tuple[Program, Graph]:
    """A random program, and the same with its values on two meshes, at random."""
    program = draw(programs(max_workers=4, uneven=uneven))
    mesh = program.graph.mesh
    row_major = NDSlice.new_row_major([size for _, size in mesh.dims])
    graph = Graph("spread", MeshSpec((("side", 2), *mesh.dims)))
    for name, offset in (("a", 0), ("b", mesh.workers)):
        place = NDSlice(offset=offset, sizes=row_major.sizes, strides=row_major.strides)
        graph.parts[name] = Shape(mesh.names, place)
    graph.constants = dict(program.graph.constants)
    made: dict[object, object] = {}
    homes: dict[object, str] = {}

    def at(node: object, where: str) -> object:
        value = made[node]
        found = value.meta.get("mesh")  # type: ignore[attr-defined]
        if found is None or found == where:
            return value
        layout = draw(st.sampled_from([None, None, "replicated"]))
        text = None if layout is None else f"[{', '.join('-' for _ in value.meta['type'].shape)}]"  # type: ignore[attr-defined]
        moved = graph.call(ops.transfer, value, where, text, type=replace(value.meta["type"], layout=None))  # type: ignore[attr-defined]
        moved.meta["mesh"] = where
        return moved

    for node in program.graph.fx.nodes:
        if node.op == "placeholder":
            copy = made[node] = graph.fx.node_copy(node)
            if node.meta["kind"] in ("input", "state"):
                copy.meta["mesh"] = homes[node.meta["label"]] = draw(st.sampled_from("ab"))
        elif node.op == "call_function":
            several = isinstance(node.meta["type"], tuple) or node.target.__name__ == "getitem"
            where = "a" if several else draw(st.sampled_from("ab"))
            operands = {each: at(each, where) for each in node.all_input_nodes}
            copy = made[node] = graph.fx.node_copy(node, operands.__getitem__)  # type: ignore[arg-type]
            if any("mesh" in each.meta for each in operands.values()):  # type: ignore[attr-defined]
                copy.meta["mesh"] = where

    def home(node: object, where: str) -> object:
        value = at(node, where)
        if "mesh" not in value.meta:  # type: ignore[attr-defined]
            value = graph.call(ops.transfer, value, where, None, type=value.meta["type"])  # type: ignore[attr-defined]
            value.meta["mesh"] = where
        return value

    updates = {label: home(node, homes.get(label, "b")) for label, node in program.graph.updates.items()}
    graph.output([None if node is None else home(node, "a") for node in program.graph.returns], updates)  # type: ignore[arg-type]
    return program, graph


def agrees(program: Program, graph: Graph) -> None:
    verify(graph)
    partitioned = partition_graph(graph)
    verify(partitioned, run=True)
    returns, updates = run_reference(partitioned, program.values, poison=True)
    for got, expected in zip(returns, program.returns, strict=True):
        torch.testing.assert_close(got, expected, equal_nan=True)
    dense = {node.name: value for node, value in program.made}
    for label, node in program.graph.updates.items():
        torch.testing.assert_close(updates[label], dense[node.name], equal_nan=True)
    plan = compile_graph(graph)
    assert wrong_parts(plan) is None


@examples(25, 60)
@given(spread(uneven=False))
def test_programs_on_two_meshes_give_the_dense_results(case: tuple[Program, Graph]) -> None:
    agrees(*case)


@examples(25, 60)
@given(spread(uneven=True))
def test_sizes_that_neither_mesh_divides_give_the_dense_results(case: tuple[Program, Graph]) -> None:
    agrees(*case)
