"""What the parts of the verifier share: a graph, and errors that name the value and the pass."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import fx

from monarch.compiler import ops
from monarch.compiler.errors import GraphError
from monarch.compiler.graph import Graph, provenance
from monarch.compiler.text import print_node
from monarch.compiler.types import TensorType

PARAMETERS = {
    op: tuple(part.strip() for part in op.signature.strip("()").split(",") if part.strip()) for op in ops.OPS.values()
}


class Check:
    """What checks a graph `after` a pass, which its errors name."""

    def __init__(self, graph: Graph, after: str) -> None:
        self.graph = graph
        self.lead = f"after {after}: " if after else ""

    def fail(self, message: str, node: fx.Node | None = None, hint: str = "") -> NoReturn:
        """Raise GraphError with the value's line, as the graph prints it, below the message."""
        if node is None:
            raise GraphError(f"{self.lead}graph @{self.graph.name}: {message}", hint=hint)
        try:
            line = print_node(node, self.graph) if node.op != "output" else ""
        except (GraphError, ValueError, KeyError):  # what is wrong may be what would be printed
            line = f"%{node.name} = {node.target}"
        hint = "\n".join(part for part in (line, hint) if part)
        raise GraphError(f"{self.lead}%{node.name} {message}", hint=hint, source=provenance(node).source)


def is_tensor(value: Any) -> bool:
    """Whether it is a node that gives one tensor."""
    return isinstance(value, fx.Node) and isinstance(value.meta.get("type"), TensorType)


def types_of(types: Any) -> list[TensorType | None]:
    """The types of a node's results, one or several."""
    return list(types) if isinstance(types, tuple) else [types]
