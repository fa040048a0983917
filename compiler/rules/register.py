"""The table of sharding rules, and how a call finds its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, overload

import torch
from torch import fx

from monarch.compiler.errors import RuleError
from monarch.compiler.rules.call import Call, ShapeOf, lookup, op_name, result_types, tensor_operands
from monarch.compiler.rules.line import Line, LineError, bind, line, parse_line
from monarch.compiler.rules.rule import Rule
from monarch.compiler.types import TensorType

RuleFunction = Callable[[Call], "str | Line | Rule"]

_RULES: dict[str, Line | RuleFunction] = {}


@overload
def sharding_rule(
    op: str,
    text: str,
    *,
    whole: str = "",
    linear: Iterable[Iterable[int]] = (),
    reduce: str = "sum",
    addends: Iterable[int] = (),
    kept: Iterable[tuple[str, int]] = (),
) -> None: ...


@overload
def sharding_rule(op: str, *others: str) -> Callable[[RuleFunction], RuleFunction]: ...


def sharding_rule(
    op: str,
    *rest: str,
    whole: str = "",
    linear: Iterable[Iterable[int]] = (),
    reduce: str = "sum",
    addends: Iterable[int] = (),
    kept: Iterable[tuple[str, int]] = (),
) -> Callable[[RuleFunction], RuleFunction] | None:
    """Say how an op partitions.

        sharding_rule("aten.mm", "m k, k n -> m n", linear=({0}, {1}))
        sharding_rule("mylib.normalize", "... d -> ... d", whole="d")

        @sharding_rule("mylib.fold")                   # where the line depends on arguments
        def fold(call: Call) -> str:
            return "a b -> (a b)" if call["merge"] else "a b -> a b"

    `op` is a name with its overload ("aten.sum.dim_IntList"), which binds first, or without (all other overloads, and the
    op's `_copy` variant). The decorator takes several names.
    A factor that a result lacks makes it a partial sum (or what `reduce` says) where it is sharded, so name under `whole`
    what must not be cut. See `Line` for the text and the other arguments. Raises RuleError where the text is malformed.
    """
    if not any("->" in text for text in rest):

        def register(function: RuleFunction) -> RuleFunction:
            _RULES.update(dict.fromkeys((op, *rest), function))
            return function

        return register
    (text,) = rest
    spec = line(text, whole=whole, linear=linear, reduce=reduce, addends=addends, kept=kept)
    try:
        parse_line(text)
    except LineError as error:
        raise RuleError(f"the sharding rule of {op} does not parse", hint=str(error)) from None
    _RULES[op] = spec
    return None


def rule_for(node: fx.Node, shape_of: ShapeOf) -> Rule:
    """The sharding rule of one call, for the shapes that `shape_of` gives (`TensorType.local_shape` while partitioning).

    Raises RuleError where the op has no rule, or its rule does not fit this call.
    """
    found = lookup(_RULES, node.target)
    if found is None:
        raise _no_rule(node)
    call = Call.of(node, shape_of)
    try:
        spec = found(call) if callable(found) else found
        if isinstance(spec, Rule):
            return _linear_where_exact(spec, call)
        return _linear_where_exact(_bind(line(spec) if isinstance(spec, str) else spec, call), call)
    except LineError as error:
        shapes = ", ".join(str(list(shape)) for shape in call.shapes)
        raise RuleError(
            f"the sharding rule of {call.name} does not fit this call",
            hint=f"{error}\nthe operands' shapes are {shapes or '(none)'}, the results' {call.results}.",
            source=node.meta.get("source"),
        ) from None


def _no_rule(node: fx.Node) -> RuleError:
    name = op_name(node.target)
    packet = name.rsplit(".", 1)[0] if isinstance(node.target, torch._ops.OpOverload) else name
    count = max(1, len(tensor_operands(node)))
    example = ", ".join(["... d"] * count) + " -> ... d"
    return RuleError(
        f"{name} has no sharding rule, so it cannot be partitioned",
        hint=(
            "Say in one line how it partitions: the factors of each operand and result, and those that must stay whole:\n"
            "    from monarch.compiler.rules import sharding_rule\n"
            f'    sharding_rule("{packet}", "{example}", whole="d")     # batch dims shard, the last dim does not'
        ),
        source=node.meta.get("source"),
    )


def _bind(spec: Line, call: Call) -> Rule:
    """Bind a line to a call: by schema name where the line lists every tensor argument, else in operand order."""
    listed = len(parse_line(spec.text)[0])
    signature = call.signature
    if signature is None or signature.has_lists or len(signature.tensors) != listed:
        return bind_cached(spec, tuple(call.shapes), tuple(call.results), 0)
    if listed == len(call.operands) == len(call.node.args) and not call.node.kwargs:
        return bind_cached(spec, tuple(call.shapes), tuple(call.results), 0)
    return _bind_by_name(spec, call, signature.tensors)


def _bind_by_name(spec: Line, call: Call, tensors: tuple[str, ...]) -> Rule:
    positions: list[int | None] = [call.position(name) for name in tensors]
    present = [index for index, at in enumerate(positions) if at is not None]
    if [positions[index] for index in present] == list(range(len(call.operands))):
        order = None
    else:
        order = tuple(positions[index] for index in present)
    # An absent argument adds nothing to a sum where it is None or 0; any other number makes the op affine.
    dropped = frozenset(index for index, name in enumerate(tensors) if positions[index] is None and call.get(name) in (None, 0))
    narrowed = _without_absent(spec, tuple(present), dropped)
    if order is None:
        return bind_cached(narrowed, tuple(call.shapes), tuple(call.results), 0)
    # Keyword arguments out of schema order, or numbers that are values of the graph: bind in schema order, then permute.
    shapes = tuple(call.shapes[at] for at in order)
    extra = len(call.operands) - len(order)
    rule = bind_cached(narrowed, shapes, tuple(call.results), extra)
    places = [*order, *(at for at in range(len(call.operands)) if at not in order)]
    if any(call.shapes[at] for at in places[len(order) :]):
        raise LineError(f"a tensor with dims stands where the op takes a number: {spec.text}")
    operands = [rule.operands[places.index(at)] for at in range(len(call.operands))]
    linear = tuple(frozenset(places[index] for index in together) for together in rule.linear)
    addends = frozenset(places[index] for index in rule.addends)
    return Rule(tuple(operands), rule.results, rule.sizes, rule.whole, rule.reductions, linear, addends, rule.kept)


@lru_cache(maxsize=None)
def _without_absent(spec: Line, present: tuple[int, ...], dropped: frozenset[int]) -> Line:
    """The line with only the operands at `present`, indices counted anew."""
    operands, results = spec.text.split("->")
    texts = [text.strip() for text in operands.split(",")]
    linear = [
        {present.index(index) for index in together if index in present}
        for together in spec.linear
        if all(index in present or index in dropped for index in together)
    ]
    return line(
        ", ".join(texts[index] for index in present) + " ->" + results,
        whole=spec.whole,
        linear=[together for together in linear if together],
        reduce=spec.reduce,
        addends=[present.index(index) for index in spec.addends if index in present],
        kept=spec.kept,
        sizes=dict(spec.sizes),
    )


bind_cached = lru_cache(maxsize=65536)(bind)


def _linear_where_exact(rule: Rule, call: Call) -> Rule:
    """Drop the linear sets that the dtypes forbid: sums pass neither through bools nor from floats into integers."""
    if not rule.linear:
        return rule
    kinds = [_kind(operand.meta["type"]) for operand in call.operands]
    made = {_kind(type_) for type_ in result_types(call.node) if type_ is not None}
    kept = tuple(
        together
        for together in rule.linear
        if "bool" not in made
        and not any(kinds[index] == "bool" for index in together)
        and not ("int" in made and any(kinds[index] == "float" for index in together))
    )
    if len(kept) == len(rule.linear):
        return rule
    return Rule(
        rule.operands, rule.results, rule.sizes, rule.whole, rule.reductions, kept, rule.addends, rule.kept
    )


def _kind(type_: TensorType) -> str:
    if type_.dtype == torch.bool:
        return "bool"
    return "float" if type_.dtype.is_floating_point else "int"
