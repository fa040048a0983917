"""The table of sharding rules, and how a call finds its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, lru_cache
from typing import TypeVar, overload

import torch
from torch import fx

from monarch.compiler.alike import Memo
from monarch.compiler.errors import RuleError
from monarch.compiler.ops import out_of_place
from monarch.compiler.ops.record import enter, find, recorded
from monarch.compiler.rules.call import Call, ShapeOf, called_op, result_types
from monarch.compiler.rules.line import Line, LineError, bind, line, parse_line
from monarch.compiler.rules.rule import Rule
from monarch.compiler.rules.whole import whole_rule
from monarch.compiler.types import TensorType

RuleFunction = Callable[[Call], "str | Line | Rule"]
F = TypeVar("F", bound=RuleFunction)


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
def sharding_rule(op: str) -> Callable[[F], F]: ...


def sharding_rule(
    op: str,
    text: str | None = None,
    *,
    whole: str = "",
    linear: Iterable[Iterable[int]] = (),
    reduce: str = "sum",
    addends: Iterable[int] = (),
    kept: Iterable[tuple[str, int]] = (),
) -> Callable[[F], F] | None:
    """Say how an op partitions.

        sharding_rule("aten.mm", "m k, k n -> m n", linear=({0}, {1}))
        sharding_rule("mylib.normalize", "... d -> ... d", whole="d")

        @sharding_rule("mylib.fold")                   # where the line depends on arguments
        def fold(call: Call) -> str:
            return "a b -> (a b)" if call["merge"] else "a b -> a b"

    `op` is a name with its overload ("aten.sum.dim_IntList"), which binds first, or without (all other overloads, and
    the op's `_copy` variant); several names are separated by spaces.
    A factor that a result lacks makes it a partial sum (or what `reduce` says) where it is sharded, so name under
    `whole` what must not be cut. See `Line` for the text and the other arguments. Raises RuleError where the text is
    malformed.
    """
    if text is None:

        def register(function: F) -> F:
            enter(op.split(), rule=function)
            return function

        return register
    spec = line(text, whole=whole, linear=linear, reduce=reduce, addends=addends, kept=kept)
    try:
        parse_line(text)
    except LineError as error:
        raise RuleError(f"the sharding rule of {op} does not parse", hint=str(error)) from None
    enter(op.split(), rule=spec)
    return None


def registered() -> list[str]:
    """The names of all ops that have a rule."""
    return recorded("rule")


def rule_for(node: fx.Node, shape_of: ShapeOf) -> Rule:
    """The sharding rule of one call, for the shapes that `shape_of` gives (local ones, while partitioning).

    An op without a rule, and a call that its rule does not fit, have the default one: whole (`Rule.reason` says why).
    A function that computes rules is asked once for calls that are alike (`Call.key`).
    Raises RuleError where workers cannot run a call, such as one that draws random numbers of its own.
    """
    found = find(called_op(node), "rule")
    call = Call.of(node, shape_of)
    try:
        key = found, call.key
        hash(key)
    except TypeError:  # an argument without a hash
        return _rule_for(found, call)
    return _RULES.get(key) or _RULES.keep(key, _rule_for(found, call))


_RULES: Memo[Rule] = Memo(16384)


def _rule_for(found: Line | RuleFunction | None, call: Call) -> Rule:
    node = call.node
    if found is None or (callable(found) and node.target is out_of_place):
        return whole_rule(call, "it has no sharding rule")  # none that knows the call out of place
    try:
        return _rule_of(found, call)
    except LineError as error:
        return whole_rule(call, f"its sharding rule does not fit this call ({error})")


def fits(text: str, call: Call) -> bool:
    """Whether a rule's text fits a call, and shards it."""
    try:
        rule = _rule_of(line(text), call)
    except LineError:
        return False
    return any(size > 1 and len(rule.strategies(size)) > 1 for size in rule.sizes.values())


def _rule_of(found: Line | RuleFunction, call: Call) -> Rule:
    spec = found(call) if callable(found) else found
    if isinstance(spec, Rule):
        return _linear_where_exact(spec, call)
    return _linear_where_exact(_bind(line(spec) if isinstance(spec, str) else spec, call), call)


def _bind(spec: Line, call: Call) -> Rule:
    """Bind a line to a call: by schema name where the op has a schema without tensor lists, else in operand order."""
    listed = len(parse_line(spec.text)[0])
    signature = call.signature
    if signature is not None and not signature.has_lists:
        if len(signature.tensors) == listed:
            names = signature.tensors
        elif len(signature.tensors) < listed <= len(signature.values):
            names = signature.values[:listed]
        else:
            names = ()
        if names and not (len(call.operands) == listed and call.given_in_order(names)):
            return _bind_by_name(spec, call, names)
    return bind_cached(spec, tuple(call.shapes), tuple(call.results), 0)


def _bind_by_name(spec: Line, call: Call, names: tuple[str, ...]) -> Rule:
    positions = [call.position(name) for name in names]
    present = tuple(index for index, at in enumerate(positions) if at is not None)
    order = tuple(at for at in positions if at is not None)
    absent = (index for index, at in enumerate(positions) if at is None)
    dropped = frozenset(index for index in absent if call.get(names[index]) in (None, 0))
    narrowed = _without_absent(spec, present, dropped)
    if order == tuple(range(len(call.operands))):
        return bind_cached(narrowed, tuple(call.shapes), tuple(call.results), 0)
    # Keyword arguments out of schema order, or values of the graph where the op takes numbers: bind, then permute.
    rest = [at for at in range(len(call.operands)) if at not in order]
    if any(call.shapes[at] for at in rest):
        raise LineError(f"a tensor with dims stands where the op takes a number: {spec.text}")
    shapes = tuple(call.shapes[at] for at in order)
    rule = bind_cached(narrowed, shapes, tuple(call.results), len(rest))
    places = [*order, *rest]
    operands = tuple(rule.operands[places.index(at)] for at in range(len(places)))
    linear = tuple(frozenset(places[index] for index in together) for together in rule.linear)
    return replace(rule, operands=operands, linear=linear, addends=frozenset(places[at] for at in rule.addends))


@cache
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
    return replace(rule, linear=kept)


def _kind(type_: TensorType) -> str:
    if type_.dtype == torch.bool:
        return "bool"
    return "float" if type_.dtype.is_floating_point or type_.dtype.is_complex else "int"
