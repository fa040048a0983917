"""The graph IR: a `torch.fx.Graph` in which every value has a tensor type.

What a node carries, in `node.meta`:

    "type"      TensorType, or a tuple of them (None for a missing output) for an op with several outputs.
                Always the *global* type: in a partitioned graph a worker's block has `type.local_shape(mesh)`.
    "provenance" where an op comes from, where that is known (`Provenance`)
    "kind"      placeholders only: "input", "state", "constant", "scalar" or "seed"
    "label"     placeholders only: an input's position, a state's or scalar's name
    "why"       text: why the value has its layout, or why the collective is there
    "mesh"      in a graph of several meshes: the name of the part that has the value. A value without it depends on
                none that has one, and every part that reads it computes it
    "found"     whether a search has found the layout of an input, of a state, or that a `constrain` says
    "gathered"  positions of the operands that were gathered or reduced for an op that runs whole for want of a rule

and while a report is made (`pipeline.compile_graph(graph, report=True)`):

    "traced"    the name that the value had in the traced graph; what the compiler adds has none
    "key"       an object that stands for the value through the passes, by which decisions name their causes
    "stands_for" keys of `layout()`s whose result this value is
    "decisions" `partition.decide.Decided` for each mesh dim done so far
    "reason"    as "why", for one result of a collective
    "named"     the names in "why" and "reason", with the keys of the values that had them

A graph's text form (`str(graph)`) parses back exactly (`monarch.compiler.text`):

    graph @train_step on mesh<data=4, model=2> {
      %x = input 0            : f32[64@data, 1024]
      %w = state "fc.weight"  : f32[1024, 4096@model]
      %h = aten.mm(%x, %w)    : f32[64@data, 4096@model]      # train.py:12
      return %h
    }

A graph of several meshes has a name for each, with the workers that it has of the one that all are of, and a value says
on which it is:

    graph @step on mesh<stage=2, data=2> with a: mesh<data=2>, b: mesh<data=2> {
      %x = input 0                       : f32[64@data, 1024] on a
      %h = transfer(%x, "b", none)       : f32[64, 1024] on b       # train.py:12
      return %h
    }

Its passes run on the graph of each part (`fragments`).

In a partitioned graph (`partitioned` names the mesh dims done so far, in nesting order) ops compute on local shapes;
where a value's local shape differs from its global one, both stand there: `f32[16, 2048] of f32[64@data, 4096@model]`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph as FxGraph
from torch.fx import Node
from torch.fx.node import map_arg

from monarch.compiler.display import text_of
from monarch.compiler.errors import Source
from monarch.compiler.mesh import Shape
from monarch.compiler.symbols import has_names, value_at
from monarch.compiler.types import MeshSpec, TensorType

Types = TensorType | tuple[TensorType | None, ...] | None


@dataclass(frozen=True)
class Provenance:
    """Where an op comes from. Passes hand it on to the ops that they put in its place.

    `source`    the user's line
    `module`    the path of the module whose forward ran the op, or the forward op that it is the backward of
    `backward`  whether autograd ran it
    `fused`     kernels only: the nodes that it stands for, which are of the graph before fusion
    `block`     while equal blocks are folded (`compiler/passes/fold.py`): which of those that stay, or None
    `microbatch`, `stage`  of a pipeline's step: to which it belongs; without a task of its own, to the last microbatch
                that it follows from, and the stage of what it reads of that
    """

    source: Source | None = None
    module: str = ""
    backward: bool = False
    fused: tuple[Node, ...] = ()
    block: int | None = None
    microbatch: int | None = None
    stage: int | None = None


UNKNOWN = Provenance()

KINDS = ("input", "state", "constant", "scalar", "seed")


@dataclass
class Graph:
    """A program's dataflow: inputs and state in, results and new state out.

    `returns`    the nodes (or None) that the program returns, in order
    `updates`    for each state that changes or is made, the node that holds its value after the step
    `constants`  the tensors that placeholders of kind "constant" stand for, by label
    `regions`    the graphs that its ops with regions run (`ops.WITH_REGIONS`), by name: on the same mesh, with
                 inputs and constants alone, and without updates
    `parts`      where its values are on several meshes, what each is called, and which workers of `mesh` it has. Where
                 two follow each other with no place said, the second's workers come behind the first's
    `fragments`  behind the cut, what is computed on each of them: a graph of one mesh, by the part's name, that sends
                 and receives. The nodes of this graph are then those of the program as it was traced
    `schedule`   of a program that runs a pipeline: what a plan's report says of its timetable
    `free`       the labels of the states and the positions of the inputs whose layouts nobody has said
    """

    name: str
    mesh: MeshSpec
    fx: FxGraph = field(default_factory=FxGraph)
    partitioned: tuple[str, ...] = ()
    constants: dict[str, torch.Tensor] = field(default_factory=dict)
    regions: dict[str, Graph] = field(default_factory=dict)
    parts: dict[str, Shape] = field(default_factory=dict)
    fragments: dict[str, Graph] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)
    free: frozenset[str | int] = frozenset()

    # -- building ------------------------------------------------------------------------------------------------

    def placeholder(self, kind: str, label: str | int, type: TensorType, name: str | None = None) -> Node:
        node = self.fx.placeholder(name or _identifier(kind, label))
        node.meta.update(kind=kind, label=label, type=type)
        return node

    def call(
        self,
        op: Any,
        *args: Any,
        type: Types,
        provenance: Provenance | None = None,
        name: str | None = None,
        **kwargs: Any,
    ) -> Node:
        """Append an op. `op` is an OpOverload, `operator.getitem`, or one of `monarch.compiler.ops`."""
        node = self.append(op, args, kwargs, name or _op_name(op))
        node.meta["type"] = type
        if provenance is not None:
            node.meta["provenance"] = provenance
        return node

    def append(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Node:
        """Append a call that carries nothing yet."""
        # Given to `create_node`, arguments are searched for symbols of torch's, which takes as long as all else.
        node = self.fx.create_node("call_function", op, None, None, name)
        node._update_args_kwargs(args, kwargs)  # setting them changes both, once
        return node

    def append_placeholder(self, name: str) -> Node:
        """Append a placeholder that carries nothing yet."""
        return self.fx.create_node("placeholder", name, None, None, name)

    def append_copy(self, node: Node, nodes: Mapping[Node, Node]) -> Node:
        """Append a call, or what else a graph has, as it is in another graph, whose `nodes` are these in this one."""
        if node.op == "placeholder":
            copy = self.append_placeholder(node.name)
            copy.meta.update(node.meta)
            return copy
        if node.op != "call_function":
            return self.fx.node_copy(node, nodes.__getitem__)
        args: Any = map_arg(node.args, nodes.__getitem__)
        kwargs: Any = map_arg(node.kwargs, nodes.__getitem__) if node.kwargs else {}
        copy = self.append(node.target, args, kwargs, node.name)
        copy.meta.update(node.meta)  # to set it as an attribute costs fx as much as making the node
        return copy

    def output(self, returns: list[Node | None], updates: dict[str, Node]) -> Node:
        return self.fx.output((tuple(returns), dict(updates)))

    def reorder(self, at: Mapping[Node, float]) -> None:
        """Put the nodes in the order of their positions, as far as their operands allow."""
        number = {node: i for i, node in enumerate(self.fx.nodes)}
        waiting = {node: len(node.all_input_nodes) for node in number}
        heap = [(at[node], number[node], node) for node, count in waiting.items() if count == 0 and node.op != "output"]
        heapq.heapify(heap)
        output = self.fx.output_node()
        while heap:
            _, _, node = heapq.heappop(heap)
            output.prepend(node)
            for user in node.users:
                waiting[user] -= 1
                if waiting[user] == 0 and user.op != "output":
                    heapq.heappush(heap, (at[user], number[user], user))

    # -- reading -------------------------------------------------------------------------------------------------

    @property
    def placeholders(self) -> list[Node]:
        return [node for node in self.fx.nodes if node.op == "placeholder"]

    @property
    def inputs(self) -> list[Node]:
        """The placeholders of kind "input": all that a region takes, besides constants."""
        return [node for node in self.placeholders if node.meta["kind"] == "input"]

    @property
    def states(self) -> dict[str, TensorType]:
        """The types of the states that the program reads, by label."""
        return {str(p.meta["label"]): p.meta["type"] for p in self.placeholders if p.meta["kind"] == "state"}

    @property
    def calls(self) -> Iterator[Node]:
        return (node for node in self.fx.nodes if node.op == "call_function")

    @property
    def returns(self) -> list[Node | None]:
        return list(args_of(self.fx.output_node())[0][0])

    @property
    def updates(self) -> dict[str, Node]:
        return dict(args_of(self.fx.output_node())[0][1])

    def mesh_of(self, node: Node) -> MeshSpec:
        """The mesh of a value's part; of one that every part computes, the whole."""
        part = node.meta.get("mesh")
        return self.mesh if part is None else spec_of(self.parts[part])

    def set_output(self, returns: list[Node | None], updates: dict[str, Node]) -> None:
        self.fx.output_node().args = ((tuple(returns), dict(updates)),)

    def local_shape(self, type: TensorType) -> tuple[int, ...]:
        """The shape that ops of this graph see: divided over the mesh dims partitioned so far, whole over the
        others."""
        if not any(type.layout.shards):
            return type.shape
        sizes, partitioned = self.mesh.sizes, self.partitioned
        local = []
        for size, names in zip(type.shape, type.layout.shards, strict=True):
            parts = 1
            for name in names:
                if name in partitioned:
                    parts *= sizes[name]
            local.append(size if parts == 1 else size // parts)
        return tuple(local)

    def type_so_far(self, node: Node) -> TensorType:
        """A value's type over the mesh dims partitioned so far. An input's own type speaks of all of them."""
        type_ = tensor_type(node)
        return type_.with_layout(type_.layout.only(self.partitioned))

    def empty_like(self) -> Graph:
        """A graph with the same name, mesh, constants and regions and no nodes, for a pass to fill."""
        return Graph(
            self.name,
            self.mesh,
            FxGraph(),
            self.partitioned,
            dict(self.constants),
            dict(self.regions),
            dict(self.parts),
            dict(self.fragments),
            dict(self.schedule),
            self.free,
        )

    def copy(self) -> Graph:
        """The same graph in nodes of its own, with the names, the order and the meta of the nodes."""
        copy = self.empty_like()
        copy.regions = {name: region.copy() for name, region in self.regions.items()}
        nodes: dict[Node, Node] = {}
        for node in self.fx.nodes:
            nodes[node] = copy.append_copy(node, nodes)
        return copy

    def at(self, values: Mapping[str, int]) -> Graph:
        """The same graph where named sizes have these values. Nodes of such sizes are marked as SIZED."""
        found = self.copy()
        found.regions = {name: region.at(values) for name, region in self.regions.items()}
        found.fragments = {name: fragment.at(values) for name, fragment in self.fragments.items()}
        for node in found.fx.nodes:
            if node.op == "output":
                continue
            if is_of_named_size(node):
                node.meta[SIZED] = True
            types = node.meta["type"]
            several = types if isinstance(types, tuple) else (types,)
            made = tuple([type_ and type_.at(values) for type_ in several])
            node.meta["type"] = made if isinstance(types, tuple) else made[0]
            node.args, node.kwargs = value_at(tuple(node.args), values), value_at(dict(node.kwargs), values)
        return found

    def __str__(self) -> str:
        return text_of(self)


SIZED = "sized"
"""The mark of a node that had a named size before the names got values."""


def spec_of(place: Shape) -> MeshSpec:
    """The mesh of a part, on its own workers."""
    return MeshSpec(tuple(place.extent.items()))


def args_of(node: Node) -> tuple[Any, ...]:
    """A node's arguments. fx types each as all that it could be; an op's signature has its real type."""
    return node.args


def provenance(node: Node) -> Provenance:
    """Where a node's op comes from."""
    return node.meta.get("provenance", UNKNOWN)


def is_of_named_size(node: Node) -> bool:
    """Whether a node, or an argument of its call, has a size that is not known when the program is compiled."""
    types = node.meta["type"] if isinstance(node.meta["type"], tuple) else (node.meta["type"],)
    return any(type_ is not None and has_names(type_.shape) for type_ in types) or has_names((node.args, node.kwargs))


def tensor_type(node: Node) -> TensorType:
    """The type of a node that holds one tensor."""
    type_ = node.meta["type"]
    assert isinstance(type_, TensorType), f"{node} holds {type_}, not one tensor"
    return type_


def _op_name(op: Any) -> str:
    """A value is called after the op that makes it: `mm`, not `mm_default`."""
    packet = getattr(op, "overloadpacket", op)
    return str(packet.__name__).strip("_")


def _identifier(kind: str, label: str | int) -> str:
    text = f"{kind}_{label}" if isinstance(label, int) else str(label)
    return "".join(c if c.isalnum() else "_" for c in text) or kind
