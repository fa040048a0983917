"""Recompute values instead of keeping them, so that a worker's memory stays within a limit."""

from __future__ import annotations

from typing import Any

from monarch.compiler.errors import MonarchError, Source
from monarch.compiler.graph import Graph
from monarch.compiler.inspect.memory import alive, footprint, types_of
from monarch.compiler.passes.base import Pass
from monarch.compiler.passes.buffers import Buffers, planned
from monarch.compiler.passes.eviction import RECOMPUTED, Eviction
from monarch.compiler.sizes import format_bytes

_ATTEMPTS = 6
_SHOWN = 6


class Rematerialize(Pass):
    """Make calls again before their values are read, where keeping these would take more than `limit` bytes.

        %g = aten.gelu(%h)
        %y = aten.mm(%g, %w)
        ...                                  # where memory is short
        %d = aten.mm(%t, %g)
        -->
        %g = aten.gelu(%h)
        %y = aten.mm(%g, %w)
        ...
        %g_again = aten.gelu(%h)             # recomputed: saves 4.0 MiB between %y and %d
        %d = aten.mm(%t, %g_again)

    What is made again is chosen by `eviction.Eviction`; the same calls on the same values give the same bits. The limit
    is on all that a worker holds, inputs and state included, as `inspect.memory` follows it through the plan. A graph
    that fits is left as it is. Collectives are made again only if the limit is out of reach without that.

    Raises MonarchError where the limit cannot be kept, with what lives at the peak of the best schedule that was found.
    """

    name = "rematerialize"

    def __init__(self, limit: int, target: str = "cpu") -> None:
        self.limit = limit
        self.target = target
        self.costs: dict[str, Any] = {}
        """What the last run did, for `Plan.costs`: "memory_limit", "peak_bytes", and "recomputed" with the peak
        "without" it, how many "calls" are made again and the "seconds" that they are estimated to take, and for each of
        the "values" that were given up its name, its bytes, and the values between which these are free."""

    def run(self, graph: Graph) -> Graph:
        buffers = Buffers(graph, self.target)
        if buffers.peak <= self.limit:
            self._note(buffers, buffers.peak, 0, None)
            return graph
        for collectives in (False, True):
            if (found := self._within(buffers, collectives)) is not None:
                return found
        raise self._error(self._lowest(buffers), buffers.peak)

    def _note(self, buffers: Buffers, peak: int, calls: int, walk: Eviction | None) -> None:
        self.costs = {
            "memory_limit": self.limit,
            "peak_bytes": peak,
            "recomputed": {
                "without": buffers.peak,
                "calls": calls,
                "seconds": walk.seconds if walk else 0.0,
                "values": [list(each) for each in walk.saved] if walk else [],
            },
        }

    def _within(self, buffers: Buffers, collectives: bool) -> Graph | None:
        """The graph with no more made again than has to be, or None. The walk's reckoning leaves out what giving up a
        value changes in which calls write in place; where that makes it miss, it aims lower."""
        target = self.limit
        for _ in range(_ATTEMPTS):
            walk = Eviction(buffers, target, collectives)
            reached = walk.run()
            if not walk.complete:
                return None
            found = walk.applied()
            peak = peak_of(found, self.target)
            if peak <= self.limit:
                self._note(buffers, peak, recomputed(found), walk)
                return found
            if not reached:
                return None
            target -= peak - self.limit
        return None

    def _lowest(self, buffers: Buffers) -> Graph:
        """The graph with the lowest peak that is found by bisection."""
        best, lowest = buffers.graph, buffers.peak
        low, high = self.limit, buffers.peak
        for _ in range(_ATTEMPTS):
            walk = Eviction(buffers, (low + high) // 2, collectives=True)
            reached = walk.run()
            if walk.complete:
                found = walk.applied()
                if (peak := peak_of(found, self.target)) < lowest:
                    best, lowest = found, peak
            low, high = (low, walk.limit) if reached else (walk.limit, high)
        return best

    def _error(self, graph: Graph, without: int) -> MonarchError:
        plan, copy = planned(graph, self.target)
        types = types_of(copy, plan)
        most, at = footprint(plan, types).peak
        nodes = [*copy.placeholders, *copy.calls]
        sizes: dict[str, int] = {}
        values: list[tuple[int, str, Source | None]] = []
        for slot, size in alive(plan, types, at).items():
            node = nodes[slot]
            if node.op == "placeholder":
                kind = _kind(node.meta["kind"], str(node.meta["label"]))
                sizes[kind] = sizes.get(kind, 0) + size
            else:
                values.append((size, node.name, node.meta.get("source")))
        values.sort(key=lambda value: (-value[0], value[1]))
        sizes["values of the step"] = sum(size for size, _, _ in values)
        parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sizes.items() if size)
        instruction = plan.instructions[at] if at >= 0 else None
        source = plan.sources[instruction.source] if instruction and instruction.source >= 0 else None
        lines = [f"At the peak live {parts}; the largest values:"]
        wide = max((len(name) for _, name, _ in values[:_SHOWN]), default=0)
        for size, name, line in values[:_SHOWN]:
            lines.append(f"  %{name:<{wide}} {format_bytes(size):>10}  {line or ''}".rstrip())
        if len(values) > _SHOWN:
            rest = sum(size for size, _, _ in values[_SHOWN:])
            lines.append(f"  and {len(values) - _SHOWN} more, {format_bytes(rest)} together")
        lines.append("Shard what is replicated over a mesh dim, take a smaller batch, or raise the limit.")
        return MonarchError(
            f"'{graph.name}' does not fit in {self.limit:,} bytes ({format_bytes(self.limit)}) a worker: it takes"
            f" {without:,}, and {most:,} ({format_bytes(most)}) with all recomputed that helps",
            hint="\n".join(lines),
            source=source,
        )


def peak_of(graph: Graph, target: str) -> int:
    """The most that a worker holds, in bytes, as the graph's plan has it."""
    plan, copy = planned(graph, target)
    return footprint(plan, types_of(copy, plan)).peak[0]


def recomputed(graph: Graph) -> int:
    """How many calls of the graph are made again."""
    return sum(RECOMPUTED in node.meta and node.op == "call_function" for node in graph.fx.nodes)


def _kind(kind: str, label: str) -> str:
    if kind != "state":
        return {"input": "inputs"}.get(kind, f"{kind}s")
    if label.startswith("grad["):
        return "gradients"
    return "optimizer state" if "[" in label else "parameters"
