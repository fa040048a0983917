"""Hypothesis strategies for meshes, layouts, tensor types and graphs."""

from __future__ import annotations

import operator

import torch
from hypothesis import strategies as st

from monarch.compiler import ops
from monarch.compiler.errors import Source
from monarch.compiler.graph import Graph, Provenance
from monarch.compiler.types import DTYPES, REDUCTIONS, Layout, MeshSpec, TensorType

NAMES = ("data", "model", "pipe", "partial", "of", "input", "graph", "_x1")
"""Mesh dims' names, some of them words of the grammar."""


@st.composite
def meshes(draw: st.DrawFn, max_dims: int = 4) -> MeshSpec:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=max_dims))
    return MeshSpec(tuple((name, draw(st.integers(1, 4))) for name in names))


@st.composite
def layouts(draw: st.DrawFn, mesh: MeshSpec, ndim: int) -> Layout:
    """A layout that `TensorType.check` accepts for a shape that divides."""
    layout = Layout.replicated(ndim)
    reduction = draw(st.sampled_from(REDUCTIONS))
    for name in draw(st.permutations(mesh.names)):
        placements = [None, "varying", reduction, *range(ndim)]
        layout = layout.place(name, draw(st.sampled_from(placements)))
    return layout


@st.composite
def types(draw: st.DrawFn, mesh: MeshSpec, max_ndim: int = 4) -> TensorType:
    ndim = draw(st.integers(0, max_ndim))
    layout = draw(layouts(mesh, ndim))
    shape = tuple(draw(st.integers(0, 3)) * mesh.workers for _ in range(ndim))
    return TensorType(draw(st.sampled_from(list(DTYPES.values()))), shape, layout)


texts = st.text(st.characters(codec="utf-8"), max_size=12)
sources = st.builds(
    Source,
    file=st.one_of(st.just("/home/me/train.py"), st.just("<stdin>"), texts.filter(bool)),
    line=st.integers(0, 10**6),
    column=st.integers(0, 200),
    end_column=st.just(0),
) | st.builds(
    Source,
    file=st.just("C:\\work\\model file.py"),
    line=st.integers(1, 100),
    column=st.integers(1, 9),
    end_column=st.integers(1, 99),
)

constants = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64),
    st.floats(allow_nan=True),
    texts,
    st.sampled_from([torch.float32, torch.bool, torch.complex64, torch.uint16]),
    st.sampled_from([torch.contiguous_format, torch.channels_last, torch.strided, torch.device("cpu")]),
)

OPS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.add.Tensor,
    torch.ops.aten.__and__.Tensor,
    torch.ops.aten.sum.dim_IntList,
    operator.getitem,
    ops.all_reduce,
    ops.shard,
    ops.commit,
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Graphs that are well formed as text; their ops get arguments of any kind."""
    mesh = draw(meshes())
    partitioned = tuple(draw(st.lists(st.sampled_from(mesh.names), unique=True))) if mesh.names else ()
    name = draw(st.sampled_from(["step", "<lambda>", 'a "b"\n', "été"]))
    graph = Graph(name, mesh, partitioned=partitioned)
    for at in range(draw(st.integers(0, 3))):
        kind = draw(st.sampled_from(["input", "state", "constant", "scalar", "seed"]))
        graph.placeholder(kind, at if kind == "input" else draw(texts), draw(types(mesh)))
    for _ in range(draw(st.integers(0, 5))):
        nodes = list(graph.fx.nodes)
        leaves = constants | st.sampled_from(nodes) if nodes else constants
        arguments = st.recursive(leaves, lambda inner: st.lists(inner, max_size=3), max_leaves=5)
        type_ = draw(st.none() | types(mesh) | st.lists(st.none() | types(mesh), max_size=3).map(tuple))
        node = graph.call(
            draw(st.sampled_from(OPS)),
            *draw(st.lists(arguments, max_size=4)),
            **draw(st.dictionaries(st.sampled_from(["dim", "dtype", "type_", "keepdim"]), arguments, max_size=2)),
            type=None,
            provenance=Provenance(draw(st.none() | sources), backward=draw(st.booleans())),
        )
        node.meta["type"] = type_
        if why := draw(st.none() | texts):
            node.meta["why"] = why
    nodes = list(graph.fx.nodes)
    some = st.sampled_from(nodes) if nodes else st.nothing()
    graph.output(draw(st.lists(st.none() | some, max_size=3)), draw(st.dictionaries(texts, some, max_size=2)))
    return graph
