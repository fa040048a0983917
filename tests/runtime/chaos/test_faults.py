"""Each fault that a worker can suffer happens where it was asked for, and is told; the mesh goes on or is healed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
import torch

import monarch
from monarch.compiler.plan import DeviceMeshError, MeshSpec, MonarchError
from monarch.distributed import Mesh
from monarch.runtime.controller.executor import MeshExecutor
from monarch.testing import chaos
from tests.runtime.building import whole
from tests.runtime.collectives.loopback import executor_on
from tests.runtime.controller.test_healing import W, training

pytestmark = pytest.mark.sample(1, of="on")

MESH = MeshSpec.of(a=2, b=2)
BATCH = torch.ones(4, 6, 4)
LAST = 10**6
SUM = 4.0 * 24


class On:
    """What a language's mesh is to the faults."""

    def __init__(self, executor: MeshExecutor) -> None:
        self.executor = executor
        self.plan = training(MESH)
        self.commit = [instruction.op for instruction in self.plan.instructions].index("commit")
        self.w = executor.put(torch.zeros(6, 4), W)
        self.steps = 0

    def step(self) -> float:
        """w += 4 in each element; gives its sum. A step that raises has not changed it."""
        w = self.w
        try:
            loss, w = self.executor.run(self.plan, [self.w, BATCH])
            read = self.executor.shards(loss, [0])[0].item()
        except DeviceMeshError as error:
            if error.mesh_lost:
                self.executor.heal([("w", self.w)])
            self.w = self.executor.recover(w)
            raise
        self.w, self.steps = w, self.steps + 1
        return read

    def goes_on(self) -> None:
        """The state is that of the steps that worked, on all workers, and another step works."""
        for shard in self.executor.shards(self.w):
            assert torch.equal(shard, torch.full((6, 4), 4.0 * self.steps))
        assert self.step() == SUM * self.steps


@pytest.fixture(params=["local", "hosts"])
def on(request: pytest.FixtureRequest) -> Iterator[On]:
    with executor_on(request.param, MESH) as executor:
        on = On(executor)
        assert on.step() == SUM
        yield on


def test_a_worker_is_killed_at_each_instruction(on: On) -> None:
    for instruction in (0, on.commit, LAST):
        chaos.kill(on, 2, instruction)
        with pytest.raises(DeviceMeshError) as info:
            while True:  # behind the commit the step is done by the others, and the next one raises
                assert on.step() == SUM * on.steps
        assert info.value.mesh_lost and info.value.worker == 2 and info.value.signal == "SIGKILL"
        on.goes_on()


def test_an_instruction_fails_and_nothing_is_applied(on: On) -> None:
    for instruction in (0, 1, on.commit, LAST):
        chaos.fail(on, 1, instruction)
        with pytest.raises(DeviceMeshError, match="InjectedError: a fault was injected before instruction") as info:
            on.step()
        assert info.value.worker == 1 and not info.value.mesh_lost
        on.goes_on()


@pytest.mark.parametrize("what", ["stop", "slow", "delay"])
def test_what_takes_longer_is_waited_for(on: On, what: str) -> None:
    if what == "stop":
        chaos.stop(on, 3, 0.2, on.commit)
    else:
        getattr(chaos, what)(on, 3, 0.01)
    assert on.step() == SUM * on.steps
    on.goes_on()


@pytest.mark.sample(1)
@pytest.mark.parametrize("fault", [chaos.cut, chaos.garble])
def test_a_link_between_hosts_breaks_and_is_connected_anew(fault: Callable[..., None]) -> None:
    with executor_on("hosts", MESH) as executor:
        on = On(executor)
        on.step()
        fault(on, 1, 1)
        with pytest.raises(DeviceMeshError, match="the connection between worker") as info:
            while True:
                on.step()
        assert info.value.mesh_lost
        on.goes_on()


def test_what_a_worker_cannot_have_fails_the_step_alone(on: On) -> None:
    chaos.limit(on, 0, "file size", 1000)
    large = on.executor.put(torch.zeros(1 << 16), whole((1 << 16,)))
    with pytest.raises(DeviceMeshError, match="File too large"):
        on.executor.shards(large, [0])
    chaos.limit(on, 0, "file size", None)
    assert len(on.executor.shards(large, [0])) == 1
    on.goes_on()


def test_a_plan_for_which_a_worker_has_no_room_says_how_much_it_needs_and_where() -> None:
    with Mesh(data=2) as mesh:
        rows = torch.ones(8, 500)

        @monarch.program(mesh=mesh)
        def step(x: "f32[8@data, 500]"):  # type: ignore[no-untyped-def]
            y = torch.ones(4000, 500) @ x.mT
            return (y @ x).sum()  # f32[4000, 500] of 4 bytes

        mesh.executor  # noqa: B018  (the workers start)
        chaos.limit(mesh, 0, "memory", 4 << 20)
        for _ in range(2):
            with pytest.raises(DeviceMeshError) as info:
                step(rows).item()
            text = str(info.value)
            assert re.search(
                r"worker data=0 failed: NoRoomError: plan 'step' needs 7\.\d MiB for its ops' results, "
                r"and the worker has 4\.0 MiB left of its limit, [\d,.]+ MiB\n",
                text,
            )
            assert "return (y @ x).sum()" in text
            assert "of 7.6 MiB: shard it, make the batch smaller, or\n  raise the limit" in text
            assert "traceback" not in text
        chaos.limit(mesh, 0, "memory", None)
        assert step(rows).item() == pytest.approx(4000 * 500 * 500 * 8)


def test_a_fault_for_nobody_is_refused(on: On) -> None:
    with pytest.raises(MonarchError, match="no worker 4"):
        chaos.kill(on, 4)
    with pytest.raises(MonarchError, match="numbered from 0"):
        chaos.fail(on, 0, -1)
