"""Modules in a line's comment: printed only where they are asked for, and read back."""

from __future__ import annotations

import re

import pytest

from monarch.compiler.errors import Source
from monarch.compiler.graph import Provenance, provenance
from monarch.compiler.text import parse_graph, print_graph
from monarch.compiler.text.comment import parse_comment, print_comment

AT = Source("/home/me/train.py", 12, 9, 14)
IN = Source("/lib/llama.py", 80, 5, 7, AT)


@pytest.mark.parametrize(
    ("of", "why", "text"),
    [
        (Provenance(AT, "blocks.0.attn"), "", '# /home/me/train.py:12:9-14 in "blocks.0.attn"'),
        (Provenance(AT, "up", True), "", '# /home/me/train.py:12:9-14 backward in "up"'),
        (Provenance(None, "up", True), "it is", '# backward in "up"; it is'),
        (Provenance(None, 'odd "name"; too'), "", '# in "odd \\"name\\"; too"'),
        (Provenance(AT), "", "# /home/me/train.py:12:9-14"),
        (Provenance(IN), "", "# /lib/llama.py:80:5-7 from /home/me/train.py:12:9-14"),
        (
            Provenance(IN, "up", True),
            "it",
            '# /lib/llama.py:80:5-7 from /home/me/train.py:12:9-14 backward in "up"; it',
        ),
        (
            Provenance(AT, "up", True, microbatch=2, stage=0),
            "it",
            '# /home/me/train.py:12:9-14 backward in "up" of microbatch 2, stage 0; it',
        ),
        (Provenance(AT, microbatch=0), "", "# /home/me/train.py:12:9-14 of microbatch 0"),
        (Provenance(stage=1), "", "# of stage 1"),
        (Provenance(), "", ""),
    ],
)
def test_comments_with_modules(of: Provenance, why: str, text: str) -> None:
    meta = {"provenance": of, "why": why}
    assert print_comment(meta, paths=True, modules=True) == text
    assert parse_comment(text) == {key: value for key, value in meta.items() if value not in ("", Provenance())}
    assert not re.search(r" in | of ", print_comment({**meta, "why": ""}, paths=True))


@pytest.mark.parametrize(
    "text",
    [
        "# in three steps",
        "# a.py:1 from",
        "# from a.py:1",
        "# in blocks",
        "# of all",
        "# of stage 1, microbatch 2",
        '# within "x"',
        '# in "x" and "y"',
        '# in "\\q"',
    ],
)
def test_the_writers_own_comments_name_no_module(text: str) -> None:
    assert parse_comment(text) == {}


def test_a_graph_keeps_its_modules() -> None:
    text = """graph @f on mesh<> {
  %x = input 0         : f32[8]
  %a = aten.relu(%x)   : f32[8]  # train.py:3 in "up"
  %b = aten.neg(%a)    : f32[8]  # train.py:3 backward in "up"
  return %b
}"""
    graph = parse_graph(text)
    assert [provenance(node).module for node in graph.calls] == ["up", "up"]
    assert ' in "up"' not in str(graph)
    printed = print_graph(graph, modules=True)
    assert print_graph(parse_graph(printed), modules=True) == printed
    assert printed.count('in "up"') == 2
