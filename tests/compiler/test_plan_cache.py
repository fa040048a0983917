"""Plans that are kept on disk: what is one entry, what is another, what is none, and what is not trusted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from monarch.compiler.config import settings
from monarch.compiler.execution.events import Log, subscribe
from monarch.compiler.graph import Graph
from monarch.compiler.ops.record import records_kept
from monarch.compiler.plan import CompileOptions, Plan
from monarch.compiler.plan.file import hash_of
from monarch.compiler.plan_cache import compile_kept
from monarch.compiler.rules import sharding_rule
from monarch.compiler.text import parse_graph
from monarch.config import configured

TEXT = """
graph @step on mesh<data=2> {
  %x = input 0                       : f32[8@data, 4]
  %w = state "w"                     : f32[4, 4]
  %c = constant "c0"                 : f32[4]
  %h = aten.mm(%x, %w)               : f32[8, 4]     # train.py:3
  %y = aten.add.Tensor(%h, %c)       : f32[8, 4]     # train.py:4
  %z = aten.mul.Tensor(%y, 2.0)      : f32[8, 4]     # train.py:5
  return %z
}
"""

TWO = """
graph @step on mesh<stage=2, data=2> with a: mesh<data=2>, b: mesh<data=2> {
  %x = input 0                             : f32[8@data, 4] on a
  %h = aten.mul.Tensor(%x, 2.0)            : f32[8, 4] on a
  %t = transfer(%h, "b", none)             : f32[8, 4] on b
  %y = aten.add.Tensor(%t, 1.0)            : f32[8, 4] on b
  return %y
}
"""


def graph(text: str = TEXT, constant: float = 1.0) -> Graph:
    found = parse_graph(text)
    found.constants["c0"] = torch.full((4,), constant)
    return found


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where plans are kept. With the verifier on, none are."""
    with configured(verify=False, cache=str(tmp_path), kernels="all"):
        yield tmp_path / "plans"


def compiled(of: Graph, options: CompileOptions | None = None) -> tuple[Plan, bool]:
    """A graph's plan, and whether passes ran for it."""
    lines: list[str] = []
    stop = subscribe(lambda event: lines.append(event.text), Log)
    try:
        plan = compile_kept(of, options or CompileOptions())
    finally:
        stop()
    return plan, any("fuse-kernels" in line for line in lines)


def test_a_graph_is_compiled_once() -> None:
    first, passes = compiled(graph())
    again, more = compiled(graph())
    assert passes and not more
    assert hash_of(again) == hash_of(first)
    assert again.graph == first.graph and again.sources == first.sources and again.options == first.options
    assert again.costs == {**first.costs}
    assert torch.equal(again.constants["c0"], first.constants["c0"])


def test_a_graph_of_several_meshes_is_compiled_once_for_each_place_of_its_parts(folder: Path) -> None:
    first, passes = compiled(parse_graph(TWO))
    again, more = compiled(parse_graph(TWO))
    assert passes and not more
    assert hash_of(again) == hash_of(first)
    assert [(part.name, part.place) for part in again.parts] == [(part.name, part.place) for part in first.parts]
    assert again.transfers == first.transfers
    assert compiled(parse_graph(TWO.replace("a: mesh<data=2>, b: mesh<data=2>", "b: mesh<data=2>, a: mesh<data=2>")))[1]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "other",
    [
        graph(constant=2.0),
        graph(constant=-0.0),
        graph(TEXT.replace("2.0", "2.5")),
        graph(TEXT.replace("train.py:5", "train.py:6")),
        graph(TEXT.replace("8@data", "8")),
        graph(TEXT.replace("data=2", "data=4")),
        graph(TEXT.replace("train.py:3", 'train.py:3 in "fc"')),
    ],
)
def test_another_graph_or_constant_is_another_entry(other: Graph, folder: Path) -> None:
    compiled(graph(constant=0.0))
    assert compiled(other)[1]
    assert len(list(folder.iterdir())) == 2


def test_another_option_setting_or_dtype_is_another_entry(folder: Path) -> None:
    compiled(graph())
    assert compiled(graph(), CompileOptions(rounding="chain"))[1]
    assert compiled(graph(), CompileOptions(kernels="off"))[1]
    with configured(kernels="off"):
        assert compiled(graph())[1]
    torch.set_default_dtype(torch.float64)
    try:
        assert compiled(graph())[1]
    finally:
        torch.set_default_dtype(torch.float32)
    assert len(list(folder.iterdir())) == 5
    assert not compiled(graph())[1]


def test_another_rule_is_another_entry_and_a_function_is_none(folder: Path) -> None:
    compiled(graph())
    with records_kept():
        sharding_rule("aten.mm", "m k, k n -> m n", whole="m")
        assert compiled(graph())[1]
        assert len(list(folder.iterdir())) == 2
        sharding_rule("aten.mm")(lambda call: "m k, k n -> m n")
        assert compiled(graph())[1] and compiled(graph())[1]
        assert len(list(folder.iterdir())) == 2
    assert not compiled(graph())[1]


def test_what_does_not_follow_from_the_key_is_not_kept(folder: Path) -> None:
    whole = graph(TEXT.replace("aten.mul.Tensor(%y, 2.0)      : f32[8, 4]", "aten.renorm(%y, 2, 0, 1.0) : f32[8, 4]"))
    with pytest.warns(Warning, match="runs whole"):
        compiled(whole)
    assert compiled(whole)[1]
    assert list(folder.iterdir()) == []


def test_the_verifier_and_dumps_see_every_pass(tmp_path: Path) -> None:
    compiled(graph())
    with configured(verify=True):
        assert compiled(graph())[1]
    with configured(dump=str(tmp_path / "dump")):
        assert compiled(graph())[1]


def test_a_size_of_0_keeps_none(folder: Path) -> None:
    for none in (0, "0"):
        with configured(plan_cache=none):
            assert compiled(graph())[1] and compiled(graph())[1]
    assert not folder.exists()


def test_those_used_longest_ago_go_first(folder: Path) -> None:
    for number in range(3):
        compiled(graph(constant=float(number)))
        for age, path in enumerate(sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime), start=1):
            os.utime(path, (path.stat().st_mtime - age,) * 2)
    assert not compiled(graph(constant=0.0))[1]  # from here on this one is used last
    size = max(path.stat().st_size for path in folder.iterdir())
    with configured(plan_cache=3 * size + size // 2):  # a plan has seconds in it, in more digits or fewer
        assert compiled(graph(constant=3.0))[1]
        assert len(list(folder.iterdir())) == 3
        assert not compiled(graph(constant=0.0))[1]
        assert not compiled(graph(constant=2.0))[1]
        assert compiled(graph(constant=1.0))[1]


@pytest.mark.parametrize("what", ["cut short", "edited", "empty", "another program's", "no plan"])
def test_a_file_that_is_not_the_plan_is_compiled_anew_and_said(
    what: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = compiled(graph())
    (path,) = folder.iterdir()
    data = path.read_bytes()
    compiled(graph(constant=7.0))
    (other,) = set(folder.iterdir()) - {path}
    broken = {
        "cut short": data[:-20],
        "edited": data.replace(b"aten.mm", b"aten.mv"),
        "empty": b"",
        "another program's": other.read_bytes(),
        "no plan": b"x" * 1000,
    }
    path.write_bytes(broken[what])
    capsys.readouterr()
    again, passes = compiled(graph())
    assert passes and hash_of(again) == hash_of(first)
    assert "a kept plan cannot be read, so its program is compiled again" in capsys.readouterr().err
    assert not compiled(graph())[1]


@pytest.mark.parametrize("mode", [0o620, 0o602])
def test_a_file_that_others_may_have_written_is_compiled_anew(mode: int, folder: Path) -> None:
    compiled(graph())
    (path,) = folder.iterdir()
    path.chmod(mode)
    assert compiled(graph())[1]


def test_a_folder_that_others_may_write_keeps_none(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(graph())
    folder.chmod(0o777)
    assert compiled(graph())[1]
    assert f"chmod 700 {folder}" in capsys.readouterr().err


def test_a_cache_that_cannot_be_made_keeps_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    with configured(cache=str(tmp_path / "file")):
        assert compiled(graph())[1]
    assert "cannot use" in capsys.readouterr().err
    assert settings.plan_cache > 0
