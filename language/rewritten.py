"""A branch or a loop of Python's on a tensor's value, written with `monarch.cond` or `monarch.while_loop`."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator

from monarch.compiler.errors import Source

_LONGEST = 12
"""Lines of a rewritten statement that an error shows."""


def rewritten(source: Source | None) -> list[str]:
    """The lines to write instead of the `if`, `while` or conditional expression that asks for a value at a place of a
    file; none where the place is in none of them, or where only its author can say what it means (`break`, `return` in
    a loop, an attribute that one branch sets)."""
    if source is None:
        return []
    try:
        tree = ast.parse("".join(linecache.getlines(source.file)))
    except SyntaxError:
        return []
    found = [node for node in ast.walk(tree) if isinstance(node, _ASKING) and _holds(node.test, source)]
    if not found:
        return []
    lines = list(_instead(found[-1], tree))  # the innermost
    return lines if len(lines) <= _LONGEST else []


def looked_up(source: Source | None) -> str:
    """What to write instead of `x[i]` or `x[i : i + 2]` at a place of a file, where a tensor's value is asked for as an
    index into a plain tensor, or as an end of a slice; "" where something else stands there."""
    if source is None or not source.column:
        return ""
    try:
        tree = ast.parse("".join(linecache.getlines(source.file)))
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and (node.lineno, node.col_offset + 1) == (source.line, source.column):
            entries = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            asked = [(dim, entry) for dim, entry in enumerate(entries) if ast.unparse(entry) != ":"]
            if len(asked) != 1 or node.end_col_offset != source.end_column - 1:
                return ""
            ((dim, entry),) = asked
            base = ast.unparse(node.value)
            if isinstance(entry, ast.Slice):
                return f"{base}.narrow({dim}, {ast.unparse(entry.lower or ast.Constant(0))}, n)"
            return f"{base}.index_select({dim}, {ast.unparse(entry)}.reshape(1)).squeeze({dim})"
    return ""


_ASKING = (ast.If, ast.While, ast.IfExp)


def _holds(test: ast.expr, source: Source) -> bool:
    start, end = (test.lineno, test.col_offset + 1), (test.end_lineno or 0, test.end_col_offset or 0)
    return start <= (source.line, source.column or start[1]) <= end


def _instead(node: ast.If | ast.While | ast.IfExp, tree: ast.Module) -> Iterator[str]:
    test = ast.unparse(node.test)
    if isinstance(node, ast.IfExp):
        yield f"monarch.cond({test}, lambda: {ast.unparse(node.body)}, lambda: {ast.unparse(node.orelse)})"
        return
    names = _assigned((*node.body, *node.orelse))
    if isinstance(node, ast.While):
        if names and not node.orelse:
            carried = ", ".join(names)
            round_ = _value(node.body, names)
            if round_ is None:
                yield from _function("body_fn", carried, node.body, carried)
            function = "body_fn" if round_ is None else f"lambda {carried}: {round_}"
            comma = "," if len(names) == 1 else ""
            yield f"{carried}{comma} = monarch.while_loop(lambda {carried}: {test}, {function}, ({carried}{comma}))"
        return
    returned = [_returned(each) for each in (node.body, node.orelse or _behind(node, tree))]
    if all(returned):
        yield f"return monarch.cond({test}, lambda: {returned[0]}, lambda: {returned[1]})"
    elif names:
        together = ", ".join(names)
        functions = []
        for name, body in (("true_fn", node.body), ("false_fn", node.orelse)):
            value = together if not body else _value(body, names)
            if value is None:
                yield from _function(name, "", body, together, names)
            functions.append(name if value is None else f"lambda: {value if len(names) == 1 else f'({value})'}")
        yield f"{together} = monarch.cond({test}, {', '.join(functions)})"


def _assigned(body: Iterable[ast.stmt]) -> list[str]:
    """The names that statements assign to; none where they do what no function can do for them."""
    names: dict[str, None] = {}
    for statement in body:
        for node in ast.walk(statement):
            if isinstance(node, _NOT_IN_FUNCTIONS):
                return []
            if isinstance(node, (ast.Attribute, ast.Subscript)) and isinstance(node.ctx, (ast.Store, ast.Del)):
                return []
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                names[node.id] = None
    return list(names)


_NOT_IN_FUNCTIONS = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)


def _value(body: list[ast.stmt], names: list[str]) -> str | None:
    """What one statement gives these names, as an expression."""
    if len(body) != 1 or len(names) != 1:
        return None
    statement = body[0]
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return ast.unparse(statement.value)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        return ast.unparse(ast.BinOp(statement.target, statement.op, statement.value))
    return None


def _function(name: str, takes: str, body: list[ast.stmt], gives: str, given: Iterable[str] = ()) -> Iterator[str]:
    defaults = ", ".join(f"{each}={each}" for each in given)  # which the function assigns to, and may read before
    yield f"def {name}({takes or defaults}):"
    for statement in body:
        yield from (f"    {line}" for line in ast.unparse(statement).splitlines())
    yield f"    return {gives}"


def _returned(body: list[ast.stmt]) -> str:
    """What a lone `return` gives."""
    lone = body[0] if len(body) == 1 else None
    return ast.unparse(lone.value) if isinstance(lone, ast.Return) and lone.value is not None else ""


def _behind(node: ast.If, tree: ast.Module) -> list[ast.stmt]:
    """The statement behind an `if`."""
    for parent in ast.walk(tree):
        for body in (getattr(parent, "body", None), getattr(parent, "orelse", None)):
            if isinstance(body, list) and node in body:
                return body[body.index(node) + 1 :][:1]
    return []
