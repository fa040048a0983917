"""Training whose tensors go through process groups: the numbers of dense PyTorch, and the bits of Monarch's own
collectives, in every run."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.actor import this_host
from monarch.compiler.errors import DeviceMeshError, MonarchError
from monarch.distributed import Mesh
from monarch.language.programs.program import Backend

pytestmark = pytest.mark.sample(1, of="kernels")

LAYOUTS = {"0.weight": ["model", None], "0.bias": ["model"], "2.weight": [None, "model"], "2.bias": [None]}
STEPS = 5


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(STEPS, 8, 16, generator=generator)
    return x, torch.randint(0, 8, (STEPS, 8), generator=generator)


def made() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 8))


def train(collectives: Backend) -> tuple[list[float], list[torch.Tensor]]:
    with Mesh(data=2, model=2) as mesh:
        model = monarch.module_to_mesh(made(), mesh, layouts=LAYOUTS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        @monarch.program(collectives=collectives)
        def step(x: "f32[8@data, 16]", y: "i64[8@data]"):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            return loss

        losses = [step(x, y).item() for x, y in zip(*data(), strict=True)]
        return losses, [p.full_tensor().clone() for p in model.parameters()]


def test_the_numbers_are_those_of_dense_pytorch_and_the_bits_those_of_every_other_run() -> None:
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    dense = []
    for x, y in zip(*data(), strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        dense.append(loss.item())
    losses, parameters = train("gloo")
    assert losses == pytest.approx(dense, rel=1e-4)
    for got, want in zip(parameters, model.parameters(), strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-3, atol=1e-5)
    for again in (train("gloo"), train("monarch")):
        assert again[0] == losses
        for one, other in zip(again[1], parameters, strict=True):
            assert torch.equal(one, other)


def test_training_goes_on_after_a_step_that_failed() -> None:
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16))
    plain = torch.optim.AdamW(dense.parameters(), lr=0.1)
    with Mesh(data=2) as mesh:
        whole = {name: [None] * p.ndim for name, p in dense.named_parameters()}
        model = monarch.module_to_mesh(copy.deepcopy(dense), mesh, layouts=whole)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

        @monarch.program(collectives="gloo")
        def step(tokens: "i64[512@data]", targets: "i64[512@data]"):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(tokens), targets)
            loss.backward()
            optimizer.step()
            return loss

        def reference(tokens: torch.Tensor) -> torch.Tensor:
            plain.zero_grad()
            loss = F.cross_entropy(dense(tokens), tokens)
            loss.backward()
            plain.step()
            return loss.detach()

        good, targets = torch.arange(512) % 16, torch.arange(512) % 16
        bad = torch.where(torch.arange(512) == 511, 99, good)
        for _ in range(2):
            for _ in range(3):
                torch.testing.assert_close(step(good, targets).full_tensor(), reference(good))
            failed = step(bad, targets)  # only worker data=1 is asked for row 99
            with pytest.raises(DeviceMeshError, match="worker data=1 failed in .*: index out of range"):
                failed.item()
        torch.testing.assert_close(step(good, targets).full_tensor(), reference(good))


def test_a_backend_that_is_not_known_or_cannot_move_the_tensors() -> None:
    with pytest.raises(MonarchError, match="unknown collectives 'glo'") as info:
        monarch.program(lambda: None, collectives="glo")  # type: ignore[call-overload]
    assert info.value.hint is not None and info.value.hint.startswith("did you mean gloo?")
    with Mesh(w=2) as mesh:
        x = monarch.distribute(torch.ones(4), mesh, ["w"])
        total = monarch.program(lambda: x.sum(), collectives="nccl")
        with pytest.raises(MonarchError, match="collectives='nccl' does not move tensors of CPUs"):
            total()


def test_what_is_shown_of_a_plan() -> None:
    with Mesh(w=2) as mesh:
        x = monarch.distribute(torch.ones(4), mesh, ["w"])
        program = monarch.program(lambda: x.sum(), collectives="gloo")
        assert "on mesh<w=2>: 2 workers, for cpu, over gloo" in repr(program.inspect())
        assert program().item() == 4


def test_on_the_processes_of_actors() -> None:
    procs = this_host().spawn_procs({"gpus": 2})
    try:
        for _ in range(2):  # what the first mesh had is put away
            with Mesh(procs=procs) as mesh:
                x = monarch.distribute(torch.arange(8.0), mesh, ["gpus"])
                assert monarch.program(lambda x=x: x.sum(), collectives="gloo")().item() == 28
    finally:
        procs.stop().get()
