"""Plans of named sizes: one file serves all their values."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.compiler.cli.conftest import Run

PROGRAM = """
import torch
import monarch
from monarch.distributed import Mesh

mesh = Mesh(data=2)
weight = torch.nn.Parameter(torch.ones(8, 8))
layer = monarch.distribute(weight, mesh)


@monarch.program(mesh=mesh)
def scores(x: "f32[b@data, t, 8]"):
    y = x @ layer
    return (y @ y.transpose(1, 2)).softmax(-1).sum(1), y.mean()
"""


def test_one_file_serves_all_sizes(folder: Path, monarchc: Run) -> None:
    (folder / "scores.py").write_text(PROGRAM)
    shown = json.loads(monarchc("compile", "scores.py", "--json").out)
    assert shown["sizes"].keys() == {"b", "t"}
    assert "sizes                    all of b, t; below, for b=64, t=66" in monarchc("compile", "scores.py").out
    (folder / "scores.py").unlink()
    torch.manual_seed(0)
    for shape in ((2, 5, 8), (6, 3, 8)):
        x, weight = torch.randn(shape), torch.randn(8, 8)
        save_file({"x": x, "weight": weight, "layer": weight.clone()}, "in.safetensors")
        monarchc("run", "scores.mplan", "--inputs", "in.safetensors", "--outputs", "out.safetensors", "--fill", "zeros")
        found, y = load_file("out.safetensors"), x @ weight
        torch.testing.assert_close(found["return.0"], (y @ y.transpose(1, 2)).softmax(-1).sum(1))
        torch.testing.assert_close(found["return.1"], y.mean())
    assert "f32[4, 3]" in monarchc("run", "scores.mplan", "--fill", "random", "--size", "b=4", "--size", "t=3").out
    error = monarchc("run", "scores.mplan", "--fill", "random", "--size", "b=3", code=2).err
    assert "serves sizes with (b%2) == 0, not b=3, t=66" in error
    error = monarchc("run", "scores.mplan", "--fill", "random", "--size", "b=many", code=2).err
    assert "--size b: 'many' is not a whole number" in error


def test_sizes_that_are_given_are_those_of_the_plan(folder: Path, monarchc: Run) -> None:
    (folder / "scores.py").write_text(PROGRAM)
    shown = json.loads(monarchc("compile", "scores.py", "--arg", "x=f32[4@data, 6, 8]", "--json").out)
    assert "sizes" not in shown
    error = monarchc("run", "scores.mplan", "--fill", "random", "--size", "b=4", code=2).err
    assert "--size b: the sizes of the plan 'scores' have no names" in error


def test_a_program_that_needs_the_number_is_compiled_for_it(folder: Path, monarchc: Run) -> None:
    (folder / "scores.py").write_text(PROGRAM.replace("y = x @ layer", "y = x @ layer * float(x.shape[1])"))
    error = monarchc("compile", "scores.py", "--target", "cuda:90", code=2).err
    assert "scores cannot be compiled for all values of b, t: a GPU's plan" in error
    assert "--arg" in error
