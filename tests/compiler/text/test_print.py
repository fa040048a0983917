"""How graphs look."""

from __future__ import annotations

import pytest
import torch

from monarch.compiler import ops
from monarch.compiler.errors import GraphError, Source
from monarch.compiler.graph import Graph, Provenance
from monarch.compiler.text import parse_graph, parse_type, print_graph, print_node
from monarch.compiler.types import MeshSpec

aten = torch.ops.aten

WHOLE = """\
graph @train_step on mesh<data=4, model=2> {
  %x = input 0           : f32[64@data, 1024]
  %w = state "fc.weight" : f32[1024, 4096@model]
  %h = aten.mm(%x, %w)   : f32[64@data, 4096@model]  # train.py:12
  return %h
}"""

PARTITIONED = """\
graph @step on mesh<data=4, model=2> partitioned<model, data> {
  %x = input 0                                          : f32[16, 1024] of f32[64@data, 1024]
  %seed = seed "seed"                                   : i64[]
  %sum = aten.sum.dim_IntList(%x, [0], true, dtype=f64) : f64[1, 1024] partial<sum: data>  # train.py:3:9-14
  %all = all_reduce([%sum], ["data"], "sum")            : (f64[1, 1024])                   # ; %sum is a sum
  %y = getitem(%all, 0)                                 : f64[1, 1024]                     # backward
  %r = random("uniform", [4], f32, %seed, 0, [4], [[]]) : f32[4]
  %split = aten.split.Tensor(%y, 512, 1)                : (f64[1, 512], f64[1, 512])
  %f = aten.full([], -inf, dtype=f32, device=device("cpu"), pin_memory=false, layout=strided) : f32[]
  %c = aten.clone(%r, memory_format=contiguous_format)  : f32[4]
  %done = commit()                                      : none
  update "fc.weight" = %y
  return %y, none, %c
}"""


def test_a_graph_with_global_types() -> None:
    graph = Graph("train_step", MeshSpec.of(data=4, model=2))
    x = graph.placeholder("input", 0, parse_type("f32[64@data, 1024]"), "x")
    w = graph.placeholder("state", "fc.weight", parse_type("f32[1024, 4096@model]"), "w")
    type_ = parse_type("f32[64@data, 4096@model]")
    h = graph.call(aten.mm.default, x, w, type=type_, provenance=Provenance(Source("/home/me/train.py", 12)), name="h")
    graph.output([h], {})
    assert str(graph) == WHOLE


@pytest.mark.parametrize("text", [WHOLE, PARTITIONED])
def test_printed_text_parses_to_what_prints_the_same(text: str) -> None:
    assert print_graph(parse_graph(text)) == text


def test_hand_written_text_needs_no_alignment_and_may_leave_out_local_shapes() -> None:
    text = """
        # One worker's view is worked out from the layout.
        graph @f on mesh<data=4>   partitioned<data> {   # a comment

          %x=input 0:f32[8@data] # any other comment
          # and one more
          %y = aten.relu(%x) : f32[2] of f32[8@data]
          return %y # the end
        }
        """
    assert print_graph(parse_graph(text)) == (
        "graph @f on mesh<data=4> partitioned<data> {\n"
        "  %x = input 0       : f32[2] of f32[8@data]\n"
        "  %y = aten.relu(%x) : f32[2] of f32[8@data]\n"
        "  return %y\n"
        "}"
    )


def test_a_half_partitioned_graph_shows_shapes_local_to_the_dims_that_are_done() -> None:
    text = """\
graph @f on mesh<data=4, model=2> partitioned<model> {
  %x = input 0 : f32[8@data, 3] of f32[8@data, 6@model]
  return
}"""
    with pytest.raises(GraphError, match="has no layout"):
        parse_graph(text)
    graph = parse_graph(text.replace("f32[8@data, 3] of", "f32[8, 3] of"))
    assert "f32[8, 3] of f32[8@data, 6@model]" in str(graph)


def test_values_may_have_the_names_of_python_builtins() -> None:
    graph = parse_graph(
        "graph @f on mesh<> {\n %sum = input 0 : f32[]\n %sum_1 = aten.neg(%sum) : f32[]\n return %sum_1\n}"
    )
    assert [node.name for node in graph.fx.nodes] == ["sum", "sum_1", "output"]
    added = graph.fx.placeholder("sum")
    assert added.name not in ("sum", "sum_1")


def test_paths_and_reasons_are_printed_on_request() -> None:
    graph = Graph("f", MeshSpec(()))
    x = graph.placeholder("input", 0, parse_type("f32[]"), "x")
    x.meta.update(provenance=Provenance(Source("/a b/t.py", 3, 4, 9), backward=True), why="the user says so")
    assert print_node(x) == "%x = input 0 : f32[]  # t.py:3:4-9 backward; the user says so"
    assert '# "/a b/t.py":3:4-9 backward; the user says so' in print_graph(graph, paths=True)


def test_an_untyped_value_prints_with_a_question_mark() -> None:
    graph = Graph("f", MeshSpec(()))
    graph.fx.call_function(ops.commit)
    graph.output([], {})
    assert "%commit = commit() : ?" in str(graph)
    assert "type" not in next(iter(parse_graph(str(graph)).calls)).meta


@pytest.mark.parametrize(
    ("target", "argument", "message"),
    [
        (torch.mm, 1, "%bad calls <built-in method mm"),
        (aten.neg.default, {1: 2}, "an argument of %bad = aten.neg has no text: {1: 2} (immutable_dict)"),
    ],
)
def test_what_has_no_text_is_an_error(target: object, argument: object, message: str) -> None:
    graph = Graph("f", MeshSpec(()))
    graph.call(target, argument, type=None, name="bad")
    with pytest.raises(GraphError) as caught:
        print_graph(graph)
    assert str(caught.value).startswith(message)


def test_only_placeholders_calls_and_the_output_have_text() -> None:
    graph = Graph("f", MeshSpec(()))
    graph.fx.get_attr("weight")
    with pytest.raises(GraphError, match="%weight is a 'get_attr' node"):
        print_graph(graph)
