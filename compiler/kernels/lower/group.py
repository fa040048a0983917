"""A group of ops as one nest: its loops, the coordinates of its results, and the form that simplification leaves."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from torch import fx

from monarch.compiler.alike import Memo
from monarch.compiler.graph import args_of
from monarch.compiler.kernels.lower import pointwise, random, views  # noqa: F401  # they register their handlers
from monarch.compiler.kernels.lower.coordinates import Affine, Unfusable, flatten, unflatten
from monarch.compiler.kernels.lower.pattern import Pattern
from monarch.compiler.kernels.lower.reductions import REDUCED
from monarch.compiler.kernels.lower.values import Lowering, LoweringContext, Tensors, is_transparent, lowering_of
from monarch.compiler.loops.ir import Load, Nest, Position, Store
from monarch.compiler.loops.nests import joined, live, pieces_of, renumbered

ALONE = 1 << 15
"""Elements that one thread may as well go through alone."""


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

    @property
    def runs(self) -> tuple[tuple[int, bool], ...]:
        """The elements of neighbouring dims of one kind, and whether these are reduced: the same for all shapes that
        are views of each other."""
        found: list[tuple[int, bool]] = []
        for dim, size in enumerate(self.shape):
            kind = dim in self.reduced
            if size > 1 and found and found[-1][1] == kind:
                found[-1] = found[-1][0] * size, kind
            elif size > 1:
                found.append((size, kind))
        return tuple(found)

    def across(self, other: Space) -> bool:
        """Whether a nest over this space, whose rows are reduced, can add up what `other` reduces: the same elements,
        down the columns."""
        own = self.runs
        return len(own) > 1 and own[-1][1] and other.runs == tuple((size, not kind) for size, kind in own)


@dataclass(frozen=True)
class FusionGroup:
    """A nest that computes `outputs` from `inputs` (its buffers, in this order)."""

    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    nest: Nest

    def traffic(self, tensors: Tensors) -> int:
        """The bytes that it reads and writes, where two reads at one index count once."""
        itemsizes = [tensors[node].dtype.itemsize for node in (*self.inputs, *self.outputs)]
        return sum(elements * itemsizes[access.buffer] for access, elements in self.nest.touches)


def space_of(node: fx.Node, context: LoweringContext) -> Space:
    """The space of an op. Raises Unfusable where it can be in no kernel."""
    name, tensors = context.key(node), context.tensors
    if lowering_of(name) is None or is_transparent(name) or node not in tensors:
        raise Unfusable(f"{name} stays as it is")
    if any(each in tensors and tensors[each].dtype.is_complex for each in (node, *node.all_input_nodes)):
        raise Unfusable("kernels hold no complex numbers")
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
    context: LoweringContext,
) -> FusionGroup:
    """One nest that computes `outputs`, all of them members. Raises Unfusable where there is none.

    Groups that are alike, such as those of equal layers, are lowered once."""
    try:
        pattern = Pattern(members, context)
    except TypeError:  # an argument without a hash
        return _lower_group(members, outputs, spaces, context)
    key = pattern.key, tuple([pattern.numbers[node] for node in outputs]), tuple(spaces)
    found = _FOUND.get(key)
    if found is None:
        try:
            group = _lower_group(members, outputs, spaces, context)
            found = tuple([pattern.numbers[node] for node in group.inputs]), group.nest
        except Unfusable as unfusable:
            found = str(unfusable)
        _FOUND.keep(key, found)
    if isinstance(found, str):
        raise Unfusable(found)
    read, nest = found
    return FusionGroup(tuple([pattern.nodes[number] for number in read]), tuple(outputs), nest)


_FOUND: Memo[tuple[tuple[int, ...], Nest] | str] = Memo(2048)
"""For groups that are alike: the numbers of the nodes that they read, and their nest; or why there is none."""


def _lower_group(
    members: Collection[fx.Node],
    outputs: Sequence[fx.Node],
    spaces: Sequence[Space],
    context: LoweringContext,
) -> FusionGroup:
    if any(0 in context.tensors[node].shape for node in members) or any(0 in space.shape for space in spaces):
        raise Unfusable("nothing to compute")
    candidates = {space for space in spaces if space.reduced} or set(spaces)
    if context.sums:
        candidates = {each for each in candidates if any(map(each.across, candidates))} or candidates
    anchors = sorted(candidates, key=lambda space: (-math.prod(space.shape), -len(space.shape), space.shape))
    error = Unfusable("no space")
    for anchor in anchors[:3]:
        try:
            return _lowered(anchor, members, outputs, context)
        except Unfusable as unfusable:
            error = unfusable
    raise error


def _lowered(
    anchor: Space,
    members: Collection[fx.Node],
    outputs: Sequence[fx.Node],
    context: LoweringContext,
) -> FusionGroup:
    tensors = context.tensors
    kept_count, reduced_count = anchor.kept_count, anchor.reduced_count
    fine = _refined(anchor, [tensors[node].shape for node in members])
    kept = [size for dim, size in fine if dim not in anchor.reduced]
    reduced = [size for dim, size in fine if dim in anchor.reduced]
    dims = (*kept, *reduced)
    across = {node for node in members if context.sums and context.key(node) in REDUCED}
    across = {node for node in across if anchor.across(space_of(node, context))}
    lower = Lowering(frozenset(members), dims, len(reduced), context, frozenset(across))
    whole = _coordinates(anchor, fine, dims, len(kept))
    full = flatten(whole, anchor.shape, lower.zero)
    kept_shape = [size for dim, size in enumerate(anchor.shape) if dim not in anchor.reduced]
    row_shape = [size for dim, size in enumerate(anchor.shape) if dim in anchor.reduced]
    inner = flatten([at for dim, at in enumerate(whole) if dim in anchor.reduced], row_shape, lower.zero)
    outer = flatten([at for dim, at in enumerate(whole) if dim not in anchor.reduced], kept_shape, lower.zero)
    # Inputs are numbered as they are met, outputs after them: until all are known, from a number that none reaches.
    far = 1 << 30
    for number, node in enumerate(outputs):
        tensor = tensors[node]
        if node in across:
            lower.add_up(far + number, node, unflatten(inner, tensor.shape, dims))
            continue
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


# -- the simplified nest ----------------------------------------------------------------------------------------------


def _finished(lower: Lowering, outputs: Sequence[fx.Node], far: int) -> FusionGroup:
    body, lines, dims, reduced = lower.body, lower.lines, lower.dims, lower.reduced
    used = sorted(live(body))
    inputs = list(lower.inputs)
    loads = [statement for number in used if isinstance(statement := body[number], Load)]
    read = [inputs[number] for number in dict.fromkeys(load.buffer for load in loads)]
    places = {lower.inputs[node]: at for at, node in enumerate(read)}
    places |= {far + number: len(read) + number for number in range(len(outputs))}
    numbers = {number: at for at, number in enumerate(used)}
    left = []
    for number in used:
        statement = renumbered(body[number], numbers)
        if isinstance(statement, (Load, Store)):
            statement = replace(statement, buffer=places[statement.buffer])
        left.append(statement)
    positions = {statement.dim for statement in left if isinstance(statement, Position)}
    wanted = [dim for dim, size in enumerate(dims) if size > 1 or dim in positions]
    nest = joined(Nest(dims, reduced, tuple(left), tuple(lines[number] for number in used)), wanted)
    for number, statement in enumerate(nest.body):
        if isinstance(statement, Store) and not nest.varies[statement.value] <= nest.varies[number]:
            raise Unfusable("a result that is not one value for each of its elements")
    if nest.sums and math.prod(nest.dims) > ALONE and pieces_of(nest)[0] == 1:
        raise Unfusable("a sum of rows that cannot be shared out")
    return FusionGroup(tuple(read), tuple(outputs), nest)
