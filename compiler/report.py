"""Build a plan's report: every field of every value, from the partitioned graph and the plan that was made of it."""

from __future__ import annotations

import linecache
import operator
import re
from collections.abc import Iterator

from torch import fx

from monarch.compiler import ops
from monarch.compiler.cost.cluster import Cluster, cluster_of
from monarch.compiler.cost.work import Work, node_work
from monarch.compiler.errors import GraphError
from monarch.compiler.graph import Graph, args_of, provenance
from monarch.compiler.names import UnknownOp
from monarch.compiler.partition.decide import Decided
from monarch.compiler.plan.plan import Plan
from monarch.compiler.plan.report import Decision, Report, ReportedValue
from monarch.compiler.schedule.footprint import footprint
from monarch.compiler.schedule.schedule import Schedule
from monarch.compiler.states import StateKey
from monarch.compiler.text import find_op, op_name, parse_graph, print_call
from monarch.compiler.types import TensorType

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


def traced_graph(plan: Plan) -> Graph:
    """The traced graph that a plan was made of, ready to be compiled again. Raises GraphError where it was not kept."""
    if not plan.traced:
        raise GraphError(
            f"plan '{plan.name}' was saved without its traced graph",
            hint="compile it with program.compile() or monarchc compile.",
        )
    graph = parse_graph(plan.traced)
    labels = {str(p.meta["label"]) for p in graph.placeholders if p.meta["kind"] == "constant"}
    graph.constants = {label: tensor for label, tensor in plan.constants.items() if label in labels}
    return graph


def build_report(schedule: Schedule, plan: Plan, cluster: Cluster | None = None) -> Report:
    """The report of a plan and the schedule that it was written from, with estimates for `cluster` (one host of the
    plan's target where none is given). With `report` in their context the passes leave in the graph what they know."""
    return _Builder(schedule, plan, (cluster or cluster_of(plan.target)).shared(plan.mesh.workers)).run()


def several_results(report: Report) -> list[str]:
    """The ops of a report's kernels that have several results: each is a value there."""
    return [op for op in sorted({each.op for each in report.values if each.kernel >= 0}) if _has_several_results(op)]


def _has_several_results(op: str) -> bool:
    try:
        schema = getattr(find_op(op), "_schema", None)
    except UnknownOp:  # a plan's report may name any
        return False
    return schema is not None and len(schema.returns) > 1


class _Builder:
    def __init__(self, schedule: Schedule, plan: Plan, cluster: Cluster) -> None:
        self.cluster = cluster
        graph = self.graph = schedule.graph
        self.plan = plan
        self.nodes = list(_in_order(graph))
        self.number = {node: i for i, node in enumerate(self.nodes)}
        made_by = [i for i, instruction in enumerate(plan.instructions) if instruction.op != "commit"]
        self.instruction = dict(zip(graph.calls, made_by, strict=True))
        self.keys: dict[object, int] = {}
        for node, number in self.number.items():
            for key in (node.meta.get("key"), *node.meta.get("stands_for", ())):
                if key is not None:
                    self.keys.setdefault(key, number)
        self.phases = _phases(graph)
        self.owners = _owners(graph)
        self.kernels: dict[str, fx.Node] = {}
        """The kernel that computes a value, by the value's name, which it has before fusion and after."""
        self.before: dict[str, fx.Node] = {}
        """The op that a value of a kernel was, by name."""
        self.named = {node.name: number for node, number in self.number.items()}
        self.now: dict[str, str] = {}
        """What a sentence says in place of a value that went with fusion, by name."""
        fused = [node for node in graph.calls if provenance(node).fused]
        for kernel in fused:
            for node in provenance(kernel).fused:
                self.kernels[node.name], self.before[node.name] = kernel, node
        if fused:
            # Phases and owners follow the flow of single values, which a kernel ties together.
            unfused = Graph(graph.name, graph.mesh, provenance(fused[0]).fused[0].graph, graph.partitioned)
            phases, owners = _phases(unfused), _owners(unfused)
            self.stand_in(unfused)
            by_name = {node.name: node for node in unfused.calls}
            for node in unfused.calls:
                self.phases[node], self.owners[node] = phases[node], owners.get(node, "")
            for node in graph.calls:
                if (before := by_name.get(node.name)) is not None:
                    self.phases[node], self.owners[node] = phases[before], owners.get(before, "")
        self.shares = {kernel: self.share(kernel) for kernel in fused}
        self.memory = footprint(schedule)

    def run(self) -> Report:
        values = tuple([self.placeholder(node) for node in self.graph.placeholders])
        calls = [node for node in self.nodes if node.op == "call_function"]
        values += tuple([self.inside(node) if self.is_inside(node) else self.call(node) for node in calls])
        return Report(values, tuple(_line(source.file, source.line) for source in self.plan.sources))

    def placeholder(self, node: fx.Node) -> ReportedValue:
        kind, label = node.meta["kind"], node.meta["label"]
        slots = {(spec.kind, spec.label): spec.slot for spec in self.plan.inputs}
        slot = self.plan.constant_slots[str(label)] if kind == "constant" else slots[kind, label]
        return ReportedValue(
            name=node.name,
            op=kind,
            call=print_call(node),
            reads=(),
            types=_types(node),
            module=StateKey.of(str(label)).module if kind == "state" else "",
            traced=node.meta.get("traced", ""),
            decisions=self.decisions(node),
            allocates=self.memory.inputs[slot],
        )

    def call(self, node: fx.Node) -> ReportedValue:
        at = self.instruction[node]
        instruction = self.plan.instructions[at]
        frees = self.memory.gives[at]
        if at and self.plan.instructions[at - 1].op == "commit":
            frees += self.memory.gives[at - 1]  # nothing is taken in between, so the peak is right too
        work = self.work(node, self.memory.takes[at])
        kernel = self.kernels.get(node.name)
        why = self.renamed(node.meta.get("reason") or node.meta.get("why") or "", node.meta.get("named", ()))
        op = op_name(node.target) or str(node.target)
        if kernel is not None:
            op, text = self.words(self.before[node.name])
            why = f"{text}, computed in a kernel" + (f"; {why}" if why else "")
        dims = tuple(args_of(node)[1]) if ops.is_collective(node.target) else ()
        phase = self.phases[node]
        return ReportedValue(
            name=node.name,
            op=op,
            call=_call(node),
            reads=tuple(dict.fromkeys(self.number[operand] for operand in node.all_input_nodes)),
            types=_types(node),
            instruction=at,
            source=instruction.source,
            module=provenance(node).module or (self.owners.get(node, "") if phase == UPDATE else ""),
            phase=phase,
            traced=node.meta.get("traced", ""),
            why=why,
            decisions=self.decisions(node),
            mesh_dims=dims,
            sent=work.sent,
            flops=work.flops,
            moved=work.moved,
            allocates=self.memory.takes[at],
            frees=frees,
            seconds=work.seconds,
            kernel=-1 if kernel is None else self.number[kernel],
            within=work.within,
            stage=self.stage(node),
        )

    def stand_in(self, unfused: Graph) -> None:
        """For the values that went with fusion: what speaks of a view means what it is of, and what speaks of an op
        with several results means one of them."""
        stands: dict[fx.Node, int] = {}
        for node in unfused.fx.nodes:
            number = self.named.get(node.name)
            if number is None and node.all_input_nodes:
                number = stands.get(node.all_input_nodes[0])
            result = next((self.named[user.name] for user in node.users if user.name in self.before), None)
            if node.name not in self.named and isinstance(node.meta.get("type"), tuple) and result is not None:
                number = result
            if number is None:
                if node.op == "call_function":
                    self.now[node.name] = print_call(node)  # a constant
                continue
            stands[node] = number
            self.now[node.name] = f"%{self.nodes[number].name}"
            for key in (node.meta.get("key"), *node.meta.get("stands_for", ())):
                if key is not None:
                    self.keys.setdefault(key, number)

    # -- what kernels compute -----------------------------------------------------------------------------------------

    def is_inside(self, node: fx.Node) -> bool:
        """Whether a node is one that a kernel stands for, and that nobody takes out of it."""
        return self.before.get(node.name) is node

    def inside(self, node: fx.Node) -> ReportedValue:
        kernel = self.kernels[node.name]
        work = self.shares[kernel][node.name]
        source = provenance(node).source
        op, text = self.words(node)
        return ReportedValue(
            name=node.name,
            op=op,
            call=text,
            reads=self.reads(node),
            types=_types(node),
            instruction=self.instruction[kernel],
            source=-1 if source is None else self.plan.sources.index(source),
            module=provenance(node).module or (self.owners.get(node, "") if self.phases[node] == UPDATE else ""),
            phase=self.phases[node],
            traced=node.meta.get("traced", ""),
            why=self.renamed(node.meta.get("reason") or node.meta.get("why") or "", node.meta.get("named", ())),
            decisions=self.decisions(node),
            flops=work.flops,
            moved=work.moved,
            seconds=work.seconds,
            kernel=self.number[kernel],
            stage=self.stage(node),
        )

    def stage(self, node: fx.Node) -> int:
        """The stage of a pipeline that an op belongs to; of what a kernel gives, that of the op that made it."""
        found = provenance(self.before.get(node.name, node)).stage
        return -1 if found is None else found

    def words(self, node: fx.Node) -> tuple[str, str]:
        """The name and the call of an op that a kernel stands for."""
        made = _made_by(node)
        call = re.sub(r"%(\w+)", lambda match: self.now.get(match[1], match[0]), print_call(made))
        return op_name(made.target) or str(made.target), call if made is node else f"{call}[{args_of(node)[1]}]"

    def reads(self, node: fx.Node) -> tuple[int, ...]:
        """What an op in a kernel reads, by number; what is in no graph any more (a view that kernels look through) by
        what it was of. What the same kernel gives to others stands behind it, and is left out."""
        found: dict[int, None] = {}
        pending = list(reversed(node.all_input_nodes))
        while pending:
            operand = pending.pop()
            number = self.named.get(operand.name)
            if number is None:
                pending += reversed(operand.all_input_nodes)
            elif number < self.named[node.name]:
                found[number] = None
        return tuple(found)

    def share(self, kernel: fx.Node) -> dict[str, Work]:
        """Operations, bytes and seconds of each op in a kernel. The kernel's own bytes and time are shared out by what
        the ops would move if each were run by itself."""
        whole = node_work(self.graph, kernel, self.cluster, 1)
        apart = {}
        for node in provenance(kernel).fused:
            made = _made_by(node)
            work = node_work(self.graph, made, self.cluster, 1)
            parts = 1 if made is node else len(made.users)
            apart[node.name] = work.flops / parts, work.moved // parts
        total = sum(each[1] for each in apart.values()) or 1
        return {
            name: Work(flops, whole.moved * own // total, whole.seconds * own / total)
            for name, (flops, own) in apart.items()
        }

    def work(self, node: fx.Node, takes: int) -> Work:
        if provenance(node).fused:
            return Work()
        if (kernel := self.kernels.get(node.name)) is not None:
            return self.shares[kernel][node.name]
        return node_work(self.graph, node, self.cluster, takes)

    def decisions(self, node: fx.Node) -> tuple[Decision, ...]:
        found = []
        before = self.before.get(node.name)
        # One of several results has the layout that the op gives it; in a kernel no other value says which.
        told = node if before is None or provenance(node).fused else _made_by(before)
        for decided in told.meta.get("decisions", ()):
            assert isinstance(decided, Decided)
            own = self.named[node.name]
            causes = [self.keys[key] for key in decided.causes if key in self.keys]
            found.append(
                Decision(
                    decided.mesh_dim,
                    decided.rule,
                    decided.factor,
                    self.renamed(decided.why, decided.named),
                    tuple(dict.fromkeys(cause for cause in causes if cause != own)),
                    decided.alternatives,
                    decided.exact,
                )
            )
        return tuple(found)

    def renamed(self, text: str, named: tuple[tuple[str, object], ...]) -> str:
        """A sentence with its values called by the names that they have now."""
        now = {name: self.nodes[self.keys[key]].name for name, key in named if key in self.keys}
        return re.sub(r"%(\w+)", lambda match: f"%{now.get(match[1], match[1])}", text) if now else text


def _in_order(graph: Graph) -> Iterator[fx.Node]:
    """Every value, as the report has them: those that a kernel keeps to itself right before it."""
    yield from graph.placeholders
    calls = list(graph.calls)
    names = {node.name for node in calls}
    for node in calls:
        yield from (each for each in provenance(node).fused if each.name not in names)
        yield node


def _made_by(node: fx.Node) -> fx.Node:
    """The op whose value a node of a kernel is: for one of several results, the op that gives them."""
    return node.all_input_nodes[0] if node.target is operator.getitem else node


def _call(node: fx.Node) -> str:
    """A call as the graph's text has it; a kernel's text stands elsewhere."""
    if node.target is ops.kernel:
        return f"kernel(…), of {len(provenance(node).fused)} ops" if provenance(node).fused else "kernel(…), made again"
    return print_call(node)


def _types(node: fx.Node) -> tuple[TensorType | None, ...]:
    type_ = node.meta["type"]
    return type_ if isinstance(type_, tuple) else (type_,)


def _line(file: str, line: int) -> str:
    return linecache.getline(file, line).rstrip("\n")


# -- phases and owners -------------------------------------------------------------------------------------------------


def _phases(graph: Graph) -> dict[fx.Node, str]:
    """Backward is what autograd ran; update what depends on it and is needed by none of it, and what only serves that
    (an optimizer's bias correction). A gradient's sum over the workers is backward, whoever takes it."""
    after: dict[fx.Node, bool] = {}
    before: dict[fx.Node, bool] = {}
    calls = list(graph.calls)
    for node in calls:
        after[node] = any(provenance(each).backward or after.get(each, False) for each in node.all_input_nodes)
    for node in reversed(calls):
        before[node] = any(provenance(user).backward or before.get(user, False) for user in node.users)
    phases: dict[fx.Node, str] = {}
    for node in calls:
        backward = provenance(node).backward or (after[node] and before[node])
        phases[node] = BACKWARD if backward else UPDATE if after[node] else FORWARD
    returned = set(graph.returns)
    for node in reversed(calls):
        users = [phases[user] for user in node.users if user.op != "output"]
        if phases[node] == FORWARD and node not in returned and users and set(users) == {UPDATE}:
            phases[node] = UPDATE
    for node in calls:
        if "traced" in node.meta or not after[node]:
            continue
        reduces = node.target in (ops.all_reduce, ops.reduce_scatter)
        element = op_name(node.target) == "getitem"
        if (reduces or element) and any(phases.get(each) == BACKWARD for each in node.all_input_nodes):
            phases[node] = BACKWARD
    return phases


def _owners(graph: Graph) -> dict[fx.Node, str]:
    """For each value that flows into new state, the module of that state; "" where it flows into several modules'."""
    owners: dict[fx.Node, str] = {}

    def flows(node: fx.Node, module: str) -> None:
        owners[node] = module if owners.get(node, module) == module else ""

    for label, node in graph.updates.items():
        flows(node, StateKey.of(label).module)
    for node in reversed(list(graph.calls)):
        if node in owners:
            for operand in node.all_input_nodes:
                flows(operand, owners[node])
    return owners
