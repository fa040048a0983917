"""Training that goes on by itself, and goes back to a checkpoint where state is lost: every row is in the applied steps
exactly once."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import DeviceMeshError, LostError, MonarchError
from tests.healing.test_shrinking import BATCHES, Training, in_pytorch, kill

ROWS = torch.arange(48.0)


class Counting:
    """State that says which rows were in the steps that are applied, and in which order: replicated, or on one worker
    alone each."""

    def __init__(self, mesh: Mesh, layout: str) -> None:
        self.seen = monarch.distribute(torch.zeros(len(ROWS)), mesh, layout)
        self.steps = monarch.distribute(torch.zeros(()), mesh)
        self.index = monarch.distribute(ROWS, mesh, layout)

        @monarch.program(mesh=mesh)
        def step(rows: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            self.seen.add_((self.index[:, None] == rows[None, :]).any(1) * self.steps)
            return rows.sum()

        self.step: Any = step

    def check(self, batch: int) -> None:
        """Each row was in the step that is its turn, once."""
        assert torch.equal(self.seen.full_tensor(), torch.arange(len(ROWS)) // batch + 1.0)


def deaths(mesh: Mesh, results: Iterator[Any], chance: random.Random, every: int, most: int) -> list[float]:
    """The results, while workers die at random times."""
    read, killed = [], 0
    for result in results:
        read.append(result.item())
        if killed < most and chance.random() < 1 / every:
            killed += 1
            kill(mesh, chance.randrange(mesh.executor.mesh.workers))
    return read


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["respawn", "shrink"])
def test_every_row_is_in_one_step_that_is_applied(policy: Any) -> None:
    with Mesh(data=3) as mesh, monarch.data.stream(ROWS, mesh, "[@data]", batch=4) as stream:
        counting = Counting(mesh, "[-]")
        loop = monarch.elastic(mesh, counting.step, stream, policy=policy, grow_after=2)
        read = deaths(mesh, loop, random.Random(1), 3, 4)
        assert read == [rows.sum().item() for rows in ROWS.split(4)]
        counting.check(4)
        assert len(mesh) == 3 or policy == "shrink"


def test_training_shrinks_and_grows_with_pytorchs_numbers() -> None:
    losses, expected = in_pytorch()
    with Mesh(data=4) as mesh:
        training = Training(mesh, {"*": None})
        read, sizes = [], []
        for number, loss in enumerate(monarch.elastic(mesh, training.step, BATCHES, policy="shrink", grow_after=2)):
            read.append(loss.item())
            sizes.append(len(mesh))
            if number in (1, 5):
                kill(mesh, 1)
        assert sizes == [4, 4, 3, 3, 4, 4, 3, 3]
        torch.testing.assert_close(read, losses, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(training.left(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(1)
@pytest.mark.parametrize("policy", ["respawn", "shrink"])
def test_state_that_is_lost_goes_back_to_a_checkpoint_with_the_datas_position(
    policy: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Mesh(data=3) as mesh, monarch.data.stream(ROWS, mesh, "[@data]", batch=4, shuffle=3) as stream:
        counting = Counting(mesh, "[@data]")
        counting.step(torch.full((4,), -1.0)).item()  # no row; the program knows its state from here on
        assert str(counting.seen.sharding) == "[@data]"
        state = {
            "seen": counting.seen,
            "steps": counting.steps,
            "index": counting.index,
            "stream": stream,
            "number": -1,
        }
        monarch.save(state, tmp_path / "c").result()
        chance, back, restored = random.Random(2), [], []

        def restore() -> None:
            monarch.load(tmp_path / "c", into=state)
            restored.append(state["number"])

        rows: list[float] = []
        killed = 0
        for result in monarch.elastic(mesh, counting.step, stream, policy=policy, restore=restore):
            if len(restored) > len(back):
                back.append(restored[-1])
                del rows[int(back[-1]) + 1 :]
            state["number"] = len(rows)
            rows.append(result.item())
            if len(rows) % 3 == 0:
                monarch.save(state, tmp_path / "c").result()
            if killed < 3 and chance.random() < 0.3:
                killed += 1
                kill(mesh, chance.randrange(len(mesh)))
        assert len(back) == killed == 3 and "cannot be restored" in caplog.text
        assert len(rows) == 12 and sum(rows) == ROWS.sum().item()
        assert sorted(counting.seen.full_tensor().tolist()) == sorted((torch.arange(48) // 4 + 2.0).tolist())


def test_what_no_checkpoint_has_is_named_and_raises(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Mesh(data=2) as mesh:
        saved, other = (monarch.distribute(torch.ones(4), mesh, "[@data]") for _ in range(2))

        @monarch.program(mesh=mesh)
        def step() -> torch.Tensor:
            saved.add_(1)
            other.add_(1)
            return saved.sum()

        step().wait()
        monarch.save({"saved": saved}, tmp_path / "c").result()
        kill(mesh, 1)
        with pytest.raises(DeviceMeshError):
            while True:
                step().item()
        with pytest.raises(LostError):
            monarch.heal_mesh(mesh)
        with caplog.at_level(logging.WARNING):
            monarch.heal_mesh(mesh, restore=lambda: monarch.load(tmp_path / "c", into={"saved": saved}))
        assert "2 tensors of mesh<data=2> cannot be restored" in caplog.text
        assert "no value was restored for other" in caplog.text
        assert torch.equal(saved.full_tensor(), torch.full((4,), 2.0))
        with pytest.raises(LostError, match="cannot be restored"):
            other.full_tensor()
        restored: list[int] = []
        monarch.heal_mesh(mesh, restore=lambda: restored.append(1))  # nobody is lost
        assert not restored


def test_too_many_deaths_and_other_failures_are_raised() -> None:
    with Mesh(data=2) as mesh:
        x = monarch.distribute(torch.zeros(4), mesh)

        @monarch.program(mesh=mesh)
        def step(at: torch.Tensor) -> torch.Tensor:
            return x[at].sum()

        loop = monarch.elastic(mesh, step, [torch.tensor([0])] * 20, failures=2, within=1e6)
        with pytest.raises(DeviceMeshError) as info:
            for _ in loop:
                kill(mesh, 0)
        assert info.value.mesh_lost
        monarch.heal_mesh(mesh)
        with pytest.raises(DeviceMeshError, match="IndexError") as info:
            next(monarch.elastic(mesh, step, [torch.tensor([9])]))
        assert not info.value.mesh_lost
        with pytest.raises(MonarchError, match="failures=0"):
            monarch.elastic(mesh, step, [], failures=0)


def test_a_checkpoint_that_growing_goes_back_to_has_the_place_in_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker dies while the mesh grows, behind the third step, and the checkpoint is of the first."""
    done: list[int] = []

    class From:
        def __iter__(self) -> Iterator[int]:
            return iter(range(len(done), 5))

    def grow(mesh: Mesh, **sizes: int) -> None:
        if len(grown) == 2:
            grown.append(sizes)
            raise DeviceMeshError("a worker has died").knowing(mesh_lost=True)
        grown.append(sizes)

    grown: list[dict[str, int]] = []
    monkeypatch.setattr("monarch.stdlib.elastic.resize_mesh", grow)
    monkeypatch.setattr("monarch.stdlib.elastic.heal_mesh", lambda mesh, policy, restore: restore())
    mesh = Mesh.abstract(data=2)
    steps = monarch.elastic(mesh, done.append, From(), restore=lambda: done.__delitem__(slice(1, None)), grow_after=1)
    list(steps)
    assert done == [0, 1, 2, 3, 4]
