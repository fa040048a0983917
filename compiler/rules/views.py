"""Ops that move elements and compute nothing: views, their scatters, concatenation, padding. All are linear."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from monarch.compiler.rules.call import Call, dim_of, dims_of
from monarch.compiler.rules.line import Line, Shape, factor_names, line
from monarch.compiler.rules.localize import LocalCall, Localized, localize_sizes, localizer
from monarch.compiler.rules.register import sharding_rule
from monarch.compiler.rules.rule import Rule
from monarch.compiler.symbols import common_factor

LINEAR = [{0}]


def tensor_text(dims: Sequence[str]) -> str:
    return " ".join(dims) if dims else "[]"


# -- splitting and merging dims ------------------------------------------------------------------------------------


@lru_cache(maxsize=65536)
def view_rule(source: Shape, target: Shape) -> Rule:
    """The rule of viewing a contiguous tensor of shape `source` as `target`.

    Walks both shapes from the major end, taking the greatest common divisor of what is left of the two current dims as
    a factor of both. Where that is 1, the two sides share no more factors until their products agree again, and what
    lies between (as in [2, 3] -> [3, 2]) stays whole.
    """
    names = iter(factor_names(2 * (len(source) + len(target)) + 2))
    left: list[list[str]] = [[] for _ in source]
    right: list[list[str]] = [[] for _ in target]
    sizes: dict[str, int] = {}
    whole: set[str] = set()

    def add(dims: list[list[str]], at: int, name: str, size: int) -> None:
        dims[at].append(name)
        sizes[name] = size

    def own(dims: list[list[str]], at: int, size: int) -> None:
        if size > 1:
            name = next(names)
            add(dims, at, name, size)
            whole.add(name)

    if 0 not in source:
        i = j = 0
        a = source[0] if source else 1
        b = target[0] if target else 1
        while i < len(source) and j < len(target):
            if a == 1:
                i += 1
                a = source[i] if i < len(source) else 1
            elif b == 1:
                j += 1
                b = target[j] if j < len(target) else 1
            elif (common := common_factor(a, b)) > 1:
                name = next(names)
                add(left, i, name, common)
                add(right, j, name, common)
                a, b = a // common, b // common
            else:
                own(left, i, a)
                own(right, j, b)
                while a != b:
                    if a < b:
                        i += 1
                        a *= source[i]
                        own(left, i, source[i])
                    else:
                        j += 1
                        b *= target[j]
                        own(right, j, target[j])
                a = b = 1
    return Rule((tuple(map(tuple, left)),), (tuple(map(tuple, right)),), sizes, frozenset(whole), {}, (frozenset({0}),))


@sharding_rule(
    "aten.view aten._unsafe_view aten.reshape aten._reshape_copy aten._reshape_alias aten.flatten aten.unflatten"
)
def _view(call: Call) -> Rule:
    return view_rule(call.shapes[0], call.result)


localize_sizes("aten.view aten._unsafe_view aten._reshape_copy aten.expand aten.broadcast_to", "size")
localize_sizes("aten.reshape", "shape")


@localizer("aten._reshape_alias")
def _local_reshape_alias(call: LocalCall) -> Localized:
    # A block's strides are its own.
    return torch.ops.aten.reshape.default, (call.node.args[0], list(call.result)), {}


@sharding_rule("aten.view.dtype aten.view_copy.dtype")
def _view_dtype(call: Call) -> Line:
    # Another element size changes the last dim; sums of reinterpreted bits mean nothing.
    if call.shapes[0] == call.result:
        return line("... -> ...")
    names = factor_names(len(call.result) - 1)
    return line(f"{tensor_text([*names, '_'])} -> {tensor_text([*names, '_'])}")


@localizer("aten.view.dtype aten.view_copy.dtype")
def _local_view_dtype(call: LocalCall) -> Localized:
    return call.unchanged()


@localizer("aten.unflatten")
def _local_unflatten(call: LocalCall) -> Localized:
    dim = dim_of(call["dim"], len(call.shapes[0]))
    return call.replace(sizes=list(call.result[dim : dim + len(call["sizes"])]))


# -- moving, adding and dropping dims --------------------------------------------------------------------------------


def _permuted(order: Sequence[int]) -> Line:
    names = factor_names(len(order))
    return line(f"{tensor_text(names)} -> {tensor_text([names[dim] for dim in order])}", linear=LINEAR)


@sharding_rule("aten.permute")
def _permute(call: Call) -> Line:
    ndim = len(call.shapes[0])
    return _permuted([dim_of(dim, ndim) for dim in call["dims"]])


@sharding_rule("aten.transpose")
def _transpose(call: Call) -> Line:
    order = list(range(len(call.shapes[0])))
    if order:
        first, second = dim_of(call["dim0"], len(order)), dim_of(call["dim1"], len(order))
        order[first], order[second] = order[second], order[first]
    return _permuted(order)


@sharding_rule("aten.t")
def _t(call: Call) -> Line:
    return _permuted(list(range(len(call.shapes[0])))[::-1])


@sharding_rule("aten.unsqueeze")
def _unsqueeze(call: Call) -> Line:
    names = factor_names(len(call.shapes[0]))
    at = dim_of(call["dim"], len(names) + 1)
    return line(f"{tensor_text(names)} -> {tensor_text([*names[:at], '_', *names[at:]])}", linear=LINEAR)


@sharding_rule("aten.squeeze")
def _squeeze(call: Call) -> Line:
    shape = call.shapes[0]
    names = factor_names(len(shape))
    # squeeze.dims drops nothing for an empty list, squeeze.default every dim of size 1.
    dims = call.get("dim")
    gone = range(len(shape)) if dims is None else dims_of(dims, len(shape)) if dims != [] else ()
    left = [name for dim, name in enumerate(names) if not (dim in gone and shape[dim] == 1)]
    return line(f"{tensor_text(names)} -> {tensor_text(left)}", linear=LINEAR)


@localizer("aten.squeeze")
def _local_squeeze(call: LocalCall) -> Localized:
    # A sharded dim whose block has size 1 stays, though its size now looks like that of a dim to drop.
    shape = call.shapes[0]
    dims = call.get("dim")
    gone = range(len(shape)) if dims is None else dims_of(dims, len(shape)) if dims != [] else ()
    kept = call.strategy.operands[0]
    exact = [dim for dim in gone if shape[dim] == 1 and dim != kept]
    return torch.ops.aten.squeeze.dims, (call.node.args[0], exact), {}


sharding_rule("aten.expand", "... -> ...", linear=LINEAR)
sharding_rule("aten.broadcast_to", "... -> ...", linear=LINEAR)


@sharding_rule("aten.repeat")
def _repeat(call: Call) -> Line:
    shape, result = call.shapes[0], call.result
    names = factor_names(len(shape))
    new = len(result) - len(shape)
    out = [f"r{dim}" for dim in range(new)]
    out += [f"(r{new + dim} {name})" for dim, name in enumerate(names)]
    repeats = {f"r{dim}": count for dim, count in enumerate(call["repeats"])}
    return line(f"{tensor_text(names)} -> {tensor_text(out)}", linear=LINEAR, sizes=repeats)


@localizer("aten.repeat")
def _local_repeat(call: LocalCall) -> Localized:
    shape, result = call.shapes[0], call.result
    padded = (1,) * (len(result) - len(shape)) + shape
    return call.replace(repeats=[after // before for after, before in zip(result, padded, strict=True)])


# -- parts of a dim --------------------------------------------------------------------------------------------------


def _whole_dims(call: Call, dims: Sequence[int], results: int = 1) -> Line:
    """`dims` stay whole, whatever their size in the result; the others pass."""
    names = factor_names(len(call.shapes[0]))
    text = tensor_text(["_" if dim in dims else name for dim, name in enumerate(names)])
    return line(f"{text} -> {', '.join([text] * results)}", linear=LINEAR)


@sharding_rule("aten.slice")
def _slice(call: Call) -> Line:
    shape = call.shapes[0]
    dim = dim_of(call["dim"], len(shape))
    return _whole_dims(call, [] if is_full_slice(call, shape[dim]) else [dim])


def is_full_slice(call: Call, size: int) -> bool:
    """Whether a slice takes a dim of `size` as it is."""
    start, end, step = call.get("start"), call.get("end"), call.get("step", 1)
    start = 0 if start is None else start
    return (start == 0 or start <= -size) and (end is None or end >= size) and step == 1


@localizer("aten.slice aten.slice_scatter")
def _local_slice(call: LocalCall) -> Localized:
    dim = dim_of(call["dim"], len(call.shapes[0]))
    if call.strategy.operands[0] == dim:
        return call.replace(start=0, end=call.shapes[0][dim])
    return call.unchanged()


@sharding_rule("aten.narrow")
def _narrow(call: Call) -> Line:
    return _whole_dims(call, [dim_of(call["dim"], len(call.shapes[0]))])


@sharding_rule("aten.select")
def _select(call: Call) -> Line:
    names = factor_names(len(call.shapes[0]))
    dim = dim_of(call["dim"], len(names))
    left = [*names[:dim], *names[dim + 1 :]]
    return line(f"{tensor_text([*names[:dim], '_', *names[dim + 1 :]])} -> {tensor_text(left)}", linear=LINEAR)


@sharding_rule("aten.unbind")
def _unbind(call: Call) -> Line:
    one = _select(call).text
    operand, result = one.split(" -> ")
    return line(f"{operand} -> {', '.join([result] * len(call.results))}", linear=LINEAR)


@sharding_rule("aten.split aten.split_with_sizes aten.chunk aten.unsafe_split aten.unsafe_split_with_sizes")
def _split(call: Call) -> Line:
    return _whole_dims(call, [dim_of(call["dim"], len(call.shapes[0]))], len(call.results))


@sharding_rule("aten.slice_scatter")
def _slice_scatter(call: Call) -> Line:
    names = factor_names(len(call.shapes[0]))
    dim = dim_of(call["dim"], len(names))
    if not is_full_slice(call, call.shapes[0][dim]):
        names[dim] = "_"
    text = tensor_text(names)
    return line(f"{text}, {text} -> {text}", linear=[{0, 1}])


@sharding_rule("aten.select_scatter")
def _select_scatter(call: Call) -> Line:
    names = factor_names(len(call.shapes[0]))
    dim = dim_of(call["dim"], len(names))
    text = tensor_text([*names[:dim], "_", *names[dim + 1 :]])
    return line(f"{text}, {tensor_text([*names[:dim], *names[dim + 1 :]])} -> {text}", linear=[{0, 1}])


@sharding_rule("aten.flip")
def _flip(call: Call) -> Line:
    ndim = len(call.shapes[0])
    return _whole_dims(call, [dim_of(dim, ndim) for dim in call["dims"]])


@sharding_rule("aten.rot90")
def _rot90(call: Call) -> Line:
    ndim = len(call.shapes[0])
    first, second = (dim_of(dim, ndim) for dim in call["dims"])
    names = ["_" if dim in (first, second) else name for dim, name in enumerate(factor_names(ndim))]
    return line(f"{tensor_text(names)} -> {tensor_text(names)}", linear=LINEAR)


@sharding_rule("aten.roll")
def _roll(call: Call) -> Line:
    # Without dims the tensor is rolled as one long row.
    return _whole_dims(call, dims_of(call["dims"], len(call.shapes[0])))


@sharding_rule("aten.constant_pad_nd")
def _constant_pad_nd(call: Call) -> Line:
    ndim = len(call.shapes[0])
    pad = call["pad"]
    padded = [ndim - 1 - pair // 2 for pair in range(0, len(pad), 2) if pad[pair] or pad[pair + 1]]
    rule = _whole_dims(call, padded)
    return rule if call["value"] == 0 else line(rule.text)


@sharding_rule("aten.diagonal")
def _diagonal(call: Call) -> Line:
    ndim = len(call.shapes[0])
    names = factor_names(ndim)
    pair = (dim_of(call["dim1"], ndim), dim_of(call["dim2"], ndim))
    left = [name for dim, name in enumerate(names) if dim not in pair]
    text = tensor_text(["_" if dim in pair else name for dim, name in enumerate(names)])
    return line(f"{text} -> {tensor_text([*left, '_'])}", linear=LINEAR)


@sharding_rule("aten.diag_embed")
def _diag_embed(call: Call) -> Line:
    ndim = len(call.result)
    pair = (dim_of(call["dim1"], ndim), dim_of(call["dim2"], ndim))
    names = factor_names(ndim - 2)
    left = iter(names)
    made = ["_" if dim in pair else next(left) for dim in range(ndim)]
    return line(f"{tensor_text([*names, '_'])} -> {tensor_text(made)}", linear=LINEAR)


@sharding_rule("aten.diagonal_scatter")
def _diagonal_scatter(call: Call) -> Line:
    one = _diagonal(call).text
    whole, diagonal = one.split(" -> ")
    return line(f"{whole}, {diagonal} -> {whole}", linear=[{0, 1}])


@sharding_rule("aten.unfold")
def _unfold(call: Call) -> Line:
    rule = _whole_dims(call, dims_of(call["dimension"], len(call.shapes[0])) if call.shapes[0] else [])
    operand, result = rule.text.split(" -> ")
    return line(f"{operand} -> {result} _" if call.shapes[0] else "[] -> _", linear=LINEAR)


@sharding_rule("aten.tril aten.triu")
def _triangle(call: Call) -> Line:
    ndim = len(call.shapes[0])
    return _whole_dims(call, [ndim - 2, ndim - 1])


# -- gradients of parts: zeros with the part in its place --------------------------------------------------------------


@sharding_rule("aten.slice_backward")
def _slice_backward(call: Call) -> Line:
    dim = dim_of(call["dim"], len(call.result))
    return _whole_dims(call, [] if is_full_slice(call, call.result[dim]) else [dim])


@localizer("aten.slice_backward")
def _local_slice_backward(call: LocalCall) -> Localized:
    dim = dim_of(call["dim"], len(call.result))
    if call.strategy.results[0] == dim:
        return call.replace(input_sizes=list(call.result), start=0, end=call.result[dim])
    return call.replace(input_sizes=list(call.result))


@sharding_rule("aten.select_backward")
def _select_backward(call: Call) -> Line:
    names = factor_names(len(call.result))
    dim = dim_of(call["dim"], len(names))
    left = [*names[:dim], *names[dim + 1 :]]
    return line(f"{tensor_text(left)} -> {tensor_text([*names[:dim], '_', *names[dim + 1 :]])}", linear=LINEAR)


localize_sizes("aten.select_backward", "input_sizes")


# -- several tensors ---------------------------------------------------------------------------------------------------


@sharding_rule("aten.cat")
def _cat(call: Call) -> Line:
    names = factor_names(len(call.result))
    dim = dim_of(call["dim"], len(names))
    text = tensor_text(["_" if at == dim else name for at, name in enumerate(names)])
    # Tensors of shape [0] are let through whatever the others' dims, for old programs' sake.
    operands = ["_" if shape == (0,) and len(names) != 1 else text for shape in call.shapes]
    return line(f"{', '.join(operands)} -> {text}", linear=[range(len(operands))])


@sharding_rule("aten.stack")
def _stack(call: Call) -> Line:
    names = factor_names(len(call.result) - 1)
    dim = dim_of(call["dim"], len(call.result))
    operands = ", ".join([tensor_text(names)] * len(call.shapes))
    result = tensor_text([*names[:dim], "_", *names[dim:]])
    return line(f"{operands} -> {result}", linear=[range(len(call.shapes))])


# -- ops that no factor describes --------------------------------------------------------------------------------------


def whole(call: Call) -> Line:
    """Everything whole: the op runs on every worker alike."""
    return line(
        ", ".join(tensor_text(["_"] * len(shape)) for shape in call.shapes)
        + " -> "
        + ", ".join("-" if shape is None else tensor_text(["_"] * len(shape)) for shape in call.results)
    )


@sharding_rule("aten.as_strided aten.as_strided_scatter aten.unfold_backward aten.block_diag")
def whole_linear(call: Call) -> Line:
    """Everything whole, and linear in the operands together."""
    return line(whole(call).text, linear=[range(len(call.shapes))])
