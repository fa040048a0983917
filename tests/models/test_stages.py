"""Models of Hugging Face's `transformers`, unmodified, in two stages and microbatches, against plain PyTorch."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch

import monarch
from monarch.stdlib.pipeline import pipeline
from tests.language.partitioned import partitioned_mesh
from tests.models.families import FAMILIES


def loss_of(output: Any) -> torch.Tensor:
    logits = output.logits
    loss: torch.Tensor = logits.square().mean() + logits.sin().mean()
    return loss


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5", "vit", "bloom", "mistral"])
@pytest.mark.parametrize("mask", [True, False])
def test_a_family_trains_in_stages_as_it_is(family: str, mask: bool) -> None:
    torch.manual_seed(0)
    dense = FAMILIES[family].model()
    batch = FAMILIES[family].batch(torch.Generator().manual_seed(1))
    if family == "t5":
        batch["decoder_input_ids"] = batch["input_ids"]
    given = {name: x for name, x in batch.items() if name != "labels" and (mask or name != "attention_mask")}
    options = {"use_cache": False} if "use_cache" in inspect.signature(dense.forward).parameters else {}
    with partitioned_mesh(pipe=2) as mesh:
        pipe = pipeline(copy.deepcopy(dense), mesh, microbatches=2, layouts={})

        @monarch.program
        def step(**batch: torch.Tensor) -> torch.Tensor:
            return pipe.step(**batch, **options, loss_fn=loss_of)

        loss: Any = step(**given)
        wanted = loss_of(dense(**given, **options))
        wanted.backward()
        torch.testing.assert_close(loss.full_tensor(), wanted.detach(), rtol=1e-4, atol=1e-5)
        for ours, theirs in zip(pipe.parameters(), dense.parameters(), strict=True):
            assert (ours.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                found: Any = ours.grad
                torch.testing.assert_close(found.full_tensor(), theirs.grad, rtol=1e-3, atol=1e-5)
