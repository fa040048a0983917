"""The base class of passes, and the context that they get beside the graph."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar

from monarch.compiler.config import settings
from monarch.compiler.graph import Graph
from monarch.compiler.plan.options import CompileOptions


@dataclass
class Context:
    """The data that all passes of one compilation share.

    `options`    how the program is compiled
    `report`     whether the passes write down why they decide as they do, for the inspector
    `kernels`    which ops become generated kernels: "auto", "all" or "off"; without the option the setting decides
    `templates`  for GPUs, which ops become kernels of templates: "auto", "all" or "off". The setting decides, and it is
                 "off" where `kernels` is
    `costs`      what passes find out for `Plan.costs`
    `seconds`    how long each pass took, by its name
    `stands_for` while equal blocks are folded, for those that stand for several (`Provenance.block`) how many these are
    """

    options: CompileOptions = field(default_factory=CompileOptions)
    report: bool = False
    kernels: str = ""
    templates: str = ""
    costs: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    stands_for: dict[int | None, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.kernels = self.kernels or self.options.kernels or settings.kernels
        self.templates = "off" if self.kernels == "off" else self.templates or settings.templates


class Pass(ABC):
    """A rewrite of a graph, tested with text in, text out. Its docstring shows the rewrite."""

    name: str
    regions: ClassVar[str] = "each"
    """Whether the pass is run on "each" region of a graph as well, sees to them of its "own", or on "none"."""

    @abstractmethod
    def run(self, graph: Graph, context: Context) -> Graph:
        """The rewritten graph. The input may be taken apart, and must not be used afterwards."""
