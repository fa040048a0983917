"""Which parameters of a module tensor parallelism shards together: found in the module's graph.

The module's forward pass is traced on an abstract mesh, so nothing is computed. Each op's sharding rule says which dims
of its operands and results are one *factor*. Dims that ops join so, from a product's outputs over pointwise ops, head
reshapes and attention to the next product's inputs, form a *group*: sharding all of its dims needs no communication
within the group. A group is worth sharding where products with parameters make it (column layers), and others sum over
it (row layers): Shoeybi et al., "Megatron-LM", 2019. `monarch.compiler.rules.Rule` says what a factor is.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from monarch.compiler.graph import Graph, args_of
from monarch.compiler.ops.schema import is_view
from monarch.compiler.rules import Rule, rule_for, tensor_operands
from monarch.compiler.rules.call import op_name, result_types
from monarch.compiler.types import TensorType
from monarch.language import Mesh, distribute, program

Dim = tuple[fx.Node, int, int]
"""A value (a node and which of its results) and one of its dims."""


@dataclass
class DimGroup:
    """Dims that are sharded together or not at all.

    `parameters` the dim of each parameter that is in the group
    `columns`    parameters whose products make the group, in the graph's order
    `rows`       parameters whose products sum over the group
    `units`      the smallest size that an op gives the group: heads, where their features are joined to them
    `split`      whether one element of `units` is several of some tensor's
    `weight`     how many numbers its parameters are together
    `blocked`    why the group cannot be sharded, "" where it can
    `cut_from`   the groups that ops cut this one out of, where blocks of them are no blocks of this: fused projections
    """

    parameters: dict[str, int] = field(default_factory=dict)
    columns: list[str] = field(default_factory=list)
    rows: list[str] = field(default_factory=list)
    units: int = 0
    split: bool = False
    weight: int = 0
    blocked: str = ""
    cut_from: list[DimGroup] = field(default_factory=list)


def trace_forward(module: nn.Module, inputs: Sequence[Any], arguments: Mapping[str, Any]) -> tuple[Graph, list[str]]:
    """The graph of the module's forward pass without gradients, and the names of its first inputs, the module's
    parameters and buffers."""
    mesh = Mesh.abstract(one=1)
    buffers = dict(module.named_buffers())
    tensors = dict([*module.named_parameters(), *buffers.items()])
    placed = {
        name: distribute(torch.empty(tensor.shape, dtype=tensor.dtype, device="meta"), mesh)
        for name, tensor in tensors.items()
    }

    def forward(placed: Mapping[str, torch.Tensor], inputs: Any, arguments: dict[str, Any]) -> list[torch.Tensor]:
        own = {name: placed[name].clone() for name in buffers}  # a norm changes its running statistics
        with torch.no_grad():
            found = torch.func.functional_call(module, {**placed, **own}, inputs, arguments)
        leaves = pytree.tree_leaves(dict(found) if isinstance(found, dict) else found)
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    return program(forward, mesh=mesh).trace(placed, tuple(inputs), dict(arguments)).graph, list(tensors)


def unread(graph: Graph, names: Sequence[str]) -> list[str]:
    """The parameters with these names, a graph's first inputs, that no op of it takes."""
    inputs = (node for node in graph.fx.nodes if node.op == "placeholder" and node.meta["kind"] == "input")
    return [names[at] for node in inputs if (at := node.meta["label"]) < len(names) and not node.users]


def find_groups(graph: Graph, names: Sequence[str]) -> list[DimGroup]:
    """The groups of a graph whose first inputs are parameters with these names, in the graph's order."""
    return _Finder(graph, names).groups()


@dataclass
class Choice:
    """The choice: `sharded` groups, and the parameters that are only `stored` in shards, with their dims. `blocked`
    has, for each other parameter of a product that might have been a column layer, why it is whole."""

    sharded: list[DimGroup]
    stored: dict[str, int]
    blocked: dict[str, str]

    def text(self, parameters: Sequence[str], unread: Sequence[str] = ()) -> str:
        """A line for each kind of layer: layers that differ in numbers alone are one kind. `unread` parameters were not
        reached."""
        lines: dict[str, None] = {}
        for group in self.sharded:
            rows, size = _named(group.rows), f"{group.units} {'heads' if group.split else 'wide'}"
            fused = [name for source in group.cut_from for name in source.columns if name in self.stored]
            if group.columns:
                lines[f"  {_named(group.columns)} by columns, {rows} by rows ({size})"] = None
            else:
                lines[f"  {_named(fused)} stored by columns, and gathered; {rows} by rows ({size})"] = None
        taken = {name for group in self.sharded for name in group.parameters} | set(self.stored)
        whys: dict[str, list[str]] = {}
        for name, why in self.blocked.items():
            if name not in taken:
                whys.setdefault(why, []).append(name)
        for why, names in whys.items():
            lines[f"  {_named(names)} whole: {why}"] = None
        missed = set(parameters) & set(unread)
        if missed:
            lines[f"  {_named(_covering(missed, parameters))} whole: no op of this forward pass takes them"] = None
        rest = len(set(parameters) - taken - set(self.blocked) - missed)
        lines[f"  the other {rest} parameters whole"] = None
        return "\n".join(lines)


_NORMS = ("native_layer_norm", "mean", "rms_norm", "native_group_norm", "embedding")
"""The name of parameters that read or write the whole residual stream: they are not reported."""


def choose(groups: Sequence[DimGroup], size: int) -> Choice:
    """The groups to shard over a mesh dim of `size`, of which none shards a parameter twice: those of the fewest
    parameters first, which are a layer's own, unless that would leave a group whole that is many times as large (a
    layer's own rank of LoRA, and the heads of its attention)."""
    chosen = Choice([], {}, {})
    viable: list[tuple[DimGroup, list[DimGroup]]] = []
    for group in sorted(groups, key=lambda group: len(group.parameters)):
        fused = [source for source in group.cut_from if source.columns]
        if not group.rows or not (group.columns or fused):
            continue
        why = group.blocked
        if group.units < size or (group.split and group.units % size):
            what = "heads" if group.split else "columns"
            why = why or f"{group.units} {what}, which {size} workers cannot share equally"
        if why:
            names = group.columns or [name for each in fused for name in each.columns]
            chosen.blocked |= {} if why.startswith(_NORMS) else dict.fromkeys(names, why)
        else:
            viable.append((group, fused))
    taken: set[str] = set()
    for group, fused in sorted(viable, key=lambda each: not _outweighs(each[0], [other for other, _ in viable])):
        fused = [source for source in fused if not taken & set(source.columns)]
        if taken & set(group.parameters) or not (group.columns or fused):
            continue
        chosen.sharded.append(group)
        taken |= set(group.parameters)
        if not group.columns:
            for source in fused:
                chosen.stored |= source.parameters
                taken |= set(source.parameters)
    for group in groups:
        if group.blocked and not group.rows and not group.blocked.startswith(_NORMS):
            chosen.blocked = dict.fromkeys(group.columns, group.blocked) | chosen.blocked
    chosen.sharded.sort(key=groups.index)
    return chosen


_MANY = 4


def _outweighs(group: DimGroup, others: Sequence[DimGroup]) -> bool:
    """Whether its parameters are many times as large as those of all groups that have some of them too."""
    rivals = [each for each in others if each is not group and each.parameters.keys() & group.parameters.keys()]
    return bool(rivals) and group.weight > _MANY * sum(each.weight for each in rivals)


def _named(names: Sequence[str]) -> str:
    """The names with `*` for numbers, each once; `.weight` goes without saying."""
    short = (re.sub(r"(?<![^.])\d+(?=\.)", "*", name.removesuffix(".weight")) for name in names)
    return ", ".join(dict.fromkeys(short))


def _covering(names: Collection[str], parameters: Sequence[str]) -> list[str]:
    """These parameters, as the largest modules of which they are all parameters: `vision_model.*`."""
    others = {
        prefix for name in parameters if name not in names for prefix in accumulate(name.split("."), "{}.{}".format)
    }
    found: dict[str, None] = {}
    for name in (name for name in parameters if name in names):
        prefixes = [*accumulate(name.split("."), "{}.{}".format)]
        at = next(prefix for prefix in prefixes if prefix not in others)
        found[at if at == name else f"{at}.*"] = None
    return list(found)


class _Finder:
    """Joins the dims that are one factor: a disjoint-set forest over `Dim`."""

    def __init__(self, graph: Graph, names: Sequence[str]) -> None:
        self.parents: dict[Dim, Dim] = {}
        self.blocks: list[tuple[Dim, str]] = []
        self.units: list[tuple[Dim, int, bool]] = []
        self.cuts: list[tuple[Dim, Dim]] = []
        self.products: list[tuple[str, Dim]] = []  # "column" or "row", and the dim of the parameter's value
        self.names: dict[fx.Node, str] = {}
        self.weights: dict[fx.Node, None] = {}  # values that come from parameters alone
        for node in graph.fx.nodes:
            if node.op == "placeholder" and node.meta["kind"] == "input" and node.meta["label"] < len(names):
                self.names[node] = names[node.meta["label"]]
                self.weights[node] = None
            elif node.op == "call_function":
                self.visit(node)

    def root(self, dim: Dim) -> Dim:
        while (parent := self.parents.get(dim, dim)) != dim:
            self.parents[dim] = self.parents.get(parent, parent)
            dim = parent
        return dim

    def join(self, dims: Sequence[Dim]) -> None:
        for each in dims[1:]:
            self.parents[self.root(each)] = self.root(dims[0])

    def visit(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = args_of(node)
            if isinstance(type_ := node.meta["type"], TensorType):
                for dim in range(len(type_.shape)):
                    self.join([(source, index, dim), (node, 0, dim)])
            return
        operands = tensor_operands(node)
        if operands and all(operand in self.weights for operand in operands):
            self.weights[node] = None
        rule = rule_for(node, _shapes)
        where = f"{_op(node)} at {_line(node)} takes them whole"
        for operand, dims in zip(operands, rule.operands, strict=True):
            for at, factors in enumerate(dims):
                if not factors and operand.meta["type"].shape[at] != 1:
                    self.blocks.append(((operand, 0, at), where))
                    if is_view(node.target) and len(dims) == len(rule.results[0] or ()):
                        self.cuts += [((operand, 0, at), (node, index, at)) for index in range(len(rule.results))]
        for factor, size in rule.sizes.items():
            if size != 1:
                self.factor(node, operands, rule, factor, where)

    def factor(self, node: fx.Node, operands: list[fx.Node], rule: Rule, factor: str, where: str) -> None:
        inputs = [
            ((operand, 0, at), dim)
            for operand, dims in zip(operands, rule.operands, strict=True)
            for at, dim in enumerate(dims)
            if factor in dim
        ]
        outputs = [
            ((node, index, at), dim)
            for index, dims in enumerate(rule.results)
            for at, dim in enumerate(dims or ())
            if factor in dim
        ]
        led = [at for at, dim in inputs + outputs if rule.leader(dim) == factor]
        for at, dim in inputs + outputs:
            if rule.leader(dim) == factor:
                self.units.append((at, rule.sizes[factor], rule.inner(dim) != 1))
        blocked = factor in rule.whole
        if any(rule.leader(dim) != factor for _, dim in outputs):
            blocked = True  # merged below another factor
        elif any(rule.leader(dim) != factor for _, dim in inputs):
            # Cut out of a dim that another factor leads: the heads of a fused projection, behind "query, key or value".
            self.cuts += [(source, made) for source, _ in inputs for made, _ in outputs]
            return
        having = {node for (node, _, _), _ in inputs}
        missing = any(
            dims is not None and all(factor not in dim for dim in dims) and (factor, index) not in rule.kept
            for index, dims in enumerate(rule.results)
        )
        weights = [at for at, _ in inputs if at[0] in self.weights and len(at[0].meta["type"].shape) > 1]
        others = [at for at, _ in inputs if at[0] not in self.weights]
        if missing and not blocked:
            if rule.reductions.get(factor) != "sum" or not weights or not others:
                blocked = True
            else:
                self.products += [("row", at) for at in weights]
        elif weights and outputs and not others and node not in self.weights and len(having) < len(set(operands)):
            self.products += [("column", at) for at in weights]
        if blocked:
            self.blocks += [(at, where) for at in led]
        else:
            self.join(led)

    def groups(self) -> list[DimGroup]:
        made: dict[Dim, DimGroup] = {}

        def group(dim: Dim) -> DimGroup:
            return made.setdefault(self.root(dim), DimGroup())

        for node, name in self.names.items():
            for at in range(len(node.meta["type"].shape)):
                found = group((node, 0, at))
                if found.parameters.setdefault(name, at) != at:
                    found.blocked = f"two dims of {name} are one"
                else:
                    found.weight += math.prod(node.meta["type"].shape)
        sources = {node: self.source(node) for node in self.weights}
        for kind, dim in self.products:
            names = group(dim).columns if kind == "column" else group(dim).rows
            if (name := sources[dim[0]]) not in names:
                names.append(name)
        for dim, why in self.blocks:
            group(dim).blocked = group(dim).blocked or why
        for dim, units, split in self.units:
            found = group(dim)
            found.units = min(found.units or units, units)
            found.split |= split
        for source, target in self.cuts:
            if group(source) is not group(target) and group(source) not in group(target).cut_from:
                group(target).cut_from.append(group(source))
        return list(made.values())

    def source(self, node: fx.Node) -> str:
        """The parameter of which a value is made."""
        while node not in self.names:
            node = next(each for each in tensor_operands(node) if each in self.weights)
        return self.names[node]


def _shapes(node: fx.Node) -> Any:
    types = result_types(node)
    if isinstance(node.meta["type"], TensorType):
        return node.meta["type"].shape
    return tuple(type_.shape if type_ is not None else () for type_ in types)


def _op(node: fx.Node) -> str:
    return op_name(node.target).removeprefix("aten.").partition(".")[0].strip("_")


def _line(node: fx.Node) -> str:
    provenance = node.meta.get("provenance")
    return str(provenance.source) if provenance is not None else "?"
