"""The models of the library, against those of `transformers` with the same weights."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from monarch.compiler.types import MeshSpec
from monarch.language import layout, module_to_mesh, program
from monarch.stdlib.models.llama import Llama
from monarch.stdlib.models.moe import MixtureOfExperts
from monarch.stdlib.models.vit import ViT
from monarch.stdlib.parallel import combine, fully_shard, tensor_parallel
from tests.language.partitioned import partitioned_mesh
from tests.later import Later

hf = Later("transformers")

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 61,
    "num_key_value_heads": 2,
}  # fmt: skip
OURS: dict[str, Any] = {"vocabulary": 61, "width": 32, "inner": 48, "layers": 2, "heads": 4, "groups": 2}

DECODER = [
    (r"^model\.", ""), ("embed_tokens", "embedding"), (r"layers\.", "blocks."), ("lm_head", "head"),
    ("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm"), ("self_attn", "attention"),
    (r"(\w+)_proj\.", r"\1."),
]  # fmt: skip
VISION = [
    (r"^vit\.", ""), ("embeddings.cls_token", "first"), ("embeddings.position_embeddings", "positions"),
    ("embeddings.patch_embeddings.projection", "patches"), (r"layers\.", "blocks."), (r"(\w)_proj\.", r"\1."),
    ("layernorm_before", "attention_norm"), ("layernorm_after", "mlp_norm"), ("mlp.fc1", "up"), ("mlp.fc2", "down"),
    (r"^layernorm", "norm"), ("classifier", "head"),
]  # fmt: skip


def renamed(state: Mapping[str, torch.Tensor], names: list[tuple[str, str]]) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in state.items():
        for pattern, ours in names:
            name = re.sub(pattern, ours, name)
        found[name] = value
    return found


def experts(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Mixtral has an expert's two upward weights as one, transposed."""
    found = {}
    for name, value in state.items():
        if name.endswith("experts.gate_up_proj"):
            gate, up = value.transpose(1, 2).chunk(2, -1)
            found |= {name.replace("experts.gate_up_proj", at): x for at, x in (("gate", gate), ("up", up))}
        elif name.endswith("experts.down_proj"):
            found[name.replace("experts.down_proj", "down")] = value.transpose(1, 2)
        else:
            found[name.replace("mlp.gate.weight", "mlp.router.weight")] = value
    return found


def twins(kind: str) -> tuple[nn.Module, Any]:
    """Ours, with the weights of the other's."""
    torch.manual_seed(0)
    theirs: Any
    ours: nn.Module
    if kind == "llama":
        theirs, ours = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES, rms_norm_eps=1e-5)), Llama(**OURS, eps=1e-5)
        ours.load_state_dict(renamed(theirs.state_dict(), DECODER))
    elif kind == "moe":
        theirs = hf.MixtralForCausalLM(hf.MixtralConfig(**SIZES, num_local_experts=4, rope_theta=1e6))
        ours = MixtureOfExperts(**OURS, experts=4, chosen=2, eps=1e-5, base=theirs.config.rope_parameters["rope_theta"])
        ours.load_state_dict(experts(renamed(theirs.state_dict(), DECODER)))
    else:
        sizes = {name: SIZES[name] for name in SIZES if name not in ("vocab_size", "num_key_value_heads")}
        theirs = hf.ViTForImageClassification(hf.ViTConfig(**sizes, image_size=16, patch_size=4, num_labels=5))
        ours = ViT(classes=5, size=16, patch=4, width=32, inner=48, layers=2, heads=4, eps=theirs.config.layer_norm_eps)
        ours.load_state_dict(renamed(theirs.state_dict(), VISION))
    return ours, theirs


def batch(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """What the model takes, and what it is to give."""
    g = torch.Generator().manual_seed(1)
    if kind == "vit":
        return torch.randn(4, 3, 16, 16, generator=g), torch.randint(5, (4,), generator=g)
    return torch.randint(61, (4, 9), generator=g), torch.randint(61, (4, 9), generator=g)


@pytest.mark.parametrize("kind", ["llama", "moe", "vit"])
def test_a_model_computes_what_that_of_transformers_computes(kind: str) -> None:
    ours, theirs = twins(kind)
    given, _ = batch(kind)
    torch.testing.assert_close(ours(given), theirs(given).logits, rtol=1e-5, atol=1e-5)


def losses(model: nn.Module, kind: str, step_of: Callable[[Any], Any]) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(given: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(given).flatten(0, -2), wanted.flatten())
        loss.backward()
        optimizer.step()
        return loss

    run = step_of(step)
    return [run(*batch(kind)).item() for _ in range(3)]


def over_data(step: Callable[..., torch.Tensor]) -> Any:
    def sharded(*tensors: torch.Tensor) -> torch.Tensor:
        return step(*(layout(x, ["data"] + [None] * (x.ndim - 1)) for x in tensors))

    return program(sharded)


EXPERTS = {"blocks.*.mlp.*": "[@model, -, -]", "blocks.*.mlp.router.weight": None}


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "how"),
    [(kind, how) for kind in ("llama", "moe", "vit") for how in ("sharded", "tensor", "both")] + [("moe", "experts")],
)
def test_a_model_trains_as_in_plain_torch(kind: str, how: str) -> None:
    plain, _ = twins(kind)
    with partitioned_mesh(data=2, model=2) as mesh:
        model = copy.deepcopy(plain)
        tensor = tensor_parallel(model, mesh, "model", inputs=batch(kind)[:1])
        sharded = fully_shard(model, mesh, "data")
        layouts: dict[str, Mapping[str, Any]] = {
            "sharded": sharded, "tensor": tensor, "both": combine(tensor, sharded), "experts": EXPERTS,
        }  # fmt: skip
        module_to_mesh(model, mesh, layouts[how])
        found = losses(model, kind, over_data)
    torch.testing.assert_close(found, losses(plain, kind, lambda step: step), rtol=1e-5, atol=1e-5)


def test_experts_are_column_and_row_layers() -> None:
    assert "blocks.*.mlp.gate, blocks.*.mlp.up by columns, blocks.*.mlp.down by rows (48 wide)" in (
        tensor_parallel(twins("moe")[0], MeshSpec.of(model=2), "model").why
    )


def test_tokens_for_whom_an_expert_has_no_room_pass_by() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(**OURS, room=0.5).blocks[0].mlp
    whole = MixtureOfExperts(**OURS).blocks[0].mlp
    whole.load_state_dict(layer.state_dict())
    nn.init.zeros_(layer.router.weight)
    nn.init.zeros_(whole.router.weight)  # all tokens choose the same two experts, each with room for 2 of 8 tokens
    x = torch.randn(2, 4, 32)
    found, wanted = layer(x).flatten(0, 1), whole(x).flatten(0, 1)
    assert (wanted != 0).any(-1).all()
    torch.testing.assert_close(found[:2], wanted[:2])
    assert (found[2:] == 0).all()
