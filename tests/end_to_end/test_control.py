"""Branches and loops on workers: each decides by itself, and a loop ends where another worker has failed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import monarch
from monarch.compiler.plan import Plan
from monarch.distributed import Mesh

pytestmark = pytest.mark.sample(1, of="kernels")


def test_workers_take_branches_and_go_round_loops_with_collectives_in_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(8, 64), torch.randn(64, 64) / 8
    with Mesh(data=2) as mesh:
        weight = monarch.distribute(w, mesh, "[-, @data]").requires_grad_()

        @monarch.program
        def step(x: torch.Tensor) -> Any:
            y = monarch.cond(x.sum() > 0, lambda a: torch.tanh(a @ weight), lambda a: a * weight[0], (x,))
            (gradient,) = torch.autograd.grad(y.square().mean(), weight)
            with torch.no_grad():
                rounds, z = monarch.while_loop(
                    lambda i, a: (a.sum() < 1e6) & (i < 4), lambda i, a: (i + 1, torch.tanh(a @ weight) + a), (0, x)
                )
                last, ys = monarch.scan(lambda carry, e: (carry + e.sum(), torch.tanh(e @ weight)), torch.zeros(()), z)
            return y, gradient, rounds, z, last, ys

        def plain(x: torch.Tensor) -> Any:
            own = w.clone().requires_grad_()
            y = torch.tanh(x @ own) if x.sum() > 0 else x * own[0]
            (gradient,) = torch.autograd.grad(y.square().mean(), own)
            z = x
            for _ in range(4):
                z = torch.tanh(z @ w) + z
            return y.detach(), gradient, torch.tensor(4), z, z.sum(), torch.tanh(z @ w)

        for given in (x, -x):
            placed = monarch.distribute(given, mesh, "[@data, -]")
            for got, want in zip(step(placed), plain(given), strict=True):
                torch.testing.assert_close(got.full_tensor(), want, rtol=1e-4, atol=1e-4)
        plan = step.compile(monarch.distribute(x, mesh, "[@data, -]"))
        plan.save(str(tmp_path / "step.mplan"))
        read = Plan.load(str(tmp_path / "step.mplan"))
        assert (read.hash, list(read.functions)) == (plan.hash, list(plan.functions))
        assert plan.arena == max(each.arena for each in plan.functions.values()) + plan.own_arena


def test_a_worker_in_a_long_loop_ends_it_where_another_has_failed() -> None:
    with Mesh(data=2) as mesh:
        table = monarch.distribute(torch.zeros(2, 3), mesh, "[@data, -]")

        @monarch.program
        def step(index: "i64[2@data, 1]", rounds: torch.Tensor) -> Any:
            def body(i: torch.Tensor, found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
                # Only the worker that has the index out of range fails; the other goes round and round.
                return i + 1, found + torch.gather(table, 1, index)

            return monarch.while_loop(lambda i, found: i < rounds, body, (0, torch.gather(table, 1, index * 0)))

        index = monarch.distribute(torch.tensor([[0], [7]]), mesh, "[@data, -]")
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            step(index, monarch.distribute(torch.tensor(2**60), mesh))[1].full_tensor()
        index = monarch.distribute(torch.tensor([[0], [2]]), mesh, "[@data, -]")
        i, found = step(index, monarch.distribute(torch.tensor(3), mesh))
        assert (int(i.full_tensor()), found.full_tensor().tolist()) == (3, [[0.0], [0.0]])
