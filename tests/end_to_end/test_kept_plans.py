"""A second process with the same program compiles nothing, and its results have the same bits."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests import python

pytestmark = pytest.mark.sample(1, of="kernels")

PROGRAM = """
import hashlib
import torch
import monarch

torch.manual_seed(0)
with monarch.Mesh(data=2) as mesh:
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    model = monarch.module_to_mesh(layers, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scale = torch.tensor([1.0, SCALE, 3.0, 4.0])

    @monarch.program
    def train_step(x):
        optimizer.zero_grad()
        loss = (model(monarch.layout(x, "[@data, -]")) * scale).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.randn(6, 8)
    losses = [train_step(x).item() for _ in range(3)]
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.full_tensor().detach().numpy().tobytes())
    print(losses, digest.hexdigest())
"""


def run(folder: Path, scale: str = "2.0", **environment: str) -> tuple[str, str]:
    """What a process prints, and what the compiler says of its passes."""
    script = folder / "train.py"
    text = PROGRAM.replace("SCALE", scale)
    if not script.exists() or script.read_text() != text:
        script.write_text(text)
    env = {
        **os.environ,
        "MONARCH_VERIFY": "0",
        "MONARCH_LOG": "passes",
        "MONARCH_CACHE": str(folder / "cache"),
        **environment,
    }
    done = python.run(script, env=env, cwd=folder, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, done.stderr


@pytest.fixture
def first(tmp_path: Path, kernels: str) -> tuple[str, str]:
    return run(tmp_path)


def test_a_second_process_compiles_nothing_and_has_the_same_bits(tmp_path: Path, first: tuple[str, str]) -> None:
    assert "partition-by-data" in first[1]
    printed, said = run(tmp_path)
    assert printed == first[0]
    assert "partition-by-data" not in said
    assert said.count("its plan was kept on disk") == 2  # the step that makes the optimizer's state, and the others


def test_a_changed_constant_is_compiled(tmp_path: Path, first: tuple[str, str]) -> None:
    printed, said = run(tmp_path, scale="2.5")
    assert printed != first[0]
    assert said.count("partition-by-data") == 2


def test_processes_that_compile_the_same_at_once_have_the_same_bits(tmp_path: Path, kernels: str) -> None:
    (tmp_path / "train.py").write_text(PROGRAM.replace("SCALE", "2.0"))  # once: a process must not find it half written
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: run(tmp_path)[0], range(3)))
    assert len(set(found)) == 1
    assert sorted(path.suffix for path in (tmp_path / "cache" / "plans").iterdir()) == [".mplan", ".mplan"]


def test_a_plan_that_is_damaged_is_compiled_anew(tmp_path: Path, first: tuple[str, str]) -> None:
    for path in (tmp_path / "cache" / "plans").iterdir():
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    printed, said = run(tmp_path)
    assert printed == first[0]
    assert "a kept plan cannot be read" in said and said.count("partition-by-data") == 2
