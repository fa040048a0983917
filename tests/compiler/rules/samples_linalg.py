"""Samples of linear algebra, distances, gated units and samplers."""

from __future__ import annotations

import torch

from tests.compiler.rules.dense import Sample, call
from tests.compiler.rules.samples_layers import made
from tests.compiler.rules.values import real, unit

aten = torch.ops.aten


def linalg_samples() -> list[Sample]:
    x, right = real(4, 2, 3, 3), real(4, 2, 3, 2)
    positive = x @ x.mT + 3 * torch.eye(3, dtype=x.dtype)
    factor = torch.linalg.cholesky(positive)
    lu, pivots, _ = made(aten.linalg_lu_factor_ex.default, x)
    ld, ld_pivots, _ = made(aten.linalg_ldl_factor_ex.default, positive)
    reflectors, tau = made(aten.geqrf.default, x)
    return [
        *(call(op, x) for op in (aten.linalg_inv_ex.default, aten.linalg_qr.default, aten.geqrf.default)),
        *(call(op, x) for op in (aten.linalg_lu.default, aten.linalg_lu_factor_ex.default, aten._linalg_det.default)),
        *(
            call(op, x)
            for op in (aten._linalg_svd.default, aten._linalg_slogdet.default, aten.linalg_matrix_exp.default)
        ),
        call(aten.linalg_inv_ex.default, real(3, 3)),
        call(aten.linalg_qr.default, x, "r"),
        call(aten._linalg_svd.default, x, False, False),
        call(aten._linalg_eigh.default, positive),
        call(aten._linalg_eigh.default, positive, "L", False),
        call(aten.cholesky.default, positive),
        call(aten.linalg_cholesky_ex.default, positive),
        call(aten.linalg_ldl_factor_ex.default, positive),
        call(aten.cholesky_inverse.default, factor),
        call(aten.cholesky_solve.default, right, factor),
        call(aten.linalg_solve_triangular.default, factor, right, upper=False),
        call(aten.linalg_solve_triangular.default, factor[0, 0], right, upper=False),
        call(aten.linalg_solve_triangular.default, factor, right.mT.contiguous(), upper=False, left=False),
        call(aten.linalg_lu_solve.default, lu, pivots, right.mT.contiguous(), left=False),
        call(aten.lu_unpack.default, lu, pivots),
        call(aten.linalg_lu_solve.default, lu, pivots, right),
        call(aten.linalg_ldl_solve.default, ld, ld_pivots, right),
        call(aten.linalg_householder_product.default, reflectors, tau),
        call(aten.ormqr.default, reflectors, tau, right),
        call(aten._linalg_solve_ex.default, x, right),
        call(aten._linalg_solve_ex.default, x, real(4, 2, 3)),
        call(aten._linalg_solve_ex.default, x[0, 0], right),
        call(aten._cdist_forward.default, real(2, 4, 3), real(2, 6, 3), 2.0, None),
        call(aten._cdist_forward.default, real(4, 3), real(6, 3), 1.0, None),
        call(
            aten._cdist_backward.default, real(2, 4, 6), real(2, 4, 3), real(2, 6, 3), 1.0, torch.ones(2, 4, 6).double()
        ),
    ]


def fourier_samples() -> list[Sample]:
    """Fourier transforms, complex numbers and their parts; gradients of draws."""
    x, z = real(4, 6, 8), torch.complex(real(4, 6, 8), real(4, 6, 8).flip(0))
    share = real(4, 6).abs() % 0.8 + 0.1
    return [
        call(aten._fft_r2c.default, x, [2], 0, True),
        call(aten._fft_r2c.default, x, [1, 2], 1, False),
        call(aten._fft_c2c.default, z, [0, 2], 2, True),
        call(aten._fft_c2r.default, z, [1], 2, 10),
        call(aten.view_as_real.default, z),
        call(aten.conj_physical.default, z),
        call(aten.complex.default, x, x.flip(0)),
        call(aten.polar.default, x, x.flip(0)),
        call(aten._standard_gamma_grad.default, share + 1, share),
        call(aten._dirichlet_grad.default, share, share + 1, share + 3),
    ]


def sampler_samples() -> list[Sample]:
    x, grid = real(4, 2, 3, 3), unit(4, 5, 3, 2)
    volume, places = real(4, 2, 3, 3, 3), unit(4, 2, 2, 2, 3)
    return [
        call(aten.glu.default, real(4, 6)),
        call(aten.glu.default, real(4, 6), 0),
        call(aten.glu_backward.default, real(4, 3), real(4, 6), 1),
        call(aten.im2col.default, real(4, 2, 5, 3), [2, 3], [1, 1], [1, 0], [2, 1]),
        call(aten.im2col.default, real(2, 5, 3), [2, 3], [1, 1], [1, 0], [2, 1]),
        call(aten.col2im.default, real(4, 12, 3), [5, 3], [2, 3], [1, 1], [1, 0], [2, 1]),
        call(aten.affine_grid_generator.default, real(4, 2, 3), [4, 1, 5, 3], False),
        call(aten.affine_grid_generator.default, real(4, 3, 4), [4, 1, 2, 5, 3], True),
        call(aten.grid_sampler_2d.default, x, grid, 0, 0, False),
        call(aten.grid_sampler_2d_backward.default, real(4, 2, 5, 3), x, grid, 0, 0, False, [True, True]),
        call(aten.grid_sampler_3d.default, volume, places, 0, 0, False),
        call(aten.grid_sampler_3d_backward.default, real(4, 2, 2, 2, 2), volume, places, 0, 0, False, [True, True]),
        call(aten.max_unpool2d.default, x, torch.arange(9).view(3, 3).expand(4, 2, 3, 3).contiguous(), [3, 3]),
        call(
            aten.max_unpool3d.default,
            real(4, 2, 1, 2, 2),
            torch.arange(4).view(1, 2, 2).expand(4, 2, 1, 2, 2).contiguous(),
            [1, 2, 2],
            [1, 1, 1],
            [0, 0, 0],
        ),
        call(aten.channel_shuffle.default, real(4, 6, 2, 4), 3),
        call(aten.native_channel_shuffle.default, real(4, 6, 2, 4), 3),
    ]
