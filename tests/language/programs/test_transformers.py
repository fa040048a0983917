"""Models of Hugging Face's `transformers`, unmodified and with random weights, against plain PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from monarch.language import Mesh, module_to_mesh, program
from monarch.stdlib.parallel import fully_shard

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
COMMON = {"vocab_size": 64, "max_position_embeddings": 64}
FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, **COMMON, num_key_value_heads=2),
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
        ),
    ),
    "bert": lambda: transformers.BertForMaskedLM(
        transformers.BertConfig(**SIZES, **COMMON, hidden_dropout_prob=0, attention_probs_dropout_prob=0),
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0,
            decoder_start_token_id=0,
        ),
    ),
}  # fmt: skip


def train(model: Any, step_of: Callable[[Any], Any], masked: bool) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(tokens: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        loss: torch.Tensor = model(input_ids=tokens, attention_mask=mask, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = step_of(step)
    tokens = torch.randint(2, 64, (4, 12), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(12) < torch.tensor([[12], [9], [12], [7]])).long() if masked else None
    return [run(tokens, mask).item() for _ in range(3)]


@pytest.mark.parametrize(("sharded", "masked"), [(False, True), (True, False)])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.filterwarnings("error::monarch.language.errors.TracedAgainWarning")
def test_a_model_trains_as_it_is(family: str, sharded: bool, masked: bool, mesh: Mesh) -> None:
    torch.manual_seed(0)
    plain = FAMILIES[family]()
    model = copy.deepcopy(plain)
    module_to_mesh(model, mesh, fully_shard(model, mesh, "data") if sharded else {})
    wanted = train(plain, lambda step: step, masked)
    found = train(model, lambda step: program(step), masked)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(
            ours.full_tensor(), theirs, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: name + text
        )
