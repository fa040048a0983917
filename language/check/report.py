"""Collecting findings: where a node stands in the text, and the comments that silence a rule."""

from __future__ import annotations

import ast
import io
import re
import tokenize

from monarch.language.check.finding import Finding

_IGNORE = re.compile(r"#\s*monarch:\s*ignore(?:\[([^\]]*)\])?")


class Reporter:
    """The findings of one file, each place and rule once, without those that a comment ignores."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.lines = re.split(r"\r\n|\r|\n", text)  # as the parser counts them
        self.silent = 0
        """Above zero while values are only looked up: nothing is reported then."""
        self._found: dict[tuple[str, int, int], Finding] = {}
        self._ignored = _ignored(text)

    @property
    def findings(self) -> list[Finding]:
        return sorted(self._found.values())

    def add(self, code: str, node: ast.expr | ast.stmt | ast.arg, message: str, hint: str = "") -> None:
        """Report a rule broken at a node."""
        end = node.end_col_offset if node.end_lineno == node.lineno else None
        last = self.column(node.lineno, end) if end is not None else 0
        self.at(code, node.lineno, self.column(node.lineno, node.col_offset), last, message, hint, node.end_lineno)

    def at(
        self, code: str, line: int, column: int, end: int, message: str, hint: str = "", last: int | None = None
    ) -> None:
        if self.silent:
            return
        for number in {line, last or line}:
            codes = self._ignored.get(number, frozenset())
            if code in codes or "*" in codes:
                return
        self._found.setdefault((code, line, column), Finding(self.path, line, column, end, code, message, hint))

    def has(self, code: str, node: ast.expr) -> bool:
        """Whether a rule is reported in the lines of a node."""
        lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        return any(found.code == code and found.line in lines for found in self._found.values())

    def column(self, line: int, offset: int) -> int:
        """The column, from 1, of a byte offset in a line."""
        text = self.lines[line - 1] if line <= len(self.lines) else ""
        return len(text.encode(errors="surrogatepass")[:offset].decode(errors="ignore")) + 1

    def line_of(self, node: ast.expr | ast.stmt | ast.arg) -> str:
        """The first line of a node, for showing it beside the right one."""
        text = self.lines[node.lineno - 1].strip() if node.lineno <= len(self.lines) else ""
        text = re.sub(r"\s+#.*$", "", text)
        return text if len(text) <= 76 else text[:75] + "…"


def _ignored(text: str) -> dict[int, frozenset[str]]:
    """The codes that comments ignore, by line; "*" for all of them."""
    found: dict[int, frozenset[str]] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.COMMENT and (match := _IGNORE.search(token.string)):
                codes = match[1]
                names = frozenset({"*"}) if codes is None else frozenset(code.strip() for code in codes.split(","))
                found[token.start[0]] = found.get(token.start[0], frozenset()) | names
    except (tokenize.TokenError, SyntaxError):  # the parser takes a few texts that the tokenizer does not
        return found
    return found
