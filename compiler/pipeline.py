"""The compiler's passes, in order, and what runs them."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from monarch.compiler.config import settings
from monarch.compiler.context import Context, Pass
from monarch.compiler.cost.cluster import Cluster
from monarch.compiler.errors import GraphError, MonarchError, did_you_mean
from monarch.compiler.execution.events import say, wanted
from monarch.compiler.graph import Graph, provenance
from monarch.compiler.kernels.fuse import FuseKernels, has_sized
from monarch.compiler.kernels.join import JoinKernels
from monarch.compiler.loading import load
from monarch.compiler.ops.regions import each_region
from monarch.compiler.partition import PartitionByMesh, nesting_order
from monarch.compiler.partition.decide import mark_traced
from monarch.compiler.partition.partition import drop_constraints
from monarch.compiler.partition.steady import Unsteady
from monarch.compiler.passes.anomalies import DetectAnomalies
from monarch.compiler.passes.collectives import JoinCollectives, SimplifyReductions
from monarch.compiler.passes.cut import cut, lay_out_received, sends_of
from monarch.compiler.passes.decompose import DecomposeSplit, KeepUnevenApart
from monarch.compiler.passes.drop_padding import DropPadding
from monarch.compiler.passes.fold import Fold, fold
from monarch.compiler.passes.lookups import SimplifyLookups
from monarch.compiler.passes.padding import PadForDivisibility, is_uneven
from monarch.compiler.passes.predicates import AgreeOnPredicates
from monarch.compiler.passes.simplify import SimplifyViews
from monarch.compiler.passes.unfold import unfold
from monarch.compiler.plan import Plan
from monarch.compiler.plan.arena import overlapping
from monarch.compiler.plan.check import check_ops
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.plan.report import peak
from monarch.compiler.plan.waits import STARTED
from monarch.compiler.report import build_report, several_results
from monarch.compiler.schedule.commit import CommitLast
from monarch.compiler.schedule.emit import plan_of, template_of
from monarch.compiler.schedule.join import join_parts
from monarch.compiler.schedule.overlap import OverlapCollectives
from monarch.compiler.schedule.rematerialize import Rematerialize
from monarch.compiler.schedule.schedule import Schedule
from monarch.compiler.schedule.template import Template
from monarch.compiler.sizes import parse_bytes
from monarch.compiler.symbols import Scope
from monarch.compiler.text import print_graph
from monarch.compiler.types import DTYPE_NAMES, MeshSpec, TensorType
from monarch.compiler.verify import verify

DEFAULT = CompileOptions()

Progress = Callable[[str, float, Graph], None]
"""Called after each pass: its name, how many seconds it took, and the graph that it left."""


def pipeline(graph: Graph) -> list[Pass]:
    """The passes from a traced graph with global types to one with local types and explicit collectives, each by
    itself. Those for padding run only where a mesh dim does not divide a dim that it shards."""
    uneven = _any_uneven(graph)
    return [
        SimplifyViews(),
        *([KeepUnevenApart(), PadForDivisibility()] if uneven else []),
        DecomposeSplit(),
        SimplifyLookups(),
        *_partition_by_mesh(graph),
        *([DropPadding()] if uneven else []),
        SimplifyReductions(),
        *([AgreeOnPredicates()] if graph.regions else []),
    ]


def _any_uneven(graph: Graph) -> bool:
    return is_uneven(graph) or any(map(_any_uneven, graph.regions.values()))


def fusing(context: Context) -> list[Pass]:
    """The passes behind those of `pipeline` that look at the neighbours of each op: they treat equal blocks equally."""
    return [*([DetectAnomalies()] if context.options.anomaly else []), FuseKernels()]


def lowering(context: Context) -> list[Pass]:
    """The passes behind those of `fusing`, which look at all ops of one worker. Where buckets of collectives end
    follows from their bytes. Recomputation to save memory chooses among kernels: the same kernels on the same values
    give the same bits, which other kernels of the same ops need not. What collectives are started ahead of is known
    last."""
    options = context.options
    steps: list[Pass] = [JoinCollectives(), JoinKernels()]
    if options.target != "cpu" and context.kernels != "off":
        steps.append(_for_gpus().FuseProducts())
    steps.append(CommitLast())
    if options.memory_limit is not None:
        steps.append(Rematerialize())
    if options.collectives in STARTED:
        steps.append(OverlapCollectives())
    return steps


def _for_gpus() -> Any:
    """The passes that only plans for GPUs need."""
    return load("monarch.compiler.kernels.gpu")


def _partition_by_mesh(graph: Graph) -> list[Pass]:
    return [PartitionByMesh(dim) for dim in nesting_order(graph) if dim not in graph.partitioned]


PASSES: dict[str, Callable[[Graph], list[Pass]]] = {
    SimplifyViews.name: lambda graph: [SimplifyViews()],
    KeepUnevenApart.name: lambda graph: [KeepUnevenApart()],
    PadForDivisibility.name: lambda graph: [PadForDivisibility()],
    DecomposeSplit.name: lambda graph: [DecomposeSplit()],
    SimplifyLookups.name: lambda graph: [SimplifyLookups()],
    "partition-by-mesh": _partition_by_mesh,
    DropPadding.name: lambda graph: [DropPadding()],
    SimplifyReductions.name: lambda graph: [SimplifyReductions()],
    AgreeOnPredicates.name: lambda graph: [AgreeOnPredicates()],
    FuseKernels.name: lambda graph: [FuseKernels()],
    JoinCollectives.name: lambda graph: [JoinCollectives()],
    JoinKernels.name: lambda graph: [JoinKernels()],
    "fuse-products": lambda graph: [_for_gpus().FuseProducts()],
    CommitLast.name: lambda graph: [CommitLast()],
    Rematerialize.name: lambda graph: [Rematerialize()],
    OverlapCollectives.name: lambda graph: [OverlapCollectives()],
}
"""What each name stands for in `run_passes`, in the order of the pipeline. "partition-by-<mesh dim>" is one dim of
"partition-by-mesh"; two passes take something: "fuse-products=cuda:90" the GPU, "rematerialize=64MiB" the limit."""

_TAKES = {
    "fuse-products": ("a target that is a GPU", "=cuda:90"),
    Rematerialize.name: ("a limit", "=64MiB, or a number of bytes"),
}


def run_passes(graph: Graph, names: Sequence[str], *, progress: Progress | None = None) -> Graph:
    """The graph after some passes, by name (see PASSES). The argument is not changed.

    Raises MonarchError for a name that is no pass, and what the passes raise."""
    graph = graph.copy()
    if graph.parts:
        return _by_parts(graph, lambda part: run_passes(part, names, progress=progress))
    for name in names:
        name, context = _named(name)
        for step in _passes_named(name, graph):
            graph = _run([step], graph, context, progress)
    return graph


def _named(name: str) -> tuple[str, Context]:
    """A pass's name without what it takes, and the context in which it has that."""
    known, _, given = name.partition("=")
    options = CompileOptions(kernels="all")
    if known in _TAKES:
        what, example = _TAKES[known]
        if not given or given == "cpu":
            raise MonarchError(f"pass '{name}' needs {what}", hint=f"write {known}{example}.")
        name = known
        if known == Rematerialize.name:
            options = replace(options, memory_limit=parse_bytes(given, f"the limit of {known}"))
        else:
            options = replace(options, target=given)
    return name, Context(options, templates="all")


def _passes_named(name: str, graph: Graph) -> list[Pass]:
    if name in PASSES:
        return PASSES[name](graph)
    names = [*PASSES, *(f"partition-by-{dim}" for dim in graph.mesh.names)]
    if name in names:
        dim = name.removeprefix("partition-by-")
        if dim in graph.partitioned:
            raise MonarchError(f"the graph is partitioned by '{dim}' already")
        return [PartitionByMesh(dim)]
    raise MonarchError(f"unknown pass {name!r}", hint=f"{did_you_mean(name, names)}Passes are {', '.join(names)}.")


def partition_graph(graph: Graph, options: CompileOptions = DEFAULT) -> Graph:
    """A traced graph, partitioned for its mesh, with its collectives joined; one of several meshes with `fragments`
    that are. The argument is not changed. Raises LayoutError and RuleError."""
    graph = graph.copy()
    if graph.parts:
        return _by_parts(graph, lambda part: _run([*pipeline(part), JoinCollectives()], part, Context(options)))
    return _run([*pipeline(graph), JoinCollectives()], graph, Context(options))


def _by_parts(graph: Graph, run: Callable[[Graph], Graph]) -> Graph:
    """Cut a graph of several meshes, and run passes on each fragment."""
    sent: dict[int, tuple[TensorType, MeshSpec]] = {}
    for name, fragment in cut(graph).fragments.items():
        lay_out_received(fragment, sent)
        if not fragment.mesh.dims:
            drop_constraints(fragment)
        fragment = graph.fragments[name] = run(fragment)
        for number, value in sends_of(fragment).items():
            sent[number] = fragment.type_so_far(value), fragment.mesh
    return graph


def graph_after(graph: Graph, name: str, options: CompileOptions = DEFAULT) -> Graph:
    """The graph as the pipeline has it behind one of its passes. The argument is not changed.

    Raises MonarchError for a name that is none of them."""
    context = Context(options)
    if graph.parts:
        return _by_parts(graph.copy(), lambda part: _after(part, name, context))
    return _after(graph.copy(), name, context)


def _after(graph: Graph, name: str, context: Context) -> Graph:
    steps = [*pipeline(graph), *fusing(context), *lowering(context)]
    names = [step.name for step in steps]
    if name == "partition-by-mesh":
        name = next(entry for entry in reversed(names) if entry.startswith("partition-by-"))
    if name not in names:
        raise MonarchError(f"the plan went through no pass '{name}'", hint=f"its passes are trace, {', '.join(names)}.")
    return _run(steps[: names.index(name) + 1], graph, context)


def compile_graph(
    graph: Graph,
    options: CompileOptions = DEFAULT,
    *,
    report: bool = False,
    progress: Progress | None = None,
    cluster: Cluster | None = None,
    binaries: bool = True,
) -> Plan:
    """The plan of a traced graph. The argument is not changed.

    `report` fills `Plan.report` and `Plan.traced`, for the inspector: it takes some time, and nothing of it runs on a
    worker; its seconds are estimates for `cluster`. With it, and under a memory limit, `Plan.costs` has "peak_bytes". A
    plan for a GPU without `binaries` is to be looked at only. Raises LayoutError and RuleError, and
    MonarchError for options that do not go together and a limit that cannot be kept.
    """
    options.check()
    options = _under_default_dtype(options)
    if graph.regions and (options.target != "cpu" or options.collectives in STARTED):
        raise MonarchError(
            f"'{graph.name}' has branches or loops on values, which run on CPUs alone: not for {options.target}",
            hint="compile it for the CPU: leave out target= and collectives=; or compute both sides, and choose with\n"
            "torch.where(condition, a, b).",
        )
    context = Context(options, report)
    if graph.parts:
        return _compile_parts(graph, context, progress, cluster)
    seconds = context.seconds
    made = _by_few_blocks(graph, context, progress)
    if made is None:
        made = graph.copy()
        if report:
            mark_traced(made)
        made = _run([*pipeline(made), *fusing(context)], made, context, progress)
    made = _run(lowering(context), made, context, progress)
    start = time.perf_counter()
    schedule = Schedule(made)
    plan = plan_of(schedule, options)
    seconds["emit-plan"] = time.perf_counter() - start
    if settings.verify and (found := overlapping(plan)) is not None:
        raise GraphError(f"after emit-plan: instruction {found[1]} overwrites {found[0]}'s result, which is still read")
    if progress is not None:
        progress("emit-plan", seconds["emit-plan"], made)
    plan.costs.update(context.costs)
    if options.target != "cpu":
        check_ops(plan)
        plan = _with_binaries(plan, made, context.templates, seconds, progress) if binaries else plan
    if report:
        start = time.perf_counter()
        reported = build_report(schedule, plan, cluster)
        plan = replace(plan, report=reported, traced=print_graph(graph, paths=True, modules=True))
        plan.costs.update(peak_bytes=peak(plan)[0], several=several_results(reported))
        seconds["report"] = time.perf_counter() - start
    if wanted("plan"):
        say("plan", f"{graph.name}: the plan\n{plan.graph}")
    return replace(plan, costs={**plan.costs, "seconds": seconds})


def _by_few_blocks(graph: Graph, context: Context, progress: Progress | None) -> Graph | None:
    """The traced graph behind the passes of `pipeline` and `fusing`. Both have seen a few of its equal blocks alone;
    where kernels of equal blocks are not equal, only the first have. None where it has not enough blocks that stay
    equal, and where a report says of each value why it is as it is."""
    if context.report or settings.dump or (few := fold(graph)) is None:
        return None
    within = replace(context, costs={}, stands_for=few.stands_for)
    rest = fusing(context)
    try:
        reduced = _run(pipeline(few.folded), few.folded, within, progress)
    except Unsteady:
        return None
    made = _unfolded(few, _run(rest, reduced.copy(), within, progress), context, progress)
    if made is not None:
        rest = []
    elif (made := _unfolded(few, reduced, context, progress)) is None:
        return None
    gathered = [node for node in reduced.calls if "gathered" in node.meta]
    if whole := sum(few.stands_for.get(provenance(node).block, 1) for node in gathered):
        context.costs["whole"] = whole
    return _run(rest, made, context, progress)


def _unfolded(few: Fold, reduced: Graph, context: Context, progress: Progress | None) -> Graph | None:
    start = time.perf_counter()
    made = unfold(few, reduced)
    context.seconds["unfold"] = context.seconds.get("unfold", 0.0) + time.perf_counter() - start
    if made is not None:
        if settings.verify:
            verify(made, after="unfold")
        if progress is not None:
            progress("unfold", context.seconds["unfold"], made)
    return made


def _compile_parts(graph: Graph, context: Context, progress: Progress | None, cluster: Cluster | None) -> Plan:
    """The plan of a graph of several meshes."""
    options = context.options
    if options.target != "cpu" or options.collectives != "monarch":
        raise MonarchError(
            f"'{graph.name}' is of several meshes, and these run on CPUs alone: not for {options.target} over "
            f"{options.collectives}",
            hint="compile it for the CPU: leave out target= and collectives=.",
        )
    made = graph.copy()
    if context.report:
        mark_traced(made)
    plans: dict[str, Plan] = {}

    def lowered(part: Graph) -> Graph:
        within = replace(context, costs={})
        made = _by_few_blocks(part, within, progress)
        if made is None:
            made = _run([*pipeline(part), *fusing(within)], part, within, progress)
        part = _run(lowering(within), made, within, progress)
        schedule = Schedule(part)
        plan = plan_of(schedule, options)
        plan.costs.update(within.costs)
        if settings.verify and (found := overlapping(plan)) is not None:
            raise GraphError(f"{part.name}: instruction {found[1]} overwrites {found[0]}'s result, which is still read")
        if context.report:
            report = build_report(schedule, plan, cluster)
            plan = replace(plan, report=report)
            plan.costs.update(peak_bytes=peak(plan)[0], several=several_results(report))
        plans[part.name] = plan
        return part

    made = _by_parts(made, lowered)
    plan = join_parts(made, [plans[part.name] for part in made.fragments.values()], options)
    if context.report:
        plan = replace(plan, traced=print_graph(graph, paths=True, modules=True))
    if wanted("plan"):
        say("plan", f"{graph.name}: the plan\n{plan.graph}")
    return replace(plan, costs={**plan.costs, "seconds": context.seconds})


def _under_default_dtype(options: CompileOptions) -> CompileOptions:
    return replace(options, dtype=DTYPE_NAMES[torch.get_default_dtype()])


def compile_template(graph: Graph, options: CompileOptions, scope: Scope) -> Template:
    """The plan of a traced graph of named sizes, for workers on CPUs: one for all sizes that meet the conditions that
    the scope has afterwards. The argument is not changed. Raises what `compile_graph` does."""
    options.check()
    options = _under_default_dtype(options)
    context = Context(options)
    if not graph.parts:
        partitioned = graph.copy()
        return _template(_run(pipeline(partitioned), partitioned, context), context, scope)
    whole = _by_parts(graph.copy(), lambda part: _run(pipeline(part), part, context))
    parts = tuple([_template(part, context, scope) for part in whole.fragments.values()])

    def joined(values: Mapping[str, int], plans: list[Plan]) -> Plan:
        return join_parts(whole, plans, options, values)

    def lowered(values: Mapping[str, int]) -> Plan:
        return joined(values, [part.at(values, again=True) for part in parts])

    example = joined(scope.examples, [part.at(scope.examples) for part in parts])
    again = lowered if any(part.lowered is not None for part in parts) else None
    return Template(example, (), scope, again, parts=parts, joined=joined)


def _template(partitioned: Graph, context: Context, scope: Scope) -> Template:
    """The template of a partitioned graph of one mesh."""
    options = context.options
    after = [*fusing(context), *lowering(context)]
    template = template_of(Schedule(_run(after, partitioned.copy(), context)), options, scope)
    made: dict[tuple[tuple[str, int], ...], Graph] = {}

    def fused(values: Mapping[str, int]) -> Graph:
        return _run(after, partitioned.at(values), context)

    def lowered(values: Mapping[str, int]) -> Plan:
        found = made.pop(tuple(values.items()), None)
        return plan_of(Schedule(fused(values) if found is None else found), options)

    if not partitioned.updates:
        return template  # generation has new sizes at each token, and training has the same ones again
    example = fused(scope.examples)
    if not has_sized(example):
        return template
    made[tuple(scope.examples.items())] = example
    return replace(template, lowered=lowered)


def _with_binaries(plan: Plan, graph: Graph, when: str, seconds: dict[str, float], progress: Progress | None) -> Plan:
    """The plan with machine code for its kernels and templates, for a target that is a GPU."""
    start = time.perf_counter()
    gpu = _for_gpus()
    calls = gpu.calls_of(plan, graph, when) if gpu.triton_version() else []
    plan = gpu.with_binaries(
        plan, lambda name, took: progress(f"kernel {name}", took, graph) if progress is not None else None, calls
    )
    if plan.binaries:
        seconds["kernels"] = time.perf_counter() - start
    return plan


def _run(steps: list[Pass], graph: Graph, context: Context, progress: Progress | None = None) -> Graph:
    dump = _Dump(graph)
    seconds = context.seconds
    for step in steps:
        start = time.perf_counter()
        graph = _on_all(step, graph, context)
        seconds[step.name] = seconds.get(step.name, 0.0) + time.perf_counter() - start
        dump.after(step.name, graph)
        if wanted("passes"):
            ops = sum(1 for _ in graph.calls)
            say("passes", f"{graph.name}: {step.name} {seconds[step.name]:.3f} s, {ops} ops")
        if settings.verify:
            verify(graph, after=step.name)
        if progress is not None:
            progress(step.name, seconds[step.name], graph)
    return graph


def _on_all(step: Pass, graph: Graph, context: Context) -> Graph:
    """Run a pass on a graph, and on its regions if it is one for these."""
    if step.regions == "each":
        each_region(graph, lambda region: _on_all(step, region, context))
    return step.run(graph, context)


class _Dump:
    """Writes the graph before and after each pass, with a diff, where MONARCH_DUMP says so."""

    def __init__(self, graph: Graph) -> None:
        self.folder = settings.dump
        self.text = ""
        self.number = 0
        if self.folder:
            self.text = str(graph)
            self._write(Path(self.folder), f"{graph.name}.00-captured.txt", self.text)

    def after(self, name: str, graph: Graph) -> None:
        if not self.folder:
            return
        self.number += 1
        text = str(graph)
        stem = f"{graph.name}.{self.number:02d}-{name}"
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
