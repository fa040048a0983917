"""A group of ops as one nest: which loops, in which coordinates its results are computed, and what is left of it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from torch import fx

from monarch.compiler.graph import args_of
from monarch.compiler.kernels.ir import Index, Load, Nest, Op, Position, Reduce, Statement, Store
from monarch.compiler.kernels.lower import pointwise, random, views  # noqa: F401  # they register their handlers
from monarch.compiler.kernels.lower.coordinates import Affine, Unfusable, flatten, unflatten
from monarch.compiler.kernels.lower.reductions import REDUCED
from monarch.compiler.kernels.lower.values import HANDLERS, TRANSPARENT, Given, Lowering, Tensors


@dataclass(frozen=True)
class Space:
    """The elements that an op's loops run over: those of `shape`, of which the dims `reduced` are reduced."""

    shape: tuple[int, ...]
    reduced: tuple[int, ...] = ()

    @property
    def kept_count(self) -> int:
        return math.prod(size for dim, size in enumerate(self.shape) if dim not in self.reduced)

    @property
    def reduced_count(self) -> int:
        return math.prod(self.shape[dim] for dim in self.reduced)


@dataclass(frozen=True)
class Group:
    """A nest that computes `outputs` from `inputs` (its buffers, in this order)."""

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    nest: Nest

    def traffic(self, tensors: Tensors) -> int:
        """The bytes that it reads and writes, if what is read twice at one index is read once."""
        total = 0
        for statement in self.nest.body:
            if isinstance(statement, (Load, Store)):
                number = statement.buffer
                buffers = (*self.inputs, *self.outputs)
                along = zip(statement.index.strides, self.nest.dims, strict=True)
                touched = math.prod(size for stride, size in along if stride)
                if isinstance(statement, Load) and statement.gather >= 0:
                    varying = self.nest.varies[self.nest.body.index(statement)]
                    touched = math.prod(self.nest.dims[dim] for dim in varying)
                total += touched * tensors[buffers[number]].dtype.itemsize
        return total


def space_of(node: fx.Node, given: Given) -> Space:
    """The space of an op. Raises Unfusable where it can be in no kernel."""
    name, tensors = given.key(node), given.tensors
    if name not in HANDLERS or name in TRANSPARENT:
        raise Unfusable(f"{name} stays as it is")
    if name not in REDUCED:
        return Space(tensors[node].shape)
    number, dims_of = REDUCED[name]
    call = node.all_input_nodes[0] if "#" in name else node
    shape = tensors[args_of(call)[number]].shape
    dims = dims_of(call, len(shape))
    proper = tuple(dim for dim in dims if shape[dim] > 1)
    return Space(shape, proper)


def lower_group(
    members: Collection[fx.Node],
    outputs: Sequence[fx.Node],
    spaces: Sequence[Space],
    given: Given,
) -> Group:
    """One nest that computes `outputs`, all of them members. Raises Unfusable where there is none."""
    if any(0 in given.tensors[node].shape for node in members) or any(0 in space.shape for space in spaces):
        raise Unfusable("nothing to compute")
    reducing = [space for space in spaces if space.reduced]
    anchors = sorted(
        set(reducing or spaces), key=lambda space: (-math.prod(space.shape), -len(space.shape), space.shape)
    )
    error = Unfusable("no space")
    for anchor in anchors[:3]:
        try:
            return _lowered(anchor, members, outputs, given)
        except Unfusable as unfusable:
            error = unfusable
    raise error


def _lowered(
    anchor: Space,
    members: Collection[fx.Node],
    outputs: Sequence[fx.Node],
    given: Given,
) -> Group:
    tensors = given.tensors
    kept_count, reduced_count = anchor.kept_count, anchor.reduced_count
    fine = _refined(anchor, [tensors[node].shape for node in members])
    kept = [size for dim, size in fine if dim not in anchor.reduced]
    reduced = [size for dim, size in fine if dim in anchor.reduced]
    dims = (*kept, *reduced)
    lower = Lowering(frozenset(members), dims, len(reduced), given)
    whole = _coordinates(anchor, fine, dims, len(kept))
    full = flatten(whole, anchor.shape, lower.zero)
    kept_shape = [size for dim, size in enumerate(anchor.shape) if dim not in anchor.reduced]
    outer = flatten([at for dim, at in enumerate(whole) if dim not in anchor.reduced], kept_shape, lower.zero)
    # Inputs are numbered as they are met, outputs after them: until all are known, from a number that none reaches.
    far = 1 << 30
    for number, node in enumerate(outputs):
        tensor = tensors[node]
        if tensor.numel == kept_count * reduced_count:
            at = unflatten(full, tensor.shape, dims)
        elif tensor.numel == kept_count:
            at = unflatten(outer, tensor.shape, dims)
        else:
            raise Unfusable(f"{list(tensor.shape)} in a nest over {kept_count} x {reduced_count}")
        lower.store(far + number, node, at)
    return _finished(lower, outputs, far)


def _refined(anchor: Space, shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, int]]:
    """The dims of the anchor's shape cut so that views of it to the other shapes fall between them: (dim, size)s."""
    total = math.prod(anchor.shape)
    wanted = {1, total}
    wanted.update(_products(anchor.shape))
    for shape in shapes:
        if math.prod(shape) == total:
            wanted.update(_products(shape))
    own = _products(anchor.shape)
    cuts = [1]
    for product in sorted(wanted):
        if product > cuts[-1]:
            # A cut that does not divide the next one of the anchor's own would straddle two of its dims.
            ceiling = min((each for each in own if each >= product), default=total)
            if product % cuts[-1] == 0 and ceiling % product == 0:
                cuts.append(product)
    fine: list[tuple[int, int]] = []
    start = 1
    for dim in range(len(anchor.shape) - 1, -1, -1):
        end = start * anchor.shape[dim]
        inside = [cut for cut in cuts if start <= cut <= end]
        fine += [(dim, high // low) for low, high in zip(inside, inside[1:], strict=False)]
        start = end
    return list(reversed(fine))


def _products(shape: Sequence[int]) -> list[int]:
    found, product = [], 1
    for size in reversed(shape):
        product *= size
        found.append(product)
    return found


def _coordinates(anchor: Space, fine: list[tuple[int, int]], dims: tuple[int, ...], kept: int) -> tuple[Affine, ...]:
    """The anchor's coordinates over the nest's dims."""
    place: dict[int, int] = {}
    outer, inner = 0, kept
    for number, (dim, _) in enumerate(fine):
        if dim in anchor.reduced:
            place[number], inner = inner, inner + 1
        else:
            place[number], outer = outer, outer + 1
    strides = [[0] * len(dims) for _ in anchor.shape]
    steps = [1] * len(anchor.shape)
    for number in range(len(fine) - 1, -1, -1):
        dim, size = fine[number]
        if size > 1:
            strides[dim][place[number]] = steps[dim]
        steps[dim] *= size
    return tuple(Affine(0, tuple(each)) for each in strides)


# -- what is left ------------------------------------------------------------------------------------------------------


def _finished(lower: Lowering, outputs: Sequence[fx.Node], far: int) -> Group:
    body, lines, dims, reduced = lower.body, lower.lines, lower.dims, lower.reduced
    used = set()
    for number in range(len(body) - 1, -1, -1):
        if number in used or isinstance(body[number], Store):
            used.add(number)
            used.update(_operands(body[number]))
    inputs = list(lower.inputs)
    read = [inputs[n] for n in dict.fromkeys(s.buffer for i, s in enumerate(body) if i in used and isinstance(s, Load))]
    places = {lower.inputs[node]: at for at, node in enumerate(read)}
    places |= {far + number: len(read) + number for number in range(len(outputs))}
    numbers: dict[int, int] = {}
    kept_body: list[Statement] = []
    for number, statement in enumerate(body):
        if number in used:
            numbers[number] = len(kept_body)
            kept_body.append(_renumbered(statement, numbers, places))
    nest = _merged(Nest(dims, reduced, tuple(kept_body), tuple(lines[number] for number in sorted(used))))
    for number, statement in enumerate(nest.body):
        if isinstance(statement, Store) and not nest.varies[statement.value] <= nest.varies[number]:
            raise Unfusable("a result that is not one value for each of its elements")
    return Group(tuple(read), tuple(outputs), nest)


def _operands(statement: Statement) -> tuple[int, ...]:
    match statement:
        case Load(gather=gather):
            return (gather,) if gather >= 0 else ()
        case Op(args=args):
            return args
        case Reduce(arg=arg):
            return (arg,)
        case Store(value=value):
            return (value,)
    return ()


def _renumbered(statement: Statement, values: dict[int, int], buffers: dict[int, int]) -> Statement:
    match statement:
        case Load(buffer, _, gather):
            return replace(statement, buffer=buffers[buffer], gather=values[gather] if gather >= 0 else -1)
        case Op(_, args):
            return replace(statement, args=tuple(values[arg] for arg in args))
        case Reduce(_, arg):
            return replace(statement, arg=values[arg])
        case Store(buffer, _, value):
            return replace(statement, buffer=buffers[buffer], value=values[value])
    return statement


def _merged(nest: Nest) -> Nest:
    """The nest with as few dims as there can be: none of size 1, and dims as one where every index runs on from one to
    the next."""
    dims, reduced, body = list(nest.dims), nest.reduced, list(nest.body)
    positions = {statement.dim for statement in body if isinstance(statement, Position)}
    dim = len(dims) - 1
    while dim >= 0:
        kept = len(dims) - reduced
        if dims[dim] == 1 and dim not in positions:
            merged = dim
            strides = {tuple(s.index.strides): _without(s.index.strides, merged) for s in _indexed(body)}
        elif (
            dim > 0
            and dim != kept
            and not positions & {dim, dim - 1}
            and all(s.index.strides[dim - 1] == s.index.strides[dim] * dims[dim] for s in _indexed(body))
        ):
            merged = dim - 1
            dims[dim] *= dims[dim - 1]
            strides = {tuple(s.index.strides): _without(s.index.strides, merged) for s in _indexed(body)}
        else:
            dim -= 1
            continue
        if merged >= kept:
            reduced -= 1
        del dims[merged]
        body = [_restrided(statement, strides, merged) for statement in body]
        positions = {position - (position > merged) for position in positions}
        dim = min(dim, len(dims) - 1) if merged == dim else dim - 1
    return Nest(tuple(dims), reduced, tuple(body), nest.lines)


def _indexed(body: Sequence[Statement]) -> Iterator[Load | Store]:
    return (statement for statement in body if isinstance(statement, (Load, Store)))


def _without(strides: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*strides[:dim], *strides[dim + 1 :])


def _restrided(statement: Statement, strides: dict[tuple[int, ...], tuple[int, ...]], merged: int) -> Statement:
    if isinstance(statement, (Load, Store)):
        return replace(statement, index=Index(statement.index.offset, strides[statement.index.strides]))
    if isinstance(statement, Position) and statement.dim > merged:
        return Position(statement.dim - 1)
    return statement
