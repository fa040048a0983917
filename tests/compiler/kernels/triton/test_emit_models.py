"""Every kernel that the compiler makes of a training step, as Triton: run in the interpreter, and compiled."""

from __future__ import annotations

import pytest
import torch

from monarch.compiler.cli.load import load_program
from monarch.compiler.kernels.triton.build import compile_launches
from monarch.compiler.kernels.triton.emit import emit
from monarch.compiler.loops.ir import Kernel, Load
from monarch.compiler.pipeline import partition_graph
from tests.compiler.kernels.checking import check_results, operands
from tests.compiler.kernels.graphs import fused, kernels_of
from tests.compiler.kernels.triton.assembly import assert_no_spills
from tests.compiler.kernels.triton.emitted import launch_all

PROGRAM = """
import torch
import torch.nn.functional as F

import monarch
from monarch.distributed import Mesh
from monarch.stdlib.models.gpt import GPT

mesh = Mesh.abstract(data=2)
model = monarch.module_to_mesh(GPT(width=32, layers=1, sequence=16), mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


@monarch.program
def step(tokens: "i64[4@data, 16]", targets: "i64[4@data, 16]"):
    optimizer.zero_grad()
    loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    return loss
"""


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> list[Kernel]:
    path = tmp_path_factory.mktemp("program") / "train_small_gpt.py"
    path.write_text(PROGRAM)
    graph = partition_graph(load_program(f"{path}:step", None, {}, False).graph)
    return list(dict.fromkeys(kernels_of(fused(graph, target="cuda:90"))))


def data(kernel: Kernel) -> list[torch.Tensor]:
    """Operands; what a gather's index may be loaded from stays within the rows."""
    rows = min((s.size for n in kernel.nests for s in n.body if isinstance(s, Load) and s.gather >= 0), default=7)
    return [
        tensor.remainder(rows)
        if tensor.dtype == torch.int64
        else tensor.abs() + 0.1
        if tensor.is_floating_point()
        else tensor
        for tensor in operands(kernel)
    ]


def test_a_training_steps_kernels_in_the_interpreter(kernels: list[Kernel]) -> None:
    assert len(kernels) > 10
    for kernel in kernels:
        tensors = data(kernel)
        found, error = launch_all(kernel, tensors)
        assert error == 0, kernel.name
        check_results(kernel, tensors, found, tolerance=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize("target", ["cuda:80", "cuda:90", "cuda:100", "gfx942"])
def test_a_training_steps_kernels_compiled(kernels: list[Kernel], target: str) -> None:
    for kernel in kernels:
        for compiled in compile_launches(kernel, emit(kernel), target):
            assert_no_spills(compiled)


def test_the_optimizers_updates_are_one_launch(kernels: list[Kernel]) -> None:
    update = max(kernels, key=lambda kernel: len(kernel.nests))
    assert "lerp" in update.name and len(update.nests) > 4
    assert len(emit(update).launches) == 1
