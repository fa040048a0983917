"""Whether a graph's ops give what its types say, on tensors without data."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from monarch.compiler import ops
from monarch.compiler.alike import Memo, frozen
from monarch.compiler.graph import args_of
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.loops.text import parse_kernel
from monarch.compiler.ops import MonarchOp
from monarch.compiler.ops.regions import regions_of
from monarch.compiler.text import print_type
from monarch.compiler.types import TensorType
from monarch.compiler.verify.check import PARAMETERS, Check, types_of

_RIGHT: Memo[bool] = Memo(1 << 14)
"""Calls that give what their types say."""
_NORMS = {
    torch.ops.aten.native_layer_norm.default,
    torch.ops.aten.native_batch_norm.default,
    torch.ops.aten._native_batch_norm_legit.default,
    torch.ops.aten._native_batch_norm_legit_functional.default,
}
"""The statistics of halves are float32 by type, as on GPUs and in generated kernels, and those that run on are halves:
kernels on CPUs and shape functions make either of both."""


class Run(Check):
    """Runs a graph's ops on fake tensors: shapes and dtypes, no data. Calls that are alike are run once."""

    def run(self) -> None:
        self.values: dict[fx.Node, Any] = {}
        for node in self.graph.calls:
            if node.target in ops.WITH_REGIONS:
                for region in regions_of(self.graph, node):
                    Run(region, "").run()
                continue
            key = self.key(node)
            if key is None or _RIGHT.get(key) is None:
                with self.mode:
                    self.compare(node, self.result(node))
                if key is not None:
                    _RIGHT.keep(key, True)

    @cached_property
    def mode(self) -> FakeTensorMode:
        return FakeTensorMode()

    def key(self, node: fx.Node) -> Hashable | None:
        """All that the outcome depends on."""
        sizes = tuple(self.graph.mesh.dims) if isinstance(node.target, MonarchOp) else ()
        try:
            arguments = frozen(args_of(node), self.like), frozen(node.kwargs, self.like)
        except TypeError:  # an argument without a hash
            return None
        return node.target, sizes, torch.get_default_dtype(), arguments, self.like(node)

    def like(self, value: Any) -> Hashable:
        if not isinstance(value, fx.Node):
            raise TypeError
        types = [None if t is None else (self.graph.local_shape(t), t.dtype) for t in types_of(value.meta["type"])]
        return isinstance(value.meta["type"], tuple), tuple(types)

    def value(self, node: fx.Node) -> Any:
        """By the node's type, so that strides, which types leave open, do not depend on the op that made it."""
        if node not in self.values:
            types = node.meta["type"]
            self.values[node] = [self.empty(t) for t in types] if isinstance(types, tuple) else self.empty(types)
        return self.values[node]

    def empty(self, type_: TensorType | None) -> torch.Tensor | None:
        return None if type_ is None else torch.empty(self.graph.local_shape(type_), dtype=type_.dtype)

    def result(self, node: fx.Node) -> Any:
        target: Any = node.target
        args: Any = fx.node.map_arg(node.args, self.value)
        kwargs: Any = fx.node.map_arg(node.kwargs, self.value)
        if isinstance(target, MonarchOp):
            given: dict[str, Any] = {**dict(zip(PARAMETERS[target], args, strict=False)), **kwargs}
            if target is ops.constrain:
                return args[0]
            if target is ops.commit:
                return None
            if target is ops.send:
                return args[0]
            if target is ops.recv:
                return torch.empty(given["shape"], dtype=given["dtype"])
            if target is ops.wait:
                return args[0]
            if target.collective:
                return [self.moved(target, given, at, tensor) for at, tensor in enumerate(given["tensors"])]
            if target is ops.kernel:
                return [torch.empty(buffer.shape, dtype=buffer.dtype) for buffer in parse_kernel(given["text"]).outputs]
            sizes = self.graph.mesh.sizes
            target = _bind(LOCAL_OPS[target.name], dict.fromkeys(sizes, 0), sizes)
        elif torch.Tag.dynamic_output_shape in getattr(target, "tags", ()):
            return self.value(node)  # its shape depends on values that the trace knew
        try:
            return target(*args, **kwargs)
        except ZeroDivisionError:
            return self.value(node)  # PyTorch's shape functions divide by how many elements there are
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            self.fail(f"cannot be computed on one worker's shapes: {reason}", node, self.operands(node))

    def moved(self, op: MonarchOp, given: dict[str, Any], at: int, tensor: torch.Tensor) -> torch.Tensor:
        shape = list(tensor.shape)
        count = 1
        for dim in given["mesh_dims"]:
            count *= self.graph.mesh.sizes[dim]
        if op in (ops.all_gather, ops.all_to_all):
            shape[given["dims" if op is ops.all_gather else "source_dims"][at]] *= count
        if op in (ops.reduce_scatter, ops.all_to_all):
            shape[given["dims" if op is ops.reduce_scatter else "target_dims"][at]] //= count
        return tensor.new_empty(shape)

    def compare(self, node: fx.Node, result: Any) -> None:
        types = node.meta["type"]
        made = list(result) if isinstance(types, tuple) and isinstance(result, list | tuple) else [result]
        expected = types_of(types)
        if len(made) < len(expected):
            self.fail(f"gives {len(made)} results, and its type has {len(expected)}", node)
        for at, (tensor, type_) in enumerate(zip(made, expected, strict=False)):
            if type_ is None:
                continue
            if not isinstance(tensor, torch.Tensor):
                self.fail(f"gives {tensor!r}, which is no tensor", node)
            if at and node.target in _NORMS:
                tensor = tensor.to(type_.dtype)
            if (tuple(tensor.shape), tensor.dtype) != (self.graph.local_shape(type_), type_.dtype):
                computed = TensorType(tensor.dtype, tuple(tensor.shape))
                self.fail(f"is {computed} when it is computed on one worker's shapes", node, self.operands(node))

    def operands(self, node: fx.Node) -> str:
        lines = [
            f"%{operand.name} : {print_type(operand.meta['type'], self.graph)}" for operand in node.all_input_nodes
        ]
        return "\n".join(lines)


def _bind(function: Callable[..., Any], position: dict[str, int], sizes: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(position, sizes, *args, **kwargs)
