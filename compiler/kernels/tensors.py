"""Each value of a partitioned graph, as it is on a worker: its local shape, and the strides that ATen gives it."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterator
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.alike import Memo, frozen
from monarch.compiler.graph import Graph, args_of
from monarch.compiler.loops.ir import Buffer
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.symbols import examples
from monarch.compiler.types import TensorType

aten = torch.ops.aten


def tensors_of(graph: Graph) -> dict[fx.Node, Buffer]:
    """Every value that is one tensor. Strides are found by running the ops on tensors without data; where they turn out
    otherwise on a worker, a kernel's operand is copied first, so that they decide speed alone. A named size has the
    value of the example: no kernel has such values."""
    found: dict[fx.Node, Buffer] = {}
    meta: dict[fx.Node, Any] = {}
    for node in graph.fx.nodes:
        if node.op == "output":
            continue
        meta[node] = _run(graph, node, meta)
        if isinstance(node.meta["type"], TensorType):
            tensor: torch.Tensor = meta[node]
            found[node] = Buffer(tensor.dtype, tuple(tensor.shape), _canonical(tensor))
    return found


def _canonical(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides, those of a dim of one element as in contiguous memory."""
    if tensor.is_contiguous():
        return Buffer.contiguous(tensor.dtype, tuple(tensor.shape)).strides
    strides = list(tensor.stride())
    for dim in range(tensor.dim() - 1, -1, -1):
        if tensor.shape[dim] == 1:
            strides[dim] = strides[dim + 1] * tensor.shape[dim + 1] if dim + 1 < tensor.dim() else 1
    return tuple(strides)


def _run(graph: Graph, node: fx.Node, meta: dict[fx.Node, Any]) -> Any:
    types = node.meta["type"]
    if node.target is ops.kernel:
        made = parse_kernel(args_of(node)[1]).outputs
        return tuple(torch.empty_strided(b.shape, b.strides, dtype=b.dtype, device="meta") for b in made)
    if node.op == "call_function" and not isinstance(node.target, ops.MonarchOp):
        if node.target is operator.getitem:
            source, number = args_of(node)
            return meta[source][number]
        target: Any = node.target
        if target in (aten.view.default, aten._unsafe_view.default):
            target = aten.reshape.default
        args = fx.node.map_arg(examples(args_of(node)), lambda n: meta[n])
        kwargs = dict(fx.node.map_arg(node.kwargs, lambda n: meta[n]))
        if "device" in kwargs or not any(isinstance(n, fx.Node) for n in node.all_input_nodes):
            return _made(graph, types)
        result = _known(target, args, kwargs)
        if _fits(graph, result, types):
            return result
    return _made(graph, types)


_RESULTS: Memo[tuple[Any]] = Memo(4096)


def _known(target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An op's results on tensors without data; None for an op that such tensors do not know. Calls that are alike are
    made once: most of PyTorch's shape functions are Python."""
    try:
        key = target, torch.get_default_dtype(), frozen(args, _like), frozen(kwargs, _like)
        found = _RESULTS.get(key)
    except TypeError:  # an argument without a hash
        return _called(target, args, kwargs)
    return found[0] if found is not None else _RESULTS.keep(key, (_called(target, args, kwargs),))[0]


def _like(tensor: torch.Tensor) -> Hashable:
    return tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def _called(target: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    try:
        with torch.no_grad():
            return target(*args, **kwargs)
    except (
        RuntimeError,
        NotImplementedError,
        TypeError,
        ZeroDivisionError,
    ):  # some divide by how many elements there are
        return None


def _made(graph: Graph, types: Any) -> Any:
    if isinstance(types, tuple):
        return tuple(_made(graph, type_) for type_ in types)
    if types is None:
        return None
    return torch.empty(examples(graph.local_shape(types)), dtype=types.dtype, device="meta")


def _fits(graph: Graph, result: Any, types: Any) -> bool:
    results, wanted = list(_each(result)), list(_each(types))
    return len(results) == len(wanted) and all(
        type_ is None
        or (
            isinstance(tensor, torch.Tensor)
            and tensor.shape == examples(graph.local_shape(type_))
            and tensor.dtype == type_.dtype
        )
        for tensor, type_ in zip(results, wanted, strict=True)
    )


def _each(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        yield from value
    else:
        yield value
