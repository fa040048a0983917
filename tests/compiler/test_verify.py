"""The verifier accepts good graphs, and names what is wrong with others."""

from __future__ import annotations

import re
from collections.abc import Callable
from textwrap import dedent

import pytest
import torch
from torch import fx

from monarch.compiler.errors import GraphError, Source
from monarch.compiler.graph import Graph, Provenance
from monarch.compiler.text import parse_graph, parse_type
from monarch.compiler.types import MeshSpec
from monarch.compiler.verify import verify

GLOBAL = """
graph @f on mesh<data=2, model=2> {
  %x = input 0                       : f32[8@data, 4]
  %w = state "w"                     : f32[4, 6@model]
  %lr = scalar "lr"                  : f64[]
  %h = aten.mm(%x, %w)               : f32[8, 6]
  %c = constrain(%h, "[@data, -]")   : f32[8, 6]
  %s = aten.split.Tensor(%c, 3, 1)   : (f32[8, 3], f32[8, 3])
  %a = getitem(%s, 1)                : f32[8, 3]
  %n = aten.mul.Tensor(%w, %lr)      : f32[4, 6]
  update "w" = %n
  update "made" = %lr
  return %a, none
}"""

LOCAL = """
graph @f on mesh<data=2, model=2> partitioned<model, data> {
  %x = input 0                                               : f32[8@data, 4]
  %w = state "w"                                             : f32[4@(model,data), 6]
  %p = aten.sum.dim_IntList(%x, [0])                         : f32[4] partial<sum: data>
  %q = aten.mul.Tensor(%p, 2.0)                              : f32[4] partial<sum: data>
  %r = all_reduce([%q], ["data"], "sum")                     : (f32[4])
  %r0 = getitem(%r, 0)                                       : f32[4]
  %e = aten.exp(%r0)                                         : f32[4]
  %s = shard(%e, "model", 0)                                 : f32[4@model]
  %g = all_gather([%w, %s], ["data"], [0, 0])                : (f32[4@model, 6], f32[4])
  %g0 = getitem(%g, 0)                                       : f32[4@model, 6]
  %m = aten.mul.Tensor(%g0, %g0)                             : f32[4@model, 6]
  %z = aten.sum.dim_IntList(%m, [0])                         : f32[6] partial<sum: model>
  %o = first_only(%e, "model")                               : f32[4] partial<sum: model>
  %t = reduce_scatter([%o], ["model"], [0], "sum")           : (f32[4@model])
  %t0 = getitem(%t, 0)                                       : f32[4@model]
  %b = all_reduce([%z, %z], ["model"], "sum")                : (f32[6], f32[6])
  %b1 = getitem(%b, 1)                                       : f32[6]
  %i = axis_index("data")                                    : i64[] varying<data>
  %j = aten.add.Tensor(%i, 1)                                : i64[] varying<data>
  %y = all_to_all([%x], ["data"], [0], [1])                  : (f32[8, 4@data])
  %y0 = getitem(%y, 0)                                       : f32[8, 4@data]
  %d = commit()                                              : none
  %n = aten.neg(%w)                                          : f32[4@(model,data), 6]
  update "w" = %n
  return %b1, %t0, %j, %y0, none
}"""
# %s is whole on 'data', so it cannot be gathered there; the good graph gathers %w alone.
LOCAL = LOCAL.replace('all_gather([%w, %s], ["data"], [0, 0])', 'all_gather([%w], ["data"], [0])').replace(
    "(f32[4@model, 6], f32[4])", "(f32[4@model, 6])"
)


def refused(graph: Graph, after: str = "", *, run: bool = False) -> str:
    with pytest.raises(GraphError) as caught:
        verify(graph, after, run=run)
    return str(caught.value)


@pytest.mark.parametrize("text", [GLOBAL, LOCAL])
def test_good_graphs_pass(text: str) -> None:
    verify(parse_graph(text))
    verify(parse_graph(text), run=True)


@pytest.mark.parametrize(
    ("text", "right", "wrong", "message"),
    [
        (
            GLOBAL,
            "getitem(%s, 1)",
            "getitem(%s, 2)",
            """\
            %a takes element 2 of %s, which has 2
              %a = getitem(%s, 2) : f32[8, 3]""",
        ),
        (
            GLOBAL,
            "getitem(%s, 1)",
            "getitem(%c, 1)",
            """\
            %a takes an element of %c, which is one tensor
              %a = getitem(%c, 1) : f32[8, 3]""",
        ),
        (
            GLOBAL,
            "%a = getitem(%s, 1)                : f32[8, 3]",
            "%a = getitem(%s, 1)                : f32[8, 4]",
            """\
            %a is element 1 of %s, whose type is f32[8, 3]
              %a = getitem(%s, 1) : f32[8, 4]""",
        ),
        (
            GLOBAL,
            "aten.mm(%x, %w)",
            "aten.mm(%x)",
            """\
            %h does not give 'mat2' to aten.mm
              %h = aten.mm(%x) : f32[8, 6]
              aten::mm(Tensor self, Tensor mat2) -> Tensor""",
        ),
        (
            GLOBAL,
            "aten.mm(%x, %w)",
            "aten.mm(%x, %w, alpha=1)",
            """\
            %h gives 'alpha' to aten.mm, which has no such argument
              %h = aten.mm(%x, %w, alpha=1) : f32[8, 6]
              aten::mm(Tensor self, Tensor mat2) -> Tensor""",
        ),
        (
            GLOBAL,
            "aten.mm(%x, %w)",
            "aten.mm(%x, %w, %w)",
            """\
            %h gives 3 arguments to aten.mm, which takes 2
              %h = aten.mm(%x, %w, %w) : f32[8, 6]""",
        ),
        (
            GLOBAL,
            "aten.mul.Tensor(%w",
            "aten.mul_.Tensor(%w",
            """\
            %n calls aten.mul_.Tensor, which writes over its arguments: a graph is pure
              %n = aten.mul_.Tensor(%w, %lr) : f32[4, 6]""",
        ),
        (
            GLOBAL,
            ": f32[8, 6]\n  %c",
            ": ?\n  %c",
            """\
            %h has no type
              %h = aten.mm(%x, %w) : ?""",
        ),
        (
            GLOBAL,
            'state "w" ',
            "state 3 ",
            """\
            %w has the label 3: inputs have their position, other placeholders a name
              %w = state 3 : f32[4, 6@model]""",
        ),
        (
            GLOBAL,
            'scalar "lr"                  : f64[]',
            'scalar "lr"                  : f64[1]',
            """\
            %lr is a scalar: its type has to be one whole number, such as f64[]
              %lr = scalar "lr" : f64[1]""",
        ),
        (
            GLOBAL,
            'scalar "lr"                  : f64[]',
            'state "w"                    : f64[]',
            """\
            %lr stands for the same as a placeholder above it
              %lr = state "w" : f64[]""",
        ),
        (
            GLOBAL,
            'update "w" = %n',
            'update "w" = %a',
            "%output updates state 'w', which is f32[4, 6@model], with %a, which is f32[8, 3]",
        ),
        (
            GLOBAL,
            "return %a",
            "return %s",
            "%output returns s, which is not one tensor",
        ),
        (
            GLOBAL,
            '%c = constrain(%h, "[@data, -]")',
            '%c = shard(%h, "data", 0)',
            """\
            %c names the mesh dim 'data', over which the graph is not partitioned
              %c = shard(%h, "data", 0) : f32[8, 6]""",
        ),
        (
            LOCAL,
            "aten.exp(%r0)",
            'constrain(%r0, "[-]")',
            """\
            %e asks for a layout, and the graph is partitioned over all dims already
              %e = constrain(%r0, "[-]") : f32[4]""",
        ),
        (
            LOCAL,
            "%q = aten.mul.Tensor(%p, 2.0) ",
            "%q = aten.exp(%p) ",
            """\
            %q cannot take %p before it is reduced over 'data'
              %q = aten.exp(%p) : f32[4] partial<sum: data>
              %p : f32[4] partial<sum: data>""",
        ),
        (
            LOCAL,
            "%e = aten.exp(%r0)                                         : f32[4]",
            "%e = aten.exp(%r0)                                         : f32[4] partial<sum: data>",
            """\
            %e is a pending reduction over 'data', and no operand is sharded or pending there
              %e = aten.exp(%r0) : f32[4] partial<sum: data>""",
        ),
        (
            LOCAL,
            "aten.mul.Tensor(%g0, %g0)",
            "aten.mul.Tensor(%g0, %w)",
            """\
            %m does not lie on 'data' as its operands do: its rule is a b, a b -> a b
              %m = aten.mul.Tensor(%g0, %w) : f32[2, 6] of f32[4@model, 6]
              %g0 : f32[4@model, 6]
              %w : f32[4@(model,data), 6]""",
        ),
        (
            LOCAL,
            "%z = aten.sum.dim_IntList(%m, [0])                         : f32[6] partial<sum: model>",
            "%z = aten.sum.dim_IntList(%m, [0])                         : f32[6]",
            """\
            %z does not lie on 'model' as its operands do: its rule is a b -> b
              %z = aten.sum.dim_IntList(%m, [0]) : f32[6]
              %m : f32[4@model, 6]""",
        ),
        (
            LOCAL,
            "%j = aten.add.Tensor(%i, 1)                                : i64[] varying<data>",
            "%j = aten.add.Tensor(%i, 1)                                : i64[]",
            """\
            %j takes a value that varies along 'data', so its own has to vary as well
              %j = aten.add.Tensor(%i, 1) : i64[]""",
        ),
        (
            LOCAL,
            "%e = aten.exp(%r0)                                         : f32[4]",
            "%e = aten.exp(%r0)                                         : f32[4] varying<data>",
            """\
            %e varies along 'data', and no operand does
              %e = aten.exp(%r0) : f32[4] varying<data>""",
        ),
        (
            LOCAL,
            'all_reduce([%q], ["data"], "sum")',
            'all_reduce([%q], ["data"], "max")',
            """\
            %r reduces %q, which is f32[4] partial<sum: data>, over 'data'
              %r = all_reduce([%q], ["data"], "max") : (f32[4])""",
        ),
        (
            LOCAL,
            'all_reduce([%q], ["data"], "sum")',
            'all_reduce([%q], ["data", "model"], "sum")',
            """\
            %r reduces %q, which is f32[4] partial<sum: data>, over 'model'
              %r = all_reduce([%q], ["data", "model"], "sum") : (f32[4])""",
        ),
        (
            LOCAL,
            'all_reduce([%q], ["data"], "sum")',
            'all_reduce([%q], ["data", "data"], "sum")',
            """\
            %r names the mesh dim 'data' twice
              %r = all_reduce([%q], ["data", "data"], "sum") : (f32[4])""",
        ),
        (
            LOCAL,
            'all_reduce([%q], ["data"], "sum")',
            'all_reduce([%q], ["data"])',
            """\
            %r has to give all_reduce just tensors, mesh_dims, reduction
              %r = all_reduce([%q], ["data"]) : (f32[4])""",
        ),
        (
            LOCAL,
            'all_reduce([%q], ["data"], "sum")                     : (f32[4])',
            'all_reduce([%q], ["data"], "sum")                     : (f32[4] partial<sum: data>)',
            """\
            %r gives f32[4] for %q, and its type says f32[4] partial<sum: data>
              %r = all_reduce([%q], ["data"], "sum") : (f32[4] partial<sum: data>)""",
        ),
        (
            LOCAL,
            'all_reduce([%q], ["data"], "sum")                     : (f32[4])',
            'all_reduce([%q], ["data"], "sum")                     : f32[4]',
            """\
            %r takes 1 tensors, so its type has to be a tuple of as many
              %r = all_reduce([%q], ["data"], "sum") : f32[4]""",
        ),
        (
            LOCAL,
            'all_gather([%w], ["data"], [0])',
            'all_gather([%w], ["model"], [0])',
            """\
            %g gathers dim 0 of %w, which is f32[4@(model,data), 6], over model
              %g = all_gather([%w], ["model"], [0]) : (f32[2, 6] of f32[4@model, 6])""",
        ),
        (
            LOCAL,
            'all_gather([%w], ["data"], [0])',
            'all_gather([%w], ["data"], [0, 1])',
            """\
            %g takes 1 tensors, and 2 dims
              %g = all_gather([%w], ["data"], [0, 1]) : (f32[2, 6] of f32[4@model, 6])""",
        ),
        (
            LOCAL,
            'all_to_all([%x], ["data"], [0], [1])',
            'all_to_all([%x], ["data"], [1], [0])',
            """\
            %y gathers dim 1 of %x, which is f32[8@data, 4], over data
              %y = all_to_all([%x], ["data"], [1], [0]) : (f32[8, 2] of f32[8, 4@data])""",
        ),
        (
            LOCAL,
            'shard(%e, "model", 0)',
            'shard(%e, "model", 1)',
            """\
            %s asks for what cannot be: cannot shard dim 1 over mesh dim 'model': the layout [-] has 1 dims
              %s = shard(%e, "model", 1) : f32[2] of f32[4@model]
              dims count from 0 to 0.""",
        ),
        (
            LOCAL,
            'shard(%e, "model", 0)',
            'shard(%p, "data", 0)',
            """\
            %s takes %p, which is f32[4] partial<sum: data> and so not whole on 'data'
              %s = shard(%p, "data", 0) : f32[2] of f32[4@model]""",
        ),
        (
            LOCAL,
            "return %b1, %t0",
            "return %b1",
            """\
            %t is a collective whose results nobody reads
              %t = reduce_scatter([%o], ["model"], [0], "sum") : (f32[2] of f32[4@model])""",
        ),
        (
            LOCAL,
            'update "w" = %n',
            'update "w" = %g0',
            """\
            %output updates state 'w', which is f32[4@(model,data), 6], with %g0, which is f32[4@model, 6]
              they have to lie alike on 'data'.""",
        ),
    ],
)
def test_what_is_wrong_is_named(text: str, right: str, wrong: str, message: str) -> None:
    assert text.count(right) == 1
    graph = parse_graph(text.replace(right, wrong))
    assert refused(graph) == dedent(message)
    assert refused(graph, "some-pass") == f"after some-pass: {dedent(message)}"


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "aten.mul.Tensor(%g0, %g0)",
            "aten.mul.Tensor(%g0, [1, 2])",
            """\
            %m cannot be computed on one worker's shapes: REASON
              %m = aten.mul.Tensor(%g0, [1, 2]) : f32[2, 6] of f32[4@model, 6]
              %g0 : f32[2, 6] of f32[4@model, 6]""",
        ),
        (
            "aten.exp(%r0)",
            "aten.cat([%r0, %r0])",
            """\
            %e is f32[8] when it is computed on one worker's shapes
              %e = aten.cat([%r0, %r0]) : f32[4]
              %r0 : f32[4]""",
        ),
        (
            "%n = aten.neg(%w) ",
            "%n = aten._to_copy(%w, dtype=f64) ",
            """\
            %n is f64[1, 6] when it is computed on one worker's shapes
              %n = aten._to_copy(%w, dtype=f64) : f32[1, 6] of f32[4@(model,data), 6]
              %w : f32[1, 6] of f32[4@(model,data), 6]""",
        ),
        (
            "%n = aten.neg(%w) ",
            '%n = random("uniform", [2, 6], f32, 3, 0, [4, 6], [["model"], []]) ',
            """\
            %n is f32[2, 6] when it is computed on one worker's shapes
              %n = random("uniform", [2, 6], f32, 3, 0, [4, 6], [["model"], []]) : """
            "f32[1, 6] of f32[4@(model,data), 6]",
        ),
    ],
)
def test_running_on_one_workers_shapes(right: str, wrong: str, message: str) -> None:
    assert LOCAL.count(right) == 1
    graph = parse_graph(LOCAL.replace(right, wrong))
    verify(graph)
    found = re.sub("(?<=shapes: ).+", "REASON", refused(graph, run=True))  # which is torch's
    assert found == dedent(message)


def small() -> Graph:
    graph = Graph("f", MeshSpec.of(data=2))
    x = graph.placeholder("input", 0, parse_type("f32[4@data]"), "x")
    y = graph.call(
        torch.ops.aten.neg.default, x, type=parse_type("f32[4]"), name="y", provenance=Provenance(Source("train.py", 7))
    )
    graph.output([y], {})
    return graph


def node(graph: Graph, name: str) -> fx.Node:
    return next(node for node in graph.fx.nodes if node.name == name)


def test_the_small_graph_passes() -> None:
    verify(small(), run=True)


def reads_below(graph: Graph) -> None:
    node(graph, "x").prepend(node(graph, "y"))


def two_names(graph: Graph) -> None:
    node(graph, "y").name = "x"


def no_output(graph: Graph) -> None:
    graph.fx.erase_node(graph.fx.output_node())


def odd_output(graph: Graph) -> None:
    graph.fx.output_node().args = (node(graph, "y"),)


def python_function(graph: Graph) -> None:
    node(graph, "y").target = torch.neg


def attribute(graph: Graph) -> None:
    with graph.fx.inserting_before(node(graph, "y")):
        graph.fx.get_attr("weight")


def bad_kind(graph: Graph) -> None:
    node(graph, "x").meta["kind"] = "buffer"


def no_type_at_all(graph: Graph) -> None:
    node(graph, "y").meta["type"] = "f32[4]"


def undividable(graph: Graph) -> None:
    node(graph, "x").meta["type"] = parse_type("f32[3@data]")
    graph.partitioned = ("data",)


def several(graph: Graph) -> None:
    node(graph, "x").meta["type"] = (parse_type("f32[4]"),)


def unknown_dim(graph: Graph) -> None:
    graph.partitioned = ("model",)


def twice(graph: Graph) -> None:
    graph.partitioned = ("data", "data")


def constant(graph: Graph) -> None:
    node(graph, "x").meta.update(kind="constant", label="c")
    graph.constants["c"] = torch.ones(3)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            reads_below,
            "train.py:7: error: %y reads %x, which is not defined above it\n  %y = aten.neg(%x) : f32[4]  # train.py:7",
        ),
        (two_names, "train.py:7: error: %x is defined twice\n  %x = aten.neg(%x) : f32[4]  # train.py:7"),
        (no_output, "graph @f: has to end in one output"),
        (odd_output, "%output has to hold a tuple of returned values and a dict of updated states"),
        (python_function, "train.py:7: error: %y calls <built-in method neg"),
        (attribute, "%weight is a 'get_attr' node: a graph has placeholders, calls of ops and an output"),
        (bad_kind, "%x is a placeholder of kind 'buffer': it has to be one of input, state, constant, scalar, seed"),
        (no_type_at_all, "train.py:7: error: %y has a type that is none: '"),
        (undividable, "%x has 2 blocks of dim 0, whose size is 3: it is not padded"),
        (several, "%x is a placeholder of type (f32[4]): it has to be one tensor"),
        (unknown_dim, "graph @f: partitioned over 'model', which is no dim of mesh<data=2>"),
        (twice, "graph @f: partitioned twice over one dim: data, data"),
        (constant, "%x stands for a tensor of torch.float32, shape [3]"),
    ],
)
def test_what_no_text_can_say(damage: Callable[[Graph], None], message: str) -> None:
    graph = small()
    damage(graph)
    assert refused(graph).startswith(message)


def test_along_a_mesh_dim_of_one_worker_everything_lies_alike() -> None:
    graph = small()
    graph.mesh = MeshSpec.of(data=1)
    graph.partitioned = ("data",)
    verify(graph, run=True)
    graph.mesh = MeshSpec.of(data=2)
    assert "%y does not lie on 'data' as its operands do" in refused(graph)
