"""Complex tensors and Fourier transforms, forward and backward, against plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import monarch
from monarch.compiler.plan import Plan
from monarch.language import Mesh
from tests.language.partitioned import partitioned_mesh


def _filter(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """A layer in the frequency domain, as of FNet and Fourier neural operators."""
    return torch.fft.irfft(torch.fft.rfft(x.real) * w[:5], n=8) + torch.fft.fft2(x).abs()


def _parts(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x.imag * w.angle() + torch.view_as_real(x * w).sum(-1) + (1j * x).conj().imag


def _rotary(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    angles = torch.polar(torch.ones(8), w.imag)
    pairs = torch.view_as_complex(torch.stack([x.real, x.imag], -1))
    return torch.view_as_real(pairs * angles).flatten(-2)


def _products(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x @ x.mH + torch.complex(x.real, x.real) @ w[:, None] + torch.tensor(2 - 1j) / (3 + x[:, :1].abs())


def _in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.real.mul_(2)
    y.conj()[:, 1:3] += w[1:3]
    torch.view_as_real(y)[..., 1] -= 1
    z = torch.stack([x.real, x.imag], -1) * 1
    torch.view_as_complex(z).mul_(1j)
    return y * torch.fft.fftshift(torch.fft.ifft(y, norm="ortho"), dim=0) + z.sum(-1)


LAYERS: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [_filter, _parts, _rotary, _products, _in_place]


def step(layer: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = layer(x, w)
        loss = (y * y.conj()).real.sum() if y.is_complex() else y.square().sum()
        return y, *torch.autograd.grad(loss, [x, w], allow_unused=True)

    return run


@pytest.mark.sample(10)
@pytest.mark.parametrize("door", ["program", "eager"])
@pytest.mark.parametrize("layout", ["[@a, -]", "[-, @b]", "[@b, @a]"])
@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.__name__)
def test_values_and_gradients_are_pytorch_s(layer: Callable[..., Any], layout: str, door: str) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(4, 8, dtype=torch.complex128), torch.randn(8, dtype=torch.complex128)
    x, w = (x.to(torch.complex64), w.to(torch.complex64)) if layer is _rotary else (x, w)
    run = step(layer)
    with partitioned_mesh(kernels=True, a=2, b=2) as mesh:
        placed = monarch.distribute(x, mesh, layout), monarch.distribute(w, mesh)
        found = (monarch.program(run) if door == "program" else run)(*placed)
        for ours, theirs in zip(found, run(x, w), strict=True):
            if theirs is None:
                assert ours is None
            else:
                torch.testing.assert_close(ours.full_tensor(), theirs)


def test_a_plan_keeps_complex_constants(tmp_path: Path) -> None:
    mesh = Mesh.abstract(data=2)
    twiddle = torch.randn(4, dtype=torch.complex128).conj()

    @monarch.program(mesh=mesh)
    def turn(x: "c128[4@data]") -> Any:  # type: ignore[name-defined]
        return (x * twiddle).div(2j)

    plan = turn.compile(torch.zeros(4, dtype=torch.complex128))
    plan.save(str(tmp_path / "turn.mplan"))
    found = Plan.load(str(tmp_path / "turn.mplan"))
    (constant,) = found.constants.values()
    assert torch.equal(constant, twiddle) and 2j in [a for each in found.instructions for a in each.args]


def test_a_conjugate_is_placed_as_its_values(mesh: Mesh) -> None:
    x = torch.randn(4, dtype=torch.complex64)
    assert torch.equal(monarch.distribute(x.conj(), mesh).full_tensor(), x.conj())
    assert torch.equal(monarch.program(lambda x: x * 2, mesh=mesh)(x.conj()).full_tensor(), x.conj() * 2)
    assert torch.equal(monarch.program(lambda x: x * 2, mesh=mesh)(x.conj().imag).full_tensor(), -x.imag * 2)
