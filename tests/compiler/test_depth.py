"""Compiling deep programs: the work grows with the number of layers, and no faster."""

from __future__ import annotations

from cProfile import Profile

from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.text import parse_graph


def training_step(layers: int) -> Graph:
    """A step of so many equal layers, data parallel, whose every weight has momentum."""
    square = "f32[32, 32]"
    states = [
        line for n in range(layers) for line in (f'%w{n} = state "w{n}" : {square}', f'%m{n} = state "m{n}" : {square}')
    ]
    forward, backward, update = [], [], []
    for n in range(layers):
        forward += [f"%a{n} = aten.mm(%h{n}, %w{n}) : f32[64, 32]", f"%h{n + 1} = aten.gelu(%a{n}) : f32[64, 32]"]
    for n in reversed(range(layers)):
        backward += [
            f"%e{n} = aten.gelu_backward(%d{n + 1}, %a{n}) : f32[64, 32]",
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
    return parse_graph("graph @step on mesh<data=2> {\n" + "\n".join(lines) + "\n}")


def calls_of(graph: Graph) -> int:
    """How many calls Python makes to compile a graph, with what is remembered of graphs like it."""
    options = CompileOptions(kernels="all")
    compile_graph(graph, options)
    profile = Profile()
    profile.runcall(compile_graph, graph, options)
    return sum(entry.callcount for entry in profile.getstats())


def test_work_grows_no_faster_than_the_number_of_layers() -> None:
    few, more, most = (calls_of(training_step(layers)) for layers in (12, 24, 48))
    assert most - more < 2.05 * (more - few)
