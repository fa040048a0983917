"""Text in, text out: what is expected of a test stands in the folder golden/ beside it; `pytest --rewrite` writes it
anew."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from monarch.compiler.context import Context, Pass
from monarch.compiler.plan.options import CompileOptions
from monarch.compiler.text import parse_graph, print_graph
from monarch.compiler.verify import verify


@pytest.fixture
def expect_text(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Compare a text with the golden file named after the test."""

    def compare(got: str) -> None:
        file = request.path.parent / "golden" / f"{request.node.name}.txt"
        if request.config.getoption("--rewrite"):
            file.write_text(got + "\n")
        assert got + "\n" == file.read_text()

    return compare


@pytest.fixture
def expect(expect_text: Callable[[str], None]) -> Callable[..., None]:
    """Compare what a pass makes of a graph's text with the golden file named after the test."""

    def compare(text: str, pass_: Pass, options: CompileOptions | None = None) -> None:
        graph = pass_.run(parse_graph(text), Context(options or CompileOptions()))
        verify(graph, after=pass_.name)
        expect_text(print_graph(graph, modules=True))

    return compare
