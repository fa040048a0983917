"""A branch or a loop on a value is shown as the call to write, in the user's own words."""

from __future__ import annotations

import ast
import linecache
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from monarch.compiler.errors import ProgramError, Source
from monarch.compiler.pipeline import partition_graph
from monarch.language import Mesh, program
from monarch.language.rewritten import rewritten
from tests.compiler.reference import run_reference

CASES = {
    "expression": ("y = x * 2 if x.sum() > 0 else -x", "monarch.cond(x.sum() > 0, lambda: x * 2, lambda: -x)"),
    "assignment": (
        """
        if x.sum() > 0:
            y = x * 2
        else:
            y = -x
        """,
        "y = monarch.cond(x.sum() > 0, lambda: x * 2, lambda: -x)",
    ),
    "one branch": (
        """
        if x.sum() > 0:
            x *= 2
        """,
        "x = monarch.cond(x.sum() > 0, lambda: x * 2, lambda: x)",
    ),
    "several names": (
        """
        if x.sum() > 0:
            x, y = y, x
        """,
        """
        def true_fn(x=x, y=y):
            x, y = (y, x)
            return x, y
        x, y = monarch.cond(x.sum() > 0, true_fn, lambda: (x, y))
        """,
    ),
    "return": (
        """
        def f(x):
            if x.sum() > 0:
                return x * 2
            return -x
        """,
        "return monarch.cond(x.sum() > 0, lambda: x * 2, lambda: -x)",
    ),
    "loop": (
        """
        while x.sum() > 0:
            x = x - 1
        """,
        "x, = monarch.while_loop(lambda x: x.sum() > 0, lambda x: x - 1, (x,))",
    ),
    "longer loop": (
        """
        while x.sum() > 0:
            x = x - y
            n += 1
        """,
        """
        def body_fn(x, n):
            x = x - y
            n = n + 1
            return x, n
        x, n = monarch.while_loop(lambda x, n: x.sum() > 0, body_fn, (x, n))
        """,
    ),
    "only what is needed behind, and was there before": (
        """
        def f(x):
            if x.sum() > 0:
                t = x * 2
                y = t + 1
            else:
                y = x
            return y
        """,
        """
        def true_fn():
            t = x * 2
            y = t + 1
            return y
        y = monarch.cond(x.sum() > 0, true_fn, lambda: x)
        """,
    ),
    "perhaps unbound": ("def f(x):\n    if x.sum() > 0:\n        y = x\n    return y", ""),
    "break": ("while x.sum() > 0:\n    x = x - 1\n    break", ""),
    "attribute": ("if x.sum() > 0:\n    self.y = x", ""),
    "training": ("if x.sum() > 0:\n    y = x\nelse:\n    y = x * 2\n    y.backward()", ""),
    "nothing": ("def f(x):\n    if x.sum() > 0:\n        return None\n    return x", ""),
    "no branch": ("y = float(x.sum() > 0)", ""),
}


@pytest.mark.parametrize("case", CASES)
def test_the_call_to_write(case: str) -> None:
    written, expected = (textwrap.dedent(text).strip() for text in CASES[case])
    lines = written.splitlines(keepends=True)
    linecache.cache["case.py"] = (len(written), None, lines, "case.py")
    number = next(number for number, line in enumerate(lines, start=1) if "x.sum() > 0" in line)
    column = lines[number - 1].index("x.sum() > 0") + 1
    try:
        assert rewritten(Source("case.py", number, column, column + 11)) == expected.splitlines()
    finally:
        del linecache.cache["case.py"]


@pytest.mark.parametrize(
    ("line", "right", "outside"),
    [
        ("print('loss', x)", "return loss", "print(step(x))"),
        ("logger.info(f'loss {x:.3f}')", "return loss", "print(step(x))"),
        ("losses.append(x.item())", "losses.append(x.detach())", "step(x).item()"),
        ("total += float(x)", "total += x.detach()", "step(x).item()"),
        ("total += math.log(x)", "total += torch.log(x).detach()", "step(x).item()"),
        ("y = x.full_tensor() * 2", "y = x * 2", "step(x).item()"),
        ("y = x.tolist()", "return loss", "step(x).item()"),
        ("for _ in range(x.long()): pass", "step(x, 3)", "step(x, n.item())"),
        ("y = x.expand(int(x), 3)", "step(x, 3)", "step(x, n.item())"),
        ("y = x or total", "y = torch.where(loss > 0.1, a, b)", "if step(x).item() > 0.1:"),
    ],
)
def test_what_asks_for_a_value_decides_what_is_shown(line: str, right: str, outside: str, tmp_path: Path) -> None:
    text = f"import logging, math\nlogger = logging.getLogger()\ndef f(x):\n    losses, total = [], 0.0\n    {line}\n"
    with pytest.raises(ProgramError) as error:
        program(_function(text, tmp_path / "asked.py"), mesh=Mesh.abstract(data=2)).trace(torch.ones(()))
    assert [row.split("  # ")[0].rstrip() for row in error.value.hint.splitlines()] == [line, right, outside]


RUNS = {
    "elif": """
        if x.sum() > 5:
            y = x * 2
        elif x.sum() > -5:
            y = x * 3
        else:
            y = x * 4
        return y
        """,
    "early return": """
        y = x + 1
        if y.sum() > 0:
            z = y * 2
            return z + 1
        if y.sum() < -5:
            return y * 2
        return y * 3
        """,
    "and, or, not": """
        flag = x.sum() > 0
        if flag and not (x.max() > 2) or 1 < x.sum() < 3 and 1 == 1:
            x = x * 2
        return x
        """,
    "a number": """
        scale = 1.0
        if float(x.norm()) > 1:
            scale = 0.5
        return x * scale, torch.as_tensor(scale, dtype=torch.float64)
        """,
    "a loop that counts": """
        n = 0
        while x.abs().max() > 0.1 and n < 3:
            t = x * 0.5
            x = t - 0.01 * t
            n += 1
        else:
            x = x + 1
        return x * n
        """,
    "a branch in a loop": """
        while x.abs().max() > 0.1:
            x = x * 0.5 if (x > 0).any() else x * 0.25
        return x
        """,
    "extremes": "return max(x.sum(), x.mean(), 1.0) * min(row.sum() for row in x)",
    "sorted": "a, b = sorted([x.sum(), x.mean()])\nreturn x * a + b",
    "any": "return x * 2 if any(row.sum() > 0 for row in x) else x",
    "float": "return x * float(x.sum()) + x.mean().item() + math.sqrt(x.abs().sum())",
}


@pytest.mark.parametrize("case", RUNS)
def test_what_is_written_runs_and_is_right(case: str, tmp_path: Path) -> None:
    """The lines of each error, put in the place of what it points at, until the program is taken."""
    body = textwrap.indent(textwrap.dedent(RUNS[case]).strip(), "    ")
    text = f"import math\nimport torch\nimport monarch\n\ndef f(x):\n{body}\n"
    written, graph = _function(text, tmp_path / "written.py"), None
    for number in range(8):
        path = tmp_path / f"rewritten{number}.py"
        try:
            graph = program(_function(text, path), mesh=Mesh.abstract(data=2)).trace(torch.ones(4, 3)).graph
            break
        except ProgramError as error:
            text = _put_right(text, error)
    assert graph is not None, text
    for x in (torch.full((4, 3), 0.25), torch.full((4, 3), -3.0), torch.arange(12.0).view(4, 3)):
        found, expected = run_reference(partition_graph(graph.copy()), {0: x})[0], written(x)
        for ours, theirs in zip(found, expected if isinstance(expected, tuple) else [expected], strict=True):
            torch.testing.assert_close(ours, theirs, check_dtype=False)


def _function(text: str, path: Path) -> Callable[..., Any]:
    path.write_text(text)
    names: dict[str, Any] = {}
    exec(compile(text, str(path), "exec"), names)
    function: Callable[..., Any] = names["f"]
    return function


def _put_right(text: str, error: ProgramError) -> str:
    """The text with the lines that the error shows in the place of the statement, or the expression, at its line."""
    assert error.hint and error.source, error
    right = [line.split("# right")[0].rstrip() for line in error.hint.splitlines()[1:-1]]
    found = [node for node in ast.walk(ast.parse(text)) if getattr(node, "lineno", 0) == error.source.line]
    statement = next(node for node in found if isinstance(node, ast.stmt))
    lines, indent = text.splitlines(), " " * statement.col_offset
    if len(right) == 1 and right[0].startswith("monarch.cond(") and not isinstance(statement, ast.If):
        written = ast.get_source_segment(text, next(node for node in found if isinstance(node, ast.IfExp)))
        assert written
        return text.replace(written, right[0])
    end = statement.end_lineno or 0
    while right[-1].startswith("return monarch.cond(") and end < len(lines) and lines[end].startswith(indent):
        end += 1  # what is behind it is in a function
    return "\n".join([*lines[: statement.lineno - 1], *(indent + line for line in right), *lines[end:], ""])
