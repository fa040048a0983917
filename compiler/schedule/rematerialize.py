"""Recompute values instead of keeping them, so that a worker's memory stays within a limit."""

from __future__ import annotations

from dataclasses import dataclass

from monarch.compiler.context import Context, Pass
from monarch.compiler.cost.cluster import cluster_of
from monarch.compiler.errors import MonarchError, Source
from monarch.compiler.graph import Graph, provenance
from monarch.compiler.schedule.buffers import Buffers, peak_of
from monarch.compiler.schedule.eviction import RECOMPUTED, Eviction
from monarch.compiler.schedule.footprint import alive, footprint
from monarch.compiler.schedule.schedule import Schedule
from monarch.compiler.sizes import format_bytes
from monarch.compiler.states import StateKey

_ATTEMPTS = 6
_SHOWN = 6


class Rematerialize(Pass):
    """Make calls again before their values are read, where keeping these would take more than the memory limit.

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
    is on all that a worker holds, inputs and state included, as `footprint` follows it through the plan. A graph that
    fits is left as it is. Collectives are made again only if the limit is out of reach without that.

    The costs get "peak_bytes", and "recomputed" with the peak "without" it, how many "calls" are made again and the
    "seconds" that they are estimated to take, and for each of the "values" that were given up its name, its bytes, and
    the values between which these are free.

    Raises MonarchError where the limit cannot be kept, with what lives at the peak of the best schedule that was found.
    """

    name = "rematerialize"
    regions = "none"

    def run(self, graph: Graph, context: Context) -> Graph:
        limit = context.options.memory_limit
        assert limit is not None, "there is no limit to stay within"
        return _Within(limit, Buffers(graph, cluster_of(context.options.target)), context).run()


@dataclass(frozen=True)
class _Within:
    """A graph's buffers, to be kept within a limit."""

    limit: int
    buffers: Buffers
    context: Context

    def run(self) -> Graph:
        if self.buffers.peak <= self.limit:
            self._note(self.buffers.peak, 0, None)
            return self.buffers.graph
        for collectives in (False, True):
            if (found := self._within(collectives)) is not None:
                return found
        raise self._error(self._lowest())

    def _note(self, peak: int, calls: int, walk: Eviction | None) -> None:
        self.context.costs["peak_bytes"] = peak
        self.context.costs["recomputed"] = {
            "without": self.buffers.peak,
            "calls": calls,
            "seconds": walk.seconds if walk else 0.0,
            "values": [list(each) for each in walk.saved] if walk else [],
        }

    def _within(self, collectives: bool) -> Graph | None:
        """The graph with no more made again than has to be, or None. The walk's reckoning leaves out what giving up a
        value changes in which calls write in place; where that makes it miss, it aims lower."""
        target = self.limit
        for _ in range(_ATTEMPTS):
            walk = Eviction(self.buffers, target, collectives)
            reached = walk.run()
            if not walk.complete:
                return None
            found = walk.applied()
            peak = peak_of(found)
            if peak <= self.limit:
                self._note(peak, recomputed(found), walk)
                return found
            if not reached:
                return None
            target -= peak - self.limit
        return None

    def _lowest(self) -> Graph:
        """The graph with the lowest peak that is found by bisection."""
        best, lowest = self.buffers.graph, self.buffers.peak
        low, high = self.limit, self.buffers.peak
        for _ in range(_ATTEMPTS):
            walk = Eviction(self.buffers, (low + high) // 2, collectives=True)
            reached = walk.run()
            if walk.complete:
                found = walk.applied()
                if (peak := peak_of(found)) < lowest:
                    best, lowest = found, peak
            low, high = (low, walk.limit) if reached else (walk.limit, high)
        return best

    def _error(self, graph: Graph) -> MonarchError:
        schedule = Schedule(graph.copy())
        most, at = footprint(schedule).peak
        nodes = list(schedule.slots)
        sizes: dict[str, int] = {}
        values: list[tuple[int, str, Source | None]] = []
        for slot, size in alive(schedule, at).items():
            node = nodes[slot]
            if node.op == "placeholder":
                kind = _kind(node.meta["kind"], str(node.meta["label"]))
                sizes[kind] = sizes.get(kind, 0) + size
            else:
                values.append((size, node.name, provenance(node).source))
        values.sort(key=lambda value: (-value[0], value[1]))
        sizes["values of the step"] = sum(size for size, _, _ in values)
        parts = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in sizes.items() if size)
        number = schedule.instructions[at].source if at >= 0 else -1
        source = list(schedule.sources)[number] if number >= 0 else None
        lines = [f"At the peak live {parts}; the largest values:"]
        wide = max((len(name) for _, name, _ in values[:_SHOWN]), default=0)
        for size, name, line in values[:_SHOWN]:
            lines.append(f"  %{name:<{wide}} {format_bytes(size):>10}  {line or ''}".rstrip())
        if len(values) > _SHOWN:
            rest = sum(size for size, _, _ in values[_SHOWN:])
            lines.append(f"  and {len(values) - _SHOWN} more, {format_bytes(rest)} together")
        lines.append("Shard tensors that are replicated over a mesh dim, take a smaller batch, or raise the limit.")
        return MonarchError(
            f"'{graph.name}' does not fit in {self.limit:,} bytes ({format_bytes(self.limit)}) a worker: it takes"
            f" {self.buffers.peak:,}, and {most:,} ({format_bytes(most)}) with all recomputed that helps",
            hint="\n".join(lines),
            source=source,
        )


def recomputed(graph: Graph) -> int:
    """How many calls of the graph are made again."""
    return sum(RECOMPUTED in node.meta and node.op == "call_function" for node in graph.fx.nodes)


def _kind(kind: str, label: str) -> str:
    if kind != "state":
        return {"input": "inputs"}.get(kind, f"{kind}s")
    return {"parameter": "parameters", "gradient": "gradients"}.get(kind := StateKey.of(label).kind, kind)
