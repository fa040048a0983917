"""A notebook's kernel shows meshes, layouts, tensors and programs as HTML, and keeps their text for where it cannot."""

from __future__ import annotations

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

CELLS = [
    "import torch, monarch\nfrom monarch.distributed import Mesh\nmesh = Mesh.abstract(data=4, model=2)\nmesh",
    "x = monarch.distribute(torch.ones(8, 4), mesh, '[@data, -]')\nx",
    "x.sharding",
    "x.tensor_type",
    "w = monarch.distribute(torch.ones(4, 4), mesh, '[-, @model]')\n"
    "@monarch.program\ndef step(x: 'f32[8@data, 4]'):\n    return x @ w\nstep",
    "step.inspect(x)",
    "x + 1",
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each cell shows, by type of content."""
    folder = tmp_path_factory.mktemp("notebook")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    root = Path(__file__).parents[3]
    path = os.pathsep.join([str(root / ".src"), os.environ.get("PYTHONPATH", "")])
    client = NotebookClient(notebook, timeout=100, kernel_name="python3", resources={"metadata": {"path": str(folder)}})
    client.execute(env={**os.environ, "PYTHONPATH": path, "IPYTHONDIR": str(folder)})
    found = []
    for cell in notebook.cells:
        (shown,) = [output for output in cell.outputs if output.output_type == "execute_result"]
        assert [output for output in cell.outputs if output.output_type == "error"] == []
        found.append(dict(shown.data))
    return found


def test_a_kernel_shows_html_and_keeps_the_text(outputs: list[dict[str, str]]) -> None:
    mesh, x, layout, type_, step, inspection, y = (output["text/plain"] for output in outputs)
    assert mesh == "Mesh.abstract(data=4, model=2)"
    assert x == "DistributedTensor(f32[8@data, 4] on mesh<data=4, model=2>)"
    assert y == "DistributedTensor(f32[8, 4] on mesh<data=4, model=2>)"
    assert layout == "Layout(shards=(('data',), ()), partial=(), varying=())"
    assert "TensorType(" in type_ and "Program" in step
    assert inspection.startswith("step on mesh<data=4, model=2>: 8 workers, for cpu\n")
    for place, output in enumerate(outputs):
        if place != 5:
            assert output["text/html"].startswith('<div class="mn"><style>') and "<svg" in output["text/html"]


def test_a_kernel_shows_the_page_of_an_inspection(outputs: list[dict[str, str]]) -> None:
    html = outputs[5]["text/html"]
    assert html.startswith("<iframe srcdoc=") and "aten.mm" in html
