"""Blocks of a global tensor, and the tensor that they make again."""

from __future__ import annotations

import pytest
import torch

from monarch.compiler.blocks import block_of, holders, whole_of
from monarch.compiler.types import Layout, MeshSpec, TensorType

MESH = MeshSpec.of(a=2, b=3)


@pytest.mark.parametrize(
    ("shape", "padding", "layout", "who"),
    [
        ((4, 6), (), Layout(((), ())), (0,)),
        ((4, 6), (), Layout((("a",), ("b",))), (0, 1, 2, 3, 4, 5)),
        ((4, 6), (), Layout(((), ("b",))), (0, 1, 2)),
        ((6,), (), Layout((("b", "a"),)), (0, 1, 2, 3, 4, 5)),
        ((4, 6), (1, 0), Layout((("a",), ()), (("b", "sum"),)), (0, 1, 2, 3, 4, 5)),
        ((4, 6), (0, 5), Layout(((), ("b",))), (0, 1, 2)),
        ((2, 7), (), Layout(((), ("b", "a"))), (0, 1, 2, 3, 4, 5)),
        ((), (), Layout((), (("a", "prod"),)), (0, 3)),
    ],
    ids=str,
)
def test_a_tensor_is_made_of_its_blocks(
    shape: tuple[int, ...], padding: tuple[int, ...], layout: Layout, who: tuple[int, ...]
) -> None:
    type_ = TensorType(torch.float32, shape, layout, padding)
    given = torch.randn(type_.unpadded.shape)
    blocks = [block_of(given, type_, MESH, rank) for rank in range(MESH.workers)]
    assert holders(type_, MESH) == who
    assert torch.equal(whole_of(blocks, type_, MESH), given)
    for rank in set(range(MESH.workers)).difference(who):
        blocks[rank] = torch.empty(0)  # copies are not read
    assert torch.equal(whole_of(blocks, type_, MESH), given)


def test_types_that_differ_in_padding_alone() -> None:
    """They are equal, and make tensors of different sizes."""
    layout = Layout((("a",),))
    for padding in ((), (1,), (3,)):
        type_ = TensorType(torch.float32, (8,), layout, padding)
        given = torch.randn(type_.unpadded.shape)
        blocks = [block_of(given, type_, MESH, rank) for rank in range(MESH.workers)]
        assert torch.equal(whole_of(blocks, type_, MESH), given)
