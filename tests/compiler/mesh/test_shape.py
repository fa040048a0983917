"""Extents, points, slices and shapes, against the same arithmetic on NumPy arrays of ranks; and that every mesh, of
workers, hosts, processes, actors and values, has this one arithmetic, errors included."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.actor import Actor, ActorMesh, HostMesh, ProcMesh, ValueMesh
from monarch.compiler.errors import LayoutError
from monarch.compiler.mesh import Extent, MeshAlgebra, NDSlice, Point, Shape
from monarch.language import Mesh
from monarch.runtime.actors.messages.address import new_address, tag_of
from monarch.runtime.actors.processes.process import ProcMeshSpec

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
            index = draw(st.integers(-size, size - 1))
            shape, array = shape.at(label, index), array.take(index, axis=at)
        elif how == "slice":
            part = draw(st.slices(size))
            part = part if (part.step or 1) > 0 and range(size)[part] else slice(None)
            shape, array = shape.select(label, part), array[(slice(None),) * at + (part,)]
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


@given(changed_shapes(), st.data())
def test_indices_outside_are_those_of_an_array(
    changed: tuple[Shape, np.ndarray[Any, Any]], data: st.DataObject
) -> None:
    shape, array = changed
    for at, label in enumerate(shape.labels):
        index = data.draw(st.integers(-8, 8))
        try:
            expected = array.take(index, axis=at)
        except IndexError:
            with pytest.raises(IndexError, match=f"position {index} is outside '{label}'"):
                shape.slice(**{label: index})
        else:
            assert np.array_equal(ranks(shape.slice(**{label: index})), expected)
        part = slice(data.draw(st.integers(-8, 8)), data.draw(st.integers(-8, 8)))
        expected = array[(slice(None),) * at + (part,)]
        if expected.size:
            assert np.array_equal(ranks(shape.slice(**{label: part})), expected)
        else:
            with pytest.raises(ValueError, match=f"along '{label}', of size {array.shape[at]}, holds no place"):
                shape.slice(**{label: part})


@given(changed_shapes())
def test_ranks_of_a_slice_are_read_as_a_slice(changed: tuple[Shape, np.ndarray[Any, Any]]) -> None:
    shape, array = changed
    again = NDSlice.from_list(shape.ranks())
    assert isinstance(again, NDSlice) and list(again) == array.reshape(-1).tolist()


@given(st.lists(st.integers(0, 30), max_size=12))
def test_any_ranks_are_read_as_slices(numbers: list[int]) -> None:
    found = NDSlice.from_list(numbers)
    assert [rank for each in ([found] if isinstance(found, NDSlice) else found) for rank in each] == numbers


def test_lists_that_are_slices_and_lists_that_are_not() -> None:
    assert NDSlice.from_list([3]) == NDSlice(offset=3, sizes=[], strides=[])
    assert NDSlice.from_list([0, 1, 4, 5]) == NDSlice(offset=0, sizes=[2, 2], strides=[4, 1])
    assert NDSlice.from_list([0, 1, 3, 4, 5, 6, 8, 9]) == NDSlice(offset=0, sizes=[2, 2, 2], strides=[5, 3, 1])
    assert NDSlice.from_list([]) == []
    assert NDSlice.from_list([5, 3, 4]) == [NDSlice(offset=5, sizes=[1], strides=[1]), NDSlice.from_list([3, 4])]
    with pytest.raises(ValueError):
        NDSlice.from_list([-1, 0])


class Worker(Actor):
    pass


def every_mesh(sizes: dict[str, int]) -> list[MeshAlgebra]:
    """One of each class, over the same grid; none has a process."""
    shape = Shape.of(sizes)
    count = len(shape)
    places = tuple(f"{number}" for number in range(count))
    group = ProcMeshSpec("id", "crew", places, "0", places, shape, ("0", ""), None, None, (), "", ())
    return [
        Mesh.abstract(**sizes),
        HostMesh(shape, tuple(new_address(tag_of(number, f"node{number}", 1)) for number in range(count))),
        ProcMesh(group, shape),
        ActorMesh("id", "crew", Worker, places, shape),
        ValueMesh(shape, [f"[{number}]" for number in range(count)]),
    ]


def members(mesh: MeshAlgebra) -> list[int]:
    """Which of the whole grid a mesh has, read from what it shows."""
    if isinstance(mesh, Mesh):
        return mesh.ranks
    shown = [line.split()[-1] for line in mesh.to_table().splitlines()[1:]]
    return [int(re.findall(r"\d+", each)[0]) for each in shown]


Change = Callable[[Any], Any]


@st.composite
def changes(draw: st.DrawFn) -> Change:
    """Something that is done to a mesh with the dims `a` and `b`, or that no mesh allows."""
    label = draw(st.sampled_from(["a", "b", "none"]))
    how = draw(st.sampled_from(["int", "slice", "split", "rename", "flatten", "size"]))
    if how == "int":
        index = draw(st.integers(-5, 4))
        return lambda mesh: mesh.slice(**{label: index})
    if how == "slice":
        part = draw(st.slices(5))
        return lambda mesh: mesh.slice(**{label: part})
    if how == "split":
        given_ = draw(st.dictionaries(st.sampled_from("xyz"), st.integers(0, 4), max_size=2))
        return lambda mesh: mesh.split(**{label: ("x", "y")}, **given_)
    if how == "rename":
        name = draw(st.sampled_from(["a", "c", "not a name"]))
        return lambda mesh: mesh.rename(**{label: name})
    if how == "flatten":
        return lambda mesh: mesh.flatten("all")
    return lambda mesh: mesh.size(label)


def outcome(mesh: MeshAlgebra, done: list[Change]) -> Any:
    """What a mesh becomes: its dims and members; or a number, or an error with its words."""
    try:
        for change in done:
            mesh = change(mesh)
            if isinstance(mesh, int):
                return mesh
    except LayoutError as error:
        return type(error), str(error)
    return dict(mesh.extent), mesh.sizes, len(mesh), members(mesh)


@settings(max_examples=100)
@given(st.integers(1, 4), st.integers(1, 4), st.lists(changes(), min_size=1, max_size=3))
def test_every_mesh_does_the_same(a: int, b: int, done: list[Change]) -> None:
    first, *others = (outcome(mesh, done) for mesh in every_mesh({"a": a, "b": b}))
    assert others == [first] * len(others)


@pytest.mark.parametrize(
    ("where", "error", "words"),
    [
        ({"gpus": 4}, IndexError, "position 4 is outside 'gpus', which has size 4"),
        ({"gpus": -5}, IndexError, "position -5 is outside 'gpus', which has size 4"),
        ({"gpus": slice(4, 6)}, ValueError, "along 'gpus', of size 4, holds no place"),
        ({"gpus": slice(3, 1)}, ValueError, "along 'gpus', of size 4, holds no place"),
        ({"gpus": slice(None, None, -1)}, ValueError, "goes backwards"),
        ({"gpus": slice(None, None, 0)}, ValueError, "slice step cannot be zero"),
        ({"gpus": slice("a", None)}, ValueError, "slice indices must be integers"),
        (
            {"tpus": 0},
            TypeError,
            "unknown mesh dim 'tpus'\n  did you mean gpus? the mesh is {'hosts': 2, 'gpus': 4}: its dims are hosts",
        ),
        ({"gpus": 0.5}, TypeError, "'gpus' has no place 0.5"),
        ({"gpus": True}, TypeError, "'gpus' has no place True"),
    ],
)
def test_what_cannot_be_sliced(where: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as raised:
        Shape.of({"hosts": 2, "gpus": 4}).slice(**where)
    assert words in str(raised.value)
    again = pickle.loads(pickle.dumps(raised.value))
    assert (type(again), str(again)) == (type(raised.value), str(raised.value))


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
    with pytest.raises(TypeError, match=r"needs a position along 'gpus' too: \{'hosts': 0\}"):
        extent.point({"hosts": 0})
    with pytest.raises(TypeError, match=r"unknown mesh dim 'gpu'\n  did you mean gpus\?"):
        extent.point({"hosts": 0, "gpu": 1})
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
    assert f"{extent} {point}" == "{'hosts': 2, 'gpus': 4} {'hosts': 1/2, 'gpus': 2/4}"
    assert Extent([], []).nelements == 1 and dict(Point(0, Extent([], []))) == {}
