"""What prints parses back, to the same values and the same text."""

from __future__ import annotations

import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import fx

from monarch.compiler.errors import Source
from monarch.compiler.graph import Graph, Provenance
from monarch.compiler.text import parse_graph, parse_layout, parse_mesh, parse_type, print_graph
from monarch.compiler.text.comment import parse_comment, print_comment
from tests.compiler import strategies
from tests.sample import examples


@given(strategies.meshes())
def test_meshes(mesh: Any) -> None:
    assert parse_mesh(str(mesh)) == mesh


@given(st.data())
@settings(max_examples=200)
def test_types_and_layouts(data: st.DataObject) -> None:
    type_ = data.draw(strategies.types(data.draw(strategies.meshes())))
    assert parse_type(str(type_)) == type_
    assert parse_layout(str(type_.layout)) == type_.layout


@given(strategies.graphs())
@examples(50, 150)
def test_graphs(graph: Graph) -> None:
    text = print_graph(graph, paths=True)
    back = parse_graph(text)
    assert print_graph(back, paths=True) == text
    assert_same(back, graph)


@given(strategies.graphs())
@settings(max_examples=50)
def test_the_short_form_is_stable(graph: Graph) -> None:
    text = print_graph(graph)
    assert print_graph(parse_graph(text)) == text


@given(st.none() | strategies.sources, st.booleans(), strategies.texts)
@settings(max_examples=200)
def test_comments(source: Source | None, backward: bool, why: str) -> None:
    meta = {"provenance": Provenance(source, backward=backward), "why": why}
    expected = {key: value for key, value in meta.items() if value not in ("", Provenance())}
    assert parse_comment(print_comment(meta, paths=True)) == expected


def assert_same(one: Graph, other: Graph) -> None:
    """Two graphs agree node by node, tuples and lists alike."""
    assert (one.name, one.mesh, one.partitioned) == (other.name, other.mesh, other.partitioned)
    for a, b in zip(one.fx.nodes, other.fx.nodes, strict=True):
        assert (a.name, a.op) == (b.name, b.op)
        if a.op == "call_function":
            assert a.target is b.target
        assert plain(a.args) == plain(b.args)
        assert plain(a.kwargs) == plain(b.kwargs)
        for key in ("type", "source", "kind", "label", "backward", "why"):
            assert a.meta.get(key) == b.meta.get(key), key


def plain(value: Any) -> Any:
    """Arguments, with what `==` does not tell apart made different: 1, 1.0 and True; nan; -0.0."""
    if isinstance(value, list | tuple):
        return [plain(entry) for entry in value]
    if isinstance(value, dict):
        return [(key, plain(entry)) for key, entry in value.items()]
    if isinstance(value, float) and math.isnan(value):
        return "nan"
    return value.name if isinstance(value, fx.Node) else (type(value), repr(value))
