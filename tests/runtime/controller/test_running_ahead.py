"""Workers run ahead of each other where steps meet nowhere. What one has freed or replaced meanwhile, another may still
read, and die there: then the step is given again, and has to find it."""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch

from monarch.compiler.mesh import Shape
from monarch.compiler.plan import DeviceMeshError, Layout, MeshSpec, Plan, TensorType
from monarch.runtime.controller.executor import MeshExecutor
from monarch.runtime.controller.local import LocalConnection
from monarch.runtime.processes.workers import Workers
from monarch.runtime.shared import signals
from monarch.runtime.worker.freed import FREED_BYTES, Freed
from tests.runtime.building import Building, whole
from tests.runtime.collectives.loopback import executor_on
from tests.runtime.controller.test_parts import training
from tests.runtime.controller.test_transfers import joined
from tests.runtime.stopping import stop, until

pytestmark = pytest.mark.sample(1, of="executor")

MESH = MeshSpec.of(a=2, b=2)


@pytest.fixture(params=["local", "hosts"])
def executor(request: pytest.FixtureRequest) -> Iterator[MeshExecutor]:
    with executor_on(request.param, MESH) as executor:
        yield executor


def workers_of(executor: MeshExecutor) -> list[Workers]:
    connection: Any = executor.connection
    if isinstance(connection, LocalConnection):
        return [connection.workers]
    services = connection.tree.services
    return [part.workers for service in services for parts in service.parts.values() for part in parts]


class Ahead:
    """While the block lasts some workers stand still. Behind it one of them has died, and the others have not gone on
    before they could see that."""

    def __init__(self, executor: MeshExecutor, still: Iterable[int], dies: int) -> None:
        self.executor, self.still, self.dies = executor, list(still), dies

    def __enter__(self) -> None:
        executor = self.executor
        self.pids = executor.worker_pids()
        stop(*(self.pids[rank] for rank in self.still))

    def __exit__(self, *_: object) -> None:
        executor = self.executor
        last = executor.state.next_command
        for workers in workers_of(executor):
            until(self._came, workers, last)
        os.kill(self.pids[self.dies], signal.SIGKILL)
        for workers in workers_of(executor):
            until(_is_lost, workers)
        for rank in set(self.still) - {self.dies}:
            os.kill(self.pids[rank], signal.SIGCONT)

    def _came(self, workers: Workers, last: int) -> bool:
        return all(done >= last for rank, done in workers.finished_by().items() if rank not in self.still)


def _is_lost(workers: Workers) -> bool:
    return bool(workers.signals.words[signals.DEAD])


def notice(executor: MeshExecutor) -> None:
    with pytest.raises(DeviceMeshError, match="was killed by SIGKILL"):
        while True:
            executor.wait(executor.put(torch.zeros(2), whole((2,))))


def local(mesh: MeshSpec, op: str, type: TensorType, *arguments: Any) -> Plan:
    """A step of one op, for which no worker waits."""
    build = Building(mesh, op.split(".")[1])
    build.output(build.call(op, build.input(type), *arguments), type)
    return build.plan()


@pytest.mark.parametrize("frees", ["with the next step", "by a command of its own"])
def test_what_a_step_reads_is_there_though_others_have_freed_it(executor: MeshExecutor, frees: str) -> None:
    """Worker 1 frees its half of y, worker 3 dies with the only other copy of it, and worker 0 is still to read its."""
    type_ = TensorType(torch.float32, (4, 6), Layout((("b",), ())))
    double, more = local(MESH, "aten.mul.Tensor", type_, 2.0), local(MESH, "aten.add.Tensor", type_, 1.0)
    x = torch.arange(24.0).view(4, 6)
    (y,) = executor.run(double, [x])
    (z,) = executor.run(more, [y])
    executor.wait(z)
    with Ahead(executor, still=(0, 3), dies=3):
        (z,) = executor.run(double, [y])
        del y
        if frees == "with the next step":
            (last,) = executor.run(more, [z])
        else:
            last = executor.put(torch.ones(2), whole((2,)))
            executor.connection.publish()
    notice(executor)
    executor.heal([("z", z)])
    for rank, shard in enumerate(executor.shards(z)):
        assert torch.equal(shard, 4 * x[2 * (rank % 2) :][:2])
    assert executor.held_values() == [2] * 4
    del last


def test_what_a_step_of_two_parts_reads_is_not_replaced_before_both_have_done_it() -> None:
    """The first part has sent its state to the second, which dies before it has read it; the first goes on training."""
    root = MeshSpec.of(w=6)
    shape = Shape.of(root.sizes)
    first, second = shape.select("w", slice(0, 2)), shape.select("w", slice(2, 6))
    a, b = Building(MeshSpec.of(w=2)), Building(MeshSpec.of(w=4))
    w = whole((4,))
    a.call("send", a.input(w), 0)
    b.output(b.call("aten.mul.Tensor", b.call("recv", 0, [4], torch.float32), 2), w)
    told = joined([("a", first, a), ("b", second, b)], [(0, 1, w, w)])
    with executor_on("local", root) as executor:
        part = executor.over(first)
        train = training(part.mesh)
        state = part.put(torch.ones(4), w)
        (copy,) = executor.run(told, [state])
        executor.wait(copy)
        pids = executor.worker_pids()
        stop(pids[4], pids[5])
        (copy,) = executor.run(told, [state])
        batch = torch.arange(8.0).view(2, 4)
        loss, state = part.run(train, [state, batch])
        executor.connection.publish()
        ((words, line),) = [(each.signals.words, signals.line_of(0)) for each in workers_of(executor)]
        begun = executor.state.last.sequence << signals.STEP_BITS
        until(lambda: words[line + signals.PROGRESS] > begun)  # it is in the step that replaces the state
        os.kill(pids[5], signal.SIGKILL)
        until(_is_lost, *workers_of(executor))
        os.kill(pids[4], signal.SIGCONT)
        notice(executor)
        executor.heal([("w", state)])
        assert [shard.tolist() for shard in executor.over(second).shards(copy)] == [[2.0] * 4] * 4
        assert torch.equal(part.shards(state)[1], 1 + batch.sum(0))
        assert part.shards(loss, [0])[0] == (1 + batch.sum(0)).sum()


def test_a_worker_waits_for_those_behind_before_it_keeps_too_much(executor: MeshExecutor) -> None:
    rows = FREED_BYTES // 4 // 3  # so that a worker keeps two at most
    type_ = TensorType(torch.float32, (2, rows), Layout((("b",), ())))
    more = local(MESH, "aten.add.Tensor", type_, 1.0)
    (x,) = executor.run(more, [torch.zeros(2, rows)])
    executor.wait(x)
    pid = executor.worker_pids()[2]
    stop(pid)
    for _ in range(8):
        (x,) = executor.run(more, [x])
    executor.connection.publish()
    os.kill(pid, signal.SIGCONT)
    assert all(bool((shard == 9).all()) for shard in executor.shards(x))


# -- without processes -------------------------------------------------------------------------------------------------


class Others:
    """Workers that have finished so many commands, and those in `later` when somebody waits."""

    def __init__(self, finished: int, later: Iterable[int] = ()) -> None:
        self.finished, self.later, self.waits = finished, deque(later), list[int]()

    def passed(self, command: int, ranks: Iterable[int] | None = None) -> bool:
        return self.finished >= command

    def await_passed(self, command: int, ranks: Iterable[int] | None = None) -> bool:
        self.waits.append(command)
        while self.later and self.finished < command:
            self.finished = self.later.popleft()
        return self.passed(command)


def values(*handles: int, size: int = 1) -> dict[int, torch.Tensor]:
    return {handle: torch.empty(size, dtype=torch.uint8) for handle in handles}


def test_freed_values_are_kept_until_others_have_come_as_far() -> None:
    freed, others = Freed(), Others(5)
    freed.keep(5, values(1), others)
    freed.let_go(others)
    assert not freed
    freed.keep(6, values(2, 3), others)
    freed.keep(8, values(4), others)
    freed.let_go(others)
    assert others.waits == []
    others.finished = 7
    freed.let_go(others)
    assert freed.take().keys() == {4} and not freed


def test_little_that_is_freed_is_not_looked_after_at_each_command_and_much_is() -> None:
    freed, others = Freed(), Others(0)
    freed.keep(1, values(1, size=1 << 20), others)
    assert freed.many, "to be let go at the next command"
    others.finished = 10
    freed.keep(2, values(2, size=1 << 20), others)
    assert not freed and not freed.many
    for command in range(100):
        freed.keep(4, values(command), others)
    assert 0 < len(freed.take()) < 20


def test_freed_values_are_bounded() -> None:
    freed, others = Freed(), Others(0, [1, 2])
    for command in range(1, 5):
        freed.keep(command, values(command, size=FREED_BYTES // 2), others)
    assert others.waits == [1, 2] and freed.take().keys() == {3, 4}
    died = Others(0)
    freed.keep(1, values(1, size=FREED_BYTES + 1), died)  # nobody comes any more: what is kept is for healing
    assert died.waits == [1] and freed.take().keys() == {1}
