"""No file that Python parses makes the linter fail: programs put together at random, and Python's own library."""

from __future__ import annotations

import ast
import json
import sysconfig
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from monarch.compiler.errors import ProgramError
from monarch.language.check import RULES, check_source
from tests.sample import is_full

NAMES = st.sampled_from("x y n f g self torch F monarch mesh model losses print range super __class__".split())
CONSTANTS = st.sampled_from(["1", "0.5", "'a'", "b'a'", "None", "...", "'f32[4@data,,'", "'[@data'", "True", "1j"])


def _compound(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    several = st.lists(inner, max_size=3).map(", ".join)
    return st.one_of(
        st.tuples(inner, st.sampled_from("+ - @ % and or > is in **".split()), inner).map(
            lambda t: f"({t[0]} {t[1]} {t[2]})"
        ),
        st.tuples(
            inner, st.sampled_from("sum item append shape add_ layout view backward step weight values".split())
        ).map(lambda t: f"({t[0]}).{t[1]}"),
        st.tuples(inner, several).map(lambda t: f"({t[0]})({t[1]})"),
        st.tuples(inner, inner).map(lambda t: f"({t[0]})(*{t[1]}, k={t[1]}, **{t[0]})"),
        st.tuples(inner, inner).map(lambda t: f"({t[0]})[{t[1]}:, ...]"),
        st.tuples(inner, inner, inner).map(lambda t: f"({t[0]} if {t[1]} else {t[2]})"),
        st.tuples(inner, inner).map(lambda t: f"[{t[0]} for x, *y in {t[1]} if not {t[0]}]"),
        st.tuples(inner, inner).map(lambda t: f"{{{t[0]}: {t[1]}, **{t[1]}}}"),
        st.tuples(inner, inner).map(lambda t: f"(lambda x, /, y={t[0]}, *n, **f: {t[1]})"),
        several.map(lambda text: f"({text},)" if text else "()"),
        inner.map(lambda text: f"(n := {text})"),
        NAMES.map(lambda name: f"f'{{{name}!r:>{{n}}}} {{{name}:.3f}}'"),
    )


EXPRESSIONS = st.recursive(st.one_of(NAMES, CONSTANTS), _compound, max_leaves=8)
TARGETS = st.one_of(
    NAMES.filter(str.isidentifier), st.sampled_from(["x.grad", "self.n", "x[0]", "(x, *y)", "[n, (f, g)]"])
)


def _indented(lines: list[str]) -> str:
    return "\n".join("    " + line for text in lines or ["pass"] for line in text.splitlines())


def _blocks(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    body = st.lists(inner, min_size=1, max_size=3).map(_indented)
    return st.one_of(
        st.tuples(EXPRESSIONS, body, body).map(lambda t: f"if {t[0]}:\n{t[1]}\nelse:\n{t[2]}"),
        st.tuples(TARGETS, EXPRESSIONS, body).map(lambda t: f"for {t[0]} in {t[1]}:\n{t[2]}"),
        st.tuples(EXPRESSIONS, body).map(lambda t: f"while {t[0]}:\n{t[1]}"),
        st.tuples(EXPRESSIONS, NAMES, body).map(lambda t: f"with {t[0]} as {t[1]}, torch.no_grad():\n{t[2]}"),
        st.tuples(body, NAMES, body).map(lambda t: f"try:\n{t[0]}\nexcept* ValueError as {t[1]}:\n{t[2]}"),
        st.tuples(EXPRESSIONS, body).map(
            lambda t: f"match {t[0]}:\n    case [x, {{'k': n, **y}}] | 3 if x:\n{_indented(t[1].splitlines())}"
        ),
        st.tuples(EXPRESSIONS, EXPRESSIONS, body).map(
            lambda t: (
                f"@monarch.program(mesh={t[0]})\ndef f(self, x: {t[1]}, *y, n={t[0]}, **g):\n    global losses\n{t[2]}"
            )
        ),
        st.tuples(EXPRESSIONS, body).map(lambda t: f"class model(torch.nn.Module, k={t[0]}):\n{t[1]}"),
    )


SIMPLE = st.one_of(
    EXPRESSIONS,
    st.tuples(TARGETS, EXPRESSIONS).map(lambda t: f"{t[0]} = {t[1]}"),
    st.tuples(st.sampled_from(["x", "x.grad", "x[0]", "losses"]), EXPRESSIONS).map(lambda t: f"{t[0]} += {t[1]}"),
    EXPRESSIONS.map(lambda text: f"assert {text}, {text}"),
    EXPRESSIONS.map(lambda text: f"del ({text})[0]"),
    st.sampled_from(["import torch.nn.functional as F", "from monarch import *", "from . import x", "x: int"]),
)
STATEMENTS = st.recursive(SIMPLE, _blocks, max_leaves=8)


@settings(max_examples=150 if is_full() else 50, suppress_health_check=list(HealthCheck))
@given(st.lists(STATEMENTS, max_size=4))
def test_random_programs(statements: list[str]) -> None:
    body = "\n".join(statements)
    text = (
        "import monarch, torch\nfrom monarch.distributed import Mesh\nmesh = Mesh(data=2)\nlosses = []\n"
        f"@monarch.program\ndef g(x: torch.Tensor, y):\n{_indented([body])}\n{body}\n"
    )
    try:
        ast.parse(text)
    except SyntaxError:
        with_error = True
    else:
        with_error = False
    if with_error:
        with pytest.raises(ProgramError, match="no Python"):
            check_source(text)
        return
    lines = text.splitlines()
    for finding in check_source(text):
        assert finding.code in RULES
        assert 1 <= finding.line <= len(lines)
        assert 1 <= finding.column <= len(lines[finding.line - 1]) + 1
        assert str(finding)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        "import monarch\n@monarch.program\ndef f(x): return x" + " + x" * 3000,
        "import monarch\n@monarch.program\ndef f(x): return x" + ".sum()" * 300,
        "import monarch\n@monarch.program\ndef f(x):\n"
        + "".join(f"{' ' * i}if x:\n" for i in range(1, 90))
        + " " * 95
        + "x",
        "x = 1\f\n\x0cdef f(): pass\r\ny = '''\r\n'''\r",
        "import monarch\n@monarch.program\ndef f(x: '\\ud800[3@data]', y: 'f32[\\ud800]'): pass",
        "import monarch\n@monarch.program\ndef f(x: 'f32[' '3@@]', y: '''\nf32[3@@]'''): pass",
        "import monarch as m\nclass A(A): pass\nf = m.program(f)\ng = m.program(g())\nh = lambda: h\nm.program(h())",
    ],
)
def test_odd_files(text: str) -> None:
    try:
        check_source(text)
    except ProgramError as error:
        assert "too deeply" in str(error)


class _AllPrograms(ast.NodeTransformer):
    """Makes a program of every function."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        self.generic_visit(node)
        node.decorator_list.insert(0, ast.parse("monarch.program", mode="eval").body)
        if node.args.args:
            node.args.args[-1].annotation = ast.Constant("f32[4@data, 4]")
        return node


@pytest.mark.sample(3)
@pytest.mark.parametrize("module", ["argparse", "ast", "dataclasses", "enum", "typing", "tarfile", "asyncio/events"])
def test_pythons_library_as_programs(module: str) -> None:
    path = Path(sysconfig.get_paths()["stdlib"]) / f"{module}.py"
    tree = _AllPrograms().visit(ast.parse(path.read_text()))
    text = "import monarch\n" + ast.unparse(ast.fix_missing_locations(tree)).replace(
        "from __future__", "# from __future__"
    )
    findings = check_source(text, path.name)
    assert json.dumps([str(finding) for finding in findings])
