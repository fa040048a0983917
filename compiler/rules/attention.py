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


def _registered(op: str, order: str, results: str) -> None:
    # Linear in the gradient: the output, from which a backward's kernel takes the softmax's row sums, is given.
    linear: list[set[int]] = [{0}] if op.endswith("_backward") else []
    sharding_rule(f"aten.{op}")(lambda call: _attention(call, order, results, linear))


_registered("scaled_dot_product_attention", "qkkm", "q")
_registered("_scaled_dot_product_flash_attention_for_cpu", "qkkm", "ql")
_registered("_scaled_dot_product_flash_attention_for_cpu_backward", "qqkkqlm", "qkk")
_registered("_scaled_dot_product_flash_attention.default", "qkk", "qlsssssss")
_registered("_scaled_dot_product_flash_attention_backward", "qqkkqlssss", "qkk")
_registered("_scaled_dot_product_efficient_attention", "qkkm", "qlss")
_registered("_scaled_dot_product_efficient_attention_backward", "qqkkmqlss", "qkkm")
_registered("_scaled_dot_product_cudnn_attention", "qkkm", "qlsssssss")
_registered("_scaled_dot_product_cudnn_attention_backward", "qqkkqlssmss", "qkk")
