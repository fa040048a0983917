"""What a step of several meshes will take: its parts wait for one another, and share the cores while they compute."""

from __future__ import annotations

from dataclasses import replace

import pytest

from monarch.compiler.cost.cluster import Cluster, Level, cluster_of
from monarch.compiler.cost.link import Link
from monarch.compiler.inspect.estimate import estimate
from monarch.compiler.pipeline import compile_graph
from monarch.compiler.plan import Plan
from monarch.compiler.text import parse_graph


def test_padding_is_no_examples() -> None:
    """Where more workers than examples share a batch, blocks are padded; what a step takes in are the examples."""
    graph = parse_graph("graph @step on mesh<data=8> {\n  %x = input 0 : i64[3@data, 4]\n  return %x\n}")
    plan = compile_graph(graph, report=True)
    found = estimate(plan, cluster_of("cpu"))
    assert (found.items, found.unit) == (12, "tokens")


THERE_AND_BACK = """\
graph @step on mesh<stage=2, data=2> with a: mesh<data=2>, b: mesh<data=2> {
  %x = input 0                 : f32[8@data, 4] on a
  %v = input 1                 : f32[4, 6] on a
  %w = input 2                 : f32[6, 6] on b
  %u = input 3                 : f32[4, 6] on a
  %h = aten.mm(%x, %v)         : f32[8, 6] on a
  %t = transfer(%h, "b", none) : f32[8, 6] on b
  %s = aten.mm(%x, %u)         : f32[8, 6] on a
  %y = aten.mm(%t, %w)         : f32[8, 6] on b
  %r = transfer(%y, "a", none) : f32[8, 6] on a
  %z = aten.mul.Tensor(%r, %s) : f32[8, 6] on a
  return %z
}"""

APART = """\
graph @step on mesh<stage=2, data=2> with a: mesh<data=2>, b: mesh<data=2> {
  %x = input 0         : f32[8@data, 4] on a
  %y = input 1         : f32[8@data, 4] on b
  %m = aten.cos(%x)    : f32[8, 4] on a
  %n = aten.sin(%y)    : f32[8, 4] on b
  return %m, %n
}"""


def machine(cores: int | None) -> Cluster:
    """Links on which a transfer takes half a second, whatever its size."""
    return replace(cluster_of("cpu"), levels=(Level("a host", None, Link(1e30, 0.5)),), cores=cores)


def timed(text: str, cluster: Cluster, seconds: dict[str, float]) -> Plan:
    """The plan, in which these ops take so long and all others no time."""
    plan = compile_graph(parse_graph(text), report=True, cluster=cluster)
    parts = []
    for part in plan.parts:
        assert part.plan.report is not None
        values = tuple(replace(value, seconds=seconds.get(value.op, 0.0)) for value in part.plan.report.values)
        parts.append(replace(part, plan=replace(part.plan, report=replace(part.plan.report, values=values))))
    return replace(plan, parts=tuple(parts))


@pytest.mark.parametrize("cores", [None, 2])
def test_a_part_waits_for_what_another_sends(cores: int | None) -> None:
    cluster = machine(cores)
    found = estimate(timed(THERE_AND_BACK, cluster, {"aten.mm": 1.0, "aten.mul.Tensor": 2.0}), cluster)
    # a: one product, then it sends and does the other; b: one product in between; a again.
    first, second = 1.0 + 0.5 + 1.0 + 0.5, 2.0
    if cores is None:
        assert found.seconds == pytest.approx(first + second)
        assert (found.computing, found.waiting) == (pytest.approx(4.0), {"transfers": pytest.approx(1.0)})
    else:  # while both compute, a second of work takes two: from 1.5 on, until b's product is done
        assert found.seconds == pytest.approx(first + second + 0.5)


@pytest.mark.parametrize(("cores", "seconds"), [(None, 3.0), (4, 3.0), (2, 4.0)])
def test_parts_share_the_cores_while_both_compute(cores: int | None, seconds: float) -> None:
    cluster = machine(cores)
    found = estimate(timed(APART, cluster, {"aten.cos": 1.0, "aten.sin": 3.0}), cluster)
    assert (found.seconds, found.computing) == (pytest.approx(seconds), pytest.approx(seconds))


def test_what_a_transfer_takes_is_its_level_s() -> None:
    within, across = Link(1e30, 0.25), Link(1e30, 4.0)
    plan = timed(THERE_AND_BACK, machine(None), {})
    one = replace(machine(None), levels=(Level("a host", 4, within), Level("all", None, across)))
    two = replace(machine(None), levels=(Level("a host", 2, within), Level("all", None, across)))
    assert estimate(plan, one).seconds == pytest.approx(2 * 0.25)
    assert estimate(plan, two).seconds == pytest.approx(2 * 4.0)
