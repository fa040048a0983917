"""Value meshes, and with them what every mesh can do."""

from __future__ import annotations

import pickle

import pytest

from monarch.compiler.mesh import NDSlice, Shape
from monarch.runtime.actors.values import ValueMesh


def mesh() -> ValueMesh[str]:
    return ValueMesh(Shape.of({"hosts": 2, "gpus": 3}), list("abcdef"))


def test_values_are_in_rank_order() -> None:
    values = mesh()
    assert values.values() == list("abcdef")
    assert [(point.rank, dict(point), value) for point, value in values.items()][4] == (4, {"hosts": 1, "gpus": 1}, "e")
    assert list(values) == list(values.items())
    assert [values.get(rank) for rank in range(6)] == list("abcdef")
    assert values.item(hosts=1, gpus=2) == "f"
    assert ValueMesh(Shape.unity(), [5]).item() == 5
    assert [values[point] for point, _ in values.items()] == list("abcdef") and values[4] == "e"


def test_a_place_that_is_not_there() -> None:
    for where in ({}, {"hosts": 0}, {"hosts": 0, "gpus": 0, "tpus": 0}):
        with pytest.raises(KeyError, match="hosts"):
            mesh().item(**where)
    with pytest.raises(IndexError, match="3 is outside 'gpus'"):
        mesh().item(hosts=0, gpus=3)
    for rank in (-1, 6):
        with pytest.raises(IndexError, match="ranks 0 to 5"):
            mesh()[rank]


def test_the_algebra_of_meshes() -> None:
    values = mesh()
    assert list(values.slice(hosts=1).values()) == list("def")
    assert list(values.slice(gpus=slice(0, 3, 2)).values()) == list("acdf")
    assert values.slice(hosts=1, gpus=1).item() == "e"
    assert values.flatten("all").item(all=4) == "e"
    assert values.rename(gpus="tp").item(hosts=1, tp=0) == "d"
    split = values.flatten("all").split(all=("x", "y"), y=2)
    assert split.sizes == {"x": 3, "y": 2} and split.item(x=2, y=0) == "e"
    part = values.slice(gpus=slice(1, 3)).slice(hosts=1)  # a slice of a slice
    assert (part.extent, list(part.values())) == ({"gpus": 2}, ["e", "f"])


def test_sizes() -> None:
    values = mesh()
    assert (len(values), values.size(), values.size("gpus"), values.size(["hosts", "gpus"])) == (6, 6, 3, 6)
    assert values.sizes == {"hosts": 2, "gpus": 3} == values.extent
    with pytest.raises(KeyError, match="tpus"):
        values.size("tpus")


def test_errors_name_what_was_asked_for() -> None:
    with pytest.raises(TypeError, match=r"'tpus'\s.*hosts.*gpus"):
        mesh().slice(tpus=0)
    with pytest.raises(IndexError, match="3 is outside 'gpus', which has size 3"):
        mesh().slice(gpus=3)
    with pytest.raises(ValueError, match="gpus='xy'"):
        mesh().split(gpus="xy")
    with pytest.raises(ValueError, match="stands twice"):
        mesh().rename(gpus="hosts")


def test_a_table() -> None:
    assert mesh().slice(hosts=1).to_table().splitlines() == [
        "rank  gpus  value",
        "0     0     'd'",
        "1     1     'e'",
        "2     2     'f'",
    ]


def test_from_pairs() -> None:
    shape = Shape(["x"], NDSlice(offset=4, sizes=[3], strides=[2]))
    assert list(ValueMesh.from_indexed(shape, [(2, "c"), (0, "a"), (1, "b")]).values()) == ["a", "b", "c"]
    with pytest.raises(ValueError, match=r"ranks \[1\]"):
        ValueMesh.from_indexed(shape, [(0, "a"), (2, "c")])
    with pytest.raises(ValueError, match="rank 0 .* twice"):
        ValueMesh.from_indexed(shape, [(0, "a"), (0, "b")])
    with pytest.raises(IndexError, match="no rank 3"):
        ValueMesh.from_indexed(shape, [(3, "a")])
    with pytest.raises(ValueError, match="2 values for the 3 places"):
        ValueMesh(shape, ["a", "b"])


def test_pickling_keeps_slices() -> None:
    part = mesh().slice(gpus=slice(1, 3))
    again = pickle.loads(pickle.dumps(part))
    assert list(again.slice(gpus=1).values()) == ["c", "f"]
    assert repr(again) == repr(part)
