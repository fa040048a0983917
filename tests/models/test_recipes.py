"""What people do around a model's training step, against plain PyTorch: fully sharded within tensor parallel."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch.language import module_to_mesh, program
from monarch.stdlib.parallel import combine, data_parallel, fully_shard, tensor_parallel
from tests.language.partitioned import partitioned_mesh
from tests.models.families import FAMILIES

Step = Callable[..., torch.Tensor]


def optimizer_of(model: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def checkpointing(model: Any) -> Step:
    """Activations are computed again in the backward pass."""
    model.activation_checkpointing_enable()
    optimizer = optimizer_of(model)

    def step(**batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss

    return step


def accumulation(model: Any) -> Step:
    """Gradients of two halves of the batch are summed, and clipped."""
    optimizer = optimizer_of(model)

    def step(**batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        total = torch.zeros(())
        for half in range(2):
            loss = model(**{name: x[2 * half : 2 * half + 2] for name, x in batch.items()}).loss / 2
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        return total

    return step


def autocast(model: Any) -> Step:
    """Products are of bf16, parameters and updates of f32."""
    optimizer = optimizer_of(model)

    def step(**batch: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = model(**batch).loss
        loss.backward()
        optimizer.step()
        return loss

    return step


def masters(model: Any) -> Step:
    """The model is of bf16, and the optimizer has parameters of its own, of f32."""
    parameters = list(model.parameters())
    whole = [parameter.detach().float().requires_grad_() for parameter in parameters]
    optimizer = torch.optim.AdamW(whole, lr=1e-3)

    def step(**batch: torch.Tensor) -> torch.Tensor:
        model.zero_grad()
        loss: torch.Tensor = model(**batch).loss
        loss.backward()
        for own, parameter in zip(whole, parameters, strict=True):
            own.grad = parameter.grad.float()
        optimizer.step()
        with torch.no_grad():
            for own, parameter in zip(whole, parameters, strict=True):
                parameter.copy_(own)
        return loss

    return step


def lora(model: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], init_lora_weights=False)
    )


RECIPES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Step], float]] = {
    "checkpointing": (lambda model: model, checkpointing, 1e-5),
    "accumulation": (lambda model: model, accumulation, 1e-5),
    "autocast": (lambda model: model, autocast, 1e-3),
    "masters": (lambda model: model.to(torch.bfloat16), masters, 1e-3),
    "lora": (lora, accumulation, 1e-5),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("tensor", [False, True], ids=["sharded", "both"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
def test_a_recipe_trains_as_in_plain_torch(recipe: str, tensor: bool) -> None:
    prepare, step_of, tolerance = RECIPES[recipe]
    torch.manual_seed(0)
    plain = prepare(FAMILIES["llama"].model())
    model = copy.deepcopy(plain)
    batch = FAMILIES["llama"].batch(torch.Generator().manual_seed(1))
    run = step_of(plain)
    wanted = [run(**batch).item() for _ in range(3)]
    with partitioned_mesh(data=2, model=2) as mesh:
        inner = tensor_parallel(model, mesh, "model") if tensor else data_parallel(model)
        module_to_mesh(model, mesh, combine(inner, fully_shard(model, mesh, "data")))
        run = program(step_of(model))
        found = [run(**batch).item() for _ in range(3)]
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
        trained = [each for each in model.parameters() if each.requires_grad]
        theirs = [each for each in plain.parameters() if each.requires_grad]
        for ours, dense in zip(trained, theirs, strict=True):
            torch.testing.assert_close(ours.full_tensor(), dense, rtol=1e-2, atol=max(1e-4, 4 * tolerance))
