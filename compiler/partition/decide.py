"""Write down, at each value, the choice for a mesh dim and its reasons, for a report."""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from monarch.compiler import ops
from monarch.compiler.graph import Graph, args_of, provenance
from monarch.compiler.partition.choose import Choice
from monarch.compiler.partition.options import Alternative, Options
from monarch.compiler.partition.varying import begins, ends
from monarch.compiler.plan.report import FOUND_LINE, LAYOUT_LINE
from monarch.compiler.plan.report import Alternative as Reported
from monarch.compiler.rules import PARTIAL, Strategy
from monarch.compiler.types import Layout, Placement, TensorType


@dataclass(frozen=True)
class Decided:
    """A `plan.report.Decision` whose causes are still the keys of values (`node.meta["key"]`). `named` says which
    values the names in `why` stand for: later passes may name them anew."""

    mesh_dim: str
    rule: str
    factor: str
    why: str
    causes: tuple[object, ...] = ()
    alternatives: tuple[Reported, ...] = ()
    exact: bool = True
    named: tuple[tuple[str, object], ...] = ()


def mark_traced(graph: Graph) -> None:
    """Name every value of a traced graph, so that what becomes of it is known through the passes."""
    for node in graph.fx.nodes:
        if node.op != "output":
            node.meta["traced"] = node.name


def mark_keys(graph: Graph) -> None:
    """Give each value that has none a key of its own."""
    for node in graph.fx.nodes:
        node.meta.setdefault("key", object())


def decide(options: Options, choice: Choice) -> None:
    """Append the choice for one mesh dim to the decisions of each value that the program has (not to those that the
    compiler added)."""
    mark_keys(options.graph)
    decider = _Decider(options, choice)
    for node in options.graph.fx.nodes:
        if node.op == "placeholder":
            _append(node, decider.placeholder(node))
        elif node.op == "call_function" and "traced" in node.meta:
            _append(node, decider.call(node))


def decide_alone(graph: Graph, mesh_dim: str) -> None:
    """The same for a mesh dim of one worker."""
    for node in graph.fx.nodes:
        if node.op != "output" and (node.op == "placeholder" or "traced" in node.meta):
            _append(node, Decided(mesh_dim, "", "", f"'{mesh_dim}' has one worker, which holds the whole value"))


def pass_on(node: fx.Node, value: fx.Node) -> None:
    """`value` takes the place of the layout() `node`: causes that name it mean the value now. Where `value` is the
    program's own, and lay so already, its decisions tell that the user said so."""
    if "key" not in node.meta:
        return
    value.meta["stands_for"] = (*value.meta.get("stands_for", ()), node.meta["key"], *node.meta.get("stands_for", ()))
    if "traced" not in value.meta:
        value.meta["decisions"] = node.meta.get("decisions", ())
        return
    if value.target is ops.recv:
        return  # it says itself why it is so
    said = f"{FOUND_LINE}say" if node.meta.get("found") else f"{LAYOUT_LINE}{provenance(node).source} says"
    value.meta["decisions"] = tuple(
        replace(own, why=f"{own.why}; {said} so too") if bound.why.startswith((LAYOUT_LINE, FOUND_LINE)) else own
        for own, bound in zip(value.meta.get("decisions", ()), node.meta.get("decisions", ()), strict=True)
    )


def _append(node: fx.Node, decided: Decided) -> None:
    node.meta["decisions"] = (*node.meta.get("decisions", ()), decided)


class _Decider:
    def __init__(self, options: Options, choice: Choice) -> None:
        self.options = options
        self.choice = choice
        self.dim = options.mesh_dim
        self._texts: dict[Any, str] = {}

    def placeholder(self, node: fx.Node) -> Decided:
        kind, label, type_ = node.meta["kind"], node.meta["label"], node.meta["type"]
        if kind in ("input", "state"):
            where = f"the program gives {kind} {label!r} the layout {type_.layout}"
            if type_.layout.placement(self.dim) is None:
                where = f"the layout of {kind} {label!r}, {type_.layout}, does not name '{self.dim}'"
            if node.meta.get("found"):
                where = f"{FOUND_LINE}give {kind} {label!r} the layout {type_.layout}"
        else:
            where = f"every worker holds the whole {kind}"
        return Decided(self.dim, "", "", where)

    def call(self, node: fx.Node) -> Decided:
        chosen = self.choice.alternatives[node]
        others = self.alternatives(node, chosen)
        exact = self.choice.exact
        if node.target is ops.constrain:
            if node.meta.get("found"):
                return Decided(self.dim, "", "", f"{FOUND_LINE}give it {args_of(node)[1]} where it is read")
            return Decided(self.dim, "", "", f"{LAYOUT_LINE}{provenance(node).source} says {args_of(node)[1]}")
        if node.target is ops.recv:
            why = node.meta.get("received", "another mesh sends it, and it arrives in the layout that its readers need")
            return Decided(self.dim, "", "", why, (), others, exact)
        if node.target is operator.getitem:
            (producer,) = self.options.operands[node]
            why = f"%{producer.name} produces it in this layout"
            return Decided(self.dim, "", "", why, (_key(producer),), others, exact, ((producer.name, _key(producer)),))
        strategy = chosen.strategy
        operands = self.options.operands[node]
        if (words := self.per_worker(node)) is not None:
            causes = [operand for operand in operands if operand in self.options.varying] or operands
            keys = tuple(dict.fromkeys(map(_key, causes)))
            named = tuple((_origin(cause).name, _key(cause)) for cause in causes)
            return Decided(self.dim, "", "", words, keys, others, exact, named)
        lying = [
            (operand, wanted, self.lies(operand, wanted))
            for operand, wanted in zip(operands, strategy.operands, strict=True)
        ]
        # Why it is so: the operands that are sharded or pending as the op takes them; else those that are sharded. A
        # free value follows its readers, and is the cause of none.
        lying = [entry for entry in lying if entry[0] not in self.options.free] if node not in self.options.free else []
        causes = [operand for operand, wanted, lies in lying if wanted is not None and lies]
        causes = causes or [operand for operand, wanted, _ in lying if wanted is not None]
        if not strategy.factor:
            causes = [operand for operand, _, lies in lying if lies] or operands
        if strategy.factor and node in self.options.free:
            readers = self.readers(node, strategy.results[0])
            names = tuple((_origin(reader).name, _key(reader)) for reader in readers)
            listed = _listed([f"%{name}" for name, _ in names])
            need = "needs" if len(names) == 1 else "need"
            why = f"none of its operands is sharded, so it gets the layout that {listed} {need}"
            keys = tuple(dict.fromkeys(key for _, key in names))
            return Decided(self.dim, str(self.options.rules[node]), strategy.factor, why, keys, others, exact, names)
        keys = tuple(dict.fromkeys(_key(operand) for operand in causes))
        factor = strategy.factor if strategy.factor != PARTIAL else ""
        why = self.why(node, chosen, causes, others)
        named = tuple((_origin(cause).name, _key(cause)) for cause in causes)
        return Decided(self.dim, str(self.options.rules[node]), factor, why, keys, others, exact, named)

    def per_worker(self, node: fx.Node) -> str | None:
        """Why a value has its placement that belongs to per-worker code or ends it; None for any other."""
        if ends(node, self.dim):
            placement = args_of(node)[2]
            what = f"blocks of dim {placement}" if isinstance(placement, int) else f"a pending {placement}"
            return f"per-worker code ends here: the values of the workers along '{self.dim}' become {what}"
        if begins(node, self.dim):
            return f"per-worker code begins here: each worker along '{self.dim}' gets a value of its own"
        if node in self.options.varying:
            found = [each for each in self.options.operands[node] if each in self.options.varying]
            names = _listed([f"%{_origin(each).name}" for each in found])
            vary = "varies" if len(set(found)) == 1 else "vary"
            return f"per-worker code: {names} {vary} along '{self.dim}', so each worker computes its own"
        return None

    def readers(self, node: fx.Node, placement: Placement) -> list[fx.Node]:
        """The values whose ops read a free value in this placement, and the state that it becomes."""
        graph = self.options.graph
        found = [
            user
            for user in node.users
            if user in self.choice.alternatives
            and any(value is node and wanted == placement for value, wanted in self._reads(user))
        ]
        labels = {label for label, value in graph.updates.items() if value is node}
        found += [state for state in graph.placeholders if state.meta["label"] in labels]
        return [reader for reader in found if _key(reader) != _key(node)]

    def _reads(self, node: fx.Node) -> list[tuple[fx.Node, Placement]]:
        if node.target is operator.getitem:
            return []
        return self._wanted(node, self.choice.alternatives[node].strategy)

    def lies(self, operand: fx.Node, wanted: Placement) -> bool:
        """Whether an operand is at hand in this placement without being moved."""
        alternative = self.choice.alternatives.get(operand)
        if alternative is None:
            return bool(operand.meta["type"].layout.placement(self.dim) == wanted)
        return wanted in (alternative.gives, alternative.after)

    def why(self, node: fx.Node, chosen: Alternative, causes: list[fx.Node], others: tuple[Reported, ...]) -> str:
        strategy, dim = chosen.strategy, self.dim
        names = _listed([f"%{_origin(cause).name}" for cause in causes])
        if strategy.factor == PARTIAL:
            text = f"a pending sum over '{dim}' passes through: {names} {_is(causes)} one"
        elif strategy.factor:
            text = f"'{dim}' shards {strategy.factor}: {names} {_is(causes)} sharded along it already"
            if not all(self.lies(cause, wanted) for cause, wanted in self._wanted(node, strategy) if cause in causes):
                text = f"'{dim}' shards {strategy.factor}, and its operands are resharded for it"
        elif not self.options.operands[node]:
            text = "it has no operands, so every worker computes all of it"
        elif len(self.options.strategies[node]) == 1:
            text = f"its operands give no way to shard it over '{dim}': every worker computes all of it"
        else:
            text = f"every worker along '{dim}' computes all of it, which costs the program least"
        if chosen.after != (chosen.gives if strategy.results else None):
            text += f"; its result is resharded to {self.placed(_ndim(node), chosen.after)}"
        rest = [other.extra for other in others[1:]]
        if strategy.factor and rest and min(rest) > 0:
            instead = "the other option" if len(rest) == 1 else f"the cheapest of the {len(rest)} other options"
            text += f"; {instead} would cost {min(rest):,.0f} bytes more"
        return text

    def _wanted(self, node: fx.Node, strategy: Strategy) -> list[tuple[fx.Node, Placement]]:
        return list(zip(self.options.operands[node], strategy.operands, strict=True))

    # -- alternatives ----------------------------------------------------------------------------------------------

    def alternatives(self, node: fx.Node, chosen: Alternative) -> tuple[Reported, ...]:
        """The chosen one, then the others by their costs. An impossible one is none."""
        least: dict[str, float] = {}
        for alternative, extra in self.choice.extra[node]:
            if alternative is not chosen and extra != float("inf"):
                text = self.text(node, alternative)
                least[text] = min(extra, least.get(text, extra))
        first = self.text(node, chosen)
        least.pop(first, None)
        ordered = sorted(least.items(), key=lambda entry: (entry[1], entry[0]))
        return (Reported(first, 0.0), *(Reported(text, extra) for text, extra in ordered))

    def text(self, node: fx.Node, alternative: Alternative) -> str:
        strategy = alternative.strategy
        type_ = node.meta["type"]
        operands = self.options.operands[node]
        if node.target is operator.getitem:
            ndims: tuple[Any, ...] = (_ndim(node),)
        else:
            ndims = tuple(_ndim(operand) for operand in operands)
        results = (type_,) if isinstance(type_, TensorType) else type_ or ()
        made = tuple(None if each is None else each.ndim for each in results)
        key = (ndims, made, strategy.operands, strategy.results, alternative.after)
        if key not in self._texts:
            left = ", ".join(map(self.placed, ndims, strategy.operands))
            right = ", ".join(
                "none" if ndim is None else self.placed(ndim, placement)
                for ndim, placement in zip(made, strategy.results, strict=False)
            )
            text = f"{left} -> {right}".strip()
            if strategy.results and made and alternative.after != alternative.gives:
                text += f" then {self.placed(made[0], alternative.after)}"
            self._texts[key] = text
        return self._texts[key]

    def placed(self, ndim: int | None, placement: Placement) -> str:
        return str(Layout.replicated(ndim or 0).place(self.dim, placement))


def _ndim(node: fx.Node) -> int:
    type_ = node.meta["type"]
    return type_.ndim if isinstance(type_, TensorType) else 0


def _key(node: fx.Node) -> object:
    return _origin(node).meta["key"]


def _origin(node: fx.Node) -> fx.Node:
    """The program's own value behind the one that the compiler made of it for another mesh dim."""
    while node.op == "call_function" and "traced" not in node.meta:
        args = args_of(node)
        source = args[0] if args else None
        if node.target is operator.getitem and isinstance(source, fx.Node) and ops.is_collective(source.target):
            source = args_of(source)[0][args[1]]
        if not isinstance(source, fx.Node):
            break
        node = source
    return node


def _listed(names: list[str]) -> str:
    names = list(dict.fromkeys(names))
    if len(names) > 3:
        return f"{', '.join(names[:2])} and {len(names) - 2} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _is(causes: list[fx.Node]) -> str:
    return "is" if len(set(causes)) == 1 else "are"
