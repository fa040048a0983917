"""The text of rules: `n (g i) _, (g o) i, (g o) -> n (g o) _`, parsed once and bound to the shapes of each call.

line     operands `->` results, separated by commas
tensor   its dims, separated by spaces; `[]` for a tensor without dims; `-` for a result that is not made
dim      a factor; `(g i)` for several that compose one dim, major first; `_` for a dim that stays whole;
         `...` for any number of dims, aligned to the right as broadcasting does
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import lark

from monarch.compiler.rules.rule import Dim, Dims, Rule

Shape = tuple[int, ...]

GRAMMAR = r"""
line: [tensors] "->" [tensors]
tensors: tensor ("," tensor)*
tensor: dim+ -> dims
      | "[]" -> scalar
      | "-" -> missing
dim: NAME -> factor
   | "(" NAME+ ")" -> compound
   | "_" -> unnamed
   | "..." -> ellipsis
NAME: /[A-Za-z][A-Za-z0-9_]*/
%ignore /[ \t]+/
"""

ELLIPSIS: Dim = ("...",)
_PARSER = lark.Lark(GRAMMAR, start="line", parser="lalr")


class LineError(ValueError):
    """A rule's text that is malformed, or that does not fit a call's shapes."""


class _Build(lark.Transformer[Any, Any]):
    def line(self, parts: list[Any]) -> tuple[tuple[Dims, ...], tuple[Dims | None, ...]]:
        operands, results = (part or () for part in parts)
        return operands, results

    def tensors(self, parts: list[Any]) -> tuple[Any, ...]:
        return tuple(parts)

    def dims(self, parts: list[Dim]) -> Dims:
        return tuple(parts)

    def scalar(self, parts: list[Any]) -> Dims:
        return ()

    def missing(self, parts: list[Any]) -> None:
        return None

    def factor(self, parts: list[Any]) -> Dim:
        return (str(parts[0]),)

    def compound(self, parts: list[Any]) -> Dim:
        return tuple(str(part) for part in parts)

    def unnamed(self, parts: list[Any]) -> Dim:
        return ()

    def ellipsis(self, parts: list[Any]) -> Dim:
        return ELLIPSIS


@cache
def parse_line(text: str) -> tuple[tuple[Dims, ...], tuple[Dims | None, ...]]:
    """The dims of a line's operands and results; `...` stands as ELLIPSIS. Raises LineError."""
    try:
        operands, results = _Build().transform(_PARSER.parse(text))
    except lark.exceptions.UnexpectedInput as error:
        ended = isinstance(error, lark.exceptions.UnexpectedToken) and error.token.type == "$END"
        at = len(text) if ended else error.column - 1
        raise LineError(f"malformed rule, at the caret:\n  {text}\n  {' ' * at}^") from None
    if None in operands:
        raise LineError(f"only a result can be missing (-): {text}")
    for dims in (*operands, *results):
        if dims is not None and dims.count(ELLIPSIS) > 1:
            raise LineError(f"a tensor can have one ellipsis: {text}")
    return operands, results


@dataclass(frozen=True)
class Line:
    """A rule that is not yet bound to shapes: its text, and what the text does not say.

    `whole`    factors that are never sharded, separated by spaces; `...` stands for all that an ellipsis binds
    `linear`   sets of operand indices, as `Rule.linear`
    `reduce`   what sharding a factor makes of the results that lack it
    `addends`  operand indices, as `Rule.addends`
    `kept`     (factor, result index) pairs, as `Rule.kept`
    `sizes`    sizes of factors that the shapes do not tell

    Where the text lists as many operands as the op's schema has tensor arguments, it means those, given or not; where
    it lists more (the Tensor overload's), it means the first arguments that are tensors or numbers. What the call does
    not give as a tensor drops out of the text. Out of the sets of `linear` drop None and 0, which add nothing; a set
    with any other number in it falls away.
    """

    text: str
    whole: str = ""
    linear: tuple[frozenset[int], ...] = ()
    reduce: str = "sum"
    addends: frozenset[int] = frozenset()
    kept: frozenset[tuple[str, int]] = frozenset()
    sizes: tuple[tuple[str, int], ...] = ()


def line(
    text: str,
    *,
    whole: str = "",
    linear: Iterable[Iterable[int]] = (),
    reduce: str = "sum",
    addends: Iterable[int] = (),
    kept: Iterable[tuple[str, int]] = (),
    sizes: Mapping[str, int] | None = None,
) -> Line:
    """A `Line` from plain sets and dicts."""
    return Line(
        text,
        whole,
        tuple(frozenset(together) for together in linear),
        reduce,
        frozenset(addends),
        frozenset(kept),
        tuple((sizes or {}).items()),
    )


def factor_names(count: int, taken: Iterable[str] = ()) -> list[str]:
    """`count` short names that are not taken: a, b, c, …, z, a1, b1, …"""
    taken = set(taken)
    names: list[str] = []
    number = 0
    while len(names) < count:
        name = chr(ord("a") + number % 26) + (str(number // 26) if number >= 26 else "")
        if name not in taken:
            names.append(name)
        number += 1
    return names


def bind(
    spec: Line, operand_shapes: Sequence[Shape], result_shapes: Sequence[Shape | None], extra_operands: int = 0
) -> Rule:
    """The rule that `spec` gives for these shapes. `extra_operands` scalars, which the text does not list, come last.

    Raises LineError where the text does not fit: another number of tensors or dims, sizes that disagree.
    """
    operands, results = parse_line(spec.text)
    results = tuple(None if shape is None else dims for dims, shape in zip(results, result_shapes, strict=False))
    shapes: list[Shape] = [*operand_shapes, *(shape for shape in result_shapes if shape is not None)]
    tensors: list[Dims] = [*operands, *(dims for dims in results if dims is not None)]
    if len(operands) != len(operand_shapes) or len(results) != len(result_shapes) or len(tensors) != len(shapes):
        raise LineError(
            f"the rule has {len(operands)} operands and {len(results)} results, "
            f"the call {len(operand_shapes)} and {len(result_shapes)}: {spec.text}"
        )
    tensors, rest = _expand_ellipsis(spec.text, tensors, shapes)
    sizes = _sizes(spec, tensors, shapes)
    count = len(operands)
    bound_operands = (
        tuple(
            # An operand's dim of size 1 is broadcast along its factor: it lacks the factor.
            tuple(() if size == 1 and len(dim) == 1 else dim for dim, size in zip(dims, shape, strict=True))
            for dims, shape in zip(tensors[:count], shapes[:count], strict=True)
        )
        + ((),) * extra_operands
    )
    for dims, shape in zip(tensors[count:], shapes[count:], strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if size == 1 and len(dim) == 1 and sizes[dim[0]] > 1:
                raise LineError(f"a result has size 1 along '{dim[0]}', which has size {sizes[dim[0]]}: {spec.text}")
    made = iter(tensors[count:])
    bound_results = tuple(None if dims is None else next(made) for dims in results)
    whole = frozenset(name for word in spec.whole.split() for name in (rest if word == "..." else [word]))
    reductions: dict[str, str] = {}
    for result in bound_results:
        if result is not None:
            has = {name for dim in result for name in dim}
            reductions.update((name, spec.reduce) for name in sizes if name not in has and name not in whole)
    return Rule(bound_operands, bound_results, sizes, whole, reductions, spec.linear, spec.addends, spec.kept)


def _expand_ellipsis(text: str, tensors: list[Dims], shapes: list[Shape]) -> tuple[list[Dims], list[str]]:
    """The tensors' dims with `...` replaced by named factors, and those names, leftmost first."""
    depth = 0
    for dims, shape in zip(tensors, shapes, strict=True):
        missing = len(shape) - len(dims)
        if ELLIPSIS in dims:
            missing += 1
            depth = max(depth, missing)
        if missing < 0 or (missing > 0 and ELLIPSIS not in dims):
            raise LineError(f"a tensor of shape {list(shape)} where the rule has {len(dims)} dims: {text}")
    if not depth and all(ELLIPSIS not in dims for dims in tensors):
        return tensors, []
    names = factor_names(depth, {name for dims in tensors for dim in dims for name in dim})
    expanded: list[Dims] = []
    for dims, shape in zip(tensors, shapes, strict=True):
        if ELLIPSIS in dims:
            at = dims.index(ELLIPSIS)
            count = len(shape) - len(dims) + 1
            dims = dims[:at] + tuple((name,) for name in names[depth - count :]) + dims[at + 1 :]
        expanded.append(dims)
    return expanded, names


def _sizes(spec: Line, tensors: list[Dims], shapes: list[Shape]) -> dict[str, int]:
    """Every factor's size, in the order in which the line names them."""
    known = dict(spec.sizes)
    compounds: list[tuple[Dim, int]] = []
    order: dict[str, None] = {}
    for dims, shape in zip(tensors, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            order.update(dict.fromkeys(dim))
            if len(dim) == 1:
                name = dim[0]
                if known.get(name, 1) == 1:
                    known[name] = size
                elif size not in (1, known[name]):
                    raise LineError(f"factor '{name}' has sizes {known[name]} and {size}: {spec.text}")
            elif dim:
                compounds.append((dim, size))
    # A compound dim tells the size of the one factor in it that no other dim tells.
    while any(name not in known for dim, _ in compounds for name in dim):
        progress = False
        for dim, size in compounds:
            unknown = [name for name in dim if name not in known]
            if len(unknown) == 1:
                rest = math.prod(known[name] for name in dim if name in known)
                known[unknown[0]] = size // rest if rest else size
                progress = True
        if not progress:
            names = sorted({name for dim, _ in compounds for name in dim if name not in known})
            raise LineError(f"no shape tells the sizes of {', '.join(names)}: {spec.text}")
    for dim, size in compounds:
        if math.prod(known[name] for name in dim) != size:
            parts = " * ".join(f"{name} ({known[name]})" for name in dim)
            raise LineError(f"a dim of size {size} is not {parts}: {spec.text}")
    return {name: known[name] for name in order}
