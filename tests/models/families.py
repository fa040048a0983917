"""Model families of Hugging Face's `transformers`: each small, with random weights, as the library makes them.

Some have sizes that a mesh of 2 × 2 does not divide: an odd vocabulary (61), or three heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.later import Later

hf = Later("transformers")

BATCH, TIME, VOCABULARY = 4, 12, 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
NO_DROPOUT: dict[str, Any] = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
GROUPED: dict[str, Any] = {**SIZES, "num_key_value_heads": 2}
MIXED = ["sliding_attention", "full_attention"]
SMALL_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


@dataclass(frozen=True)
class Family:
    """How one family's model is made, and the batch that it trains on: keyword arguments of its forward."""

    model: Callable[[], Any]
    batch: Callable[[torch.Generator], dict[str, Any]]


def text(g: torch.Generator) -> dict[str, torch.Tensor]:
    tokens = torch.randint(3, 61, (BATCH, TIME), generator=g)
    return {"input_ids": tokens, "labels": tokens}


def masked_text(g: torch.Generator) -> dict[str, torch.Tensor]:
    """The last tokens of some rows are padding, and no label."""
    batch = text(g)
    mask = (torch.arange(TIME) < torch.tensor([[12], [9], [12], [7]])).long()
    labels = torch.where(mask == 1, batch["labels"], -100)
    return {"input_ids": batch["input_ids"], "attention_mask": mask, "labels": labels}


def images(g: torch.Generator) -> dict[str, torch.Tensor]:
    return {
        "pixel_values": torch.randn(BATCH, 3, 16, 16, generator=g),
        "labels": torch.randint(5, (BATCH,), generator=g),
    }


def speech(g: torch.Generator) -> dict[str, torch.Tensor]:
    return {"input_features": torch.randn(BATCH, 8, 24, generator=g), "labels": text(g)["labels"]}


def pairs(g: torch.Generator) -> dict[str, Any]:
    tokens = torch.randint(3, 61, (BATCH, 8), generator=g)
    tokens[:, -1] = SMALL_IDS["eos_token_id"]
    return {"input_ids": tokens, "pixel_values": images(g)["pixel_values"]}


VISION: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if name not in ("vocab_size", "max_position_embeddings")},
    "image_size": 16,
    "patch_size": 4,
}

WAV2VEC2: dict[str, Any] = {
    **SIZES,
    "vocab_size": 12,
    "conv_dim": (8, 8),
    "conv_stride": (4, 4),
    "conv_kernel": (8, 4),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
    "pad_token_id": 0,
    **dict.fromkeys(("hidden_dropout", "attention_dropout", "activation_dropout", "final_dropout"), 0.0),
    **dict.fromkeys(("feat_proj_dropout", "layerdrop"), 0.0),
}

FAMILIES: dict[str, Family] = {
    "llama": Family(lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**GROUPED)), masked_text),
    "llama-uneven": Family(
        lambda: hf.LlamaForCausalLM(
            hf.LlamaConfig(
                **{**SIZES, "vocab_size": 61, "num_attention_heads": 3, "hidden_size": 24, "intermediate_size": 63}
            )
        ),
        text,
    ),
    "gpt2": Family(
        lambda: hf.GPT2LMHeadModel(
            hf.GPT2Config(
                vocab_size=61, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **SMALL_IDS
            )
        ),
        masked_text,
    ),
    "gpt-neox": Family(lambda: hf.GPTNeoXForCausalLM(hf.GPTNeoXConfig(**SIZES)), text),
    "bloom": Family(
        lambda: hf.BloomForCausalLM(hf.BloomConfig(vocab_size=61, hidden_size=32, n_layer=2, n_head=4)), masked_text
    ),
    "bert": Family(lambda: hf.BertForMaskedLM(hf.BertConfig(**SIZES, **NO_DROPOUT)), masked_text),
    "deberta-v2": Family(
        lambda: hf.DebertaV2ForMaskedLM(
            hf.DebertaV2Config(
                **SIZES, **NO_DROPOUT, relative_attention=True, pos_att_type=["p2c", "c2p"], position_buckets=8
            )
        ),
        masked_text,
    ),
    "modernbert": Family(
        lambda: hf.ModernBertForMaskedLM(
            hf.ModernBertConfig(**SIZES, pad_token_id=0, local_attention=8, global_attn_every_n_layers=2)
        ),
        masked_text,
    ),
    "t5": Family(
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                vocab_size=61,
                d_model=32,
                d_kv=8,
                d_ff=64,
                num_layers=2,
                num_heads=4,
                dropout_rate=0,
                decoder_start_token_id=0,
            )
        ),
        masked_text,
    ),
    "mistral": Family(lambda: hf.MistralForCausalLM(hf.MistralConfig(**GROUPED, sliding_window=4)), text),
    "mixtral": Family(
        lambda: hf.MixtralForCausalLM(hf.MixtralConfig(**GROUPED, num_local_experts=4, output_router_logits=True)), text
    ),
    "qwen2": Family(lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**GROUPED, tie_word_embeddings=True)), masked_text),
    "phi": Family(lambda: hf.PhiForCausalLM(hf.PhiConfig(**SIZES)), text),
    "phi3": Family(lambda: hf.Phi3ForCausalLM(hf.Phi3Config(**GROUPED, pad_token_id=0)), text),
    "gemma": Family(
        lambda: hf.GemmaForCausalLM(hf.GemmaConfig(**{**GROUPED, "num_key_value_heads": 1}, head_dim=8)), text
    ),
    "opt": Family(
        lambda: hf.OPTForCausalLM(
            hf.OPTConfig(
                vocab_size=61,
                hidden_size=32,
                ffn_dim=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                dropout=0,
                word_embed_proj_dim=32,
                max_position_embeddings=64,
            )
        ),
        masked_text,
    ),
    "vit": Family(
        lambda: hf.ViTForImageClassification(hf.ViTConfig(**VISION, num_labels=5)),
        images,
    ),
    "whisper": Family(
        lambda: hf.WhisperForConditionalGeneration(
            hf.WhisperConfig(
                vocab_size=61,
                num_mel_bins=8,
                d_model=32,
                encoder_layers=2,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=64,
                decoder_ffn_dim=64,
                max_source_positions=12,
                max_target_positions=32,
                dropout=0,
                decoder_start_token_id=1,
                **SMALL_IDS,
            )
        ),
        speech,
    ),
    "gemma3": Family(
        lambda: hf.Gemma3ForCausalLM(
            hf.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=4, layer_types=MIXED, tie_word_embeddings=False)
        ),
        masked_text,
    ),
    "gpt-neo": Family(
        lambda: hf.GPTNeoForCausalLM(
            hf.GPTNeoConfig(
                vocab_size=61,
                hidden_size=32,
                num_layers=2,
                num_heads=4,
                attention_types=[[["global", "local"], 1]],
                window_size=4,
                max_position_embeddings=64,
            )
        ),
        text,
    ),
    "resnet": Family(
        lambda: hf.ResNetForImageClassification(
            hf.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5)
        ),
        images,
    ),
    "segformer": Family(
        lambda: hf.SegformerForImageClassification(
            hf.SegformerConfig(
                hidden_sizes=[8, 16],
                depths=[1, 1],
                num_attention_heads=[1, 2],
                sr_ratios=[2, 1],
                num_encoder_blocks=2,
                patch_sizes=[3, 3],
                strides=[2, 2],
                mlp_ratios=[2, 2],
                num_labels=5,
                hidden_dropout_prob=0.0,
                classifier_dropout_prob=0.0,
                drop_path_rate=0.0,
            )
        ),
        images,
    ),
    "mamba": Family(
        lambda: hf.MambaForCausalLM(
            hf.MambaConfig(vocab_size=61, hidden_size=32, state_size=4, num_hidden_layers=2, **SMALL_IDS)
        ),
        text,
    ),
    "falcon": Family(
        lambda: hf.FalconForCausalLM(
            hf.FalconConfig(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
        ),
        text,
    ),
    "gptj": Family(
        lambda: hf.GPTJForCausalLM(hf.GPTJConfig(vocab_size=61, n_embd=32, n_layer=2, n_head=4, rotary_dim=4)), text
    ),
    "distilbert": Family(
        lambda: hf.DistilBertForMaskedLM(
            hf.DistilBertConfig(
                vocab_size=61, dim=32, hidden_dim=64, n_layers=2, n_heads=4, dropout=0, attention_dropout=0
            )
        ),
        masked_text,
    ),
    "clip": Family(
        lambda: hf.CLIPModel(
            hf.CLIPConfig(
                text_config={**SIZES, **SMALL_IDS}, vision_config=VISION, projection_dim=16, logit_scale_init_value=0.0
            )
        ),
        lambda g: {**pairs(g), "return_loss": True},
    ),
    "vilt": Family(
        lambda: hf.ViltForQuestionAnswering(
            hf.ViltConfig(**SIZES, **NO_DROPOUT, image_size=16, patch_size=4, num_labels=5)
        ),
        lambda g: {**pairs(g), "labels": torch.rand(BATCH, 5, generator=g)},
    ),
    "llava": Family(
        lambda: hf.LlavaForConditionalGeneration(
            hf.LlavaConfig(
                text_config={"model_type": "llama", **GROUPED},
                vision_config={"model_type": "clip_vision_model", **VISION},
                image_token_index=63,
                vision_feature_layer=-1,
            )
        ),
        text,
    ),
}
