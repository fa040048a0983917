"""Whether a plan fits a machine, and what would make it fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from monarch.compiler.cli.load import LoadedProgram
from monarch.compiler.cli.screen import count, duration, size
from monarch.compiler.cost.cluster import Cluster
from monarch.compiler.errors import MonarchError
from monarch.compiler.inspect.estimate import estimate
from monarch.compiler.inspect.memory import alive_by_layer
from monarch.compiler.plan import Plan
from monarch.compiler.plan.report import peak


def verdict(loaded: LoadedProgram, plan: Plan, cluster: Cluster) -> Iterator[str]:
    """In words, a line each: whether a worker's peak fits the machine, of several meshes that of the fullest; where it
    does not, the largest parts of it, and changes that would make it fit, which are tried."""
    cluster = cluster.shared(plan.mesh.workers)
    if cluster.memory is None:
        return
    plans = {part.name: part.plan for part in plan.parts} or {"": plan}
    fullest = max(plans, key=lambda name: peak(plans[name])[0])
    worker = f"a worker of {fullest}" if fullest else "a worker"
    held, there = peak(plans[fullest])[0], cluster.memory
    if held <= there:
        yield f"fits {cluster.name}: {worker} holds {size(held)} of {size(there)}"
        return
    kinds: Counter[str] = Counter()
    for row in alive_by_layer(plans[fullest]).values():
        kinds.update(row)
    parts = ", ".join(f"{size(bytes_)} {kind}" for kind, bytes_ in kinds.most_common(4))
    yield f"does not fit {cluster.name}: {worker} holds {size(held)}, and there are {size(there)}"
    yield f"  at the peak it holds {parts}"
    if plan.options.memory_limit is None:
        try:
            less = loaded.limited(there).compile(plan.target, cluster=cluster, binaries=False)
        except MonarchError as error:
            yield f"  --memory-limit {there} is not enough: {error.message}"
        else:
            more = estimate(less, cluster).seconds - estimate(plan, cluster).seconds
            calls = count(less.costs["recomputed"]["calls"], "op")
            took = duration(max(more, 0.0))
            yield f"  --memory-limit {there} makes it fit: {calls} computed again, about {took} more a step"
            return
    yield "  weights and optimizer state that are whole on every worker can be cut: monarch.stdlib.parallel.fully_shard"
    yield "  a larger mesh dim over the batch has each worker keep fewer activations: --mesh"
