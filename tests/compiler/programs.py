"""Random small programs over random layouts and meshes, built op by op beside their dense values."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st
from torch import fx

from monarch.compiler import ops
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
        several = [result] if isinstance(result, torch.Tensor) else list(result)
        types = tuple(TensorType(each.dtype, tuple(each.shape)) for each in several)
        node = self.graph.call(op, *at, type=types[0] if several[0] is result else types, **kwargs)
        for i, (each, type_) in enumerate(zip(several, types, strict=True)):
            one = node if each is result else self.graph.call(operator.getitem, node, i, type=type_)
            self.made.append((one, each))

    def lay_out(self, value: torch.Tensor, layout: Layout) -> None:
        """`layout()` on a value."""
        node = next(node for node, made in self.made if made is value)
        type_ = TensorType(value.dtype, tuple(value.shape))
        laid = self.graph.call(ops.constrain, node, str(layout), type=type_)
        self.made.append((laid, value.clone()))


def layouts(shape: tuple[int, ...], mesh: MeshSpec, uneven: bool = False) -> st.SearchStrategy[Layout]:
    """Any layout of whole and sharded dims; mesh dims nest in the mesh's order, as one program must. `uneven` takes
    dims that the mesh does not divide as well."""

    @st.composite
    def draw_layout(draw: st.DrawFn) -> Layout:
        layout = Layout.replicated(len(shape))
        for name, size in mesh.dims:
            fits = [
                dim
                for dim, length in enumerate(shape)
                if uneven or length % (size * math.prod(mesh.sizes[n] for n in layout.shards[dim])) == 0
            ]
            layout = layout.place(name, draw(st.sampled_from([None, *fits])))
        return layout

    return draw_layout()


@st.composite
def programs(draw: st.DrawFn, max_ops: int = 8, max_workers: int = 8, uneven: bool = False) -> Program:
    mesh = draw(st.sampled_from([m for m in MESHES if m.workers <= max_workers]))
    program = Program(Graph("random", mesh))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    for i in range(draw(st.integers(1, 3))):
        sizes = (1, 2, 3, 5, 6, 7, 10) if uneven else (2, 4, 6, 8)
        shape = tuple(draw(st.lists(st.sampled_from(sizes), min_size=1, max_size=3)))
        kind = draw(st.sampled_from(["input", "state"]))
        label: str | int = i if kind == "input" else f"w{i}"
        # Small whole numbers: sums come out the same in every order, so that results can be compared exactly.
        value = torch.randint(-3, 4, shape, generator=generator).double()
        node = program.graph.placeholder(
            kind, label, TensorType(value.dtype, shape, draw(layouts(shape, mesh, uneven)))
        )
        program.values[label] = value
        program.made.append((node, value))
    for _ in range(draw(st.integers(1, max_ops))):
        _step(draw, program, uneven)
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


def _step(draw: st.DrawFn, program: Program, uneven: bool) -> None:
    _, x = program.made[draw(st.integers(0, len(program.made) - 1))]
    same = [y for _, y in program.made if y.shape == x.shape]
    matrices = [y for _, y in program.made if y.ndim == 2 and x.ndim == 2 and y.shape[0] == x.shape[1]]
    choices = ["neg", "relu", "mul_scalar"]
    choices += ["view", "sum", "mean", "slice", "select", "unsqueeze", "layout", "layout"] if x.ndim else []
    choices += ["add", "mul"] if same else []
    choices += ["cat"] if same and x.ndim else []
    choices += ["mm"] * 3 if matrices else []
    choices += ["permute", "softmax", "amax", "layer_norm", "cumsum"] if x.ndim > 1 else []
    tables = [y for _, y in program.made if y.ndim == 2]
    choices += ["embedding"] if tables and x.numel() <= 64 else []
    choices += ["bmm"] if x.ndim == 3 else []
    choices += ["where"] if same else []
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
        case "where":
            program.apply(aten.gt.Scalar, x, 0)
            condition = program.made[-1]
            program.apply(aten.where.self, condition[1], x, draw(st.sampled_from(same)))
            del program.made[-2]  # later ops are for numbers
        case "mean":
            program.apply(aten.mean.dim, x, [draw(st.integers(0, x.ndim - 1))], draw(st.booleans()))
        case "slice":
            dim = draw(st.integers(0, x.ndim - 1))
            program.apply(aten.slice.Tensor, x, dim, 0, draw(st.integers(1, x.shape[dim])))
        case "select":
            dim = draw(st.integers(0, x.ndim - 1))
            program.apply(aten.select.int, x, dim, draw(st.integers(0, x.shape[dim] - 1)))
        case "unsqueeze":
            program.apply(aten.unsqueeze.default, x, draw(st.integers(0, x.ndim)))
        case "layout":
            program.lay_out(x, draw(layouts(tuple(x.shape), program.graph.mesh, uneven)))
        case "cumsum":
            program.apply(aten.cumsum.default, x, draw(st.integers(0, x.ndim - 1)))
        case "layer_norm":
            program.apply(aten.native_layer_norm.default, x, [x.shape[-1]], None, None, 1e-5)
        case "bmm":
            program.apply(aten.permute.default, x, [0, 2, 1])
            program.apply(aten.bmm.default, x, program.made[-1][1])
        case "embedding":
            table = draw(st.sampled_from(tables))
            program.apply(aten.remainder.Scalar, x, table.shape[0])
            program.apply(aten.nan_to_num.default, program.made[-1][1], 0.0, 0.0, 0.0)
            program.apply(aten._to_copy.default, program.made[-1][1], dtype=torch.int64)
            program.apply(aten.embedding.default, table, program.made[-1][1])
            del program.made[-2]  # later ops are for floats
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
