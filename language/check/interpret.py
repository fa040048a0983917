"""Following a program through its functions: the value of each expression, and the places where the tracer would refuse
it.

An abstract interpretation, statement by statement: names are bound to `AbstractValue`s, branches are joined, loop
bodies are gone through twice, and functions of the file are followed where they are called, with what they are called
with.
"""

from __future__ import annotations

import ast
import builtins
from collections.abc import Iterable
from dataclasses import replace

from monarch.language.check import refused
from monarch.language.check.expressions import Expressions
from monarch.language.check.frames import Arguments, Frame
from monarch.language.check.kinds import (
    ARGUMENT,
    PYTHON,
    SOME,
    UNKNOWN,
    AbstractValue,
    Kind,
    container,
    entry_of,
    iterated,
    join,
    join_all,
    named,
)
from monarch.language.check.names import Names
from monarch.language.check.report import Reporter
from monarch.language.check.scopes import Function, Scope, parameters

_DEPTH = 12
"""Calls within calls that are followed."""
_BODIES = 400
"""Function bodies that are gone through for one program."""


class Interpreter(Expressions):
    """Follows the programs of one file."""

    def __init__(self, names: Names, reporter: Reporter) -> None:
        super().__init__(names, reporter)
        self._results: dict[object, AbstractValue] = {}
        self._open: set[object] = set()
        self._depth = 0
        self._bodies = 0
        names.evaluate = self._outside

    def _outside(self, expression: ast.expr, scope: Scope) -> AbstractValue:
        """The value of an expression of a scope, outside of programs. Reports nothing."""
        self.report.silent += 1
        try:
            return self.expression(expression, Frame(scope, inside=False))
        finally:
            self.report.silent -= 1

    # -- programs and calls --------------------------------------------------------------------------------------

    def program(self, function: Function, given: int = 0) -> None:
        """Go through a program: its parameters are tensors where they are annotated or used as such. The first `given`
        positional parameters are bound by a partial."""
        self._bodies = 0
        frame = Frame(function.scope, program=function.name)
        frame.no_grad = self._decorated_no_grad(function)
        arguments = function.node.args
        positional = [*arguments.posonlyargs, *arguments.args]
        defaults = dict(zip([p.arg for p in positional][::-1], arguments.defaults[::-1], strict=False))
        defaults.update({p.arg: d for p, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if d})
        passed = self.names.passed(function)
        for place, parameter in enumerate(parameters(arguments)):
            if place == 0 and function.owner is not None:
                frame.env[parameter.arg] = AbstractValue(Kind.INSTANCE, cls=function.owner, placed=True)
                continue
            value = self.names.parameter(parameter, function)
            default = defaults.get(parameter.arg)
            if value is None and isinstance(default, ast.Constant) and default.value is not None:
                value = PYTHON
            if value is None and place < given:
                value = UNKNOWN
            if value is None:
                is_tensor = parameter.arg in passed or self.names.used_as_tensor(parameter.arg, function)
                value = ARGUMENT if is_tensor else UNKNOWN
            if parameter is arguments.vararg or parameter is arguments.kwarg:
                value = AbstractValue(Kind.CONTAINER, each=value, mapping=parameter is arguments.kwarg)
            frame.env[parameter.arg] = value
        self.body(function.body, frame)

    def call(self, function: Function, arguments: Arguments, caller: Frame) -> AbstractValue:
        """Follow a function of the file, called so."""
        key = (id(function.node), caller.no_grad, caller.inside, arguments.key)
        if key in self._results:
            return self._results[key]
        if key in self._open or self._depth >= _DEPTH or self._bodies >= _BODIES:
            return UNKNOWN
        self._open.add(key)
        self._depth += 1
        self._bodies += 1
        try:
            made_in = self.frames.get(id(function.node))
            frame = Frame(
                function.scope,
                parent=made_in if made_in is not None and caller.inside else None,
                inside=caller.inside,
                program=caller.program,
                no_grad=caller.no_grad or self._decorated_no_grad(function),
            )
            self.bind(function, arguments, frame)
            self.body(function.body, frame)
            result = join_all(frame.returns) if frame.returns else PYTHON
        finally:
            self._depth -= 1
            self._open.discard(key)
        self._results[key] = result
        return result

    def bind(self, function: Function, arguments: Arguments, frame: Frame) -> None:
        """Give the parameters the call's arguments."""
        names = function.node.args
        given = list(arguments.positional)
        for parameter in (*names.posonlyargs, *names.args):
            if given:
                value = given.pop(0)
            else:
                value = arguments.keywords.get(parameter.arg, UNKNOWN if arguments.starred else PYTHON)
            frame.env[parameter.arg] = self._annotated(parameter, value, function)
        for parameter in names.kwonlyargs:
            frame.env[parameter.arg] = self._annotated(
                parameter, arguments.keywords.get(parameter.arg, PYTHON), function
            )
        if names.vararg:
            frame.env[names.vararg.arg] = container([*given])
        if names.kwarg:
            known = {parameter.arg for parameter in parameters(names)}
            rest = [value for name, value in arguments.keywords.items() if name not in known]
            frame.env[names.kwarg.arg] = replace(container(rest, known=False), mapping=True)

    def _annotated(self, parameter: ast.arg, value: AbstractValue, function: Function) -> AbstractValue:
        """An unknown argument has the type of the parameter's annotation."""
        if value.kind not in (Kind.UNKNOWN, Kind.DERIVED):
            return value
        known = self.names.parameter(parameter, function)
        if known is None or (known.kind is Kind.TENSOR and value.kind is Kind.UNKNOWN):
            return SOME if known is not None else value
        return replace(known, origin="made") if known.kind is Kind.TENSOR else known

    def _decorated_no_grad(self, function: Function) -> bool:
        if isinstance(function.node, ast.Lambda):
            return False
        scope = function.scope.parent
        return any(scope is not None and self._is_no_grad(d, scope) for d in function.node.decorator_list)

    def _is_no_grad(self, expression: ast.expr, scope: Scope) -> bool:
        if isinstance(expression, ast.Call):
            if expression.args and self.file.dotted(expression.func, scope) != "torch.set_grad_enabled":
                return (
                    isinstance(first := expression.args[0], ast.Constant)
                    and first.value is True
                    and named(self.file.dotted(expression.func, scope), ("torch.inference_mode",))
                )
            if expression.args:
                return isinstance(first := expression.args[0], ast.Constant) and first.value is False
            expression = expression.func
        return self.file.dotted(expression, scope) in (
            "torch.no_grad",
            "torch.inference_mode",
            "torch.autograd.no_grad",
            "torch.autograd.inference_mode",
        )

    # -- statements ----------------------------------------------------------------------------------------------

    def body(self, statements: Iterable[ast.stmt], frame: Frame) -> None:
        for statement in statements:
            self.statement(statement, frame)

    def statement(self, node: ast.stmt, frame: Frame) -> None:
        handler = getattr(self, f"_{type(node).__name__.lower()}", None)
        if handler is not None:
            handler(node, frame)

    def _expr(self, node: ast.Expr, frame: Frame) -> None:
        if isinstance(node.value, ast.Call) and self._is_no_grad(node.value, frame.scope):
            name = ast.unparse(node.value.func)
            if "set_grad_enabled" not in name:
                self.refuse("M307", node, frame, f"{name}() alone has no effect")
        self.expression(node.value, frame)

    def _return(self, node: ast.Return, frame: Frame) -> None:
        frame.returns.append(self.expression(node.value, frame) if node.value else PYTHON)

    def _assign(self, node: ast.Assign, frame: Frame) -> None:
        value = self.expression(node.value, frame)
        for target in node.targets:
            self.assign(target, value, frame)

    def _annassign(self, node: ast.AnnAssign, frame: Frame) -> None:
        if node.value is not None:
            self.assign(node.target, self.expression(node.value, frame), frame)

    def _augassign(self, node: ast.AugAssign, frame: Frame) -> None:
        operand = self.expression(node.value, frame)
        target = node.target
        if isinstance(target, ast.Name):
            before = self.name(target.id, frame)
            refused.written(self, node, before, frame)
            frame.env[target.id] = before if before.kind is Kind.TENSOR else self.combined([before, operand])
        else:
            refused.written(self, node, self.expression(self._read(target), frame), frame)

    @staticmethod
    def _read(target: ast.expr) -> ast.expr:
        """A target as it is read."""
        made: ast.expr
        if isinstance(target, ast.Attribute):
            made = ast.Attribute(target.value, target.attr, ast.Load())
        elif isinstance(target, ast.Subscript):
            made = ast.Subscript(target.value, target.slice, ast.Load())
        else:
            return target
        return ast.copy_location(made, target)

    def _for(self, node: ast.For, frame: Frame) -> None:
        self._loop(node, iterated(self.expression(node.iter, frame)), node.target, frame)

    _asyncfor = _for

    def _while(self, node: ast.While, frame: Frame) -> None:
        self._loop(node, None, None, frame)

    def _loop(
        self, node: ast.For | ast.While, entry: AbstractValue | None, target: ast.expr | None, frame: Frame
    ) -> None:
        for _ in range(2):  # the second round reads the values of the first
            before = dict(frame.env)
            if isinstance(node, ast.While):
                self.truth(node.test, frame)
            if target is not None and entry is not None:
                self.assign(target, entry, frame)
            self.body(node.body, frame)
            self._merge(frame, before)
        self.body(node.orelse, frame)

    def _if(self, node: ast.If, frame: Frame) -> None:
        raising = next((body for body in (node.body, node.orelse) if _only_raises(body)), None)
        if raising is not None and not self._caught(raising[-1], frame):
            # Traced is the other branch alone, where a tensor's value decides.
            self.truth(node.test, frame, only_raises=True)
            holds = not _only_raises(node.body)
            self._narrow(node.test, frame, holds)
            self.body(node.body if holds else node.orelse, frame)
            return
        self.truth(node.test, frame)
        if (known := self._known(node.test, frame)) is not None:
            self._narrow(node.test, frame, known)
            self.body(node.body if known else node.orelse, frame)
            return
        before = dict(frame.env)
        self._narrow(node.test, frame, True)
        self.body(node.body, frame)
        after, frame.env = frame.env, before
        self._narrow(node.test, frame, False)
        self.body(node.orelse, frame)
        if node.body and isinstance(node.body[-1], ast.Return | ast.Raise | ast.Continue | ast.Break):
            return
        if node.orelse and isinstance(node.orelse[-1], ast.Return | ast.Raise | ast.Continue | ast.Break):
            frame.env = after
            return
        self._merge(frame, after)

    def _narrow(self, test: ast.expr, frame: Frame, holds: bool) -> None:
        """The meaning of `isinstance(x, …)` and `torch.is_tensor(x)` for x in a branch."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            self._narrow(test.operand, frame, not holds)
            return
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) and holds:
            for part in test.values:
                self._narrow(part, frame, True)
            return
        if not (isinstance(test, ast.Call) and test.args and isinstance(test.args[0], ast.Name)):
            return
        called = self.file.dotted(test.func, frame.scope)
        if called == "builtins.isinstance" and len(test.args) == 2:
            tensor = "Tensor" in ast.unparse(test.args[1]) or "Parameter" in ast.unparse(test.args[1])
        elif called == "torch.is_tensor":
            tensor = True
        else:
            return
        if tensor != holds:
            frame.env[test.args[0].id] = PYTHON

    @staticmethod
    def _merge(frame: Frame, other: dict[str, AbstractValue]) -> None:
        for name, value in other.items():
            frame.env[name] = join(frame.env[name], value) if name in frame.env else value

    def _assert(self, node: ast.Assert, frame: Frame) -> None:
        self.truth(node.test, frame, only_raises=not self._caught(node, frame))

    def _caught(self, node: ast.stmt, frame: Frame) -> bool:
        """Whether the function may catch what an assert or a raise raises."""
        kind: type[BaseException] | None = AssertionError
        if isinstance(node, ast.Raise):
            kind = self._exception(node.exc.func if isinstance(node.exc, ast.Call) else node.exc, frame)
        return any(kind is None or caught is None or issubclass(kind, caught) for caught in frame.catches)

    def _exception(self, node: ast.expr | None, frame: Frame) -> type[BaseException] | None:
        """The class of Python's own that an expression names."""
        dotted = None if node is None else self.file.dotted(node, frame.scope)
        module, _, name = (dotted or "").rpartition(".")
        found = getattr(builtins, name, None) if module == "builtins" else None
        return found if isinstance(found, type) and issubclass(found, BaseException) else None

    def _with(self, node: ast.With, frame: Frame) -> None:
        before = frame.no_grad
        for item in node.items:
            value = self.expression(item.context_expr, frame)
            if self._is_no_grad(item.context_expr, frame.scope):
                frame.no_grad = True
            elif isinstance(item.context_expr, ast.Call) and named(
                self.file.dotted(item.context_expr.func, frame.scope), ("torch.enable_grad", "torch.set_grad_enabled")
            ):
                frame.no_grad = False
            if item.optional_vars is not None:
                self.assign(item.optional_vars, value, frame)
        self.body(node.body, frame)
        frame.no_grad = before

    _asyncwith = _with

    def _try(self, node: ast.Try, frame: Frame) -> None:
        before, catches = dict(frame.env), frame.catches
        for handler in node.handlers:
            classes = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            frame.catches += tuple(BaseException if each is None else self._exception(each, frame) for each in classes)
        self.body(node.body, frame)
        frame.catches = catches
        self._merge(frame, before)
        for handler in node.handlers:
            if handler.name:
                frame.env[handler.name] = PYTHON
            self.body(handler.body, frame)
        self.body(node.orelse, frame)
        self.body(node.finalbody, frame)

    _trystar = _try

    def _match(self, node: ast.Match, frame: Frame) -> None:
        subject = self.expression(node.subject, frame)
        if any(_compares(case.pattern, subject) for case in node.cases):
            self.branch(node.subject, frame)
        for case in node.cases:
            for part in ast.walk(case.pattern):
                if isinstance(part, ast.MatchAs | ast.MatchStar) and part.name:
                    frame.env[part.name] = subject if part is case.pattern else UNKNOWN
                elif isinstance(part, ast.MatchMapping) and part.rest:
                    frame.env[part.rest] = UNKNOWN
            if case.guard is not None:
                self.truth(case.guard, frame)
            before = dict(frame.env)
            self.body(case.body, frame)
            self._merge(frame, before)

    def _delete(self, node: ast.Delete, frame: Frame) -> None:
        for target in node.targets:
            if not isinstance(target, ast.Name):
                self.expression(self._read(target), frame)

    def _raise(self, node: ast.Raise, frame: Frame) -> None:
        for part in (node.exc, node.cause):
            if part is not None:
                self.expression(part, frame)

    def _functiondef(self, node: ast.FunctionDef, frame: Frame) -> None:
        function = self.file.functions[node]
        self.frames[id(node)] = frame
        frame.env[node.name] = AbstractValue(Kind.FUNCTION, function=function)

    _asyncfunctiondef = _functiondef

    def _classdef(self, node: ast.ClassDef, frame: Frame) -> None:
        frame.env[node.name] = AbstractValue(Kind.CLASS, cls=self.file.classes[node])

    # -- binding -------------------------------------------------------------------------------------------------

    def assign(self, target: ast.expr, value: AbstractValue, frame: Frame) -> None:
        if isinstance(target, ast.Name):
            frame.env[target.id] = value
        elif isinstance(target, ast.Tuple | ast.List):
            entries: tuple[AbstractValue, ...] = ()
            if value.items is not None and len(value.items) == len(target.elts):
                entries = value.items
            for place, part in enumerate(target.elts):
                if isinstance(part, ast.Starred):
                    self.assign(part.value, container([iterated(value)], known=False), frame)
                else:
                    self.assign(part, entries[place] if entries else iterated(value), frame)
        elif isinstance(target, ast.Subscript):
            holder = self.expression(target.value, frame)
            index = self.expression(target.slice, frame)
            if holder.is_tensor:
                refused.written(self, target, holder, frame)
            elif holder.items is not None and index.kind is Kind.TENSOR:
                refused.read(self, target.slice, frame, "a list is indexed by a tensor's value")
            if isinstance(target.value, ast.Name) and holder.kind is Kind.CONTAINER:
                frame.env[target.value.id] = replace(holder, items=None, each=join(entry_of(holder), value))
        elif isinstance(target, ast.Attribute):
            self.expression(target.value, frame)


def _compares(pattern: ast.pattern | None, subject: AbstractValue) -> bool:
    """Whether a pattern compares a tensor with a value."""
    if isinstance(pattern, ast.MatchValue):
        return subject.kind is Kind.TENSOR
    if isinstance(pattern, ast.MatchOr):
        return any(_compares(part, subject) for part in pattern.patterns)
    if isinstance(pattern, ast.MatchAs):
        return _compares(pattern.pattern, subject)
    if isinstance(pattern, ast.MatchSequence) and subject.items is not None:
        same = len(pattern.patterns) == len(subject.items)
        return same and any(map(_compares, pattern.patterns, subject.items))
    return False


def _only_raises(body: list[ast.stmt]) -> bool:
    """Whether statements do nothing that lasts, and then raise."""
    lasting = (ast.Return, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal, ast.Delete)
    return (
        bool(body)
        and isinstance(body[-1], ast.Raise)
        and not any(
            isinstance(part, lasting)
            or (isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store))
            for statement in body
            for part in ast.walk(statement)
        )
    )
