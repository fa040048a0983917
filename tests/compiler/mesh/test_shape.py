"""Extents, points, slices and shapes, against the same arithmetic on NumPy arrays of ranks."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.compiler.mesh import Extent, NDSlice, Point, Shape

LABELS = ("a", "b", "c", "d")


def ranks(shape: Shape) -> np.ndarray[Any, Any]:
    """The ranks of a shape, as an array of its sizes."""
    return np.array(shape.ranks()).reshape(shape.ndslice.sizes)


@st.composite
def changed_shapes(draw: st.DrawFn) -> tuple[Shape, np.ndarray[Any, Any]]:
    """A shape after some slicing, splitting, flattening and renaming; and the array that the same was done to."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=0, max_size=3))
    shape = Shape.of(dict(zip(LABELS, sizes, strict=False)))
    array = np.arange(np.prod(sizes, dtype=int)).reshape(sizes)
    for step in range(draw(st.integers(0, 4))):
        if not shape.labels:
            break
        at = draw(st.integers(0, len(shape.labels) - 1))
        label, size = shape.labels[at], array.shape[at]
        how = draw(st.sampled_from(["int", "slice", "split", "rename"]))
        if how == "int":
            index = draw(st.integers(0, size - 1))
            shape, array = shape.slice(**{label: index}), array.take(index, axis=at)
        elif how == "slice":
            start = draw(st.integers(0, size - 1))
            part = slice(start, draw(st.integers(start + 1, size)), draw(st.integers(1, 3)))
            shape, array = shape.slice(**{label: part}), array[(slice(None),) * at + (part,)]
        elif how == "split":
            inner = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
            names = (f"{label}{step}x", f"{label}{step}y")
            shape = shape.split({label: names}, {names[1]: inner})
            array = array.reshape(array.shape[:at] + (size // inner, inner) + array.shape[at + 1 :])
        else:
            shape = shape.rename({label: f"{label}{step}r"})
    return shape, array


@given(changed_shapes())
def test_changes_do_what_they_do_to_an_array(changed: tuple[Shape, np.ndarray[Any, Any]]) -> None:
    shape, array = changed
    assert np.array_equal(ranks(shape), array)
    assert len(shape) == array.size and shape.extent.sizes == list(array.shape)


@given(changed_shapes())
def test_places_and_ranks_are_inverse(changed: tuple[Shape, np.ndarray[Any, Any]]) -> None:
    shape, array = changed
    nd = shape.ndslice
    for position, rank in enumerate(shape.ranks()):
        assert nd[position] == rank and nd.index(rank) == position
        where = nd.coordinates(rank)
        assert array[tuple(where)] == rank and nd.nditem(where) == rank
        point = shape.point(rank)
        assert (point.rank, dict(point)) == (position, shape.coordinates(rank))
        assert shape.extent.point(dict(point)) == point == shape.extent.point_of_rank(position)
    missing = set(range(-1, array.max(initial=0) + 2)) - set(shape.ranks())
    for rank in missing:
        assert rank not in nd
        with pytest.raises(ValueError, match=f"rank {rank} is not among"):
            nd.index(rank)


@given(changed_shapes())
def test_flatten_is_one_stride_or_an_error(changed: tuple[Shape, np.ndarray[Any, Any]]) -> None:
    shape, array = changed
    steps = np.diff(array.reshape(-1))
    if np.all(steps == steps[:1]):
        assert shape.flatten("all").ranks() == array.reshape(-1).tolist()
    else:
        with pytest.raises(ValueError, match="cannot be flattened"):
            shape.flatten("all")


@given(changed_shapes())
def test_shapes_survive_pickling(changed: tuple[Shape, np.ndarray[Any, Any]]) -> None:
    shape, _ = changed
    for value in (shape, shape.ndslice, shape.extent, Point(0, shape.extent)):
        again = pickle.loads(pickle.dumps(value))
        assert again == value and hash(again) == hash(value)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        ({"gpus": 4}, IndexError),
        ({"gpus": -1}, IndexError),
        ({"gpus": slice(0, 5)}, IndexError),
        ({"gpus": slice(-2, None)}, IndexError),
        ({"gpus": slice(5, 6)}, IndexError),
        ({"gpus": slice(2, 2)}, ValueError),
        ({"gpus": slice(3, 1)}, ValueError),
        ({"gpus": slice(4, 4)}, ValueError),
        ({"gpus": slice(None, None, -1)}, ValueError),
        ({"tpus": 0}, TypeError),
        ({"gpus": 0.5}, TypeError),
        ({"gpus": True}, TypeError),
    ],
)
def test_what_cannot_be_sliced(where: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error, match=next(iter(where))):
        Shape.of({"hosts": 2, "gpus": 4}).slice(**where)


@pytest.mark.parametrize(
    ("parts", "sizes", "error"),
    [
        ({"tpus": ("a", "b")}, {}, TypeError),
        ({"gpus": ("a", "b")}, {}, ValueError),
        ({"gpus": ("a", "b")}, {"a": 3}, ValueError),
        ({"gpus": ("a", "b")}, {"a": 2, "b": 4}, ValueError),
        ({"gpus": ("a", "b")}, {"a": 0}, ValueError),
        ({"gpus": ("a", "b")}, {"a": 2, "z": 2}, TypeError),
        ({"gpus": ("a", "hosts")}, {"a": 2}, ValueError),
        ({"gpus": ()}, {}, ValueError),
    ],
)
def test_what_cannot_be_split(parts: dict[str, Any], sizes: dict[str, int], error: type[Exception]) -> None:
    with pytest.raises(error):
        Shape.of({"hosts": 2, "gpus": 4}).split(parts, sizes)


def test_what_is_no_extent_point_or_slice() -> None:
    extent = Extent(["hosts", "gpus"], [2, 4])
    for labels, sizes in [(["a"], [1, 2]), (["a", "a"], [1, 2]), (["a"], [0]), (["a"], [True])]:
        with pytest.raises(ValueError):
            Extent(labels, sizes)
    for outside in (lambda: extent.point_of_rank(8), lambda: extent.point({"hosts": 0, "gpus": 4})):
        with pytest.raises(IndexError):
            outside()
    with pytest.raises(TypeError, match="hosts"):
        extent.point({"hosts": 0})
    with pytest.raises(KeyError):
        extent["tpus"]
    for offset, numbers, strides in [(0, [2], [0]), (-1, [2], [1]), (0, [2, 2], [1, 1]), (0, [2], [1, 1])]:
        with pytest.raises(ValueError):
            NDSlice(offset=offset, sizes=numbers, strides=strides)


def test_extents_and_points_are_mappings() -> None:
    extent = Extent(["hosts", "gpus"], [2, 4])
    assert extent == {"hosts": 2, "gpus": 4} and extent.nelements == 8 and extent.labels == ["hosts", "gpus"]
    point = Point(6, extent)
    assert point == {"hosts": 1, "gpus": 2} and point["gpus"] == 2 and point.size("gpus") == 4
    assert f"{extent} {point}" == "{'hosts': 2, 'gpus': 4} {'hosts': 1, 'gpus': 2}"
    assert Extent([], []).nelements == 1 and dict(Point(0, Extent([], []))) == {}
