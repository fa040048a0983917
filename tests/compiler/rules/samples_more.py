"""Samples of ops that look for values among others, of losses by margins, and of rarer layers and matrices."""

from __future__ import annotations

import torch

from tests.compiler.rules.dense import Sample, call
from tests.compiler.rules.samples_layers import made
from tests.compiler.rules.values import below, distinct, real, unit

aten = torch.ops.aten


def search_samples() -> list[Sample]:
    row, rows = torch.linspace(0, 1, 5).double(), unit(4, 2, 6).sort(-1).values
    x = unit(4, 6)
    return [
        call(aten.searchsorted.Tensor, row, x),
        call(aten.searchsorted.Tensor, rows, unit(4, 2, 8)),
        call(aten.searchsorted.Tensor, rows.flip(-1), unit(4, 2, 8), sorter=torch.arange(5, -1, -1).expand(4, 2, 6)),
        call(aten.searchsorted.Scalar, row, 0.3),
        call(aten.bucketize.Tensor, x, row),
        call(aten.isin.Tensor_Tensor, below(6, 4, 6), below(6, 2, 2)),
        call(aten.isin.Tensor_Scalar, below(6, 4, 6), 2),
        call(aten.histc.default, x, 5, 0.0, 1.0),
        call(aten.histc.default, x, 5),
        call(aten.histogram.bins_tensor, x, row),
        call(aten.histogram.bins_tensor, x, row, weight=unit(4, 6)),
        call(aten.histogram.bins_tensor, x, row, density=True),
        call(aten._histogramdd_from_bin_tensors.default, unit(4, 2), [row, row]),
        call(aten._histogramdd_from_bin_tensors.default, unit(4, 2), [row, row], weight=unit(4)),
        call(aten.take.default, x, below(24, 4, 2)),
        call(aten.put.default, x, distinct(4, 2).long(), real(4, 2)),
        call(aten.put.default, x, below(24, 4, 2), real(4, 2), True),
        call(aten.put.default, x, below(24, 4, 2), real(8), True),
        *(
            call(aten.index_reduce.default, x, 1, below(6, 8), unit(4, 8), how, include_self=include)
            for how, include in (("prod", True), ("mean", False), ("amax", True))
        ),
    ]


def margin_samples() -> list[Sample]:
    x, target, weight = real(4, 6), below(6, 4), unit(6)
    several = torch.tensor([[2, 0, -1, 0, 0, 0], [1, 3, 5, -1, 0, 0], [0, -1, 0, 0, 0, 0], [4, 2, -1, 0, 0, 0]])
    samples = [
        call(aten.multi_margin_loss.default, x[0], target[0]),
        call(aten.multilabel_margin_loss_forward.default, x[0], several[0], 1),
    ]
    for reduction in range(3):
        one = real(4) if reduction == 0 else real()
        loss, is_target = made(aten.multilabel_margin_loss_forward.default, x, several, reduction)
        samples += [
            call(aten.multi_margin_loss.default, x, target, 1, 1.0, weight, reduction),
            call(aten.multi_margin_loss.default, x, target, reduction=reduction),
            call(aten.multi_margin_loss_backward.default, one, x, target, 1, 1.0, weight, reduction),
            call(aten.multilabel_margin_loss_forward.default, x, several, reduction),
            call(aten.multilabel_margin_loss_backward.default, real(*loss.shape), x, several, reduction, is_target),
        ]
    return samples


def rare_samples() -> list[Sample]:
    plane, volume, matrices = real(2, 4, 6, 6), real(2, 4, 4, 4, 4), real(4, 2, 3, 3)
    indices = {
        plane: made(aten.fractional_max_pool2d.default, plane, [2, 2], [3, 3], unit(2, 4, 2))[1],
        volume: made(aten.fractional_max_pool3d.default, volume, [2, 2, 2], [2, 2, 2], unit(2, 4, 3))[1],
    }
    lu, pivots, _ = made(aten.linalg_lu_factor_ex.default, matrices)
    return [
        call(aten.fractional_max_pool2d.default, plane, [2, 2], [3, 3], unit(2, 4, 2)),
        call(aten.fractional_max_pool2d_backward.default, real(2, 4, 3, 3), plane, [2, 2], [3, 3], indices[plane]),
        call(aten.fractional_max_pool3d.default, volume, [2, 2, 2], [2, 2, 2], unit(2, 4, 3)),
        call(
            aten.fractional_max_pool3d_backward.default,
            real(2, 4, 2, 2, 2),
            volume,
            [2, 2, 2],
            [2, 2, 2],
            indices[volume],
        ),
        *(
            sample
            for op, backward in (
                (aten._upsample_bilinear2d_aa.default, aten._upsample_bilinear2d_aa_backward.default),
                (aten._upsample_bicubic2d_aa.default, aten._upsample_bicubic2d_aa_backward.default),
            )
            for sample in (
                call(op, plane, [4, 4], False),
                call(backward, real(2, 4, 4, 4), [4, 4], [2, 4, 6, 6], False),
            )
        ),
        call(aten.diag_embed.default, real(4, 6)),
        call(aten.diag_embed.default, real(4, 2, 3), 1, 0, 2),
        call(aten.block_diag.default, [real(2, 4), real(4, 2)]),
        call(aten._trilinear.default, real(4, 6), real(2, 6, 8), real(4, 8), [1, 3], [0], [1, 2], [2, 3]),
        call(aten._trilinear.default, real(4, 6), real(2, 6, 8), real(4, 8), [1, 3], [0], [1, 2], [2]),
        call(aten.linalg_cross.default, real(4, 3, 6), real(4, 3, 1), dim=1),
        call(aten.lu_unpack.default, lu, pivots),
        call(aten.lu_unpack.default, lu, pivots, unpack_data=False),
        call(aten.lu_unpack.default, lu, pivots, unpack_pivots=False),
        call(aten.linalg_eig.default, matrices @ matrices.mT),
        call(aten.linalg_pinv.atol_rtol_tensor, matrices, atol=unit(4, 2), rtol=torch.tensor(0.1).double()),
        call(aten.linalg_pinv.atol_rtol_tensor, matrices @ matrices.mT, hermitian=True),
        call(aten.triangular_solve.default, real(4, 2, 3, 2), matrices.triu() + 3 * torch.eye(3)),
    ]
