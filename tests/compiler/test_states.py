"""Keys of states, and their labels."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.states import StateKey

KEYS = {
    "fc.weight": (StateKey("fc.weight"), "parameter"),
    "grad[fc.weight]": (StateKey("fc.weight", "grad"), "gradient"),
    "adamw.exp_avg[blocks.0.fc.weight]": (StateKey("blocks.0.fc.weight", "exp_avg", "adamw"), "optimizer state"),
    "sgd.grad[w]": (StateKey("w", "grad", "sgd"), "optimizer state"),
    "adamw.step[rows[0]]": (StateKey("rows[0]", "step", "adamw"), "optimizer state"),
    "[a]": (StateKey("[a]"), "parameter"),
    ".b[a]": (StateKey(".b[a]"), "parameter"),
    "rows[0].weight": (StateKey("rows[0].weight"), "parameter"),
}


@pytest.mark.parametrize("label", KEYS)
def test_a_label_is_that_of_a_key(label: str) -> None:
    key, kind = KEYS[label]
    assert StateKey.of(label) == key and str(key) == label and key.kind == kind


@given(st.text("ab.[]0", max_size=12))
def test_every_label_is_kept(label: str) -> None:
    assert str(StateKey.of(label)) == label


def test_modules_and_layers() -> None:
    layers = {
        "blocks.0.attention.q.weight": ("blocks.0.attention.q", "blocks.0"),
        "adamw.exp_avg[blocks.11.norm.weight]": ("blocks.11.norm", "blocks.11"),
        "head.weight": ("head", "head"),
        "experts.3.layers.2.up": ("experts.3.layers.2", "experts.3.layers.2"),
        "w": ("", "w"),
    }
    for label, (module, layer) in layers.items():
        assert (StateKey.of(label).module, StateKey.of(label).layer) == (module, layer)
