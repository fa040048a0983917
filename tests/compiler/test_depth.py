"""Compiling deep programs: the work grows with the number of layers and no faster, and what passes remember of layers
that are alike changes no plan."""

from __future__ import annotations

from collections.abc import Sequence
from cProfile import Profile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.compiler.alike import Memo
from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.text import parse_graph

KINDS = {
    "whole": ("gelu", "f32[32, 32]"),
    "columns": ("gelu", "f32[32, 32@model]"),
    "rows": ("gelu", "f32[32@model, 32]"),
    "tanh": ("tanh", "f32[32, 32]"),
}
"""Layers: the activation, and the type of the weight."""


def training_step(kinds: Sequence[str]) -> Graph:
    """A step of layers of these kinds, data parallel, whose every weight has momentum."""
    layers, square = len(kinds), "f32[32, 32]"
    states = [
        f'%{state}{n} = state "{state}{n}" : {KINDS[kind][1]}' for n, kind in enumerate(kinds) for state in ("w", "m")
    ]
    forward, backward, update = [], [], []
    for n in range(layers):
        name = KINDS[kinds[n]][0]
        forward += [f"%a{n} = aten.mm(%h{n}, %w{n}) : f32[64, 32]", f"%h{n + 1} = aten.{name}(%a{n}) : f32[64, 32]"]
    for n in reversed(range(layers)):
        name = KINDS[kinds[n]][0]
        read = f"%a{n}" if name == "gelu" else f"%h{n + 1}"
        backward += [
            f"%e{n} = aten.{name}_backward(%d{n + 1}, {read}) : f32[64, 32]",
            f"%u{n} = aten.t(%h{n}) : f32[32, 64]",
            f"%g{n} = aten.mm(%u{n}, %e{n}) : {square}",
            f"%v{n} = aten.t(%w{n}) : {square}",
            f"%d{n} = aten.mm(%e{n}, %v{n}) : f32[64, 32]",
        ]
    for n in range(layers):
        update += [
            f"%n{n} = aten.lerp.Scalar(%m{n}, %g{n}, 0.1) : {square}",
            f"%s{n} = aten.mul.Tensor(%n{n}, 0.01) : {square}",
            f"%x{n} = aten.sub.Tensor(%w{n}, %s{n}) : {square}",
        ]
    updates = [f'update "{state}{n}" = %{value}{n}' for n in range(layers) for state, value in ("wx", "mn")]
    lines = ["%h0 = input 0 : f32[64@data, 32]", f"%d{layers} = input 1 : f32[64@data, 32]"]
    lines += [*states, *forward, *backward, *update, *updates, f"return %h{layers}"]
    return parse_graph("graph @step on mesh<data=2, model=2> {\n" + "\n".join(lines) + "\n}")


def calls_of(graph: Graph) -> int:
    """How many calls Python makes to compile a graph, with what is remembered of graphs like it."""
    options = CompileOptions(kernels="all")
    compile_graph(graph, options)
    profile = Profile()
    profile.runcall(compile_graph, graph, options)
    return sum(entry.callcount for entry in profile.getstats())


def test_work_grows_no_faster_than_the_number_of_layers() -> None:
    few, more, most = (calls_of(training_step(["whole"] * layers)) for layers in (6, 12, 24))
    assert most - more < 2.02 * (more - few)


@settings(max_examples=12)
@given(st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, 4)), min_size=1, max_size=4))
def test_a_plan_is_the_same_whatever_is_remembered(stacks: list[tuple[str, int]]) -> None:
    graph = training_step([kind for kind, count in stacks for _ in range(count)])
    options = CompileOptions(kernels="all")
    remembering = compile_graph(graph, options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Memo, "get", lambda memo, key: None)
        forgetful = compile_graph(graph, options)
    assert remembering.graph == forgetful.graph
    assert remembering.hash == forgetful.hash
