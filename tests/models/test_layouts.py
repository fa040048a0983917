"""What `tensor_parallel` finds in the graphs of model families: no table names their layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from monarch.compiler.types import MeshSpec
from monarch.stdlib.parallel import tensor_parallel
from tests.models.families import FAMILIES

CHOICES = {
    "llama": """
  model.layers.*.self_attn.q_proj, model.layers.*.self_attn.k_proj, model.layers.*.self_attn.v_proj by columns, \
model.layers.*.self_attn.o_proj by rows (2 heads)
  model.layers.*.mlp.gate_proj, model.layers.*.mlp.up_proj by columns, model.layers.*.mlp.down_proj by rows (64 wide)
""",
    "gpt2": """
  transformer.h.*.attn.c_attn stored by columns, and gathered; transformer.h.*.attn.c_proj by rows (4 heads)
  transformer.h.*.mlp.c_fc by columns, transformer.h.*.mlp.c_proj by rows (128 wide)
""",
    "gpt-neox": """
  gpt_neox.layers.*.attention.query_key_value by columns, gpt_neox.layers.*.attention.dense by rows (4 heads)
  gpt_neox.layers.*.mlp.dense_h_to_4h by columns, gpt_neox.layers.*.mlp.dense_4h_to_h by rows (64 wide)
""",
    "modernbert": """
  model.layers.*.attn.Wqkv stored by columns, and gathered; model.layers.*.attn.Wo by rows (4 heads)
  model.layers.*.mlp.Wi stored by columns, and gathered; model.layers.*.mlp.Wo by rows (64 wide)
""",
    "phi3": """
  model.layers.*.self_attn.qkv_proj stored by columns, and gathered; model.layers.*.self_attn.o_proj by rows (2 heads)
  model.layers.*.mlp.gate_up_proj stored by columns, and gathered; model.layers.*.mlp.down_proj by rows (64 wide)
""",
    "mixtral": """
  model.layers.*.self_attn.q_proj, model.layers.*.self_attn.k_proj, model.layers.*.self_attn.v_proj by columns, \
model.layers.*.self_attn.o_proj by rows (2 heads)
  model.layers.*.mlp.experts.gate_up_proj stored by columns, and gathered; model.layers.*.mlp.experts.down_proj \
by rows (64 wide)
""",
    "distilbert": """
  distilbert.transformer.layer.*.attention.q_lin, distilbert.transformer.layer.*.attention.k_lin, \
distilbert.transformer.layer.*.attention.v_lin by columns, distilbert.transformer.layer.*.attention.out_lin by rows \
(4 heads)
  distilbert.transformer.layer.*.ffn.lin1 by columns, distilbert.transformer.layer.*.ffn.lin2 by rows (64 wide)
""",
    "falcon": """
  transformer.h.*.self_attention.query_key_value stored by columns, and gathered; transformer.h.*.self_attention.dense \
by rows (4 heads)
  transformer.h.*.mlp.dense_h_to_4h by columns, transformer.h.*.mlp.dense_4h_to_h by rows (128 wide)
""",
    "bloom": """
  transformer.h.*.self_attention.query_key_value by columns, transformer.h.*.self_attention.dense by rows (4 heads)
  transformer.h.*.mlp.dense_h_to_4h by columns, transformer.h.*.mlp.dense_4h_to_h by rows (128 wide)
""",
    "gptj": """
  transformer.h.*.attn.q_proj, transformer.h.*.attn.k_proj, transformer.h.*.attn.v_proj by columns, \
transformer.h.*.attn.out_proj by rows (4 heads)
  transformer.h.*.mlp.fc_in by columns, transformer.h.*.mlp.fc_out by rows (128 wide)
""",
    "deberta-v2": """
  deberta.encoder.layer.*.attention.self.query_proj, deberta.encoder.layer.*.attention.self.key_proj, \
deberta.encoder.layer.*.attention.self.value_proj by columns, deberta.encoder.layer.*.attention.output.dense by rows \
(4 heads)
  deberta.encoder.layer.*.intermediate.dense by columns, deberta.encoder.layer.*.output.dense by rows (64 wide)
""",
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("family", CHOICES)
def test_layers_are_found_in_the_graph(family: str) -> None:
    why = tensor_parallel(FAMILIES[family].model(), MeshSpec.of(model=2), "model").why
    chosen = [line for line in why.splitlines()[1:] if " whole" not in line]
    assert "\n".join(chosen) == CHOICES[family].strip("\n")


def test_both_towers_of_a_model_are_found() -> None:
    why = tensor_parallel(FAMILIES["clip"].model(), MeshSpec.of(model=2), "model").why
    for tower in ("text_model", "vision_model"):
        assert f"  {tower}.encoder.layers.*.mlp.fc1 by columns, {tower}.encoder.layers.*.mlp.fc2 by rows" in why


def test_a_model_whose_tokens_stand_for_images_is_traced_on_its_tokens() -> None:
    why = tensor_parallel(FAMILIES["llava"].model(), MeshSpec.of(model=2), "model").why
    assert "model.language_model.layers.*.mlp.down_proj by rows" in why
    assert "model.vision_tower.*, model.multi_modal_projector.* whole: no op of this forward pass takes them" in why


def test_what_is_whole_says_why() -> None:
    why = tensor_parallel(FAMILIES["mamba"].model(), MeshSpec.of(model=2), "model").why
    assert "  backbone.layers.*.mixer.A_log whole: scan at modeling_mamba.py:" in why


def test_parameters_of_attention_itself_are_sharded_with_its_heads() -> None:
    layouts = tensor_parallel(FAMILIES["t5"].model(), MeshSpec.of(model=2), "model")
    bias = next(name for name in layouts if "relative_attention_bias" in name)
    assert str(layouts[bias]) == "[-, @model]"


def test_a_model_on_the_meta_device_has_the_same_layouts() -> None:
    with torch.device("meta"):
        model: Any = FAMILIES["llama"].model()
    whole = FAMILIES["llama"].model()
    mesh = MeshSpec.of(model=2)
    assert tensor_parallel(model, mesh, "model") == tensor_parallel(whole, mesh, "model")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_what_a_model_is_traced_on_has_the_dtype_of_its_parameters(dtype: torch.dtype) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)).to(dtype)
    assert "0 by columns, 2 by rows (16 wide)" in tensor_parallel(model, MeshSpec.of(model=2), "model").why
