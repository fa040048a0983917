"""Graphs of one worker from plain PyTorch functions, for tests of lowering and fusion."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from monarch.compiler import ops
from monarch.compiler.context import Context
from monarch.compiler.graph import Graph, args_of
from monarch.compiler.kernels.fuse import FuseKernels
from monarch.compiler.kernels.join import JoinKernels
from monarch.compiler.loops.ir import Kernel
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.types import MeshSpec, TensorType
from tests.compiler.reference import run_reference


def graph_of(function: Callable[..., Any], *tensors: torch.Tensor) -> Graph:
    """The ATen graph of a function that takes tensors and gives one or a tuple of them."""
    module = make_fx(torch.func.functionalize(function))(*tensors)
    traced = module.graph
    graph = Graph("f", MeshSpec(()))
    values: dict[fx.Node, fx.Node] = {}
    real: dict[fx.Node, Any] = {}
    inputs = iter(range(len(tensors)))
    returns: list[fx.Node | None] = []
    for node in traced.nodes:
        if node.op == "placeholder":
            number = next(inputs)
            real[node] = tensors[number]
            values[node] = graph.placeholder("input", number, _type(tensors[number]))
        elif node.op == "call_function":
            made = fx.node.map_arg(args_of(node), lambda n: values[n])
            kwargs = fx.node.map_arg(node.kwargs, lambda n: values[n])
            args, others = fx.node.map_arg((args_of(node), node.kwargs), lambda n: real[n])
            real[node] = node.target(*args, **others)  # type: ignore[operator]
            values[node] = graph.call(node.target, *made, type=_types(real[node]), **kwargs)
        elif node.op == "get_attr":
            constant = getattr(module, str(node.target))
            graph.constants[str(node.target)] = real[node] = constant
            values[node] = graph.placeholder("constant", str(node.target), _type(constant))
        elif node.op == "output":
            result = node.args[0]
            returns = [values[each] for each in (result if isinstance(result, (list, tuple)) else [result])]
        else:
            raise ValueError(f"{node.op} {node.target}")
    graph.output(returns, {})
    return graph


def _types(value: Any) -> Any:
    return tuple(map(_types, value)) if isinstance(value, (list, tuple)) else None if value is None else _type(value)


def _type(value: torch.Tensor) -> TensorType:
    return TensorType(value.dtype, tuple(value.shape))


def fused(graph: Graph, **options: Any) -> Graph:
    """The graph with all its ops that can be in kernels, under other options than the default's."""
    context = Context(CompileOptions(**{"kernels": "all", **options}))
    return JoinKernels().run(FuseKernels().run(graph, context), context)


def kernels_of(graph: Graph) -> list[Kernel]:
    return [parse_kernel(args_of(node)[1]) for node in graph.calls if node.target is ops.kernel]


def others_of(graph: Graph) -> list[str]:
    """The ATen ops that are left, without views."""
    views = {"aten.view", "aten.permute", "aten.t", "aten.transpose", "aten.unsqueeze", "aten.expand", "aten.reshape"}
    packets = [str(getattr(node.target, "overloadpacket", "")) for node in graph.calls]
    return [packet for packet in packets if packet and packet not in views]


def run(graph: Graph, *tensors: torch.Tensor) -> list[torch.Tensor]:
    results, _ = run_reference(graph, dict(enumerate(tensors)))
    return results
