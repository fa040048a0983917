"""The regions of a graph's ops: graphs on the same mesh that read nothing but their inputs."""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import Graph, args_of


def regions_of(graph: Graph, node: fx.Node) -> list[Graph]:
    """The regions of an op that has some."""
    return [graph.regions[name] for name in names_of(node)]


def names_of(node: fx.Node) -> list[str]:
    """The names of the regions of an op that has some."""
    return args_of(node)[ops.regions_at(node.target)]


def acts_for_itself(graph: Graph, node: fx.Node) -> bool:
    """Whether a call does something besides giving its result: it checks something, or a region of it does."""
    if node.target in ops.WITH_REGIONS:
        return any(acts_for_itself(region, each) for region in regions_of(graph, node) for each in region.calls)
    return ops.acts(node.target)


def drop_unread(graph: Graph) -> None:
    """Leave out the regions of ops that are gone."""
    named = {name for call in graph.calls if call.target in ops.WITH_REGIONS for name in names_of(call)}
    graph.regions = {name: region for name, region in graph.regions.items() if name in named}


def each_region(graph: Graph, run: Callable[[Graph], Graph]) -> None:
    """Replace each region of a graph."""
    graph.regions = {name: run(region) for name, region in graph.regions.items()}
