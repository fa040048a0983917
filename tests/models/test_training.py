"""Models of Hugging Face's `transformers`, unmodified, trained under each choice of layouts against plain PyTorch:
partitioned, and run by the reference executor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from monarch.compiler.types import Layout
from monarch.language import Mesh, layout, module_to_mesh, program
from monarch.stdlib.parallel import combine, data_parallel, fully_shard, tensor_parallel
from tests.language.partitioned import partitioned_mesh
from tests.models.families import FAMILIES

LAYOUTS: dict[str, Callable[[Any, Mesh], Mapping[str, Layout]]] = {
    "data parallel": lambda model, mesh: data_parallel(model),
    "fully sharded": lambda model, mesh: fully_shard(model, mesh, "data"),
    "tensor parallel": lambda model, mesh: tensor_parallel(model, mesh, "model"),
    "both": lambda model, mesh: combine(tensor_parallel(model, mesh, "model"), fully_shard(model, mesh, "data")),
}

Batch = Mapping[str, torch.Tensor]


def train(model: Any, batch: Batch, step_of: Callable[[Any], Any] = lambda step: step) -> list[float]:
    """The losses of three steps on one batch."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(**batch: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = step_of(step)
    return [run(**batch).item() for _ in range(3)]


def over_data(step: Callable[..., torch.Tensor]) -> Any:
    """The step as a program whose batch is sharded over the mesh dim `data`."""

    def sharded(**batch: torch.Tensor) -> torch.Tensor:
        return step(**{name: layout(x, ["data"] + [None] * (x.ndim - 1)) for name, x in batch.items()})

    return program(sharded)


@pytest.mark.sample(1)
@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
def test_a_family_trains_as_it_is(family: str, layouts: str) -> None:
    torch.manual_seed(0)
    plain = FAMILIES[family].model()
    batch = FAMILIES[family].batch(torch.Generator().manual_seed(1))
    with partitioned_mesh(data=2, model=2) as mesh:
        model = copy.deepcopy(plain)
        module_to_mesh(model, mesh, LAYOUTS[layouts](model, mesh))
        wanted = train(plain, batch)
        found = train(model, batch, over_data)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(
                ours.full_tensor(), theirs, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: name + text
            )
