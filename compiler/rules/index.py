"""Lookups and writes by index. Along the dim that indices point into, an op of ours that knows its block takes over."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from monarch.compiler import ops
from monarch.compiler.errors import RuleError
from monarch.compiler.graph import provenance
from monarch.compiler.rules.call import Call, dim_of
from monarch.compiler.rules.line import Line, LineError, Shape, factor_names, line
from monarch.compiler.rules.localize import LocalCall, Localized, localizer
from monarch.compiler.rules.register import sharding_rule
from monarch.compiler.rules.views import tensor_text

# -- embeddings: rows of a table ---------------------------------------------------------------------------------------

sharding_rule("aten.embedding", "v d, ... -> ... d", linear=[{0}])
sharding_rule("embedding_shard", "_ d, ... -> ... d", linear=[{0}])
sharding_rule("embedding_backward_shard", "... d, ... -> _ d", linear=[{0}])


@localizer("aten.embedding")
def _local_embedding(call: LocalCall) -> Localized:
    if call.strategy.operands[0] != 0:
        return call.unchanged()
    return ops.embedding_shard, (call["weight"], call["indices"], call.mesh_dim), {}


@sharding_rule("aten.embedding_dense_backward")
def _embedding_backward(call: Call) -> Line:
    # A row's gradient divided by how often it is looked up needs the whole batch.
    return line("... d, ... -> v d", whole="... v" if call["scale_grad_by_freq"] else "", linear=[{0}])


@localizer("aten.embedding_dense_backward")
def _local_embedding_backward(call: LocalCall) -> Localized:
    if call.strategy.results[0] != 0:
        return call.unchanged()
    rows = call.result[0]
    args = (call["grad_output"], call["indices"], rows, call["padding_idx"], call.mesh_dim)
    return ops.embedding_backward_shard, args, {}


# -- along one dim -----------------------------------------------------------------------------------------------------


@sharding_rule("aten.index_select")
def _index_select(call: Call) -> Line:
    names = factor_names(len(call.shapes[0]), taken=("j",))
    if not names:
        return line("[], _ -> []", linear=[{0}])
    dim = dim_of(call["dim"], len(names))
    source = tensor_text([*names[:dim], "_", *names[dim + 1 :]])
    index = "j" if call.shapes[1] else "[]"
    result = "j" if call.shapes[1] else "_"
    return line(f"{source}, {index} -> {tensor_text([*names[:dim], result, *names[dim + 1 :]])}", linear=[{0}])


def _aligned(source: Shape, index: Shape) -> list[str]:
    """Factors of the dims that tensor and index share; `_` where the index takes only the first part of one."""
    names = factor_names(len(source), taken=("v", "j"))
    return [name if source[at] == index[at] else "_" for at, name in enumerate(names)]


def _at(dims: Sequence[str], dim: int, name: str) -> str:
    return tensor_text([name if at == dim else other for at, other in enumerate(dims)])


@sharding_rule("aten.gather gather_shard")
def _gather(call: Call) -> Line:
    if not call.shapes[0] or not call.shapes[1]:
        return line("..., ... -> ...", whole="...", linear=[{0}])
    dim = dim_of(call["dim"], len(call.shapes[0]))
    shared = _aligned(call.shapes[0], call.shapes[1])
    # What is sharded over one mesh dim is not sharded over another: gather_shard knows of one.
    source = "_" if call.target is ops.gather_shard else "v"
    index = _at(shared, dim, "j")
    return line(f"{_at(shared, dim, source)}, {index} -> {index}", linear=[{0}])


@localizer("aten.gather")
def _local_gather(call: LocalCall) -> Localized:
    dim = dim_of(call["dim"], len(call.shapes[0]))
    if call.strategy.operands[0] != dim or call.strategy.operands[1] is not None:
        return call.unchanged()
    return ops.gather_shard, (call["self"], dim, call["index"], call.mesh_dim), {}


def _scatter_dims(call: Call, source: str, index: str) -> tuple[str, str, str]:
    """The texts of the tensor, the index and the values of a scatter; `source` and `index` stand along its dim."""
    tensor, at = call.shapes[0], call.shapes[1]
    values = call.shapes[2] if len(call.shapes) > 2 else at
    dim = dim_of(call["dim"], len(tensor))
    shared = _aligned(tensor, at)
    if not values:
        return _at(shared, dim, source), _at(shared, dim, index), "[]"
    # Values may be longer than the index, which takes the first part of them.
    shared = [name if values[d] == at[d] else "_" for d, name in enumerate(shared)]
    index = index if values[dim] == at[dim] else "_"
    return _at(shared, dim, source), _at(shared, dim, index), _at(shared, dim, index)


def _no_dims(call: Call) -> bool:
    return not call.shapes[0] or not call.shapes[1]


def _scatter_whole(call: Call) -> Line:
    return line(", ".join(["..."] * len(call.shapes)) + " -> ...", whole="...")


@sharding_rule("aten.scatter.src aten.scatter.value scatter_shard")
def _scatter(call: Call) -> Line:
    if _no_dims(call):
        return _scatter_whole(call)
    # A later element overwrites an earlier one: the index stays whole along the dim.
    source, index, values = _scatter_dims(call, "_" if call.target is ops.scatter_shard else "v", "_")
    if len(call.shapes) > 2:
        return line(f"{source}, {index}, {values} -> {source}", linear=[{0, 2}])
    value = call.get("value", call.get("src"))
    return line(f"{source}, {index} -> {source}", linear=[{0}] if value == 0 else [])


@localizer("aten.scatter.src aten.scatter.value")
def _local_scatter(call: LocalCall) -> Localized:
    dim = dim_of(call["dim"], len(call.shapes[0]))
    if call.strategy.operands[0] != dim or call.strategy.operands[1] is not None:
        return call.unchanged()
    value = call["src"] if call.name.endswith("src") else call["value"]
    return ops.scatter_shard, (call["self"], dim, call["index"], value, call.mesh_dim), {}


@sharding_rule("aten.scatter_add")
def _scatter_add(call: Call) -> Line:
    if _no_dims(call):
        return _scatter_whole(call)
    source, index, values = _scatter_dims(call, "_", "j")
    return line(f"{source}, {index}, {values} -> {source}", linear=[{0, 2}], addends={0})


@sharding_rule("aten.scatter.reduce aten.scatter.value_reduce aten.scatter_reduce")
def _scatter_reduce(call: Call) -> Line:
    if _no_dims(call):
        return _scatter_whole(call)
    source, index, values = _scatter_dims(call, "_", "_")
    operands = [source, index, values] if len(call.shapes) > 2 else [source, index]
    return line(f"{', '.join(operands)} -> {source}")


@sharding_rule("aten.index_add aten.index_copy")
def _index_add(call: Call) -> Line:
    names = factor_names(len(call.shapes[0]), taken=("j",))
    dim = dim_of(call["dim"], len(names))
    adds = call.name.startswith("aten.index_add") and len(names) > 0
    source = _at(names, dim, "_")
    values, index = _at(names, dim, "j" if adds else "_"), ("j" if adds else "_") if call.shapes[1] else "[]"
    if not names:
        values = "[]"
    return line(f"{source}, {index}, {values} -> {source}", linear=[{0, 2}], addends={0} if adds else ())


@sharding_rule("aten.index_reduce")
def _index_reduce(call: Call) -> Line:
    names = factor_names(len(call.shapes[0]))
    text = _at(names, dim_of(call["dim"], len(names)), "_")
    return line(f"{text}, {'_' if call.shapes[1] else '[]'}, {text} -> {text}")


@sharding_rule("aten.take")
def _take(call: Call) -> Line:
    return line(f"{tensor_text(['_'] * len(call.shapes[0]))}, ... -> ...", linear=[{0}])


@sharding_rule("aten.put")
def _put_flat(call: Call) -> Line:
    """Indices into the tensor as one row: written, a later element overwrites an earlier one."""
    names = factor_names(len(call.shapes[1]))
    source, index, adds = tensor_text(["_"] * len(call.shapes[0])), tensor_text(names), call["accumulate"]
    values = index if call.shapes[2] == call.shapes[1] else tensor_text(["_"] * len(call.shapes[2]))
    return line(
        f"{source}, {index}, {values} -> {source}",
        whole="" if adds and values == index else " ".join(names),
        linear=[{0, 2}],
        addends={0} if adds else (),
    )


@sharding_rule("aten.index_fill.int_Scalar")
def _index_fill(call: Call) -> Line:
    names = factor_names(len(call.shapes[0]))
    dim = dim_of(call["dim"], len(names))
    source = _at(names, dim, "_")
    return line(f"{source}, {'_' if call.shapes[1] else '[]'} -> {source}")


# -- x[i, :, j]: several index tensors, which broadcast together ------------------------------------------------------


def _indexing(call: Call) -> tuple[str, str, list[str], list[str]]:
    """The texts of the indexed tensor and of what indexing it gives; those of the index tensors; the indices' factors.

    Where the indexed dims are adjacent, the indices' dims stand in their place, else they come first.
    """
    indices = call["indices"]
    tensors = [item for item in indices if isinstance(item, fx.Node)]
    if any(_is_mask(item) for item in tensors):
        if call.name.startswith("aten.index."):
            raise RuleError(
                "a boolean mask among the indices picks as many elements as it is true, which no shape tells",
                hint="keep the shape: torch.where(mask, x, other), or x * mask.",
                source=provenance(call.node).source,
            )
        raise LineError("a boolean mask stands among the indices")
    first = 1 + (1 if call.name.startswith("aten._unsafe_masked_index") else 0)
    shapes = call.shapes[first : first + len(tensors)]
    indexed = [dim for dim, item in enumerate(indices) if item is not None]
    ndim = len(call.shapes[0])
    depth = max((len(shape) for shape in shapes), default=0)
    joint = [f"i{number}" for number in range(depth)]
    names = factor_names(ndim)
    source = ["_" if dim in indexed else name for dim, name in enumerate(names)]
    adjacent = not indexed or indexed == list(range(indexed[0], indexed[-1] + 1))
    start = indexed[0] if indexed and adjacent else 0
    left = [name for dim, name in enumerate(names) if dim not in indexed]
    result = left[:start] + joint + left[start:]
    texts = [tensor_text(joint[depth - len(shape) :]) for shape in shapes]
    return tensor_text(source), tensor_text(result), texts, joint


def _broadcast_against(result: str, shape: Shape) -> str:
    dims = [] if result == "[]" else result.split()
    return tensor_text(dims[len(dims) - len(shape) :])


@sharding_rule("aten.index aten._unsafe_index")
def _index(call: Call) -> Line:
    source, result, indices, _ = _indexing(call)
    return line(f"{', '.join([source, *indices])} -> {result}", linear=[{0}])


@sharding_rule("aten._unsafe_masked_index")
def _masked_index(call: Call) -> Line:
    source, result, indices, _ = _indexing(call)
    mask = _broadcast_against(result, call.shapes[1])
    text = f"{', '.join([source, mask, *indices])} -> {result}"
    return line(text, linear=[{0}] if call["fill"] == 0 else [])


def _put(call: Call, accumulate: bool) -> Line:
    source, result, indices, joint = _indexing(call)
    values = _broadcast_against(result, call.shapes[-1])
    masks = []
    if call.name.startswith("aten._unsafe_masked_index"):
        masks = [_broadcast_against(result, call.shapes[1])]
    operands = [source, *masks, *indices, values]
    # Written, a later element overwrites an earlier one; added, the elements of all workers sum up.
    return line(
        f"{', '.join(operands)} -> {source}",
        whole="" if accumulate else " ".join(joint),
        linear=[{0, len(operands) - 1}],
        addends={0} if accumulate else (),
    )


def _is_mask(index: fx.Node) -> bool:
    return index.meta["type"].dtype in (torch.bool, torch.uint8)


@sharding_rule("aten.index_put aten._unsafe_index_put")
def _index_put(call: Call) -> Line:
    given = [item for item in call["indices"] if item is not None]
    if len(given) == 1 and _is_mask(given[0]):
        return _put_by_mask(call)
    return _put(call, call["accumulate"])


def _put_by_mask(call: Call) -> Line:
    """`x[:, mask] = values`: the mask lies over some dims of x, and shards with them if all take one value."""
    target, mask, values = call.shapes
    first = next(dim for dim, item in enumerate(call["indices"]) if item is not None)
    names = factor_names(len(target), taken=("count",))
    after = first + len(mask)
    picked = [*names[:first], "count", *names[after:]]
    picked = picked[len(picked) - len(values) :]
    at = picked.index("count") if "count" in picked else None
    each_its_own = at is not None and values[at] != 1
    if at is not None:
        picked[at] = "_"
    if each_its_own:
        names[first:after] = ["_"] * len(mask)
    source = tensor_text(names)
    text = f"{source}, {tensor_text(names[first:after])}, {tensor_text(picked)} -> {source}"
    return line(text, linear=[{0, 2}])


@sharding_rule("aten._unsafe_masked_index_put_accumulate")
def _masked_index_put(call: Call) -> Line:
    return _put(call, True)
