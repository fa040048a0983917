"""A step that fails on the workers: who, where and why, and state as the last finished step left it."""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import monarch
from monarch.compiler.errors import DeviceMeshError, LayoutError
from monarch.distributed import Mesh
from monarch.language import OperatorError

pytestmark = pytest.mark.sample(1, of="kernels")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(tokens))


def test_a_failed_step_names_the_line_and_the_worker_and_leaves_state_as_it_was() -> None:
    torch.manual_seed(0)
    dense = Model()
    model = copy.deepcopy(dense)
    plain = torch.optim.AdamW(dense.parameters(), lr=0.1)
    with Mesh(data=2) as mesh:
        model = monarch.module_to_mesh(model, mesh, layouts=_replicated(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        @monarch.program
        def step(tokens: "i64[4@data]", targets: "i64[4@data]"):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens), targets)
            loss.backward()
            optimizer.step()
            return loss

        def reference(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            plain.zero_grad()
            loss = F.cross_entropy(dense(tokens), targets)
            loss.backward()
            plain.step()
            return loss.detach()

        good, targets = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 4])
        for _ in range(4):
            torch.testing.assert_close(step(good, targets).full_tensor(), reference(good, good))
        failed = step(torch.tensor([1, 2, 3, 99]), targets)  # there is no row 99; only worker data=1 is asked for it
        after = step(good, targets)  # sent before anybody knows
        with pytest.raises(DeviceMeshError) as caught:
            failed.item()
        text = str(caught.value)
        assert "test_failures.py" in text
        assert "data=1" in text
        assert "index out of range" in text
        assert "embedding" in text  # the op, or the kernel that it is in
        with pytest.raises(DeviceMeshError):
            after.item()
        for p, expected in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), expected.detach())
        for _ in range(3):
            torch.testing.assert_close(step(good, targets).full_tensor(), reference(good, good))


def test_a_killed_worker_is_named_and_nothing_hangs() -> None:
    with Mesh(data=2) as mesh:
        x = monarch.distribute(torch.ones(4), mesh, ["data"])
        assert (x + 1).sum().item() == 8
        pids = mesh.executor.worker_pids()  # type: ignore[attr-defined]
        os.kill(pids[1], signal.SIGKILL)
        with pytest.raises(DeviceMeshError, match="data=1.*SIGKILL"):
            (x + 2).sum().item()


def _replicated(model: nn.Module) -> dict[str, list[None]]:
    return {name: [None] * p.ndim for name, p in model.named_parameters()}


def test_an_index_out_of_range_in_a_sharded_table_is_an_index_error() -> None:
    with Mesh(model=2) as mesh:
        table = monarch.distribute(torch.randn(8, 64), mesh, "[@model, -]")

        @monarch.program
        def look_up(index):
            return F.embedding(index, table), F.one_hot(index, 8).float() @ table

        for result in look_up(torch.tensor([1, 9])):
            with pytest.raises(IndexError) as caught:
                result.full_tensor()
            assert isinstance(caught.value, DeviceMeshError)
            assert "test_failures.py" in str(caught.value)
            assert re.search(r"\b9\b", str(caught.value))
        with pytest.raises(IndexError, match="id=99"):
            monarch.program(lambda i: table[:, i])(torch.tensor(99)).full_tensor()
        with pytest.raises(RuntimeError, match="from 1 to 9|index 9"):  # without a program, from ATen's own lookup
            monarch.distribute(torch.ones(8), mesh)[torch.tensor([1, 9])].full_tensor()


def test_a_first_batch_with_a_bad_index_leaves_model_and_optimizer_usable() -> None:
    """The step that failed was to make the optimizer's state."""
    torch.manual_seed(0)
    dense = Model()
    model = copy.deepcopy(dense)
    plain = torch.optim.AdamW(dense.parameters(), lr=0.1)
    good, bad = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 99])
    with Mesh(data=2) as mesh:
        monarch.module_to_mesh(model, mesh, layouts=_replicated(model))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        def training(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
            def step(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
                loss = F.cross_entropy(model(tokens), targets)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                return loss.detach()

            return step

        step, reference = monarch.program(training(model, optimizer)), training(dense, plain)
        for _ in range(2):
            with pytest.raises(IndexError):
                step(bad, good).item()
            with pytest.raises(IndexError):
                reference(bad, good)
            assert not optimizer.state
        for _ in range(4):
            torch.testing.assert_close(step(good, good).full_tensor(), reference(good, good))
        for p, expected in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), expected.detach())


def test_a_bad_batch_leaves_gradients_as_they_were() -> None:
    """There are none, or those of the batches before, to which the next one adds."""
    torch.manual_seed(0)
    good, bad = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 99])
    with Mesh(data=2) as mesh:
        model = monarch.module_to_mesh(Model(), mesh)

        @monarch.program
        def step(tokens: torch.Tensor) -> torch.Tensor:
            loss = F.cross_entropy(model(tokens), good)
            loss.backward()
            return loss

        for batches in ((bad,), (good, bad), (bad,), (good, good)):
            for each in model.parameters():
                each.grad = None
            for count, batch in enumerate(batches):
                before = [None if each.grad is None else each.grad.full_tensor() for each in model.parameters()]
                if batch is good:
                    step(batch).item()
                    continue
                with pytest.raises(IndexError):
                    step(batch).item()
                for each, was in zip(model.parameters(), before, strict=True):
                    assert each.grad is None if count == 0 else torch.equal(each.grad.full_tensor(), was)


def test_arguments_without_data_leave_the_mesh_usable() -> None:
    with Mesh(data=2) as mesh:
        x = monarch.distribute(torch.ones(4), mesh)
        double = monarch.program(lambda t: t * 2 + x)
        meta, sparse = torch.ones(4, device="meta"), torch.eye(4).to_sparse()
        for wrong in (lambda: double(meta), lambda: monarch.distribute(sparse, mesh), lambda: x + sparse[0]):
            with pytest.raises((LayoutError, OperatorError)):
                wrong().full_tensor()
            assert double(torch.ones(4)).sum().item() == 12
        assert torch.equal(monarch.distribute(meta, mesh, "[@data]").full_tensor(), torch.zeros(4))


def test_without_a_program_a_bad_batch_is_raised_at_its_line_and_spoils_nothing_else() -> None:
    """Workers run what was recorded as one step; of it only what PyTorch would not have come to is left out."""
    torch.manual_seed(0)
    dense = Model()
    model = copy.deepcopy(dense)
    plain = torch.optim.AdamW(dense.parameters(), lr=0.1)
    good, bad = torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 99])

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = F.cross_entropy(model(tokens), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    with Mesh(data=2) as mesh:
        monarch.module_to_mesh(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for tokens, targets in ((bad, good), (good, bad), (good, good), (bad, good), (good, good)):
            if tokens is good and targets is good:
                assert step(model, optimizer, tokens, targets) == pytest.approx(step(dense, plain, tokens, targets))
                continue
            with pytest.raises(IndexError):
                step(dense, plain, tokens, targets)
            with pytest.raises(IndexError) as caught:
                step(model, optimizer, tokens, targets)
            assert isinstance(caught.value, DeviceMeshError)
            line = "self.head(self.embedding" if tokens is bad else "F.cross_entropy("
            assert caught.value.source is not None and line in caught.value.source.excerpt()
        for p, expected in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(p.full_tensor(), expected.detach())


def test_ops_behind_a_failed_program_keep_what_does_not_depend_on_it() -> None:
    with Mesh(data=2) as mesh:
        table = monarch.distribute(torch.arange(8.0), mesh)
        look_up = monarch.program(lambda index: table[index] * 2)
        optimizer = torch.optim.SGD([table.requires_grad_()], lr=0.1, momentum=0.9)
        failed = look_up(torch.tensor([1, 9]))
        other = table.detach() + 1
        (table[torch.tensor([1, 2])] * failed.detach()).sum().backward()
        optimizer.step()
        assert other.sum().item() == 36
        assert not optimizer.state
        assert table.grad is None
        with pytest.raises(IndexError):
            table.full_tensor()  # raised once: the step is not made
        assert torch.equal(table.full_tensor(), torch.arange(8.0))


def test_an_argument_without_data_changes_nothing() -> None:
    with Mesh(data=2) as mesh:
        model = monarch.module_to_mesh(nn.Linear(4, 4), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        @monarch.program
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = torch.dropout(model(x), 0.5, True).sum()
            loss.backward()
            optimizer.step()
            return loss

        with FakeTensorMode():
            fake = torch.ones(8, 4)
        without = {"is on the meta device": torch.ones(8, 4, device="meta"), "is a FakeTensor": fake}

        def refused() -> None:
            before, random = model.weight.grad, torch.get_rng_state()
            for what, x in without.items():
                with pytest.raises(LayoutError, match=f"argument 0 of 'step' {what}") as failed:
                    step(x)
                assert failed.value.source.file == __file__
            assert model.weight.grad is before and torch.equal(torch.get_rng_state(), random)

        refused()  # at the first call
        for _ in range(3):
            step(torch.ones(8, 4))
        values = model.weight.grad.full_tensor()
        refused()
        assert torch.equal(model.weight.grad.full_tensor(), values)


def test_a_closed_mesh_is_said_with_the_line() -> None:
    double = monarch.program(lambda x: x * 2)
    with Mesh(data=2) as mesh:
        x = monarch.distribute(torch.ones(4), mesh)
        assert double(x).sum().item() == 8
    for program in (double, monarch.program(lambda x: x * 3)):
        with pytest.raises(monarch.MonarchError, match="the mesh is closed: mesh<data=2>") as failed:
            program(x)
        assert failed.value.source.file == __file__


def test_a_forked_child_is_told_that_the_mesh_is_its_parents() -> None:
    """Also where another thread held the mesh's lock as it was forked."""
    with Mesh(data=2) as mesh:
        x = monarch.distribute(torch.ones(4), mesh)
        assert (x + 1).sum().item() == 8
        lock, held, over = mesh.executor.connection.lock, threading.Event(), threading.Event()

        def hold() -> None:
            with lock:
                held.set()
                over.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            try:
                (x + 1).sum().item()
            except monarch.MonarchError as error:
                os.write(writing, str(error).encode())
            finally:
                os._exit(0)
        over.set()
        thread.join()
        os.close(writing)
        _, status = os.waitpid(child, 0)
        with os.fdopen(reading) as told:
            assert "is of the process that this one was forked from\n  use it there" in told.read()
        assert status == 0 and (x + 1).sum().item() == 8
