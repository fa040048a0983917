"""`actors.step.rref(x)`: what actors return as distributed tensors that vary."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import monarch
from monarch import LayoutError, MonarchError
from monarch.actor import Actor, ActorError, ProcMesh, as_endpoint, current_rank, endpoint, this_host
from monarch.compiler.errors import ProgramError
from monarch.distributed import Mesh
from tests.runtime.actors.services import mesh, procs

__all__ = ["mesh", "procs"]


class Linear(Actor):
    """Each has weights of its own."""

    def __init__(self) -> None:
        self.weight = torch.eye(2) * (current_rank().rank + 1)

    @endpoint(propagate=lambda x: x)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight

    @endpoint(propagate="inspect")
    def add(self, x: torch.Tensor) -> str:
        self.weight += x
        return "added"

    @endpoint(propagate=lambda x: x[:1])
    def promises_less(self, x: torch.Tensor) -> torch.Tensor:
        return x

    @endpoint(propagate=lambda x: 3)
    def promises_a_number(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("it is not called")

    @endpoint
    def fails(self, x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no data here")

    def halves(self, pair: dict[str, torch.Tensor]) -> dict[str, Any]:
        return {"half": pair["x"] / 2, "both": [pair["x"], pair["y"].sum()]}


@pytest.fixture
def linear(procs: ProcMesh) -> Iterator[Linear]:
    yield procs.spawn("linear", Linear)


def shards(value: torch.Tensor) -> list[Any]:
    return [monarch.inspect(value, data=at).tolist() for at in range(2)]


def test_each_worker_has_what_its_actor_returned(linear: Linear, mesh: Mesh) -> None:
    with mesh.activate():
        x = torch.ones(2, 2) + mesh.rank("data")
        y = torch.relu(linear.forward.rref(x))
        assert "varying<data>" in str(y)  # a value is fetched in the block too
        total = monarch.reduce(y, "data")
    assert str(y.tensor_type) == "f32[2, 2] varying<data>"  # type: ignore[attr-defined]
    assert shards(y) == [[[1, 1], [1, 1]], [[4, 4], [4, 4]]]
    assert total.full_tensor().tolist() == [[5, 5], [5, 5]]  # type: ignore[attr-defined]


def test_an_actor_gets_its_workers_shard_of_what_does_not_vary(linear: Linear, mesh: Mesh) -> None:
    x = monarch.distribute(torch.arange(8.0).reshape(4, 2), mesh, "[@data, -]")
    assert shards(linear.forward.rref(x)) == [[[0, 1], [2, 3]], [[8, 10], [12, 14]]]


def test_a_result_that_nobody_needs_and_plain_arguments(linear: Linear, mesh: Mesh) -> None:
    assert linear.add.rref(torch.ones(2, 2)) is None
    with mesh.activate():  # or else the mesh would not be known, were there others
        assert shards(linear.forward.rref(torch.eye(2))) == [[[2, 1], [1, 2]], [[3, 1], [1, 3]]]


def test_a_method_that_is_not_marked_and_nested_tensors(linear: Linear, mesh: Mesh) -> None:
    x = monarch.distribute(torch.arange(4.0), mesh, "[@data]")
    halves = as_endpoint(
        linear.halves, propagate=lambda pair: {"half": pair["x"], "both": [torch.rand(2), pair["y"][0]]}
    )
    made = halves.rref({"x": x, "y": torch.ones(3)})
    assert (shards(made["half"]), shards(made["both"][0])) == ([[0, 0.5], [1, 1.5]], [[0, 1], [2, 3]])
    assert shards(made["both"][1]) == [3, 3]
    with pytest.raises(LayoutError, match="the propagate of linear.promises_a_number gives int"):
        linear.promises_a_number.rref(x)


def test_what_cannot_be_is_an_error(linear: Linear, mesh: Mesh) -> None:
    x = monarch.distribute(torch.ones(2, 2), mesh)
    with pytest.raises(
        LayoutError, match=r"promises_less has returned f32\[2, 2\], and its propagate says f32\[1, 2\]"
    ):
        linear.promises_less.rref(x)
    with pytest.raises(ActorError, match="linear.* raised ValueError: no data here"):
        linear.fails.rref(x)
    with pytest.raises(ProgramError, match=r"rref\(\) inside a program"):
        monarch.program(lambda x: linear.forward.rref(x))(x)
    with pytest.raises(ProgramError, match="needs a gradient, and what actors return has none"):
        linear.forward.rref(x.detach().requires_grad_())
    with pytest.raises(LayoutError, match="is plain: it is here, and on no mesh"):
        monarch.fetch_shard([torch.ones(2)], data=0)
    with pytest.raises(ValueError, match="propagate='cached' of .*function"):
        endpoint(propagate="cached")(lambda self: None)  # type: ignore[arg-type]
    other = this_host().spawn_procs({"data": 2}).spawn("other", Linear)
    with pytest.raises(MonarchError, match="in processes that mesh<data=2> does not run on"):
        other.forward.rref(x)
    with Mesh(data=2) as bare, pytest.raises(LayoutError, match="no argument is on one, and 2 are open"):
        monarch.distribute(torch.ones(2), bare).wait()
        linear.forward.rref(torch.ones(2, 2))
    assert shards(linear.forward.rref(x))[0] == [[1, 1], [1, 1]]  # actors and mesh live on
