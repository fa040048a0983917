"""Models of `transformers` that are built on the meta device, so that no process holds them whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import monarch
from monarch.compiler.errors import ProgramError
from monarch.distributed import Mesh
from monarch.stdlib.parallel import combine, fully_shard, tensor_parallel
from tests.language.partitioned import partitioned_mesh
from tests.models.families import FAMILIES


def on_meta(family: str) -> Any:
    with torch.device("meta"):
        return FAMILIES[family].model()


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_begins_with_its_own_values(family: str) -> None:
    whole, model = FAMILIES[family].model(), on_meta(family)
    tied = len(list(whole.parameters()))
    with partitioned_mesh(data=2, model=2) as mesh:
        monarch.module_to_mesh(model, mesh, fully_shard(model, mesh, "data"))
        for (name, found), wanted in zip(model.named_buffers(), whole.buffers(), strict=True):
            torch.testing.assert_close(found.full_tensor(), wanted, msg=lambda text, name=name: name + text)
        assert len(list(model.parameters())) == tied
        for (name, found), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
            constant = bool((wanted == wanted.flatten()[0]).all())
            assert (found.full_tensor() == wanted).all() if constant else found.full_tensor().std() > 0, name


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with Mesh(data=2, model=2) as mesh:
        yield mesh


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_workers_fill_a_model_from_safetensors(family: str, mesh: Mesh, tmp_path: Path) -> None:
    torch.manual_seed(3)
    whole = FAMILIES[family].model().eval()
    whole.save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    model = on_meta(family).eval()
    layouts = combine(tensor_parallel(model, mesh, "model"), fully_shard(model, mesh, "data"))
    monarch.module_to_mesh(model, mesh, layouts)
    monarch.load(tmp_path, into=model)
    for (name, found), wanted in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(found.full_tensor(), wanted), name
    batch = FAMILIES[family].batch(torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(model(**batch).loss.full_tensor(), whole(**batch).loss, rtol=1e-5, atol=1e-5)


class Normed(nn.Module):
    """Parametrizations that can tell what to begin with, and one that cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(nn.Linear(4, 6))
        self.conv = nn.utils.parametrizations.weight_norm(nn.Conv1d(6, 6, 3, bias=False), dim=2)
        self.down = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 2))
        self.old = nn.utils.weight_norm(nn.Linear(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.old(self.down(self.conv(self.up(x).mT).mean(1)))


@pytest.mark.filterwarnings("ignore:.*(weight_norm.*is deprecated|runs whole on every worker)")
def test_parametrized_tensors_begin_with_values_and_are_filled_from_a_checkpoint(mesh: Mesh, tmp_path: Path) -> None:
    torch.manual_seed(0)
    whole = Normed()
    monarch.save(whole.state_dict(), tmp_path / "saved").result()
    with torch.device("meta"):
        model = Normed()
    with pytest.warns(UserWarning, match="NaN until monarch.load.*'old.weight_g', 'old.weight_v', .*_u', .*_v'$"):
        monarch.module_to_mesh(model, mesh)
    up, conv = model.up.weight.full_tensor(), model.conv.weight.full_tensor()
    assert up.abs().max() <= 0.5 and up.std() > 0.1  # as nn.Linear(4, 6) begins
    assert conv.abs().max() <= 18**-0.5 and conv.std() > 0.05
    assert model.old.weight_g.full_tensor().isnan().all()
    monarch.load(tmp_path / "saved", into=model)
    whole.eval(), model.eval()
    x = torch.randn(3, 6, 4)
    torch.testing.assert_close(model(monarch.distribute(x, mesh)).full_tensor(), whole(x))


def test_a_tensor_that_gets_no_value_is_named() -> None:
    class Forgets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))
            self.register_buffer("table", torch.arange(4.0), persistent=False)

        def reset_parameters(self) -> None:
            nn.init.ones_(self.scale)

    with torch.device("meta"):
        model = Forgets()
    with partitioned_mesh(data=2) as mesh:
        with pytest.raises(ProgramError, match=r"'table' was made on the meta device, and reset_parameters\(\) gives"):
            monarch.module_to_mesh(model, mesh, {})
