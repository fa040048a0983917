"""Generated kernels in plans, on a mesh of two workers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from monarch.compiler.kernels.cpp import build as building
from monarch.compiler.plan import DeviceMeshError, MeshSpec, PlanError
from monarch.runtime.controller.executor import MeshExecutor
from tests.runtime.building import Building, whole

MESH = MeshSpec.of(a=2)

SCALED = """
kernel scaled(a0: f32[4, 6], a1: f32[]) -> (b0: f32[4, 6], b1: f32[4])
nest [4 | 6] {
  %0 = load a0 [6, 1]
  %1 = load a1 [0, 0]
  %2 = mul f32(%0, %1)
  %3 = store b0 [6, 1] %2
  %4 = reduce sum %2
  %5 = store b1 [1, 0] %4
}
"""

PICKED = """
kernel picked(a0: f32[5, 3], a1: i64[2]) -> (b0: f32[2, 3])
nest [2, 3] {
  %0 = load a1 [1, 0]
  %1 = load a0 [0, 1] gather %0 * 3 of 5  # train.py:12
  %2 = store b0 [3, 1] %1
}
"""


@pytest.fixture(scope="module")
def executor() -> Iterator[MeshExecutor]:
    with MeshExecutor(MESH) as executor:
        yield executor


def scaled(over: list[int]) -> Building:
    build = Building(MESH, f"scaled {over}")
    x, factor = build.input(whole((4, 6))), build.input(whole(()))
    doubled = build.call("aten.mul.Tensor", x, 2.0, free=[x])
    result = build.call("kernel", [doubled, factor], SCALED, over)
    build.output(build.call("getitem", result, 0), whole((4, 6)))
    build.output(build.call("getitem", result, 1, free=[result]), whole((4,)))
    build.output(doubled, whole((4, 6)))
    return build


@pytest.mark.parametrize("over", [[-1, -1], [0, -1]])
@pytest.mark.parametrize("compiled", [True, False], ids=["compiled", "by torch's ops"])
def test_a_kernel_runs_in_a_plan(over: list[int], compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(building, "find_compiler", lambda: None)
    with MeshExecutor(MESH) as executor:
        x = torch.arange(24.0).reshape(4, 6)
        arguments = [executor.put(x, whole((4, 6))), executor.put(torch.tensor(3.0), whole(()))]
        plan = scaled(over).plan()
        for _ in range(2):
            product, total, operand = executor.run(plan, arguments)
            assert torch.equal(executor.shards(product)[1], 6 * x)
            assert torch.equal(executor.shards(total)[1], 6 * x.sum(1))
            assert torch.equal(executor.shards(operand)[0], 6 * x if over[0] == 0 else 2 * x)


def test_an_operand_that_lies_otherwise_is_copied(executor: MeshExecutor) -> None:
    build = Building(MESH, "turned")
    x, factor = build.input(whole((6, 4))), build.input(whole(()))
    result = build.call("kernel", [build.call("aten.t.default", x), factor], SCALED, [-1, -1])
    build.output(build.call("getitem", result, 0), whole((4, 6)))
    value = torch.randn(6, 4)
    (product,) = executor.run(
        build.plan(), [executor.put(value, whole((6, 4))), executor.put(torch.tensor(2.0), whole(()))]
    )
    assert torch.equal(executor.shards(product)[0], 2 * value.T)


@pytest.mark.parametrize("index", [-1, 5, 2**40])
def test_a_gather_that_fails_names_the_line(executor: MeshExecutor, index: int) -> None:
    build = Building(MESH, "picked")
    table, rows = build.input(whole((5, 3))), build.input(whole((2,), torch.int64))
    result = build.call("kernel", [table, rows], PICKED, [-1])
    build.output(build.call("getitem", result, 0), whole((2, 3)))
    plan, table = build.plan(), torch.randn(5, 3)
    held = executor.put(table, whole((5, 3)))
    (bad,) = executor.run(plan, [held, executor.put(torch.tensor([4, index]), whole((2,), torch.int64))])
    with pytest.raises(DeviceMeshError, match=rf"in picked: {index}, and there are 5 rows \(train.py:12\)"):
        executor.shards(bad)
    (good,) = executor.run(plan, [held, executor.put(torch.tensor([4, 0]), whole((2,), torch.int64))])
    assert torch.equal(executor.shards(good)[0], table[[4, 0]])


def test_what_is_no_kernel_instruction_is_refused(executor: MeshExecutor) -> None:
    build = Building(MESH, "short")
    x = build.input(whole((4, 6)))
    build.output(build.call("kernel", [x], SCALED), whole((4, 6)))
    with pytest.raises(PlanError, match="a kernel takes"):
        executor.run(build.plan(), [executor.put(torch.zeros(4, 6), whole((4, 6)))])
