"""Every malformed text gives an error that says where, what, and what was expected."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from monarch.compiler.errors import GraphError, LayoutError
from monarch.compiler.text import parse_graph, parse_layout, parse_mesh, parse_type
from tests.compiler.text.test_print import PARTITIONED, WHOLE


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (
            parse_type,
            "f32[64@data 1024]",
            """\
            tensor type, column 13: expected ',' or ']', not '1024'
              f32[64@data 1024]
                          ^""",
        ),
        (
            parse_type,
            "f31[64]",
            """\
            tensor type, column 1: unknown dtype 'f31'
              f31[64]
              ^
              it is one of f64, f32, f16, bf16, i64, i32, i16, i8, u8, bool, c64, c128.""",
        ),
        (
            parse_type,
            "f32[64@]",
            """\
            tensor type, column 8: expected a name or '(', not ']'
              f32[64@]
                     ^""",
        ),
        (
            parse_type,
            "f32[64",
            """\
            tensor type, column 7: expected ',', '@' or ']', not the end of the text
              f32[64
                    ^""",
        ),
        (
            parse_type,
            "f32[8, 8]; x",
            """\
            tensor type, column 10: expected the end of the text, 'partial' or 'varying', not ';'
              f32[8, 8]; x
                       ^""",
        ),
        (parse_type, "", "tensor type, column 1: expected a name, not the end of the text"),
        (
            parse_type,
            "f32[4@(a,b), 4@a]",
            """\
            tensor type, column 16: mesh dim 'a' stands twice in one layout
              f32[4@(a,b), 4@a]
                             ^
              a mesh dim can shard one tensor dim, or hold partial values, but not two things at once.""",
        ),
        (
            parse_type,
            "f32[-4]",
            """\
            tensor type, column 5: a size has to be at least 0
              f32[-4]
                  ^""",
        ),
        (
            parse_type,
            "f32[9223372036854775808]",
            """\
            tensor type, column 5: a size has to be below 2**63
              f32[9223372036854775808]
                  ^""",
        ),
        (
            parse_type,
            "f32[] partial<avg: x>",
            """\
            tensor type, column 15: unknown reduction 'avg'
              f32[] partial<avg: x>
                            ^
              it is one of sum, max, min, prod.""",
        ),
        (
            parse_layout,
            "[data, -]",
            """\
            layout, column 2: expected a whole number, '-', '@' or ']', not 'data'
              [data, -]
               ^
              one entry for each dim, in brackets: [@data, -] shards the first over mesh dim 'data'.""",
        ),
        (
            parse_layout,
            "[-] partial<sum: a> varying<a>",
            """\
            layout, column 29: mesh dim 'a' stands twice in one layout
              [-] partial<sum: a> varying<a>
                                          ^
              a mesh dim can shard one tensor dim, or hold partial values, but not two things at once.""",
        ),
        (
            parse_mesh,
            "mesh<a=2, a=3>",
            """\
            mesh, column 11: mesh dim 'a' stands twice
              mesh<a=2, a=3>
                        ^""",
        ),
        (
            parse_mesh,
            "mesh<a=0>",
            """\
            mesh, column 8: a mesh dim's size has to be at least 1
              mesh<a=0>
                     ^""",
        ),
    ],
)
def test_types_layouts_and_meshes(parse: Callable[[str], object], text: str, message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse(text)
    assert str(caught.value) == dedent(message)


GRAPH = """\
graph @f on mesh<data=4, model=2> partitioned<model> {
  %x = input 0 : f32[8@data, 4]
  %w = state "w" : f32[4, 2] of f32[4, 4@model]
  %y = aten.mm(%x, %w, a=1) : f32[8, 2] of f32[8@data, 4@model]
  update "w" = %w
  return %y
}"""


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        (
            "aten.mm",
            "aten.mmm",
            """\
            graph text, line 4, column 8: unknown op 'aten.mmm'
                %y = aten.mmm(%x, %w, a=1) : f32[8, 2] of f32[8@data, 4@model]
                     ^
              did you mean aten.mm?""",
        ),
        (
            "aten.mm",
            "aten.add",
            """\
            graph text, line 4, column 8: aten.add has no default overload
                %y = aten.add(%x, %w, a=1) : f32[8, 2] of f32[8@data, 4@model]
                     ^
              its overloads are aten.add.Scalar, aten.add.Scalar_out, aten.add.Tensor, aten.add.out.""",
        ),
        (
            "aten.mm",
            "aten.mm.Foo",
            """\
            graph text, line 4, column 8: aten.mm has no overload 'Foo'
                %y = aten.mm.Foo(%x, %w, a=1) : f32[8, 2] of f32[8@data, 4@model]
                     ^
              its overloads are aten.mm, aten.mm.dtype, aten.mm.dtype_out, aten.mm.out.""",
        ),
        (
            "aten.mm",
            "mine.op",
            """\
            graph text, line 4, column 8: unknown op 'mine.op'
                %y = mine.op(%x, %w, a=1) : f32[8, 2] of f32[8@data, 4@model]
                     ^
              no op is registered in the namespace 'mine': import the module that registers its ops first.""",
        ),
        (
            "aten.mm",
            "all_redce",
            """\
            graph text, line 4, column 8: unknown op 'all_redce'
                %y = all_redce(%x, %w, a=1) : f32[8, 2] of f32[8@data, 4@model]
                     ^
              did you mean all_reduce?""",
        ),
        (
            "(%x, %w",
            "(%z, %w",
            """\
            graph text, line 4, column 16: %z is not defined above this line
                %y = aten.mm(%z, %w, a=1) : f32[8, 2] of f32[8@data, 4@model]
                             ^""",
        ),
        (
            "%w = state",
            "%x = state",
            """\
            graph text, line 3, column 3: %x is defined twice; the first time on line 2
                %x = state "w" : f32[4, 2] of f32[4, 4@model]
                ^""",
        ),
        (
            "f32[8, 2] of",
            "f32[8, 3] of",
            """\
            graph text, line 4, column 31: a worker holds f32[8, 2] of f32[8@data, 4@model], not f32[8, 3]
                %y = aten.mm(%x, %w, a=1) : f32[8, 3] of f32[8@data, 4@model]
                                            ^""",
        ),
        (
            "f32[8, 2] of",
            "f64[8, 2] of",
            """\
            graph text, line 4, column 31: a worker holds f32[8, 2] of f32[8@data, 4@model], not f64[8, 2]
                %y = aten.mm(%x, %w, a=1) : f64[8, 2] of f32[8@data, 4@model]
                                            ^""",
        ),
        (
            "[8@data, 4]",
            "[6+0@data, 4]",
            """\
            graph text, line 2, column 22: padding has to be at least 1
                %x = input 0 : f32[6+0@data, 4]
                                   ^""",
        ),
        (
            "[8@data, 4]",
            "[8@dta, 4]",
            """\
            graph text, line 2, column 18: unknown mesh dim 'dta' in the layout of %x
                %x = input 0 : f32[8@dta, 4]
                               ^
              did you mean data? the mesh is mesh<data=4, model=2>: its dims are data, model.""",
        ),
        (
            "f32[8@data, 4]\n",
            "f32\n",
            """\
            graph text, line 2, column 18: 'f32' is no type: write f32[…], with the tensor's sizes, or none
                %x = input 0 : f32
                               ^""",
        ),
        (
            "f32[8@data, 4]\n",
            "none\n",
            """\
            graph text, line 2, column 3: %x is a placeholder: its type is one tensor's
                %x = input 0 : none
                ^""",
        ),
        (
            "partitioned<model>",
            "partitioned<modl>",
            """\
            graph text, line 1, column 47: 'modl' in partitioned<…> is not a dim of mesh<data=4, model=2>
              graph @f on mesh<data=4, model=2> partitioned<modl> {
                                                            ^""",
        ),
        (
            "a=1",
            "a=1, a=2",
            """\
            graph text, line 4, column 29: argument 'a' is given twice
                %y = aten.mm(%x, %w, a=1, a=2) : f32[8, 2] of f32[8@data, 4@model]
                                          ^""",
        ),
        (
            "a=1",
            "a=1, [2]",
            """\
            graph text, line 4, column 29: arguments without a name stand before those with one
                %y = aten.mm(%x, %w, a=1, [2]) : f32[8, 2] of f32[8@data, 4@model]
                                          ^""",
        ),
        (
            "a=1",
            "a=cpu",
            """\
            graph text, line 4, column 26: unknown argument 'cpu'
                %y = aten.mm(%x, %w, a=cpu) : f32[8, 2] of f32[8@data, 4@model]
                                       ^
              write %name for a value, "text" for a string; constants are none, true, false, inf, nan, """
            """f32 and the other dtypes, memory formats, layouts.""",
        ),
        (
            "a=1",
            'a=device("gpu0")',
            """\
            graph text, line 4, column 33: "gpu0" is no device
                %y = aten.mm(%x, %w, a=device("gpu0")) : f32[8, 2] of f32[8@data, 4@model]
                                              ^
              devices are "cpu", "cuda", "cuda:0", "meta" and the like.""",
        ),
        (
            "a=1",
            'a=aten("gpu0")',
            """\
            graph text, line 4, column 26: 'aten' cannot stand before '(' here: nested calls are lines of their own
                %y = aten.mm(%x, %w, a=aten("gpu0")) : f32[8, 2] of f32[8@data, 4@model]
                                       ^""",
        ),
        (
            "a=1",
            'a="1',
            """\
            graph text, line 4, column 26: expected a "string", a %value, a name, a number, a whole number or '[', """
            """not a string without its closing '"'
                %y = aten.mm(%x, %w, a="1) : f32[8, 2] of f32[8@data, 4@model]
                                       ^""",
        ),
        (
            "a=1",
            r'a="\q"',
            r"""
            graph text, line 4, column 26: not a string: Invalid \escape
                %y = aten.mm(%x, %w, a="\q") : f32[8, 2] of f32[8@data, 4@model]
                                       ^""",
        ),
        (
            "  return %y\n",
            "",
            """\
            graph text, line 6, column 1: the graph has no 'return' line
              }
              ^
              end it with 'return %x', or with 'return' alone.""",
        ),
        (
            "return %y",
            "return %y, 1",
            """\
            graph text, line 6, column 14: expected a %value or a name, not '1'
                return %y, 1
                           ^""",
        ),
        (
            "return %y",
            "return y",
            """\
            graph text, line 6, column 10: a graph returns %values or none, not 'y'
                return y
                       ^""",
        ),
        (
            "  return %y\n",
            '  return %y\n  update "v" = %x\n',
            """\
            graph text, line 7, column 10: 'return' has to be the last line of a graph
                update "v" = %x
                       ^""",
        ),
        (
            "  return %y\n",
            '  update "w" = %x\n  return %y\n',
            """\
            graph text, line 6, column 10: state "w" is updated twice
                update "w" = %x
                       ^""",
        ),
        (
            "  return %y\n",
            "  %z = aten.neg(%x) : f32[8@data, 4]\n  return %y\n",
            """\
            graph text, line 6, column 3: updates stand after the last value, before 'return'
                %z = aten.neg(%x) : f32[8@data, 4]
                ^""",
        ),
        (
            "return %y\n}",
            "return %y",
            """\
            graph text, line 6, column 12: expected the end of the line or ',', not the end of the text
                return %y
                         ^""",
        ),
    ],
)
def test_graphs(right: str, wrong: str, message: str) -> None:
    assert GRAPH.count(right) == 1
    with pytest.raises(GraphError) as caught:
        parse_graph(GRAPH.replace(right, wrong))
    assert str(caught.value) == dedent(message).lstrip("\n")


def test_the_graph_itself_parses() -> None:
    assert parse_graph(GRAPH).updates.keys() == {"w"}


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "step.graph"
    path.write_text(GRAPH.replace("%x, %w", "%q, %w"))
    with pytest.raises(GraphError) as caught:
        parse_graph(path.read_text(), file=str(path))
    assert str(caught.value).splitlines() == [
        "step.graph:4:16: error: %q is not defined above this line",
        "      %y = aten.mm(%q, %w, a=1) : f32[8, 2] of f32[8@data, 4@model]",
        "                   ^",
    ]


def test_long_lines_are_shown_around_the_error() -> None:
    sizes = ", ".join(["1"] * 100)
    with pytest.raises(LayoutError) as caught:
        parse_type(f"f32[{sizes}, @, {sizes}]")
    first, line, caret = str(caught.value).splitlines()
    assert first == "tensor type, column 305: expected a name or a whole number, not '@'"
    assert len(line) < 120
    assert line.startswith("  …") and line[len(caret) - 1] == "@"


@pytest.mark.parametrize("argument", ["[" * 3000 + "]" * 3000, "9" * 5000])
def test_absurd_arguments(argument: str) -> None:
    with pytest.raises(GraphError, match="nested more than 32 deep|too large"):
        parse_graph(GRAPH.replace("a=1", f"a={argument}"))


GRAPHS = [WHOLE, PARTITIONED, GRAPH]
PIECES = ["%", "@", "[", "]", "<", ">", "}", '"', "\n", "#", "\\", "none", "of", "-", "1e9", "é", "\0", "\r", ": ?"]


@given(st.sampled_from(GRAPHS), st.integers(0, 1500), st.integers(0, 12), st.sampled_from(PIECES) | st.text(max_size=4))
@example(GRAPH, 0, 0, "\r\n")
@settings(max_examples=400)
def test_edited_graphs_parse_or_raise_a_graph_error(text: str, at: int, cut: int, put: str) -> None:
    try:
        parse_graph(text[:at] + put + text[at + cut :])
    except GraphError as error:
        assert "line" in str(error) or "column" in str(error)


@given(st.text(st.sampled_from("f32[]@(), partial<sum:>varying-ab")) | st.text())
@settings(max_examples=400)
def test_any_text_is_a_type_and_layout_or_a_layout_error(text: str) -> None:
    for parse in (parse_type, parse_layout, parse_mesh):
        try:
            parse(text)
        except LayoutError as error:
            assert "column" in str(error)
