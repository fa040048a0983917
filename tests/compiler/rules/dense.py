"""Ground truth for sharding rules: run a call split over workers, join the pieces, compare with the dense op."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
from torch import fx

from monarch.compiler.local_ops import LOCAL_OPS
from monarch.compiler.ops import MonarchOp
from monarch.compiler.rules import Strategy, localize, replace_operands, rule_for, tensor_operands
from monarch.compiler.rules.call import result_types
from monarch.compiler.types import Placement, TensorType

Value = torch.Tensor


@dataclass(frozen=True)
class Sample:
    """One call of an op on real tensors. `shape_only`: its values are arbitrary (`empty`)."""

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    shape_only: bool = False

    def __str__(self) -> str:
        def text(value: Any) -> str:
            if isinstance(value, torch.Tensor):
                return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
            if isinstance(value, (list, tuple)):
                return f"[{', '.join(map(text, value))}]"
            return str(value)

        parts = [text(value) for value in self.args] + [f"{key}={text(value)}" for key, value in self.kwargs.items()]
        return f"{self.op}({', '.join(parts)})"


@dataclass(frozen=True)
class Traced:
    """A sample as a node, the values of its tensor operands in order, and what it gives on one worker."""

    node: fx.Node
    values: list[Value]
    results: list[Value | None]


def trace(sample: Sample, position: Mapping[str, int] | None = None, sizes: Mapping[str, int] | None = None) -> Traced:
    graph = fx.Graph()
    values: list[Value] = []

    def lift(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            node = graph.placeholder(f"x{len(values)}")
            node.meta["type"] = TensorType(value.dtype, tuple(value.shape))
            values.append(value)
            return node
        if isinstance(value, (list, tuple)):
            return type(value)(lift(item) for item in value)
        return value

    args = tuple(lift(value) for value in sample.args)
    kwargs = {key: lift(value) for key, value in sample.kwargs.items()}
    node = graph.create_node("call_function", sample.op, args, kwargs)
    results = run(sample.op, args, kwargs, values, position or {}, sizes or {})
    node.meta["type"] = _types(results, several(sample.op))
    assert len(tensor_operands(node)) == len(values)
    return Traced(node, values, results)


def several(op: Any) -> bool:
    """Whether an op gives a tuple or list of tensors."""
    if isinstance(op, MonarchOp):
        return False
    returns = op._schema.returns
    return len(returns) != 1 or "List" in str(returns[0].type)


def _types(results: Sequence[Value | None], several: bool) -> Any:
    types = tuple(None if value is None else TensorType(value.dtype, tuple(value.shape)) for value in results)
    return types if several else types[0]


_RMS_BACKWARD = torch.ops.aten._fused_rms_norm_backward.default
FORMULAS: dict[Any, Any] = torch._decomp.get_decompositions([_RMS_BACKWARD])
"""Torch's own decompositions of ops that have no kernel for CPU."""


def run(
    op: Any, args: Any, kwargs: Any, values: Sequence[Value], position: Mapping[str, int], sizes: Mapping[str, int]
) -> list[Value | None]:
    """Call an op with values in place of its operands; a list of results, None where a result is no tensor."""
    copies = iter([value.clone() for value in values])
    args = fx.node.map_arg(args, lambda _: next(copies))
    kwargs = fx.node.map_arg(kwargs, lambda _: next(copies))
    if isinstance(op, MonarchOp):
        return [LOCAL_OPS[op.name](position, sizes, *args, **kwargs)]
    made = FORMULAS.get(op, op)(*args, **kwargs)
    made = list(made) if isinstance(made, (list, tuple)) else [made]
    return [value if isinstance(value, torch.Tensor) else None for value in made]


def shape_of(node: fx.Node) -> Any:
    types = node.meta["type"]
    if isinstance(types, TensorType):
        return types.shape
    return tuple(() if type_ is None else type_.shape for type_ in types)


def split(value: Value, placement: Placement, k: int, operand: int = 0) -> list[Value]:
    """What each of k workers holds of a value. Summands are random, none is 0, and they differ between `operand`s."""
    if placement is None:
        return [value] * k
    if isinstance(placement, int):
        return [part.contiguous() for part in value.chunk(k, placement)]
    assert placement == "sum"
    seed = zlib.crc32(str((tuple(value.shape), k, operand)).encode())
    generator = torch.Generator().manual_seed(seed)
    parts = [(torch.randint(1, 9, value.shape, generator=generator) - 9.5).to(value) for _ in range(k - 1)]
    return [*parts, value - torch.stack(parts).sum(0).to(value)]


class Differs(AssertionError):
    """The pieces do not make up the dense result."""


def combine(parts: Sequence[Value], placement: Placement) -> Value:
    if placement is None:
        for part in parts[1:]:
            if not close(part, parts[0]):
                raise Differs("replicas differ")
        return parts[0]
    if isinstance(placement, int):
        return torch.cat(list(parts), placement)
    stacked = torch.stack([part.to(torch.uint8) if part.dtype == torch.bool else part for part in parts])
    reduced = {"sum": stacked.sum, "max": stacked.amax, "min": stacked.amin, "prod": stacked.prod}[placement](0)
    return reduced.to(parts[0].dtype)


def close(a: Value, b: Value) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(a.dtype, 3e-2)
    return torch.allclose(a, b, rtol=tolerance, atol=tolerance, equal_nan=True)


def cut(shape: Sequence[int], placement: Placement, k: int) -> tuple[int, ...]:
    return tuple(size // k if dim == placement else size for dim, size in enumerate(shape))


def local_node(traced: Traced, strategy: Strategy, mesh_dim: str, k: int) -> fx.Node:
    """The call that workers make under `strategy`, as a node on operands of local types."""
    node = traced.node
    shapes = [
        cut(operand.meta["type"].shape, placement, k)
        for operand, placement in zip(tensor_operands(node), strategy.operands, strict=True)
    ]
    local_types = [
        None if type_ is None else TensorType(type_.dtype, cut(type_.shape, placement, k))
        for type_, placement in zip(result_types(node), strategy.results, strict=True)
    ]
    local_results = [() if type_ is None else type_.shape for type_ in local_types]
    target, args, kwargs = localize(node, shapes, local_results, strategy, mesh_dim, k)
    graph = fx.Graph()
    operands = []
    for operand, shape in zip(tensor_operands(node), shapes, strict=True):
        new = graph.placeholder(operand.name)
        new.meta["type"] = TensorType(operand.meta["type"].dtype, shape)
        operands.append(new)
    merged = replace_operands((args, kwargs), operands)
    local = graph.create_node("call_function", target, merged[0], merged[1])
    local.meta["type"] = tuple(local_types) if isinstance(node.meta["type"], tuple) else local_types[0]
    return local


Levels = Sequence[tuple[str, int, Strategy]]
"""Mesh dims in nesting order: name, size, and the strategy of the call along each."""


def check(sample: Sample, traced: Traced, levels: Levels, salt: int = 0) -> None:
    """Raise Differs unless the call, placed as `levels` say, makes up the dense result. `salt` picks other summands."""
    current = traced
    for mesh_dim, k, strategy in levels:
        current = Traced(local_node(current, strategy, mesh_dim, k), [], [])
    node = current.node
    sizes = {mesh_dim: k for mesh_dim, k, _ in levels}
    held: dict[tuple[int, ...], list[Value | None]] = {}
    for point in product(*(range(k) for _, k, _ in levels)):
        values = list(traced.values)
        for at, (_, k, strategy) in zip(point, levels, strict=True):
            values = [
                split(value, placement, k, 10 * salt + operand)[at]
                for operand, (value, placement) in enumerate(zip(values, strategy.operands, strict=True))
            ]
        position = dict(zip(sizes, point, strict=True))
        held[point] = run(node.target, node.args, node.kwargs, values, position, sizes)
    expected_shapes = [None if type_ is None else type_.shape for type_ in result_types(node)]
    for point, made in held.items():
        shapes = [None if value is None else tuple(value.shape) for value in made]
        if shapes != expected_shapes:
            raise Differs(f"worker {point} makes {shapes}, not {expected_shapes}")
    for index, dense in enumerate(traced.results):
        if dense is None:
            continue
        pieces = {point: made[index] for point, made in held.items()}
        for depth in range(len(levels) - 1, -1, -1):
            _, k, strategy = levels[depth]
            heads = {point[:depth] for point in pieces}
            pieces = {
                head: combine([pieces[(*head, at)] for at in range(k)], strategy.results[index])  # type: ignore[misc]
                if not sample.shape_only
                else _joined([pieces[(*head, at)] for at in range(k)], strategy.results[index])
                for head in heads
            }
        whole = pieces[()]
        assert whole is not None
        same = (whole.shape, whole.dtype) == (dense.shape, dense.dtype) if sample.shape_only else close(whole, dense)
        if not same:
            raise Differs(f"result {index}:\n{whole}\nis not the dense op's\n{dense}")


def _joined(parts: Sequence[Value | None], placement: Placement) -> Value:
    tensors = [part for part in parts if part is not None]
    return torch.cat(tensors, placement) if isinstance(placement, int) else tensors[0]


def had_for_free(strategy: Strategy, listed: Strategy) -> bool:
    """Whether a listed strategy serves as well: what is replicated becomes any placement without communication."""
    operands = zip(strategy.operands, listed.operands, strict=True)
    results = zip(strategy.results, listed.results, strict=True)
    return all(have in (want, None) for have, want in operands) and all(give in (want, None) for want, give in results)


def check_all(sample: Sample, ks: Sequence[int] = (2, 3, 4), nested: bool = True) -> list[Strategy]:
    """Check every strategy for every k, and every pair of them over two nested mesh dims; the strategies seen."""
    traced = trace(sample)
    seen: dict[Strategy, None] = {}
    for k in ks:
        for strategy in rule_for(traced.node, shape_of).strategies(k):
            _checked(sample, traced, [("m", k, strategy)])
            seen[strategy] = None
    if nested:
        for levels in nested_levels(traced, 2):
            _checked(sample, traced, levels)
    return list(seen)


def nested_levels(traced: Traced, k: int, depth: int = 2) -> Iterator[Levels]:
    """Every way to place a call on `depth` nested mesh dims of size k."""
    for strategy in rule_for(traced.node, shape_of).strategies(k):
        level = (f"m{depth}", k, strategy)
        if depth == 1:
            yield [level]
        else:
            local = Traced(local_node(traced, strategy, level[0], k), [], [])
            yield from ([level, *inner] for inner in nested_levels(local, k, depth - 1))


def _checked(sample: Sample, traced: Traced, levels: Levels) -> None:
    try:
        check(sample, traced, levels)
    except Exception as error:
        how = "; ".join(f"{dim}={k}: {strategy}" for dim, k, strategy in levels)
        raise Differs(f"{sample}\nplaced {how}\n{type(error).__name__}: {error}") from error


def call(op: Any, *args: Any, shape_only: bool = False, **kwargs: Any) -> Sample:
    return Sample(op, args, kwargs, shape_only)
