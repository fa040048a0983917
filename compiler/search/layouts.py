"""Layouts as a search leaves them, and a traced graph with these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import Graph, provenance
from monarch.compiler.search.problem import FORWARD, UPDATE, Choice, Problem
from monarch.compiler.states import StateKey
from monarch.compiler.types import Layout, TensorType, is_partial


@dataclass(frozen=True)
class FoundLayouts:
    """Layouts of a program.

    `states`  by label, of parameters and what optimizers keep for them, also where the step makes it first
    `inputs`  by position
    `values`  of activations and their gradients, by their names in the traced graph
    """

    states: Mapping[str, Layout] = field(default_factory=dict)
    inputs: Mapping[int, Layout] = field(default_factory=dict)
    values: Mapping[str, Layout] = field(default_factory=dict)

    @property
    def key(self) -> object:
        """Equal for equal layouts."""
        return frozenset(self.states.items()), frozenset(self.inputs.items()), frozenset(self.values.items())

    def on(self, graph: Graph) -> Graph:
        """The traced graph with these layouts. The argument is not changed."""
        graph = graph.copy()
        for node in graph.placeholders:
            at = self.states if node.meta["kind"] == "state" else self.inputs if node.meta["kind"] == "input" else {}
            if (layout := at.get(node.meta["label"])) is not None:
                node.meta.update(type=node.meta["type"].with_layout(layout), found=True)
        for node in list(graph.calls):
            if (layout := self.values.get(node.name)) is not None:
                with graph.fx.inserting_after(node):
                    laid = graph.fx.call_function(ops.constrain, (node, str(layout)))
                laid.meta.update(type=node.meta["type"], provenance=provenance(node), found=True)
                node.replace_all_uses_with(laid, lambda user, laid=laid: user is not laid)  # type: ignore[misc]
        self._lay_out_made(graph)
        return graph

    def _lay_out_made(self, graph: Graph) -> None:
        """What the step makes first, such as an optimizer's moments, has its layout from the start."""
        updates = graph.updates
        for label, node in made(graph):
            if (layout := self.states.get(label)) is not None:
                with graph.fx.inserting_before(graph.fx.output_node()):
                    laid = graph.fx.call_function(ops.constrain, (node, str(layout)))
                laid.meta.update(type=node.meta["type"], provenance=provenance(node), found=True)
                updates[label] = laid
        graph.set_output(graph.returns, updates)


def made(graph: Graph) -> list[tuple[str, fx.Node]]:
    """The states that a step makes and does not read, by label, with their values."""
    states = graph.states
    return [(label, node) for label, node in graph.updates.items() if label not in states]


def written(graph: Graph, parameters: Mapping[str, Layout], inputs: Mapping[int, Layout] | None = None) -> FoundLayouts:
    """Layouts of a traced graph from those of parameters by name, as people write them: what optimizers keep for a
    parameter has its layout, and where it has other dims, whole on each worker."""
    states: dict[str, Layout] = {}
    for label, type_ in graph.states.items():
        layout = parameters.get(StateKey.of(label).parameter)
        if layout is not None:
            states[label] = layout if layout.ndim == type_.ndim else Layout.replicated(type_.ndim)
    return FoundLayouts(states, inputs or {})


def layouts_of(problem: Problem, chosen: Mapping[int, Choice], traced: Graph, values: bool) -> FoundLayouts:
    """What kinds chose as layouts of the traced graph's placeholders, and with `values` of what has several readers
    there, such as the residual stream: the partitioner chooses the rest, cheapest for the machine that it knows."""
    order = _nesting(problem, chosen)
    states: dict[str, Layout] = {}
    inputs: dict[int, Layout] = {}
    for kind in problem.free():
        layout = _layout(problem, kind.types[0], chosen[kind.number], order)
        for node in kind.nodes:
            if kind.is_state:
                states[str(node.meta["label"])] = layout
            else:
                inputs[node.meta["label"]] = layout
    return FoundLayouts(states, inputs, _values(problem, chosen, traced, order) if values else {})


def _values(problem: Problem, chosen: Mapping[int, Choice], traced: Graph, order: Sequence[int]) -> dict[str, Layout]:
    """Layouts of activations and their gradients that several ops read, but for what an optimizer reads."""
    names = {node.name: node for node in traced.calls if len(node.users) > 1}
    updating = {read.source for kind in problem.kinds if kind.phase == UPDATE for read in kind.reads}
    found: dict[str, Layout] = {}
    for kind in problem.kinds:
        (type_, *others) = kind.types
        if others or type_ is None or not type_.dtype.is_floating_point or kind.rule is None or kind.phase == UPDATE:
            continue
        place = problem.place(chosen[kind.number], 0)
        sharded = any(isinstance(each, int) for each in place) and not any(map(is_partial, place))
        if sharded and kind.root == kind.number and not kind.is_weight and kind.number not in updating:
            layout = _layout(problem, type_, chosen[kind.number], order)
            for node in kind.nodes:
                if (own := names.get(node.name)) is not None and own.meta["type"] == type_:
                    found[node.name] = layout
    return found


def _layout(problem: Problem, type_: TensorType | None, choice: Choice, order: Sequence[int]) -> Layout:
    assert type_ is not None
    layout = Layout.replicated(type_.ndim)
    for at in order:
        layout = layout.place(problem.mesh_dims[at], choice[at].results[0])
    return layout


def _nesting(problem: Problem, chosen: Mapping[int, Choice]) -> list[int]:
    """The mesh dims in the order in which they nest, everywhere alike: those over which parameters are gathered are
    inside, so that what is gathered is one block of the others."""
    gathered = [0.0] * len(problem.mesh_dims)
    for each in problem.deliveries:
        kind = problem.kinds[each.source]
        if kind.phase == FORWARD and kind.is_weight:
            source = problem.place(chosen[each.source], each.result)
            for reader in each.readers:
                target = problem.wanted(reader, chosen[reader[0]])
                for at, (has, wants) in enumerate(zip(source, target, strict=True)):
                    if isinstance(has, int) and wants is None:
                        gathered[at] += problem.nbytes(each.source, each.result) * len(each.sources)
    return sorted(range(len(problem.mesh_dims)), key=lambda at: (gathered[at], at))
