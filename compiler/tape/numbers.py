"""Numbers on a tape.

Numbers that a program takes anew at every call (an optimizer's learning rate, a float argument) are `Expr`s: small
expression trees over named scalars, which become ops on f64[] tensors.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Number:
    """A float, complex number or bool on a tape. Wrapped, for Python takes 1, 1.0 and True for equal, and nan for
    unequal to itself."""

    text: str
    value: complex = field(compare=False)

    @staticmethod
    def of(value: complex) -> Number:
        return Number(repr(value), value)


@dataclass(frozen=True, slots=True)
class Expr:
    """A number known only when the step runs.

    `op` is "scalar" (args: a scalar's label, and "f64" or "i64"), "item" (args: a Value of type f64[]), or a function
    of `FUNCTIONS` over Exprs and numbers.
    """

    op: str
    args: tuple[Any, ...]

    def __str__(self) -> str:
        if self.op == "scalar":
            return str(self.args[0])
        if self.op == "item":
            return f"{self.args[0]}.item()"
        infix = {"add": "+", "sub": "-", "mul": "*", "div": "/", "pow": "**"}.get(self.op)
        if infix:
            return f"({self.args[0]} {infix} {self.args[1]})"
        return f"{self.op}({', '.join(map(str, self.args))})"


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "div": operator.truediv,
    "pow": operator.pow,
    "neg": operator.neg,
    "abs": abs,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "float": float,
    "sqrt": math.sqrt,
    "cos": math.cos,
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}
"""What an Expr's op computes. Comparisons, and what is computed of whole numbers, are only evaluated, never put on a
graph."""


def evaluate(expr: Expr | float, scalars: Mapping[str, float]) -> Any:
    """The value of an expression over named scalars. KeyError where it depends on a tensor or an unknown scalar."""
    if not isinstance(expr, Expr):
        return expr
    if expr.op == "scalar":
        return scalars[expr.args[0]]
    if expr.op == "item":
        raise KeyError(str(expr))
    return FUNCTIONS[expr.op](*(evaluate(arg, scalars) for arg in expr.args))
