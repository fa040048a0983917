"""The GPT as an ordinary module."""

from __future__ import annotations

import pytest
import torch

from monarch.stdlib.models.gpt import GPT, Attention


def small() -> GPT:
    torch.manual_seed(0)
    return GPT(vocabulary=16, width=32, layers=2, heads=4, sequence=8)


def test_the_default_model_is_the_demos() -> None:
    model = GPT()
    assert sum(parameter.numel() for parameter in model.parameters()) == 3_311_872
    assert model(torch.zeros(1, 128, dtype=torch.int64)).shape == (1, 128, 256)


def test_a_token_sees_only_those_before_it() -> None:
    model = small()
    tokens = torch.randint(16, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 16
    before, after = model(tokens), model(changed)
    assert torch.equal(before[0, :5], after[0, :5])
    assert not torch.allclose(before[0, 5:], after[0, 5:])


def test_attention_agrees_with_its_definition() -> None:
    torch.manual_seed(0)
    layer, x = Attention(8, 2), torch.randn(3, 5, 8)
    q, k, v = (project(x).view(3, 5, 2, 4).permute(0, 2, 1, 3) for project in (layer.q, layer.k, layer.v))
    scores = q @ k.mT / 2.0  # the square root of the head's width, 4
    scores = scores.masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    expected = layer.o((scores.softmax(-1) @ v).permute(0, 2, 1, 3).reshape(3, 5, 8))
    torch.testing.assert_close(layer(x), expected)


def test_positions_matter() -> None:
    model = small()
    logits = model(torch.full((1, 4), 3))
    assert not torch.allclose(logits[0, 1], logits[0, 2])


def test_heads_must_divide_the_width() -> None:
    with pytest.raises(ValueError, match="3 heads do not divide the width 32"):
        GPT(width=32, heads=3)


def test_initial_deviations_are_gpt2s() -> None:
    model = GPT(layers=8)
    assert model.blocks[0].attention.q.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.blocks[0].mlp.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert model.norm.weight.eq(1).all()


def test_generate_at_temperature_zero_takes_the_likeliest_token() -> None:
    model, prompt = small(), torch.tensor([[1, 2, 3]])
    tokens = model.generate(prompt, 10, temperature=0)
    assert tokens.shape == (1, 13) and torch.equal(tokens[:, :3], prompt)
    for end in range(3, 13):
        assert tokens[0, end] == model(tokens[:, max(0, end - 8) : end])[0, -1].argmax()


def test_generate_repeats_with_the_same_generator() -> None:
    model, prompt = small(), torch.tensor([[1], [2]])
    draws = [model.generate(prompt, 20, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)]
    assert torch.equal(draws[0], draws[1])
    assert not torch.equal(draws[0], draws[2])


def test_generate_says_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="the prompt is empty"):
        small().generate(torch.empty(1, 0, dtype=torch.int64), 3)
    with pytest.raises(ValueError, match="temperature is -1"):
        small().generate(torch.zeros(1, 1, dtype=torch.int64), 3, temperature=-1)
