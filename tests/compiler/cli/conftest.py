"""The command line as a user runs it, in this process, in a folder of its own with small programs in it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from monarch.compiler.cli import main
from monarch.language.tensors.mesh import open_meshes

PROGRAMS = {
    "mlp.py": """\
import torch

import monarch
from monarch.distributed import Mesh

mesh = Mesh(data=2, model=2)
up = monarch.distribute(torch.randn(64, 256), mesh, "[-, @model]")
down = monarch.distribute(torch.randn(256, 64), mesh, "[@model, -]")


@monarch.program
def mlp(x: "f32[8@data, 64]"):
    hidden = torch.relu(x @ up)
    return hidden @ down
""",
    "train.py": """\
import torch
import torch.nn.functional as F
from torch import nn

import monarch
from monarch.distributed import Mesh

print("loading")
mesh = Mesh(data=2)
model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
model = monarch.module_to_mesh(model, mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)


@monarch.program
def train_step(x: "f32[8@data, 16]", labels: "i64[8@data]"):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), labels)
    loss.backward()
    optimizer.step()
    return loss


@monarch.program
def evaluate(x, scale: float, causal: bool = False):
    return model(x) * scale


def evaluate_inputs():
    return {"x": torch.zeros(4, 16), "scale": 2.0}


class Trainer:
    def __init__(self):
        self.weight = monarch.distribute(torch.ones(4), mesh, "[@data]")

    @monarch.program
    def step(self, x: "f32[4]"):
        return x * self.weight


trainer = Trainer()


def make_step(factor=3.0):
    @monarch.program(mesh=mesh)
    def inner(x: "f32[4@data]"):
        return x * factor

    return inner


if __name__ == "__main__":
    print(train_step(torch.zeros(8, 16), torch.zeros(8, dtype=torch.int64)).item())
""",
}


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture(autouse=True)
def ended_meshes() -> Iterator[None]:
    """The meshes that a command leaves open end with its process; here it has none."""
    before = set(map(id, open_meshes()))
    yield
    for mesh in open_meshes():
        if id(mesh) not in before:
            mesh.close()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the programs, and the one in which commands run."""
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def monarchc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line. The user's mistakes never have a traceback; a step that fails on a worker has the
    worker's."""

    def run(*arguments: str | Path, code: int | None = 0) -> Result:
        path, modules = list(sys.path), set(sys.modules)
        monkeypatch.setattr(sys, "argv", ["monarchc", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        sys.path[:] = path
        for name in set(sys.modules) - modules:
            if not getattr(sys.modules[name], "__file__", None) or name.rstrip("_") in ("mlp", "train"):
                sys.modules.pop(name)
        result = Result(int(exit_.value.code or 0), captured.out, captured.err)
        assert code is None or result.code == code, result
        assert result.code == 1 or "Traceback" not in result.err
        return result

    return run
