"""The linter behind `monarchc check`: lines of a file's programs that tracing refuses, or that are slow or have no
effect.

A file is read and parsed, never imported or run. `check_file(path)` gives its findings; `docs/reference/check.md` shows
every rule with the wrong code and the right beside each other.
"""

from __future__ import annotations

import ast
import io
import tokenize
import warnings
from pathlib import Path

from monarch.compiler.errors import MonarchError, ProgramError, Source
from monarch.language.check.finding import RULES, Finding, level
from monarch.language.check.interpret import Interpreter
from monarch.language.check.layouts import Layouts
from monarch.language.check.names import Names
from monarch.language.check.programs import find_programs
from monarch.language.check.report import Reporter
from monarch.language.check.scopes import File

__all__ = ["RULES", "Finding", "check_file", "check_source", "level"]


def check_file(path: str | Path) -> list[Finding]:
    """The findings of a file, in its order. Raises MonarchError where it cannot be read, and ProgramError, at its
    place, where it is no Python."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise MonarchError(f"cannot read {path}: {error.strerror or error}") from None
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = io.TextIOWrapper(io.BytesIO(data), encoding).read()
    except (SyntaxError, UnicodeDecodeError, LookupError) as error:
        raise ProgramError(f"{path} is no text that Python reads: {error}") from None
    return check_source(text, str(path))


def check_source(text: str, path: str = "<text>") -> list[Finding]:
    """The findings of a file's text. Raises ProgramError where it is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are the interpreter's to tell
            tree = ast.parse(text, path)
        reporter = Reporter(path, text)
        names = Names(File(tree))
        interpreter = Interpreter(names, reporter)
        programs = find_programs(names)
        for program in programs:
            interpreter.program(program.function, program.given)
        Layouts(names, reporter, programs).check()
    except SyntaxError as error:
        where = Source(path, error.lineno or 1, error.offset or 0)
        raise ProgramError(f"no Python: {error.msg}", source=where) from None
    except ValueError as error:  # null bytes, where the interpreter tells them so
        raise ProgramError(f"{path} is no Python: {error}") from None
    except RecursionError:
        raise ProgramError(f"{path} is nested too deeply to be checked") from None
    return reporter.findings
