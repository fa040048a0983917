"""Complex tensors, distributions and checks on real workers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import monarch
from monarch.compiler.errors import DeviceCheckError
from monarch.distributed import DistributedTensor, Mesh

pytestmark = pytest.mark.sample(1, of="kernels")


def test_complex_sums_cross_the_workers_and_come_back() -> None:
    x, w = torch.randn(4, 8, dtype=torch.complex64), torch.randn(8, 4, dtype=torch.complex64)

    def run(x: torch.Tensor, w: torch.Tensor) -> Any:
        w = w.detach().requires_grad_()
        y = torch.fft.fft(x @ w, dim=0) * 2j
        return y, *torch.autograd.grad((y * y.conj()).real.sum(), [w])

    with Mesh(data=2) as mesh:
        for layouts in (("[@data, -]", "[-, -]"), ("[-, @data]", "[@data, -]")):
            placed = [monarch.distribute(each, mesh, layout) for each, layout in zip((x, w), layouts, strict=True)]
            for _ in range(2):
                for ours, theirs in zip(monarch.program(run)(*placed), run(x, w), strict=True):
                    torch.testing.assert_close(ours.full_tensor(), theirs, rtol=1e-4, atol=1e-4)


def test_draws_are_those_of_any_mesh() -> None:
    found = []
    for dims in ({"data": 2}, {"data": 1}):
        with Mesh(**dims) as mesh:
            torch.manual_seed(4)
            rate = monarch.distribute(torch.linspace(0.1, 40, 8), mesh, "[@data]")

            @monarch.program
            def draw(rate: torch.Tensor) -> Any:
                normal = torch.distributions.Normal(rate, rate)
                return (
                    torch.poisson(rate),
                    torch._standard_gamma(rate),
                    normal.sample(),
                    torch.multinomial(rate, 4, True),
                )

            found.append([value.full_tensor() for value in draw(rate)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_whole_numbers_become_the_default_dtype_also_on_workers_that_started_before_it_was_set() -> None:
    def run(x: torch.Tensor) -> Any:
        first = x.sqrt()
        dtype = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64 if dtype == torch.float32 else torch.float32)
        other = x / 3
        torch.set_default_dtype(dtype)
        return first, other, torch.arange(4) / 3, x * (1 / 3), torch.exp(x), torch.where(x > 1, x / 7, 0.5)

    x, before = torch.arange(4), torch.get_default_dtype()
    with Mesh(data=2) as mesh:
        step, placed = monarch.program(run), monarch.distribute(x, mesh, "[@data]")
        try:
            for dtype in (torch.float64, torch.float32, torch.float64):
                torch.set_default_dtype(dtype)
                for found in (step(placed), run(placed)):
                    for ours, theirs in zip(found, run(x), strict=True):
                        ours = ours.full_tensor() if isinstance(ours, DistributedTensor) else ours
                        rtol = 1e-14 if theirs.dtype == torch.float64 else 1e-6
                        torch.testing.assert_close(ours, theirs, rtol=rtol, atol=0)
        finally:
            torch.set_default_dtype(before)


def test_a_check_that_fails_fails_the_step_and_leaves_the_state() -> None:
    with Mesh(data=2) as mesh:
        total = monarch.distribute(torch.zeros(4), mesh, "[@data]")

        @monarch.program(mesh=mesh)
        def step(x: torch.Tensor) -> torch.Tensor:
            nonlocal total
            total = total + x
            if not x.isfinite().all():
                raise ValueError(f"not finite: {x}")
            # said here: TorchDynamo, once it has run in a process, leaves arguments unchecked where nobody asks for it
            return torch.distributions.Exponential(x, validate_args=True).log_prob(x * 2).sum()

        expected = torch.distributions.Exponential(torch.ones(4)).log_prob(torch.full((4,), 2.0)).sum()
        for _ in range(3):
            torch.testing.assert_close(step(torch.ones(4)).full_tensor(), expected)
        for bad, words in (
            (torch.tensor([1.0, 1, 1, torch.nan]), "if not x.isfinite"),
            (-torch.ones(4), "rate of Exp"),
        ):
            with pytest.raises(DeviceCheckError, match=words) as raised:
                step(bad).item()
            assert isinstance(raised.value, ValueError)
            assert total.full_tensor().tolist() == [3.0] * 4
        assert step(torch.ones(4)).item() == expected


class Diverged(ArithmeticError):
    """What the script raises for a loss that is not finite."""


def test_a_failed_check_is_of_the_class_that_its_raise_names() -> None:
    with Mesh(data=2) as mesh:

        @monarch.program(mesh=mesh)
        def step(x: torch.Tensor) -> torch.Tensor:
            if not x.isfinite().all():
                raise Diverged("not finite")
            if (x > 100).any():
                raise TypeError("too large")
            return x.sum()

        for bad, kind in ((torch.nan, Diverged), (1e3, TypeError)):
            with pytest.raises(kind, match="values that do not pass") as raised:
                step(torch.full((4,), bad)).item()
            assert isinstance(raised.value, DeviceCheckError)
            again = pickle.loads(pickle.dumps(raised.value))
            assert isinstance(again, kind)
            assert (str(again), again.facts) == (str(raised.value), raised.value.facts)
        assert step(torch.ones(4)).item() == 4.0


def test_values_that_share_a_handle_are_told_apart_with_their_pending_sums() -> None:
    """A mean and its copy are one pending sum, and one of them is taken by a later step."""
    with Mesh(data=2) as mesh:
        x = monarch.distribute(torch.arange(8.0), mesh, "[@data]")
        total = x.sum()
        kept, copied = total.detach(), total.clone()
        assert (x * 2).sum().item() == 56
        assert (copied * 3).item() == 84
        assert kept.item() == 28 and copied.item() == 28
