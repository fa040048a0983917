"""Calls in a program: their results, and which of them the tracer refuses."""

from __future__ import annotations

import ast
from dataclasses import dataclass, replace

from monarch.language.check.frames import Arguments, Follower, Frame, of_parameters, result_of
from monarch.language.check.imported import ImportedCall, applied
from monarch.language.check.kinds import (
    DERIVED,
    LISTS,
    MADE,
    PYTHON,
    PYTHON_METHODS,
    READS,
    SHAPE_TAKERS,
    SOME,
    TENSOR_METHODS,
    UNKNOWN,
    VALUE_SHAPES,
    VIEWS,
    AbstractValue,
    Kind,
    container,
    entry_of,
    iterated,
    join,
    join_all,
)
from monarch.language.check.refused import alpha_given, generator_given, looks_up, printed, read, sizes, written

_GROWS = {"append", "extend", "insert", "add", "appendleft", "extendleft"}
_CHANGES = {"update", "setdefault", "pop", "popitem", "remove", "discard", "popleft"}


def evaluate(interpreter: Follower, node: ast.Call, frame: Frame) -> AbstractValue:
    """The result of a call; its arguments are gone through."""
    holder: AbstractValue | None = None
    if isinstance(node.func, ast.Attribute):
        holder = interpreter.expression(node.func.value, frame)
        # An attribute of a module or an object is a value of its own; of any other value it is a method of that kind.
        callee = (
            interpreter.attribute(holder, node.func, frame)
            if holder.kind in (Kind.IMPORTED, Kind.INSTANCE)
            else UNKNOWN
        )
    else:
        callee = interpreter.expression(node.func, frame)
    arguments = _arguments(interpreter, node, frame)
    if callee.kind is Kind.IMPORTED:
        return ImportedCall(interpreter, node, frame, arguments, callee.dotted).value()
    if callee.kind in (Kind.FUNCTION, Kind.PROGRAM) and callee.function is not None:
        return _follow(interpreter, callee, arguments, frame)
    if callee.kind is Kind.METHOD:
        read(interpreter, node, frame)
        return PYTHON
    if callee.kind is Kind.CLASS:
        return AbstractValue(Kind.INSTANCE, cls=callee.cls)
    if callee.kind is Kind.INSTANCE and callee.cls is not None:
        return _instance(interpreter, callee, arguments, frame)
    if callee.kind is Kind.MODULE:
        return of_parameters(frame)
    if holder is not None and isinstance(node.func, ast.Attribute):
        return _Method(interpreter, node, frame, arguments, holder, node.func).value()
    return DERIVED if arguments.has_tensor else UNKNOWN


def _arguments(interpreter: Follower, node: ast.Call, frame: Frame) -> Arguments:
    positional: list[AbstractValue] = []
    keywords: dict[str, AbstractValue] = {}
    starred = False
    for part in node.args:
        value = interpreter.expression(part, frame)
        if isinstance(part, ast.Starred):
            starred = True
        positional.append(value)
    for keyword in node.keywords:
        value = interpreter.expression(keyword.value, frame)
        if keyword.arg is None:
            starred = True
        else:
            keywords[keyword.arg] = value
    return Arguments(tuple(positional), keywords, starred)


def _follow(interpreter: Follower, callee: AbstractValue, arguments: Arguments, frame: Frame) -> AbstractValue:
    function = callee.function
    assert function is not None
    if callee.kind is Kind.PROGRAM and not frame.inside:
        return UNKNOWN
    if callee.bound is not None:
        arguments = replace(arguments, positional=(callee.bound, *arguments.positional))
    return interpreter.call(function, arguments, frame)


def _instance(interpreter: Follower, callee: AbstractValue, arguments: Arguments, frame: Frame) -> AbstractValue:
    """An object that is called: a module's forward, or __call__."""
    assert callee.cls is not None
    method = interpreter.names.method(callee.cls, "__call__") or interpreter.names.method(callee.cls, "forward")
    if method is not None:
        given = replace(arguments, positional=(callee, *arguments.positional))
        return interpreter.call(method, given, frame)
    if interpreter.names.is_module(callee.cls):
        return of_parameters(frame)
    return DERIVED if arguments.has_tensor else UNKNOWN


# -- methods ---------------------------------------------------------------------------------------------------------


@dataclass
class _Method:
    interpreter: Follower
    node: ast.Call
    frame: Frame
    arguments: Arguments
    holder: AbstractValue
    func: ast.Attribute

    def value(self) -> AbstractValue:
        holder, name = self.holder, self.func.attr
        if name == "backward" and holder.kind in (Kind.UNKNOWN, Kind.DERIVED):
            if isinstance(self.func.value, ast.Name) and self.frame.inside:
                self.frame.env[self.func.value.id] = MADE
            holder = MADE
        if holder.kind is Kind.DERIVED and (name in TENSOR_METHODS or name in READS):
            holder = MADE
        if holder.is_tensor:
            return self.of_tensor(holder, name)
        if holder.kind in (Kind.MODULE, Kind.INSTANCE):
            return self.of_module(holder, name)
        if holder.kind is Kind.CONTAINER:
            return self.of_container(holder, name)
        if holder.kind is Kind.GENERATOR and name == "manual_seed":
            return holder
        if holder.kind is Kind.PYTHON:
            if name == "format" and "!r" not in ast.unparse(self.func.value):
                printed(self.interpreter, self.node, container(self.arguments.all), self.frame)
            return PYTHON
        return DERIVED if self.arguments.has_tensor else UNKNOWN

    def refuse(self, code: str, message: str) -> None:
        self.interpreter.refuse(code, self.node, self.frame, message)

    def of_tensor(self, holder: AbstractValue, name: str) -> AbstractValue:
        on_mesh = holder.kind is Kind.TENSOR
        given = self.arguments
        if name in READS:
            if on_mesh or any(value.kind is Kind.TENSOR for value in given.positional):
                read(self.interpreter, self.node, self.frame)
            return PYTHON
        if name == "backward":
            if holder.detached:
                self.refuse("M113", "backward() where no gradients are recorded")
            return PYTHON
        if name in PYTHON_METHODS:
            return PYTHON
        shaping = given.first() if name == "masked_select" else holder
        if name in VALUE_SHAPES and shaping.kind is Kind.TENSOR:
            self.refuse("M104", f"{name}() gives a shape that depends on values")
        if name in SHAPE_TAKERS:
            sizes(self.interpreter, self.node, given, self.frame)
        alpha_given(self.interpreter, self.node, given, self.frame)
        generator_given(self.interpreter, self.node, given, self.frame)
        if name in ("requires_grad_", "detach_"):  # these change no value
            changed = replace(holder, detached=name == "detach_")
            if isinstance(self.func.value, ast.Name):
                self.frame.env[self.func.value.id] = changed
            return changed
        if name == "new_tensor":
            return SOME
        if name.endswith("_") and not name.startswith("_"):
            written(self.interpreter, self.node, holder, self.frame)
            return holder
        if name in LISTS:
            return AbstractValue(Kind.CONTAINER, each=holder)
        if name in VIEWS and name != "detach":
            return holder
        made = result_of(replace(given, positional=(holder, *given.positional)), self.frame)
        boolean = name in ("isnan", "isinf", "isfinite", "eq", "ne", "lt", "le", "gt", "ge", "bool", "logical_not")
        return replace(made, boolean=boolean, detached=made.detached or name == "detach")

    def of_module(self, holder: AbstractValue, name: str) -> AbstractValue:
        tensor = AbstractValue(Kind.TENSOR, "state") if holder.placed else SOME
        if name in ("parameters", "buffers"):
            return AbstractValue(Kind.CONTAINER, each=tensor)
        if name in ("named_parameters", "named_buffers"):
            return AbstractValue(Kind.CONTAINER, each=container([PYTHON, tensor]))
        if name in ("train", "eval", "to", "requires_grad_", "float", "double", "half", "bfloat16"):
            return holder
        if name == "get_parameter":
            return tensor
        if name in ("register_buffer", "register_parameter", "zero_grad", "state_dict", "load_state_dict"):
            return UNKNOWN
        return DERIVED if self.arguments.has_tensor else UNKNOWN

    def reads_entries(self, holder: AbstractValue, name: str) -> bool:
        """Whether a list's method needs a tensor's value."""
        given = self.arguments.positional
        if name == "sort":
            key = self.arguments.keywords.get("key")
            plain = key is None or key.kind is Kind.PYTHON  # key=None
            entry = (
                entry_of(holder) if plain else applied(self.interpreter, self.node, self.frame, key or UNKNOWN, holder)
            )
            return entry.kind is Kind.TENSOR and (holder.items is None or len(holder.items) > 1)
        if name in ("index", "count", "remove") and given:
            return looks_up(self.node.args[0], given[0], holder, self.func.value)
        return name in ("pop", "insert") and holder.items is not None and bool(given) and given[0].kind is Kind.TENSOR

    def of_container(self, holder: AbstractValue, name: str) -> AbstractValue:
        given = self.arguments
        if self.reads_entries(holder, name):
            read(self.interpreter, self.node, self.frame, f"{name}() needs it")
        if name in _GROWS or name in _CHANGES:
            last = given.positional[-1] if given.positional else PYTHON
            if name == "update":
                last = join_all([entry_of(value) for value in given.positional] + list(given.keywords.values()))
            if isinstance(self.func.value, ast.Name):
                added = iterated(last) if name in ("extend", "extendleft") else last
                each = (
                    join(entry_of(holder), added)
                    if name in _GROWS or name in ("update", "setdefault")
                    else entry_of(holder)
                )
                self.frame.env[self.func.value.id] = replace(holder, items=None, each=each)
            return entry_of(holder) if name in ("pop", "setdefault", "popleft") else PYTHON
        if name == "copy":
            return holder
        if name == "values":
            return replace(holder, mapping=False)
        if name == "items":
            return AbstractValue(Kind.CONTAINER, each=container([PYTHON, entry_of(holder)]))
        if name == "get":
            return join(entry_of(holder), join_all(given.positional[1:]))
        return PYTHON
