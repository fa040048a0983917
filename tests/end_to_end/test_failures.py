"""A step that fails on the workers: who, where and why, and state as the last finished step left it."""

from __future__ import annotations

import copy
import os
import re
import signal
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.compiler.errors import DeviceMeshError, LayoutError
from monarch.distributed import Mesh
from monarch.language import OperatorError


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

        good = torch.tensor([1, 2, 3, 4])
        for _ in range(4):
            torch.testing.assert_close(step(good, good).full_tensor(), reference(good, good))
        failed = step(torch.tensor([1, 2, 3, 99]), good)  # there is no row 99; only worker data=1 is asked for it
        after = step(good, good)  # sent before anybody knows
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
            torch.testing.assert_close(step(good, good).full_tensor(), reference(good, good))


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
