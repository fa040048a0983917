"""The last step: a schedule, written down as the plan that workers run."""

from __future__ import annotations

from dataclasses import replace

from monarch.compiler.cost.work import graph_costs
from monarch.compiler.graph import Graph
from monarch.compiler.plan.arena import ALIGN
from monarch.compiler.plan.file import hash_of
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.plan import Plan
from monarch.compiler.schedule.arena import Placing, lower_bound
from monarch.compiler.schedule.schedule import Schedule


def emit_plan(graph: Graph, options: CompileOptions) -> Plan:
    """Schedule a partitioned graph, which changes as `Schedule` says, and write the schedule down."""
    return plan_of(Schedule(graph), options)


def plan_of(schedule: Schedule, options: CompileOptions) -> Plan:
    """The plan of a schedule: its instructions, on CPUs with places in the arena, and what else a worker needs."""
    graph = schedule.graph
    costs = graph_costs(graph)
    instructions, arena = schedule.instructions, 0
    functions = {name: plan_of(Schedule(region), options) for name, region in graph.regions.items()}
    if options.target == "cpu":
        placing = Placing(schedule)
        arena, instructions = placing.run()
        costs["arena"] = {"bytes": arena, "least": lower_bound(placing.spans), "values": len(placing.spans)}
    arena = -(-arena // ALIGN) * ALIGN + max((function.arena for function in functions.values()), default=0)
    plan = Plan(
        name=graph.name,
        mesh=graph.mesh,
        inputs=schedule.inputs,
        outputs=schedule.outputs,
        instructions=tuple(instructions),
        slots=len(schedule.slots),
        donated=schedule.donated,
        constants=dict(graph.constants),
        constant_slots=schedule.constant_slots,
        sources=tuple(schedule.sources),
        options=options,
        arena=arena,
        functions=functions,
        graph=str(graph),
        costs=costs,
    )
    return replace(plan, hash=hash_of(plan))
