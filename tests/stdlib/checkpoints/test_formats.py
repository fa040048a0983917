"""What is saved is what is loaded, whatever mesh, layouts and format; PyTorch and safetensors read it too."""

from __future__ import annotations

import errno
import io
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import monarch
from monarch.distributed import Mesh
from monarch.exceptions import CheckpointError
from monarch.stdlib.checkpoints import loading
from monarch.stdlib.checkpoints.containers import Container, find

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
MESHES: list[dict[str, int]] = [{"a": 1}, {"a": 3}, {"a": 2, "b": 2}, {"a": 4}]


@st.composite
def laid_out(draw: Any) -> tuple[torch.dtype, tuple[int, ...], list[tuple[dict[str, int], list[Any]]]]:
    """A dtype, sizes, and a mesh and a layout to save with and to load with."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.lists(st.integers(0, 7), max_size=3)))
    placed = []
    for _ in range(2):
        sizes = draw(st.sampled_from(MESHES))
        layout: list[list[str]] = [[] for _ in shape]
        for name in sizes:
            at = draw(st.integers(-1, len(shape) - 1))
            if at >= 0:
                layout[at].append(name)
        placed.append((sizes, [tuple(names) if names else None for names in layout]))
    return dtype, shape, placed


def values(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    return (numbers % 3 == 1) if dtype == torch.bool else (numbers * 1.25 + 1).to(dtype)


@pytest.mark.usefixtures("here")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=30)
@given(case=laid_out(), format=st.sampled_from(["dcp", "safetensors"]))
def test_any_mesh_loads_what_any_mesh_has_saved(case: Any, format: Any, tmp_path_factory: Any) -> None:
    dtype, shape, ((sizes, layout), (others, other)) = case
    path = tmp_path_factory.mktemp("c") / "x"
    whole = values(dtype, shape)
    x = monarch.distribute(whole, Mesh(**sizes), sharding_spec=layout)
    monarch.save({"x": x}, path, format=format).result()
    y = monarch.distribute(torch.zeros_like(whole), Mesh(**others), sharding_spec=other)
    monarch.load(path, into={"x": y})
    assert torch.equal(y.full_tensor(), whole)
    plain = {"x": torch.zeros_like(whole)}
    assert torch.equal(monarch.load(path, into=plain)["x"], whole)
    if format == "dcp":
        read = {"x": torch.zeros_like(whole)}
        torch_dcp.load(read, checkpoint_id=path, no_dist=True)
        assert torch.equal(read["x"], whole)
    else:
        assert torch.equal(safetensors.torch.load_file(path / "model.safetensors")["x"], whole)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_large_blocks_are_shared_among_replicas_and_read_in_parts(format: Any, tmp_path: Path) -> None:
    whole = torch.arange(3_300_001, dtype=torch.int32)
    wide = torch.arange(64 * 40_001, dtype=torch.float32).view(64, 40_001)
    mesh = Mesh(a=3)
    state = {"x": monarch.distribute(whole, mesh), "w": monarch.distribute(wide, mesh, "[-, @a]")}
    monarch.save(state, tmp_path / "c", format=format).result()
    if format == "dcp":
        sizes = [file.stat().st_size for file in (tmp_path / "c").glob("__[0-9]*")]
        assert len(sizes) == 3 and max(sizes) < 1.1 * min(sizes)  # each wrote a third of what all hold
    other = Mesh(a=2, b=2)
    into = {
        "x": monarch.distribute(torch.zeros_like(whole), other, "[@(a,b)]"),
        "w": monarch.distribute(torch.zeros_like(wide), other, "[@b, @a]"),
    }
    monarch.load(tmp_path / "c", into=into)
    assert torch.equal(into["x"].full_tensor(), whole)
    assert torch.equal(into["w"].full_tensor(), wide)


@pytest.mark.usefixtures("here")
def test_pytorch_reads_all_that_was_saved(tmp_path: Path) -> None:
    mesh = Mesh(a=2)
    model = monarch.module_to_mesh(nn.Linear(5, 3), mesh, {"weight": "[@a, -]"})
    state = {"model": model, "note": "text", "list": [1, {"deep": torch.ones(2)}], "step": 3, "pair": (1, 2.5)}
    monarch.save(state, tmp_path / "c").result()
    dcp_to_torch_save(tmp_path / "c", tmp_path / "c.pt")
    found = torch.load(tmp_path / "c.pt", weights_only=True)
    assert torch.equal(found["model"]["weight"], model.weight.full_tensor())
    assert (found["note"], found["step"], found["pair"], found["list"][0]) == ("text", 3, (1, 2.5), 1)
    assert torch.equal(found["list"][1]["deep"], torch.ones(2))


@pytest.mark.usefixtures("here")
def test_what_dcp_wrote_is_read(tmp_path: Path) -> None:
    held = {"model": nn.Linear(5, 3).state_dict(), "t": torch.arange(12.0).view(3, 4).t(), "step": 4}
    torch_dcp.save(held, checkpoint_id=tmp_path / "c", no_dist=True)
    model = monarch.module_to_mesh(nn.Linear(5, 3), Mesh(a=2), {"weight": "[-, @a]"})
    into = {"model": model, "t": torch.zeros(4, 3), "step": 0}
    monarch.load(tmp_path / "c", into=into)
    assert torch.equal(model.weight.full_tensor(), held["model"]["weight"])
    assert torch.equal(into["t"], held["t"]) and into["step"] == 4


class WithExtra(nn.Linear):
    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "extra",
    [3, {}, {"seen": {"a": 5, "by": [2, "x"]}, "last": None}, {"mean": torch.ones(3), "count": 2}, [1, {"a": 2}]],
)
def test_extra_state_of_modules_comes_back(extra: Any, tmp_path: Path) -> None:
    model = monarch.module_to_mesh(nn.Sequential(WithExtra(2, 2), WithExtra(2, 2)), Mesh(a=2))
    model[0].extra, model[1].extra = extra, {1: "x"}
    monarch.save({"model": model}, tmp_path / "c").result()
    for before in (None, {}, extra):
        model[0].extra, model[1].extra = before, {1: "y"}
        monarch.load(tmp_path / "c", into={"model": model})
        assert str(model[0].extra) == str(extra) and model[1].extra == {1: "x"}


@pytest.mark.usefixtures("here")
def test_one_file_of_safetensors_is_read_and_written(tmp_path: Path) -> None:
    safetensors.torch.save_file({"weight": torch.ones(3, 5), "bias": torch.arange(3.0)}, tmp_path / "a.safetensors")
    model = monarch.module_to_mesh(nn.Linear(5, 3), Mesh(a=2), {"weight": "[-, @a]"})
    monarch.load(tmp_path / "a.safetensors", into=model)
    assert torch.equal(model.weight.full_tensor(), torch.ones(3, 5))
    monarch.save(model, tmp_path / "b.safetensors").result()
    with safetensors.safe_open(tmp_path / "b.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("bias"), torch.arange(3.0))
        assert file.metadata()["format"] == "pt"
    assert sorted(each.name for each in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


@pytest.mark.usefixtures("here")
def test_an_index_of_hugging_face_is_read_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("monarch.stdlib.checkpoints.safetensors_files._SHARD_BYTES", 64)
    model = monarch.module_to_mesh(nn.Linear(5, 3), Mesh(a=2), {"weight": "[-, @a]"})
    monarch.save(model, tmp_path / "c", format="safetensors").result()
    index = json.loads((tmp_path / "c" / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 72},
        "weight_map": {
            "weight": "model-00001-of-00002.safetensors",
            "bias": "model-00002-of-00002.safetensors",
        },
    }
    other = monarch.module_to_mesh(nn.Linear(5, 3), Mesh(a=3))
    monarch.load(tmp_path / "c", into=other)
    assert torch.equal(other.weight.full_tensor(), model.weight.full_tensor())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_tied_tensors_are_written_once(format: Any, tmp_path: Path) -> None:
    model = monarch.module_to_mesh(Tied(), Mesh(a=2), {"embedding.weight": "[@a, -]"})
    saving = monarch.save(model, tmp_path / "c", format=format)
    saving.result()
    assert saving.progress == (112, 112)
    other = monarch.module_to_mesh(Tied(), Mesh(a=3))
    monarch.load(tmp_path / "c", into=other)
    assert torch.equal(other.head.weight.full_tensor(), model.embedding.weight.full_tensor())
    if format == "dcp":
        plain = Tied()
        held = {**plain.state_dict()}
        torch_dcp.load(held, checkpoint_id=tmp_path / "c", no_dist=True)
        assert torch.equal(held["head.weight"], model.embedding.weight.full_tensor())
    else:
        plain = Tied()
        safetensors.torch.load_model(plain, tmp_path / "c" / "model.safetensors")
        assert torch.equal(plain.head.weight, model.embedding.weight.full_tensor())


@pytest.mark.usefixtures("here")
def test_views_and_other_dtypes(tmp_path: Path) -> None:
    x = monarch.distribute(torch.arange(24.0).view(4, 6), Mesh(a=2), "[@a, -]")
    monarch.save({"x": x.t()[1:]}, tmp_path / "c").result()
    y = monarch.distribute(torch.zeros(6, 4, dtype=torch.bfloat16), Mesh(a=3), "[@a, -]")
    monarch.load(tmp_path / "c", into={"x": y[1:]})
    expected = torch.arange(24.0).view(4, 6).t().to(torch.bfloat16).clone()
    expected[0] = 0
    assert torch.equal(y.full_tensor(), expected)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_tensors_without_elements_stand_beside_others(format: Any, tmp_path: Path) -> None:
    mesh = Mesh(a=2)
    state = {"a": torch.zeros(0, 3), "b": torch.ones(4), "c": torch.zeros(0), "d": torch.full((3,), 2.0)}
    monarch.save({key: monarch.distribute(x, mesh) for key, x in state.items()}, tmp_path / "c", format=format).result()
    into = {key: monarch.distribute(x + 5, mesh) for key, x in state.items()}
    monarch.load(tmp_path / "c", into=into)
    assert all(torch.equal(into[key].full_tensor(), x) for key, x in state.items())


@pytest.mark.usefixtures("here")
def test_a_disk_that_is_full_is_told_and_leaves_the_former_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monarch.save({"x": torch.ones(3)}, tmp_path / "c").result()

    def full(fd: int, data: Any, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        saving = monarch.save({"x": torch.zeros(3)}, tmp_path / "c")
        with pytest.raises(CheckpointError, match="cannot save to .*: the disk is full"):
            saving.result()
    assert [each.name for each in tmp_path.iterdir()] == ["c"]
    assert torch.equal(monarch.load(tmp_path / "c", into={"x": torch.zeros(3)})["x"], torch.ones(3))


@pytest.mark.usefixtures("here")
def test_what_cannot_be_saved_or_replaced_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="'x' cannot be saved: its type is object, which is no plain value"):
        monarch.save({"x": object()}, tmp_path / "c")
    with pytest.raises(CheckpointError, match="safetensors holds tensors alone, and 'step' is a Python value"):
        monarch.save({"step": 3}, tmp_path / "c", format="safetensors")
    with pytest.raises(CheckpointError, match=r"two values of the state are called 'a\.b'"):
        monarch.save({"a": {"b": 1}, "a.b": 2}, tmp_path / "c")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("keep")
    with pytest.raises(CheckpointError, match="exists, and is no checkpoint of this format"):
        monarch.save({"x": torch.ones(2)}, tmp_path / "mine")
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="cannot save to"):
        monarch.save({"x": torch.ones(2)}, tmp_path / "file" / "c")
    with pytest.raises(CheckpointError, match="its type is ndarray, which is no plain value\n") as raised:
        monarch.save({"x": np.ones(2)}, tmp_path / "c")
    assert "torch.from_numpy" in (raised.value.hint or "")
    model, path = nn.Linear(2, 3), tmp_path / "x.pt"
    with pytest.raises(CheckpointError, match=r"x\.pt' is called as a file of torch\.save") as raised:
        monarch.save(model, path)
    assert not path.exists()
    eval((raised.value.hint or "").rpartition(": ")[2].rstrip("."), {"model": model, "torch": torch})
    assert torch.load(path).keys() == model.state_dict().keys()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("format", ["dcp", "safetensors"])
def test_a_save_removes_no_file_that_is_not_a_checkpoints(format: Any, tmp_path: Path) -> None:
    """A model's folder has its configuration and its tokenizer too."""
    folder = tmp_path / "model"
    for _ in range(2):
        monarch.save({"x": torch.ones(2)}, folder, format=format).result()
    (folder / "config.json").write_text("{}")
    before = sorted(os.listdir(folder))
    with pytest.raises(CheckpointError, match="the save would remove config.json") as raised:
        monarch.save({"x": torch.zeros(2)}, folder, format=format)
    assert sorted(os.listdir(folder)) == before and os.listdir(tmp_path) == ["model"]
    monarch.save({"x": torch.zeros(2)}, folder / "model.safetensors").result()  # as the hint says
    assert "model.safetensors" in (raised.value.hint or "") and (folder / "config.json").exists()


@pytest.mark.usefixtures("here")
def test_a_path_that_cannot_be_is_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path, why in (
        ("/proc/x", "not permitted"),
        (tmp_path / "new" / "a" / ("n" * 250), "the name is too long"),
        (tmp_path / ("n" * 300), "the name is too long|File name too long"),
        ("nul\0l", "null byte"),
        ("../loop", "loop"),
        ("s3://bucket/x", "is an address"),
        ("", "cannot replace the current directory"),
        (".", "cannot replace the current directory"),
    ):
        with pytest.raises(CheckpointError, match=why):
            monarch.save({"x": torch.ones(2)}, path)
    assert sorted(each.name for each in tmp_path.rglob("*")) == ["here", "loop"]


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, (str(Evil.path),)

    path: Path


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("name", ["c", "m.safetensors"])
def test_a_checkpoint_that_is_replaced_while_it_is_read_is_read_anew(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, opened, tried = tmp_path / name, loading._open, list[int]()
    monarch.save({"x": torch.ones(64), "y": torch.ones(64)}, path).result()

    def replaced(times: int) -> Callable[[Path], Any]:
        def _open(at: Path) -> Any:
            found = opened(at)
            tried.append(1)
            if len(tried) <= times:
                number = 1.0 + len(tried)
                state = {"a": torch.zeros(64), "x": torch.full((64,), number), "y": torch.full((64,), number)}
                monarch.save(state, path).result()
            return found

        return _open

    monkeypatch.setattr(loading, "_open", replaced(2))
    x, y = torch.zeros(64), torch.zeros(64)
    monarch.load(path, into={"x": x, "y": y})
    assert x.tolist() == y.tolist() == [3.0] * 64 and len(tried) == 3
    tried.clear()
    monkeypatch.setattr(loading, "_open", replaced(100))
    with pytest.raises(CheckpointError, match=r"was replaced 5 times while it was read"):
        monarch.load(path, into={"x": x, "y": y})
    assert x.tolist() == y.tolist() == [3.0] * 64


def test_a_link_is_followed_and_nothing_else_is_touched_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("c")
    for number in (1, 2, 3):
        monarch.save({"x": torch.ones(3), "number": number}, tmp_path / "link").result()
        assert monarch.load(tmp_path / "link", into={"number": 0}) == {"number": number}
        assert monarch.load(tmp_path / "c", into={"number": 0}) == {"number": number}
    assert sorted(os.listdir(tmp_path)) == ["c", "link"] and (tmp_path / "link").is_symlink()
    (tmp_path / ".other.saving").symlink_to("c")
    monarch.save({"x": torch.ones(3), "number": 4}, tmp_path / "other").result()
    assert monarch.load(tmp_path / "c", into={"number": 0}) == {"number": 3}


def test_what_is_no_checkpoint_says_so_and_files_of_torch_save_how_to_load_them(tmp_path: Path) -> None:
    model = monarch.module_to_mesh(nn.Linear(5, 3), Mesh(a=2))
    (folder := tmp_path / "folder").mkdir()
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        monarch.load(folder, into=model)
    (saving := tmp_path / ".folder.saving").mkdir()
    with pytest.raises(CheckpointError, match=r"was not finished(.|\n)*monarch.save\(state, path\).result\(\)"):
        monarch.load(folder, into=model)
    saving.rmdir()
    state = nn.Linear(5, 3).state_dict()
    torch.save(state, folder / "pytorch_model.bin")
    for path in (folder, folder / "pytorch_model.bin"):
        with pytest.raises(CheckpointError, match="is a file of torch.save") as raised:
            monarch.load(path, into=model)
        eval((raised.value.hint or "").partition("#")[0], {"model": model, "torch": torch})
        assert torch.equal(model.weight.full_tensor(), state["weight"])


@pytest.mark.usefixtures("here")
def test_a_pickle_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    Evil.path = tmp_path / "evil"
    monarch.save({"x": torch.ones(2)}, tmp_path / "c").result()
    (tmp_path / "c" / ".checksums").unlink()
    before = (tmp_path / "c" / ".metadata").read_bytes()
    (tmp_path / "c" / ".metadata").write_bytes(pickle.dumps(Evil()))
    with pytest.raises(CheckpointError, match="mkdir, which is no part"):
        monarch.load(tmp_path / "c", into={"x": torch.ones(2)})
    (tmp_path / "c" / ".metadata").write_bytes(before)
    torch_dcp.save({"v": Evil()}, checkpoint_id=tmp_path / "d", no_dist=True)
    with pytest.raises(CheckpointError, match="weights_only"):
        monarch.load(tmp_path / "d", into={"v": 0})
    assert not Evil.path.exists()


def test_a_container_is_a_zip_file_that_torch_loads() -> None:
    for dtype in (*DTYPES, torch.complex64):
        for shape in ((), (3, 5), (0, 4)):
            x = torch.ones(shape).to(dtype)
            raw = x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""
            container = Container(dtype, shape, 13)
            made = container.head + raw + container.tail
            assert (container.elements % 64, len(made)) == (0, container.end - 13)
            assert torch.equal(torch.load(io.BytesIO(made), weights_only=True), x)
            found = find(io.BytesIO(b"x" * 13 + made), 13, len(made))
            assert found is not None and (found.offset, found.dtype) == (container.elements, dtype)


@pytest.mark.usefixtures("here")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
@given(data=st.data(), format=st.sampled_from(["dcp", "safetensors"]))
def test_a_corrupt_byte_is_named_or_changes_nothing(data: Any, format: Any, tmp_path_factory: Any) -> None:
    path = tmp_path_factory.mktemp("c") / "x"
    whole = torch.arange(60.0).view(12, 5)
    state: dict[str, Any] = {"x": monarch.distribute(whole, Mesh(a=2), "[@a, -]"), "p": torch.arange(5)}
    if format == "dcp":
        state["note"] = "text"
    monarch.save(state, path, format=format).result()
    file = data.draw(st.sampled_from(sorted(path.iterdir())))
    raw = bytearray(file.read_bytes())
    at = data.draw(st.integers(0, len(raw) - 1))
    if data.draw(st.booleans()):
        raw[at] ^= data.draw(st.integers(1, 255))
    else:
        del raw[at:]
    file.write_bytes(raw)
    into = {key: "" if key == "note" else torch.zeros_like(value) for key, value in state.items()}
    into["x"] = monarch.distribute(torch.zeros(12, 5), Mesh(a=3), "[-, @a]")
    try:
        monarch.load(path, into=into)
    except (CheckpointError, RuntimeError) as error:
        assert path.name in str(error)
        assert not into["x"].full_tensor().any()
    else:
        assert torch.equal(into["x"].full_tensor(), whole) and torch.equal(into["p"], torch.arange(5))
        assert into.get("note", "text") == "text"
