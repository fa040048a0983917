"""Per-worker code in graphs: what the verifier and the partitioner take and refuse."""

from __future__ import annotations

import pytest

from monarch.compiler.errors import GraphError, LayoutError
from monarch.compiler.pipeline import partition_graph
from monarch.compiler.text import parse_graph
from monarch.compiler.verify import verify

TRACED = """
graph @f on mesh<data=2, model=2> {
  %x = input 0                                                      : f32[8@data, 4]
  %w = state "w"                                                    : f32[4]
  %own = to_varying(%x, "data", 0)                                  : f32[4, 4]
  %sent = permute([%own], ["data"], [[0, 1], [1, 0]])               : (f32[4, 4])
  %got = getitem(%sent, 0)                                          : f32[4, 4]
  %y = aten.mul.Tensor(%got, %w)                                    : f32[4, 4]
  %s = aten.sum.dim_IntList(%y, [0])                                : f32[4]
  %total = from_varying(%s, "data", "sum")                          : f32[4]
  %rows = from_varying(%y, "data", 0)                               : f32[8, 4]
  update "w" = %total
  return %rows
}"""

PARTITIONED = """
graph @f on mesh<data=2, model=2> partitioned<data, model> {
  %x = input 0                                                      : f32[8@data, 4]
  %w = state "w"                                                    : f32[4]
  %own = to_varying(%x, "data", 0)                                  : f32[4, 4] varying<data>
  %sent = permute([%own], ["data"], [[0, 1], [1, 0]])               : (f32[4, 4] varying<data>)
  %got = getitem(%sent, 0)                                          : f32[4, 4] varying<data>
  %y = aten.mul.Tensor(%got, %w)                                    : f32[4, 4] varying<data>
  %s = aten.sum.dim_IntList(%y, [0])                                : f32[4] varying<data>
  %total = from_varying(%s, "data", "sum")                          : f32[4] partial<sum: data>
  %sums = all_reduce([%total], ["data"], "sum")                     : (f32[4])
  %sum0 = getitem(%sums, 0)                                         : f32[4]
  %rows = from_varying(%y, "data", 0)                               : f32[8@data, 4]
  update "w" = %sum0
  return %rows
}"""


def test_good_graphs_pass() -> None:
    verify(parse_graph(TRACED), run=False)
    verify(parse_graph(PARTITIONED), run=True)
    verify(partition_graph(parse_graph(TRACED)), run=True)


@pytest.mark.parametrize(
    ("line", "wrong", "message"),
    [
        (
            '%own = to_varying(%x, "data", 0) ',
            '%own = to_varying(%x, "data", none) ',
            "makes f32[4, 4] varying<data> of",
        ),
        ("aten.mul.Tensor(%got, %w) ", "aten.mul.Tensor(%got, %x) ", "and one that is sharded or pending there"),
        ('"data", "sum") ', '"data", "mean") ', "cannot have the placement 'mean'"),
        ('permute([%own], ["data"]', 'permute([%own], ["model"]', "it does not vary along model"),
        ("%rows = from_varying(%y", "%rows = from_varying(%w", "makes f32[8@data, 4] of %w"),
        ("%total = from_varying(%s", "%total = from_varying(%w", "takes %w, which is f32[4], along 'data'"),
        ("f32[4] varying<data>\n  %total", "f32[4] partial<sum: data>\n  %total", "so its own has to vary as well"),
        ("from_varying(%s, ", 'from_varying(%s, "gpu", "sum") #', "names the mesh dim 'gpu'"),
    ],
)
def test_what_is_wrong_in_a_partitioned_graph_is_named(line: str, wrong: str, message: str) -> None:
    assert line in PARTITIONED
    text = PARTITIONED.replace(line, wrong)
    if "gpu" in wrong:
        text = text.replace('"sum") #"data", "sum")', '"sum")')
    with pytest.raises(GraphError) as caught:
        verify(parse_graph(text))
    assert message in str(caught.value)


def test_state_that_does_not_vary_is_not_updated_with_what_varies() -> None:
    text = TRACED.replace('update "w" = %total', 'update "w" = %s').replace("  %total =", "  %unread =")
    with pytest.raises(LayoutError, match=r"state 'w', which is f32\[4\], is updated with a value that varies"):
        partition_graph(parse_graph(text))


def test_blocks_are_not_taken_twice_along_one_mesh_dim() -> None:
    text = """
graph @f on mesh<data=2> {
  %x = input 0                        : f32[8@data, 4]
  %own = to_varying(%x, "data", 0)    : f32[4, 4]
  %again = to_varying(%own, "data", 0) : f32[2, 4]
  return %again
}"""
    with pytest.raises(LayoutError, match="%again takes blocks along 'data' of a value that varies along it already"):
        partition_graph(parse_graph(text))
