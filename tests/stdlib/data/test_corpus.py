"""The corpus and its batches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from monarch.stdlib.data import batches, corpus, decode, encode


def test_the_corpus_is_pythons_own_source() -> None:
    text = corpus(limit=200_000)
    assert text.shape == (200_000,) and text.dtype == torch.uint8
    assert "import" in decode(text)
    assert torch.equal(text, corpus(limit=200_000))
    assert torch.equal(text[:1000], corpus(limit=1000))


def test_files_come_sorted_and_without_tests_and_site_packages(tmp_path: Path) -> None:
    files = {
        "b.py": "2",
        "a/z.py": "1",
        "site-packages/x.py": "x",
        "a/test/y.py": "y",
        "notes.txt": "n",
        "test.py": "3",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert decode(corpus(folder=tmp_path)) == "123"


def test_a_folder_without_source_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no Python source files"):
        corpus(folder=tmp_path)


@given(seed=st.integers(0, 2**31), batch=st.integers(1, 5), sequence=st.integers(1, 9))
def test_a_target_is_the_token_after(seed: int, batch: int, sequence: int) -> None:
    text = torch.arange(10, dtype=torch.uint8)
    for tokens, targets in batches(text, batch=batch, sequence=sequence, steps=3, seed=seed):
        assert tokens.shape == targets.shape == (batch, sequence)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(tokens + 1, targets)
        assert torch.equal(tokens, tokens[:, :1] + torch.arange(sequence))


def test_every_window_can_be_drawn() -> None:
    text = torch.arange(6, dtype=torch.uint8)
    ((tokens, _),) = batches(text, batch=500, sequence=3, steps=1)
    assert set(tokens[:, 0].tolist()) == {0, 1, 2}


def test_batches_depend_on_the_seed_alone() -> None:
    text = corpus(limit=10_000)

    def draw(**options: int) -> torch.Tensor:
        return torch.stack([tokens for tokens, _ in batches(text, batch=4, sequence=16, **options)])

    assert torch.equal(draw(steps=3, seed=7), draw(steps=5, seed=7)[:3])
    assert not torch.equal(draw(steps=3, seed=7), draw(steps=3, seed=8))


def test_too_short_a_text_is_an_error() -> None:
    with pytest.raises(ValueError, match="the text has 5 tokens: too few for windows of 5"):
        next(batches(torch.zeros(5, dtype=torch.uint8), batch=1, sequence=5, steps=1))


@given(st.text())
def test_text_survives_encoding(text: str) -> None:
    assert decode(encode(text)) == text


def test_broken_text_is_shown_as_far_as_it_goes() -> None:
    assert decode(torch.tensor([0xC3, 0x28])) == "\ufffd("
