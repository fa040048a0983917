"""The names of a file: its scopes, the bindings of each name, and the targets of imports."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass
class Binding:
    """One place that gives a name a value.

    `how`     "assign", "augmented", "loop", "import", "def", "class", "parameter", or "other"
    `value`   the expression that it becomes, or, with `path`, the part of it at these places; what is iterated for a
              loop; None where nothing is known
    `dotted`  for an import, what is imported: "torch.nn.functional"
    """

    how: str
    value: ast.expr | None = None
    path: tuple[int, ...] = ()
    dotted: str = ""
    node: ast.AST | None = None


@dataclass(eq=False)
class Scope:
    """A module, class or function, and the names bound in it. Comprehensions' own names are left out."""

    node: ast.AST
    parent: Scope | None
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    outer: set[str] = field(default_factory=set)
    """Names that `global` or `nonlocal` gives away."""

    @property
    def is_class(self) -> bool:
        return isinstance(self.node, ast.ClassDef)

    def only(self, name: str) -> ast.expr | None:
        """The value of a name that exactly one assignment binds."""
        home = self.home(name)
        bindings = [] if home is None else home.bindings[name]
        one = bindings[0] if len(bindings) == 1 and bindings[0].how == "assign" and not bindings[0].path else None
        return None if one is None else one.value

    def home(self, name: str) -> Scope | None:
        """The scope whose name it is, as Python finds it from here: classes are passed over, but for this one."""
        scope: Scope | None = self
        first = True
        while scope is not None:
            if name in scope.bindings and name not in scope.outer and (first or not scope.is_class):
                return scope
            first = False
            scope = scope.parent
        return None


@dataclass(eq=False)
class Function:
    """A function of the file. `owner` is the class whose method it is."""

    node: FunctionNode
    scope: Scope
    owner: Class | None = None

    @property
    def name(self) -> str:
        return "<lambda>" if isinstance(self.node, ast.Lambda) else self.node.name

    @property
    def body(self) -> list[ast.stmt]:
        if isinstance(self.node, ast.Lambda):
            return [ast.copy_location(ast.Return(self.node.body), self.node.body)]
        return self.node.body


@dataclass(eq=False)
class Class:
    """A class of the file: its methods, and what its methods assign to attributes of self."""

    node: ast.ClassDef
    scope: Scope
    methods: dict[str, Function] = field(default_factory=dict)
    attributes: dict[str, list[tuple[ast.expr, Scope]]] = field(default_factory=dict)


class File:
    """All scopes, functions and classes of a file, by their nodes."""

    def __init__(self, tree: ast.Module) -> None:
        self.module = Scope(tree, None)
        self.functions: dict[ast.AST, Function] = {}
        self.classes: dict[ast.AST, Class] = {}
        self.calls: list[tuple[ast.Call, Scope]] = []
        builder = _Builder(self)
        for statement in tree.body:
            builder.statement(statement, self.module, None)

    def dotted(self, expression: ast.expr, scope: Scope) -> str:
        """The imported name of an expression: `F.relu` is "torch.nn.functional.relu"; "" for none."""
        parts: list[str] = []
        while isinstance(expression, ast.Attribute):
            parts.append(expression.attr)
            expression = expression.value
        if not isinstance(expression, ast.Name):
            return ""
        home = scope.home(expression.id)
        if home is None:
            return ".".join(["builtins", expression.id, *reversed(parts)])
        imported = {binding.dotted for binding in home.bindings[expression.id]}
        if len(imported) != 1 or not (root := imported.pop()):
            return ""
        return ".".join([root, *reversed(parts)])


class _Builder:
    def __init__(self, file: File) -> None:
        self.file = file

    def bind(self, scope: Scope, name: str, binding: Binding) -> None:
        if name in scope.outer:
            home = self.file.module if scope.parent is None else scope.parent.home(name) or self.file.module
            home.bindings.setdefault(name, []).append(Binding("other"))
        scope.bindings.setdefault(name, []).append(binding)

    # -- statements ----------------------------------------------------------------------------------------------

    def statement(self, node: ast.stmt, scope: Scope, owner: Class | None) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            self.bind(scope, node.name, Binding("def", node=node))
            for expression in (*node.decorator_list, *_defaults(node.args)):
                self.expression(expression, scope)
            self.function(node, scope, owner)
        elif isinstance(node, ast.ClassDef):
            self.bind(scope, node.name, Binding("class", node=node))
            for expression in (*node.decorator_list, *node.bases, *(k.value for k in node.keywords)):
                self.expression(expression, scope)
            inner = Scope(node, scope)
            made = self.file.classes[node] = Class(node, inner)
            for statement in node.body:
                self.statement(statement, inner, made)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                self.bind(scope, name, Binding("import", dotted=alias.name if alias.asname else name))
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                origin = "." * node.level + (node.module or "")
                self.bind(scope, alias.asname or alias.name, Binding("import", dotted=f"{origin}.{alias.name}"))
        elif isinstance(node, ast.Global | ast.Nonlocal):
            scope.outer.update(node.names)
        else:
            self.plain(node, scope, owner)

    def plain(self, node: ast.stmt, scope: Scope, owner: Class | None) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self.target(target, Binding("assign", node.value), scope, owner)
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            self.target(node.target, Binding("assign", node.value), scope, owner)
        elif isinstance(node, ast.AugAssign):
            self.target(node.target, Binding("augmented", node.value), scope, owner)
        elif isinstance(node, ast.For | ast.AsyncFor):
            self.target(node.target, Binding("loop", node.iter), scope, owner)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                if item.optional_vars is not None:
                    binding = Binding("assign", item.context_expr)
                    self.target(item.optional_vars, binding, scope, owner)
        elif isinstance(node, ast.Match):
            for child in ast.walk(node):
                if isinstance(child, ast.MatchAs | ast.MatchStar) and child.name:
                    self.bind(scope, child.name, Binding("other"))
                elif isinstance(child, ast.MatchMapping) and child.rest:
                    self.bind(scope, child.rest, Binding("other"))
        elif isinstance(node, ast.Try | ast.TryStar):
            for handler in node.handlers:
                if handler.name:
                    self.bind(scope, handler.name, Binding("other"))
        for child in _children(node):
            if isinstance(child, ast.stmt):
                self.statement(child, scope, owner)
            elif isinstance(child, ast.expr):
                self.expression(child, scope)

    def target(self, target: ast.expr, binding: Binding, scope: Scope, owner: Class | None) -> None:
        if isinstance(target, ast.Name):
            self.bind(scope, target.id, binding)
        elif isinstance(target, ast.Starred):
            self.target(target.value, Binding("other"), scope, owner)
        elif isinstance(target, ast.Tuple | ast.List):
            for place, part in enumerate(target.elts):
                inner = Binding(binding.how, binding.value, (*binding.path, place))
                self.target(part, inner, scope, owner)
        elif (
            isinstance(target, ast.Attribute)
            and isinstance(target.value, ast.Name)
            and (method := self.file.functions.get(scope.node)) is not None
            and method.owner is not None
            and target.value.id == _first_parameter(method.node)
            and binding.how == "assign"
            and binding.value is not None
            and not binding.path
        ):
            method.owner.attributes.setdefault(target.attr, []).append((binding.value, scope))

    # -- functions and expressions -------------------------------------------------------------------------------

    def function(self, node: FunctionNode, scope: Scope, owner: Class | None) -> None:
        inner = Scope(node, scope)
        made = self.file.functions[node] = Function(node, inner, owner)
        if owner is not None and not isinstance(node, ast.Lambda):
            owner.methods[node.name] = made
        for parameter in parameters(node.args):
            self.bind(inner, parameter.arg, Binding("parameter", node=parameter))
        if isinstance(node, ast.Lambda):
            self.expression(node.body, inner)
            return
        for name in _given_away(node):
            inner.outer.add(name)
        for statement in node.body:
            self.statement(statement, inner, None)

    def expression(self, node: ast.expr, scope: Scope) -> None:
        stack: list[ast.AST] = [node]
        while stack:
            part = stack.pop()
            if isinstance(part, ast.Lambda):
                stack.extend(_defaults(part.args))
                self.function(part, scope, None)
                continue
            if isinstance(part, ast.NamedExpr):
                self.bind(scope, part.target.id, Binding("assign", part.value))
            elif isinstance(part, ast.Call):
                self.file.calls.append((part, scope))
            stack.extend(ast.iter_child_nodes(part))


def parameters(arguments: ast.arguments) -> Iterator[ast.arg]:
    """All parameters, in order: positional, *args, keyword-only, **kwargs."""
    yield from arguments.posonlyargs
    yield from arguments.args
    if arguments.vararg:
        yield arguments.vararg
    yield from arguments.kwonlyargs
    if arguments.kwarg:
        yield arguments.kwarg


def _defaults(arguments: ast.arguments) -> Iterator[ast.expr]:
    yield from arguments.defaults
    yield from (default for default in arguments.kw_defaults if default is not None)


def _first_parameter(node: FunctionNode) -> str:
    positional = (*node.args.posonlyargs, *node.args.args)
    return positional[0].arg if positional else ""


def _given_away(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The names that a function declares global or nonlocal, which counts in its whole body."""
    stack: list[ast.AST] = list(node.body)
    while stack:
        part = stack.pop()
        if isinstance(part, ast.Global | ast.Nonlocal):
            yield from part.names
        elif not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            stack.extend(ast.iter_child_nodes(part))


def _children(node: ast.stmt) -> Iterator[ast.AST]:
    """The statements and expressions right below a statement, through handlers, items and cases."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt | ast.expr):
            yield child
        else:
            for inner in ast.iter_child_nodes(child):
                if isinstance(inner, ast.stmt | ast.expr):
                    yield inner
