"""Scaled dot product attention, forward and backward: batch and heads shard, sequences stay whole.

With grouped heads (fewer key and value heads than query heads) whole groups shard: query heads are `(h r)`, the others
`h`.
"""

from __future__ import annotations

from collections.abc import Sequence

from monarch.compiler.rules.call import Call
from monarch.compiler.rules.line import Line, Shape, line
from monarch.compiler.rules.register import sharding_rule
from monarch.compiler.rules.whole import draws_numbers


def _mask(shape: Shape | None, batch: Sequence[str]) -> str:
    """A mask broadcasts against [batch, heads, target, source], from the right."""
    if shape is None:
        return "_ _"
    dims = [*batch, "_", "_"][-len(shape) :]
    return " ".join("_" if size == 1 else dim for dim, size in zip(dims, shape, strict=True))


def _attention(call: Call, order: Sequence[str], results: Sequence[str], linear: Sequence[set[int]] = ()) -> Line:
    """The line of one attention op. `order` and `results` say what each tensor is:

    q  of the query's kind: [batch, heads, sequence, features]
    k  of the key's kind, with the key's heads
    l  one number for each query
    m  the mask, which broadcasts
    s  a seed, or another tensor that is the same on every worker
    """
    if call.get("dropout_p", 0.0):
        raise draws_numbers(call)
    query, key = call.shapes[call.position("query") or 0], call.shape("key")
    assert key is not None
    batch = [f"b{index}" for index in range(len(query) - 3)]
    heads, key_heads = query[-3], key[-3]
    grouped = heads != key_heads and key_heads > 0 and heads % key_heads == 0
    head = "(h r)" if grouped else "h"
    words = {
        "q": [*batch, head, "_", "_"],
        "k": [*batch, "h", "_", "_"],
    }

    def text(kind: str, shape: Shape | None) -> str:
        if kind == "m":
            return _mask(shape, [*batch, head])
        if kind == "s":
            return " ".join(["_"] * len(shape)) if shape else "[]"
        if kind == "l":
            return " ".join([*batch, head, *["_"] * (len(shape or ()) - len(batch) - 1)])
        return " ".join(words[kind])

    assert call.signature is not None
    operand_texts = [text(kind, call.shape(name)) for kind, name in zip(order, call.signature.tensors, strict=True)]
    result_texts = [
        "-" if shape is None else text(kind, shape) for kind, shape in zip(results, call.results, strict=True)
    ]
    free = [*batch, "h"]
    kept = [(name, index) for index, kind in enumerate(results) if kind == "s" for name in free]
    return line(f"{', '.join(operand_texts)} -> {', '.join(result_texts)}", linear=linear, kept=kept)


@sharding_rule("aten.scaled_dot_product_attention")
def _composite(call: Call) -> Line:
    return _attention(call, "qkkm", "q")


@sharding_rule("aten._scaled_dot_product_flash_attention_for_cpu")
def _cpu(call: Call) -> Line:
    return _attention(call, "qkkm", "ql")


@sharding_rule("aten._scaled_dot_product_flash_attention_for_cpu_backward")
def _cpu_backward(call: Call) -> Line:
    # Linear in the gradient: the output, from which the kernel takes the softmax's row sums, is given.
    return _attention(call, "qqkkqlm", "qkk", linear=[{0}])


@sharding_rule("aten._scaled_dot_product_flash_attention.default")
def _flash(call: Call) -> Line:
    return _attention(call, "qkk", "qlsssssss")


@sharding_rule("aten._scaled_dot_product_flash_attention_backward")
def _flash_backward(call: Call) -> Line:
    return _attention(call, "qqkkqlssss", "qkk", linear=[{0}])


@sharding_rule("aten._scaled_dot_product_efficient_attention")
def _efficient(call: Call) -> Line:
    return _attention(call, "qkkm", "qlss")


@sharding_rule("aten._scaled_dot_product_efficient_attention_backward")
def _efficient_backward(call: Call) -> Line:
    return _attention(call, "qqkkmqlss", "qkkm", linear=[{0}])


@sharding_rule("aten._scaled_dot_product_cudnn_attention")
def _cudnn(call: Call) -> Line:
    return _attention(call, "qkkm", "qlsssssss")


@sharding_rule("aten._scaled_dot_product_cudnn_attention_backward")
def _cudnn_backward(call: Call) -> Line:
    return _attention(call, "qqkkqlssmss", "qkk", linear=[{0}])
