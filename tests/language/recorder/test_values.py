"""Values that Python asks for in a program: known ones are given, others refused with the code that is right."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import monarch
from monarch.compiler.errors import MonarchError, ProgramError
from monarch.language import Mesh
from monarch.language.errors import OperatorError


def text(x: torch.Tensor) -> torch.Tensor:
    known = torch.arange(4)
    return x * len(f"{known.sum()} {known.sum():4d} {str(known)}")


def lists(x: torch.Tensor) -> torch.Tensor:
    known = torch.arange(4)
    return x * known.tolist()[2] + float(known.numpy().sum()) + float(np.asarray(known)[3]) + int(known[1])


def masked(x: torch.Tensor) -> torch.Tensor:
    known = torch.tensor([[True, False], [False, True]])
    y = x.view(2, 2) * 1
    y[known] = y[known] * 3
    return y[known] + y[torch.tensor([False, True])].sum()


def mask_of_a_row(x: torch.Tensor) -> torch.Tensor:
    return x.view(2, 2)[:, torch.arange(2) > 0]


@pytest.mark.parametrize("function", [text, lists, masked, mask_of_a_row])
def test_what_is_known_is_given(function: Callable[[torch.Tensor], torch.Tensor], mesh: Mesh) -> None:
    x = torch.tensor([1.0, -2.0, 3.0, -4.0])
    program: Any = monarch.program(function, mesh=mesh)
    for _ in range(2):
        assert torch.equal(program(x).full_tensor(), function(x))


def test_a_number_is_written_as_a_number(mesh: Mesh) -> None:
    assert f"{monarch.distribute(torch.tensor(0.5), mesh)}" == "0.5"
    assert f"{monarch.distribute(torch.tensor(0.5), mesh):.3f}" == "0.500"


@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (lambda x: x[x > 0], OperatorError, r"an index by a mask[\s\S]*y = torch.where\(mask, x \* 2, 0\)  # right"),
        (lambda x: x.tolist(), ProgramError, "cannot branch"),
        (lambda x: x.numpy(), ProgramError, "cannot branch"),
        (lambda x: f"{x}", ProgramError, "cannot branch"),
        (lambda x: torch.save(x, io.BytesIO()), ProgramError, "between calls: torch.save"),
    ],
)
def test_what_is_not_is_refused(
    function: Callable[[torch.Tensor], Any], error: type[MonarchError], words: str, mesh: Mesh
) -> None:
    with pytest.raises(error, match=words):
        monarch.program(function, mesh=mesh)(torch.ones(4))


def test_a_file_is_read_outside(mesh: Mesh, tmp_path: Path) -> None:
    torch.save(torch.ones(4), tmp_path / "x.pt")
    words = r"memory from elsewhere[\s\S]*outside of the program"
    test_what_is_not_is_refused(lambda x: x + torch.load(tmp_path / "x.pt"), ProgramError, words, mesh)


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("door", ["program", "eager"])
def test_an_encoder_with_padding_takes_no_nested_path(door: str, train: bool, mesh: Mesh) -> None:
    torch.manual_seed(0)
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0), 2).train(
        train
    )
    x, padding = torch.randn(4, 6, 16), torch.arange(6) >= torch.tensor([[6], [4], [3], [5]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=padding)
        monarch.module_to_mesh(encoder, mesh, {})
        run: Any = lambda x, padding: encoder(x, src_key_padding_mask=padding)  # noqa: E731
        run = monarch.program(run) if door == "program" else run
        found = run(monarch.distribute(x, mesh), monarch.distribute(padding, mesh)).full_tensor()
    torch.testing.assert_close(found[~padding], expected[~padding])
