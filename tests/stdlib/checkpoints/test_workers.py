"""Checkpoints that worker processes write beside their steps, and read."""

from __future__ import annotations

import os
import signal
import textwrap
import threading
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import monarch
from monarch.actor import Actor, endpoint, this_host
from monarch.distributed import Mesh
from monarch.exceptions import CheckpointError, DeviceMeshError
from monarch.runtime.controller.storing import Storing
from monarch.stdlib.checkpoints import saving
from monarch.testing import chaos
from tests import python
from tests.sample import is_full

BATCH = torch.randn(6, 10), torch.randint(7, (6,))


class Training:
    def __init__(self, mesh: Mesh, layouts: dict[str, Any] | None, seed: int = 0) -> None:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(10, 9), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 7))
        self.model = monarch.module_to_mesh(model, mesh, layouts)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 2, gamma=0.5)

        @monarch.program(mesh=mesh)
        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.optimizer.zero_grad()
            loss = F.cross_entropy(self.model(x), y)
            loss.backward()
            self.optimizer.step()
            return loss

        self._step = step

    def step(self) -> float:
        loss = self._step(*BATCH).item()
        self.scheduler.step()
        return float(loss)

    def state(self) -> dict[str, Any]:
        parts = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**parts, "random": torch.default_generator, "step": 0}

    def tensors(self) -> dict[str, torch.Tensor]:
        found = {name: tensor.full_tensor() for name, tensor in self.model.state_dict().items()}
        for number, entries in self.optimizer.state_dict()["state"].items():
            for key, value in entries.items():
                found[f"{number}.{key}"] = getattr(value, "full_tensor", value.clone)()
        return found


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


LAYOUTS = {"0.weight": "[@data, @model]", "0.bias": "[@model]", "3.weight": "[-, @(model,data)]"}


def test_training_goes_on_from_a_checkpoint_on_another_mesh_with_the_same_bits_in_its_state(tmp_path: Path) -> None:
    with Mesh(data=2, model=2) as mesh, Mesh(data=3) as other, Mesh(data=2, model=2) as same:
        before = Training(mesh, LAYOUTS)
        for _ in range(3):
            before.step()
        saving = monarch.save({**before.state(), "step": 3}, tmp_path / "c")
        held = before.tensors()
        losses = [before.step() for _ in range(4)]  # which replace what is being written
        assert saving.result() == tmp_path / "c"
        assert saving.progress[0] == saving.progress[1] > 0

        elsewhere = Training(other, {"0.weight": "[-, @data]", "3.bias": "[@data]"}, seed=1)
        state = monarch.load(tmp_path / "c", into=elsewhere.state())
        assert state["step"] == 3 and equal(elsewhere.tensors(), held)
        assert elsewhere.scheduler.state_dict()["last_epoch"] == 3
        assert elsewhere.optimizer.param_groups[0]["lr"] == 0.05
        found = [elsewhere.step() for _ in range(4)]
        assert found == pytest.approx(losses, rel=1e-5)

        alike = Training(same, LAYOUTS, seed=1)
        alike.step()  # its optimizer has state that is filled in place
        monarch.load(tmp_path / "c", into=alike.state())
        assert [alike.step() for _ in range(4)] == losses
        assert equal(alike.tensors(), before.tensors())


def test_nothing_changes_where_a_checkpoint_does_not_fit(tmp_path: Path) -> None:
    with Mesh(data=2) as mesh:
        model = monarch.module_to_mesh(nn.Linear(4, 3), mesh)
        monarch.save({"model": model}, tmp_path / "c").result()
        larger = monarch.module_to_mesh(nn.Linear(4, 5), mesh)
        with pytest.raises(CheckpointError, match=r"size mismatch for model.weight: .* \[3, 4\] .* \[5, 4\]"):
            monarch.load(tmp_path / "c", into={"model": larger})
        named = nn.ModuleDict({"weight": nn.Linear(4, 3)})
        with pytest.raises(CheckpointError, match='Missing key.*"weight.weight", "weight.bias"') as caught:
            monarch.load(tmp_path / "c", into={"model": named})
        assert 'Unexpected key(s) in state_dict: "weight", "bias".' in str(caught.value)
        with pytest.raises(CheckpointError, match="'step' is not in it"):
            monarch.load(tmp_path / "c", into={"model": model, "step": 1})
        with pytest.raises(CheckpointError, match="no checkpoint at"):
            monarch.load(tmp_path / "none", into={"model": model})
        before = model.weight.full_tensor()
        file = max((tmp_path / "c").glob("__[0-9]*"), key=lambda each: each.stat().st_size)
        file.write_bytes(bytes(file.stat().st_size))
        with torch.no_grad():
            model.weight.add_(1)
        with pytest.raises(CheckpointError, match=f"{file} is corrupt: in 'model.(weight|bias)', bytes"):
            monarch.load(tmp_path / "c", into={"model": model})
        assert torch.equal(model.weight.full_tensor(), before + 1)


def test_a_worker_that_is_killed_while_it_saves_leaves_the_former_checkpoint(tmp_path: Path) -> None:
    with Mesh(data=2) as mesh:
        x = monarch.distribute(torch.arange(8.0), mesh, "[@data]")
        monarch.save({"x": x}, tmp_path / "c").result()
        pid = mesh.executor.worker_pids()[1]  # type: ignore[attr-defined]
        os.kill(pid, signal.SIGSTOP)
        saving = monarch.save({"x": x * 2}, tmp_path / "c")
        with pytest.raises(CheckpointError, match="c is being saved to already"):
            monarch.save({"x": x}, tmp_path / "c")
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(CheckpointError, match="has lost a worker") as caught:
            saving.result()
        assert isinstance(caught.value.__cause__, DeviceMeshError)
        assert [each.name for each in tmp_path.iterdir()] == ["c"]
        into = {"x": torch.zeros(8)}
        assert torch.equal(monarch.load(tmp_path / "c", into=into)["x"], torch.arange(8.0))


def test_a_step_that_failed_has_nothing_to_save(tmp_path: Path) -> None:
    with Mesh(data=2) as mesh:
        table = monarch.distribute(torch.arange(8.0), mesh)

        @monarch.program(mesh=mesh)
        def look(at: "i64[2]") -> torch.Tensor:
            return table[at]

        found = look(torch.tensor([1, 99]))
        with pytest.raises(CheckpointError, match="IndexError"):
            monarch.save({"found": found}, tmp_path / "c").result()
        assert not list(tmp_path.iterdir())
        monarch.save({"table": table}, tmp_path / "c").result()


def test_a_mesh_is_closed_behind_what_it_saves_and_a_program_ends_behind_it(tmp_path: Path) -> None:
    script = """
        import sys, torch, monarch
        from monarch.distributed import Mesh
        with Mesh(data=2) as mesh:
            x = monarch.distribute(torch.arange(2.0**20), mesh, "[@data]")
            monarch.save({"x": x}, sys.argv[1])
    """
    python.run("-c", textwrap.dedent(script), tmp_path / "c", check=True, timeout=120)
    into = {"x": torch.zeros(2**20)}
    assert torch.equal(monarch.load(tmp_path / "c", into=into)["x"], torch.arange(2.0**20))


def test_a_program_that_is_killed_while_it_saves_leaves_the_former_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = """
        import os, signal, sys, torch, monarch
        from monarch.distributed import Mesh
        mesh = Mesh(data=2)
        x = monarch.distribute(torch.arange(8.0), mesh, "[@data]")
        monarch.save({"x": x}, sys.argv[1]).result()
        os.kill(mesh.executor.worker_pids()[1], signal.SIGSTOP)
        monarch.save({"x": x * 2}, sys.argv[1])
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = python.run("-c", textwrap.dedent(script), tmp_path / "c", timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert sorted(each.name for each in tmp_path.iterdir()) == [".c.saving", "c"]
    into = {"x": torch.zeros(8)}
    assert torch.equal(monarch.load(tmp_path / "c", into=into)["x"], torch.arange(8.0))
    assert "c was not finished" in caplog.text
    monarch.save({"x": torch.ones(8)}, tmp_path / "c").result()
    assert [each.name for each in tmp_path.iterdir()] == ["c"]
    assert torch.equal(monarch.load(tmp_path / "c", into=into)["x"], torch.ones(8))


class Keeper(Actor):
    @endpoint
    def save(self, path: str) -> None:
        self.mesh = Mesh(data=2)  # closed with the process
        self.saving = monarch.save({"w": monarch.distribute(torch.ones(40_000_000), self.mesh)}, path)


def test_a_save_of_an_actor_that_is_stopped_is_finished(tmp_path: Path) -> None:
    procs = this_host().spawn_procs()
    procs.spawn("keeper", Keeper).save.call_one(str(tmp_path / "saved")).get()
    procs.stop().get()
    kept = torch.zeros(40_000_000)
    monarch.load(tmp_path / "saved", {"w": kept})
    assert bool((kept == 1).all())


def test_a_checkpoint_that_another_thread_saves_is_of_one_moment(tmp_path: Path) -> None:
    with Mesh(data=2) as mesh:
        counts = {str(number): monarch.distribute(torch.zeros(64), mesh, "[@data]") for number in range(20)}

        @monarch.program(mesh=mesh)
        def step() -> None:
            for count in counts.values():
                count.add_(1)

        failed: list[BaseException] = []

        def save() -> None:
            try:
                for number in range(8):
                    monarch.save(counts, tmp_path / str(number)).result()
            except BaseException as error:
                failed.append(error)

        saving = threading.Thread(target=save)
        saving.start()
        while saving.is_alive():
            step()
        assert not failed
        for number in range(8):
            found = {name: monarch.distribute(torch.zeros(64), mesh, "[@data]") for name in counts}
            monarch.load(tmp_path / str(number), found)
            assert len({tensor.full_tensor()[0].item() for tensor in found.values()}) == 1


@pytest.mark.parametrize("where", ["the workers write", "the thread begins"])
def test_an_interrupt_while_a_save_begins_keeps_no_mesh_from_closing(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh = Mesh(data=2)
    x = monarch.distribute(torch.arange(8.0), mesh)
    owner: Any = Storing if where == "the workers write" else threading.Thread
    real = owner.start

    def interrupted(self: Any, *arguments: Any) -> Any:
        made = real(self, *arguments) if owner is Storing else None
        raise KeyboardInterrupt(made)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as cut:
        patch.setattr(owner, "start", interrupted)
        monarch.save({"x": x}, tmp_path / "x")
    monarch.save({"x": x}, tmp_path / "x").result()
    closing = threading.Thread(target=mesh.close, daemon=True)
    closing.start()
    closing.join(30)
    assert not closing.is_alive(), cut  # which keeps what was under way, as a traceback that is printed does


def test_an_interrupt_at_any_point_of_a_save_leaves_its_path_free(tmp_path: Path) -> None:
    within = ["/stdlib/checkpoints/places.py", "/stdlib/checkpoints/saving.py"]
    if is_full():
        within = ["/stdlib/checkpoints/", "/runtime/controller/storing.py"]
    with Mesh(data=2) as mesh:
        values = [monarch.distribute(torch.full((8,), value), mesh, "[@data]") for value in (1.0, 2.0)]
        monarch.save({"x": values[0]}, tmp_path / "first").result()
        with chaos.interrupt(-1, within=within) as points:
            saving = monarch.save({"x": values[0]}, tmp_path / "first")
        saving.result()
        opened = len(os.listdir("/proc/self/fd"))
        for at in range(0, points.passed, 1 if is_full() else 3):
            path = tmp_path / str(at)
            with suppress(KeyboardInterrupt), chaos.interrupt(at, within=within) as found:
                monarch.save({"x": values[0]}, path)
            for thread in threading.enumerate():
                if thread.name == f"saving {path.name}":  # the interrupt came behind its start: it goes on
                    thread.join()
            monarch.save({"x": values[1]}, path).result()
            assert torch.equal(monarch.load(path, {"x": torch.zeros(8)})["x"], torch.full((8,), 2.0)), found.where
        assert len(os.listdir("/proc/self/fd")) <= opened and not list(tmp_path.glob(".*"))


def test_a_second_interrupt_while_a_save_is_given_up_leaves_its_path_free(tmp_path: Path) -> None:
    within = ["/stdlib/checkpoints/", "/runtime/controller/storing.py"]
    with Mesh(data=2) as mesh:
        x = monarch.distribute(torch.full((8,), 1.0), mesh, "[@data]")
        for at in range(0, 200, 1 if is_full() else 25):
            path = tmp_path / str(at)
            with ExitStack() as second, suppress(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:

                def interrupted(self: Any, *arguments: Any, at: int = at, second: ExitStack = second) -> None:
                    second.enter_context(chaos.interrupt(at, within=within))
                    raise KeyboardInterrupt

                patch.setattr(saving.Saving, "__init__", interrupted)  # behind the workers' start
                monarch.save({"x": x}, path)
            until = time.monotonic() + 60
            while True:  # what the second has not waited for goes on
                try:
                    monarch.save({"x": x}, path).result()
                    break
                except CheckpointError:
                    assert time.monotonic() < until, at
        assert not list(tmp_path.glob(".*"))
