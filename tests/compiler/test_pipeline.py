"""What runs the passes: some of them by name, with progress; and targets."""

from __future__ import annotations

import pytest

from monarch.compiler import ops
from monarch.compiler.errors import MonarchError
from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import PASSES, compile_graph, partition_graph, run_passes
from monarch.compiler.plan.file import plan_bytes, plan_from_bytes
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.text import parse_graph

TEXT = """graph @f on mesh<data=2, model=2> {
  %x = input 0 : f32[8@data, 4]
  %w = state "w" : f32[4, 8@model]
  %v = state "v" : f32[8@model, 4]
  %a = aten.mm(%x, %w) : f32[8, 8]  # train.py:3 in "up"
  %b = aten.mm(%a, %v) : f32[8, 4]  # train.py:4 in "down"
  return %b
}"""


def test_all_passes_by_name_are_the_pipeline() -> None:
    graph = parse_graph(TEXT)
    given = {"rematerialize": "=1GiB", "fuse-products": "=cuda:90"}
    names = [name + given.get(name, "") for name in PASSES]
    assert names.pop() == "overlap-collectives"  # for plans whose collectives are started ahead
    assert str(run_passes(graph, names)) == str(partition_graph(graph))
    apart = str(run_passes(graph, [*names, "overlap-collectives"]))
    assert apart.count(" = wait(") == sum(ops.is_collective(node.target) for node in partition_graph(graph).calls) > 0
    assert str(graph) == str(parse_graph(TEXT))


def test_one_mesh_dim_at_a_time() -> None:
    graph = parse_graph(TEXT)
    one = run_passes(graph, ["simplify-views", "partition-by-data"])
    assert one.partitioned == ("data",)
    both = run_passes(one, ["partition-by-mesh", "simplify-reductions", "join-collectives"])
    assert str(both) == str(partition_graph(graph))
    with pytest.raises(MonarchError, match="partitioned by 'data' already"):
        run_passes(one, ["partition-by-data"])


def test_unknown_passes() -> None:
    with pytest.raises(MonarchError) as caught:
        run_passes(parse_graph(TEXT), ["partition-by-dta"])
    assert str(caught.value) == (
        "unknown pass 'partition-by-dta'\n"
        "  did you mean partition-by-data? Passes are simplify-views, keep-uneven-apart, "
        "pad-for-divisibility, decompose, simplify-lookups, partition-by-mesh, drop-padding, "
        "simplify-reductions, agree-on-predicates, fuse-kernels, join-collectives, join-kernels, fuse-products, "
        "commit-last, rematerialize, overlap-collectives, partition-by-data, partition-by-model."
    )


def test_rematerialize_takes_its_limit() -> None:
    with pytest.raises(MonarchError, match="'rematerialize' needs a limit"):
        run_passes(parse_graph(TEXT), ["rematerialize"])
    with pytest.raises(MonarchError, match="the limit of rematerialize is 'much'"):
        run_passes(parse_graph(TEXT), ["rematerialize=much"])


def test_fuse_products_takes_its_target() -> None:
    graph = parse_graph("""graph @f on mesh<> {
  %x = input 0 : f32[64, 32]
  %w = input 1 : f32[32, 64]
  %a = aten.mm(%x, %w) : f32[64, 64]
  %b = aten.relu(%a) : f32[64, 64]
  return %b
}""")
    assert "kernel mm_relu(" in str(run_passes(graph, ["fuse-kernels", "fuse-products=cuda:90"]))
    for wrong in ("fuse-products", "fuse-products=cpu"):
        with pytest.raises(MonarchError, match=f"'{wrong}' needs a target that is a GPU"):
            run_passes(graph, [wrong])
    with pytest.raises(MonarchError, match="unknown target 'cuda:91'"):
        run_passes(graph, ["fuse-products=cuda:91"])


def test_progress_is_told_after_each_pass() -> None:
    seen: list[tuple[str, int]] = []

    def progress(name: str, seconds: float, graph: Graph) -> None:
        assert seconds >= 0
        seen.append((name, len(graph.partitioned)))

    plan = compile_graph(parse_graph(TEXT), progress=progress)
    assert seen == [
        ("simplify-views", 0),
        ("decompose", 0),
        ("simplify-lookups", 0),
        ("partition-by-data", 1),
        ("partition-by-model", 2),
        ("simplify-reductions", 2),
        ("fuse-kernels", 2),
        ("join-collectives", 2),
        ("join-kernels", 2),
        ("commit-last", 2),
        ("emit-plan", 2),
    ]
    assert list(plan.costs["seconds"]) == [name for name, _ in seen]
    assert plan.report is None and plan.traced == ""


def test_a_target_is_part_of_what_is_hashed_and_saved() -> None:
    graph = parse_graph(TEXT)
    plan, other = compile_graph(graph), compile_graph(graph, CompileOptions(target="cuda:90"), report=True)
    assert (plan.target, other.target) == ("cpu", "cuda:90")
    assert str(other).startswith(f"plan '{graph.name}' on {graph.mesh}, for cuda:90: {len(other.instructions)} instr")
    assert plan.hash != other.hash
    assert plan_from_bytes(plan_bytes(other)).target == "cuda:90"
    assert [instruction.op for instruction in plan.instructions] == [i.op for i in other.instructions]


def test_unknown_targets() -> None:
    with pytest.raises(MonarchError) as caught:
        compile_graph(parse_graph(TEXT), CompileOptions(target="cuda:91"))
    lines = str(caught.value).splitlines()
    assert lines[0] == "unknown target 'cuda:91'"
    assert lines[1].startswith("  did you mean cuda:90?")
    assert [line.split()[0] for line in lines[2:]] == ["cpu", "cuda:80", "cuda:90", "cuda:100", "gfx942"]


def test_a_report_changes_nothing_of_the_plan() -> None:
    graph = parse_graph(TEXT)
    plain, reported = compile_graph(graph), compile_graph(graph, report=True)
    assert plain.hash == reported.hash and plain.graph == reported.graph
