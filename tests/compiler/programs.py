"""Random small programs over random layouts and meshes, built op by op beside their dense values."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from monarch.compiler.graph import Graph
from monarch.compiler.types import Layout, MeshSpec, TensorType

aten = torch.ops.aten

SIZES = (1, 2, 4, 8)
MESHES = [
    MeshSpec(dims)
    for dims in (
        (("a", 1),),
        (("a", 2),),
        (("a", 3),),
        (("a", 4),),
        (("a", 8),),
        (("a", 2), ("b", 2)),
        (("a", 4), ("b", 2)),
        (("a", 2), ("b", 2), ("c", 2)),
    )
]


@dataclass
class Program:
    """A graph, the values of its inputs, and what dense PyTorch computes for its results."""

    graph: Graph
    values: dict[str | int, torch.Tensor] = field(default_factory=dict)
    made: list[tuple[fx.Node, torch.Tensor]] = field(default_factory=list)
    returns: list[torch.Tensor] = field(default_factory=list)

    def apply(self, op: Any, *args: Any, **kwargs: Any) -> None:
        nodes = {id(tensor): node for node, tensor in self.made}
        result = op(*args, **kwargs)
        at = fx.node.map_aggregate(args, lambda x: nodes[id(x)] if isinstance(x, torch.Tensor) else x)
        node = self.graph.call(op, *at, type=TensorType(result.dtype, tuple(result.shape)), **kwargs)
        self.made.append((node, result))


def layouts(shape: tuple[int, ...], mesh: MeshSpec) -> st.SearchStrategy[Layout]:
    """Any layout of whole and sharded dims; mesh dims nest in the mesh's order, as one program must."""

    @st.composite
    def draw_layout(draw: st.DrawFn) -> Layout:
        layout = Layout.replicated(len(shape))
        for name, size in mesh.dims:
            fits = [
                dim
                for dim, length in enumerate(shape)
                if length % (size * math.prod(mesh.sizes[n] for n in layout.shards[dim])) == 0
            ]
            layout = layout.place(name, draw(st.sampled_from([None, *fits])))
        return layout

    return draw_layout()


@st.composite
def programs(draw: st.DrawFn, max_ops: int = 8, max_workers: int = 8) -> Program:
    mesh = draw(st.sampled_from([m for m in MESHES if m.workers <= max_workers]))
    program = Program(Graph("random", mesh))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    for i in range(draw(st.integers(1, 3))):
        shape = tuple(draw(st.lists(st.sampled_from((2, 4, 6, 8)), min_size=1, max_size=3)))
        kind = draw(st.sampled_from(["input", "state"]))
        label: str | int = i if kind == "input" else f"w{i}"
        # Small whole numbers: sums come out the same in every order, so that results can be compared exactly.
        value = torch.randint(-3, 4, shape, generator=generator).double()
        node = program.graph.placeholder(kind, label, TensorType(value.dtype, shape, draw(layouts(shape, mesh))))
        program.values[label] = value
        program.made.append((node, value))
    for _ in range(draw(st.integers(1, max_ops))):
        _step(draw, program)
    count = draw(st.integers(1, min(3, len(program.made))))
    results = program.made[-count:]
    updates = {}
    for node, value in results:
        matches = [
            p
            for p in program.graph.placeholders
            if p.meta["kind"] == "state" and p.meta["type"].shape == tuple(value.shape)
        ]
        free = [p for p in matches if p.meta["label"] not in updates]
        if free and node.op == "call_function" and draw(st.booleans()):
            updates[free[0].meta["label"]] = node
    program.graph.output([node for node, _ in results], updates)
    program.returns = [value for _, value in results]
    return program


def _step(draw: st.DrawFn, program: Program) -> None:
    _, x = program.made[draw(st.integers(0, len(program.made) - 1))]
    same = [y for _, y in program.made if y.shape == x.shape]
    matrices = [y for _, y in program.made if y.ndim == 2 and x.ndim == 2 and y.shape[0] == x.shape[1]]
    choices = ["neg", "relu", "mul_scalar"]
    choices += ["view", "sum"] if x.ndim else []
    choices += ["add", "mul"] if same else []
    choices += ["cat"] if same and x.ndim else []
    choices += ["mm"] * 3 if matrices else []
    choices += ["permute", "softmax", "amax"] if x.ndim > 1 else []
    if x.numel() > 2048 or x.abs().max() > 1e6:
        choices = ["sum", "sign"] if x.ndim else ["sign"]
    match draw(st.sampled_from(choices)):
        case "neg":
            program.apply(aten.neg.default, x)
        case "relu":
            program.apply(aten.relu.default, x)
        case "sign":
            program.apply(aten.sign.default, x)
        case "mul_scalar":
            program.apply(aten.mul.Tensor, x, 2)
        case "add":
            program.apply(aten.add.Tensor, x, draw(st.sampled_from(same)))
        case "mul":
            program.apply(aten.mul.Tensor, x, draw(st.sampled_from(same)))
        case "cat":
            program.apply(aten.cat.default, [x, draw(st.sampled_from(same))], draw(st.integers(0, x.ndim - 1)))
        case "mm":
            program.apply(aten.mm.default, x, draw(st.sampled_from(matrices)))
        case "permute":
            program.apply(aten.permute.default, x, draw(st.permutations(range(x.ndim))))
        case "amax":
            program.apply(aten.amax.default, x, [draw(st.integers(0, x.ndim - 1))], draw(st.booleans()))
        case "softmax":
            program.apply(aten._softmax.default, x, draw(st.integers(0, x.ndim - 1)), False)
        case "sum":
            dims = draw(st.lists(st.integers(0, x.ndim - 1), unique=True, min_size=1, max_size=x.ndim))
            program.apply(aten.sum.dim_IntList, x, dims, draw(st.booleans()))
        case "view":
            shape = list(x.shape)
            at = draw(st.integers(0, len(shape) - 1))
            if at + 1 < len(shape) and draw(st.booleans()):
                shape[at : at + 2] = [shape[at] * shape[at + 1]]
            elif shape[at] % 2 == 0:
                shape[at : at + 1] = draw(st.sampled_from([[2, shape[at] // 2], [shape[at] // 2, 2]]))
            program.apply(aten.reshape.default, x, shape)
