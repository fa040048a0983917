"""Matrix products: sharding the contracted factor gives partial sums."""

from __future__ import annotations

from monarch.compiler.ops.grouped import FORMS
from monarch.compiler.rules.call import Call
from monarch.compiler.rules.line import Line, factor_names, line
from monarch.compiler.rules.register import sharding_rule
from monarch.compiler.rules.views import tensor_text

BILINEAR = ({0}, {1})
# A product added to operand 0, which must be partial too wherever the product is.
ADDED = ({0, 1}, {0, 2})

sharding_rule("aten.mm", "m k, k n -> m n", linear=BILINEAR)
sharding_rule("aten.bmm", "b m k, b k n -> b m n", linear=BILINEAR)
sharding_rule("aten.dot", "k, k -> []", linear=BILINEAR)
sharding_rule("aten.vdot", "k, k -> []", linear=BILINEAR)
sharding_rule("aten.mv", "m k, k -> m", linear=BILINEAR)
sharding_rule("aten.ger", "m, n -> m n", linear=BILINEAR)
sharding_rule("aten.outer", "m, n -> m n", linear=BILINEAR)
# Rows of experts one behind the other, as `transformers` multiplies them: where an expert's rows end, the last operand
# says for all rows together, so these stay whole.
sharding_rule("transformers.grouped_mm_fallback", "s k, e k n, e -> s n", whole="s e", linear=BILINEAR)
sharding_rule(
    "transformers.grouped_mm_fallback_backward", "s k, e k n, e, s n -> s k, e k n", whole="s e", linear=({3},)
)


@sharding_rule("monarch.grouped_mm")
def _grouped_mm(call: Call) -> Line:
    dims = len(call.shape("a") or ()), len(call.shape("b") or ())
    return line(FORMS[dims], whole="s e", linear=BILINEAR)


def _broadcast(names: str, ndim: int) -> str:
    """The last `ndim` of the names: how a tensor of that many dims broadcasts against them."""
    return " ".join(names.split()[-ndim:]) if ndim else "[]"


def _added(call: Call, product: str, result: str) -> Line:
    bias = _broadcast(result, len(call.shape("self") or ()))
    return line(f"{bias}, {product} -> {result}", linear=ADDED, addends={0})


def _sum(op: str, product: str, result: str) -> None:
    sharding_rule(op)(lambda call: _added(call, product, result))


_sum("aten.addmm", "m k, k n", "m n")
_sum("aten.baddbmm", "b m k, b k n", "b m n")
_sum("aten.addbmm", "b m k, b k n", "m n")
_sum("aten.addmv", "m k, k", "m")
_sum("aten.addr", "m, n", "m n")


@sharding_rule("aten._addmm_activation")
def _addmm_activation(call: Call) -> Line:
    # The activation follows the whole sum.
    return line(_added(call, "m k, k n", "m n").text, whole="k")


@sharding_rule("aten.linear")
def _linear(call: Call) -> Line:
    batch = " ".join(name + "_" for name in factor_names(len(call.shapes[0]) - 1))
    text = f"{batch} k, n k, n -> {batch} n"
    return line(text, linear=({0, 2}, {1, 2}), addends={2})


@sharding_rule("aten.matmul")
def _matmul(call: Call) -> Line:
    left, right = (len(shape) for shape in call.shapes)
    depth = max(left, right, 2) - 2
    batch = [f"b{index}" for index in range(depth)]
    a = "k" if left == 1 else " ".join([*batch[depth - (left - 2) :], "m", "k"])
    b = "k" if right == 1 else " ".join([*batch[depth - (right - 2) :], "k", "n"])
    out = " ".join([*batch, *(["m"] if left > 1 else []), *(["n"] if right > 1 else [])])
    return line(f"{a}, {b} -> {out or '[]'}", linear=BILINEAR)


@sharding_rule("aten.tensordot")
def _tensordot(call: Call) -> Line:
    left, right = (len(shape) for shape in call.shapes)
    names = factor_names(left + right)
    a, b = names[:left], names[left:]
    for here, there in zip(call["dims_self"], call["dims_other"], strict=True):
        b[there % right] = a[here % left]
    made = [name for name in (*a, *b) if (name in a) != (name in b)]
    return line(f"{tensor_text(a)}, {tensor_text(b)} -> {tensor_text(made)}", linear=BILINEAR)


@sharding_rule("aten._trilinear")
def _trilinear(call: Call) -> Line:
    """A product of three tensors, each broadcast along the dims that it is expanded by, summed over some."""
    expanded = [call[f"expand{number}"] for number in (1, 2, 3)]
    names = factor_names(len(call.shapes[0]) + len(expanded[0]))
    texts = [tensor_text([name for at, name in enumerate(names) if at not in dims]) for dims in expanded]
    result = tensor_text([name for at, name in enumerate(names) if at not in call["sumdim"]])
    return line(f"{', '.join(texts)} -> {result}", linear=({0}, {1}, {2}))
