"""What there is to choose in a traced graph, and what each choice costs on a cluster.

Calls that are alike, as those of equal layers, are one *kind*, and a kind makes one choice: a strategy of its op's rule
for each mesh dim. A placeholder's strategy is where it is placed: as the user says where he shards it, free where not.
A strategy costs the seconds of what one worker then computes. A value that is read where it is not placed is brought
there once for all that read it so, by the collectives of `cost.cluster.Cluster`: what is gathered for the queries is
there for the keys too. State is brought once forward and once backward, as the partitioner does.

Two things are approximate, for nothing is compiled here. Pointwise ops that follow one another move what goes into and
comes out of all of them, as the kernels do that they become. And a worker holds at most its state, and besides either
what the forward pass keeps for the backward one, or the gradients.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product

from torch import fx

from monarch.compiler import ops
from monarch.compiler.cost.cluster import Cluster
from monarch.compiler.cost.flops import is_attention, matrix_flops
from monarch.compiler.errors import MonarchError, Source
from monarch.compiler.graph import Graph, args_of, provenance
from monarch.compiler.ops.schema import is_view
from monarch.compiler.rules import PARTIAL, Rule, Strategy, rule_for, tensor_operands
from monarch.compiler.rules.call import op_name, result_types
from monarch.compiler.states import StateKey
from monarch.compiler.symbols import has_names
from monarch.compiler.text import parse_layout
from monarch.compiler.types import VARYING, Layout, Placement, TensorType, is_partial

Place = tuple[Placement, ...]
"""A value's placement on each mesh dim of `Problem.mesh_dims`."""

Choice = tuple[Strategy, ...]
"""A strategy for each mesh dim."""

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"

_NUMBER = re.compile(r"(?<![^.\[])\d+(?![^.\]])")


@dataclass(frozen=True)
class Read:
    """A kind reads another: for all of its operands at `position`, or where its own place is (None), which is how a
    state reads its new value.

    `sources`  the nodes of the other kind that are read so
    `result`   which of their results
    """

    source: int
    result: int
    sources: frozenset[fx.Node]
    position: int | None


@dataclass(eq=False)
class Kind:
    """Nodes that are alike.

    `rule`      None for a placeholder, and for what has one strategy
    `leader`    the kind whose choice it shares: an optimizer's state has its parameter's layout
    `fixed`     a placeholder's, or a `layout()`'s, where the user has said it
    `touched`   bytes that its op moves of its operands, by position, and of its results: 0 within a fused kernel
    `is_weight` it shows state and nothing else
    `root`      the kind in whose memory its result lies
    """

    number: int
    nodes: list[fx.Node]
    types: tuple[TensorType | None, ...]
    phase: str
    rule: Rule | None = None
    leader: int = -1
    fixed: Layout | None = None
    is_weight: bool = False
    root: int = -1
    flops: float = 0.0
    touched: tuple[tuple[float, ...], tuple[float, ...]] = ((), ())
    reads: list[Read] = field(default_factory=list)

    @property
    def node(self) -> fx.Node:
        return self.nodes[0]

    @property
    def is_state(self) -> bool:
        return self.node.op == "placeholder" and bool(self.node.meta["kind"] == "state")


@dataclass(frozen=True)
class Delivery:
    """A value of a kind, which these readers take; what is brought to a place for one is there for all.

    `latency`  whether the collective's latency counts: gradients' collectives are joined to a few
    """

    source: int
    result: int
    sources: frozenset[fx.Node]
    latency: bool
    readers: tuple[tuple[int, int | None], ...]


class Problem:
    """The kinds of a traced graph of one mesh, in the graph's order, and their costs on `cluster`.

    Raises MonarchError for a graph whose layouts cannot be searched: of several meshes, with branches or loops on
    values, of named sizes, or with per-worker code.
    """

    def __init__(self, graph: Graph, cluster: Cluster, bound: frozenset[str | int] = frozenset()) -> None:
        _check(graph)
        self.graph, self.cluster, self.bound = graph, cluster, bound
        self.mesh_dims = tuple(name for name, size in graph.mesh.dims if size > 1)
        self.sizes = tuple(graph.mesh.sizes[name] for name in self.mesh_dims)
        self.kinds: list[Kind] = []
        self.kind_of: dict[fx.Node, int] = {}
        self.returned: set[int] = set()
        self._phases: dict[fx.Node, str] = {}
        self._moves: dict[tuple[float, Place, Place, bool], float] = {}
        self._strategies: dict[int, list[list[Strategy]]] = {}
        self._pointwise: dict[fx.Node, bool] = {}
        self._find_kinds()
        self._find_reads()

    # -- what there is to choose -----------------------------------------------------------------------------------

    def strategies(self, number: int, at: int) -> list[Strategy]:
        """All strategies of a kind on mesh dim `at`; the first is the one in which all is replicated, or bound."""
        found = self._strategies.get(number)
        if found is None:
            kind = self.kinds[number]
            found = self._strategies[number] = [self._on_dim(kind, each) for each in range(len(self.mesh_dims))]
        return found[at]

    def _on_dim(self, kind: Kind, at: int) -> list[Strategy]:
        size, name = self.sizes[at], self.mesh_dims[at]
        if kind.fixed is not None:
            place = kind.fixed.placement(name)
            return [Strategy((place,) * len(kind.node.all_input_nodes), (place,), "")]
        if kind.rule is not None:
            return kind.rule.strategies(size)
        (type_,) = kind.types
        assert type_ is not None
        whole = [Strategy((), (None,), "")]
        if kind.node.op != "placeholder" or kind.node.meta["kind"] not in ("state", "input"):
            return whole
        return whole + [
            Strategy((), (dim,), "") for dim, length in enumerate(type_.shape) if length % size == 0 < length
        ]

    def choices(self, number: int, options: Sequence[Sequence[Strategy]]) -> list[Choice]:
        """Every combination of these strategies, of a list for each mesh dim, in which no factor (of a placeholder, no
        dim) is cut into more blocks than it divides into."""
        return [choice for choice in product(*options) if self.is_possible(number, choice)]

    def is_possible(self, number: int, choice: Choice) -> bool:
        """Whether what the mesh dims shard together is divided by all of them."""
        kind, parts = self.kinds[number], dict[object, int]()
        if kind.fixed is not None:
            return True
        for strategy, size in zip(choice, self.sizes, strict=True):
            key: object = strategy.factor if kind.rule is not None else strategy.results[0]
            if key not in ("", PARTIAL, None):
                parts[key] = parts.get(key, 1) * size
        (first, *_) = kind.types
        whole = kind.rule.sizes if kind.rule is not None else dict(enumerate(first.shape if first is not None else ()))
        return all(whole[key] % count == 0 for key, count in parts.items())  # type: ignore[index]

    # -- what it costs ---------------------------------------------------------------------------------------------

    def computing(self, number: int, choice: Choice) -> float:
        """Seconds that one worker computes for all nodes of a kind, and to fetch what the program returns as sums."""
        kind = self.kinds[number]
        if kind.node.op == "placeholder":
            return 0.0
        divided = math.prod(
            size for each, size in zip(choice, self.sizes, strict=True) if each.factor not in ("", PARTIAL)
        )
        reads, makes = kind.touched
        moved = sum(
            nbytes / self.parts(tuple(each.operands[at] for each in choice))
            for at, nbytes in enumerate(reads)
            if nbytes
        )
        moved += sum(nbytes / self.parts(self.place(choice, at)) for at, nbytes in enumerate(makes) if nbytes)
        machine = self.cluster.machine
        dtype = next((type_.dtype_name for type_ in kind.types if type_ is not None), None)
        rate = machine.rate(dtype) if dtype is not None else 1.0
        seconds = len(kind.nodes) * max(kind.flops / divided / rate, moved / machine.memory)
        if number in self.returned and any(map(is_partial, place := self.place(choice, 0))):
            whole = tuple(None if is_partial(each) else each for each in place)
            seconds += self.moving(self.nbytes(number, 0), place, whole)
        return seconds

    @staticmethod
    def place(choice: Choice, result: int) -> Place:
        """Where a choice puts a result."""
        return tuple(each.results[result] for each in choice)

    def parts(self, place: Place) -> int:
        """How many blocks a value has there."""
        return math.prod(size for each, size in zip(place, self.sizes, strict=True) if isinstance(each, int))

    def nbytes(self, number: int, result: int) -> int:
        """The bytes of a whole value."""
        type_ = self.kinds[number].types[result]
        return 0 if type_ is None else type_.nbytes

    def moving(self, nbytes: float, source: Place, target: Place, latency: bool = True) -> float:
        """Seconds to bring a value of so many bytes in all from one place to another; infinite where none does."""
        key = nbytes, source, target, latency
        found = self._moves.get(key)
        if found is None:
            found = self._moves[key] = self._moving(nbytes, source, target, latency)
        return found

    def _moving(self, nbytes: float, source: Place, target: Place, latency: bool) -> float:
        """Blocks are cut first, then sums reduced, and blocks gathered last, so that the least is moved."""
        now, seconds = list(source), 0.0
        todo: dict[str, list[int]] = {}
        for at, (has, wants) in enumerate(zip(source, target, strict=True)):
            if has != wants:
                if (kind := _collective(has, wants)) is None:
                    return math.inf
                todo.setdefault(kind, []).append(at)
        for kind in ("shard", "first_only", "reduce_scatter", "all_to_all", "all_reduce", "all_gather"):
            dims = todo.get(kind, [])
            for group in [dims] if kind == "all_reduce" and dims else [[at] for at in dims]:
                before = nbytes / self.parts(tuple(now))
                for at in group:
                    now[at] = target[at]
                after = nbytes / self.parts(tuple(now))
                if kind in ("shard", "first_only"):
                    machine = self.cluster.machine
                    seconds += machine.start + (before if kind == "first_only" else 2 * after) / machine.memory
                    continue
                sent = after if kind == "all_gather" else before
                fans = self.cluster.fans(self.graph.mesh, [self.mesh_dims[at] for at in group])
                seconds += self.cluster.collective_seconds(kind, sent, fans)
                if not latency:
                    seconds -= self.cluster.collective_seconds(kind, 0.0, fans)
        return seconds

    @cached_property
    def deliveries(self) -> list[Delivery]:
        """Every value that is read, once for each set of readers that share what is brought."""
        grouped: dict[tuple[int, int, frozenset[fx.Node], str], dict[tuple[int, int | None], None]] = {}
        for kind in self.kinds:
            for read in kind.reads:
                source = self.kinds[read.source]
                phase = kind.phase if read.position is not None else UPDATE
                apart = phase if source.is_weight else UPDATE * (phase == UPDATE)
                key = read.source, read.result, read.sources, apart
                grouped.setdefault(key, {})[kind.number, read.position] = None
        return [
            Delivery(source, result, sources, apart != UPDATE, tuple(readers))
            for (source, result, sources, apart), readers in grouped.items()
        ]

    def wanted(self, reader: tuple[int, int | None], choice: Choice) -> Place:
        """Where a reader that makes this choice wants what it reads."""
        _, position = reader
        return self.place(choice, 0) if position is None else tuple(each.operands[position] for each in choice)

    def cost(self, chosen: Mapping[int, Choice]) -> float:
        """Seconds of a step in which each kind does as it has chosen, but for what no choice changes."""
        seconds = sum(self.computing(number, choice) for number, choice in chosen.items())
        for each in self.deliveries:
            source = self.place(chosen[each.source], each.result)
            targets = {self.wanted(reader, chosen[reader[0]]) for reader in each.readers}
            seconds += sum(self.delivering(each, source, target) for target in targets)
        return seconds

    def delivering(self, each: Delivery, source: Place, target: Place) -> float:
        """Seconds to bring all values of a delivery from one place to another. An input is given in blocks, or each
        worker computes with all of it: the partitioner divides no work that no layout asks it to."""
        kind = self.kinds[each.source]
        if kind.fixed is None and kind.node.op == "placeholder" and kind.node.meta["kind"] == "input":
            if any(has is None and wants is not None for has, wants in zip(source, target, strict=True)):
                return math.inf
        return len(each.sources) * self.moving(self.nbytes(each.source, each.result), source, target, each.latency)

    # -- memory ----------------------------------------------------------------------------------------------------

    def state_bytes(self, number: int, choice: Choice) -> float:
        """What a worker holds of a placeholder all the time."""
        kind = self.kinds[number]
        if kind.node.op != "placeholder":
            return 0.0
        return len(kind.nodes) * self.nbytes(number, 0) / self.parts(self.place(choice, 0))

    def gradient_bytes(self, number: int, choice: Choice) -> float:
        """What the gradients of a parameter that the step replaces take, where they lie as it does."""
        kind = self.kinds[number]
        if not kind.is_state or StateKey.of(str(kind.node.meta["label"])).role:
            return 0.0
        return self.state_bytes(number, choice) if any(read.position is None for read in kind.reads) else 0.0

    @cached_property
    def kept(self) -> dict[int, list[Delivery]]:
        """What the forward pass makes and the backward one reads, by the kind in whose memory it lies."""
        found: dict[int, list[Delivery]] = {}
        for each in self.deliveries:
            source = self.kinds[each.source]
            later = tuple(reader for reader in each.readers if self.kinds[reader[0]].phase == BACKWARD)
            if source.phase == FORWARD and not source.is_weight and source.node.op != "placeholder" and later:
                found.setdefault(source.root, []).append(
                    Delivery(each.source, each.result, each.sources, each.latency, later)
                )
        return found

    def memory(self, chosen: Mapping[int, Choice]) -> float:
        """The most bytes that a worker holds, about."""
        state = sum(self.state_bytes(number, choice) for number, choice in chosen.items())
        gradients = sum(self.gradient_bytes(number, choice) for number, choice in chosen.items())
        kept = 0.0
        for deliveries in self.kept.values():
            held: set[tuple[int, float]] = set()
            for each in deliveries:
                for reader in each.readers:
                    parts = self.parts(self.wanted(reader, chosen[reader[0]]))
                    nbytes = len(each.sources) * self.nbytes(each.source, each.result) / parts
                    held.add((parts, nbytes))
            kept += sum(nbytes for _, nbytes in held)
        return state + max(gradients, kept)

    # -- reading the graph -----------------------------------------------------------------------------------------

    def _find_kinds(self) -> None:
        found: dict[object, Kind] = {}
        counts: dict[object, int] = {}
        places: dict[fx.Node, str] = {}
        self._find_phases()
        for node in self.graph.fx.nodes:
            if node.op == "output" or node.target is operator.getitem:
                places[node] = next((places[each] for each in node.all_input_nodes), "")
                continue
            rule, where = self._rule(node), _where(node, places)
            key: tuple[object, ...] = self._key(node, rule)
            if node.op == "call_function":
                at = counts[where, key] = counts.get((where, key), 0) + 1
                key = (_NUMBER.sub("*", where), at, *key)
            kind = found.get(key)
            if kind is None:
                types = (node.meta["type"],) if node.op == "placeholder" else tuple(result_types(node))
                kind = found[key] = Kind(len(self.kinds), [], types, self._phases[node], rule)
                self.kinds.append(kind)
                self._describe(kind, node)
            kind.nodes.append(node)
            self.kind_of[node] = kind.number
        owners = {kind.node.meta["label"]: kind for kind in self.kinds if kind.is_state}
        for kind in self.kinds:
            kind.leader = kind.number
            if kind.is_state and kind.fixed is None:
                other = owners.get(StateKey.of(str(kind.node.meta["label"])).parameter, kind)
                if other.fixed is None and other.types[0].shape == kind.types[0].shape:  # type: ignore[union-attr]
                    kind.leader = other.number

    def _find_phases(self) -> None:
        for node in self.graph.fx.nodes:
            before = {self._phases[each] for each in node.all_input_nodes}
            if node.op == "call_function" and provenance(node).backward:
                self._phases[node] = BACKWARD
            else:
                self._phases[node] = UPDATE if before & {BACKWARD, UPDATE} and node.op != "output" else FORWARD

    def _rule(self, node: fx.Node) -> Rule | None:
        if node.op != "call_function" or node.target in (ops.constrain, operator.getitem):
            return None
        return rule_for(node, _shape_of)

    def _key(self, node: fx.Node, rule: Rule | None) -> tuple[object, ...]:
        """What nodes that are alike have in common, but for the modules' numbers."""
        if node.op == "placeholder":
            label = node.meta["label"]
            name = _NUMBER.sub("*", label) if isinstance(label, str) else label
            return node.meta["kind"], name, str(node.meta["type"]), label in self.bound
        operands = tuple(str(each.meta["type"]) for each in tensor_operands(node))
        plain = args_of(node)[1] if node.target is ops.constrain else ""
        strategies = () if rule is None else tuple(tuple(rule.strategies(size)) for size in self.sizes)
        return op_name(node.target), plain, self._phases[node], str(node.meta["type"]), operands, strategies

    def _describe(self, kind: Kind, node: fx.Node) -> None:
        if node.op == "placeholder":
            layout = node.meta["type"].layout
            if not layout.is_replicated or node.meta["label"] in self.bound:
                kind.fixed = layout
            kind.is_weight, kind.root = node.meta["kind"] == "state", kind.number
            return
        if node.target is ops.constrain:
            kind.fixed = parse_layout(args_of(node)[1])
        operands = tensor_operands(node)
        view = is_view(node.target) or node.target is ops.constrain
        first = self.kinds[self._source(operands[0])[0]] if operands else None
        kind.is_weight = view and first is not None and first.is_weight
        kind.root = first.root if view and first is not None else kind.number
        if view:
            kind.touched = (0.0,) * len(operands), (0.0,) * len(kind.types)
            return
        shapes = [each.meta["type"].shape for each in operands]
        made = [() if each is None else each.shape for each in kind.types]
        packet = getattr(node.target, "overloadpacket", node.target)
        kind.flops = matrix_flops(packet, shapes, made) if shapes and made else 0.0
        if is_attention(packet):
            kind.flops /= self.cluster.machine.attention  # it takes as long as so many of a product
        inside = self._is_pointwise(node)
        kind.touched = (
            tuple(
                [0.0 if inside and self._is_pointwise(each) else float(each.meta["type"].nbytes) for each in operands]
            ),
            tuple(
                [0.0 if inside and self._stays(node) else float(each.nbytes) if each else 0.0 for each in kind.types]
            ),
        )

    def _stays(self, node: fx.Node) -> bool:
        """Whether a pointwise result is read by pointwise ops of its own phase alone, which are one kernel with it."""
        return bool(node.users) and all(
            self._is_pointwise(user) and self._phases[user] == self._phases[node] for user in node.users
        )

    def _is_pointwise(self, node: fx.Node) -> bool:
        """Whether an op computes each element of its result from the operands' elements at its place, or shows such."""
        found = self._pointwise.get(node)
        if found is None:
            found = self._pointwise[node] = self._find_pointwise(node)
        return found

    def _find_pointwise(self, node: fx.Node) -> bool:
        rule, operands = self._rule(node), tensor_operands(node)
        if rule is None or not operands or not isinstance(type_ := node.meta["type"], TensorType):
            return False
        if is_view(node.target):
            return self._is_pointwise(operands[0])
        alike = all(each.meta["type"].shape in (type_.shape, ()) for each in operands)
        return alike and not rule.whole and not rule.reductions

    def _source(self, node: fx.Node) -> tuple[int, int]:
        """The kind that makes a value, and which of its results it is."""
        if node.target is operator.getitem:
            producer, index = args_of(node)
            return self.kind_of[producer], index
        return self.kind_of[node], 0

    def _find_reads(self) -> None:
        readers: dict[tuple[int, int, int, int | None], set[fx.Node]] = {}

        def add(value: fx.Node, reader: int, position: int | None) -> None:
            source, result = self._source(value)
            made = args_of(value)[0] if value.target is operator.getitem else value
            readers.setdefault((reader, source, result, position), set()).add(made)

        for node, number in self.kind_of.items():
            if node.op == "call_function":
                for position, operand in enumerate(tensor_operands(node)):
                    add(operand, number, position)
        states = {node.meta["label"]: node for node in self.graph.placeholders if node.meta["kind"] == "state"}
        for label, value in self.graph.updates.items():
            if label in states and value is not states[label]:
                add(value, self.kind_of[states[label]], None)
        for (reader, source, result, at), sources in readers.items():
            self.kinds[reader].reads.append(Read(source, result, frozenset(sources), at))
        self.returned = {
            self._source(node)[0] for node in self.graph.returns if node is not None and node.op == "call_function"
        }

    def free(self) -> Iterator[Kind]:
        """The placeholders whose layouts are to be found."""
        for kind in self.kinds:
            if kind.node.op == "placeholder" and kind.node.meta["kind"] in ("state", "input") and kind.fixed is None:
                yield kind


def _collective(source: Placement, target: Placement) -> str | None:
    """What brings a value from one placement on a mesh dim to another; None where nothing does."""
    if VARYING in (source, target):
        return None
    if source is None:
        return "shard" if isinstance(target, int) else "first_only" if target == "sum" else None
    if is_partial(source):
        return "all_reduce" if target is None else "reduce_scatter" if isinstance(target, int) else None
    if is_partial(target):
        return None
    return "all_gather" if target is None else "all_to_all"


def _where(node: fx.Node, places: dict[fx.Node, str]) -> str:
    """The module that an op belongs to, or the parameter: an optimizer's ops, which no module runs, go by the first
    state that they come from."""
    found = provenance(node).module
    if node.op == "placeholder":
        found = StateKey.of(str(node.meta["label"])).parameter if node.meta["kind"] == "state" else ""
    places[node] = found or next((place for each in node.all_input_nodes if (place := places[each])), "")
    return places[node]


def _shape_of(node: fx.Node) -> object:
    type_ = node.meta["type"]
    return type_.shape if isinstance(type_, TensorType) else tuple(each.shape if each else () for each in type_)


def _check(graph: Graph) -> None:
    """Raise MonarchError for what the search does not know, at the first line that has it."""
    for node in graph.fx.nodes:
        types = node.meta.get("type")
        shapes = [each.shape for each in (types if isinstance(types, tuple) else (types,)) if each is not None]
        if node.target in ops.WITH_REGIONS:
            what = "branches or loops on values: how often each part runs is not known before"
        elif node.target in (ops.to_varying, ops.from_varying, ops.axis_index, ops.permute):
            what = "has per-worker code, which fixes each worker's computation"
        elif any(map(has_names, shapes)):
            what = "has sizes that are named, and known when it is called"
        elif node.target is ops.transfer:
            what = "is of several meshes"
        else:
            continue
        raise _not_searched(graph, what, provenance(node).source)
    if graph.parts:
        raise _not_searched(graph, "is of several meshes", None)


def _not_searched(graph: Graph, what: str, source: Source | None) -> MonarchError:
    return MonarchError(
        f"layouts cannot be found for '{graph.name}', which {what}",
        hint="give its parameters and inputs layouts (monarch.stdlib.parallel has the usual ones), and compare some: "
        "monarchc sweep --layout.\nWhat can be a program of its own, without this line, can be searched.",
        source=source,
    )
