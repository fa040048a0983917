"""The last step: a schedule, written down as the plan that workers run."""

from __future__ import annotations

from dataclasses import replace

from monarch.compiler.cost.cluster import cluster_of
from monarch.compiler.cost.work import graph_costs
from monarch.compiler.graph import Graph
from monarch.compiler.plan.arena import ALIGN
from monarch.compiler.plan.file import hash_of
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.plan import Plan
from monarch.compiler.schedule.arena import Lifetime, Placing, lower_bound
from monarch.compiler.schedule.schedule import Schedule
from monarch.compiler.schedule.template import Template
from monarch.compiler.symbols import Scope, example


def emit_plan(graph: Graph, options: CompileOptions) -> Plan:
    """Schedule a partitioned graph, which changes as `Schedule` says, and write the schedule down."""
    return plan_of(Schedule(graph), options)


def plan_of(schedule: Schedule, options: CompileOptions) -> Plan:
    """The plan of a schedule: its instructions, on CPUs with places in the arena, and what else a worker needs."""
    functions = {name: plan_of(Schedule(region), options) for name, region in schedule.graph.regions.items()}
    plan, _ = written(schedule, options, functions)
    return replace(plan, hash=hash_of(plan))


def template_of(schedule: Schedule, options: CompileOptions, scope: Scope) -> Template:
    """The same for a program of named sizes, those of `scope`."""
    functions = {name: template_of(Schedule(region), options, scope) for name, region in schedule.graph.regions.items()}
    plan, spans = written(schedule, options, {name: function.plan for name, function in functions.items()})
    return Template(plan, tuple(spans), scope, functions=functions)


def written(schedule: Schedule, options: CompileOptions, functions: dict[str, Plan]) -> tuple[Plan, list[Lifetime]]:
    """A plan without its hash, and the lifetimes in the arena, in the order of the instructions' regions."""
    graph = schedule.graph
    costs = graph_costs(graph, cluster_of(options.target).shared(graph.mesh.workers))
    instructions, arena, spans = schedule.instructions, 0, []
    if options.target == "cpu":
        placing = Placing(schedule)
        arena, instructions = placing.run()
        spans = placing.spans
        least = lower_bound([replace(span, size=example(span.size)) for span in spans])
        costs["arena"] = {"bytes": arena, "least": least, "values": len(spans)}
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
    return plan, spans
