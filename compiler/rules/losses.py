"""Losses that ATen computes in one op, and dropout.

Where a loss is averaged, a worker would divide by its own count, so its batch stays whole: decomposed into pointwise
ops and sums, it shards.
"""

from __future__ import annotations

import re

from monarch.compiler.rules.call import Call
from monarch.compiler.rules.line import Line, factor_names, line
from monarch.compiler.rules.register import sharding_rule
from monarch.compiler.rules.views import tensor_text
from monarch.compiler.rules.whole import draws_numbers

NONE, MEAN, SUM = 0, 1, 2
"""torch's numbers for `reduction`."""


def _nll_dims(call: Call) -> tuple[str, str, list[str]]:
    """The texts of a log-likelihood's scores and targets, and the factors that they share."""
    ndim = len(call.shape("self") or ())
    if ndim == 1:
        return "_", "[]", []
    names = factor_names(ndim - 1)
    return tensor_text([names[0], "_", *names[1:]]), tensor_text(names), names


@sharding_rule("aten.nll_loss_forward aten.nll_loss2d_forward")
def _nll_loss_forward(call: Call) -> Line:
    scores, target, batch = _nll_dims(call)
    reduction = call["reduction"]
    if reduction == NONE:
        # The total weight is not computed then.
        return line(f"{scores}, {target}, _ -> {target}, []", kept=[(name, 1) for name in batch])
    return line(f"{scores}, {target}, _ -> [], []", whole=" ".join(batch) if reduction == MEAN else "")


@sharding_rule("aten.nll_loss_backward aten.nll_loss2d_backward")
def _nll_loss_backward(call: Call) -> Line:
    # The total weight that a mean divides by is an operand, and so the whole batch's.
    scores, target, _ = _nll_dims(call)
    grad = target if call["reduction"] == NONE else "[]"
    return line(f"{grad}, {scores}, {target}, _, [] -> {scores}", linear=[{0}])


def _elementwise_loss(call: Call, tensors: int) -> Line:
    reduction = call["reduction"]
    operands = ", ".join(["..."] * tensors)
    if reduction == NONE:
        return line(f"{operands} -> ...")
    return line(f"{operands} -> []", whole="..." if reduction == MEAN else "")


def _losses(ops: str, tensors: int) -> None:
    sharding_rule(ops)(lambda call: _elementwise_loss(call, tensors))


_losses("aten.mse_loss aten.l1_loss aten.smooth_l1_loss aten.huber_loss aten.soft_margin_loss", 2)
_losses("aten.binary_cross_entropy", 3)
_losses("aten.binary_cross_entropy_with_logits", 4)


def _elementwise_loss_backward(call: Call, tensors: int) -> Line:
    whole = "..." if call["reduction"] == MEAN else ""
    return line(f"{', '.join(['...'] * tensors)} -> ...", whole=whole, linear=[{0}])


for _op in "mse_loss smooth_l1_loss huber_loss soft_margin_loss".split():
    sharding_rule(f"aten.{_op}_backward")(lambda call: _elementwise_loss_backward(call, 3))
sharding_rule("aten.binary_cross_entropy_backward")(lambda call: _elementwise_loss_backward(call, 4))


# Margins between classes: rows [n, classes], or one row; `loss` is one value a row, or one of all.

_MARGINS = {
    "multi_margin_loss": "rows, row, _ -> loss",
    "multi_margin_loss_backward": "loss, rows, row, _ -> rows",
    "multilabel_margin_loss_forward": "rows, rows -> loss, rows",
    "multilabel_margin_loss_backward": "loss, rows, rows, rows -> rows",
}


@sharding_rule(" ".join(f"aten.{name}" for name in _MARGINS))
def _margin_loss(call: Call) -> Line:
    text = _MARGINS[call.target.overloadpacket.__name__]
    one_row = len(call.shape("self") or ()) < 2
    each = not one_row and call["reduction"] == NONE
    for word, dims in (("rows", "_" if one_row else "n _"), ("row", "[]" if one_row else "n")):
        text = re.sub(rf"\b{word}\b", dims, text)
    text = re.sub(r"\bloss\b", "n" if each else "[]", text)
    whole = "n" if call["reduction"] == MEAN and not one_row else ""
    return line(text, whole=whole, linear=[{0}] if text.startswith(("n,", "[],")) else [])


@sharding_rule("aten.native_dropout")
def _native_dropout(call: Call) -> Line:
    if call["train"] in (True, None) and 0 < call["p"] < 1:
        raise draws_numbers(call)
    return line("... -> ..., ...")
