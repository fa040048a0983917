"""Finding the programs of a file: decorated functions and methods, and arguments of `monarch.program(…)`."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from monarch.language.check.names import Names, is_monarch
from monarch.language.check.scopes import Function, Scope


@dataclass(frozen=True)
class ProgramDef:
    """A program. `mesh` is what mesh= says, `scope` where that stands; `given` counts the positional arguments that a
    functools.partial binds."""

    function: Function
    mesh: ast.expr | None
    scope: Scope
    given: int = 0


def find_programs(names: Names) -> list[ProgramDef]:
    """Every program of a file, each once, in the order of the file."""
    found: dict[int, ProgramDef] = {}
    for program in (*_decorated(names), *_called(names)):
        found.setdefault(id(program.function.node), program)
    return sorted(found.values(), key=lambda program: (program.function.node.lineno, program.function.node.col_offset))


def _decorated(names: Names) -> Iterator[ProgramDef]:
    for function in names.file.functions.values():
        if isinstance(function.node, ast.Lambda):
            continue
        scope = function.scope.parent or function.scope
        for decorator in function.node.decorator_list:
            if names.makes_program(decorator, scope):
                yield ProgramDef(function, _mesh_argument(decorator), scope)
            elif isinstance(decorator, ast.Call) and decorator.args and _is_partial(names, decorator, scope):
                # @functools.partial(monarch.program, mesh=mesh)
                if is_monarch(names.file.dotted(decorator.args[0], scope), "program"):
                    yield ProgramDef(function, _mesh_argument(decorator), scope)


def _called(names: Names) -> Iterator[ProgramDef]:
    for call, scope in names.file.calls:
        makes = is_monarch(names.file.dotted(call.func, scope), "program")
        # program(mesh=mesh)(f)
        curried = isinstance(call.func, ast.Call) and is_monarch(names.file.dotted(call.func.func, scope), "program")
        if (makes or curried) and call.args:
            mesh = _mesh_argument(call.func if curried else call)
            for function, given in _functions(names, call.args[0], scope):
                yield ProgramDef(function, mesh, scope, given)


def _mesh_argument(expression: ast.expr) -> ast.expr | None:
    keywords = expression.keywords if isinstance(expression, ast.Call) else []
    return next((keyword.value for keyword in keywords if keyword.arg == "mesh"), None)


def _is_partial(names: Names, call: ast.Call, scope: Scope) -> bool:
    return names.file.dotted(call.func, scope) == "functools.partial"


def _functions(names: Names, expression: ast.expr, scope: Scope, depth: int = 0) -> Iterator[tuple[Function, int]]:
    """The functions of the file that an expression may be, and how many of their arguments are bound."""
    if isinstance(expression, ast.Lambda):
        if expression in names.file.functions:
            yield names.file.functions[expression], 0
    elif isinstance(expression, ast.Call):
        if _is_partial(names, expression, scope) and expression.args:
            for function, given in _functions(names, expression.args[0], scope, depth):
                yield function, given + len(expression.args) - 1
            return
        for maker, _ in _functions(names, expression.func, scope, depth + 1) if depth < 3 else ():
            for part in maker.body:
                for returned in _returns(part):
                    yield from _functions(names, returned, maker.scope, depth + 1)
    elif isinstance(expression, ast.Name) and (home := scope.home(expression.id)) is not None:
        for binding in home.bindings[expression.id]:
            if binding.how == "def" and binding.node in names.file.functions:
                yield names.file.functions[binding.node], 0
            elif binding.how == "assign" and isinstance(binding.value, ast.Lambda | ast.Call) and depth < 3:
                if not binding.path:
                    yield from _functions(names, binding.value, home, depth + 1)
    elif isinstance(expression, ast.Attribute):
        value = names.evaluate(expression, scope)
        if value.function is not None:
            yield value.function, 0


def _returns(statement: ast.stmt) -> Iterator[ast.expr]:
    stack: list[ast.AST] = [statement]
    while stack:
        part = stack.pop()
        if isinstance(part, ast.Return) and part.value is not None:
            yield part.value
        elif not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            stack.extend(ast.iter_child_nodes(part))
