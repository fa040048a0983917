"""Random branches and loops in programs against the same functions run eagerly by Python's `if`, `for` and `while`,
gradients included."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import monarch
from tests.language.partitioned import partitioned_mesh

Tensor = torch.Tensor
Step = tuple[str, Any]
"""What is done next, and a number or steps that say how."""


@dataclass
class World:
    """What a function's steps read from outside, and what its branches and loops are."""

    x: Tensor
    weight: Tensor
    plain: Tensor
    written: Tensor
    cond: Callable[..., Any]
    scan: Callable[..., Any]
    while_loop: Callable[..., Any]
    layout: Callable[..., Any]


_SIMPLE: dict[str, Callable[[Tensor, World, int], Tensor]] = {
    "sin": lambda r, w, n: r.sin() * 2,
    "product": lambda r, w, n: (r @ w.weight).tanh(),
    "outer": lambda r, w, n: (r @ (r.mT @ w.x)).tanh(),
    "softmax": lambda r, w, n: r + torch.softmax(r, n % 2),
    "sum": lambda r, w, n: (r + r.sum(n % 2, keepdim=True)).tanh(),
    "total": lambda r, w, n: r - r.square().mean() / 2,
    "amax": lambda r, w, n: r - r.amax(n % 2, keepdim=True) / 2,
    "cumsum": lambda r, w, n: r.cumsum(n % 2).tanh(),
    "flip": lambda r, w, n: r + r.flip(n % 2),
    "closure": lambda r, w, n: r * w.x,
    "plain": lambda r, w, n: r + w.plain,
    "written": lambda r, w, n: r + w.written,
    "transposed": lambda r, w, n: (w.x @ (r.mT @ w.x).tanh().mT).tanh() + r / 3,
    "roll": lambda r, w, n: r.roll(1 + n % 2, n % 2) + w.weight[0],
    "parts": lambda r, w, n: torch.cat([r[:1] * 2, r[1:]]),
    "ones": lambda r, w, n: r * torch.ones(r.shape[1], dtype=r.dtype) + torch.arange(r.shape[0])[:, None] / 9,
    "index": lambda r, w, n: r[torch.arange(r.shape[0]) // 2] + r,
}


def run(steps: list[Step], r: Tensor, world: World) -> Tensor:
    for name, how in steps:
        if name in _SIMPLE:
            r = _SIMPLE[name](r, world, how)
        elif name == "write":
            world.written.add_(r.detach().sum(0).sin())
        elif name == "layout":
            r = world.layout(r, how)
        elif name == "cond":
            r = branch(r, world, *how)
        elif name == "scan":
            r = loop(r, world, *how)
        else:
            rounds, within = how
            i, made = world.while_loop(
                lambda i, a, most=rounds: (i < most) & (a.square().mean() < 50),
                lambda i, a, within=within: (i + 1, run(within, a, world).detach()),
                (torch.zeros((), dtype=torch.int64), r.detach()),
            )
            r = r * 0.5 + made + i
    return r


def branch(r: Tensor, world: World, threshold: float, kind: str, one: list[Step], other: list[Step]) -> Tensor:
    if kind == "operands":
        made: Tensor = world.cond(
            r.sum() > threshold,
            lambda a, b: run(one, a, world) + b,
            lambda a, b: run(other, a * b, world),
            (r, world.x),
        )
        return made
    if kind == "pair":
        y, total = world.cond(
            r.mean() > threshold,
            lambda: (run(one, r, world), r.sum()),
            lambda: (run(other, r, world), world.weight.sum()),
        )
        return y + total.sin()
    made = world.cond((r * world.x).sum() > threshold, lambda: run(one, r, world), lambda: run(other, r, world) * 2)
    return made


def loop(r: Tensor, world: World, kind: str, reverse: bool, within: list[Step]) -> Tensor:
    if kind == "rows":
        h, ys = world.scan(lambda h, e: ((h + e).tanh(), run(within, h + e, world)), r, r * 1, reverse=reverse)
        return h + ys.sum(0).sin()
    if kind == "sums":  # carries a sum over all rows, and a plain number
        (total, i), ys = world.scan(
            lambda c, e: ((c[0] + run(within, r * e, world).sum(0), c[1] + 1), c[0].sin()),
            (torch.zeros(r.shape[1], dtype=r.dtype), torch.zeros((), dtype=r.dtype)),
            torch.arange(1.0, 4.0, dtype=r.dtype) / 4,
            reverse=reverse,
        )
        return r + total.sin() + ys.sum(0) + i
    if kind == "stack":
        xs = {"a": torch.stack([r, r * 2]), "b": torch.stack([world.weight, world.weight.mT])}
        h, ys = world.scan(
            lambda h, e: ((run(within, h, world) @ e["b"] + e["a"]).tanh(), (h * e["a"]).mean(1)),
            r,
            xs,
            reverse=reverse,
        )
        return h + ys.sum(0)[:, None]
    h, _ = world.scan(
        lambda h, _: (run(within, h, world).tanh(), None), r, torch.zeros(3, dtype=r.dtype), reverse=reverse
    )
    return h + 0


def drawn(draw: random.Random, depth: int, layouts: list[str]) -> list[Step]:
    steps: list[Step] = []
    for _ in range(draw.randint(1, 3)):
        kinds = [*_SIMPLE] + ["layout", "write"] * 2 + (["cond", "scan", "while"] * 5 if depth else [])
        name = draw.choice(kinds)
        if name == "layout":
            steps.append((name, draw.choice(layouts)))
        elif name == "cond":
            one, other = (drawn(draw, depth - 1, layouts) for _ in range(2))
            kind = draw.choice(["closure", "operands", "pair"])
            steps.append((name, (draw.choice([-99, 0, 99]), kind, one, other)))
        elif name == "scan":
            kind = draw.choice(["rows", "sums", "stack", "rounds"])
            steps.append((name, (kind, draw.random() < 0.3, drawn(draw, depth - 1, layouts))))
        elif name == "while":
            steps.append((name, (draw.randrange(4), drawn(draw, depth - 1, layouts))))
        else:
            steps.append((name, draw.randrange(12)))
    return steps


def eager_cond(predicate: Tensor, one: Callable[..., Any], other: Callable[..., Any], operands: Any = ()) -> Any:
    return (one if predicate else other)(*operands)


def eager_while(condition: Callable[..., Tensor], body: Callable[..., Any], carried: Any) -> Any:
    while condition(*carried):
        carried = body(*carried)
    return carried


def eager_scan(combine: Callable[..., Any], h: Any, xs: Any, reverse: bool = False) -> Any:
    count = len(xs["a"] if isinstance(xs, dict) else xs)
    ys = []
    for at in reversed(range(count)) if reverse else range(count):
        h, y = combine(h, {name: x[at] for name, x in xs.items()} if isinstance(xs, dict) else xs[at])
        ys.append(y)
    return h, None if ys[0] is None else torch.stack(ys[::-1] if reverse else ys)


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(250))
def test_it_is_what_python_computes(seed: int) -> None:
    draw = random.Random(seed)
    dims = draw.choice([{"data": 2}, {"data": 3}, {"data": 2, "model": 2}])
    shards = ["-", "@data", "@model", "@(data,model)"] if "model" in dims else ["-", "@data"]
    layouts = [
        f"[{a}, {b}]" for a in shards for b in shards if a == "-" or b == "-" or a[1:] not in b and b[1:] not in a
    ]
    rows, columns = draw.randint(2, 7), draw.randint(2, 6)
    steps = drawn(draw, 2, layouts)
    while not any(name in ("cond", "scan", "while") for name, _ in steps):
        steps = drawn(draw, 2, layouts)
    source = torch.Generator().manual_seed(seed)
    x, weight, plain = (
        torch.randn(size, generator=source, dtype=torch.float64)
        for size in ((rows, columns), (columns, columns), (columns,))
    )
    of_x, of_weight = draw.choice(layouts), draw.choice(layouts)
    from_outside = draw.random() < 0.5

    def with_gradients(x: Tensor, weight: Tensor, **how: Any) -> tuple[Tensor, ...]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        world = World(x, weight, plain, x.detach()[0] * 0, **how)
        y = run(steps, x * 1.5, world)
        gradients = torch.autograd.grad((y.sin() * y.detach().cos()).sum() + weight.sum() + x.sum(), [x, weight])
        return y, world.written * 1, *gradients

    ours: Any = {"cond": monarch.cond, "scan": monarch.scan, "while_loop": monarch.while_loop, "layout": monarch.layout}
    if draw.random() < 0.2:
        ours["cond"] = torch.cond
    eager = {"cond": eager_cond, "scan": eager_scan, "while_loop": eager_while, "layout": lambda r, _: r}
    wanted = with_gradients(x, weight, **eager)
    with partitioned_mesh(draw.random() < 0.3, **dims) as mesh:
        placed = monarch.distribute(x, mesh, of_x), monarch.distribute(weight, mesh, of_weight)
        if from_outside:
            program = monarch.program(lambda x: with_gradients(x, placed[1], **ours), mesh=mesh)
            found = program(placed[0])
        else:
            found = monarch.program(lambda x, w: with_gradients(x, w, **ours), mesh=mesh)(*placed)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.full_tensor(), other)
