"""Meshes, layouts and tensor types: how they print, compare, place, divide, and what they refuse."""

from __future__ import annotations

import math
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from monarch.compiler.errors import LayoutError
from monarch.compiler.text import parse_layout, parse_type
from monarch.compiler.types import DTYPES, REDUCTIONS, Layout, MeshSpec, Placement, TensorType, is_partial
from tests.compiler import strategies

MESH = MeshSpec.of(data=4, model=2)


# -- meshes ----------------------------------------------------------------------------------------------------------


def test_a_mesh_counts_its_workers_row_major() -> None:
    assert str(MESH) == "mesh<data=4, model=2>"
    assert (MESH.names, MESH.workers, MESH.sizes["model"]) == (("data", "model"), 8, 2)
    assert list(MESH.coordinates())[:3] == [{"data": 0, "model": 0}, {"data": 0, "model": 1}, {"data": 1, "model": 0}]
    assert MESH.rank({"model": 1, "data": 2}) == 5
    assert MESH.point(5) == (2, 1)


def test_the_mesh_without_dims_has_one_worker() -> None:
    assert (MeshSpec(()).workers, list(MeshSpec(()).coordinates()), MeshSpec(()).point(0)) == (1, [{}], ())


@pytest.mark.parametrize(
    ("rank", "dims", "group"),
    [
        (5, ["data"], (1, 3, 5, 7)),
        (5, ["model"], (4, 5)),
        (5, ["data", "model"], (0, 1, 2, 3, 4, 5, 6, 7)),
        (5, ["model", "data"], (0, 2, 4, 6, 1, 3, 5, 7)),
        (5, [], (5,)),
    ],
)
def test_groups_are_in_the_order_of_the_dims_named(rank: int, dims: list[str], group: tuple[int, ...]) -> None:
    assert MESH.group(rank, dims) == group


@given(strategies.meshes(), st.data())
def test_ranks_points_and_groups_agree(mesh: MeshSpec, data: st.DataObject) -> None:
    for rank, coordinates in enumerate(mesh.coordinates()):
        assert mesh.rank(coordinates) == rank
        assert mesh.point(rank) == tuple(coordinates.values())
    rank = data.draw(st.integers(0, mesh.workers - 1))
    dims = data.draw(st.lists(st.sampled_from(mesh.names), unique=True)) if mesh.names else []
    group = mesh.group(rank, dims)
    assert len(set(group)) == len(group) == math.prod(mesh.sizes[dim] for dim in dims)
    assert rank in group
    assert all(mesh.group(peer, dims) == group for peer in group)


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ((("a", 2), ("a", 3)), "mesh dim 'a' stands twice\n  the mesh's dims are a, a."),
        ((("a", 0),), "mesh dim 'a' has size 0\n  sizes are whole numbers from 1."),
        (
            (("data-parallel", 2),),
            "a mesh dim cannot be named 'data-parallel'\n  its name has to be an identifier: a letter or _, then more.",
        ),
    ],
)
def test_meshes_that_cannot_be(dims: Any, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        MeshSpec(dims)
    assert str(caught.value) == message


# -- layouts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        (Layout(((), ())), "[-, -]"),
        (Layout((("data",), ())), "[@data, -]"),
        (Layout((("data", "model"),)), "[@(data,model)]"),
        (Layout((), (("model", "sum"),)), "[] partial<sum: model>"),
        (Layout(((),), (("model", "max"), ("data", "max"))), "[-] partial<max: data,model>"),
        (Layout(((),), (), ("gpu", "data")), "[-] varying<data,gpu>"),
    ],
)
def test_layouts_print(layout: Layout, text: str) -> None:
    assert str(layout) == text


@pytest.mark.parametrize("placement", [None, 0, 1, *REDUCTIONS, "varying"])
@pytest.mark.parametrize("start", ["[-, -]", "[@data, -]", "[-, @(model,data)]", "[-, -] partial<sum: data>"])
def test_a_placed_mesh_dim_lies_where_it_was_placed(start: str, placement: Placement) -> None:
    before = parse_layout(start)
    layout = before.place("data", placement)
    assert layout.placement("data") == placement
    assert layout.placement("model") == before.placement("model")
    assert layout.mesh_dims.count("data") == (placement is not None)


def test_a_shard_is_nested_inside_those_already_there() -> None:
    layout = Layout.replicated(1).place("data", 0).place("model", 0)
    assert layout.shards == (("data", "model"),)
    assert layout.place("data", 0).shards == (("model", "data"),)


@given(strategies.meshes(), st.data())
@settings(max_examples=100)
def test_the_order_of_placing_matters_for_shards_only(mesh: MeshSpec, data: st.DataObject) -> None:
    placements = {name: data.draw(st.sampled_from([None, "varying", "sum"])) for name in mesh.names}
    layout = Layout.replicated(2)
    for name in data.draw(st.permutations(mesh.names)):
        layout = layout.place(name, placements[name])
    other = Layout.replicated(2)
    for name, placement in placements.items():
        other = other.place(name, placement)
    assert layout == other
    assert hash(layout) == hash(other)
    assert layout.is_replicated == (not any(placements.values()))


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (2, "cannot shard dim 2 over mesh dim 'data': the layout [-, -] has 2 dims\n  dims count from 0 to 1."),
        (-1, "cannot shard dim -1 over mesh dim 'data': the layout [-, -] has 2 dims\n  dims count from 0 to 1."),
        ("mean", "unknown reduction 'mean'\n  it is one of sum, max, min, prod."),
    ],
)
def test_placements_that_cannot_be(placement: Placement, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.replicated(2).place("data", placement)
    assert str(caught.value) == message


def test_a_scalar_cannot_be_sharded() -> None:
    with pytest.raises(LayoutError, match=r"has 0 dims\n  a scalar cannot be sharded\."):
        Layout(()).place("data", 0)


def test_partial_placements() -> None:
    assert [is_partial(p) for p in (None, 0, "varying", "sum", "max")] == [False, False, False, True, True]


# -- tensor types ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("f32[64, 6]", (64, 6)),
        ("f32[64@data, 6@model]", (16, 3)),
        ("f32[64@(model,data), 6]", (8, 6)),
        ("f32[0@data]", (0,)),
        ("f32[5@data, 3@model]", (2, 2)),
        ("f32[1@(model,data)]", (1,)),
        ("f32[64, 6] partial<sum: model> varying<data>", (64, 6)),
        ("bool[]", ()),
    ],
)
def test_local_shapes(text: str, local: tuple[int, ...]) -> None:
    type_ = parse_type(text)
    type_.check(MESH)
    assert type_.local_shape(MESH) == local
    assert math.prod(local) * MESH.workers >= type_.numel


def test_sizes() -> None:
    type_ = TensorType(torch.bfloat16, (3, 5))
    assert (type_.ndim, type_.numel, type_.nbytes, str(type_)) == (2, 15, 30, "bf16[3, 5]")
    assert type_.place("data", 1) == TensorType(torch.bfloat16, (3, 5), Layout(((), ("data",))))


@given(strategies.meshes(), st.data())
@settings(max_examples=100)
def test_the_blocks_of_a_sharded_tensor_make_up_the_whole(mesh: MeshSpec, data: st.DataObject) -> None:
    type_ = data.draw(strategies.types(mesh))
    type_.check(mesh)
    cuts = math.prod(mesh.sizes[name] for names in type_.layout.shards for name in names)
    assert math.prod(type_.local_shape(mesh)) * cuts == type_.numel
    assert pickle.loads(pickle.dumps(type_)) == type_


@pytest.mark.parametrize(
    ("type_", "message"),
    [
        (
            TensorType(torch.float32, (4,), Layout((("model",),))),
            "unknown mesh dim 'model' in the layout of 'w'\n  the mesh is mesh<tp=3, dp=2>: its dims are tp, dp.",
        ),
        (
            TensorType(torch.float32, (6, 6), Layout((("dp",), ("dp",)))),
            "mesh dim 'dp' stands twice in the layout [@dp, @dp] of 'w'\n"
            "  a mesh dim can shard one tensor dim, or hold partial values, but not two things at once.",
        ),
        (
            TensorType(torch.float32, (6,), Layout((("dp",),), (("dp", "sum"),))),
            "mesh dim 'dp' stands twice in the layout [@dp] partial<sum: dp> of 'w'\n"
            "  a mesh dim can shard one tensor dim, or hold partial values, but not two things at once.",
        ),
        (
            TensorType(torch.float32, (6,), Layout(((), ()))),
            "the layout of 'w' has 2 dims, and 'w' has 1\n  'w' is f32[6]: give one entry for each of its dims.",
        ),
        (
            TensorType(torch.float32, (), Layout((), (("dp", "mean"),))),
            "unknown reduction 'mean' in the layout of 'w'\n  it is one of sum, max, min, prod.",
        ),
        (
            TensorType(torch.float32, (), Layout((), (("dp", "sum"), ("tp", "max")))),
            "'w' waits for a max and for a sum: [] partial<sum: dp> partial<max: tp>\n"
            "  which comes first would matter, so all partial placements of a value have one reduction.",
        ),
    ],
)
def test_types_that_cannot_lie_on_the_mesh(type_: TensorType, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        type_.check(MeshSpec.of(tp=3, dp=2), "'w'")
    assert str(caught.value) == message


def test_dtypes_that_cannot_lie_on_a_mesh() -> None:
    with pytest.raises(LayoutError) as caught:
        TensorType(torch.complex32, (2,))
    assert str(caught.value) == (
        f"tensors of torch.complex32 cannot be on a mesh yet\n  dtypes are {', '.join(DTYPES)}."
    )


def test_a_layout_over_some_mesh_dims_is_whole_over_the_others() -> None:
    layout = Layout((("b", "c"), ("a",)), partial=(("d", "sum"),), varying=("e",))
    assert layout.only(["c", "a"]) == Layout((("c",), ("a",)))
    assert layout.only(["b", "d"]) == Layout((("b",), ()), partial=(("d", "sum"),))
    assert layout.only([]).is_replicated
    assert layout.only(layout.mesh_dims) == layout


def test_equal_meshes_have_equal_pickles_whatever_was_asked_of_them() -> None:
    used = MeshSpec.of(data=2, model=3)
    assert used.sizes["model"] == 3
    assert pickle.dumps(used) == pickle.dumps(MeshSpec.of(data=2, model=3))
    assert pickle.loads(pickle.dumps(used)) == used
