"""Named sizes in torch's shape functions: torch's own symbols, and the Sizes of ours that they are.

Torch decides on its symbols as on any sizes and notes each decision; at the end these become conditions of the scope.
Only programs of named sizes load this, and SymPy with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Any
from weakref import WeakKeyDictionary

import sympy
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils import _sympy

from monarch.compiler.symbols import Condition, Poly, Scope, Size, extreme, quotient, remainder, value_at


class Unknown(Exception):
    """An expression of torch's that is no Size."""


class _Environment(ShapeEnv):
    """Torch's, which keeps the place of each decision as `where` tells it."""

    def __init__(self) -> None:
        super().__init__(duck_shape=False)
        self.where: Callable[[], str] = lambda: "PyTorch"
        self.places: list[str] = []

    def evaluate_expr(self, *args: Any, **kwargs: Any) -> Any:
        decided = super().evaluate_expr(*args, **kwargs)
        if len(self.places) < len(self.guards):
            self.places += [self.where()] * (len(self.guards) - len(self.places))
        return decided


class Symbols:
    """The named sizes of one program, with the value that each has in the traced call."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.environment = _Environment()
        self._names: dict[sympy.Symbol, str] = {}
        self._symints: dict[str, torch.SymInt] = {}
        for name, value in scope.examples.items():
            source = ConstantSource(name)
            made = self.environment.create_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
            self._names[made] = name
            self._symints[name] = self.environment.create_symintnode(made, hint=value, source=source)  # type: ignore[assignment]

    def torch_sizes(self, value: Any) -> Any:
        """A Size, or a list or tuple with Sizes in it, with torch's symbols for ours."""
        if isinstance(value, (list, tuple)):
            return type(value)([self.torch_sizes(entry) for entry in value])
        found: Any = value_at(value, self._symints)  # type: ignore[arg-type]
        known = found.node.maybe_as_int() if isinstance(found, torch.SymInt) else None
        return found if known is None else known  # where torch has decided on its value

    def torch_shape(self, shape: tuple[int, ...]) -> tuple[Any, ...]:
        """A shape with torch's symbols for ours."""
        return tuple([self.torch_sizes(size) for size in shape])

    @contextmanager
    def tracing(self, where: Callable[[], str]) -> Iterator[None]:
        """Have torch use its shape functions in Python, which take symbols. `where` says what the program is at, for
        what is decided meanwhile."""
        before, self.environment.where = self.environment.where, where
        try:
            with enable_python_dispatcher():
                yield
        finally:
            self.environment.where = before

    def size(self, value: Any) -> int:
        """The Size that an int of torch's is; one without an expression of ours is taken for the number that it is."""
        if not isinstance(value, torch.SymInt):
            return int(value)
        try:
            return Size(self._poly(value.node.expr), self.scope)
        except Unknown:
            return int(value)

    def shape(self, shape: tuple[Any, ...]) -> tuple[int, ...]:
        """The Sizes of a tensor's shape."""
        return tuple([size if type(size) is int else self.size(size) for size in shape])

    def expression(self, value: torch.SymFloat, of_size: Callable[[int], Any], apply: Callable[..., Any]) -> Any:
        """A float that torch computes from sizes, as `apply(op, operands)` of `of_size(size)` and numbers; None for one
        that is more than arithmetic."""
        try:
            return self._expression(value.node.expr, of_size, apply)
        except Unknown:
            return None

    def _expression(self, expr: Any, of_size: Callable[[int], Any], apply: Callable[..., Any]) -> Any:
        if isinstance(expr, (int, float, sympy.Number)):
            return float(expr)
        try:
            return of_size(Size(self._poly(expr), self.scope))
        except Unknown:
            if (op := _ARITHMETIC.get(type(expr))) is None:
                raise
        found, *others = [self._expression(arg, of_size, apply) for arg in expr.args]
        if op == "sqrt":
            return apply(op, (found,))
        for other in others:
            found = apply(op, (found, other))
        return found

    def close(self) -> None:
        """Give the scope what torch has decided. What has no expression of ours fixes the sizes in it."""
        for guard, where in zip(self.environment.guards, self.environment.places, strict=True):
            try:
                for condition in self._conditions(guard.expr, True):
                    self.scope.note(condition, where)
            except Unknown:
                if guard.expr.has(_functions.RoundToInt):
                    where = f"{where.partition(': ')[0]}: round"
                symbols = guard.expr.free_symbols
                known = symbols <= self._names.keys()
                for name in [self._names[each] for each in symbols] if known else self.scope.examples:
                    fixed = Poly.of({(name,): 1}).plus(Poly.number(self.scope.examples[name]), -1)
                    self.scope.note(Condition(fixed, "==", True), where)

    def _conditions(self, expr: Any, truth: bool) -> Iterator[Condition]:
        if isinstance(expr, sympy.Not):
            yield from self._conditions(expr.args[0], not truth)
        elif isinstance(expr, sympy.And) and truth or isinstance(expr, sympy.Or) and not truth:
            for each in expr.args:
                yield from self._conditions(each, truth)
        elif isinstance(expr, sympy.core.relational.Relational):
            left, right = self._sides(*expr.args)
            relation, sign, holds = _RELATIONS[type(expr)]
            difference = left.plus(right, -1) if sign > 0 else right.plus(left, -1)
            yield Condition(difference, relation, holds is truth)
        else:
            raise Unknown

    def _sides(self, left: Any, right: Any) -> Iterator[Poly]:
        """Both sides of a relation. Where one is a quotient and the other a number, both times the divisor: `t / (2*t)
        == 0.5` holds of all sizes."""
        if isinstance(left, sympy.Number) and isinstance(right, _QUOTIENTS):
            return reversed([*self._sides(right, left)])
        if isinstance(left, _QUOTIENTS) and isinstance(right, sympy.Number):
            over, by = self._scaled(left.args[0]), self._scaled(left.args[1])
            number = Fraction(float(right))
            whole = number * by[0] / over[0]
            divisor = by[1].least
            if divisor is not None and divisor > 0 and by[0] > 0 < over[0] and whole.denominator <= _FINE:
                return iter(
                    [
                        over[1].times(Poly.number(whole.denominator)),
                        by[1].times(Poly.number(whole.numerator)),
                    ]
                )
            raise Unknown
        return iter([self._poly(left), self._poly(right)])

    def _scaled(self, expr: Any) -> tuple[Fraction, Poly]:
        """A size times a number."""
        if isinstance(expr, sympy.Mul) and isinstance(expr.args[0], sympy.Number):
            factor = Fraction(float(expr.args[0]))
            return factor, self._poly(sympy.Mul(*expr.args[1:]))
        return Fraction(1), self._poly(expr)

    def _poly(self, expr: Any) -> Poly:
        if isinstance(expr, (int, sympy.Integer)):
            return Poly.number(int(expr))
        if isinstance(expr, _functions.ToFloat):
            return self._poly(expr.args[0])
        if isinstance(expr, sympy.Symbol):
            if expr not in self._names:
                raise Unknown
            return Poly.of({(self._names[expr],): 1})
        args = expr.args
        if isinstance(expr, _ROUNDED) and (whole := self._rounded(expr)) is not None:
            return whole
        if isinstance(expr, sympy.Pow) and isinstance(args[1], sympy.Integer) and 0 < int(args[1]) < 16:
            args = (args[0],) * int(args[1])
        elif not isinstance(expr, (sympy.Add, sympy.Mul, *_DIVIDED, *_REST, *_MAX, *_MIN)):
            raise Unknown
        polys = [self._poly(arg) for arg in args]
        found = polys[0]
        for other in polys[1:]:
            if isinstance(expr, sympy.Add):
                found = found.plus(other)
            elif isinstance(expr, (sympy.Mul, sympy.Pow)):
                found = found.times(other)
            elif isinstance(expr, _DIVIDED):
                found = quotient(found, other)
            elif isinstance(expr, _REST):
                found = remainder(found, other)
            else:
                found = extreme("max" if isinstance(expr, _MAX) else "min", found, other)
        return found

    def _rounded(self, expr: Any) -> Poly | None:
        """The whole number that a float becomes, by Python's `//`: `int(t * 0.5)`, `math.ceil(t / 4)`. None where the
        float may be another number than the fraction."""
        (of,) = expr.args
        if isinstance(of, _QUOTIENTS):
            over, by = map(self._poly, of.args)
        else:
            factor, over = self._scaled(of)
            if factor.denominator > _FINE:
                return None
            over, by = over.times(Poly.number(factor.numerator)), Poly.number(factor.denominator)
        least, divisor = over.least, by.least
        if least is None or least < 0 or divisor is None or divisor <= 0:
            return None
        if not isinstance(expr, _functions.CeilToInt):
            return quotient(over, by)
        return quotient(over.plus(by).plus(Poly.number(1), -1), by)


_functions = _sympy.functions
_ROUNDED = (_functions.TruncToInt, _functions.FloorToInt, _functions.CeilToInt)
_DIVIDED = (_functions.FloorDiv, _functions.CleanDiv)
_REST = (_functions.Mod, _functions.PythonMod)
_QUOTIENTS = (_functions.FloatTrueDiv, _functions.IntTrueDiv)
_FINE = 1024
"""Quotients of sizes below 2**40 that differ from one with so small a denominator differ as floats too."""
_ARITHMETIC: dict[Any, str] = {
    sympy.Add: "add",
    sympy.Mul: "mul",
    sympy.Pow: "pow",
    _functions.FloatPow: "pow",
    _functions.FloatTrueDiv: "div",
    _functions.IntTrueDiv: "div",
    _functions.OpaqueUnaryFn_sqrt: "sqrt",
}
"""SymPy's functions of floats, and the names of ours (`compiler.tape.FUNCTIONS`)."""
_MAX, _MIN = (_functions.Max, sympy.Max), (_functions.Min, sympy.Min)
_RELATIONS: dict[Any, tuple[str, int, bool]] = {
    sympy.Eq: ("==", 1, True),
    sympy.Ne: ("==", 1, False),
    sympy.Gt: (">", 1, True),
    sympy.Le: (">", 1, False),
    sympy.Lt: (">", -1, True),
    sympy.Ge: (">", -1, False),
}
"""For each of SymPy's relations: ours, whether of left - right or of right - left, and whether it holds then."""

_symbols: WeakKeyDictionary[Scope, Symbols] = WeakKeyDictionary()


def symbols_of(scope: Scope) -> Symbols:
    """Torch's symbols for those of a scope: always the same."""
    found = _symbols.get(scope)
    if found is None:
        found = _symbols[scope] = Symbols(scope)
    return found
