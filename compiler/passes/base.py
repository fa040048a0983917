"""What a pass is."""

from __future__ import annotations

from abc import ABC, abstractmethod

from monarch.compiler.graph import Graph


class Pass(ABC):
    """A rewrite of a graph, tested with text in, text out. Its docstring shows the rewrite."""

    name: str

    @abstractmethod
    def run(self, graph: Graph) -> Graph:
        """The rewritten graph. The input may be taken apart, and must not be used afterwards."""
