"""Ops that are registered after the workers were forked travel with the plan."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from monarch.compiler.plan import MeshSpec, PlanError
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.shared.definitions import define, definitions
from tests.runtime.building import Building, whole

MESH = MeshSpec.of(w=2)
OFFSET = 3.0


def test_workers_run_a_custom_op_that_they_were_forked_without() -> None:
    with MeshExecutor(MESH) as executor:
        executor.wait(executor.put(torch.zeros(2), whole((2,))))  # the workers are there

        @torch.library.custom_op("latetest::shift", mutates_args=())
        def shift(x: torch.Tensor) -> torch.Tensor:
            return x + OFFSET

        @torch.library.custom_op("latetest::shift_", mutates_args={"x"})
        def shift_(x: torch.Tensor) -> None:
            x.add_(OFFSET)

        build = Building(MESH)
        shifted = build.call("latetest.shift.default", build.input(whole((2,))))
        again = build.call("out_of_place", "latetest.shift_.default", ["x"], [shifted], ["x"])
        build.output(build.call("getitem", again, 0), whole((2,)))
        (out,) = executor.run(build.plan(), [torch.ones(2)])
        assert [shard.tolist() for shard in executor.shards(out)] == [[7, 7], [7, 7]]


def test_a_function_that_cannot_travel_is_refused_with_the_way_out() -> None:
    lock = threading.Lock()

    @torch.library.custom_op("latetest::locked", mutates_args=())
    def locked(x: torch.Tensor) -> torch.Tensor:
        with lock:
            return x.clone()

    build = Building(MESH)
    build.output(build.call("latetest.locked.default", build.input(whole((2,)))), whole((2,)))
    (made,) = definitions(build.plan())
    define((made,))  # known here
    with pytest.raises(PlanError, match="do not know the op latetest::other, and it cannot be sent to them: "):
        define((replace(made, name="latetest::other"),))
