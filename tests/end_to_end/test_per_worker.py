"""Per-worker code on worker processes: what they keep of their own from call to call, and show of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import monarch
from monarch.compiler.plan import Plan
from monarch.distributed import Mesh
from monarch.exceptions import LayoutError

pytestmark = pytest.mark.sample(1, of="kernels")


def test_workers_keep_values_of_their_own_from_call_to_call(tmp_path: Path) -> None:
    with Mesh(data=2, model=2) as mesh:
        total = monarch.vary(monarch.distribute(torch.zeros(3), mesh), "data")

        def add(x: torch.Tensor) -> Any:
            total.add_(x.sum(0))
            return monarch.reduce(total, "data"), monarch.permute(x, "data", 1)

        body = monarch.local(add, "[@data, -]", (None, "[@data, -]"), mesh=mesh, dims="data")

        @monarch.program
        def step(x: "f32[4@data, 3]"):  # type: ignore[no-untyped-def,syntax]
            return body(x)

        @monarch.program
        def clear(x: "f32[4@data, 3]"):  # type: ignore[no-untyped-def,syntax]
            total.zero_()
            return x.sum()

        x = torch.rand(4, 3)
        for count in (1, 2):
            summed, moved = step(x)
            torch.testing.assert_close(summed.full_tensor(), count * x.sum(0))
            assert torch.equal(moved.full_tensor(), x[[2, 3, 0, 1]])
        for worker in (0, 1):
            own = monarch.fetch_shard([total], data=worker, model=1).result()
            torch.testing.assert_close(own, [2 * x[2 * worker : 2 * worker + 2].sum(0)])
        assert monarch.inspect(summed).shape == (3,)
        with pytest.raises(LayoutError, match="a value that varies along 'data' has no global value"):
            total.full_tensor()
        clear(x)
        assert str(total.tensor_type) == "f32[3] varying<data>"
        torch.testing.assert_close(step(x)[0].full_tensor(), x.sum(0))

        step.compile(x).save(tmp_path / "step.mplan")
        plan = Plan.load(tmp_path / "step.mplan")
        assert [str(spec.type) for spec in plan.inputs if spec.kind == "state"] == ["f32[3] varying<data>"]


def test_what_is_made_outside_of_programs_is_each_workers_own_and_printed_so() -> None:
    with Mesh(data=2) as mesh:
        torch.manual_seed(0)
        with mesh.activate():
            drawn = torch.rand(2)
            own = torch.zeros(2) + 10 * mesh.rank("data")
            assert not isinstance(torch.tensor([1.0]), monarch.DistributedTensor)
        assert not torch.equal(monarch.inspect(drawn), monarch.inspect(drawn, data=1))
        assert str(own) == (
            "{'data': 0}: tensor([0., 0.])\n{'data': 1}: tensor([10., 10.])\nf32[2] varying<data> on mesh<data=2>"
        )
        assert torch.equal(monarch.reduce(own + 1, "data", "avg").full_tensor(), torch.tensor([6.0, 6.0]))
        torch.manual_seed(0)
        with mesh.activate():
            again = torch.rand(2)
            assert monarch.inspect(own, data=1).tolist() == [10.0, 10.0]  # fetched there, and plain
            assert (monarch.reduce(own, "data") + torch.tensor([1.0, 2.0])).full_tensor().tolist() == [11.0, 12.0]
        assert all(torch.equal(monarch.inspect(drawn, data=at), monarch.inspect(again, data=at)) for at in (0, 1))


def test_a_pending_sum_of_some_is_read_as_the_sum() -> None:
    """Along the other mesh dim each worker has a sum of its own."""
    with Mesh(data=2, model=2) as mesh:
        with mesh.activate():
            own = torch.zeros(1) + mesh.rank("data") + 10 * mesh.rank("model")
        total = monarch.reduce(own, "data")
        assert str(total.tensor_type) == "f32[1] partial<sum: data> varying<model>"  # type: ignore[attr-defined]
        assert [monarch.inspect(total, data=1, model=at).item() for at in (0, 1)] == [1, 21]
        assert str(total).startswith("{'model': 0}: tensor([1.])\n{'model': 1}: tensor([21.])\n")
