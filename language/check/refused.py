"""Code that the tracer refuses wherever it is in a program."""

from __future__ import annotations

import ast

from monarch.language.check.frames import Arguments, Follower, Frame
from monarch.language.check.kinds import UNKNOWN, AbstractValue, Kind


def read(interpreter: Follower, node: ast.expr, frame: Frame, what: str = "") -> None:
    because = f": {what}" if what else ""
    interpreter.refuse("M102", node, frame, f"'{frame.program}' cannot read a tensor's value into Python{because}")


def printed(interpreter: Follower, node: ast.expr, values: AbstractValue, frame: Frame) -> None:
    """Values that are made into text."""
    given = values.items if values.items is not None else (values,)
    if any(value.kind is Kind.TENSOR for value in given):
        interpreter.refuse("M103", node, frame, f"'{frame.program}' cannot print a tensor's value")


def written(interpreter: Follower, node: ast.expr | ast.stmt, value: AbstractValue, frame: Frame) -> None:
    """A tensor is changed in place."""
    if value.kind is Kind.TENSOR and value.origin == "argument" and _method(node) in _RESHAPING:
        interpreter.refuse("M105", node, frame, "an argument's shape is changed in place")
    elif value.kind is Kind.HOST:
        interpreter.refuse("M106", node, frame, "a plain tensor is changed in place in a program")


_RESHAPING = frozenset("unsqueeze_ squeeze_ t_ transpose_ swapaxes_ swapdims_ resize_ resize_as_".split())


def _method(node: ast.expr | ast.stmt) -> str:
    return node.func.attr if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else ""


def changing(interpreter: Follower, node: ast.expr, dotted: str, frame: Frame) -> None:
    interpreter.refuse("M301", node, frame, f"{dotted.removeprefix('builtins.')} gives a different value at every call")


def indexed(interpreter: Follower, node: ast.Subscript, index: AbstractValue, frame: Frame) -> None:
    """Selecting by a mask gives as many entries as are true."""
    parts = index.items if index.items is not None else (index,)
    if any(part.kind is Kind.TENSOR and part.boolean for part in parts):
        interpreter.refuse("M104", node, frame, "selecting by a mask gives a shape that depends on values")


def generator_given(interpreter: Follower, node: ast.Call, arguments: Arguments, frame: Frame) -> None:
    if arguments.keywords.get("generator", UNKNOWN).kind is Kind.GENERATOR:
        interpreter.refuse("M109", node, frame, "a torch.Generator cannot draw a program's random numbers")


def compares(value: AbstractValue, other: AbstractValue, node: ast.expr, place: ast.expr) -> bool:
    """Whether two lists or tuples that are written out are compared by a tensor in them: the first entries are, if both
    have as many. The same object is equal without a comparison, as None and strings are unequal."""
    if not (isinstance(node, ast.List | ast.Tuple) and isinstance(place, ast.List | ast.Tuple)):
        return False
    if value.items is None or other.items is None or not node.elts or len(node.elts) != len(place.elts):
        return False
    if Kind.TENSOR not in (value.items[0].kind, other.items[0].kind):
        return False
    first, second = node.elts[0], place.elts[0]
    simple = [part for part in (first, second) if isinstance(part, ast.Constant)]
    return ast.dump(first) != ast.dump(second) and all(_is_number(part) for part in simple)


def written_out(node: ast.expr, frame: Frame) -> ast.expr:
    """The list or tuple that a name is, if it is one whose first entry is made anew where it is written: no other name
    has that tensor."""
    found = frame.scope.only(node.id) if isinstance(node, ast.Name) else None
    if isinstance(found, ast.List | ast.Tuple) and found.elts and isinstance(found.elts[0], ast.Call | ast.BinOp):
        return found
    return node


def looks_up(node: ast.expr, value: AbstractValue, holder: AbstractValue, place: ast.expr) -> bool:
    """Whether to find a value in a list compares a tensor with a number. Names, None and strings are passed: the same
    object is found without a comparison, and no tensor equals None or a string."""
    if isinstance(place, ast.List | ast.Tuple) and value.kind is Kind.TENSOR:
        return any(_is_number(part) for part in place.elts)
    items = holder.items or ()
    return _is_number(node) and not isinstance(place, ast.Set) and any(item.kind is Kind.TENSOR for item in items)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def alpha_given(interpreter: Follower, node: ast.Call, arguments: Arguments, frame: Frame) -> None:
    if arguments.keywords.get("alpha", UNKNOWN).kind is Kind.TENSOR:
        read(interpreter, node, frame, "alpha is a Python number")


def sizes(interpreter: Follower, node: ast.Call, arguments: Arguments, frame: Frame) -> None:
    values = [value for given in arguments.positional for value in (given, *(given.items or ()))]
    if any(value.kind is Kind.TENSOR for value in values):
        read(interpreter, node, frame, "a size is a Python number")
