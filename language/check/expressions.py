"""The value of each expression of a program, and the places where it would be needed."""

from __future__ import annotations

import ast
from dataclasses import replace

from monarch.language.check import calls, refused
from monarch.language.check.frames import Follower, Frame
from monarch.language.check.kinds import (
    CHANGING,
    MADE,
    PYTHON,
    PYTHON_ATTRIBUTES,
    READS,
    SOME,
    TENSOR_METHODS,
    UNKNOWN,
    VIEWS,
    AbstractValue,
    Kind,
    container,
    entry_of,
    iterated,
    join,
    join_all,
    named,
)


class Expressions(Follower):
    """Goes through expressions; `assign` and `call` are the statements' part."""

    def truth(self, node: ast.expr, frame: Frame, only_raises: bool = False) -> None:
        """An expression whose truth decides what runs, or only whether an error is raised: that the workers check."""
        if isinstance(node, ast.BoolOp):
            for part in self._come_to(node, frame):
                self.truth(part, frame, only_raises)
            return
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            self.truth(node.operand, frame, only_raises)
            return
        if self.expression(node, frame).kind is Kind.TENSOR and not only_raises:
            self.branch(node, frame)

    def _come_to(self, node: ast.BoolOp, frame: Frame) -> list[ast.expr]:
        """The operands of `and` or `or` that Python may come to: none behind one that decides."""
        decides = isinstance(node.op, ast.Or)
        at = next((at for at, part in enumerate(node.values) if self._known(part, frame) is decides), len(node.values))
        return node.values[: at + 1]

    def _known(self, node: ast.expr, frame: Frame) -> bool | None:
        """The truth of a test that is known before anything runs: whether a tensor is None, or a tensor."""
        if isinstance(node, ast.Constant):
            return bool(node.value)
        if isinstance(node, ast.Name) and isinstance(only := frame.scope.only(node.id), ast.Constant):
            return bool(only.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            inner = self._known(node.operand, frame)
            return None if inner is None else not inner
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.Is | ast.IsNot):
            right = node.comparators[0]
            if isinstance(right, ast.Constant) and right.value is None and isinstance(node.left, ast.Name):
                is_tensor = self.expression(node.left, frame).kind is Kind.TENSOR
                return isinstance(node.ops[0], ast.IsNot) if is_tensor else None
        if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Name) and not node.keywords:
            called = self.file.dotted(node.func, frame.scope)
            asks = called == "torch.is_tensor" or (
                called == "builtins.isinstance"
                and len(node.args) == 2
                and self.file.dotted(node.args[1], frame.scope) == "torch.Tensor"
            )
            return True if asks and self.expression(node.args[0], frame).kind is Kind.TENSOR else None
        return None

    def branch(self, node: ast.expr, frame: Frame) -> None:
        self.refuse("M101", node, frame, f"'{frame.program}' cannot branch on a tensor's value")

    def expression(self, node: ast.expr, frame: Frame) -> AbstractValue:
        """The value of an expression; its parts are gone through."""
        handler = getattr(self, f"_e_{type(node).__name__.lower()}", None)
        if handler is not None:
            return handler(node, frame)
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self.expression(part, frame)
        return PYTHON if isinstance(node, ast.Constant | ast.Slice) else UNKNOWN

    def _e_name(self, node: ast.Name, frame: Frame) -> AbstractValue:
        return self.name(node.id, frame)

    def name(self, name: str, frame: Frame) -> AbstractValue:
        """The value of a name: of this function, of one around it, or of the file's own level."""
        if name in frame.env and name not in frame.scope.outer:
            return frame.env[name]
        home = frame.scope.home(name)
        if home is None:
            return AbstractValue(Kind.IMPORTED, dotted=f"builtins.{name}")
        active = frame.parent.frame_of(home) if frame.parent is not None else None
        if active is not None and name in active.env:
            return active.env[name]
        if home is frame.scope and frame.inside:
            return UNKNOWN  # a local that has no value yet
        value = self.names.static(home, name)
        if not frame.inside:
            return value
        return replace(value, origin="state") if value.kind is Kind.TENSOR else value

    def _e_attribute(self, node: ast.Attribute, frame: Frame) -> AbstractValue:
        return self.attribute(self.expression(node.value, frame), node, frame)

    def attribute(self, holder: AbstractValue, node: ast.Attribute, frame: Frame) -> AbstractValue:
        name = node.attr
        if holder.kind is Kind.IMPORTED:
            return AbstractValue(Kind.IMPORTED, dotted=f"{holder.dotted}.{name}")
        if holder.is_tensor:
            if name in ("sharding", "tensor_type") and holder.kind is Kind.TENSOR and holder.origin == "made":
                message = "this tensor has no layout yet: the partitioner chooses it when the program is compiled"
                self.refuse("M108", node, frame, message)
                return PYTHON
            if name in PYTHON_ATTRIBUTES:
                return PYTHON
            if name == "grad":
                return replace(MADE, origin="state") if holder.kind is Kind.TENSOR else SOME
            if name in VIEWS:
                return holder
            if name in READS and holder.kind is Kind.TENSOR:
                return AbstractValue(Kind.METHOD, dotted=name, bound=holder)
            return replace(holder, origin="made") if holder.kind is Kind.TENSOR else holder
        if holder.kind is Kind.INSTANCE and holder.cls is not None:
            if (method := self.names.method(holder.cls, name)) is not None:
                return AbstractValue(Kind.FUNCTION, function=method, bound=holder)
            value = self.names.attribute(holder.cls, name)
            if value.kind is Kind.SOME and holder.placed:
                value = AbstractValue(Kind.TENSOR, "state")
            return replace(value, placed=value.placed or holder.placed)
        if holder.kind is Kind.MODULE and name in ("weight", "bias"):
            return AbstractValue(Kind.TENSOR, "state") if holder.placed else SOME
        if holder.kind is Kind.DERIVED and name in TENSOR_METHODS:
            return PYTHON if name in PYTHON_ATTRIBUTES else MADE
        if holder.kind is Kind.PYTHON:
            return PYTHON
        return UNKNOWN

    def _e_call(self, node: ast.Call, frame: Frame) -> AbstractValue:
        return calls.evaluate(self, node, frame)

    def _e_lambda(self, node: ast.Lambda, frame: Frame) -> AbstractValue:
        self.frames[id(node)] = frame
        function = self.file.functions.get(node)
        return AbstractValue(Kind.FUNCTION, function=function) if function is not None else UNKNOWN

    def _e_namedexpr(self, node: ast.NamedExpr, frame: Frame) -> AbstractValue:
        value = self.expression(node.value, frame)
        self.assign(node.target, value, frame)
        return value

    def _e_ifexp(self, node: ast.IfExp, frame: Frame) -> AbstractValue:
        self.truth(node.test, frame)
        if (known := self._known(node.test, frame)) is not None:
            return self.expression(node.body if known else node.orelse, frame)
        return join(self.expression(node.body, frame), self.expression(node.orelse, frame))

    def _e_boolop(self, node: ast.BoolOp, frame: Frame) -> AbstractValue:
        parts = self._come_to(node, frame)
        for part in parts[:-1]:
            self.truth(part, frame)
        return join_all([self.expression(part, frame) for part in parts])

    def _e_unaryop(self, node: ast.UnaryOp, frame: Frame) -> AbstractValue:
        if isinstance(node.op, ast.Not):
            self.truth(node.operand, frame)
            return PYTHON
        return self.combined([self.expression(node.operand, frame)])

    def _e_binop(self, node: ast.BinOp, frame: Frame) -> AbstractValue:
        if isinstance(node.op, ast.Mod) and isinstance(node.left, ast.Constant) and isinstance(node.left.value, str):
            given = self.expression(node.right, frame)
            if "%r" not in node.left.value:
                refused.printed(self, node, given, frame)
            return PYTHON
        values = []
        left: ast.expr = node
        while isinstance(left, ast.BinOp) and not isinstance(left.op, ast.Mod):  # a long sum is deep on the left
            values.append(self.expression(left.right, frame))
            left = left.left
        if isinstance(left, ast.BinOp) and left is not node:
            values.append(self.expression(left, frame))
        elif isinstance(left, ast.BinOp):
            values += [self.expression(left.left, frame), self.expression(left.right, frame)]
        else:
            values.append(self.expression(left, frame))
        return self.combined(values)

    def _e_compare(self, node: ast.Compare, frame: Frame) -> AbstractValue:
        operands = [node.left, *node.comparators]
        values = [self.expression(operand, frame) for operand in operands]
        result = PYTHON
        for place, operator in enumerate(node.ops):
            if isinstance(operator, ast.Is | ast.IsNot):
                continue
            if isinstance(operator, ast.In | ast.NotIn):
                if values[place + 1].kind is Kind.TENSOR:
                    refused.read(self, node, frame, "'in' looks for a value in a tensor")
                elif refused.looks_up(operands[place], values[place], values[place + 1], operands[place + 1]):
                    refused.read(self, node, frame, "'in' compares it")
                continue
            two = [refused.written_out(operand, frame) for operand in operands[place : place + 2]]
            if refused.compares(values[place], values[place + 1], *two):
                refused.read(self, node, frame, "to compare lists compares what is in them")
            compared = self.combined(values[place : place + 2])
            if compared.is_tensor:
                if compared.kind is Kind.TENSOR and place + 1 < len(node.ops):
                    self.branch(node, frame)
                result = replace(compared, boolean=True)
            elif compared.kind is Kind.DERIVED:
                result = compared
        return result

    def _e_subscript(self, node: ast.Subscript, frame: Frame) -> AbstractValue:
        holder = self.expression(node.value, frame)
        index = self.expression(node.slice, frame)
        if holder.kind is Kind.IMPORTED and named(holder.dotted, CHANGING):
            refused.changing(self, node, holder.dotted, frame)
            return PYTHON
        if holder.is_tensor:
            if isinstance(node.ctx, ast.Load) and holder.kind is Kind.TENSOR:
                refused.indexed(self, node, index, frame)
            parts = index.items if index.items is not None else (index,)
            if isinstance(node.slice, ast.List) or any(part.kind is not Kind.PYTHON for part in parts):
                return replace(holder, kind=max(holder.kind, Kind.SOME), origin="made")  # it may be a copy
            return holder
        if holder.kind is Kind.CONTAINER:
            if index.kind is Kind.TENSOR and holder.items is not None:
                refused.read(self, node.slice, frame, "a list is indexed by a tensor's value")
            if holder.items is not None and isinstance(place := node.slice, ast.Constant):
                if isinstance(place.value, int) and -len(holder.items) <= place.value < len(holder.items):
                    return holder.items[place.value]
            return entry_of(holder)
        return PYTHON if holder.kind is Kind.PYTHON else UNKNOWN

    def _e_slice(self, node: ast.Slice, frame: Frame) -> AbstractValue:
        for part in (node.lower, node.upper, node.step):
            if part is not None and self.expression(part, frame).kind is Kind.TENSOR:
                refused.read(self, part, frame, "a slice's bound is a Python number")
        return PYTHON

    def _e_tuple(self, node: ast.Tuple | ast.List | ast.Set, frame: Frame) -> AbstractValue:
        values: list[AbstractValue] = []
        known = True
        for part in node.elts:
            if isinstance(part, ast.Starred):
                values.append(iterated(self.expression(part.value, frame)))
                known = False
            else:
                values.append(self.expression(part, frame))
        return container(values, known)

    _e_list = _e_tuple
    _e_set = _e_tuple

    def _e_dict(self, node: ast.Dict, frame: Frame) -> AbstractValue:
        values = []
        for key, value in zip(node.keys, node.values, strict=True):
            if key is not None:
                self.expression(key, frame)
            found = self.expression(value, frame)
            values.append(entry_of(found) if key is None else found)
        return replace(container(values, known=False), mapping=True)

    def _e_starred(self, node: ast.Starred, frame: Frame) -> AbstractValue:
        return iterated(self.expression(node.value, frame))

    def _e_joinedstr(self, node: ast.JoinedStr, frame: Frame) -> AbstractValue:
        for part in node.values:
            if isinstance(part, ast.FormattedValue):
                value = self.expression(part.value, frame)
                if part.conversion in (-1, ord("s")):
                    refused.printed(self, part.value, container([value]), frame)
                if part.format_spec is not None:
                    self.expression(part.format_spec, frame)
        return PYTHON

    def _comprehension(self, generators: list[ast.comprehension], frame: Frame) -> None:
        for generator in generators:
            self.assign(generator.target, iterated(self.expression(generator.iter, frame)), frame)
            for condition in generator.ifs:
                self.truth(condition, frame)

    def _e_listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp, frame: Frame) -> AbstractValue:
        before = dict(frame.env)
        self._comprehension(node.generators, frame)
        entry = self.expression(node.elt, frame)
        self._leave(node.generators, before, frame)
        return AbstractValue(Kind.CONTAINER, each=entry)

    _e_setcomp = _e_listcomp
    _e_generatorexp = _e_listcomp

    def _e_dictcomp(self, node: ast.DictComp, frame: Frame) -> AbstractValue:
        before = dict(frame.env)
        self._comprehension(node.generators, frame)
        self.expression(node.key, frame)
        entry = self.expression(node.value, frame)
        self._leave(node.generators, before, frame)
        return AbstractValue(Kind.CONTAINER, each=entry, mapping=True)

    @staticmethod
    def _leave(generators: list[ast.comprehension], before: dict[str, AbstractValue], frame: Frame) -> None:
        """A comprehension's names end with it; those that := binds in it stay."""
        for generator in generators:
            for part in ast.walk(generator.target):
                if isinstance(part, ast.Name):
                    frame.env.pop(part.id, None)
                    if part.id in before:
                        frame.env[part.id] = before[part.id]

    def _e_await(self, node: ast.Await, frame: Frame) -> AbstractValue:
        return self.expression(node.value, frame)
