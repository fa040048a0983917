"""ATen's ops that a plan for a GPU runs by templates, each with the op's own arguments.

Attention is traced on CPUs as ATen's flash kernels for them, which no GPU has; the templates compute the same results
from the same operands. Queries, keys and values are [batch, heads, length, dim] there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from monarch.compiler.kernels.templates import CallCost, Template
from monarch.stdlib.kernels.attention import attention, variants
from monarch.stdlib.kernels.attention_backward import attention_backward, key_variants, query_variants
from monarch.stdlib.kernels.launch import Launch, Variant, recorded

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_REACHED = 0.35
"""The part of a GPU's peak that attention is assumed to reach, with operands read through pointers. Not measured."""


def flash_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    variant: Variant | None = None,
) -> tuple[Tensor, Tensor]:
    """`aten._scaled_dot_product_flash_attention_for_cpu`: the result like query, and lse float32 [batch, heads,
    length]."""
    q, k, v = (each.transpose(1, 2) for each in (query, key, value))
    out, lse = attention(q, k, v, causal=is_causal, scale=scale, variant=variant)
    return out.transpose(1, 2), lse


def flash_attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    variant: tuple[Variant, Variant] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`aten._scaled_dot_product_flash_attention_for_cpu_backward`: the gradients of query, key and value."""
    dout, q, k, v, result = (each.transpose(1, 2) for each in (grad_out, query, key, value, out))
    keys, queries = variant or (None, None)
    found = attention_backward(
        dout, q, k, v, result, logsumexp, causal=is_causal, scale=scale, key_variant=keys, query_variant=queries
    )
    return tuple(each.transpose(1, 2) for each in found)  # type: ignore[return-value]


def _refuses(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> str:
    if dropout_p:
        return "it has no dropout"
    if attn_mask is not None:
        return "it has no mask but the causal one"
    if query.dtype not in _DTYPES or {key.dtype, value.dtype} != {query.dtype}:
        return f"it does not take {query.dtype}, {key.dtype} and {value.dtype}"
    if query.shape[-1] > 256 or key.shape != value.shape or query.shape[-1] != key.shape[-1]:
        return "heads have at most 256 elements, those of keys as many as those of values"
    if is_causal and query.shape[-2] != key.shape[-2]:
        return "ATen lets the first of several queries see the first key, the template the last query the last key"
    if query.shape[1] % key.shape[1] or any(each.stride(-1) != 1 for each in (query, key, value)):
        return "the elements of a head are not contiguous, or heads cannot be shared"
    if 0 in query.shape or 0 in key.shape:
        return "there is nothing to compute"
    return ""


def _refuses_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **others: Any) -> str:
    out, lse, *more = rest
    if grad_out.stride(-1) != 1 or out.stride(-1) != 1 or lse.stride(-1) != 1:
        return "the elements of a head are not contiguous"
    return _refuses(query, key, value, *more, **others)


def _work(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, **_: Any
) -> CallCost:
    products, scores, moved = _sizes(query, key, is_causal)
    return CallCost(2 * products, moved, 1, _REACHED, 2 * products, moved + 4 * scores, 3)


def _work_backward(grad_out: Tensor, query: Tensor, key: Tensor, *rest: Any, **_: Any) -> CallCost:
    products, scores, moved = _sizes(query, key, bool(rest[4]))
    # The template makes scores and their gradients twice, for keys and for queries; in parts they are made once.
    return CallCost(7 * products, 2 * moved, 3, _REACHED, 5 * products, 2 * moved + 8 * scores, 6)


def _sizes(query: Tensor, key: Tensor, causal: bool) -> tuple[float, int, int]:
    """Operations of one product with all scores, the bytes of the scores, and those of the operands and the result."""
    batch, heads, length, dim = query.shape
    pairs = batch * heads * length * key.shape[2]
    moved = 2 * (query.numel() + key.numel()) * query.itemsize
    return 2.0 * pairs * dim * (0.5 if causal else 1.0), pairs * query.itemsize, moved


def _launches(function: Any) -> Any:
    def made(variant: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Tensor], Sequence[Launch]]:
        return recorded(function, *args, variant=variant, **kwargs)

    return made


TEMPLATES: dict[str, Template] = {
    "aten._scaled_dot_product_flash_attention_for_cpu.default": Template(
        "flash_attention",
        _refuses,
        lambda query, *_, **__: variants(query.shape[-1]),
        _launches(flash_attention),
        _work,
    ),
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": Template(
        "flash_attention_backward",
        _refuses_backward,
        lambda grad_out, *_, **__: tuple(
            zip(key_variants(grad_out.shape[-1]), query_variants(grad_out.shape[-1]), strict=True)
        ),
        _launches(flash_attention_backward),
        _work_backward,
    ),
}
