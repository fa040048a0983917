"""Indices that point outside: PyTorch raises, and so does every layout, with and without generated kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import monarch
from monarch.compiler.local_ops import LOCAL_OPS
from monarch.distributed import Mesh
from tests.language.partitioned import partitioned_mesh

TABLE = torch.arange(48.0).reshape(8, 6)
RAISED = (IndexError, RuntimeError)


@pytest.fixture(params=[False, True], ids=["ops", "kernels"])
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    with partitioned_mesh(request.param, model=2) as made:
        yield made


def _scatter_add(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.scatter_add(0, i[:, None].expand(-1, 6), torch.ones(len(i), 6))


def _index_put(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x.index_put((i,), torch.tensor(2.0))


def _lookup(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return F.embedding(i, x) * 2


def _loss(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x.T[: len(i)], i)


def _gradient(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    """Only the gradient, so that nothing of the forward pass need be run."""
    return torch.func.grad(lambda x: F.cross_entropy(x.T[: len(i)], i))(x)


def _of_lookup(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return torch.func.grad(lambda x: (F.embedding(i, x) ** 2).sum())(x)


OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "embedding": _lookup,
    "embedding, gradient": _of_lookup,
    "cross_entropy": _loss,
    "cross_entropy, gradient": _gradient,
    "nll_loss": lambda x, i: F.nll_loss(x.T[: len(i)], i, reduction="none"),
    "smoothed": lambda x, i: F.cross_entropy(x.T[: len(i)], i, label_smoothing=0.1),
    "one_hot": lambda x, i: F.one_hot(i, 8).float() @ x,
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, 6)) + 1,
    "take_along_dim": lambda x, i: torch.take_along_dim(x, i[:, None], 0),
    "scatter": lambda x, i: x.scatter(0, i[:, None].expand(-1, 6), 5.0),
    "scatter one": lambda x, i: x.T.scatter(1, F.pad(i, (0, 3))[:, None], 5.0) * 2,
    "scatter_add": _scatter_add,
    "index_select": lambda x, i: x.index_select(0, i),
    "index": lambda x, i: x[i],
    "index_put": _index_put,
    "index_add": lambda x, i: x.index_add(0, i, torch.ones(len(i), 6)),
    "index_copy": lambda x, i: x.index_copy(0, i, torch.ones(len(i), 6)),
    "index_fill": lambda x, i: x.index_fill(0, i, 3.0),
    "narrow": lambda x, i: x.narrow(0, i[1], 2),
    "take": lambda x, i: x[:, 0].take(i),
    "put": lambda x, i: x[:, 0].put(i, torch.ones(len(i))),
}
LAYOUTS = ["[-, -]", "[@model, -]", "[-, @model]"]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("op", OPS)
def test_an_index_is_refused_where_pytorch_refuses_it(mesh: Mesh, op: str, layout: str) -> None:
    """In range, out of it and negative: the values that PyTorch gives, or an error where it raises."""
    function = OPS[op]
    x = monarch.distribute(TABLE, mesh, layout)
    program: Any = monarch.program(lambda i: function(x, i))
    for entry in (0, 8, -1, -9, 1 << 40):
        index = torch.tensor([3, entry, 7])
        try:
            expected = function(TABLE, index)
        except RAISED:
            with pytest.raises(RAISED, match=r"out of (range|bounds)"):
                program(index).full_tensor()
        else:
            torch.testing.assert_close(program(index).full_tensor(), expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("ignored", [-100, 9])
def test_a_target_that_is_ignored_may_be_anything(mesh: Mesh, layout: str, ignored: int) -> None:
    targets = torch.tensor([2, ignored, 5, 0, ignored, 7])
    x = monarch.distribute(TABLE.sin(), mesh, layout)

    def loss(x: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        grad, value = torch.func.grad_and_value(lambda x: F.cross_entropy(x.T, targets, ignore_index=ignored))(x)
        return value, grad

    program = monarch.program(lambda targets: loss(x, targets))
    for ours, expected in zip(program(targets), loss(TABLE.sin(), targets), strict=True):
        torch.testing.assert_close(ours.full_tensor(), expected)


def test_a_block_of_rows_refuses_an_index_that_is_in_no_block() -> None:
    where: tuple[dict[str, int], dict[str, int]] = {"model": 1}, {"model": 2}
    index, rows = torch.tensor([2, 11]), torch.ones(2, 6)
    for call in (
        lambda: LOCAL_OPS["embedding_shard"](*where, TABLE[4:], index, "model"),
        lambda: LOCAL_OPS["embedding_backward_shard"](*where, rows, index, 4, 2, "model"),
        lambda: LOCAL_OPS["gather_shard"](*where, TABLE[4:], 0, index[:, None], "model"),
        lambda: LOCAL_OPS["scatter_shard"](*where, TABLE[4:], 0, index[:, None], 1.0, "model"),
    ):
        with pytest.raises(IndexError, match="out of range: 11, and there are 8 rows"):
            call()


def test_what_lies_in_another_workers_block_leaves_no_trace() -> None:
    """Where a row is another worker's, the first of the own ones is read, which may hold anything."""
    table, rows = TABLE.sin(), torch.full((2, 6), 2.0)
    table[0], table[4], rows[0] = -torch.inf, torch.nan, torch.inf
    index = torch.tensor([1, 5])

    def found(name: str, *args: Any) -> torch.Tensor:
        return sum(
            LOCAL_OPS[name]({"model": at}, {"model": 2}, *(x[at] if isinstance(x, tuple) else x for x in args), "model")
            for at in range(2)
        )

    of_rows = [
        LOCAL_OPS["embedding_backward_shard"]({"model": at}, {"model": 2}, rows, index, 4, -1, "model")
        for at in range(2)
    ]
    for got, want in (
        (found("embedding_shard", table.chunk(2), index), F.embedding(index, table)),
        (found("gather_shard", table.chunk(2), 0, index[:, None]), table.gather(0, index[:, None])),
        (torch.cat(of_rows), torch.ops.aten.embedding_dense_backward(rows, index, 8, -1, False)),
    ):
        torch.testing.assert_close(got, want)
    none = LOCAL_OPS["gather_shard"]({"model": 1}, {"model": 2}, TABLE > 1, 0, index[:0, None], "model")
    assert none.dtype is torch.bool


def test_a_value_that_is_put_where_a_mask_among_slices_is_set_has_its_gradient(mesh: Mesh) -> None:
    def put(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        y, columns, rows = x * 2, x[0] > 0, x.sum(1) > 0
        y[:, columns] = x[:, :1] * 3
        y[..., columns] = y.sum()
        y[rows, 1:3] = x[0, :2]
        y[:2, x[0] < 0] = x.mean()
        y.unflatten(1, (3, 1))[:, (x[0] < 1).view(3, 1)] = x.mean(1, keepdim=True)
        return y, *torch.autograd.grad((y * torch.arange(15).view(5, 3).cos()).sum(), x)

    given = (TABLE[:5, :3] - 6) * torch.tensor([1.0, -1.0, 0.5])
    for got, want in zip(monarch.program(put)(monarch.distribute(given, mesh, "[-, -]")), put(given), strict=True):
        torch.testing.assert_close(got.full_tensor(), want)


@pytest.mark.parametrize("shape", [(3,), (), (1, 3), (1,)])
def test_a_value_that_is_put_where_a_mask_is_set_has_its_gradient(mesh: Mesh, shape: tuple[int, ...]) -> None:
    def put(x: torch.Tensor, value: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, value = x.detach().requires_grad_(), value.detach().requires_grad_()
        y = x * 2
        y[mask] = value * 3
        y[y > 1] = value.sum()
        return y, *torch.autograd.grad((y * torch.arange(15).view(5, 3).cos()).sum(), [x, value])

    given = TABLE[:5, :3] - 6, torch.linspace(-0.2, 0.2, 5)[: max(shape, default=1)].reshape(shape) + 0.1
    rows = torch.tensor([True, False, True, False, True])
    placed = monarch.distribute(given[0], mesh, "[@model, -]"), *(monarch.distribute(x, mesh) for x in (given[1], rows))
    for got, want in zip(monarch.program(put)(*placed), put(*given, rows), strict=True):
        torch.testing.assert_close(got.full_tensor(), want)


@pytest.mark.parametrize("door", ["program", "eager"])
def test_a_mask_of_another_shape_is_refused(mesh: Mesh, door: str) -> None:
    x = monarch.distribute(TABLE, mesh, "[@model, -]")
    calls: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda x, mask: x[mask],
        lambda x, mask: x.index_put((mask,), torch.tensor(1.0)),
        lambda x, mask: x.index_put((mask & (x[0, 0] == 0),), x[0]),
    ]
    for mask in (torch.tensor([True]), torch.arange(9) < 2, torch.ones(8, 2, dtype=torch.bool)):
        for call in calls:
            with pytest.raises(IndexError, match=r"shape of the mask \[.*does not match the shape of the indexed"):
                (monarch.program(call) if door == "program" else call)(x, mask)
