"""Whether a graph of one mesh is well formed."""

from __future__ import annotations

import math
import operator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.errors import LayoutError, RuleError
from monarch.compiler.graph import KINDS, Graph
from monarch.compiler.loops.ir import KernelError, may_overwrite
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.ops import MonarchOp
from monarch.compiler.ops.record import find
from monarch.compiler.rules import rule_for, tensor_operands
from monarch.compiler.text import op_name, print_type
from monarch.compiler.types import REDUCTIONS, VARYING, Placement, TensorType, is_partial
from monarch.compiler.verify.check import PARAMETERS, Check, is_tensor, types_of

PER_WORKER = (ops.to_varying, ops.from_varying, ops.axis_index, ops.permute)
"""Ops that stand in a graph before it is partitioned over the mesh dims that they name."""


class Verifier(Check):
    """Reads a graph once, in its order."""

    def __init__(self, graph: Graph, after: str) -> None:
        super().__init__(graph, after)
        sizes = graph.mesh.sizes
        self.dims = [dim for dim in graph.partitioned if sizes.get(dim, 1) > 1]
        """The mesh dims along which it matters how values lie."""
        self.several = [name for name, size in sizes.items() if size > 1]
        self.good: set[TensorType] = set()
        """Types that can lie on the mesh: many values have the same."""

    def verify(self) -> None:
        graph = self.graph
        if unknown := [dim for dim in graph.partitioned if dim not in graph.mesh.sizes]:
            self.fail(f"partitioned over '{unknown[0]}', which is no dim of {graph.mesh}")
        if len(set(graph.partitioned)) < len(graph.partitioned):
            self.fail(f"partitioned twice over one dim: {', '.join(graph.partitioned)}")
        nodes = list(graph.fx.nodes)
        if not nodes or nodes[-1].op != "output" or sum(node.op == "output" for node in nodes) > 1:
            self.fail("has to end in one output")
        seen: set[fx.Node] = set()
        names: set[str] = set()
        labels: set[tuple[str, str | int]] = set()
        for node in nodes:
            if late := [operand for operand in node.all_input_nodes if operand not in seen]:
                self.fail(f"reads %{late[0].name}, which is not defined above it", node)
            if node.name in names:
                self.fail("is defined twice", node)
            seen.add(node)
            names.add(node.name)
            if node.op == "placeholder":
                self.placeholder(node, labels)
            elif node.op == "call_function":
                self.call(node)
            elif node.op == "output":
                self.output(node)
            else:
                self.fail(f"is a '{node.op}' node: a graph has placeholders, calls of ops and an output", node)

    # -- values ------------------------------------------------------------------------------------------------------

    def typed(self, node: fx.Node) -> Any:
        if "type" not in node.meta:
            self.fail("has no type", node)
        type_ = node.meta["type"]
        for part in type_ if isinstance(type_, tuple) else (type_,):
            if not isinstance(part, TensorType | None):
                self.fail(f"has a type that is none: {part!r}", node)
            if part is not None and part not in self.good:
                try:
                    part.check(self.graph.mesh, f"%{node.name}")
                except LayoutError as error:
                    self.fail(f"has a type that cannot be: {error.message}", node, error.hint)
                self.divides(part, node)
                self.good.add(part)
        return type_

    def divides(self, type_: TensorType, node: fx.Node) -> None:
        """A mesh dim over which the graph is partitioned has equal blocks: `pad-for-divisibility` sees to it."""
        for dim, (size, names) in enumerate(zip(type_.shape, type_.layout.shards, strict=True)):
            parts = math.prod(self.graph.mesh.sizes[name] for name in names if name in self.graph.partitioned)
            if size % parts:
                self.fail(f"has {parts} blocks of dim {dim}, whose size is {size}: it is not padded", node)

    def placeholder(self, node: fx.Node, labels: set[tuple[str, str | int]]) -> None:
        type_ = self.typed(node)
        if not isinstance(type_, TensorType):
            self.fail(f"is a placeholder of type {print_type(type_)}: it has to be one tensor", node)
        kind, label = node.meta.get("kind"), node.meta.get("label")
        if kind not in KINDS:
            self.fail(f"is a placeholder of kind {kind!r}: it has to be one of {', '.join(KINDS)}", node)
        if not isinstance(label, int if kind == "input" else str):
            self.fail(f"has the label {label!r}: inputs have their position, other placeholders a name", node)
        if (kind, label) in labels:
            self.fail("stands for the same as a placeholder above it", node)
        labels.add((kind, label))
        if kind in ("scalar", "seed") and (type_.shape or not type_.layout.is_replicated):
            self.fail(f"is a {kind}: its type has to be one whole number, such as f64[]", node)
        constant = self.graph.constants.get(str(label)) if kind == "constant" else None
        if constant is not None and (tuple(constant.shape), constant.dtype) != (type_.shape, type_.dtype):
            self.fail(f"stands for a tensor of {constant.dtype}, shape {list(constant.shape)}", node)

    def call(self, node: fx.Node) -> None:
        types = self.typed(node)
        target: Any = node.target
        if target is operator.getitem:
            self.getitem(node)
        elif isinstance(target, torch._ops.OpOverload):
            self.arguments_of_torch(node, target)
            self.placements(node, types)
        elif isinstance(target, MonarchOp):
            self.own_op(node, target, types)
        else:
            self.fail(f"calls {target}, which is no op", node)

    def getitem(self, node: fx.Node) -> None:
        producer, index = (*node.args, None, None)[:2]
        if len(node.args) != 2 or not isinstance(producer, fx.Node) or type(index) is not int:
            self.fail("has to take a value and a whole number", node)
        types = producer.meta.get("type")
        if not isinstance(types, tuple):
            self.fail(f"takes an element of %{producer.name}, which is one tensor", node)
        if not 0 <= index < len(types):
            self.fail(f"takes element {index} of %{producer.name}, which has {len(types)}", node)
        if node.meta["type"] != types[index]:
            self.fail(f"is element {index} of %{producer.name}, whose type is {print_type(types[index])}", node)

    def arguments_of_torch(self, node: fx.Node, target: torch._ops.OpOverload) -> None:
        schema = target._schema
        if schema.is_mutable:
            self.fail(f"calls {op_name(target)}, which writes over its arguments: a graph is pure", node)
        positional, every, required = _arguments(target)
        if len(node.args) > len(positional):
            self.fail(f"gives {len(node.args)} arguments to {op_name(target)}, which takes {len(positional)}", node)
        if unknown := [name for name in node.kwargs if name not in every]:
            self.fail(f"gives '{unknown[0]}' to {op_name(target)}, which has no such argument", node, str(schema))
        given = positional[: len(node.args)]
        if missing := [name for name in required if name not in given and name not in node.kwargs]:
            self.fail(f"does not give '{missing[0]}' to {op_name(target)}", node, str(schema))

    # -- ops of ours -------------------------------------------------------------------------------------------------

    def own_op(self, node: fx.Node, op: MonarchOp, types: Any) -> None:
        names = PARAMETERS[op]
        given: dict[str, Any] = dict(zip(names, node.args, strict=False))
        if len(node.args) > len(names) or set(node.kwargs) != set(names[len(node.args) :]):
            self.fail(f"has to give {op.name} just {', '.join(names) or 'nothing'}", node)
        given.update(node.kwargs)
        if op is ops.constrain and self.graph.partitioned and len(self.graph.partitioned) == len(self.graph.mesh.dims):
            self.fail("asks for a layout, and the graph is partitioned over all dims already", node)
        mesh_dims = given.get("mesh_dims", [given["mesh_dim"]] if "mesh_dim" in given else [])
        for at, dim in enumerate(mesh_dims):
            if dim not in (self.graph.mesh.sizes if op in PER_WORKER else self.graph.partitioned):
                self.fail(f"names the mesh dim {dim!r}, over which the graph is not partitioned", node)
            if dim in mesh_dims[:at]:
                self.fail(f"names the mesh dim {dim!r} twice", node)
        if op is ops.commit:
            return
        if op is ops.kernel:
            self.kernel(node, given, types)
        elif op is ops.wait:
            self.wait(node, given, types)
        elif op in ops.WITH_REGIONS:
            self.control(node, given, types)
        elif op.collective:
            self.collective(node, op, given, types)
        elif op in (ops.shard, ops.first_only):
            self.cut(node, given, types)
        elif op in (ops.to_varying, ops.from_varying):
            self.per_worker(node, given, types)
        elif op not in (ops.axis_index, ops.find_anomaly):
            self.placements(node, types)

    def kernel(self, node: fx.Node, given: dict[str, Any], types: Any) -> None:
        tensors, over = given["tensors"], given["over"]
        try:
            kernel = parse_kernel(given["text"])
        except KernelError as error:
            self.fail(f"calls no kernel: {error.message}", node)
        if not isinstance(tensors, list | tuple) or not all(is_tensor(tensor) for tensor in tensors):
            self.fail("has to take a list of tensors", node)
        if not isinstance(types, tuple):
            self.fail("gives a tuple, and its type is none", node)
        takes = [self.on_worker(tensor.meta["type"]) for tensor in tensors]
        gives = [self.on_worker(type_) for type_ in types]
        if takes != [(buffer.dtype, buffer.shape) for buffer in kernel.inputs]:
            self.fail("takes other tensors than its kernel", node, str(kernel).partition("\n")[0])
        if gives != [(buffer.dtype, buffer.shape) for buffer in kernel.outputs]:
            self.fail("gives other tensors than its kernel", node, str(kernel).partition("\n")[0])
        if len(over) != len(gives) or any(at != -1 and not may_overwrite(kernel, i, at) for i, at in enumerate(over)):
            self.fail(f"cannot have its results over {over}", node)

    def control(self, node: fx.Node, given: dict[str, Any], types: Any) -> None:
        """What crosses the edges of an op's regions: the regions take and give it as the op does."""
        names = given["regions"]
        expected = 1 if node.target is ops.scan else 2
        if not isinstance(names, list | tuple) or len(names) != expected:
            self.fail(f"has to name {expected} regions", node)
        if unknown := [name for name in names if name not in self.graph.regions]:
            self.fail(f"names the region {unknown[0]!r}, which the graph does not have", node)
        lists = [given.get(name, []) for name in ("carried", "xs", "operands")]
        if not all(isinstance(each, list | tuple) and all(map(is_tensor, each)) for each in lists):
            self.fail("has to take lists of tensors", node)
        carried, xs, operands = ([self.graph.type_so_far(value) for value in each] for each in lists)
        takes = [*carried, *(_element(self, node, type_) for type_ in xs), *operands]
        gives = list(types)
        if node.target is ops.cond:
            self.decides(given["predicate"], node)
        else:
            takes.append(TensorType(torch.int64, ()))
            if gives[: len(carried)] != carried:
                self.fail("carries values of other types than it gives", node)
            gives = [*carried, *(_element(self, node, type_) for type_ in gives[len(carried) :])]
        for at, name in enumerate(names):
            region = self.graph.regions[name]
            if region.mesh != self.graph.mesh or region.partitioned != self.graph.partitioned or region.updates:
                self.fail(f"has the region '{name}', which is no part of this graph", node)
            inputs = region.inputs
            wrong = [each for each in region.placeholders if each.meta.get("kind") not in ("input", "constant")]
            if wrong or [each.meta["label"] for each in inputs] != list(range(len(inputs))):
                self.fail(f"has the region '{name}', which reads more than it is given", node)
            if (found := [region.type_so_far(each) for each in inputs]) != takes:
                self.fail(f"gives its region '{name}' other values than that takes", node, _listed(takes, found))
            made = [None if each is None else region.type_so_far(each) for each in region.returns]
            if node.target is ops.while_loop and at == 0:
                if len(made) != 1 or region.returns[0] is None:
                    self.fail(f"has the region '{name}', which gives no predicate", node)
                self.decides(region.returns[0], node)
            elif made != gives:
                self.fail(f"has the region '{name}', which gives other values than it", node, _listed(gives, made))
            Verifier(region, self.lead.removeprefix("after ").removesuffix(": ")).verify()

    def decides(self, predicate: Any, node: fx.Node) -> None:
        """Every worker has the whole of a predicate."""
        if not is_tensor(predicate):
            self.fail("has to take a predicate", node)
        type_ = self.graph.type_so_far(predicate)
        if type_ != TensorType(torch.bool, ()):
            self.fail(f"has the predicate %{predicate.name}, which is {type_}: it has to be bool[], replicated", node)

    def on_worker(self, type_: Any) -> tuple[torch.dtype, tuple[int, ...]] | None:
        return (type_.dtype, self.graph.local_shape(type_)) if isinstance(type_, TensorType) else None

    def collective(self, node: fx.Node, op: MonarchOp, given: dict[str, Any], types: Any) -> None:
        tensors = given["tensors"]
        if not isinstance(tensors, list | tuple) or not tensors or not all(is_tensor(tensor) for tensor in tensors):
            self.fail("has to take a list of tensors", node)
        if not isinstance(types, tuple) or len(types) != len(tensors):
            self.fail(f"takes {len(tensors)} tensors, so its type has to be a tuple of as many", node)
        for name in ("dims", "source_dims", "target_dims"):
            if name in given and len(given[name]) != len(tensors):
                self.fail(f"takes {len(tensors)} tensors, and {len(given[name])} {name}", node)
        for at, (tensor, type_) in enumerate(zip(tensors, types, strict=True)):
            expected = self.collective_gives(node, op, given, at, tensor)
            if expected is not None and not self.alike(type_, expected):
                self.fail(f"gives {expected} for %{tensor.name}, and its type says {print_type(type_)}", node)
        if not any(user.target is not operator.getitem or user.users for user in node.users):
            self.fail("is a collective whose results nobody reads", node)

    def wait(self, node: fx.Node, given: dict[str, Any], types: Any) -> None:
        pending, tensors = given["pending"], given["tensors"]
        if not isinstance(pending, fx.Node) or not ops.is_collective(pending.target):
            self.fail("has to wait for a collective", node)
        moved = pending.args[0] if pending.args else pending.kwargs.get("tensors")
        if not isinstance(tensors, list | tuple) or not isinstance(moved, list | tuple) or [*tensors] != [*moved]:
            self.fail(f"has to take the tensors that %{pending.name} moves", node)
        if types != pending.meta.get("type"):
            self.fail(f"gives what %{pending.name} does, which is {print_type(pending.meta.get('type'))}", node)
        if other := [user for user in pending.users if user is not node]:
            self.fail(f"reads %{pending.name}, for which %{node.name} waits", other[0])

    def collective_gives(
        self, node: fx.Node, op: MonarchOp, given: dict[str, Any], at: int, tensor: fx.Node
    ) -> TensorType | None:
        """The type of what a collective makes of its operand number `at`; None where the type leaves it open."""
        type_ = self.graph.type_so_far(tensor)
        mesh_dims = tuple(given["mesh_dims"])
        if op in (ops.all_reduce, ops.reduce_scatter):
            for dim in mesh_dims:
                if type_.layout.placement(dim) not in (given["reduction"], VARYING):
                    self.fail(f"reduces %{tensor.name}, which is {type_}, over '{dim}'", node)
        if op in (ops.all_gather, ops.all_to_all):
            source = given["dims" if op is ops.all_gather else "source_dims"][at]
            shards = type_.layout.shards[source] if 0 <= source < type_.ndim else ()
            nested = tuple(name for name in shards if name in self.dims)
            if nested[-len(mesh_dims) :] != mesh_dims:
                self.fail(
                    f"gathers dim {source} of %{tensor.name}, which is {type_}, over {', '.join(mesh_dims)}", node
                )
        if op is ops.broadcast:
            return type_
        if op is ops.permute:
            if any(type_.layout.placement(dim) != VARYING for dim in mesh_dims if dim in self.dims):
                self.fail(
                    f"moves %{tensor.name}, which is {type_}: it does not vary along {', '.join(mesh_dims)}", node
                )
            return type_
        target = None
        if op in (ops.reduce_scatter, ops.all_to_all):
            target = given["dims" if op is ops.reduce_scatter else "target_dims"][at]
        for dim in mesh_dims:
            type_ = self.placed(node, type_, dim, target)
        return type_

    def cut(self, node: fx.Node, given: dict[str, Any], types: Any) -> None:
        tensor, dim = given["tensor"], given["mesh_dim"]
        if not is_tensor(tensor):
            self.fail("has to take a tensor", node)
        type_ = self.graph.type_so_far(tensor)
        if type_.layout.placement(dim) is not None:
            self.fail(f"takes %{tensor.name}, which is {type_} and so not whole on '{dim}'", node)
        expected = self.placed(node, type_, dim, given["dim"] if node.target is ops.shard else "sum")
        if not self.alike(types, expected):
            self.fail(f"gives {expected}, and its type says {print_type(types)}", node)

    def alike(self, types: Any, expected: TensorType) -> bool:
        """Whether a type is the expected one, but for mesh dims of one worker, along which all layouts are one."""
        return isinstance(types, TensorType) and (
            types == expected
            or types.with_layout(types.layout.only(self.several))
            == expected.with_layout(expected.layout.only(self.several))
        )

    def per_worker(self, node: fx.Node, given: dict[str, Any], types: Any) -> None:
        """Where per-worker code begins or ends: the sizes fit, and so do the placements where the mesh dim is
        partitioned."""
        tensor, mesh_dim, begins = given["tensor"], given["mesh_dim"], node.target is ops.to_varying
        placement = given["dim" if begins else "placement"]
        if not is_tensor(tensor) or not isinstance(types, TensorType):
            self.fail("has to take and to give one tensor", node)
        outside, inside = (tensor.meta["type"], types) if begins else (types, tensor.meta["type"])
        shape = list(inside.shape)
        if isinstance(placement, int) and 0 <= placement < len(shape):
            shape[placement] *= self.graph.mesh.sizes[mesh_dim]
        elif placement not in ((None,) if begins else REDUCTIONS):
            self.fail(f"cannot have the placement {placement!r}", node)
        if (outside.dtype, list(outside.shape)) != (inside.dtype, shape):
            self.fail(f"makes {types} of %{tensor.name}, which is {tensor.meta['type']}", node)
        if mesh_dim in self.graph.partitioned:
            allowed = [(placement, VARYING) if begins else (VARYING, placement)]
            if begins and placement is None:
                allowed.append((VARYING, VARYING))  # it varies already
            found = tensor.meta["type"].layout.placement(mesh_dim), types.layout.placement(mesh_dim)
            if self.graph.mesh.sizes[mesh_dim] > 1 and found not in allowed:
                self.fail(f"takes %{tensor.name}, which is {tensor.meta['type']}, along '{mesh_dim}'", node)
        self.placements(node, types, but=mesh_dim)

    def placed(self, node: fx.Node, type_: TensorType, dim: str, placement: Placement) -> TensorType:
        try:
            return type_.place(dim, placement)
        except LayoutError as error:
            self.fail(f"asks for what cannot be: {error.message}", node, error.hint)

    # -- placements --------------------------------------------------------------------------------------------------

    def placements(self, node: fx.Node, types: Any, but: str = "") -> None:
        """Operands and results lie as the op's rule allows, over each mesh dim that is partitioned `but` one."""
        operands = tensor_operands(node)
        for dim in self.dims:
            if dim == but:
                continue
            takes = [operand.meta["type"].layout.placement(dim) for operand in operands]
            gives = [type_.layout.placement(dim) for type_ in types_of(types) if type_ is not None]
            if VARYING in takes and any(placement != VARYING for placement in gives):
                self.fail(f"takes a value that varies along '{dim}', so its own has to vary as well", node)
            if VARYING in takes and any(placement not in (VARYING, None) for placement in takes):
                self.fail(f"takes a value that varies along '{dim}', and one that is sharded or pending there", node)
            if VARYING in gives and VARYING not in takes:
                self.fail(f"varies along '{dim}', and no operand does", node)
            if VARYING not in takes and any(placement is not None for placement in (*takes, *gives)):
                self.by_rule(node, dim, operands, takes, gives)

    def by_rule(
        self, node: fx.Node, dim: str, operands: list[fx.Node], takes: list[Placement], gives: list[Placement]
    ) -> None:
        # A call with sizes among its arguments was rewritten for one worker: which of its local dims stand for which
        # global ones is not to be seen any more. Of such calls only pending reductions are looked at.
        local = isinstance(node.target, MonarchOp) or find(node.target, "localize") is not None
        if any(is_partial(placement) for placement in gives) and not any(
            isinstance(placement, int) or is_partial(placement) for placement in takes
        ):
            self.fail(f"is a pending reduction over '{dim}', and no operand is sharded or pending there", node)
        if local and (any(isinstance(placement, int) for placement in takes) or not any(map(is_partial, takes))):
            return
        try:
            rule = rule_for(node, self.local_shape_of if local else _global_shape_of)
        except RuleError as error:
            self.fail(f"is not replicated on '{dim}', which a rule has to allow: {error.message}", node, error.hint)
        made = [at for at, type_ in enumerate(types_of(node.meta["type"])) if type_ is not None]
        for strategy in rule.strategies(self.graph.mesh.sizes[dim]):
            if list(strategy.operands) == takes and [strategy.results[at] for at in made] == gives:
                return
        lines = [f"%{operand.name} : {operand.meta['type']}" for operand in dict.fromkeys(operands)]
        if pending := [o for o, placement in zip(operands, takes, strict=True) if is_partial(placement)]:
            self.fail(f"cannot take %{pending[0].name} before it is reduced over '{dim}'", node, "\n".join(lines))
        self.fail(f"does not lie on '{dim}' as its operands do: its rule is {rule}", node, "\n".join(lines))

    def local_shape_of(self, node: fx.Node) -> Any:
        type_ = node.meta["type"]
        if isinstance(type_, TensorType):
            return self.graph.local_shape(type_)
        return tuple(() if part is None else self.graph.local_shape(part) for part in type_)

    # -- results -----------------------------------------------------------------------------------------------------

    def output(self, node: fx.Node) -> None:
        match node.args:
            case ((tuple() as returns, dict() as updates),):
                pass
            case _:
                self.fail("has to hold a tuple of returned values and a dict of updated states", node)
        for value in returns:
            if value is not None and not is_tensor(value):
                self.fail(f"returns {value}, which is not one tensor", node)
        states = {p.meta["label"]: p.meta["type"] for p in self.graph.placeholders if p.meta["kind"] == "state"}
        for label, value in updates.items():
            if not isinstance(label, str) or not is_tensor(value):
                self.fail(f"updates state {label!r} with {value}, which is not one tensor", node)
            state, new = states.get(label), value.meta["type"]
            if state is None:
                continue  # a state that the program makes
            if (new.dtype, new.shape) != (state.dtype, state.shape):
                self.fail(f"updates state '{label}', which is {state}, with %{value.name}, which is {new}", node)
            for dim in self.dims:
                if new.layout.placement(dim) != state.layout.placement(dim):
                    self.fail(
                        f"updates state '{label}', which is {state}, with %{value.name}, which is {new}",
                        node,
                        f"they have to lie alike on '{dim}'.",
                    )


@cache
def _arguments(target: torch._ops.OpOverload) -> tuple[list[str], list[str], list[str]]:
    """The names of an op's arguments: those that can be given by position, all of them, and those without a default."""
    arguments = target._schema.arguments
    return (
        [argument.name for argument in arguments if not argument.kwarg_only],
        [argument.name for argument in arguments],
        [argument.name for argument in arguments if not argument.has_default_value()],
    )


def _element(check: Check, node: fx.Node, type_: TensorType) -> TensorType:
    """The type of an element along dim 0."""
    layout = type_.layout
    if not type_.ndim or layout.shards[0]:
        check.fail(f"goes along dim 0 of a value that is {type_}, and so not whole on every worker", node)
    return TensorType(type_.dtype, type_.shape[1:], replace(layout, shards=layout.shards[1:]), type_.padding[1:])


def _listed(first: list[Any], second: list[Any]) -> str:
    return "\n".join(f"{', '.join(map(print_type, each))}" for each in (first, second))


def _global_shape_of(node: fx.Node) -> Any:
    type_ = node.meta["type"]
    return type_.shape if isinstance(type_, TensorType) else tuple(() if part is None else part.shape for part in type_)
