"""What a notebook shows of meshes, layouts, tensors and programs: well-formed, escaped, right in what it says, and made
without starting, running or fetching anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from torch import nn

from monarch.compiler.errors import MonarchError
from monarch.compiler.execution.factories import executors_by
from monarch.compiler.inspect.drawing import shown
from monarch.compiler.inspect.html import frame_html, layout_html, mesh_html, program_html, tensor_html, type_html
from monarch.compiler.inspect.inspection import Inspection
from monarch.compiler.text import parse_layout, parse_type
from monarch.compiler.types import Layout, MeshSpec, TensorType
from monarch.language import DistributedTensor, Mesh, distribute, module_to_mesh, program
from monarch.language.tensors.cell import Failure
from tests.compiler.strategies import meshes, types
from tests.language.conftest import mesh

__all__ = ["mesh"]

MESH = MeshSpec.of(data=4, model=2)


def parsed(html: str) -> ElementTree.Element:
    """The output as a tree: it has to be well-formed XML too."""
    return ElementTree.fromstring(html.replace("xmlns=", "data-xmlns="))


def words(html: str) -> str:
    """What is read of an output: its text outside of drawings."""
    root = parsed(html)
    for parent in list(root.iter()):
        for child in parent:
            if child.tag in ("style", "svg"):
                child.tag, child.text, child[:] = "span", " ", []
            if child.tag == "div" or parent.get("class") == "mn-k":
                child.tail = " " + (child.tail or "")
    return " ".join("".join(root.itertext()).split())


def drawn(html: str) -> list[str]:
    """What stands in the drawings, in order, without what a pointer shows."""
    return [found.text or "" for found in parsed(html).iter("text")]


def titles(html: str) -> list[str]:
    return [found.text or "" for found in parsed(html).iter("title")]


# -- meshes ----------------------------------------------------------------------------------------------------------


def test_a_mesh_is_a_grid_of_its_workers() -> None:
    html = mesh_html(MESH)
    assert words(html) == "mesh<data=4, model=2> 8 workers"
    assert [text for text in drawn(html) if text.isdigit()] == [str(rank) for rank in range(8)]
    assert [text for text in drawn(html) if "=" in text] == ["model=0", "model=1", *(f"data={i}" for i in range(4))]
    assert titles(html)[5] == "worker 5: data=2, model=1"


def test_a_large_mesh_is_abbreviated() -> None:
    html = mesh_html(MeshSpec.of(data=512, model=8))
    assert "4,096 workers" in words(html)
    numbers = [int(text) for text in drawn(html) if text.isdigit()]
    assert numbers[:8] == list(range(8)) and numbers[-1] == 4095
    assert "data=511" in drawn(html) and "⋮" in drawn(html) and "data=300" not in drawn(html)
    largest = mesh_html(MeshSpec.of(a=1024, b=1024, c=1024, d=1024))
    assert len(largest) < 60_000 and "1,099,511,627,776 workers" in words(largest)


@pytest.mark.parametrize("size", range(1, 12))
def test_of_a_large_dim_the_first_positions_and_the_last_are_shown(size: int) -> None:
    found = shown(size, 6)
    assert found == list(range(size)) if size <= 6 else found == [0, 1, 2, 3, None, size - 1]


def test_the_workers_of_a_part_keep_their_numbers(mesh: Mesh) -> None:
    part = mesh.slice(data=1)
    html = part._repr_html_()
    assert [text for text in drawn(html) if text.isdigit()] == ["2", "3"]
    assert "part of 4" in words(html)
    assert "abstract" in words(Mesh.abstract(data=2)._repr_html_())
    assert "not started yet" in words(mesh._repr_html_())
    mesh.close()
    assert "closed" in words(mesh._repr_html_())


# -- layouts and tensors ---------------------------------------------------------------------------------------------


def test_a_layout_says_what_each_mesh_dim_does() -> None:
    html = layout_html(parse_layout("[@(data,model), -] partial<sum: pipe> varying<gpu>"))
    assert words(html) == (
        "[@(data,model), -] partial<sum: pipe> varying<gpu> "
        "data cuts dim 0 model cuts each block that data left of dim 0 "
        "pipe each worker along it holds a part of the sum gpu each worker along it holds a value of its own"
    )
    assert parse_layout("[@data, -]")._repr_html_() == layout_html(parse_layout("[@data, -]"))


def test_a_type_says_its_size() -> None:
    html = type_html(parse_type("f32[64@data, 1024]"))
    assert words(html) == "f32[64@data, 1024] 256.0 KiB data cuts dim 0"
    assert {"dim 0: 64", "dim 1: 1,024", "data=0", "data=1"} <= set(drawn(html))
    assert TensorType(torch.float32, (64,))._repr_html_() == type_html(TensorType(torch.float32, (64,)))


@pytest.mark.parametrize(
    ("type_", "blocks", "said"),
    [
        ("f32[8@data, 4@model]", ["0", "1", "2", "3", "4", "5", "6", "7"], "data=4 cuts dim 0 into 4 blocks of 2"),
        ("f32[8@data, 4]", ["0, 1", "2, 3", "4, 5", "6, 7"], "model=2 each worker along it holds a copy"),
        ("f32[8, 4@model]", ["0, 2 … 6", "1, 3 … 7"], "data=4 each worker along it holds a copy"),
        ("f32[8@(model,data)]", ["0", "2", "4", "6", "1", "3", "5", "7"], "cuts each block that model left of dim 0"),
        ("f32[8, 4] partial<max: model>", ["0–7"], "model=2 each worker along it holds a part of the max"),
        ("f32[] varying<data>", ["0–7"], "data=4 each worker along it holds a value of its own"),
        (
            "f32[3, 8@data, 5, 4@model]",
            ["0", "1", "2", "3", "4", "5", "6", "7"],
            "model=2 cuts dim 3 into 2 blocks of 2",
        ),
    ],
)
def test_a_tensor_shows_who_holds_each_block(type_: str, blocks: list[str], said: str) -> None:
    html = tensor_html(parse_type(type_), MESH)
    assert [text for text in drawn(html) if re.fullmatch(r"[\d, …–]+", text)] == blocks
    assert said in words(html)


def test_a_partial_value_is_hatched_and_a_varying_one_dotted() -> None:
    def paths(type_: str) -> list[str]:
        html = tensor_html(parse_type(type_), MESH)
        return [found.get("stroke-linecap", "") for found in parsed(html).iter("path")]

    assert paths("f32[8@data, 4]") == []
    assert set(paths("f32[8, 4] partial<sum: data>")) == {""}
    assert set(paths("f32[8, 4] varying<data>")) == {"round"}


@settings(max_examples=60, deadline=None)
@given(meshes().flatmap(lambda spec: types(spec).map(lambda type_: (spec, type_))))
def test_every_type_is_drawn(case: tuple[MeshSpec, TensorType]) -> None:
    spec, type_ = case
    for html in (mesh_html(spec), layout_html(type_.layout), type_html(type_), tensor_html(type_, spec)):
        assert parsed(html).tag == "div"
    assert str(type_) in words(type_html(type_))


def test_hostile_names_are_escaped() -> None:
    bad = "<script>alert(1)</script>&\"'"
    html = program_html(bad, [(bad, bad), ("x", TensorType(torch.float32, (2,)))], None, where=bad, notes=[bad])
    html += tensor_html(TensorType(torch.float32, (2,)), MESH, notes=[bad], error=bad) + mesh_html(MESH, note=bad)
    html += layout_html(Layout((("<b>",),), (("<i>", "<u>"),), ("<s>",)))
    assert not re.search(r"<(script|b>d|i>|u>|s>)", html.replace('<b class="', ""))
    assert "&lt;script&gt;" in html
    frame = frame_html(f"<html>{bad}</html>", bad)
    assert frame.count("<") == 2 and "allow-same-origin" not in frame
    assert parsed(frame).get("srcdoc") == f"<html>{bad}</html>"


def test_each_output_has_its_colours_for_both_themes() -> None:
    sheet = next(parsed(mesh_html(MESH)).iter("style")).text or ""
    for selector in (
        "prefers-color-scheme: dark",
        '[data-jp-theme-light="true"]',
        ".vscode-dark",
        'html[theme="dark"]',
    ):
        assert selector in sheet


# -- tensors and programs as they are --------------------------------------------------------------------------------


class Untouchable:
    """An executor that must not be asked for."""

    def __init__(self, spec: MeshSpec) -> None:
        raise AssertionError("a worker was started")


@pytest.fixture
def no_workers() -> Iterator[None]:
    with executors_by(Untouchable):  # type: ignore[arg-type]
        yield


def test_showing_a_tensor_runs_nothing(mesh: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    x = distribute(torch.ones(4, 4), mesh, "[@data, -]")
    y = x + 1
    view = x.t()
    pending = mesh.pending
    asked: list[str] = []
    for name in ("run", "shards", "wait", "put"):
        monkeypatch.setattr(type(mesh.executor), name, lambda *args, name=name, **kwargs: asked.append(name))
    assert isinstance(y, DistributedTensor) and isinstance(view, DistributedTensor)
    assert "f32[4@data, 4] on mesh<data=2, model=2>" in words(x._repr_html_())
    assert "32 B on each worker: [2, 4]" in words(x._repr_html_())
    assert "not computed yet · its layout is not chosen yet" in words(y._repr_html_())
    assert "a view of another tensor" in words(view._repr_html_())
    assert "requires grad" in words(nn.Parameter(x)._repr_html_())  # type: ignore[operator]
    assert asked == [] and mesh.pending is pending and y._ref.cell.handle is None


def test_tensors_programs_and_inspections_need_no_workers(no_workers: None) -> None:
    mesh = Mesh.abstract(data=2, model=2)
    model = module_to_mesh(nn.Linear(4, 4), mesh)

    @program
    def step(x: "f32[4@data, 4]", scale: float = 2.0, *rest: int, **more: Any) -> torch.Tensor:
        return model(x) * scale

    text = words(step._repr_html_())
    assert re.match(
        r"program step test_html\.py:\d+ x f32\[4@data, 4\] scale float = 2\.0 \*rest int \*\*more Any", text
    )
    assert text.endswith("on mesh<data=2, model=2>")
    assert "f32[4@data, 4] on" in words(model.weight._repr_html_())  # type: ignore[operator]
    inspection = step.inspect(torch.ones(4, 4))
    assert not step.remembered
    (page,) = re.findall(r'srcdoc="([^"]*)"', inspection._repr_html_())
    assert unescape(page) == inspection.html()


def test_a_failed_tensor_says_what_failed(mesh: Mesh) -> None:
    x = distribute(torch.ones(4), mesh)
    y = x + 1
    assert isinstance(y, DistributedTensor)
    y._ref.cell.failure = Failure(MonarchError("worker 3 died", hint="start again."))
    assert "failed: worker 3 died" in words(y._repr_html_())
    y._ref.cell.failure = Failure(KeyError())
    assert "failed: KeyError" in words(y._repr_html_())


def test_a_tensor_within_a_trace_is_shown(mesh: Mesh, capsys: pytest.CaptureFixture[str]) -> None:
    @program
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        print(x._repr_html_(), "behind it", y._repr_html_())  # type: ignore[operator]  # monarch: ignore[M103, M305]
        return y

    step.trace(distribute(torch.ones(4), mesh, "[@data]"))
    given, made = capsys.readouterr().out.split("behind it")
    assert "f32[4@data] on" in words(given) and "layout is not chosen yet" in words(made)


def test_a_program_of_anything_callable_is_shown(mesh: Mesh) -> None:
    for made in (program(torch.relu), program(lambda x, /, *, y: x), program(nn.Linear(2, 2))):
        assert words(made._repr_html_()).startswith("program ")
    assert "its mesh is that of its arguments" in words(program(torch.relu)._repr_html_())


# -- inspections -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def inspection() -> Inspection:
    mesh = Mesh.abstract(data=2, model=2)
    weight = distribute(torch.ones(4, 4), mesh, "[@model, -]")

    @program
    def step(x: "f32[4@data, 4@model]") -> torch.Tensor:
        return torch.relu(x @ weight)

    return step.inspect(torch.ones(4, 4))


def test_an_inspection_in_a_terminal(inspection: Inspection) -> None:
    first, second, third, fourth = repr(inspection).splitlines()
    assert first == "step on mesh<data=2, model=2>: 4 workers, for cpu"
    assert re.fullmatch(r"  \d+ ops, 1 collective \(1 over model\)", second)
    assert re.fullmatch(r"  a worker sends 32 B a step, and holds \d+ B at most", third)
    assert '.save("page.html")' in fourth


def test_an_inspection_is_saved_as_the_page(inspection: Inspection, tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    inspection.save(path)
    assert path.read_text() == inspection.html()
    assert "<title>" in inspection.html() and "step" in inspection.html()
    with pytest.raises(MonarchError, match=r"cannot write .*: No such file"):
        inspection.save(tmp_path / "none" / "page.html")


def test_an_inspection_explains(inspection: Inspection) -> None:
    assert "sum" in str(inspection.explain("mm_all_reduce"))
    with pytest.raises(MonarchError):
        inspection.explain("nothing")


def test_a_plan_without_a_report_cannot_be_inspected(inspection: Inspection) -> None:
    with pytest.raises(MonarchError, match="has no report"):
        Inspection(replace(inspection.plan, report=None))
