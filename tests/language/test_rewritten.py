"""A branch or a loop on a value is shown as the call to write, in the user's own words."""

from __future__ import annotations

import linecache
import textwrap

import pytest

from monarch.compiler.errors import Source
from monarch.language.rewritten import rewritten

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
            n += 1
            return x, n
        x, n = monarch.while_loop(lambda x, n: x.sum() > 0, body_fn, (x, n))
        """,
    ),
    "break": ("while x.sum() > 0:\n    x = x - 1\n    break", ""),
    "attribute": ("if x.sum() > 0:\n    self.y = x", ""),
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
