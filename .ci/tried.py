"""Try Monarch with the Python and the torch that run this: training steps on two workers against plain PyTorch, a
checkpoint and a stream, and `monarchc check`, `inspect` and `compile` of an example. `make try` runs it."""

from __future__ import annotations

import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

import monarch
from monarch.distributed import Mesh

EXAMPLE = str(Path(__file__).parents[1] / "examples" / "inspecting.py")


def losses(model: torch.nn.Module, batches: torch.Tensor, mesh: Mesh | None) -> list[float]:
    """Those of three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    run = step if mesh is None else monarch.program(step, mesh=mesh)
    source = batches.split(4) if mesh is None else monarch.data.stream(batches, mesh, "[@data]", batch=4)
    return [run(x).item() for x in source]


def steps(folder: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 2))
    batches, whole = torch.randn(12, 8), {name: value.clone() for name, value in model.state_dict().items()}
    wanted = losses(model, batches, None)
    with Mesh(data=2) as mesh:
        model.load_state_dict(whole)
        monarch.module_to_mesh(model, mesh)
        torch.testing.assert_close(losses(model, batches, mesh), wanted)
        saved = model[0].weight.full_tensor()
        monarch.save(model, folder / "saved").result()
        with torch.no_grad():
            model[0].weight.zero_()
        monarch.load(folder / "saved", into=model)
        assert torch.equal(model[0].weight.full_tensor(), saved)
    print("training on two workers, a stream and a checkpoint: as plain PyTorch", flush=True)


def commands(folder: Path) -> None:
    command = [sys.executable, "-c", "from monarch.compiler.cli import main; main()"]
    for what in (["check", EXAMPLE], ["inspect", EXAMPLE], ["compile", EXAMPLE, "-o", str(folder / "plan")]):
        done = subprocess.run([*command, *what], cwd=folder, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"monarchc {' '.join(what)} fails:\n{done.stdout}{done.stderr}")
        print(f"monarchc {what[0]}: fine", flush=True)


if __name__ == "__main__":
    print(f"Python {platform.python_version()}, torch {torch.__version__}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        steps(Path(name))
        commands(Path(name))
