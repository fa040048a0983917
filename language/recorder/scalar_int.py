"""Whole numbers that are known only when a step runs, as Python's ints look to a program: `ScalarInt`.

A step counter is one. Arithmetic on it builds an expression, which each call evaluates in Python, exactly. A comparison
becomes a guard of its result, and any other use a guard of the number's value. No op takes a ScalarInt: where it meets
a float or a tensor of floats, a `Scalar` stands for it, whose value each call computes before its step.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from monarch.compiler.tape import FUNCTIONS, Expr
from monarch.language.recorder.scalar import Scalar

_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_EXACT = ("add", "sub", "mul")
_BY_A_NUMBER = ("div", "floordiv", "mod")
_NOT_NUMBERS = (str, bytes, type(None), list, tuple, dict, set, type)
"""What no int equals."""


class OfCall(Protocol):
    """What a ScalarInt asks of the trace that it belongs to."""

    def guard(self, expr: Expr, value: Any) -> None:
        """Note what has to hold for the trace to be valid at a later call."""

    def refuse(self) -> None:
        """Note that code asks for the bytes of a ScalarInt, which are others than those of an int."""

    def as_float(self, expr: Expr, value: float) -> Scalar:
        """The float that this expression is at each call."""


class ScalarInt:
    """An int that is an input of the program's every call, or is computed from such."""

    __slots__ = ("call", "expr", "hint")

    def __init__(self, expr: Expr, hint: int, call: OfCall) -> None:
        self.expr = expr
        self.hint = hint
        self.call = call

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What `isinstance` is told: an int, as it is without a program."""
        return int

    def value(self) -> int:
        """The value now, which the trace then depends on."""
        self.call.guard(self.expr, self.hint)
        return self.hint

    __int__ = __index__ = value

    def __float__(self) -> float:
        return float(self.value())

    def __complex__(self) -> complex:
        return complex(self.value())

    def __bool__(self) -> bool:
        return bool(_apply("ne", self, 0))

    def __repr__(self) -> str:
        return repr(self.value())

    __str__ = __repr__

    def __hash__(self) -> int:
        return hash(self.value())

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        self.call.refuse()
        return int, (self.value(),)

    __array_ufunc__ = None
    """NumPy's operators leave it to those of this class: to them an int has no dtype."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.array(self.value(), dtype)

    def __deepcopy__(self, memo: Any) -> ScalarInt:
        return self

    def __copy__(self) -> ScalarInt:
        return self

    def __pos__(self) -> ScalarInt:
        return self

    __trunc__ = __floor__ = __ceil__ = __pos__

    def __neg__(self) -> ScalarInt:
        return ScalarInt(Expr("neg", (self.expr,)), -self.hint, self.call)

    def __abs__(self) -> ScalarInt:
        return ScalarInt(Expr("abs", (self.expr,)), abs(self.hint), self.call)

    def __round__(self, digits: int | None = None) -> Any:
        return self if digits is None else round(self.value(), digits)

    def __getattr__(self, name: str) -> Any:
        if not hasattr(int, name):
            raise AttributeError(f"'int' object has no attribute '{name}'")
        return getattr(self.value(), name)

    def as_float(self) -> Scalar:
        """It, as a float."""
        return self.call.as_float(Expr("float", (self.expr,)), float(self.hint))


def _plain(number: Any) -> Any:
    """A number itself, which the trace then depends on where it is another at each call."""
    return number.value() if type(number) is ScalarInt else number


def _apply(name: str, left: Any, right: Any) -> Any:
    """A binary operation, one of whose operands is a ScalarInt."""
    symbol, other = (left, right) if type(left) is ScalarInt else (right, left)
    call: OfCall = symbol.call
    if type(other) in (int, bool, ScalarInt):
        return _of_ints(name, left, right, call)
    if name in ("eq", "ne") and isinstance(other, _NOT_NUMBERS):
        return NotImplemented
    is_symbolic = isinstance(other, torch.SymFloat) and other.node.hint is not None
    if name in _COMPARISONS and (type(other) is float or is_symbolic):
        exprs = tuple(_expr(each) for each in (left, right))
        result = FUNCTIONS[name](*(_now(each) for each in (left, right)))
        call.guard(Expr(name, exprs), result)
        return result
    takes_floats = type(other) is float or isinstance(other, torch.SymFloat) or _has_floats(other)
    if takes_floats and name in (*_EXACT, "div", "pow"):
        return FUNCTIONS[name](*(each.as_float() if each is symbol else each for each in (left, right)))
    return FUNCTIONS[name](_plain(left), _plain(right))


def _has_floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _expr(number: Any) -> Any:
    if type(number) is ScalarInt:
        return number.expr
    return number.node.expr if isinstance(number, torch.SymFloat) else number


def _now(number: Any) -> Any:
    if type(number) is ScalarInt:
        return number.hint
    return number.node.hint if isinstance(number, torch.SymFloat) else number


def _of_ints(name: str, left: Any, right: Any, call: OfCall) -> Any:
    if name in _BY_A_NUMBER or name == "pow":
        right = _plain(right)  # whether it is 0 or negative decides what there is
    if type(left) is not ScalarInt and type(right) is not ScalarInt:
        return FUNCTIONS[name](left, right)
    left, right = (int(each) if type(each) is bool else each for each in (left, right))
    result = FUNCTIONS[name](_now(left), _now(right))
    expr = Expr(name, (_expr(left), _expr(right)))
    if name in _COMPARISONS:
        call.guard(expr, result)
        return result
    if name == "div":
        return call.as_float(expr, result)
    if name == "pow" and right < 0:
        return FUNCTIONS[name](_plain(left), right)
    return ScalarInt(expr, result, call)


def _by_value(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *args: function(self.value(), *map(_plain, args))


def _reflected(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, other: function(_plain(other), self.value())


def _install() -> None:
    def binary(name: str, is_reflected: bool) -> Callable[..., Any]:
        if is_reflected:
            return lambda self, other: _apply(name, other, self)
        return lambda self, other: _apply(name, self, other)

    for method, name in (("truediv", "div"), *((name, name) for name in (*_EXACT, "floordiv", "mod", "pow"))):
        setattr(ScalarInt, f"__{method}__", binary(name, False))
        setattr(ScalarInt, f"__r{method}__", binary(name, True))
    for name in _COMPARISONS:
        setattr(ScalarInt, f"__{name}__", binary(name, False))
    for name in ("and", "or", "xor", "lshift", "rshift"):
        setattr(ScalarInt, f"__{name}__", _by_value(getattr(operator, f"__{name}__")))
        setattr(ScalarInt, f"__r{name}__", _reflected(getattr(operator, f"__{name}__")))
    setattr(ScalarInt, "__divmod__", _by_value(divmod))  # noqa: B010
    setattr(ScalarInt, "__rdivmod__", _reflected(divmod))  # noqa: B010
    setattr(ScalarInt, "__invert__", _by_value(operator.invert))  # noqa: B010


_install()
NUMBERS = (torch.SymFloat, ScalarInt)
"""The types of numbers that are known only when a step runs."""
