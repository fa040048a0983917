"""The nest that is being written, and the values of ops at coordinates."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import args_of, provenance
from monarch.compiler.kernels.lower.coordinates import Affine, At, Coordinate, Gathered, Unfusable, unflatten
from monarch.compiler.loops.ir import (
    Buffer,
    Constant,
    Index,
    Load,
    Op,
    Position,
    Reduce,
    Statement,
    Store,
    varies_along,
)
from monarch.compiler.loops.signatures import ARITHMETIC, BOOL, FLOATS, POINTWISE
from monarch.compiler.ops.record import of_packet, record
from monarch.compiler.rules.call import argument

Tensors = Mapping[fx.Node, Buffer]
"""Each value of the graph that is one tensor, as it is on a worker: dtype, local shape, strides."""


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a kernel holds values of a tensor's dtype."""
    if dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    if dtype in ARITHMETIC:
        return dtype
    return torch.int32  # i16, i8, u8: only to be loaded and cast


@lru_cache(maxsize=4096)
def promoted(operands: tuple[tuple[torch.dtype, bool] | type, ...]) -> torch.dtype:
    """The dtype in which ATen computes on operands: for each, its dtype and whether it has dims, or a number's type."""
    result: Any = None
    for operand in operands:
        if isinstance(operand, type):
            value: Any = operand(1)
        else:
            value = torch.empty((1,) if operand[1] else (), dtype=operand[0], device="meta")
        result = value if result is None else _either(result, value)
    return result.dtype if isinstance(result, torch.Tensor) else torch.get_default_dtype()


def _either(a: Any, b: Any) -> Any:
    dtype = torch.result_type(a, b)
    dims = any(isinstance(x, torch.Tensor) and x.dim() for x in (a, b))
    return torch.empty((1,) if dims else (), dtype=dtype, device="meta")


Handler = Callable[["Lowering", fx.Node, At], int]


def handler(*names: str) -> Callable[[Handler], Handler]:
    """Register what lowers ops, each by its packet's name ("aten.add"), or our own op's. Ops with several results are
    lowered result by result, under "aten.native_layer_norm#0"."""

    def register(function: Handler) -> Handler:
        for name in names:
            op, number = _parts(name)
            record(op).lower[number] = function
        return function

    return register


def lowering_of(key: str) -> Handler | None:
    """The lowering of a node with this key (`key_of`); None where there is none."""
    op, number = _parts(key)
    return (of_packet(op, "lower") or {}).get(number)


def is_lowered(key: str) -> bool:
    """Whether a loop nest computes the op: all of it, or its first result."""
    _, number = _parts(key)
    return lowering_of(key) is not None or (number < 0 and lowering_of(f"{key}#0") is not None)


def is_transparent(key: str) -> bool:
    """Whether an op costs nothing inside of a kernel: a view, or a constant. It is looked through also where it is no
    member of the group."""
    return bool(of_packet(key, "transparent"))


def _parts(key: str) -> tuple[str, int]:
    op, _, number = key.partition("#")
    return op, int(number or -1)


def key_of(node: fx.Node) -> str:
    """The key of a node's lowering: its op's name, or for one of several results "op#number"."""
    if node.op != "call_function":
        return node.op
    if node.target is operator.getitem:
        call, number = args_of(node)
        return f"{key_of(call)}#{number}"
    return ops.name_of(node.target) or str(node.target.overloadpacket)  # type: ignore[union-attr]


@dataclass(frozen=True)
class LoweringContext:
    """Facts about the whole graph that lowering one kernel needs.

    `key`       names what lowers a node: its op, or for one of several results "op#number"
    `rounding`  "eager" (every op's result is rounded to its tensor's dtype, as ATen does) or "chain" (a value in bf16
                or f16 stays in f32 until it is stored)
    `places`    for mesh dims, the values that hold a worker's position along them
    `sizes`     of the mesh dims
    `sums`      whether a nest may have stores that add up
    """

    tensors: Tensors
    key: Callable[[fx.Node], str]
    rounding: str = "eager"
    places: Mapping[str, fx.Node] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    sums: bool = False
    calls: dict[fx.Node, tuple[int, list[fx.Node]]] = field(default_factory=dict)
    """The results of `pattern` for the graph's calls."""


@dataclass
class Lowering:
    """A nest over `dims`, of which the last `reduced` are reduced, that computes values of `members`. Those `across`
    are sums over the kept dims, which are known behind the nest."""

    members: frozenset[fx.Node]
    dims: tuple[int, ...]
    reduced: int
    context: LoweringContext
    across: frozenset[fx.Node] = frozenset()
    inputs: dict[fx.Node, int] = field(default_factory=dict)
    body: list[Statement] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    dtypes: list[torch.dtype | None] = field(default_factory=list)
    _varies: list[frozenset[int]] = field(default_factory=list)
    _known: dict[Any, int] = field(default_factory=dict)
    _values: dict[tuple[fx.Node, At], int] = field(default_factory=dict)
    _line: str = ""
    _summand: int = -1
    """The summand of a sum over the kept dims; -1 before that is known."""
    _adds_up: bool = False
    """Whether this sum is lowered now, and reductions run over the kept dims."""

    def __post_init__(self) -> None:
        self.tensors, self.key, self.rounding = self.context.tensors, self.context.key, self.context.rounding
        self.places, self.sizes = self.context.places, self.context.sizes
        self.zero = Affine(0, (0,) * len(self.dims))

    # -- statements ----------------------------------------------------------------------------------------------

    def add(self, statement: Statement, dtype: torch.dtype | None) -> int:
        # In Python 1 == 1.0 == True and 0.0 == -0.0: the key of a constant is its text.
        key = (statement, repr(statement.value)) if isinstance(statement, Constant) else statement
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.body)
            self.body.append(statement)
            self.lines.append(self._line)
            self.dtypes.append(dtype)
            self._varies.append(varies_along(statement, self._varies, self.dims, self.reduced))
        return number

    def dtype(self, value: int) -> torch.dtype:
        dtype = self.dtypes[value]
        assert dtype is not None
        return dtype

    def constant(self, value: float | int | bool, dtype: torch.dtype) -> int:
        if dtype in FLOATS:
            value = float(torch.tensor(value, dtype=dtype)) if math.isfinite(value) else float(value)
        elif dtype == BOOL:
            value = bool(value)
        else:
            value = int(value)
        return self.add(Constant(value, dtype), dtype)

    def op(self, name: str, *args: int) -> int:
        dtype = BOOL if POINTWISE[name].gives_bool else self.dtype(args[-1])
        if self.dtype(args[-1]) not in POINTWISE[name].dtypes:
            raise Unfusable(f"{name} of {self.dtype(args[-1])}")
        return self.add(Op(name, args, dtype), dtype)

    def cast(self, value: int, dtype: torch.dtype) -> int:
        if self.dtype(value) == dtype:
            return value
        return self.add(Op("cast", (value,), dtype), dtype)

    def position(self, coordinate: Coordinate) -> int:
        """A coordinate as an i64 value."""
        if isinstance(coordinate, Gathered):
            return coordinate.value
        total = -1
        for dim, stride in enumerate(coordinate.strides):
            if stride:
                term = self.add(Position(dim), torch.int64)
                if stride != 1:
                    term = self.op("mul", term, self.constant(stride, torch.int64))
                total = term if total < 0 else self.op("add", total, term)
        if total < 0:
            return self.constant(coordinate.offset, torch.int64)
        return self.op("add", total, self.constant(coordinate.offset, torch.int64)) if coordinate.offset else total

    def reduce(self, name: str, value: int) -> int:
        if self._adds_up:
            if name != "sum":
                raise Unfusable(f"{name} over the kept dims")
            self._summand = value
            return value
        if name == "sum" and (only := self._only_term(value)) is not None:
            return only
        return self.add(Reduce(name, value), self.dtype(value))

    def _only_term(self, value: int) -> int | None:
        """The sum over the reduced dims of `where(position == k, c, 0)`, where k and c do not vary along them: c, if k
        is a position. (A loss' gradient is such a one-hot row.)"""
        chosen = self.body[value]
        if not isinstance(chosen, Op) or chosen.name != "where" or self.reduced != 1:
            return None
        condition, term, other = chosen.args
        if self.body[other] != Constant(0.0, self.dtype(other)) or self.is_reduced(term):
            return None
        rest, place = [], None
        pending = [condition]
        while pending:
            at = pending.pop()
            part = self.body[at]
            if isinstance(part, Op) and part.name == "and":
                pending += part.args
            elif not self.is_reduced(at):
                rest.append(at)
            elif place is None and isinstance(part, Op) and part.name == "eq":
                place = self._equal_to_position(part)
            else:
                return None
        if place is None:
            return None
        size = self.constant(self.dims[-1], torch.int64)
        inside = [self.op("ge", place, self.constant(0, torch.int64)), self.op("lt", place, size)]
        condition, *others = [*rest, *inside]
        for each in others:
            condition = self.op("and", condition, each)
        return self.op("where", condition, term, other)

    def _equal_to_position(self, equal: Op) -> int | None:
        """The operand of the comparison with a position along the reduced dim, if that is the same for all."""
        for position, place in (equal.args, equal.args[::-1]):
            if self.body[position] == Position(len(self.dims) - 1) and not self.is_reduced(place):
                return place
        return None

    def is_reduced(self, value: int) -> bool:
        """Whether a value varies along the reduced dims."""
        lead = len(self.dims) - self.reduced
        return any(dim >= lead for dim in self._varies[value])

    def store(self, number: int, node: fx.Node, at: tuple[Affine, ...]) -> None:
        """Compute a value and store it as output number `number`."""
        value, tensor, address = self.value(node, at), self.tensors[node], self.zero
        self._line = line_of(node)
        for coordinate, stride in zip(at, tensor.strides, strict=True):
            address = address + coordinate * stride
        stored = self.cast(value, tensor.dtype)
        self.add(Store(number, Index(address.offset, address.strides), stored), None)

    def add_up(self, number: int, node: fx.Node, at: tuple[Affine, ...]) -> None:
        """Store one of those `across` as output number `number`."""
        tensor, address = self.tensors[node], self.zero
        self._line = line_of(node)
        self._summand, self._adds_up = -1, True
        value = self._lowered(node, at)
        self._adds_up = False
        if value != self._summand or self.dtype(value) != tensor.dtype:
            raise Unfusable("more than a sum over the kept dims")
        for coordinate, stride in zip(at, tensor.strides, strict=True):
            address = address + coordinate * stride
        self.add(Store(number, Index(address.offset, address.strides), value, sums=True), None)

    # -- values ----------------------------------------------------------------------------------------------------

    def value(self, node: fx.Node, at: At) -> int:
        """The value of a tensor's element, in its dtype's compute dtype."""
        at = tuple(
            self.zero if size == 1 and isinstance(c, Affine) else c
            for c, size in zip(at, self.tensors[node].shape, strict=True)
        )
        found = self._values.get((node, at))
        if found is None:
            line, self._line = self._line, line_of(node) or self._line
            adds_up, self._adds_up = self._adds_up, False
            found = self._values[node, at] = self._make(node, at)
            self._line, self._adds_up = line, adds_up
        return found

    def _make(self, node: fx.Node, at: At) -> int:
        key = self.key(node)
        if node in self.across:
            raise Unfusable("what is summed over the kept dims is known behind the nest")
        if node in self.members:
            return self.rounded(self._lowered(node, at), node)
        if is_transparent(key):
            try:
                return self._lowered(node, at)
            except Unfusable:
                pass  # nothing uses the statements that it has written already; they are dropped at the end
        return self.load(node, at)

    def _lowered(self, node: fx.Node, at: At) -> int:
        function = lowering_of(self.key(node))
        assert function is not None, self.key(node)
        return function(self, node, at)

    def rounded(self, value: int, node: fx.Node) -> int:
        """A result in the compute dtype of its node's dtype, rounded as the policy says."""
        return self.rounded_to(value, self.tensors[node].dtype)

    def rounded_to(self, value: int, dtype: torch.dtype) -> int:
        """A value in the compute dtype of `dtype`, rounded as the policy says."""
        held = self.dtype(value)
        if compute_dtype(dtype) != held:
            value = self.cast(value, compute_dtype(dtype))
        if dtype in ARITHMETIC or held == dtype:
            return value
        if dtype not in (torch.bfloat16, torch.float16):
            raise Unfusable(f"arithmetic in {dtype}")
        if self.rounding == "chain":
            return value
        return self.cast(self.cast(value, dtype), compute_dtype(dtype))

    def load(self, node: fx.Node, at: At) -> int:
        tensor = self.tensors[node]
        number = self.inputs.setdefault(node, len(self.inputs))
        address, gathered, step = self.zero, None, 0
        for coordinate, stride in zip(at, tensor.strides, strict=True):
            if isinstance(coordinate, Gathered):
                if gathered is not None:
                    raise Unfusable("two gathered coordinates in one load")
                gathered, step = coordinate, stride
            else:
                address = address + coordinate * stride
        index = Index(address.offset, address.strides)
        if gathered is None:
            loaded = self.add(Load(number, index), tensor.dtype)
        else:
            loaded = self.add(Load(number, index, gathered.value, step, gathered.size), tensor.dtype)
        return self.cast(loaded, compute_dtype(tensor.dtype))

    def checked(self, node: fx.Node, index: int, size: int) -> int:
        """The one element of a tensor without dims, by a load that fails unless 0 <= index < size."""
        number = self.inputs.setdefault(node, len(self.inputs))
        return self.add(
            Load(number, Index(0, self.zero.strides), gather=index, stride=0, size=size), self.tensors[node].dtype
        )

    def checked_load(self, value: int, index: int, size: int) -> int:
        """A value that is loaded, by a load that fails unless 0 <= index < size."""
        load = self.body[value]
        if not isinstance(load, Load) or load.gather >= 0:
            raise Unfusable("a check of an index beside no load")
        return self.add(replace(load, gather=index, stride=0, size=size), self.dtypes[value])

    def operand(self, argument: Any, at: At, shape: Sequence[int], dtype: torch.dtype | None = None) -> int:
        """The value of an op's operand, a tensor that is broadcast to the op's `shape` or a number, at the op's
        coordinates; in `dtype`, or its own compute dtype."""
        if isinstance(argument, fx.Node):
            value = self.value(argument, self.broadcast(argument, at, shape))
            return value if dtype is None else self.cast(value, dtype)
        if isinstance(argument, (bool, int, float)):
            return self.constant(argument, dtype or _dtype_of(argument))
        raise Unfusable(f"an operand {argument!r}")

    def converted(self, argument: Any, at: At, shape: Sequence[int], dtype: torch.dtype) -> int:
        """An operand, converted to the dtype that ATen promotes an op's operands to: numbers beside bf16 are bf16."""
        if dtype in (torch.bfloat16, torch.float16) and self.rounding == "eager":
            if not isinstance(argument, fx.Node):
                argument = torch.tensor(argument, dtype=dtype).item()
            elif self.tensors[argument].dtype != dtype:
                return self.rounded_to(self.operand(argument, at, shape), dtype)
        return self.operand(argument, at, shape, compute_dtype(dtype))

    def broadcast(self, node: fx.Node, at: At, shape: Sequence[int]) -> At:
        own = self.tensors[node].shape
        lead = len(shape) - len(own)
        return tuple(self.zero if size == 1 else coordinate for size, coordinate in zip(own, at[lead:], strict=True))

    def common(self, *operands: Any) -> torch.dtype:
        """The dtype that ATen promotes these operands of a pointwise op to."""
        key = tuple(
            (self.tensors[o].dtype, bool(self.tensors[o].shape)) if isinstance(o, fx.Node) else type(o)
            for o in operands
        )
        return promoted(key)

    def promoted(self, *operands: Any) -> torch.dtype:
        """The compute dtype of a pointwise op on these operands."""
        return compute_dtype(self.common(*operands))

    # -- reductions ----------------------------------------------------------------------------------------------

    def over(self, at: At, shape: Sequence[int], dims: Sequence[int]) -> At:
        """The coordinates of the elements that are reduced over tensor dims `dims`: those of the nest's reduced dims,
        or of its kept ones for a sum over these, along them, and `at` along the others."""
        lead = len(self.dims) - self.reduced
        loops = range(lead) if self._adds_up else range(lead, len(self.dims))
        sizes = [shape[dim] for dim in dims]
        if math.prod(sizes) != math.prod(self.dims[dim] for dim in loops):
            raise Unfusable(f"a reduction over {sizes} in a nest over {self.dims}")
        number, step = self.zero, 1
        for dim in reversed(loops):
            if self.dims[dim] > 1:
                strides = tuple(step if d == dim else 0 for d in range(len(self.dims)))
                number = number + Affine(0, strides)
            step *= self.dims[dim]
        running = dict(zip(dims, unflatten(number, sizes, self.dims), strict=True))
        for dim, coordinate in enumerate(at):
            if dim in running:
                continue
            if isinstance(coordinate, Gathered) or any(coordinate.strides[dim] for dim in loops):
                raise Unfusable("a reduction whose kept coordinates run over the reduced dims")
        return tuple(running.get(dim, coordinate) for dim, coordinate in enumerate(at))


def _dtype_of(value: bool | int | float) -> torch.dtype:
    return BOOL if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float32


def line_of(node: fx.Node) -> str:
    source = provenance(node).source
    return "" if source is None else f"{source.file.rsplit('/', 1)[-1]}:{source.line}"


def arguments(node: fx.Node, *names: str) -> list[Any]:
    """A call's arguments by their names in the op's schema, with the schema's defaults."""
    return [argument(node, name) for name in names]
