"""PyTorch's own ways to save and load do on distributed tensors what they do on plain ones; DTensors, both ways."""

from __future__ import annotations

import copy
import importlib
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import LayoutError, MonarchError
from tests import python
from tests.later import Later

hf = Later("transformers")

pytestmark = pytest.mark.usefixtures("here")


def test_torch_save_writes_plain_tensors_which_load_into_placed_modules(tmp_path: Path) -> None:
    model = monarch.module_to_mesh(nn.Linear(5, 3), Mesh(a=2), {"weight": "[-, @a]"})
    torch.save({"state": model.state_dict(), "weight": model.weight}, tmp_path / "m.pt")
    found = torch.load(tmp_path / "m.pt", weights_only=True)
    assert type(found["state"]["weight"]) is torch.Tensor
    assert isinstance(found["weight"], nn.Parameter) and found["weight"].requires_grad
    plain = nn.Linear(5, 3)
    plain.load_state_dict(found["state"])
    other = monarch.module_to_mesh(nn.Linear(5, 3), Mesh(a=3), {"weight": "[@a, -]"})
    other.load_state_dict(found["state"])
    assert torch.equal(other.weight.full_tensor(), model.weight.full_tensor())
    assert torch.equal(plain.weight, model.weight.full_tensor())


def test_a_copy_is_on_the_mesh_as_it_was() -> None:
    x = nn.Parameter(monarch.distribute(torch.ones(4), Mesh(a=2), "[@a]"))
    made = copy.copy(x)
    assert isinstance(made, nn.Parameter) and str(made.tensor_type) == "f32[4@a]"
    with torch.no_grad():
        made.add_(1)
    assert torch.equal(x.full_tensor(), torch.full((4,), 2.0))


def test_dcps_own_calls(tmp_path: Path) -> None:
    model = monarch.module_to_mesh(nn.Linear(5, 3), Mesh(a=2), {"weight": "[-, @a]"})
    before = model.weight.full_tensor()
    torch_dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
    with torch.no_grad():
        model.weight.zero_()
    torch_dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(model.weight.full_tensor(), before)
    monarch.load(tmp_path / "c", into={"model": (other := nn.Linear(5, 3))})
    assert torch.equal(other.weight, before)


@pytest.mark.parametrize("cpu_offload", [False, True])
def test_the_full_state_of_dcp_is_plain_and_comes_back(cpu_offload: bool) -> None:
    model = monarch.module_to_mesh(nn.Linear(5, 3), Mesh(a=2), {"weight": "[-, @a]"})
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload)
    found, state = get_state_dict(model, optimizer, options=options)
    assert all(type(each) is torch.Tensor for each in [*found.values(), *state["state"]["weight"].values()])
    assert torch.equal(found["weight"], model.weight.full_tensor())
    mean = optimizer.state[model.weight]["exp_avg"]
    assert torch.equal(state["state"]["weight"]["exp_avg"], mean.full_tensor())
    found["weight"] = found["weight"] + 1
    set_model_state_dict(model, found, options=options)
    assert torch.equal(model.weight.full_tensor(), found["weight"])
    assert get_model_state_dict(model)["weight"].tensor_type == model.weight.tensor_type


@pytest.mark.parametrize(
    ("library", "call", "advice"),
    [
        ("safetensors.torch", "library.save_model(model, 'a.safetensors')", "monarch.save(model, "),
        ("safetensors.torch", "library.load_model(model, 'a.safetensors')", 'monarch.load("model.safetensors", into='),
        ("torch.distributed.checkpoint", "library.async_save(model.state_dict(), checkpoint_id='c')", "monarch.save({"),
    ],
)
def test_calls_that_need_memory_here_say_what_to_write_instead(
    library: str, call: str, advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    safetensors.torch.save_model(nn.Linear(5, 3), "a.safetensors")
    model = monarch.module_to_mesh(nn.Linear(5, 3), Mesh(a=2))
    with pytest.raises(MonarchError) as raised:
        eval(call, {"library": importlib.import_module(library), "model": model})
    assert advice in (raised.value.hint or "")


def test_hugging_faces_calls_say_what_to_write_instead_and_that_works(tmp_path: Path) -> None:
    config = hf.GPT2Config(vocab_size=13, n_embd=8, n_layer=1, n_head=2)
    model = monarch.module_to_mesh(hf.GPT2LMHeadModel(config), Mesh(a=2))
    with pytest.raises(MonarchError, match="before it is placed"):
        model.resize_token_embeddings(20)
    with pytest.raises(MonarchError, match=r"from_pretrained\(.*reads both"):
        model.save_pretrained(tmp_path)
    monarch.save(model, tmp_path / "model.safetensors").result()
    model.config.save_pretrained(tmp_path)
    found = hf.GPT2LMHeadModel.from_pretrained(tmp_path)
    for ours, theirs in zip(model.parameters(), found.parameters(), strict=True):
        assert torch.equal(ours.full_tensor(), theirs)


def test_an_optimizers_state_goes_to_a_plain_one_and_back() -> None:
    mesh = Mesh(a=2)
    model = monarch.module_to_mesh(nn.Linear(5, 3), mesh, {"weight": "[-, @a]"})
    plain = nn.Linear(5, 3)
    plain.load_state_dict({name: each.full_tensor() for name, each in model.state_dict().items()})
    ours, theirs = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, plain))

    @monarch.program(mesh=mesh)
    def step(x: torch.Tensor) -> torch.Tensor:
        ours.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        ours.step()
        return loss

    def plain_step(x: torch.Tensor) -> torch.Tensor:
        theirs.zero_grad()
        loss = plain(x).square().sum()
        loss.backward()
        theirs.step()
        return loss

    x = torch.randn(4, 5)
    plain_step(x)
    model.load_state_dict(plain.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for _ in range(2):
        torch.testing.assert_close(step(x).full_tensor(), plain_step(x).detach())


@pytest.fixture
def group() -> Any:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_dtensors_both_ways() -> None:
    mesh = Mesh(data=2, model=2)
    whole = torch.arange(15.0).view(5, 3)
    x = monarch.distribute(whole, mesh, "[@model, -]").requires_grad_()
    d = x.to_dtensor()
    assert isinstance(d, DTensor) and d.requires_grad
    assert d.placements == (Replicate(), Shard(0)) and torch.equal(d.full_tensor(), whole)
    back = monarch.from_dtensor(d, mesh)
    assert str(back.tensor_type) == "f32[5@model, 3]" and back.requires_grad
    assert torch.equal(back.full_tensor(), whole)
    assert str(monarch.from_dtensor(d, Mesh(a=2), "[-, @a]").tensor_type) == "f32[5, 3@a]"
    with pytest.raises(LayoutError, match="takes a DTensor"):
        monarch.from_dtensor(whole, mesh)
    named = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("a",))
    with pytest.raises(LayoutError, match="init_device_mesh"):
        x.to_dtensor(named)


SPMD = """
    import os, sys, torch, torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    rank, folder = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.ReLU(), torch.nn.Linear(7, 3))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x = torch.linspace(-1, 1, 20).view(4, 5)
    def step():
        optimizer.zero_grad()
        model(x).square().sum().backward()
        optimizer.step()
    step()
    parameters, state = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": state, "step": 1}, checkpoint_id=f"{folder}/theirs")
    step()
    held = {name: each.full_tensor() for name, each in model.state_dict().items()}
    if rank == 0:
        torch.save(held, f"{folder}/held.pt")
    dist.destroy_process_group()
"""


def test_training_by_fsdp2_goes_on_here(tmp_path: Path) -> None:
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    program = textwrap.dedent(SPMD)
    processes = [python.Popen("-c", program, rank, tmp_path, env=environment) for rank in range(2)]
    assert [process.wait(150) for process in processes] == [0, 0]
    mesh = Mesh(a=3)
    model = nn.Sequential(nn.Linear(5, 7), nn.ReLU(), nn.Linear(7, 3))
    model = monarch.module_to_mesh(model, mesh, {"0.weight": "[@a, -]"})
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer, "step": 0}
    monarch.load(tmp_path / "theirs", into=state)
    assert state["step"] == 1 and optimizer.param_groups[0]["lr"] == 0.1
    assert str(optimizer.state[model[0].weight]["exp_avg"].tensor_type) == "f32[7@a, 5]"
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 20).view(4, 5)).square().sum().backward()
    optimizer.step()
    for name, expected in torch.load(tmp_path / "held.pt", weights_only=True).items():
        torch.testing.assert_close(model.state_dict()[name].full_tensor(), expected)
