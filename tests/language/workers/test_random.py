"""Random per-worker code, along one mesh dim or two at once, in programs and outside, against dense PyTorch that is
written worker by worker, gradients included."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import pytest
import torch

import monarch
from monarch.language import Mesh
from tests.language.partitioned import partitioned_mesh

Step = tuple[str, int, tuple[str, ...]]
"""What is done next, a number that says how, and the mesh dims that it is over."""
Blocks = list[torch.Tensor]

_LOCAL: dict[str, Callable[..., torch.Tensor]] = {
    "square": lambda r, x, w: r * r,
    "mean": lambda r, x, w: r * x.mean(),
    "cumsum": lambda r, x, w: r.cumsum(0),
    "weight": lambda r, x, w: r * w,
}
_REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sum": lambda stack: stack.sum(0),
    "avg": lambda stack: stack.mean(0),
    "max": lambda stack: stack.amax(0),
}
_MOVED = ("stack", "all_gather", "reduce_scatter", "all_to_all", "exchange", "permute", "pairs", "rank")


@dataclass
class Grid:
    """The mesh dims along which the code is per-worker, the outermost first, with the workers along each."""

    sizes: dict[str, int]

    def groups(self, over: tuple[str, ...]) -> list[list[int]]:
        """The workers, by their numbers."""
        places = [dict(zip(self.sizes, at, strict=True)) for at in product(*map(range, self.sizes.values()))]
        number = {tuple(place.values()): at for at, place in enumerate(places)}
        steps = [dict(zip(over, at, strict=True)) for at in product(*(range(self.sizes[name]) for name in over))]
        return [[number[tuple((place | step).values())] for step in steps] for place in places]


def on_a_worker(steps: list[Step], mesh: Mesh, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    r = x
    for name, number, over in steps:
        k = mesh.size(over)
        if name in _LOCAL:
            r = _LOCAL[name](r, x, weight)
        elif name in _REDUCED:
            r = r + monarch.reduce(r * r, over, name)
        elif name == "stack":
            r = r * monarch.reduce(r, over[0], "stack").sum(0)[:1]
        elif name == "all_gather":
            r = r + monarch.all_gather(r, over, dim=0).view(k, *r.shape)[number % k]
        elif name == "reduce_scatter":
            r = monarch.all_gather(monarch.reduce_scatter(r + x[:1], over, dim=0), over, dim=0) * r
        elif name == "all_to_all":
            r = r + monarch.all_to_all(r, over, split=0, concat=0)
        elif name == "exchange":
            r = r + monarch.all_to_all(r, over, split=0, concat=1).reshape(r.shape)
        elif name == "permute":
            r = r - 2 * monarch.permute(r, over, 1 + number % (k - 1))
        elif name == "pairs":
            r = r + monarch.permute(r, over, pairs=[(number % k, (number + 1) % k)])
        else:
            r = r + mesh.rank(over[0])
        r = r.sin()
    return r


def on_all(steps: list[Step], grid: Grid, xs: Blocks, weight: torch.Tensor) -> Blocks:
    rs = xs
    for name, number, over in steps:
        groups = grid.groups(over[:1] if name in ("stack", "rank") else over)
        k = len(groups[0])
        sets = [[rs[at] for at in group] for group in groups]
        ranks = [group.index(at) for at, group in enumerate(groups)]
        if name in _LOCAL:
            rs = [_LOCAL[name](r, x, weight) for r, x in zip(rs, xs, strict=True)]
        elif name in _REDUCED:
            rs = [r + _REDUCED[name](torch.stack([o * o for o in each])) for r, each in zip(rs, sets, strict=True)]
        elif name == "stack":
            rs = [r * torch.stack(each).sum(0)[:1] for r, each in zip(rs, sets, strict=True)]
        elif name == "all_gather":
            rs = [r + each[number % k] for r, each in zip(rs, sets, strict=True)]
        elif name == "reduce_scatter":
            added = [r + x[:1] for r, x in zip(rs, xs, strict=True)]
            totals = [torch.stack([added[at] for at in group]).sum(0) for group in groups]
            rs = [total * r for r, total in zip(rs, totals, strict=True)]
        elif name in ("all_to_all", "exchange"):
            dim = 1 if name == "exchange" else 0
            given = [torch.cat([o.chunk(k)[rank] for o in each], dim) for rank, each in zip(ranks, sets, strict=True)]
            rs = [r + own.reshape(r.shape) for r, own in zip(rs, given, strict=True)]
        elif name == "permute":
            shift = 1 + number % (k - 1)
            rs = [r - 2 * each[(rank - shift) % k] for r, each, rank in zip(rs, sets, ranks, strict=True)]
        elif name == "pairs":
            source, target = number % k, (number + 1) % k
            rs = [r + each[source] if rank == target else r for r, each, rank in zip(rs, sets, ranks, strict=True)]
        else:
            rs = [r + rank for r, rank in zip(rs, ranks, strict=True)]
        rs = [r.sin() for r in rs]
    return rs


def drawn(draw: random.Random, dims: list[str]) -> list[Step]:
    steps: list[Step] = []
    for _ in range(draw.randint(1, 5)):
        over = draw.sample(dims, draw.randint(1, len(dims)))
        steps.append((draw.choice([*_LOCAL, *_REDUCED, *_MOVED]), draw.randrange(12), tuple(over)))
    return steps


@pytest.mark.sample(8)
@pytest.mark.parametrize("seed", range(400))
def test_it_is_what_the_workers_compute_one_by_one(seed: int) -> None:
    draw = random.Random(seed)
    mesh_dims = draw.choice([{"data": 2}, {"data": 3}, {"data": 2, "model": 2}, {"data": 3, "model": 2}])
    own = draw.sample([*mesh_dims], draw.randint(1, len(mesh_dims)))
    grid = Grid({name: mesh_dims[name] for name in own})
    workers, plain = prod(grid.sizes.values()), draw.random() < 0.5
    rows, columns = draw.choice([1, 2]) * workers, draw.choice([1, 3])
    steps = drawn(draw, own)
    layouts = ["[-, -]", "[@data, -]", "[-, @data]"]  # most of which do not divide the columns
    layout = draw.choice(layouts + ["[@data, @model]", "[@(model,data), -]"] * ("model" in mesh_dims))
    names = f"@({','.join(own)})"
    total = draw.sample(own, draw.randint(0, len(own)))
    rest = ",".join(name for name in own if name not in total)
    source = torch.Generator().manual_seed(seed)
    x, start = (
        torch.randn(size, generator=source, dtype=torch.float64) for size in ((workers * rows, columns), (columns,))
    )
    rates = torch.arange(workers * rows)[:, None]

    def with_gradients(function: Callable[..., Any], x: torch.Tensor) -> tuple[Any, ...]:
        x = x.detach().requires_grad_()
        weight = (start.clone() if plain else start + 0 * x.detach().sum()).requires_grad_()
        y, added, same = function(1.5 * x, weight)
        loss = (y.sin() * rates).sum() + weight.sum() + added.cos().sum() + (same.sin() * same).sum()
        return y, added, same, *torch.autograd.grad(loss, [x, weight])

    with partitioned_mesh(**mesh_dims) as mesh:

        def ours(x: torch.Tensor, weight: torch.Tensor) -> Any:
            def code(x: torch.Tensor) -> Any:
                y = on_a_worker(steps, mesh, x, weight)
                return y, y * x, monarch.reduce(y.tanh(), total) if total else y.tanh()

            return monarch.local(
                code,
                in_layouts=f"[{names}, -]",
                out_layouts=(
                    f"[{names}, -]",
                    f"[-, -] partial<sum: {', '.join(own)}>",
                    f"[@({rest}), -]" if rest else "[-, -]",
                ),
                mesh=mesh,
                dims=own,
            )(x)

        def dense(x: torch.Tensor, weight: torch.Tensor) -> Any:
            xs = [*x.chunk(workers)]
            ys = on_all(steps, grid, xs, weight)
            groups = grid.groups(tuple(total))
            reduced = [torch.stack([ys[at].tanh() for at in group]).sum(0) for group in groups]
            firsts = [each for at, each in enumerate(reduced) if groups[at][0] == at]
            return torch.cat(ys), torch.stack([y * x for y, x in zip(ys, xs, strict=True)]).sum(0), torch.cat(firsts)

        def whole(x: torch.Tensor) -> tuple[Any, ...]:
            return with_gradients(ours, x)

        outside = draw.random() < 0.3
        found = (whole if outside else monarch.program(whole, mesh=mesh))(monarch.distribute(x, mesh, layout))
        for one, other in zip(found, with_gradients(dense, x), strict=True):
            torch.testing.assert_close(one.full_tensor(), other)
