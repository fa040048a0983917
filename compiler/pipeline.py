"""The compiler's passes, in order, and what runs them."""

from __future__ import annotations

import difflib
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from monarch.compiler import knobs
from monarch.compiler.errors import MonarchError
from monarch.compiler.graph import Graph
from monarch.compiler.partition import PartitionByMesh, nesting_order
from monarch.compiler.passes.base import Pass
from monarch.compiler.passes.collectives import JoinCollectives, SimplifyReductions
from monarch.compiler.passes.decompose import DecomposeSplit
from monarch.compiler.passes.emit import emit_plan
from monarch.compiler.passes.simplify import SimplifyViews
from monarch.compiler.plan import Plan
from monarch.compiler.verify import verify


def pipeline(graph: Graph) -> list[Pass]:
    """The passes from a traced graph with global types to one with local types and explicit collectives."""
    return [
        SimplifyViews(),
        DecomposeSplit(),
        *(PartitionByMesh(mesh_dim) for mesh_dim in nesting_order(graph)),
        SimplifyReductions(),
        JoinCollectives(),
    ]


def partition_graph(graph: Graph) -> Graph:
    """A traced graph, partitioned for its mesh. The argument is not changed. Raises LayoutError and RuleError."""
    return _run(_copy(graph), {})


def compile_graph(graph: Graph) -> Plan:
    """The plan of a traced graph. The argument is not changed. Raises LayoutError and RuleError."""
    seconds: dict[str, float] = {}
    partitioned = _run(_copy(graph), seconds)
    start = time.perf_counter()
    plan = emit_plan(partitioned)
    seconds["emit-plan"] = time.perf_counter() - start
    if "plan" in knobs.log_topics():
        print(f"monarch: {graph.name}: the plan\n{plan.graph}", file=sys.stderr)
    return replace(plan, costs={**plan.costs, "seconds": seconds})


def _copy(graph: Graph) -> Graph:
    copy = graph.empty_like()
    nodes: dict[Any, Any] = {}
    for node in graph.fx.nodes:
        nodes[node] = copy.fx.node_copy(node, lambda n: nodes[n])
    return copy


def _run(graph: Graph, seconds: dict[str, float]) -> Graph:
    dump = _Dump(graph)
    for number, step in enumerate(pipeline(graph)):
        start = time.perf_counter()
        graph = step.run(graph)
        seconds[step.name] = time.perf_counter() - start
        dump.after(number, step.name, graph)
        if "passes" in knobs.log_topics():
            ops = sum(1 for _ in graph.calls)
            print(f"monarch: {graph.name}: {step.name} {seconds[step.name]:.3f} s, {ops} ops", file=sys.stderr)
        if knobs.verify():
            verify(graph, after=step.name)
    return graph


class _Dump:
    """Writes the graph before and after each pass, with a diff, where MONARCH_DUMP says so."""

    def __init__(self, graph: Graph) -> None:
        self.folder = knobs.dump_folder()
        self.text = ""
        if self.folder:
            self.text = str(graph)
            self._write(Path(self.folder), f"{graph.name}.00-captured.txt", self.text)

    def after(self, number: int, name: str, graph: Graph) -> None:
        if not self.folder:
            return
        text = str(graph)
        stem = f"{graph.name}.{number + 1:02d}-{name}"
        self._write(self.folder, f"{stem}.txt", text)
        diff = difflib.unified_diff(self.text.splitlines(), text.splitlines(), "before", "after", lineterm="", n=1)
        self._write(self.folder, f"{stem}.diff", "\n".join(diff))
        self.text = text

    def _write(self, folder: Path, name: str, text: str) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(text + "\n")
        except OSError as error:
            raise MonarchError(f"cannot write {folder / name}: {error.strerror}", hint="see MONARCH_DUMP.") from error
