"""The grammar, and syntax errors in the reader's words."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NoReturn

from lark import Lark, Token
from lark.exceptions import UnexpectedCharacters, UnexpectedToken

from monarch.compiler.errors import MonarchError, Source
from monarch.compiler.loading import unwatched

_TYPES = r"""
type: NAME "[" [size ("," size)*] "]" tail*
size: (INT | PADDED | NAME) ["@" axes]
axes: NAME | "(" NAME ("," NAME)* ")"
?tail: partial | varying
partial: "partial" "<" NAME ":" NAME ("," NAME)* ">"
varying: "varying" "<" NAME ("," NAME)* ">"

layout: "[" [place ("," place)*] "]" tail*
place: DASH | INT ["@" axes] | "@" axes

mesh: "mesh" "<" [mesh_dim ("," mesh_dim)*] ">"
mesh_dim: NAME "=" INT

NAME: /[A-Za-z_][A-Za-z0-9_]*/
INT: /-?\d+/
PADDED.2: /\d+\+\d+/
DASH: "-"
BLANK: /[ \t\r]+/
%ignore BLANK
"""
"""What types, layouts and meshes are written in: read alone in half the time that it takes with the graphs' rules."""

_GRAPHS = r"""
graph: COMMENT? _NL? "graph" "@" graph_name _where "{" COMMENT? _NL line* "}" COMMENT? _NL? COMMENT?
_where: "on" mesh [partitioned] [parts]
graph_name: NAME | STRING
parts: "with" part ("," part)*
part: NAME ":" mesh ["at" INT ["by" "(" INT ("," INT)* ")"]]
partitioned: "partitioned" "<" NAME ("," NAME)* ">"

?line: (value | update | return | region) _NL
region: "region" STRING "{" COMMENT? _NL line* "}"
value: REF "=" (placeholder | call) ":" result [on] [COMMENT]
on: "on" NAME
update: "update" STRING "=" REF [COMMENT]
return: "return" [returned ("," returned)*] [COMMENT]
?returned: REF | NAME

placeholder: KIND (INT | STRING)
call: OP "(" [argument ("," argument)*] ")"
?argument: item | keyword
keyword: NAME "=" item
?item: REF | INT | FLOAT | STRING | NAME | list | named
list: OPEN [item ("," item)*] "]"
named: NAME "(" STRING ")"

result: entry | tuple
tuple: "(" [entry ("," entry)*] ")"
?entry: local | NAME | UNKNOWN
local: type ["of" type]

KIND.3: /(input|state|constant|scalar|seed)(?=[ \t]*["0-9-])/
OP: /[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*/
REF: /%[A-Za-z_][A-Za-z0-9_]*/
FLOAT.2: /-inf\b|-?\d+\.\d*([eE][+-]?\d+)?|-?\d+[eE][+-]?\d+/
STRING: /"(?:[^"\\\n]|\\.)*"/
OPEN: "["
UNKNOWN: "?"
COMMENT: /#[^\n]*/
_NL: /\n(?:[ \t\r]*(?:#[^\n]*)?\n)*/
"""

WORDS = {
    "NAME": "a name",
    "OP": "an op",
    "KIND": "'input', 'state', 'constant', 'scalar' or 'seed'",
    "REF": "a %value",
    "INT": "a whole number",
    "PADDED": "a whole number",
    "FLOAT": "a number",
    "STRING": 'a "string"',
    "_NL": "the end of the line",
    "$END": "the end of the text",
}
"""How errors name a terminal; a keyword or a sign stands for itself."""


Parsed = Any
"""A lark Tree, a Token, or None for a part left out: which, the grammar's rules say."""


@cache
def _lark(start: str) -> Lark:
    """A parser of graphs takes ten times as long to build as one of what stands in them, so there is one for each."""
    with unwatched():
        grammar = _TYPES + _GRAPHS if start == "graph" else _TYPES
        return Lark(grammar, start=start, parser="lalr", lexer="contextual", maybe_placeholders=True)


class Text:
    """A text that is being read: what errors in it say."""

    def __init__(self, text: str, what: str, error: type[MonarchError], file: str | None = None) -> None:
        self.text = text
        self.what = what
        self.error = error
        self.file = file

    def tree(self, start: str) -> Parsed:
        """Parse, or raise this text's error at the first character that does not fit."""
        try:
            return _lark(start).parse(self.text)
        except UnexpectedCharacters as error:
            found = repr(error.char) if error.char != '"' else "a string without its closing '\"'"
            reached = _lark(start).parse_interactive(self.text[: error.pos_in_stream])
            reached.exhaust_lexer()
            self._unexpected(start, error.line, error.column, reached.accepts(), found)
        except UnexpectedToken as error:
            line, column, found = error.line, error.column, f"'{error.token}'"
            if error.token.type == "$END":
                line, column = self.text.count("\n") + 1, len(self.text.rsplit("\n", 1)[-1]) + 1
                found = "the end of the text"
            elif error.token.type == "_NL":
                found = "the end of the line"
            self._unexpected(start, line, column, error.accepts or error.expected, found)

    def _unexpected(self, start: str, line: int, column: int, expected: Iterable[str], found: str) -> NoReturn:
        words = sorted({_word(name, start) for name in expected if name != "COMMENT"}, key=_order)
        message = words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"
        hint = "one entry for each dim, in brackets: [@data, -] shards the first over mesh dim 'data'."
        self.fail_at(line, column, f"expected {message}, not {found}", hint if start == "layout" else "")

    def fail(self, token: Token, message: str, hint: str = "") -> NoReturn:
        """Raise this text's error at a token."""
        self.fail_at(token.line or 1, token.column or 1, message, hint)

    def fail_at(self, line: int, column: int, message: str, hint: str = "") -> NoReturn:
        if self.file is not None:
            raise self.error(message, hint=hint, source=Source(self.file, line, column))
        where = f"line {line}, column {column}" if "\n" in self.text else f"column {column}"
        excerpt = _excerpt(self.text.split("\n")[line - 1], column) if self.text else ""
        raise self.error(f"{self.what}, {where}: {message}", hint="\n".join(part for part in (excerpt, hint) if part))


def _word(terminal: str, start: str) -> str:
    if terminal in WORDS:
        return WORDS[terminal]
    for definition in _lark(start).terminals:
        if definition.name == terminal:
            return f"'{definition.pattern.value}'"
    return terminal


def _order(word: str) -> tuple[bool, str]:
    """Signs and keywords after the kinds of tokens."""
    return word.startswith("'"), word


def _excerpt(line: str, column: int) -> str:
    """The part of a line around a column, with a caret under it."""
    before, width = 60, 110
    start = max(0, column - 1 - before) if len(line) > width else 0
    shown = line[start : start + width].replace("\t", " ").rstrip()
    lead = "…" if start else ""
    return f"{lead}{shown}\n{' ' * (column - 1 - start + len(lead))}^"
