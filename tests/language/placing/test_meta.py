"""Modules that were made on PyTorch's meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from monarch.language import Mesh, distribute, module_to_mesh, program


def test_a_module_on_the_meta_device_gets_its_values_on_the_workers(mesh: Mesh) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 16), nn.BatchNorm1d(16), nn.LayerNorm(16))
    torch.manual_seed(0)
    module_to_mesh(model, mesh)
    values = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    assert 0.8 < values["0.weight"].std() < 1.2
    assert 0 < values["1.weight"].abs().max() <= 8**-0.5
    assert torch.equal(values["2.running_var"], torch.ones(16)) and torch.equal(values["3.weight"], torch.ones(16))


def test_a_meta_tensor_that_nothing_gives_a_value_is_nan_until_a_checkpoint_is_loaded(mesh: Mesh) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4, device="meta"))
            self.register_buffer("count", torch.ones(2, dtype=torch.int32, device="meta"))

    model = nn.Sequential(Scaled())
    with pytest.warns(UserWarning, match=r"NaN until monarch.load\(\) gives them values: '0.scale', '0.count'"):
        module_to_mesh(model, mesh)
    assert model[0].scale.full_tensor().isnan().all()
    assert (model[0].count.full_tensor() == torch.iinfo(torch.int32).min).all()


@pytest.mark.parametrize("door", ["eager", "program"])
def test_a_meta_tensor_that_meets_distributed_ones_is_made_on_the_workers(
    mesh: Mesh, monkeypatch: pytest.MonkeyPatch, door: str
) -> None:
    x = distribute(torch.ones(4), mesh, "[-]")
    assert x.sum().item() == 4
    monkeypatch.setattr("monarch.language.tensors.plain.put", lambda *_: pytest.fail("the controller made its data"))

    def add(x: torch.Tensor) -> torch.Tensor:
        return (x + torch.empty(4, device="meta")).sum()

    assert (program(add) if door == "program" else add)(x).item() == 4
