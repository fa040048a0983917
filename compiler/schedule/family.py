"""The plan of a program of named sizes in a file: one for all their values.

`Plan.sizes` is a template as JSON, beside the plan for the example's sizes, which is a plan as any other: a head and
instructions as `plan.encode` writes them, in which a size that is no number is `{"=": expression}`; the names with the
example's values, the conditions on them, and what lies in the arena, and when, with the same of each function. For
other sizes the expressions become
numbers, the arena is laid out, and what comes out is read and checked as a file is: nothing is compiled.

An expression is a list of products `[factor, atom, …]`. An atom is a name, or a function `["//", left, right]` of two
expressions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from monarch.compiler.errors import MonarchError
from monarch.compiler.plan.checks import short
from monarch.compiler.plan.decode import MAX_DEPTH
from monarch.compiler.plan.encode import TorchDecoder, encode_head, encode_instruction
from monarch.compiler.plan.file import all_constants, plan_of_json
from monarch.compiler.plan.plan import Plan
from monarch.compiler.schedule.arena import Lifetime, pack
from monarch.compiler.schedule.template import Template
from monarch.compiler.symbols import FUNCTIONS, LEAST, Function, Poly, is_named, poly_of

_EXPRESSION = "="


def with_sizes(plan: Plan, template: Template) -> Plan:
    """The plan for the example's sizes, which serves others too. Raises MonarchError where the two have constants that
    differ: these depend on the sizes."""
    own, others = (dict(all_constants(each)) for each in (plan, template.plan))
    if own.keys() != others.keys() or not all(torch.equal(own[label], value) for label, value in others.items()):
        raise MonarchError("it has constants that depend on the sizes")
    sizes = {
        "names": dict(template.scope.examples),
        "conditions": [
            [_written(condition.poly), condition.relation, condition.truth, str(condition)]
            for condition in template.scope.conditions
        ],
        "spans": _spans(template),
        "head": _with_expressions(encode_head(template.plan)),
        "program": [_with_expressions(encode_instruction(each)) for each in template.plan.instructions],
    }
    return replace(plan, sizes=sizes)


def plan_at(plan: Plan, values: Mapping[str, int]) -> Plan:
    """The plan of a program of named sizes for these values; the example's for names that are not given. Raises
    MonarchError for a name that it has not and for values that it does not serve, and PlanError for sizes that
    `with_sizes` did not write."""
    decoder = TorchDecoder(f"plan '{plan.name}'")
    sizes = decoder.mapping(plan.sizes, "its sizes", ("names", "conditions", "spans", "head", "program"))
    examples = decoder.mapping(sizes["names"], "the names of its sizes")
    examples = {name: decoder.integer(value, f"the size {short(name)}", LEAST) for name, value in examples.items()}
    if unknown := values.keys() - examples.keys():
        raise MonarchError(
            f"the plan '{plan.name}' has no size '{min(unknown)}'", hint=f"its sizes are {', '.join(examples)}."
        )
    values = {**examples, **values}
    said = ", ".join(f"{name}={value}" for name, value in values.items())
    again = "compile the program for these sizes: monarchc compile with --arg."
    for name, value in values.items():
        if not LEAST <= value < 2**40:
            raise MonarchError(
                f"the plan '{plan.name}' serves sizes of at least {LEAST}, not {name}={value}", hint=again
            )
    reader = _Reader(decoder, values)
    for entry in decoder.items(sizes["conditions"], "the conditions on its sizes"):
        poly, relation, truth, text = decoder.items(entry, "a condition on its sizes", 4)
        found = reader.value(poly)
        if ((found == 0) if relation == "==" else found > 0) is not truth:
            raise MonarchError(f"the plan '{plan.name}' serves sizes with {text}, not {said}", hint=again)
    head, program = reader.filled(sizes["head"]), reader.filled(sizes["program"])
    _lay_out(decoder, head, program, reader.filled(sizes["spans"]))
    made = plan_of_json(head, program, dict(all_constants(plan)), decoder)
    return replace(made, graph=plan.graph, costs=plan.costs)


def _spans(template: Template) -> list[Any]:
    """The lifetimes in the arena of a plan, and of each of its functions."""
    own = [[_with_expressions(span.size), span.first, span.last] for span in template.spans]
    return [own, {name: _spans(function) for name, function in template.functions.items()}]


def _lay_out(decoder: TorchDecoder, head: Any, program: Any, written: Any, depth: int = 0) -> int:
    """Lay the arena of a plan out anew, and those of its functions, in its JSON; gives its bytes. Raises PlanError."""
    if depth > MAX_DEPTH:
        decoder.fail("its functions nest too deep")
    head = decoder.mapping(head, "the plan")
    entries, within = decoder.items(written, "what lies in its arena", 2)
    spans = [
        Lifetime(
            *(
                decoder.integer(number, "bytes or an instruction of its arena")
                for number in decoder.items(each, "it", 3)
            )
        )
        for each in decoder.items(entries, "what lies in its arena")
    ]
    arena, offsets = pack(spans)
    regions = [
        region
        for entry in decoder.items(program, "its instructions")
        for region in decoder.items(decoder.items(entry, "an instruction", 7)[6], "the regions of an instruction")
        if region is not None
    ]
    if len(regions) != len(offsets):
        decoder.fail("its instructions have other regions than lie in its arena")
    for region, offset in zip(regions, offsets, strict=True):
        decoder.items(region, "a region", 3)[0] = offset
    functions = decoder.mapping(head.get("functions", {}), "the functions")
    within = decoder.mapping(within, "what lies in its functions' arenas", tuple(functions))
    below = [
        _lay_out(
            decoder, function, decoder.mapping(function, f"function {name!a}").get("program"), within[name], depth + 1
        )
        for name, function in functions.items()
    ]
    head["arena"] = arena + max(below, default=0)
    return int(head["arena"])


def sizes_of_inputs(plan: Plan, names: list[str], tensors: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The values of a plan's named sizes in these tensors. `names` are those of the plan's inputs. Raises MonarchError
    where a name stands for two numbers."""
    decoder = TorchDecoder(f"plan '{plan.name}'")
    sizes = decoder.mapping(plan.sizes, "its sizes")
    inputs = decoder.items(decoder.mapping(sizes["head"], "the plan")["inputs"], "its inputs", len(names))
    found: dict[str, int] = {}
    for name, entry in zip(names, inputs, strict=True):
        shape = decoder.items(decoder.items(decoder.items(entry, "an input", 4)[2], "a type", 5)[1], "a shape")
        if name not in tensors or tensors[name].ndim != len(shape):
            continue
        for size, written in zip(tensors[name].shape, shape, strict=True):
            match written:
                case {"=": [[1, str(symbol)]]} if found.setdefault(symbol, size) != size:
                    raise MonarchError(f"the size '{symbol}' is {found[symbol]} in one tensor, and {size} in '{name}'")
    return found


def _written(poly: Poly) -> list[Any]:
    return [[factor, *map(_atom, term)] for term, factor in poly.terms]


def _atom(atom: str | Function) -> Any:
    return atom if isinstance(atom, str) else [atom.name, _written(atom.left), _written(atom.right)]


def _with_expressions(value: Any) -> Any:
    """JSON in which Sizes are expressions."""
    if is_named(value):
        poly = poly_of(value)
        assert poly is not None
        return {_EXPRESSION: _written(poly)}
    if isinstance(value, dict):
        return {key: _with_expressions(entry) for key, entry in value.items()}
    return [_with_expressions(entry) for entry in value] if isinstance(value, list | tuple) else value


class _Reader:
    """Reads expressions at some values."""

    def __init__(self, decoder: TorchDecoder, values: Mapping[str, int]) -> None:
        self._decoder, self._values = decoder, values

    def filled(self, value: Any, depth: int = 0) -> Any:
        """JSON with numbers in the place of its expressions."""
        if depth > 4 * MAX_DEPTH:
            self._decoder.fail("its sizes nest too deep")
        if type(value) is list:
            return [self.filled(entry, depth + 1) for entry in value]
        if type(value) is not dict:
            return value
        if value.keys() == {_EXPRESSION}:
            return self.value(value[_EXPRESSION])
        return {key: self.filled(entry, depth + 1) for key, entry in value.items()}

    def value(self, expression: Any, depth: int = 0) -> int:
        decoder, total = self._decoder, 0
        if depth > MAX_DEPTH:
            decoder.fail("an expression of its sizes nests too deep")
        for product in decoder.items(expression, "an expression of its sizes"):
            found, *atoms = decoder.items(product, "a product of sizes") or [None]
            found = decoder.integer(found, "a factor of a size", -(2**63))
            for atom in atoms:
                found *= self._atom(atom, depth)
                if abs(found) >= 2**63:
                    decoder.fail("a size is too large")
            total += found
        return total

    def _atom(self, atom: Any, depth: int) -> int:
        if isinstance(atom, str):
            if atom not in self._values:
                self._decoder.fail(f"a size names {short(atom)}, which is none of its names")
            return self._values[atom]
        name, left, right = self._decoder.items(atom, "a function of sizes", 3)
        if not isinstance(name, str) or name not in FUNCTIONS:
            self._decoder.fail(f"a function of sizes is {short(name)}")
        try:
            return FUNCTIONS[name](self.value(left, depth + 1), self.value(right, depth + 1))
        except ZeroDivisionError:
            self._decoder.fail("a size is divided by 0")
