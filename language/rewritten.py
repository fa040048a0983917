"""A branch or a loop of Python's on a tensor's value, written with `monarch.cond` or `monarch.while_loop`, and a call
that reads a value, with PyTorch's that does not."""

from __future__ import annotations

import ast
import linecache
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from monarch.compiler.errors import Source

_LONGEST = 14
"""Lines of a rewritten statement that an error shows."""


def rewritten(source: Source | None) -> list[str]:
    """The lines to write instead of the `if`, `while` or conditional expression that asks for a value at a place of a
    file; none where the place is in none of them, or where only its author knows its meaning (`break`, `return` in a
    loop, an attribute that one branch sets)."""
    tree = _parsed(source)
    if source is None or tree is None:
        return []
    found = [
        node
        for node in ast.walk(tree)
        if isinstance(node, _ASKING) and (_holds(node.test, source) or _is_at(node, source))
    ]
    if not found:
        return []
    lines = list(_instead(found[-1], tree))  # the innermost
    return lines if len(lines) <= _LONGEST else []


def without_reading(source: Source | None) -> str:
    """The statement at a place of a file with PyTorch's function for Python's that reads a tensor's value there
    (`max`, `sorted`, `any`, `float`, `math.sqrt`, `x.item()`), or without it; "" where it calls none of these."""
    tree = _parsed(source)
    if source is None or tree is None:
        return ""
    simple = (ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.Lambda)
    statements = [node for node in ast.walk(tree) if isinstance(node, simple) and _holds(node, source)]
    calls = [
        node
        for statement in statements[-1:]
        for node in ast.walk(statement)
        if isinstance(node, ast.Call) and _is_at(node, source)
    ]
    if not calls or (instead := _unread(calls[-1])) is None:
        return ""
    if any(isinstance(each, ast.Subscript) and each.slice is calls[-1] for each in ast.walk(statements[-1])):
        return ""  # a key
    if _called(calls[-1]) in _WITHOUT_GRADIENT:
        instead = _method(instead, "detach")  # as a number of Python's has none
    return ast.unparse(_Replaced(calls[-1], instead).visit(statements[-1]))


def asked(source: Source | None) -> str:
    """The use of a value that is asked for at a place of a file: a "decision", "output", a "number" of rounds or
    entries, or another "value"."""
    tree = _parsed(source)
    if source is None or tree is None:
        return "decision"
    decisions = [each.test for each in ast.walk(tree) if isinstance(each, (*_ASKING, ast.Assert))]
    decisions += [test for each in ast.walk(tree) if isinstance(each, ast.comprehension) for test in each.ifs]
    decisions += [each for each in ast.walk(tree) if isinstance(each, ast.BoolOp)]
    if any(_holds(each, source) for each in decisions):
        return "decision"
    for node in ast.walk(tree):
        if isinstance(node, (ast.If, ast.While)) and _is_at(node, source):
            return "decision"
        if isinstance(node, ast.Call) and _is_at(node, source):
            name = _called(node)
            return (
                "output"
                if name in _OUTPUT and _unread(node) is None
                else "number"
                if name in ("range", "int")
                else "value"
            )
    return (
        "output"
        if any(isinstance(each, ast.JoinedStr) and _holds(each, source) for each in ast.walk(tree))
        else "value"
    )


_OUTPUT = frozenset("print str repr format debug info warning error log write set_postfix set_description".split())
_WITHOUT_GRADIENT = frozenset("item float sqrt exp expm1 log log2 log10 log1p sin cos tan tanh erf".split())
"""Calls that give numbers of Python's, which have no gradient."""


def looked_up(source: Source | None) -> str:
    """The replacement of `x[i]` or `x[i : i + 2]` at a place of a file, where a tensor's value is asked for as an index
    into a plain tensor, or as an end of a slice; "" for any other code there."""
    tree = _parsed(source)
    if source is None or tree is None or not source.column:
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


def put_by_mask(source: Source | None, behind: int) -> tuple[str, str]:
    """A statement that changes `x[mask]` by its own value (`x[mask] *= 2`) at a place of a file, and the one with
    torch.where to write instead; "" and "" for any other code there. `behind`: the dims behind the mask's."""
    tree = _parsed(source)
    if source is None or tree is None:
        return "", ""
    held = (each for each in ast.walk(tree) if isinstance(each, (ast.Assign, ast.AugAssign)) and _holds(each, source))
    for statement in held:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        target = targets[0]
        if len(targets) > 1 or not isinstance(target, ast.Subscript):
            return "", ""
        if isinstance(target.slice, (ast.Tuple, ast.Slice)):
            return "", ""
        mask, wrong, value = ast.unparse(target.slice), ast.unparse(statement), statement.value
        for part in [each for each in ast.walk(value) if isinstance(each, ast.Subscript)]:
            if ast.unparse(part.slice) == mask:
                value = part.value if part is value else _Replaced(part, part.value).visit(value)
        if isinstance(statement, ast.AugAssign):
            value = ast.BinOp(target.value, statement.op, value)
        whole, new = ast.unparse(target.value), ast.unparse(value)
        wide = mask if isinstance(target.slice, ast.Name) or not behind else f"({mask})"
        wide += f"[...{', None' * behind}]" if behind else ""
        return wrong, f"{whole}.copy_(torch.where({wide}, {new}, {whole}))"
    return "", ""


def _parsed(source: Source | None) -> ast.Module | None:
    try:
        return None if source is None else ast.parse("".join(linecache.getlines(source.file)))
    except SyntaxError:
        return None


_ASKING = (ast.If, ast.While, ast.IfExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.Module)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)


def _is_at(node: ast.expr | ast.stmt, source: Source) -> bool:
    """Whether the place is all of a node. That of a statement of several lines has no last column."""
    end = (node.end_col_offset or 0) + 1 if node.end_lineno == node.lineno else source.end_column
    return (node.lineno, node.col_offset + 1, end) == (source.line, source.column, source.end_column)


def _holds(node: ast.expr | ast.stmt, source: Source) -> bool:
    start, end = (node.lineno, node.col_offset + 1), (node.end_lineno or 0, node.end_col_offset or 0)
    return start <= (source.line, source.column or start[1]) <= end


def _instead(node: ast.If | ast.While | ast.IfExp, tree: ast.Module) -> Iterator[str]:
    if (test := _predicate(node.test)) is None:
        return
    if isinstance(node, ast.IfExp):
        yield f"monarch.cond({test}, lambda: {ast.unparse(node.body)}, lambda: {ast.unparse(node.orelse)})"
        return
    names = _Names(node, tree)
    if isinstance(node, ast.While):
        yield from _loop(node, test, names)
        return
    behind = _behind(node, tree)
    branches = [each if _returns(each) else [*each, *behind] for each in (node.body, node.orelse)]
    if all(map(_returns, branches)) and any(map(_returns, (node.body, node.orelse))):
        if all(_movable(each, ast.Return) for each in branches):
            functions = []
            for name, body in zip(("true_fn", "false_fn"), branches, strict=True):
                lone = _returned(body)
                if not lone:
                    yield from _function(name, names.given(body), body)
                functions.append(f"lambda: {lone}" if lone else name)
            yield f"return monarch.cond({test}, {', '.join(functions)})"
        return
    results = names.needed(_assigned((*node.body, *node.orelse)))
    if not results or not all(_movable(each) for each in (node.body, node.orelse)):
        return
    if any(name not in names.bound and name not in _assigned(each) for name in results for each in branches[:2]):
        return
    together = ", ".join(results)
    functions = []
    for name, body in (("true_fn", node.body), ("false_fn", node.orelse)):
        value = together if not body else _value(body, results)
        if value is None:
            yield from _function(name, names.given(body), body, together)
        functions.append(name if value is None else f"lambda: {value if len(results) == 1 else f'({value})'}")
    yield f"{together} = monarch.cond({test}, {', '.join(functions)})"


def _loop(node: ast.While, test: str, names: _Names) -> Iterator[str]:
    assigned = _assigned(node.body)
    carried = [name for name in assigned if name in names.bound]
    after = [name for name in names.needed(assigned) if name not in carried]
    if not carried or after or not _movable([*node.body, *node.orelse]):
        return
    if any(isinstance(each, ast.NamedExpr) for each in ast.walk(node.test)):
        return
    body: list[ast.stmt] = [_OutOfPlace().visit(each) for each in node.body]
    together = ", ".join(carried)
    round_ = _value(body, carried)
    if round_ is None:
        yield from _function("body_fn", together, body, together)
    function = "body_fn" if round_ is None else f"lambda {together}: {round_}"
    comma = "," if len(carried) == 1 else ""
    yield f"{together}{comma} = monarch.while_loop(lambda {together}: {test}, {function}, ({together}{comma}))"
    for statement in node.orelse:
        yield from ast.unparse(statement).splitlines()


class _Names:
    """The names that a statement assigns to, as they are outside of it: bound before, and needed behind."""

    def __init__(self, statement: ast.stmt, tree: ast.Module) -> None:
        around = [each for each in ast.walk(tree) if _contains(each, statement)]
        scope = [each for each in around if isinstance(each, _SCOPES)][-1]
        self._all = isinstance(scope, ast.Module)  # others may bind and read its names
        loops = [each for each in around if isinstance(each, _LOOPS) and _contains(scope, each)]
        inside = {*map(id, ast.walk(statement))}
        again = {id(each) for loop in loops for each in ast.walk(loop)}
        end = statement.end_lineno or 0
        self._within = {each.id for each in ast.walk(statement) if isinstance(each, ast.Name)}
        self.bound = {*self._within} if self._all else set()
        self._read: set[str] = set()
        for each in ast.walk(scope):
            if isinstance(each, ast.arg):
                self.bound.add(each.arg)
            elif isinstance(each, ast.Name) and id(each) not in inside:
                if isinstance(each.ctx, ast.Store) and (each.lineno < statement.lineno or id(each) in again):
                    self.bound.add(each.id)
                elif isinstance(each.ctx, ast.Load) and (each.lineno > end or id(each) in again):
                    self._read.add(each.id)
        self._repeated = bool(loops)

    def needed(self, assigned: Iterable[str]) -> list[str]:
        """Those that are read behind the statement, or in the next round of a loop that it is in."""
        again = self._within if self._repeated else set()
        return [name for name in assigned if self._all or name in self._read or name in again & self.bound]

    def given(self, body: Sequence[ast.stmt]) -> str:
        """A function's parameters for the names that these statements assign to, and may read before."""
        read = {
            each.id
            for statement in body
            for each in ast.walk(statement)
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Load)
        }
        read |= {
            each.target.id
            for each in _walk(body)
            if isinstance(each, ast.AugAssign) and isinstance(each.target, ast.Name)
        }
        sure = {each.id for statement in body for each in _targets(statement)}
        return ", ".join(
            f"{each}={each}" for each in _assigned(body) if each in self.bound and (each in read or each not in sure)
        )


def _contains(outer: ast.AST, inner: ast.AST) -> bool:
    return outer is not inner and any(each is inner for each in ast.walk(outer))


def _walk(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    for statement in body:
        yield from ast.walk(statement)


def _targets(statement: ast.stmt) -> list[ast.Name]:
    """The names that a statement assigns to, whatever happens in it."""
    if not isinstance(statement, ast.Assign):
        return []
    return [each for each in _walk(statement.targets) if isinstance(each, ast.Name)]


def _assigned(body: Iterable[ast.stmt]) -> list[str]:
    """The names that statements assign to."""
    return list(
        {each.id: None for each in _walk(body) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
    )


_OF_TRAINING = ("backward", "step", "zero_grad")
_NOT_IN_FUNCTIONS = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom, ast.Await, ast.Global, ast.Nonlocal)


def _movable(body: Iterable[ast.stmt], *allowed: type[ast.AST]) -> bool:
    """Whether statements do the same in a function."""
    for each in _walk(body):
        if isinstance(each, _NOT_IN_FUNCTIONS) and not isinstance(each, allowed):
            return False
        if isinstance(each, ast.Call) and _called(each) in _OF_TRAINING:
            return False  # which a branch of the workers' cannot do
        if isinstance(each, (ast.Attribute, ast.Subscript)) and isinstance(each.ctx, (ast.Store, ast.Del)):
            return False
    return True


def _value(body: list[ast.stmt], names: list[str]) -> str | None:
    """The values that one statement gives these names, as an expression."""
    if len(body) != 1 or len(names) != 1:
        return None
    statement = body[0]
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.targets[0], ast.Name):
        return ast.unparse(statement.value)
    if isinstance(statement, ast.AugAssign) and isinstance(statement.target, ast.Name):
        return ast.unparse(_OutOfPlace().visit(statement).value)
    return None


def _function(name: str, takes: str, body: Sequence[ast.stmt], gives: str = "") -> Iterator[str]:
    yield f"def {name}({takes}):"
    for statement in body:
        yield from (f"    {line}" for line in ast.unparse(statement).splitlines())
    if gives:
        yield f"    return {gives}"


def _returned(body: Sequence[ast.stmt]) -> str:
    """The value of a lone `return`."""
    lone = body[0] if len(body) == 1 else None
    return ast.unparse(lone.value) if isinstance(lone, ast.Return) and lone.value is not None else ""


def _returns(body: Sequence[ast.stmt]) -> bool:
    """Whether statements end in a `return` of something, whatever they do."""
    last = body[-1] if body else None
    if isinstance(last, ast.If):
        return _returns(last.body) and _returns(last.orelse)
    return isinstance(last, ast.Return) and not (last.value is None or _is_none(last.value))


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _behind(node: ast.If, tree: ast.Module) -> list[ast.stmt]:
    """The statements behind an `if`."""
    for parent in ast.walk(tree):
        for body in (getattr(parent, "body", None), getattr(parent, "orelse", None)):
            if isinstance(body, list) and node in body:
                return body[body.index(node) + 1 :]
    return []


class _OutOfPlace(ast.NodeTransformer):
    """`n = n + 1` for `n += 1`: a loop's carried value is not changed in place."""

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if not isinstance(node.target, ast.Name):
            return node
        value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
        return ast.copy_location(ast.Assign([node.target], value, None), node)


class _Replaced(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self.new if node is self.old else self.generic_visit(node)


# -- the question asked -----------------------------------------------------------------------------------------------

_TRUTHS = frozenset("any all isnan isinf isfinite is_cuda is_floating_point".split())
"""Calls that give a truth value."""
_NUMBERS = frozenset("sum mean max min amax amin prod norm abs item numel count_nonzero".split())
"""Calls that give a number, as a tensor or Python's."""


def _predicate(test: ast.expr) -> str | None:
    """The condition of an `if`, as one tensor: `and`, `or`, `not` and `a < b < c` ask each part for its value. None
    where no function of PyTorch's asks the same."""
    try:
        made = _truth(test)
    except _Unknown:
        return None
    return ast.unparse(made)


class _Unknown(Exception):
    """There is no other way to write it that is sure to mean the same."""


def _truth(test: ast.expr, part: bool = False) -> ast.expr:
    """`part`: it is part of another, and has to be a truth value then."""
    if isinstance(test, ast.BoolOp):
        op = ast.BitAnd() if isinstance(test.op, ast.And) else ast.BitOr()
        return _joined([_truth(each, True) for each in test.values], op)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _method(_truth(test.operand, True), "logical_not")
    if isinstance(test, ast.Compare):
        if any(isinstance(op, (ast.In, ast.NotIn)) for op in test.ops):
            raise _Unknown
        values = [_number(each) for each in (test.left, *test.comparators)]
        return _joined(
            [ast.Compare(a, [op], [b]) for a, op, b in zip(values, test.ops, values[1:], strict=False)], ast.BitAnd()
        )
    if isinstance(test, ast.Call):
        name, made = _called(test), _unread(test)
        if made is not None and name in ("bool", "float", "item"):
            return _truth(made, part)
        if made is not None and name in ("any", "all"):
            return made
        if not part or name in _TRUTHS:
            return test
        if name in _NUMBERS:
            return ast.Compare(test, [ast.NotEq()], [ast.Constant(0)])
    if not part:
        return test
    return ast.Call(ast.Name("bool", ast.Load()), [test], [])  # Python's; of a tensor it is an error of its own


def _number(value: ast.expr) -> ast.expr:
    """One side of a comparison, where `float(x)` and `x.item()` are what `x` is."""
    made = _unread(value) if isinstance(value, ast.Call) and _called(value) in ("float", "item") else None
    return value if made is None else made


def _joined(parts: list[ast.expr], op: ast.operator) -> ast.expr:
    made = parts[0]
    for each in parts[1:]:
        made = ast.BinOp(made, op, each)
    return made


def _called(call: ast.Call) -> str:
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


_OF_MATH = frozenset("sqrt exp expm1 log log2 log10 log1p sin cos tan tanh floor ceil isnan isinf isfinite erf".split())


def _unread(call: ast.Call) -> ast.expr | None:
    """An expression with the same result as a call that reads values, without reading them, or None."""
    function, args = call.func, call.args
    if call.keywords or any(isinstance(each, ast.Starred) for each in args):
        return None
    if isinstance(function, ast.Attribute):
        if function.attr in ("item", "full_tensor") and not args:
            return function.value
        if isinstance(function.value, ast.Name) and function.value.id == "math" and function.attr in _OF_MATH:
            return ast.Call(ast.Attribute(ast.Name("torch", ast.Load()), function.attr, ast.Load()), args, [])
        return None
    name = getattr(function, "id", "")
    if name in ("float", "bool") and len(args) == 1:
        return args[0]
    if name in ("min", "max") and len(args) > 1:
        return _extreme(name, args)
    if name in ("min", "max", "sorted", "any", "all") and len(args) == 1:
        (values,) = args
        if not isinstance(values, (ast.List, ast.Tuple)):
            values = ast.List([ast.Starred(values, ast.Load())], ast.Load())
        stacked = ast.Call(ast.Attribute(ast.Name("torch", ast.Load()), "stack", ast.Load()), [values], [])
        if name == "sorted":
            return ast.Subscript(_method(stacked, "sort"), ast.Constant(0), ast.Load())
        return _method(stacked, {"min": "amin", "max": "amax"}.get(name, name))
    return None


def _extreme(name: str, args: list[ast.expr]) -> ast.expr:
    """`max` of several values."""
    numbers = [each for each in args if isinstance(each, ast.Constant) or isinstance(each, ast.UnaryOp)]
    made, *rest = [each for each in args if each not in numbers] or args[:1]
    for each in rest:
        function = ast.Attribute(ast.Name("torch", ast.Load()), f"{name}imum", ast.Load())
        made = ast.Call(function, [made, each], [])
    for each in numbers:
        bound = "min" if name == "max" else "max"
        made = ast.Call(ast.Attribute(made, "clamp", ast.Load()), [], [ast.keyword(bound, each)])
    return made


def _method(value: ast.expr, name: str) -> ast.expr:
    return ast.Call(ast.Attribute(value, name, ast.Load()), [], [])
