"""The elementary functions of float32 against float64: errors in units in the last place, and special values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from monarch.compiler.loops.ir import Buffer, Index, Kernel, Load, Nest, Op, Store
from tests.compiler.kernels.cpp.built import build_all, run
from tests.sample import is_full

N, EVERY = (1 << 22, 1025) if is_full() else (1 << 20, 4099)

# Beside each function, the largest error allowed, in units in the last place of the result.
UNARY: dict[str, tuple[Callable[[np.ndarray], np.ndarray], float]] = {
    "exp": (np.exp, 1.1),
    "expm1": (np.expm1, 1.5),
    "log": (np.log, 1.0),
    "log1p": (np.log1p, 1.5),
    "tanh": (np.tanh, 2.5),
    "erf": (lambda x: torch.from_numpy(x).erf().numpy(), 1.5),
    "sigmoid": (lambda x: np.where(x < 0, np.exp(-abs(x)), 1) / (1 + np.exp(-abs(x))), 2.0),
    "sin": (np.sin, 0.51),
    "cos": (np.cos, 0.51),
    "sqrt": (np.sqrt, 0.51),
    "rsqrt": (lambda x: 1 / np.sqrt(x), 1.5),
    "reciprocal": (lambda x: 1 / x, 0.51),
}


def kernel_of(name: str, operands: int) -> Kernel:
    buffer = Buffer.contiguous(torch.float32, (N,))
    index = Index(0, (1,))
    body = [
        *(Load(at, index) for at in range(operands)),
        Op(name, tuple(range(operands)), torch.float32),
        Store(operands, index, operands),
    ]
    return Kernel(name, (buffer,) * operands, (buffer,), (Nest((N,), 0, tuple(body)),))


@pytest.fixture(scope="module")
def path() -> Path:
    return build_all([*(kernel_of(name, 1) for name in UNARY), kernel_of("pow", 2)])


def samples() -> torch.Tensor:
    """Of all float32: every EVERY-th, special values, and what lies close to zero and one. N in all."""
    bits = torch.arange(-(2**31), 2**31, EVERY, dtype=torch.int64)
    tiny = torch.arange(0, 3000)
    around = [base + torch.arange(-2000, 2000) for base in (0x3F800000, 0x7F7FF000, 0x00800000)]
    positive = torch.cat([tiny, *around, torch.tensor([0x7F800000, 0x7F800001, 0x7FC00000])])
    bits = torch.cat([positive, positive - 2**31, bits])[:N]
    values = torch.empty(N)
    values[: len(bits)] = bits.to(torch.int32).view(torch.float32)
    values[len(bits) :] = torch.linspace(-20, 20, N - len(bits))
    return values


def ulps(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """The errors, in units in the last place of the exact result rounded; NaN and infinity have to be the same."""
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float32)
    finite = np.isfinite(rounded)
    assert np.array_equal(np.isnan(found), np.isnan(rounded))
    # Within the last half unit before infinity, either is right.
    wrong = ~finite & ~np.isnan(rounded) & (found != rounded)
    assert not wrong.any() or np.abs(exact[wrong]).max() < 3.4028236e38 * (1 + 2**-22), "infinity too late"
    unit = np.spacing(np.abs(rounded[finite]))
    with np.errstate(invalid="ignore"):
        return np.where(
            np.isinf(found[finite]) & (np.abs(rounded[finite]) > 3.4028230e38),
            0,
            np.abs(found[finite].astype(np.float64) - exact[finite]) / unit,
        )


@pytest.mark.parametrize("name", UNARY)
def test_the_error_over_a_sample_of_all_floats(path: Path, name: str) -> None:
    reference, most = UNARY[name]
    x = samples()
    (found,) = run(path, kernel_of(name, 1), [x])
    with np.errstate(all="ignore"):
        exact = reference(x.numpy().astype(np.float64))
    errors = ulps(found.numpy(), exact)
    assert errors.max() <= most, (
        f"{errors.max():.3f} at {x.numpy()[np.isfinite(exact.astype(np.float32))][errors.argmax()]!r}"
    )


@pytest.mark.parametrize("name", ["expm1", "log1p", "tanh", "erf", "sin", "sqrt"])
def test_zeros_keep_their_sign(path: Path, name: str) -> None:
    x = torch.zeros(N)
    x[::2] = -0.0
    (found,) = run(path, kernel_of(name, 1), [x])
    assert torch.equal(found.view(torch.int32), x.view(torch.int32))


def test_pow(path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (N,), generator=generator).to(torch.int32).view(torch.float32).clone()
    y = torch.randn(N, generator=generator) * 4
    x[: N // 2] = torch.rand(N // 2, generator=generator) * 10
    y[: N // 4] *= 40
    y[N // 4 : N // 2] = y[N // 4 : N // 2].round()
    y[N // 2 : N // 2 + N // 4] = y[N // 2 : N // 2 + N // 4].round()
    (found,) = run(path, kernel_of("pow", 2), [x, y])
    with np.errstate(all="ignore"):
        exact = np.power(x.numpy().astype(np.float64), y.numpy().astype(np.float64))
    assert ulps(found.numpy(), exact).max() <= 0.51


def test_pow_of_special_values(path: Path) -> None:
    inf, nan = float("inf"), float("nan")
    values = torch.tensor(
        [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, 1e38, 1e-44, inf, -inf, nan, 2.5, -7.0]
    )
    pairs = torch.cartesian_prod(values, values)
    x, y = torch.ones(N), torch.ones(N)
    x[: len(pairs)], y[: len(pairs)] = pairs.unbind(1)
    (found,) = run(path, kernel_of("pow", 2), [x, y])
    expected = torch.pow(x.double(), y.double()).float()
    same = (found.view(torch.int32) == expected.view(torch.int32)) | (found.isnan() & expected.isnan())
    close = (found - expected).abs() <= 2e-7 * expected.abs()
    assert bool((same | close).all()), [(x[i], y[i], found[i], expected[i]) for i in (~(same | close)).nonzero()[:5, 0]]
