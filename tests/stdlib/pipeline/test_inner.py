"""Gradients that a stage computes in its forward pass, by `torch.autograd.grad` and by transforms of `torch.func`:
equal to those of the model without stages, or refused with the line."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.errors import ProgramError
from monarch.stdlib.pipeline import pipeline
from tests.language.partitioned import partitioned_mesh


def energy(h: Any) -> Any:
    return (h.sin() * h).sum()


def gradient(of: Any, by: Any) -> Any:
    return torch.autograd.grad(of, by, create_graph=True)[0]


def centered(h: Any) -> Any:
    return h - h.mean(0)


def of_batch(of: Any, by: Any, given: Any) -> Any:
    return torch.autograd.grad(of, by, given, create_graph=True, is_grads_batched=True)[0]


def unit(h: Any) -> Any:
    """The gradients of each column of h, for a batch of them."""
    return torch.eye(3, dtype=h.dtype).unsqueeze(1).expand(3, h.shape[0], 3)


Inner = Callable[[Any, Any], Any]
CASES: dict[str, Inner] = {
    "of a sum": lambda h, w: gradient(energy(h), h),
    "of a sum, mixed": lambda h, w: centered(gradient(energy(h), h)),
    "of rows, mixed": lambda h, w: torch.autograd.grad(h.sin(), h, torch.ones_like(h), create_graph=True)[0].cumsum(0),
    "of what is not linear": lambda h, w: h * gradient(energy(h) ** 2, h),
    "through a call on all": lambda h, w: centered(gradient((centered(h).exp() * h).sum(1).sum(0), h)),
    "rows, through a call on all": lambda h, w: (
        h + torch.autograd.grad(centered(h) ** 3, h, torch.ones_like(h), create_graph=True)[0]
    ),
    "of a parameter": lambda h, w: h * gradient(h.sin().sum(), w).sum(0),
    "of a parameter, by rows": lambda h, w: h + torch.autograd.grad(h, w, h.cos(), create_graph=True)[0].mean(0),
    "of a parameter alone": lambda h, w: h * gradient(w.sin().sum(), w).mean(0),
    "a batch, of rows": lambda h, w: of_batch(h.sin() * h, h, unit(h)).sum(0),
    "a batch, of rows, mixed": lambda h, w: of_batch(h.sin(), h, torch.stack([h, h.cos()])).cumsum(1).sum(0),
    "a batch, of a parameter": lambda h, w: h * of_batch(h.sin().sum(0), w, torch.eye(3, dtype=h.dtype)).sum(0).mean(0),
    "a batch, through a call on all": lambda h, w: h + of_batch(centered(h) ** 3, h, unit(h)).mean(0),
    "vmap": lambda h, w: centered(torch.vmap(torch.func.grad(energy))(h)),
    "jacrev": lambda h, w: centered(torch.vmap(torch.func.jacrev(torch.sin))(h).sum(-1)),
    "vjp": lambda h, w: centered(torch.func.vjp(torch.sin, h)[1](h)[0]),
    "jvp": lambda h, w: centered(torch.func.jvp(torch.sin, (h,), (h,))[1]),
}


class Inside(nn.Module):
    def __init__(self, inner: Inner) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return self.inner(self.linear(x), self.linear.weight)


def models(inner: Inner) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Inside(inner), nn.Linear(3, 3)).double()
    return model, copy.deepcopy(model)


def check(inner: Inner, x: torch.Tensor, mixes_rows: bool = False, schedule: str = "1f1b") -> None:
    model, dense = models(inner)
    with partitioned_mesh(pipe=2) as mesh:
        pipe = pipeline(
            model, mesh, microbatches=2, split_at=["1"], layouts={}, mixes_rows=mixes_rows, schedule=schedule
        )

        @monarch.program
        def step(x: Any, y: Any) -> Any:
            return pipe.step(x, target=y, loss_fn=F.mse_loss)

        y = x.flip(1)
        found, wanted = step(x, y), F.mse_loss(dense(x), y)
        wanted.backward()
        torch.testing.assert_close(found.full_tensor(), wanted.detach())
        for name, each in dense.named_parameters():
            ours: Any = model.get_parameter(name).grad
            torch.testing.assert_close(ours.full_tensor(), each.grad, msg=name)


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", CASES)
def test_gradients_of_a_forward_pass_are_those_of_the_batch(name: str) -> None:
    schedule = "zero-bubble" if list(CASES).index(name) % 2 else "1f1b"
    check(CASES[name], torch.randn(5, 3, dtype=torch.float64), schedule=schedule)


def test_a_transform_of_what_mixes_rows_is_refused_with_its_line() -> None:
    for inner in (
        lambda h, w: h + torch.func.grad(energy)(h),
        lambda h, w: torch.vmap(lambda t: t - t.mean(), 1, 1)(h),
        lambda h, w: torch.func.jvp(centered, (h,), (h,))[1],
        lambda h, w: torch.func.jvp(lambda t: F.batch_norm(t, None, None, training=True), (h,), (h,))[1],
    ):
        with pytest.raises(
            ProgramError, match=r"test_inner.py:\d+:(.|\n)*transform of torch.func(.|\n)*torch.autograd.grad"
        ):
            check(inner, torch.randn(4, 3, dtype=torch.float64))


@pytest.mark.parametrize("given", [None, lambda h: torch.tensor(1.0), lambda h: torch.ones(0, *h.shape)])
def test_a_batch_of_gradients_that_pytorch_refuses_is_refused(given: Any) -> None:
    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(Exception, match="grad|vmap|dim") as dense:
        models(lambda h, w: of_batch(h.sin(), h, given and given(h)))[1](x)
    with pytest.raises(type(dense.value), match=re.escape(str(dense.value).partition("\n")[0][:40])):
        check(lambda h, w: of_batch(h.sin(), h, given and given(h)), x)


def test_a_transform_of_each_microbatch_by_itself() -> None:
    check(lambda h, w: h + torch.func.grad(energy)(h), torch.randn(4, 3, dtype=torch.float64), mixes_rows=True)
