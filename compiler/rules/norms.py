"""Normalization layers and their gradients: the normalized dims stay whole, a weight's gradient sums over the rest."""

from __future__ import annotations

import math

from monarch.compiler.rules.call import Call
from monarch.compiler.rules.line import Line, factor_names, line
from monarch.compiler.rules.localize import LocalCall, Localized, localizer
from monarch.compiler.rules.register import sharding_rule
from monarch.compiler.rules.views import tensor_text


def _row_dims(call: Call) -> tuple[str, str, str]:
    """The texts of a layer norm's input, of its weight, and of a statistic with one value a row."""
    ndim = len(call.shape("input") or ())
    inner = len(call["normalized_shape"])
    names = factor_names(ndim - inner)
    return tensor_text([*names, *["_"] * inner]), tensor_text(["_"] * inner), tensor_text([*names, *["_"] * inner])


@sharding_rule("aten.native_layer_norm")
def _layer_norm(call: Call) -> Line:
    rows, weight, statistic = _row_dims(call)
    return line(f"{rows}, {weight}, {weight} -> {rows}, {statistic}, {statistic}")


@sharding_rule("aten.native_layer_norm_backward")
def _layer_norm_backward(call: Call) -> Line:
    rows, weight, statistic = _row_dims(call)
    text = f"{rows}, {rows}, {statistic}, {statistic}, {weight}, {weight} -> {rows}, {weight}, {weight}"
    return line(text, linear=[{0}])


@sharding_rule("aten._fused_rms_norm")
def _rms_norm(call: Call) -> Line:
    rows, weight, statistic = _row_dims(call)
    return line(f"{rows}, {weight} -> {rows}, {statistic}")


@sharding_rule("aten._fused_rms_norm_backward")
def _rms_norm_backward(call: Call) -> Line:
    rows, weight, statistic = _row_dims(call)
    return line(f"{rows}, {rows}, {statistic}, {weight} -> {rows}, {weight}", linear=[{0}])


sharding_rule("aten.rms_norm", "... _, _ -> ... _")


# -- group norm: whole groups of channels shard, with the sizes that the op takes as numbers ---------------------------


def _group_dims(call: Call) -> tuple[str, dict[str, int]]:
    return "n (g c) " + " ".join(["_"] * (len(call.shape("input") or ()) - 2)), {"g": call["group"]}


@sharding_rule("aten.native_group_norm")
def _group_norm(call: Call) -> Line:
    x, sizes = _group_dims(call)
    # Within a group the channels stay whole, also where one group is left and they lead their dim.
    return line(f"{x}, (g c), (g c) -> {x}, n g, n g", whole="c", sizes=sizes)


@sharding_rule("aten.native_group_norm_backward")
def _group_norm_backward(call: Call) -> Line:
    x, sizes = _group_dims(call)
    return line(f"{x}, {x}, n g, n g, (g c) -> {x}, (g c), (g c)", whole="c", linear=[{0}], sizes=sizes)


@localizer("aten.native_group_norm aten.native_group_norm_backward")
def _local_group_norm(call: LocalCall) -> Localized:
    shape = call.shape("input")
    assert shape is not None
    group = call["group"] // call.k if call.strategy.factor == "g" else call["group"]
    return call.replace(N=shape[0], C=shape[1], HxW=math.prod(shape[2:]), group=group)


# -- batch norm: while training, the statistics are of the whole batch -------------------------------------------------


def _batch_norm(call: Call, training: bool, operands: int, reserve: bool = False) -> Line:
    ndim = len(call.shape("input") or ())
    spatial = factor_names(ndim - 2, taken=("n", "c"))
    x = tensor_text(["n", "c", *spatial])
    made = [x]
    for shape in call.results[1:3]:
        made.append("c" if shape != (0,) else "_")
    if reserve:
        made.append("_")
    made += ["c"] * (len(call.results) - len(made))
    free = ["n", *spatial]
    # Outside training no statistic depends on the batch.
    kept = [(name, index) for name in free for index in range(1, len(made))]
    kept += [("c", index) for index, text in enumerate(made) if text == "_"]
    whole = " ".join(free) if training else ""
    return line(f"{', '.join([x, *['c'] * operands])} -> {', '.join(made)}", whole=whole, kept=kept)


@sharding_rule("aten.native_batch_norm aten._native_batch_norm_legit aten._native_batch_norm_legit_functional")
def _native_batch_norm(call: Call) -> Line:
    return _batch_norm(call, call["training"], 4)


@sharding_rule("aten._native_batch_norm_legit.no_stats")
def _batch_norm_no_stats(call: Call) -> Line:
    return _batch_norm(call, True, 2)


@sharding_rule("aten._batch_norm_with_update aten._batch_norm_with_update_functional")
def _batch_norm_with_update(call: Call) -> Line:
    return _batch_norm(call, True, 4, reserve=True)


@sharding_rule("aten._batch_norm_no_update")
def _batch_norm_no_update(call: Call) -> Line:
    return _batch_norm(call, call.get("running_mean") is None, 4, reserve=True)


def _batch_norm_grad(call: Call, training: bool, reserve: bool) -> Line:
    shape = call.shape("input") or ()
    spatial = factor_names(len(shape) - 2, taken=("n", "c"))
    x = tensor_text(["n", "c", *spatial])
    saved = ["_" if call.shape(name) == (0,) else "c" for name in call.signature.names if name.startswith("save_")]  # type: ignore[union-attr]
    operands = [x, x, "c", "c", "c", *saved, *(["_"] if reserve else [])]
    whole = " ".join(["n", *spatial]) if training else ""
    return line(f"{', '.join(operands)} -> {x}, c, c", whole=whole, linear=[{0}])


@sharding_rule("aten.native_batch_norm_backward")
def _native_batch_norm_backward(call: Call) -> Line:
    return _batch_norm_grad(call, call["train"], reserve=False)


@sharding_rule("aten.batch_norm_backward")
def _batch_norm_backward(call: Call) -> Line:
    return _batch_norm_grad(call, call["update"], reserve=True)
