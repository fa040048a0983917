"""Take apart the composite ops that some mesh dim would split; the others stay whole for their ATen kernels."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from monarch.compiler.context import Context, Pass
from monarch.compiler.graph import Graph, args_of, tensor_type
from monarch.compiler.loading import load
from monarch.compiler.names import find_op
from monarch.compiler.ops.record import enter, record, recorded
from monarch.compiler.partition import PartitionByMesh
from monarch.compiler.partition.options import Options, find_options
from monarch.compiler.passes.batches import find_split, keep_split
from monarch.compiler.rules import Rule
from monarch.compiler.symbols import scope_of
from monarch.compiler.types import MeshSpec, TensorType

aten = torch.ops.aten

Decompositions = dict[Any, Callable[..., Any]]


class DecomposeSplit(Pass):
    """Replace a composite op by pointwise ops and reductions where a layout shards a dim that it needs whole.

    %l = input 0                          : f32[64, 256@model]
    %s = aten._softmax(%l, 1, false)      : f32[64, 256]
    -->
    %l = input 0                          : f32[64, 256@model]
    %m = aten.amax(%l, [1], true)         : f32[64, 1]
    %d = aten.sub.Tensor(%l, %m)          : f32[64, 256]
    ...

    Dims that views merge are kept apart where a layout shards the lower of them (`batches.py`), and composites of
    what is merged so are taken apart too.
    """

    name = "decompose"

    def run(self, graph: Graph, context: Context) -> Graph:
        rules: dict[fx.Node, Rule] = {}  # they know of no mesh dim
        for mesh_dim, size in graph.mesh.dims:
            while size > 1:
                options = find_options(graph, mesh_dim, PartitionByMesh(mesh_dim).partition, rules)
                if keep_split(graph, options):
                    continue
                if not (split := _split_composites(graph, options)):
                    break
                for node in split:
                    inline(graph, node)
        return graph


class KeepUnevenApart(Pass):
    """Keep dims apart that views merge where a mesh dim shards the lower of them unevenly, so that it can be padded.

    %l = input 0                              : f32[4, 5@data, 8]        # data=2
    %x = aten.view(%l, [20, 8])               : f32[20, 8]
    %y = aten.mm(%x, %w)                      : f32[20, 6]
    -->
    %l = input 0                              : f32[4, 5@data, 8]
    %y = aten.matmul(%l, %w)                  : f32[4, 5, 6]

    `DecomposeSplit` does the same where sizes divide. Here a mesh of one worker, which divides everything, says which
    views these are: results are the same whichever dims stay apart. Regions stay as they are: no padding goes into one.
    """

    name = "keep-uneven-apart"

    def run(self, graph: Graph, context: Context) -> Graph:
        mesh, graph.mesh = graph.mesh, MeshSpec(tuple((name, 1) for name in graph.mesh.names))
        try:
            for mesh_dim in mesh.names:
                while _kept_apart(graph, mesh_dim):
                    pass
        finally:
            graph.mesh = mesh
        return graph


def _kept_apart(graph: Graph, mesh_dim: str) -> bool:
    """Keep dims apart that views merge and a layout shards, or take composites of such merged dims apart; whether there
    were any."""
    options = find_options(graph, mesh_dim)
    if keep_split(graph, options):
        return True
    merged = find_split(graph, options)
    split = [
        node
        for node in graph.calls
        if is_composite(node) and node not in options.varying and not merged.isdisjoint(options.operands[node])
    ]
    for node in split:
        inline(graph, node)
    return bool(split)


def _var_mean(
    x: torch.Tensor, dim: list[int] | None = None, *, correction: float | None = None, keepdim: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Variance by its definition, so that both sums can be partial."""
    dims = list(range(x.ndim)) if dim is None else [d % x.ndim for d in dim]
    count = math.prod(x.shape[d] for d in dims)
    mean = x.sum(dims, keepdim=True) / count
    off = x - mean
    squares = torch.view_as_real(off).square().sum(-1) if x.is_complex() else off * off
    var = squares.sum(dims, keepdim=keepdim) / max(count - (1 if correction is None else correction), 0)
    return var, mean if keepdim else mean.view(var.shape)


def _var(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _var_mean(x, *args, **kwargs)[0]


def _std(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _var(x, *args, **kwargs).sqrt()


enter(
    """
    aten._softmax aten._log_softmax aten._softmax_backward_data aten._log_softmax_backward_data aten.logsumexp
    aten.nll_loss_forward aten.nll_loss_backward aten.nll_loss2d_forward aten.nll_loss2d_backward
    aten.native_layer_norm aten.native_layer_norm_backward aten._fused_rms_norm aten._fused_rms_norm_backward
    aten.native_group_norm aten.native_group_norm_backward aten.native_batch_norm aten.native_batch_norm_backward
    aten._native_batch_norm_legit aten._native_batch_norm_legit_functional
    aten._native_batch_norm_legit_no_training
    """.split(),
    decompose="torch",
)
enter(["aten.var_mean.correction"], decompose=_var_mean)
enter(["aten.var.correction"], decompose=_var)
enter(["aten.std.correction"], decompose=_std)


@functools.cache
def composites() -> Decompositions:
    """The ops that can be taken apart, and how, by overload."""
    own = {name: how for name in recorded("decompose") if callable(how := record(name).decompose)}
    of_torch = [getattr(aten, name.removeprefix("aten.")) for name in recorded("decompose") if name not in own]
    return {**get_decompositions(of_torch), **{find_op(name): how for name, how in own.items()}}


def is_composite(node: fx.Node) -> bool:
    """Whether it can be taken apart: not over nothing, by whose size PyTorch's decompositions divide."""
    types = (operand.meta["type"] for operand in node.all_input_nodes)
    return node.target in composites() and not any(
        isinstance(type_, TensorType) and 0 in type_.shape for type_ in types
    )


def _split_composites(graph: Graph, options: Options) -> list[fx.Node]:
    """The composite ops that a mesh dim splits: an operand is sharded where the op needs it whole, and becomes so
    without a gather (a fully sharded parameter, which is gathered, splits nothing)."""
    found = [node for node in graph.calls if is_composite(node) and node not in options.varying]
    merged = find_split(graph, options) if found else set()
    return [node for node in found if _is_split(options, node) or not merged.isdisjoint(options.operands[node])]


def _is_split(options: Options, node: fx.Node) -> bool:
    taken = {
        (i, placement)
        for strategy in options.rules[node].strategies(options.size)
        for i, placement in enumerate(strategy.operands)
    }
    return any(
        direct and isinstance(placement, int) and (i, placement) not in taken
        for i, operand in enumerate(options.operands[node])
        # A norm's own weight is small: gathering it leaves the op whole.
        if not (operand.op == "placeholder" and operand.meta["kind"] == "state")
        for placement, direct in options.reach[operand][0].items()
    )


TRACED: dict[object, fx.GraphModule] = {}
"""The ops of composites, by op, arguments, and the operands' shapes and dtypes. Not to be changed."""
_MOST_TRACED = 1024


def inline(graph: Graph, node: fx.Node, *, unpadded: bool = False) -> None:
    """Replace one composite op by the ops that it consists of; `unpadded` for operands without their padding."""
    operands = [leaf for leaf in pytree.tree_leaves((args_of(node), node.kwargs)) if isinstance(leaf, fx.Node)]
    types = [tensor_type(each).unpadded if unpadded else tensor_type(each) for each in operands]
    traced, symbols = _traced(node, types)
    values: dict[fx.Node, Any] = {}
    inputs = iter(operands)
    with graph.fx.inserting_before(node):
        for inner in traced.graph.nodes:
            if inner.op == "placeholder":
                values[inner] = next(inputs)
            elif inner.op == "get_attr":
                values[inner] = _constant(graph, getattr(traced, inner.target))
            elif inner.op == "call_function":
                if isinstance(made := inner.meta.get("val"), torch.SymInt):
                    values[inner] = symbols.size(made)
                elif isinstance(made, torch.SymFloat):
                    values[inner] = _number(graph, symbols, made, types[0].dtype)
                else:
                    values[inner] = _copy(graph, inner, values, node, symbols)
    _replace(graph, node, fx.node.map_arg(args_of(traced.graph.output_node())[0], lambda n: values[n]))


def _traced(node: fx.Node, types: Sequence[TensorType]) -> tuple[fx.GraphModule, Any]:
    """The ops that a composite op consists of for operands of these types, and the symbols of their named sizes (None
    where they have none). Composites that are alike are traced once."""
    leaves, spec = pytree.tree_flatten((args_of(node), node.kwargs))
    decomposition = composites()[node.target]

    def call(*tensors: torch.Tensor) -> Any:
        given = iter(tensors)
        filled = [next(given) if isinstance(leaf, fx.Node) else leaf for leaf in leaves]
        args, kwargs = pytree.tree_unflatten(filled, spec)
        result = decomposition(*args, **kwargs)
        return result if isinstance(result, torch.Tensor) else list(result)  # plain, where it is a named tuple

    def trace(mode: Literal["fake", "symbolic"]) -> fx.GraphModule:
        traced: fx.GraphModule = make_fx(call, decomposition_table=composites(), tracing_mode=mode)(*fakes)
        traced.graph.eliminate_dead_code()
        return traced

    shapes = [each.shape for each in types]
    scope = next((found for shape in shapes for size in shape if (found := scope_of(size)) is not None), None)
    if scope is not None:
        symbols = load("monarch.compiler.symbolic:symbols_of")(scope)
        with FakeTensorMode(shape_env=symbols.environment):
            shapes = [symbols.torch_shape(shape) for shape in shapes]
            leaves = [symbols.torch_sizes(leaf) for leaf in leaves]
            fakes = [torch.empty(shape, dtype=t.dtype) for shape, t in zip(shapes, types, strict=True)]
        traced = trace("symbolic")
        symbols.close()
        return traced, symbols
    # 0.0 and -0.0 are equal, and so are 1 and True: keys hold texts.
    plain = tuple("" if isinstance(leaf, fx.Node) else repr(leaf) for leaf in leaves)
    operands = tuple((tuple(shape), t.dtype) for shape, t in zip(shapes, types, strict=True))
    key = node.target, plain, repr(spec), operands, torch.get_default_dtype()
    if key not in TRACED:
        with FakeTensorMode():
            fakes = [torch.empty(shape, dtype=t.dtype) for shape, t in zip(shapes, types, strict=True)]
        if len(TRACED) >= _MOST_TRACED:
            TRACED.clear()
        TRACED[key] = trace("fake")
    return TRACED[key], None


def _replace(graph: Graph, node: fx.Node, results: Any) -> None:
    """Put the results of a composite op's ops in the place of its own."""
    if isinstance(node.meta["type"], TensorType):
        results.meta["type"] = node.meta["type"]  # which says what of it is padding
        node.replace_all_uses_with(results)
    else:
        for user in list(node.users):
            assert user.target is operator.getitem
            result = results[args_of(user)[1]]
            if result.target is aten._to_copy.default and tensor_type(result).dtype != tensor_type(user).dtype:
                result = args_of(result)[0]  # a norm's statistics, which only kernels for CPUs make halves
            result.meta["type"] = user.meta["type"]
            user.replace_all_uses_with(result)
            graph.fx.erase_node(user)
    graph.fx.erase_node(node)


_DROPPED = ("device", "layout", "pin_memory", "memory_format")


def _copy(graph: Graph, inner: fx.Node, env: dict[fx.Node, Any], node: fx.Node, symbols: Any) -> Any:
    if inner.target in (aten.detach.default, aten.alias.default, aten.lift_fresh_copy.default):
        return env[args_of(inner)[0]]
    args = fx.node.map_arg(args_of(inner), lambda n: env[n])
    mapped: Any = fx.node.map_arg(inner.kwargs, lambda n: env[n])
    kwargs = {k: v for k, v in mapped.items() if k not in _DROPPED}
    copy = graph.call(inner.target, *args, type=None, **kwargs)
    copy.meta.update({k: v for k, v in node.meta.items() if k not in ("type", "undefined")})
    copy.meta["type"] = pytree.tree_map(
        lambda value: (
            TensorType(value.dtype, tuple(value.shape) if symbols is None else symbols.shape(tuple(value.shape)))
            if isinstance(value, torch.Tensor)
            else None
        ),
        inner.meta["val"],
    )
    if isinstance(copy.meta["type"], list):
        copy.meta["type"] = tuple(copy.meta["type"])
    return copy


def _number(graph: Graph, symbols: Any, value: torch.SymFloat, dtype: torch.dtype) -> Any:
    """A float that follows from named sizes: workers compute it, for tensors of this dtype."""
    scalar = TensorType(torch.float64, ())

    def full(number: Any) -> fx.Node:
        return graph.call(aten.full.default, [], number, type=scalar, dtype=torch.float64)

    def apply(name: str, operands: tuple[Any, ...]) -> fx.Node:
        overload = {"sqrt": "default", "pow": "Tensor_Tensor"}.get(name, "Tensor")
        nodes = [each if isinstance(each, fx.Node) else full(each) for each in operands]
        return graph.call(getattr(getattr(aten, name), overload), *nodes, type=scalar)

    made = symbols.expression(value, full, apply)
    if made is None:
        return float(value)
    wide = dtype if dtype == torch.float64 else torch.float32
    return graph.call(aten._to_copy.default, made, type=TensorType(wide, ()), dtype=wide)


def _constant(graph: Graph, value: torch.Tensor) -> fx.Node:
    label = f"c{len(graph.constants)}"
    graph.constants[label] = value.detach().clone()
    first = next(iter(graph.fx.nodes))
    with graph.fx.inserting_before(first):
        return graph.placeholder("constant", label, TensorType(value.dtype, tuple(value.shape)))
