"""Models of Hugging Face's `transformers`, unmodified, trained under each choice of layouts against plain PyTorch:
partitioned, and run by the reference executor."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from monarch.compiler.types import Layout
from monarch.language import Mesh, distribute, layout, module_to_mesh, program
from monarch.language.errors import OperatorError
from monarch.stdlib.parallel import combine, data_parallel, fully_shard, tensor_parallel
from tests.language.partitioned import partitioned_mesh
from tests.models.families import FAMILIES, WAV2VEC2, hf

LAYOUTS: dict[str, Callable[[Any, Mesh], Mapping[str, Layout]]] = {
    "data parallel": lambda model, mesh: data_parallel(model),
    "fully sharded": lambda model, mesh: fully_shard(model, mesh, "data"),
    "tensor parallel": lambda model, mesh: tensor_parallel(model, mesh, "model"),
    "both": lambda model, mesh: combine(tensor_parallel(model, mesh, "model"), fully_shard(model, mesh, "data")),
}

Batch = Mapping[str, torch.Tensor]


def train(model: Any, batch: Batch, step_of: Callable[[Any], Any] = lambda step: step) -> list[float]:
    """The losses of three steps on one batch."""
    # With the default eps a gradient that is rounding alone, as that of a bias of keys, moves its parameter too.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-6)

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
        tensors = {name: x for name, x in batch.items() if isinstance(x, torch.Tensor)}
        return step(**batch | {name: layout(x, ["data"] + [None] * (x.ndim - 1)) for name, x in tensors.items()})

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


def test_a_loss_that_packs_its_labels_trains_outside_of_programs() -> None:
    torch.manual_seed(0)
    plain = hf.Wav2Vec2ForCTC(hf.Wav2Vec2Config(**WAV2VEC2))
    g = torch.Generator().manual_seed(1)
    batch = {"input_values": torch.randn(4, 200, generator=g), "labels": torch.randint(1, 12, (4, 5), generator=g)}
    with partitioned_mesh(data=2) as mesh:
        model = copy.deepcopy(plain)
        module_to_mesh(model, mesh, data_parallel(model))
        wanted = train(plain, batch)
        placed = {name: distribute(x, mesh, ["data", None]) for name, x in batch.items()}
        torch.testing.assert_close(train(model, placed), wanted)
        with pytest.raises(OperatorError, match=r"(?s)masked_select .*or run the step without @monarch.program"):
            train(model, batch, over_data)
