"""`monarchc run`: plans on workers, without their source."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from monarch.compiler.plan.file import load_plan
from tests.compiler.cli.conftest import Run


@pytest.fixture
def mlp(folder: Path, monarchc: Run) -> dict[str, torch.Tensor]:
    """What the plan in mlp.mplan takes."""
    monarchc("compile", "mlp.py")
    (folder / "mlp.py").unlink()  # the plan is all there is
    torch.manual_seed(0)
    tensors = {"x": torch.randn(8, 64), "up": torch.randn(64, 256), "down": torch.randn(256, 64)}
    save_file(tensors, "in.safetensors")
    return tensors


def test_results_are_plain_pytorchs(mlp: dict[str, torch.Tensor], monarchc: Run) -> None:
    result = monarchc("run", "mlp.mplan", "--inputs", "in.safetensors", "--outputs", "out.safetensors")
    assert result.out.startswith("mlp ran 1 step on mesh<data=2, model=2>\n")
    found = load_file("out.safetensors")
    assert set(found) == {"return.0"}
    expected = torch.relu(mlp["x"] @ mlp["up"]) @ mlp["down"]
    torch.testing.assert_close(found["return.0"], expected, rtol=1e-4, atol=1e-3)


def test_what_is_given_beyond_the_plans_inputs_is_named(mlp: dict[str, torch.Tensor], monarchc: Run) -> None:
    save_file({**mlp, "bias": torch.zeros(1)}, "more.safetensors")
    shown = json.loads(monarchc("run", "mlp.mplan", "--inputs", "more.safetensors", "--json").out)
    assert shown["unused"] == ["bias"] and shown["filled"] == []
    assert shown["results"]["return.0"] == {"type": "f32[8, 64]", "value": None}


def test_what_is_missing_is_listed_or_filled(mlp: dict[str, torch.Tensor], monarchc: Run) -> None:
    save_file({"x": mlp["x"], "upp": mlp["up"]}, "part.safetensors")
    error = monarchc("run", "mlp.mplan", "--inputs", "part.safetensors", code=2).err
    assert "2 values that the plan takes are missing" in error
    assert "state  down  f32[256, 64]" in error and "upp was given: is that up?" in error
    shown = monarchc("run", "mlp.mplan", "--inputs", "part.safetensors", "--fill", "zeros").out
    assert "filled: up, down" in shown and "from 0 to 0, mean 0" in shown


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(8, 32), "'x' is f32[8, 32], and the plan takes f32[8, 64]"),
        (torch.zeros(8, 64, dtype=torch.float16), "'x' is f16[8, 64]"),
        (torch.zeros(8, 64, dtype=torch.complex64), "'x' is c64[8, 64]"),
    ],
)
def test_another_type_is_an_error(tensor: torch.Tensor, said: str, mlp: dict[str, torch.Tensor], monarchc: Run) -> None:
    save_file({**mlp, "x": tensor}, "wrong.safetensors")
    assert said in monarchc("run", "mlp.mplan", "--inputs", "wrong.safetensors", code=2).err


def test_training_goes_on_from_the_state_that_a_run_wrote(folder: Path, monarchc: Run) -> None:
    monarchc("compile", "train.py:train_step", "-o", "first.mplan", "--first-call")
    monarchc("compile", "train.py:train_step", "-o", "step.mplan")
    torch.manual_seed(0)
    states = [spec for spec in load_plan("first.mplan").inputs if spec.kind == "state"]
    state = {str(spec.label): torch.randn(spec.type.shape) * 0.1 for spec in states}
    inputs = {"x": torch.randn(8, 16), "labels": torch.arange(8) % 4}
    save_file({**state, **inputs}, "start.safetensors")
    rate = ["--scalar", "lr=0.1"]
    monarchc("run", "first.mplan", "--inputs", "start.safetensors", "--outputs", "one.safetensors", *rate)
    save_file({**load_file("one.safetensors"), **inputs}, "next.safetensors")
    three = ["--steps", "3", "--outputs", "four.safetensors", "--json"]
    shown = json.loads(monarchc("run", "step.mplan", "--inputs", "next.safetensors", *three, *rate).out)
    assert shown["unused"] == [name for name in load_file("one.safetensors") if name.startswith(("return.", "grad["))]
    assert len(shown["seconds"]) == 3
    assert shown["results"]["return.0"]["value"] == pytest.approx(_by_pytorch(state, inputs, 4), rel=1e-4)
    assert load_file("four.safetensors")["adamw.step[0.weight]"].item() == 4


def _by_pytorch(state: dict[str, torch.Tensor], inputs: dict[str, torch.Tensor], steps: int) -> float:
    """The loss of the last step of the same training in this process."""
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
    model.load_state_dict(state)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs["x"]), inputs["labels"])
        loss.backward()
        optimizer.step()
    return float(loss.item())


def test_random_numbers_start_where_the_seed_says(folder: Path, monarchc: Run) -> None:
    (folder / "noise.py").write_text(
        "import monarch, torch\nmesh = monarch.Mesh(data=2)\n@monarch.program(mesh=mesh)\n"
        'def noise(x: "f32[4@data]"):\n    return x + torch.rand(4)\n'
    )
    monarchc("compile", "noise.py")

    def draw(seed: int) -> list[float]:
        out = monarchc("run", "noise.mplan", "--fill", "zeros", "--seed", str(seed), "--json").out
        return list(json.loads(out)["results"]["return.0"]["value"])

    assert draw(1) == draw(1) != draw(2)


def test_a_step_that_fails_on_a_worker_is_status_1(folder: Path, monarchc: Run) -> None:
    (folder / "lookup.py").write_text(
        "import monarch, torch\nmesh = monarch.Mesh(data=2)\n@monarch.program(mesh=mesh)\n"
        'def lookup(table: "f32[4, 2]", at: "i64[2]"):\n    return torch.nn.functional.embedding(at, table)\n'
    )
    monarchc("compile", "lookup.py")
    save_file({"table": torch.zeros(4, 2), "at": torch.tensor([0, 9])}, "in.safetensors")
    result = monarchc("run", "lookup.mplan", "--inputs", "in.safetensors", code=1)
    assert "monarchc: error: " in result.err and "out of range" in result.err and result.out == ""
