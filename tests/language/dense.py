"""An executor that runs a traced graph, not partitioned, in this process: the language on its own, without workers."""

from __future__ import annotations

import itertools
import weakref
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from monarch.compiler.blocks import block_of
from monarch.compiler.graph import Graph
from monarch.compiler.mesh import Shape
from monarch.compiler.plan import CompileOptions, Plan, ValueSpec
from monarch.compiler.text import parse_graph
from monarch.compiler.types import DTYPE_NAMES, DTYPES, MeshSpec, TensorType
from monarch.compiler.verify import verify
from monarch.language.tensors.shapes import default_dtype
from tests.compiler.reference import run_reference
from tests.sample import is_full

GRAPHS: dict[str, Graph] = {}
"""The graphs of the plans that there are, by hash."""
SOME = 8
"""Of so many programs the text of one is read again: reading takes as long as compiling."""
_numbers = itertools.count()


@dataclass
class DenseHandle:
    tensor: torch.Tensor
    type: TensorType
    freed: bool = False


def compile_dense(graph: Graph) -> Plan:
    """A plan with no instructions; DenseExecutor finds its graph by the hash."""
    verify(graph, run=True)
    text = str(graph)
    if is_full() or zlib.crc32(text.encode()) % SOME == 0:
        for each in graph.fragments.values() or [graph]:
            assert str(parse_graph(str(each))) == str(each)
    return plan_of(graph, text)


def plan_of(graph: Graph, text: str = "") -> Plan:
    """The same without the checks, which take half of the time that a small program takes."""
    key = f"{next(_numbers)}"
    GRAPHS[key] = graph
    for node in (node for each in graph.fragments.values() or [graph] for node in each.calls):
        if node.target is torch.ops.aten.view.default:  # a graph's views are of values, whatever their strides
            node.target = torch.ops.aten.reshape.default
    inputs = tuple(
        ValueSpec(node.meta["kind"], node.meta["label"], node.meta["type"].unpadded, 0)
        for node in graph.placeholders
        if node.meta["kind"] != "constant"
    )
    state_types = {spec.label: spec.type for spec in inputs if spec.kind == "state"}
    made = graph.updates
    returned = [(i, node) for i, node in enumerate(graph.returns) if node is not None]
    if graph.fragments:  # the nodes of the parts have the layouts
        made = {label: node for each in graph.fragments.values() for label, node in each.updates.items()}
        made = {label: made[label] for label in graph.updates}
        rest = {name: iter(each.returns) for name, each in graph.fragments.items()}
        returned = [(i, next(rest[node.meta["mesh"]])) for i, node in returned]
    outputs = [ValueSpec("return", i, node.meta["type"].unpadded, 0) for i, node in returned]
    outputs += [
        ValueSpec("state", label, state_types.get(label, node.meta["type"].unpadded), 0) for label, node in made.items()
    ]
    donated = tuple(spec.kind == "state" and spec.label in graph.updates for spec in inputs)
    under = CompileOptions(dtype=DTYPE_NAMES[torch.get_default_dtype()])
    made_of = Plan(graph.name, graph.mesh, inputs, tuple(outputs), (), 0, donated, hash=key, graph=text, options=under)
    weakref.finalize(made_of, GRAPHS.pop, key)
    return made_of


class DenseExecutor:
    """Counts its runs; refuses donated handles that are used again, as workers would."""

    def __init__(self, mesh: MeshSpec) -> None:
        self.mesh = mesh
        self.runs: list[str] = []
        self.puts = 0

    @property
    def whole(self) -> DenseExecutor:
        return self

    def over(self, shape: Shape) -> DenseExecutor:
        return DenseExecutor(MeshSpec(tuple(shape.extent.items())))

    def put(self, tensor: torch.Tensor, type: TensorType, lent: bool = False) -> DenseHandle:
        self.puts += 1
        return DenseHandle(tensor.clone(), type)

    def run(self, plan: Plan, arguments: Sequence[Any], bind: Any = None, *, release: Any = ()) -> list[DenseHandle]:
        self.runs.append(plan.name)
        values: dict[str | int, Any] = {}
        assert len(arguments) == len(plan.inputs)
        for spec, argument in zip(plan.inputs, arguments, strict=True):
            if isinstance(argument, DenseHandle):
                assert not argument.freed, f"{spec.label} was donated to an earlier step"
                assert argument.type == spec.type, f"{spec.label}: {argument.type} for {spec.type}"
                values[spec.label] = argument.tensor
            else:
                assert spec.kind != "state"
                values[spec.label] = torch.as_tensor(argument, dtype=spec.type.dtype)
        with default_dtype(DTYPES[plan.options.dtype]):
            returns, updates = run_reference(GRAPHS[plan.hash], values, poison=True)
        for donated, argument in zip(plan.donated, arguments, strict=True):
            if donated:
                argument.freed = True
        for handle in release:
            assert not any(handle is argument for argument in arguments)
            handle.freed = True
        results = [value for value in returns if value is not None] + list(updates.values())
        made = [DenseHandle(value, spec.type) for value, spec in zip(results, plan.outputs, strict=True)]
        if bind is not None:
            bind(made)
        return made

    def settle(self) -> None:
        pass

    def shards(
        self, handle: DenseHandle, workers: Sequence[int] | None = None, *, quiet: bool = False
    ) -> list[torch.Tensor]:
        assert not handle.freed, "the handle was donated to an earlier step"
        ranks = range(self.mesh.workers) if workers is None else workers
        return [block_of(handle.tensor, handle.type, self.mesh, rank).clone() for rank in ranks]

    def wait(self, handle: DenseHandle) -> None:
        assert not handle.freed

    def recover(self, handle: DenseHandle, wait: bool = True) -> DenseHandle:
        return handle

    def heal(self, states: Any, give_up: bool = False) -> bool:
        return False

    def snapshots(self, every: int, copies: int) -> None:
        pass

    def check_replicas(self, every: Any, names: Any) -> None:
        pass

    def undo(self) -> None:
        pass

    def close(self) -> None:
        pass
