"""Numbers that are known only when a step runs, as Python floats look to a program: `Scalar`.

A Scalar is a `torch.SymFloat`, so it passes through ATen's calls. Arithmetic on it builds an expression; where Python
needs its value (a branch, a call of `float`) the value it has now is used, and the fact noted as a *guard* that has
to hold for the trace to be valid at a later call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch

from monarch.compiler.tape import FUNCTIONS, Expr
from monarch.language.errors import branch_error
from monarch.language.source import user_source

Guard = Callable[[Expr, Any], None]
Ask = Callable[[], Any]


class SymbolicNode:
    """A node's answers to torch, which calls the methods of a SymNode on it: a number of one type that only a call, or
    only the workers, know."""

    __slots__ = ()
    number: type

    def is_int(self) -> bool:
        return self.number is int

    def is_float(self) -> bool:
        return self.number is float

    def is_bool(self) -> bool:
        return False

    def is_nested_int(self) -> bool:
        return False

    def is_constant(self) -> bool:
        return False

    def is_symbolic(self) -> bool:
        return True

    def clone(self) -> Self:
        return self


class ScalarNode(SymbolicNode):
    """The node of a Scalar: its expression, its value now (None where only the workers know it), and the function that
    takes its guards."""

    __slots__ = ("ask", "expr", "guard", "hint")
    number = float

    def __init__(self, expr: Expr, hint: float | None, guard: Guard, ask: Ask | None = None) -> None:
        self.expr = expr
        self.hint = hint
        self.guard = guard  # of the recording on whose tape the expression's values are
        self.ask = ask

    def value(self) -> Any:
        """The value now, which the trace then depends on. Outside of programs the workers are asked for it."""
        if self.hint is None:
            if self.ask is None:
                raise branch_error(user_source())
            return self.ask()
        self.guard(self.expr, self.hint)
        return self.hint

    def has_hint(self) -> bool:
        return self.hint is not None

    def maybe_as_float(self) -> float | None:
        return None

    def guard_float(self, file: str, line: int) -> float:
        return float(self.value())

    def _graph_repr(self) -> str:
        return str(self.expr)

    def __str__(self) -> str:
        return str(self.expr)


class Scalar(torch.SymFloat):
    """A float that is an input of the program's every call, or is computed from such."""

    def __init__(self, expr: Expr, hint: float | None, guard: Guard, ask: Ask | None = None) -> None:
        super().__init__(ScalarNode(expr, hint, guard, ask))

    def __float__(self) -> float:
        return float(self.node.value())

    def __int__(self) -> int:
        return int(self.node.value())

    def __bool__(self) -> bool:
        return bool(self.node.value())

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class that `isinstance` sees: a float, as it is without a program. PyTorch asks for the type first."""
        return float

    def __repr__(self) -> str:
        return repr(self.node.value())

    __str__ = __repr__

    def __hash__(self) -> int:
        return hash(self.node.value())

    def __format__(self, spec: str) -> str:
        return format(self.node.value(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.node.guard.__self__.needs_values = True
        return float, (float(self),)  # a copy, in memory or in a file, is a plain number

    __array_ufunc__ = None
    """NumPy's operators leave it to those of this class: to them a float has no dtype."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(float(self), dtype)

    def __deepcopy__(self, memo: Any) -> Scalar:
        return self

    def __copy__(self) -> Scalar:
        return self

    @property
    def real(self) -> Scalar:
        return self

    @property
    def imag(self) -> float:
        return 0.0

    def sqrt(self) -> Scalar:
        result: Scalar = _apply("sqrt", self)
        return result

    def cos(self) -> Scalar:
        result: Scalar = _apply("cos", self)
        return result


def _apply(name: str, *operands: Any) -> Any:
    first = next(operand for operand in operands if isinstance(operand, torch.SymFloat))
    guard = next((n.node.guard for n in operands if isinstance(n, torch.SymFloat) and n.node.ask), first.node.guard)
    nodes = [operand.node for operand in operands if isinstance(operand, torch.SymFloat)]
    if name in ("eq", "ne", "lt", "le", "gt", "ge") and any(node.ask is not None for node in nodes):
        return FUNCTIONS[name](*(o.node.value() if isinstance(o, torch.SymFloat) else o for o in operands))
    exprs: list[Any] = []
    hints: list[Any] = []
    for operand in operands:
        if isinstance(operand, torch.SymFloat):
            exprs.append(operand.node.expr)
            hints.append(operand.node.hint)
        elif type(operand) in (float, int, bool):  # NumPy's floats give results of their own type
            exprs.append(float(operand))
            hints.append(float(operand))
        else:
            return NotImplemented
    known = all(hint is not None for hint in hints)
    hint = FUNCTIONS[name](*hints) if known else None
    expr = Expr(name, tuple(exprs))
    if name in ("eq", "ne", "lt", "le", "gt", "ge"):
        if not known:
            raise branch_error(user_source())
        guard(expr, hint)
        return hint
    if len({id(node.guard.__self__) for node in nodes if node.ask is not None}) > 1:  # of tapes that have run since
        return FUNCTIONS[name](*(o.node.value() if isinstance(o, torch.SymFloat) else o for o in operands))
    if not known and any(node.ask is not None for node in nodes):

        def ask() -> Any:
            values = (o.node.value() if isinstance(o, torch.SymFloat) else o for o in operands)
            return FUNCTIONS[name](*values)

        return Scalar(expr, hint, guard, ask)
    return Scalar(expr, hint, guard)


_OF_FLOATS = (
    *("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__divmod__", "__rdivmod__", "__floor__", "__ceil__"),
    *("__trunc__", "__round__", "as_integer_ratio", "is_integer", "hex", "conjugate"),
)
"""A question that no expression answers: it is asked of the value, which the trace then depends on."""


def _by_value(method: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: method(
        float(self), *(float(each) if isinstance(each, torch.SymFloat) else each for each in args)
    )


def _install() -> None:
    def binary(name: str, reverse: bool) -> Callable[..., Any]:
        if reverse:
            return lambda self, other: _apply(name, other, self)
        return lambda self, other: _apply(name, self, other)

    for method, name in (("add", "add"), ("sub", "sub"), ("mul", "mul"), ("truediv", "div"), ("pow", "pow")):
        setattr(Scalar, f"__{method}__", binary(name, False))
        setattr(Scalar, f"__r{method}__", binary(name, True))
    for method in ("eq", "ne", "lt", "le", "gt", "ge"):
        setattr(Scalar, f"__{method}__", binary(method, False))
    for method, name in (("neg", "neg"), ("abs", "abs")):
        setattr(Scalar, f"__{method}__", lambda self, name=name: _apply(name, self))
    setattr(Scalar, "__pos__", lambda self: self)  # noqa: B010
    for name in _OF_FLOATS:
        setattr(Scalar, name, _by_value(getattr(float, name)))


_install()
