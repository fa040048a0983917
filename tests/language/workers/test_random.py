"""Random per-worker code, in programs and outside, against dense PyTorch that is written worker by worker, gradients
included."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import monarch
from monarch.language import Mesh
from tests.language.partitioned import partitioned_mesh

Step = tuple[str, int]
"""What is done next, and a number that says how."""

_LOCAL: dict[str, Callable[..., torch.Tensor]] = {
    "sin": lambda r, x, w: r.sin(),
    "mean": lambda r, x, w: r * x.mean(),
    "cumsum": lambda r, x, w: r.cumsum(0),
    "weight": lambda r, x, w: r * w,
}
_REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.mean(0),
    "max": lambda stack: stack.amax(0),
}
_MOVED = ("stack", "all_gather", "reduce_scatter", "all_to_all", "permute", "pairs", "rank")


def on_a_worker(steps: list[Step], mesh: Mesh, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    r, k = x, mesh.size("data")
    for name, number in steps:
        if name in _LOCAL:
            r = _LOCAL[name](r, x, weight)
        elif name in _REDUCED:
            r = r + monarch.reduce(r * r, "data", name)
        elif name == "stack":
            r = r * monarch.reduce(r, "data", "stack").sum(0)[:1]
        elif name == "all_gather":
            r = r + monarch.all_gather(r, "data", dim=0).view(k, *r.shape)[number % k]
        elif name == "reduce_scatter":
            r = monarch.all_gather(monarch.reduce_scatter(r + x[:1], "data", dim=0), "data", dim=0) * r
        elif name == "all_to_all":
            r = r + monarch.all_to_all(r, "data", split=0, concat=0)
        elif name == "permute":
            r = r - 2 * monarch.permute(r, "data", 1 + number % (k - 1))
        elif name == "pairs":
            r = r + monarch.permute(r, "data", pairs=[(number % k, (number + 1) % k)])
        else:
            r = r + mesh.rank("data")
    return r


def on_all(steps: list[Step], xs: list[torch.Tensor], weight: torch.Tensor) -> list[torch.Tensor]:
    rs, k = xs, len(xs)
    for name, number in steps:
        if name in _LOCAL:
            rs = [_LOCAL[name](r, x, weight) for r, x in zip(rs, xs, strict=True)]
        elif name in _REDUCED:
            total = _REDUCED[name](torch.stack([r * r for r in rs]))
            rs = [r + total for r in rs]
        elif name == "stack":
            total = torch.stack(rs).sum(0)[:1]
            rs = [r * total for r in rs]
        elif name == "all_gather":
            rs = [r + rs[number % k] for r in rs]
        elif name == "reduce_scatter":
            total = torch.stack([r + x[:1] for r, x in zip(rs, xs, strict=True)]).sum(0)
            rs = [total * r for r in rs]
        elif name == "all_to_all":
            rs = [r + torch.cat([other.chunk(k)[rank] for other in rs]) for rank, r in enumerate(rs)]
        elif name == "permute":
            rs = [r - 2 * rs[(rank - 1 - number % (k - 1)) % k] for rank, r in enumerate(rs)]
        elif name == "pairs":
            rs = [r + rs[number % k] if rank == (number + 1) % k else r for rank, r in enumerate(rs)]
        else:
            rs = [r + rank for rank, r in enumerate(rs)]
    return rs


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(200))
def test_it_is_what_the_workers_compute_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    k, columns, plain = draw.choice([2, 3]), draw.choice([1, 3]), draw.random() < 0.5
    rows = draw.choice([1, 2]) * k
    steps = [(draw.choice([*_LOCAL, *_REDUCED, *_MOVED]), draw.randrange(12)) for _ in range(draw.randint(1, 5))]
    dims, layout = draw.choice(
        [({"data": k}, "[@data, -]"), ({"data": k, "model": 2}, "[@data, @model]"), ({"model": 2, "data": k}, "[-, -]")]
    )
    source = torch.Generator().manual_seed(seed)
    x, start = torch.randn(k * rows, columns, generator=source), torch.randn(columns, generator=source)
    rates = torch.arange(k * rows)[:, None]

    def with_gradients(function: Callable[..., torch.Tensor], x: torch.Tensor) -> tuple[Any, ...]:
        x = x.detach().requires_grad_()
        weight = (start.clone() if plain else start + 0 * x.detach().sum()).requires_grad_()
        y = function(1.5 * x, weight)
        return y, *torch.autograd.grad((y.sin() * rates).sum() + weight.sum(), [x, weight])

    with partitioned_mesh(**dims) as mesh:

        def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            code = monarch.local(
                lambda own: on_a_worker(steps, mesh, own, weight),
                in_layouts="[@data, -]",
                out_layouts="[@data, -]",
                mesh=mesh,
                dims="data",
            )
            made: torch.Tensor = code(x)
            return made

        def whole(x: torch.Tensor) -> tuple[Any, ...]:
            return with_gradients(ours, x)

        outside = draw.random() < 0.3
        found = (whole if outside else monarch.program(whole, mesh=mesh))(monarch.distribute(x, mesh, layout))
        wanted = with_gradients(lambda x, weight: torch.cat(on_all(steps, [*x.chunk(k)], weight)), x)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.full_tensor(), other, rtol=2e-3, atol=2e-3)
