"""Named sizes: whole numbers that a program is compiled for without knowing them.

A `Size` is an expression of symbols: `b*t`, `t//4`, `max(t, 8)`. It stands wherever the compiler has the size of a
dim, and passes `isinstance(size, int)`; C code does not take it for an int. In the `Scope` in which a program is
compiled each symbol has an *example* value. Whoever decides something on a Size (compares it, asks whether it divides,
takes it for a number) gets the example's answer, and the scope notes the decision as a `Condition`. What is compiled is
right for all values that decide the same, whatever part of the compiler looked. Decisions that change only how fast a
program is use `example(size)`, and note nothing.

Symbols are at least 2: programs of sizes 0 and 1 are others, for such dims broadcast, or hold nothing.

A Size is hashed by its expression, so sets and dicts take equal values for different where their expressions are.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from monarch.compiler.errors import MonarchError

LEAST = 2
"""The least value of a symbol."""

ENDLESS = 2**62
"""Ends of slices that mean the end of the dim: no size is so large."""

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


@dataclass(frozen=True)
class Function:
    """An atom that is no symbol: `//`, `%`, `max` or `min` of two polynomials; `/` is a division that leaves nothing,
    as a condition says."""

    name: str
    left: Poly
    right: Poly

    @cached_property
    def text(self) -> str:
        left, right = self.left.text, self.right.text
        if self.name in ("max", "min"):
            return f"{self.name}({left}, {right})"
        return f"{_enclosed(left)}{self.name}{_enclosed(right)}"


_Atom = str | Function
_Term = tuple[_Atom, ...]


def _key(atom: _Atom) -> str:
    return atom if isinstance(atom, str) else f"({atom.text})"


@dataclass(frozen=True)
class Poly:
    """A sum of products of atoms with whole coefficients: in one order, so that equal sums are equal."""

    terms: tuple[tuple[_Term, int], ...]

    @staticmethod
    def of(terms: Mapping[_Term, int]) -> Poly:
        for term, factor in terms.items():
            for at, atom in enumerate(term):
                if not isinstance(atom, str) and atom.name == "/" and factor % (by := atom.right.value or 0) == 0:
                    rest = Poly(((term[:at] + term[at + 1 :], factor // by),))
                    others = {other: each for other, each in terms.items() if other != term}
                    return Poly.of(others).plus(rest.times(atom.left))
        kept = [(term, factor) for term, factor in terms.items() if factor]
        return Poly(tuple(sorted(kept, key=lambda entry: (-len(entry[0]), [_key(atom) for atom in entry[0]]))))

    @staticmethod
    def number(value: int) -> Poly:
        return Poly.of({(): value})

    @property
    def value(self) -> int | None:
        """Its value, if it is a number."""
        if not self.terms:
            return 0
        return self.terms[0][1] if len(self.terms) == 1 and not self.terms[0][0] else None

    def plus(self, other: Poly, sign: int = 1) -> Poly:
        terms = dict(self.terms)
        for term, factor in other.terms:
            terms[term] = terms.get(term, 0) + sign * factor
        return Poly.of(terms)

    def times(self, other: Poly) -> Poly:
        terms: dict[_Term, int] = {}
        for left, a in self.terms:
            for right, b in other.terms:
                term = tuple(sorted((*left, *right), key=_key))
                terms[term] = terms.get(term, 0) + a * b
        return Poly.of(terms)

    def divided(self, other: Poly) -> Poly | None:
        """The quotient, where every term is a multiple of the divisor, which has one term; None otherwise."""
        if len(other.terms) != 1:
            return Poly.number(1) if self == other and self.terms else None
        ((divisor, factor),) = other.terms
        terms: dict[_Term, int] = {}
        for term, coefficient in self.terms:
            rest = list(term)
            for atom in divisor:
                if atom not in rest:
                    return None
                rest.remove(atom)
            if coefficient % factor:
                return None
            terms[tuple(rest)] = coefficient // factor
        return Poly.of(terms)

    @cached_property
    def symbols(self) -> frozenset[str]:
        found: set[str] = set()
        for term, _ in self.terms:
            for atom in term:
                found |= {atom} if isinstance(atom, str) else atom.left.symbols | atom.right.symbols
        return frozenset(found)

    def at(self, values: Mapping[str, int]) -> int:
        """Its value where symbols have these. Raises KeyError for a symbol without one, ZeroDivisionError."""
        total = 0
        for term, factor in self.terms:
            for atom in term:
                if isinstance(atom, str):
                    factor *= values[atom]
                else:
                    factor *= FUNCTIONS[atom.name](atom.left.at(values), atom.right.at(values))
            total += factor
        return total

    @cached_property
    def least(self) -> int | None:
        """A bound from below for all values of the symbols, if one is plain: each atom is its own bound and what is
        over it, and then no coefficient is negative."""
        over = Poly.of({})
        for term, factor in self.terms:
            product = Poly.number(factor)
            for atom in term:
                low = LEAST if isinstance(atom, str) else atom_least(atom)
                if low is None:
                    return None
                product = product.times(Poly.of({(atom,): 1, (): low}))
            over = over.plus(product)
        if any(factor < 0 for term, factor in over.terms if term):
            return None
        return next((factor for term, factor in over.terms if not term), 0)

    @cached_property
    def text(self) -> str:
        text = ""
        for term, factor in self.terms:
            parts = [atom if isinstance(atom, str) else _enclosed(atom.text) for atom in term]
            if abs(factor) != 1 or not parts:
                parts.insert(0, str(abs(factor)))
            sign = "-" if factor < 0 else "+"
            body = "*".join(parts)
            text += f" {sign} {body}" if text else f"-{body}" if factor < 0 else body
        return text or "0"


def atom_least(atom: Function) -> int | None:
    """A bound from below for a function of sizes, if one is plain."""
    left, right = atom.left.least, atom.right.least
    if atom.name == "max":
        return max((low for low in (left, right) if low is not None), default=None)
    if atom.name == "min":
        return None if left is None or right is None else min(left, right)
    if atom.name == "%":
        return 0 if right is not None and right > 0 else None
    by = atom.right.value
    return None if left is None or by is None or by <= 0 else left // by


def _enclosed(text: str) -> str:
    return text if text.isalnum() or _NAME.fullmatch(text) or text.startswith(("max(", "min(")) else f"({text})"


FUNCTIONS: dict[str, Callable[[int, int], int]] = {
    "//": lambda a, b: a // b,
    "/": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "max": max,
    "min": min,
}


@dataclass(frozen=True)
class Condition:
    """What has to hold of the sizes: whether `poly` is 0, or more than 0 (`relation` is "==" or ">"), is `truth`."""

    poly: Poly
    relation: str
    truth: bool

    def holds(self, values: Mapping[str, int]) -> bool:
        found = self.poly.at(values)
        return ((found == 0) if self.relation == "==" else found > 0) is self.truth

    def __str__(self) -> str:
        """`t != 8`, `b*t > 64`, `t % 4 == 0`: positive terms on the left."""
        sign = ("==" if self.truth else "!=") if self.relation == "==" else (">" if self.truth else "<=")
        left = Poly(tuple((term, factor) for term, factor in self.poly.terms if factor > 0 and term))
        right = Poly.of({}).plus(self.poly.plus(left, -1), -1)
        return f"{left.text} {sign} {right.text}"


class Scope:
    """The symbols of a program, with the example value of each, and what was decided on them so far."""

    def __init__(self, examples: Mapping[str, int]) -> None:
        self.examples = dict(examples)
        self.conditions: dict[Condition, str] = {}
        """Each with the place that decided it, for people."""

    def decide(self, poly: Poly, relation: str) -> bool:
        """Whether the relation holds for the examples; noted, where other values could decide otherwise."""
        value = poly.at(self.examples)
        truth = value == 0 if relation == "==" else value > 0
        if not _always(poly, relation, truth):
            condition = Condition(poly, relation, truth)
            if condition not in self.conditions:
                self.conditions[condition] = _place()
        return truth

    def note(self, condition: Condition, where: str) -> None:
        """Note what was decided elsewhere, for these examples."""
        if not _always(condition.poly, condition.relation, condition.truth):
            self.conditions.setdefault(condition, where)

    def is_multiple(self, poly: Poly, by: int) -> bool:
        """Whether it is known that `by` divides a size: nothing is decided."""
        if all(factor % by == 0 for _, factor in poly.terms):
            return True
        rest = Poly.of({(Function("%", poly, Poly.number(by)),): 1})
        if Condition(rest, "==", True) in self.conditions:
            return True
        if len(poly.terms) == 1 and len(poly.terms[0][0]) > 1:
            return any(self.is_multiple(Poly.of({(atom,): 1}), by) for atom in poly.terms[0][0])
        return False

    def holds(self, values: Mapping[str, int]) -> bool:
        """Whether sizes of these values decide everything as the examples do."""
        return all(condition.holds(values) for condition in self.conditions)


def _always(poly: Poly, relation: str, truth: bool) -> bool:
    if poly.value is not None or any(not term and abs(factor) >= ENDLESS for term, factor in poly.terms):
        return True
    low, high = poly.least, Poly.of({}).plus(poly, -1).least
    if relation == "==" and not truth:
        return (low is not None and low > 0) or (high is not None and high > 0)
    if relation == ">":
        return (low is not None and low > 0) if truth else (high is not None and high >= 0)
    return False


def _place() -> str:
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


if TYPE_CHECKING:
    _Int = int
else:
    _Int = object


def _operator(of_float: str, compute: Callable[[Poly, Poly], Poly]) -> Callable[[Size, Any], Any]:
    """Arithmetic of a size with a whole number. With a float it is that method of the number that the size is here."""

    def method(self: Size, other: Any) -> Any:
        found = poly_of(other)
        if found is not None:
            return self._with(compute(self.poly, found), other)
        return getattr(float(int(self)), of_float)(other) if of_float and isinstance(other, float) else NotImplemented

    return method


class Size(_Int):
    """A whole number that is an expression of symbols. See the module."""

    __slots__ = ("poly", "scope")
    poly: Poly
    scope: Scope | None
    """Where decisions on it are noted. None for a Size that was read from text, as an annotation is: nothing can be
    decided on it."""

    def __new__(cls, poly: Poly, scope: Scope | None = None) -> int:  # type: ignore[misc]
        value = poly.value
        if value is not None:
            return value
        self = object.__new__(cls)
        self.poly, self.scope = poly, scope
        return self

    @property  # type: ignore[misc]
    def __class__(self) -> type[int]:  # type: ignore[override]
        return int

    def __reduce__(self) -> Any:
        return Size, (self.poly,)

    def __copy__(self) -> Size:
        return self

    def __deepcopy__(self, memo: object) -> Size:
        return self

    def __hash__(self) -> int:
        return hash(self.poly)

    def __repr__(self) -> str:
        return self.poly.text

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return self.poly.text if spec in ("", "d") else format(self.poly.text, spec)

    # -- decisions -------------------------------------------------------------------------------------------------

    def _decide(self, poly: Poly, relation: str) -> bool:
        if poly.value is not None:
            return poly.value == 0 if relation == "==" else poly.value > 0
        if self.scope is None:
            raise MonarchError(
                f"the size {self.poly.text} has no value here",
                hint="a program of named sizes is read as it is; its sizes are known where it is called.",
            )
        return self.scope.decide(poly, relation)

    def __eq__(self, other: object) -> bool:
        found = poly_of(other)
        if found is None:
            return NotImplemented
        if type(other) is Size and other.scope is not self.scope:
            return False  # what is remembered of another program's sizes is not of these
        if self.scope is None:
            return found == self.poly
        return self._decide(self.poly.plus(found, -1), "==")

    def __ne__(self, other: object) -> bool:
        equal = self.__eq__(other)
        return equal if equal is NotImplemented else not equal

    def __gt__(self, other: Any) -> bool:
        found = poly_of(other)
        return NotImplemented if found is None else self._decide(self.poly.plus(found, -1), ">")

    def __lt__(self, other: Any) -> bool:
        found = poly_of(other)
        return NotImplemented if found is None else self._decide(found.plus(self.poly, -1), ">")

    def __ge__(self, other: Any) -> bool:
        found = self.__lt__(other)
        return found if found is NotImplemented else not found

    def __le__(self, other: Any) -> bool:
        found = self.__gt__(other)
        return found if found is NotImplemented else not found

    def __bool__(self) -> bool:
        return not self._decide(self.poly, "==")

    def __index__(self) -> int:
        """Its value, which all that is compiled then depends on."""
        if self.scope is None:
            self._decide(self.poly, "==")
        value = self.poly.at(self.scope.examples)  # type: ignore[union-attr]
        self._decide(self.poly.plus(Poly.number(value), -1), "==")
        return value

    __int__ = __trunc__ = __index__

    def __float__(self) -> float:
        return float(self.__index__())

    # -- arithmetic ------------------------------------------------------------------------------------------------

    def _with(self, poly: Poly, other: Any = None) -> Any:
        return Size(poly, self.scope if self.scope is not None else getattr(other, "scope", None))

    __add__ = __radd__ = _operator("__add__", lambda own, other: own.plus(other))
    __sub__ = _operator("__sub__", lambda own, other: own.plus(other, -1))
    __rsub__ = _operator("__rsub__", lambda own, other: other.plus(own, -1))
    __mul__ = __rmul__ = _operator("__mul__", lambda own, other: own.times(other))
    __rfloordiv__ = _operator("", lambda own, other: quotient(other, own))
    __mod__ = _operator("", lambda own, other: remainder(own, other))
    __rmod__ = _operator("", lambda own, other: remainder(other, own))

    def __neg__(self) -> Any:
        return self._with(Poly.of({}).plus(self.poly, -1))

    def __pos__(self) -> Size:
        return self

    def __abs__(self) -> Any:
        return self if self >= 0 else -self

    def __floordiv__(self, other: Any) -> Any:
        found = poly_of(other)
        if found is None:
            return NotImplemented
        if self.scope is not None and (by := found.value) and by > 0 and self.poly.divided(found) is None:
            if self.scope.is_multiple(self.poly, by):
                return self._with(Poly.of({(Function("/", self.poly, found),): 1}))
        return self._with(quotient(self.poly, found), other)

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __truediv__(self, other: Any) -> Any:
        return int(self) / other

    def __rtruediv__(self, other: Any) -> Any:
        return other / int(self)

    def __pow__(self, other: Any) -> Any:  # type: ignore[override]
        return int(self) ** other


def poly_of(value: object) -> Poly | None:
    """The expression of a whole number; None for anything else."""
    if type(value) is Size:
        return value.poly
    return Poly.number(int(value)) if type(value) in (int, bool) else None  # type: ignore[call-overload]


def is_multiple(size: int, by: int) -> bool:
    """Whether `by` divides a size; of a Size, whether that is known: nothing is decided."""
    if type(size) is not Size or size.scope is None:
        return size % by == 0
    return size.scope.is_multiple(size.poly, by)


def common_factor(one: int, two: int) -> int:
    """A factor of both, the greatest of numbers; of Sizes the greatest that their expressions show."""
    left, right = poly_of(one), poly_of(two)
    assert left is not None and right is not None
    if left.value is not None and right.value is not None:
        return math.gcd(left.value, right.value)
    scope = one.scope if type(one) is Size else two.scope  # type: ignore[attr-defined]
    if left == right:
        return Size(left, scope)
    if len(left.terms) != 1 or len(right.terms) != 1:
        return 1
    ((atoms, a),), ((others, b),) = left.terms, right.terms
    rest, shared = list(others), []
    for atom in atoms:
        if atom in rest:
            rest.remove(atom)
            shared.append(atom)
    return Size(Poly.of({tuple(shared): math.gcd(a, b)}), scope)


def quotient(left: Poly, right: Poly) -> Poly:
    """Their quotient, rounded down. Raises ZeroDivisionError."""
    if right.value == 0:
        raise ZeroDivisionError("division of a size by 0")
    exact = left.divided(right)
    if exact is None and (by := right.value) and by > 0 and all(factor < 0 for term, factor in left.terms if term):
        # -(-n // by) is n divided and rounded up
        up = Poly.of({}).plus(left, -1).plus(Poly.number(by - 1))
        return Poly.of({}).plus(quotient(up, right), -1)
    return exact if exact is not None else Poly.of({(Function("//", left, right),): 1})


def remainder(left: Poly, right: Poly) -> Poly:
    """What is left of the one divided by the other, as Python's `%`. Raises ZeroDivisionError."""
    if right.value == 0:
        raise ZeroDivisionError("division of a size by 0")
    if left.divided(right) is not None:
        return Poly.of({})
    return Poly.of({(Function("%", left, right),): 1})


def symbol(name: str, scope: Scope | None = None) -> Size:
    """The size of this name."""
    return Size(Poly.of({(name,): 1}), scope)  # type: ignore[return-value]


def extreme(name: str, left: Poly, right: Poly) -> Poly:
    """The larger ("max") or the smaller ("min") of two."""
    if left.value is not None and right.value is not None:
        return Poly.number(FUNCTIONS[name](left.value, right.value))
    return left if left == right else Poly.of({(Function(name, left, right),): 1})


def is_named(value: object) -> bool:
    """Whether a value is a Size: a number that is not known."""
    return type(value) is Size


def scope_of(value: object) -> Scope | None:
    """Where decisions on a Size are noted; None for a number."""
    return value.scope if type(value) is Size else None


def example(value: int) -> int:
    """A size's value in the example that is compiled for, for decisions of which nothing but time depends."""
    if type(value) is not Size:
        return value
    if value.scope is None:
        return int(value)
    return value.poly.at(value.scope.examples)


def same(one: Any, two: Any) -> bool:
    """Whether two sizes, or shapes, are equal whatever the names stand for: nothing is decided."""
    if isinstance(one, (list, tuple)):
        if len(one) != len(two):
            return False
        if all(type(size) is int for size in (*one, *two)):
            return [*one] == [*two]
        return all(map(same, one, two))
    return poly_of(one) == poly_of(two)


def examples(value: Any) -> Any:
    """A size, or a list or tuple (of lists and tuples) of sizes, as `example` has them."""
    return type(value)([examples(entry) for entry in value]) if isinstance(value, (list, tuple)) else example(value)


def has_names(value: object) -> bool:
    """Whether there is a Size in a value, or in a list, tuple or dict, at any depth."""
    if isinstance(value, list) or type(value) is tuple:  # torch.fx has lists of a class of its own
        return any(map(has_names, value))
    if isinstance(value, dict):
        return any(map(has_names, value.values()))
    return type(value) is Size


def value_at(value: Any, values: Mapping[str, int]) -> Any:
    """A size, or a list, tuple or dict with sizes in it, where symbols have these values."""
    if type(value) is Size:
        return value.poly.at(values)
    if isinstance(value, list):
        return [value_at(entry, values) for entry in value]
    if type(value) is tuple:
        return tuple([value_at(entry, values) for entry in value])
    if type(value) is dict:
        return {key: value_at(entry, values) for key, entry in value.items()}
    return value
