"""Samples of layers: norms, losses, attention, convolution, pooling, and of what makes tensors from numbers."""

from __future__ import annotations

from typing import Any

import torch

from monarch.compiler import ops
from tests.compiler.rules.dense import Sample, call, trace
from tests.compiler.rules.values import below, real, unit

aten, prims = torch.ops.aten, torch.ops.prims
NONE, MEAN, SUM = 0, 1, 2


def made(op: Any, *args: Any, **kwargs: Any) -> list[Any]:
    """What an op gives: forward results as backward operands."""
    return trace(call(op, *args, **kwargs)).results


def norm_samples() -> list[Sample]:
    x, weight, bias, grad = real(4, 6, 8), real(8), real(8), real(4, 6, 8)
    samples: list[Sample] = []
    for shape, w, b in (([8], weight, bias), ([8], weight, None), ([8], None, None), ([6, 8], real(6, 8), real(6, 8))):
        _, mean, rstd = made(aten.native_layer_norm.default, x, shape, w, b, 1e-5)
        mask = [True, w is not None, b is not None]
        samples += [
            call(aten.native_layer_norm.default, x, shape, w, b, 1e-5),
            call(aten.native_layer_norm_backward.default, grad, x, shape, mean, rstd, w, b, mask),
        ]
    for w in (weight, None):
        _, rstd = made(aten._fused_rms_norm.default, x, [8], w, 1e-5)
        samples += [
            call(aten._fused_rms_norm.default, x, [8], w, 1e-5),
            call(aten._fused_rms_norm_backward.default, grad, x, [8], rstd, w, [True, w is not None]),
            call(aten.rms_norm.default, x, [8], w, 1e-5),
        ]
    image, gamma, beta, back = real(4, 8, 3, 2), real(8), real(8), real(4, 8, 3, 2)
    for groups, w, b in ((4, gamma, beta), (2, None, None), (1, gamma, beta)):
        sizes = (4, 8, 6, groups)
        _, mean, rstd = made(aten.native_group_norm.default, image, w, b, *sizes, 1e-5)
        mask = [True, w is not None, b is not None]
        samples += [
            call(aten.native_group_norm.default, image, w, b, *sizes, 1e-5),
            call(aten.native_group_norm_backward.default, back, image, mean, rstd, w, *sizes, mask),
        ]
    return samples + batch_norm_samples(image, gamma, beta, back)


def batch_norm_samples(x: Any, gamma: Any, beta: Any, grad: Any) -> list[Sample]:
    stats = (real(8), unit(8))
    samples: list[Sample] = []
    for training in (True, False):
        rest = (training, 0.1, 1e-5)
        _, mean, rstd = made(aten.native_batch_norm.default, x, gamma, beta, *stats, *rest)
        saved = (gamma, *stats, mean, rstd, training, 1e-5)
        samples += [
            call(aten.native_batch_norm.default, x, gamma, beta, *stats, *rest),
            call(aten._native_batch_norm_legit.default, x, gamma, beta, *stats, *rest),
            call(aten._native_batch_norm_legit_functional.default, x, gamma, beta, *stats, *rest),
            call(aten.native_batch_norm_backward.default, grad, x, *saved, [True, True, True]),
            call(aten.native_batch_norm_backward.default, grad, x, *saved, [True, False, False]),
        ]
    samples += [
        call(aten.native_batch_norm.default, x, None, None, None, None, True, 0.1, 1e-5),
        call(aten._native_batch_norm_legit.no_stats, x, gamma, beta, True, 0.1, 1e-5),
        call(aten._batch_norm_with_update.default, x, gamma, beta, *stats, 0.1, 1e-5),
        call(aten._batch_norm_with_update_functional.default, x, gamma, beta, *stats, 0.1, 1e-5),
        call(aten._batch_norm_no_update.default, x, gamma, beta, *stats, 0.1, 1e-5),
    ]
    _, mean, rstd, reserve = made(aten._batch_norm_with_update.default, x, gamma, beta, *stats, 0.1, 1e-5)
    back = aten.batch_norm_backward.default
    samples += [
        call(back, grad, x, gamma, *stats, mean, rstd, True, 1e-5, [True, True, True], reserve),
        call(back, grad, x, gamma, *stats, mean, rstd, False, 1e-5, [True, True, True], reserve),
    ]
    return samples


def loss_samples() -> list[Sample]:
    samples: list[Sample] = []
    scores, classes, weight = real(8, 6), below(6, 8), unit(6)
    image, pixels = real(4, 6, 2, 3), below(6, 4, 2, 3)
    for reduction in (NONE, MEAN, SUM):
        for w in (None, weight):
            loss, total = made(aten.nll_loss_forward.default, scores, classes, w, reduction, 2)
            assert loss is not None
            samples += [
                call(aten.nll_loss_forward.default, scores, classes, w, reduction, 2),
                call(aten.nll_loss_backward.default, real(*loss.shape), scores, classes, w, reduction, 2, total),
            ]
        loss, total = made(aten.nll_loss2d_forward.default, image, pixels, weight, reduction, 2)
        assert loss is not None
        samples += [
            call(aten.nll_loss2d_forward.default, image, pixels, weight, reduction, 2),
            call(aten.nll_loss2d_backward.default, real(*loss.shape), image, pixels, weight, reduction, 2, total),
        ]
        x, target, probability = real(4, 6), real(4, 6), unit(4, 6)
        one = real(4, 6) if reduction == NONE else real()
        samples += [
            call(aten.mse_loss.default, x, target, reduction),
            call(aten.l1_loss.default, x, target, reduction),
            call(aten.smooth_l1_loss.default, x, target, reduction),
            call(aten.huber_loss.default, x, target, reduction),
            call(aten.soft_margin_loss.default, x, target.sign(), reduction),
            call(aten.binary_cross_entropy.default, probability, unit(4, 6), unit(6), reduction),
            call(aten.binary_cross_entropy.default, probability, unit(4, 6), None, reduction),
            call(aten.binary_cross_entropy_with_logits.default, x, unit(4, 6), None, unit(6), reduction),
            call(aten.mse_loss_backward.default, one, x, target, reduction),
            call(aten.smooth_l1_loss_backward.default, one, x, target, reduction, 1.0),
            call(aten.huber_loss_backward.default, one, x, target, reduction, 1.0),
            call(aten.soft_margin_loss_backward.default, one, x, target.sign(), reduction),
            call(aten.binary_cross_entropy_backward.default, one, probability, unit(4, 6), unit(4, 6), reduction),
        ]
    samples.append(call(aten.nll_loss_forward.default, real(6), below(6), None, SUM, -100))
    return samples


def attention_samples() -> list[Sample]:
    q, k, v, grad = real(2, 4, 3, 8), real(2, 4, 6, 8), real(2, 4, 6, 8), real(2, 4, 3, 8)
    few_k, few_v = real(2, 2, 6, 8), real(2, 2, 6, 8)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    samples: list[Sample] = []
    for mask in (None, real(3, 6), real(2, 1, 3, 6), real(2, 4, 3, 6)):
        out, sums = made(forward, q, k, v, attn_mask=mask)
        samples += [
            call(forward, q, k, v, attn_mask=mask),
            call(backward, grad, q, k, v, out, sums, 0.0, False, attn_mask=mask),
            call(aten.scaled_dot_product_attention.default, q, k, v, mask),
            call(aten.scaled_dot_product_attention.default, q, few_k, few_v, mask, enable_gqa=True),
        ]
    out, sums = made(forward, q, k, v, 0.0, True, scale=0.3)
    return [
        *samples,
        call(forward, q, k, v, 0.0, True, scale=0.3),
        call(backward, grad, q, k, v, out, sums, 0.0, True, scale=0.3),
    ]


def convolution_samples() -> list[Sample]:
    samples: list[Sample] = []
    plain = ([1, 1], [1, 1], [1, 1])
    for transposed, groups in ((False, 1), (False, 2), (False, 4), (True, 1), (True, 2)):
        x = real(4, 8, 4, 4)
        weight = real(8 if transposed else 12, (12 if transposed else 8) // groups, 3, 3)
        rest = (*plain, transposed, [0, 0], groups)
        for bias in (real(12), None):
            samples.append(call(aten.convolution.default, x, weight, bias, *rest))
        mask = [True, True, True]
        grad = real(4, 12, 4, 4)
        samples.append(call(aten.convolution_backward.default, grad, x, weight, [12], *rest, mask))
        samples.append(call(aten.convolution_backward.default, grad, x, weight, None, *rest, [False, True, False]))
    samples += [
        call(aten.convolution.default, real(4, 8, 6), real(4, 8, 3), None, [1], [0], [1], False, [0], 1),
    ]
    return samples + pool_samples()


def pool_samples() -> list[Sample]:
    samples: list[Sample] = []
    for n in (1, 2, 3):

        def op(name: str, n: int = n) -> Any:
            return getattr(aten, name.replace("#", str(n))).default

        x = real(2, 4, *[4] * n)
        half = real(2, 4, *[2] * n)
        window = ([2] * n, [2] * n, [0] * n)
        samples += [
            call(op("avg_pool#d"), x, [2] * n),
            call(op("adaptive_avg_pool#d"), x, [2] * n),
            call(op("adaptive_max_pool#d"), x, [2] * n),
            call(op("upsample_nearest#d"), x, [8] * n),
            call(op("_upsample_nearest_exact#d"), x, [8] * n),
            call(op("upsample_nearest#d_backward"), real(2, 4, *[8] * n), [8] * n, [2, 4, *[4] * n]),
            call(op("_upsample_nearest_exact#d_backward"), real(2, 4, *[8] * n), [8] * n, [2, 4, *[4] * n]),
            call(op("reflection_pad#d"), x, [1] * (2 * n)),
            call(op("replication_pad#d"), x, [1] * (2 * n)),
            call(op("reflection_pad#d_backward"), real(2, 4, *[6] * n), x, [1] * (2 * n)),
            call(op("replication_pad#d_backward"), real(2, 4, *[6] * n), x, [1] * (2 * n)),
        ]
        if n > 1:
            _, at = made(op("max_pool#d_with_indices"), x, [2] * n)
            _, where = made(op("adaptive_max_pool#d"), x, [2] * n)
            samples += [
                call(op("max_pool#d_with_indices"), x, [2] * n),
                call(op("max_pool#d_with_indices"), real(4, *[4] * n), [2] * n),
                call(op("max_pool#d_with_indices_backward"), half, x, *window, [1] * n, False, at),
                call(op("adaptive_max_pool#d_backward"), half, x, where),
                call(op("avg_pool#d_backward"), half, x, *window, False, True, None),
                call(op("_adaptive_avg_pool#d"), x, [2] * n),
                call(op("_adaptive_avg_pool#d_backward"), half, x),
            ]
    line, plane, space = real(2, 4, 4), real(2, 4, 4, 4), real(2, 4, 2, 2, 2)
    samples += [
        call(aten.upsample_nearest2d.vec, plane, None, [2.0, 2.0]),
        call(aten.upsample_linear1d.default, line, [8], False),
        call(aten.upsample_linear1d_backward.default, real(2, 4, 8), [8], [2, 4, 4], False),
        call(aten.upsample_bilinear2d.default, plane, [8, 8], False),
        call(aten.upsample_bilinear2d_backward.default, real(2, 4, 8, 8), [8, 8], [2, 4, 4, 4], False),
        call(aten.upsample_bicubic2d.default, plane, [8, 8], False),
        call(aten.upsample_bicubic2d_backward.default, real(2, 4, 8, 8), [8, 8], [2, 4, 4, 4], False),
        call(aten.upsample_trilinear3d.default, space, [4, 4, 4], False),
        call(aten.upsample_trilinear3d_backward.default, real(2, 4, 4, 4, 4), [4, 4, 4], [2, 4, 2, 2, 2], False),
        call(aten.pixel_shuffle.default, plane, 2),
        call(aten.pixel_unshuffle.default, plane, 2),
    ]
    return samples


def factory_samples() -> list[Sample]:
    x = real(3)
    f64, i64 = torch.float64, torch.int64
    samples = [
        call(aten.full.default, [4, 6], 2.5, dtype=f64),
        call(aten.zeros.default, [4, 6]),
        call(aten.ones.default, [4, 6]),
        call(aten.empty.memory_format, [4, 6], shape_only=True),
        call(aten.empty_strided.default, [4, 6], [1, 4], shape_only=True),
        call(aten.new_full.default, x, [4, 6], 2.0),
        call(aten.new_zeros.default, x, [4, 6]),
        call(aten.new_ones.default, x, [4, 6]),
        call(aten.new_empty.default, x, [4, 6], shape_only=True),
        call(aten.new_empty_strided.default, x, [4, 6], [6, 1], shape_only=True),
        call(aten.scalar_tensor.default, 2.0),
        call(aten.arange.default, 12),
        call(aten.arange.start, 2, 14, dtype=f64),
        call(aten.arange.start_step, 1, 25, 2),
        call(aten.arange.start_step, 0.5, 1.7, 0.1, dtype=f64),
        call(aten.arange.start_step, 12, 0, -1, dtype=torch.float32),
        call(prims.iota.default, 12, start=3, step=2, dtype=i64, device=torch.device("cpu"), requires_grad=False),
        call(aten.eye.default, 4),
        call(aten.eye.m, 4, 6),
        call(aten.linspace.default, 0, 1, 4),
        call(aten.logspace.default, 0, 1, 4),
        call(aten.tril_indices.default, 4, 4),
        call(aten.triu_indices.default, 4, 4),
    ]
    for distribution, dtype in (("uniform", f64), ("normal", torch.float32), ("bits", i64)):
        for seed in (7, torch.tensor(7)):
            samples.append(call(ops.random, distribution, [4, 6], dtype, seed, 3, [4, 6], [[], []]))
    return samples


def our_samples() -> list[Sample]:
    """Ops of ours as they stand where an earlier mesh dim of size 1 has been done."""
    return [
        call(ops.fill_padding, real(4, 6), 0, 3, 0.0, []),
        call(ops.fill_padding, real(4, 6), 1, 4, 1.0, []),
        call(ops.in_range, below(7, 4, 6), 7, None),
        call(ops.mean_shard, real(4, 6), [1], False, 6, None),
        call(ops.mean_shard, real(4, 6), [0, 1], True, 24, torch.float32),
    ]
