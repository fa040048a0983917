"""Collectives of per-worker code and their gradients, against the same computed densely."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import monarch
from monarch.exceptions import LayoutError, ProgramError
from tests.language.partitioned import partitioned_mesh

K = 4
Blocks = list[torch.Tensor]


def rows(parts: Blocks) -> list[Blocks]:
    """For each worker, the block of each worker's tensor that it is sent: K equal ones of dim 0."""
    return [[part.chunk(K)[worker] for part in parts] for worker in range(K)]


def same(value: torch.Tensor) -> Blocks:
    return [value] * K


CASES: dict[str, tuple[Callable[[Any], Any], Callable[[Blocks], Blocks]]] = {
    "sum": (lambda x: monarch.reduce(x, "d"), lambda p: same(torch.stack(p).sum(0))),
    "avg": (lambda x: monarch.reduce(x, "d", "avg"), lambda p: same(torch.stack(p).mean(0))),
    "max": (lambda x: monarch.reduce(x, "d", "max"), lambda p: same(torch.stack(p).amax(0))),
    "min": (lambda x: x.reduce("d", "min"), lambda p: same(torch.stack(p).amin(0))),
    "stack": (lambda x: monarch.reduce(x, "d", "stack"), lambda p: same(torch.stack(p))),
    "scattered sum": (
        lambda x: monarch.reduce(x, "d", scatter=True),
        lambda p: [torch.stack(p).sum(0)[i] for i in range(K)],
    ),
    "scattered stack": (
        lambda x: monarch.reduce(x, "d", "stack", scatter=True),
        lambda p: [torch.stack([part[i] for part in p]) for i in range(K)],
    ),
    "all_gather": (lambda x: monarch.all_gather(x, "d", 1), lambda p: same(torch.cat(p, 1))),
    "reduce_scatter": (
        lambda x: monarch.reduce_scatter(x, "d"),
        lambda p: [torch.stack(each).sum(0) for each in rows(p)],
    ),
    "all_to_all": (lambda x: monarch.all_to_all(x, "d", 0, 1), lambda p: [torch.cat(each, 1) for each in rows(p)]),
    "all_to_all of one dim": (lambda x: monarch.all_to_all(x, "d"), lambda p: [torch.cat(each) for each in rows(p)]),
    "shift": (lambda x: monarch.permute(x, "d", 1), lambda p: [p[(i - 1) % K] for i in range(K)]),
    "pairs": (
        lambda x: monarch.permute(x, "d", pairs=[(0, 2), (3, 0)]),
        lambda p: [p[3], torch.zeros_like(p[0]), p[0], torch.zeros_like(p[0])],
    ),
    "vary": (lambda x: monarch.vary(monarch.reduce(x, "d"), "d") * x, lambda p: [torch.stack(p).sum(0) * x for x in p]),
}


@pytest.mark.parametrize("case", CASES)
def test_a_collective_and_its_gradient_are_those_of_the_dense_computation(case: str) -> None:
    on_workers, dense = CASES[case]
    torch.manual_seed(0)
    whole, weights = torch.randn(K * 4, 3), torch.rand(K, 64)

    def weighted(value: torch.Tensor, worker: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """A number that is different for each worker and each element."""
        return (value.flatten() * table[worker, : value.numel()]).sum()

    expected = whole.clone().requires_grad_()
    made = dense(list(expected.chunk(K)))
    total = sum(weighted(value, torch.tensor(i), weights) for i, value in enumerate(made))
    total.backward()  # type: ignore[union-attr]

    with partitioned_mesh(d=K) as mesh:
        table = monarch.distribute(weights, mesh, "[-, -]")

        @monarch.local(in_layouts="[@d, -]", out_layouts=("[]", "[@d]"), mesh=mesh)
        def body(x: torch.Tensor) -> Any:
            value = on_workers(x)
            loss = monarch.reduce(weighted(value, mesh.rank("d"), table), "d")
            return loss, monarch.vary(value, "d").flatten()

        @monarch.program(mesh=mesh)
        def step(x: "f32[16@d, 3]"):  # type: ignore[no-untyped-def,syntax]
            x.requires_grad_()
            loss, values = body(x)
            return loss, values, *torch.autograd.grad(loss, x)

        loss, values, gradient = step(whole)
        torch.testing.assert_close(loss.full_tensor(), total.detach())  # type: ignore[union-attr]
        torch.testing.assert_close(values.full_tensor(), torch.cat([value.flatten() for value in made]).detach())
        torch.testing.assert_close(gradient.full_tensor(), expected.grad)


def test_collectives_run_over_several_mesh_dims_the_first_outermost() -> None:
    whole = torch.randn(8, 8)
    blocks = list(whole.chunk(4))
    with partitioned_mesh(a=2, b=2) as mesh:

        @monarch.local(
            in_layouts="[@(a,b), -]", out_layouts=("[-, -]", "[-, @(a,b)]", "[@(a,b), -]", "[@a]"), mesh=mesh
        )
        def body(x: torch.Tensor) -> Any:
            gathered = monarch.all_gather(x, ("a", "b"))
            return (
                gathered,
                monarch.all_to_all(x, ("a", "b"), 1, 0),
                monarch.permute(x, ("a", "b"), 1),
                monarch.reduce(x.sum(), "b").reshape(1),
            )

        gathered, exchanged, shifted, sums = body(monarch.distribute(whole, mesh, "[@a, @b]"))
        torch.testing.assert_close(gathered.full_tensor(), whole)
        torch.testing.assert_close(exchanged.full_tensor(), whole)
        torch.testing.assert_close(shifted.full_tensor(), torch.cat([blocks[3], *blocks[:3]]))
        torch.testing.assert_close(
            sums.full_tensor(), torch.stack([(blocks[0] + blocks[1]).sum(), (blocks[2] + blocks[3]).sum()])
        )


def test_what_one_worker_has_goes_to_all_and_its_gradient_back() -> None:
    x = torch.rand(4, 3)
    with partitioned_mesh(a=2, b=2) as mesh:
        placed = monarch.distribute(x, mesh, "[@(a,b), -]").requires_grad_()
        body = monarch.local(lambda x: x.slice_mesh(a=1, b=-2).to_mesh(mesh), "[@(a,b), -]", mesh=mesh)
        made = body(placed)
        made.square().sum().backward()
        expected = torch.zeros(4, 3)
        expected[2] = 2 * x[2]
        assert torch.equal(made.detach().full_tensor(), x[2:3])
        assert placed.grad is not None
        torch.testing.assert_close(placed.grad.full_tensor(), expected)  # type: ignore[attr-defined]
        with pytest.raises(LayoutError, match="slice_mesh\\(a=2\\) of a mesh dim of 2 workers"):
            placed.slice_mesh(a=2)


def test_tensors_go_to_other_meshes_each_workers_own_to_the_worker_at_its_place() -> None:
    with partitioned_mesh(stage=2, data=2) as mesh, partitioned_mesh(data=2) as other:
        first, second = mesh.slice(stage=0), mesh.slice(stage=1)
        with first.activate():
            own = torch.ones(2) + first.rank("data")
        rows = monarch.distribute(torch.arange(4.0).reshape(2, 2), first, "[@data, -]")

        def each(value: Any) -> Any:
            return monarch.reduce(value, "data", "stack").tolist()

        for target in (second, other, mesh):  # a part beside it, a mesh made apart, one that has its workers
            moved, placed = own.to_mesh(target), rows.to_mesh(target)  # type: ignore[attr-defined]
            assert moved.mesh is target and str(moved.tensor_type) == "f32[2] varying<data>"
            assert each(moved) == [[1, 1], [2, 2]]
            assert str(placed.tensor_type) == "f32[2@data, 2]"
            assert torch.equal(placed.full_tensor(), rows.full_tensor())
            alone = own.slice_mesh(data=1).to_mesh(target)  # type: ignore[attr-defined]
            assert str(alone.tensor_type) == "f32[2]" and alone.tolist() == [2, 2]

        @monarch.program
        def step(x: torch.Tensor) -> Any:
            return (x * 2).to_mesh(second) + 1  # type: ignore[attr-defined]

        assert each(step(own)) == [[3, 3], [5, 5]]


def test_gradients_come_back_from_another_part_and_what_cannot_go_says_so() -> None:
    with partitioned_mesh(stage=2, data=2) as mesh, partitioned_mesh(data=2) as other:
        first, second = mesh.slice(stage=0), mesh.slice(stage=1)
        weight = monarch.distribute(torch.ones(2), first).requires_grad_()
        with first.activate():
            own = weight * (1 + first.rank("data"))
        with second.activate():
            monarch.reduce(own.to_mesh(second) * 3, "data").sum().backward()  # type: ignore[attr-defined]
        assert weight.grad is not None and weight.grad.tolist() == [9, 9]
        with pytest.raises(ProgramError, match="between which no gradient goes, of a tensor that needs one"):
            weight.to_mesh(other)
        with pytest.raises(LayoutError, match="varies along 'data' of Mesh.*, to Mesh\\(stage=2"):
            own.detach().to_mesh(mesh.slice(data=0))  # type: ignore[attr-defined]
        with pytest.raises(ProgramError, match="a program on two meshes that were made apart"):
            monarch.program(lambda x: x.to_mesh(other) + 1)(weight.detach())
