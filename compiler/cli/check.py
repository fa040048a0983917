"""`monarchc check`: lines of a file's programs that tracing would refuse, or that are slow or have no effect."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import typer

from monarch.compiler.cli.options import Format
from monarch.compiler.cli.screen import clean, console, count, plain, print_json
from monarch.compiler.errors import MonarchError
from monarch.language.check import Finding, check_file


def check(files: list[Path], format_: Format, as_json: bool, strict: bool) -> None:
    """Print the findings in the files."""
    paths = [path for given in files for path in _python_files(given)]
    findings: list[Finding] = []
    unreadable: list[MonarchError] = []
    for path in dict.fromkeys(paths):
        try:
            findings += check_file(path)
        except MonarchError as error:
            unreadable.append(error)
    _PRINTERS[Format.JSON if as_json else format_](findings, len(paths))
    for wrong in unreadable:
        typer.echo(f"monarchc: error: {clean(str(wrong))}", err=True)
    errors = sum(finding.level == "error" for finding in findings)
    if unreadable:
        raise typer.Exit(2)
    if errors or (strict and findings):
        raise typer.Exit(1)


def _python_files(given: Path) -> list[Path]:
    """A file, or the Python files of a folder, without hidden ones."""
    if not given.is_dir():
        return [given]
    found = sorted(
        path for path in given.rglob("*.py") if not any(part.startswith(".") for part in path.relative_to(given).parts)
    )
    if not found:
        raise MonarchError(f"no Python file in {given}")
    return found


def _text(findings: Sequence[Finding], files: int) -> None:
    out = console()
    for finding in findings:
        head, _, rest = str(finding).partition("\n")
        out.print(plain(head, "red" if finding.level == "error" else "yellow"), soft_wrap=True)
        out.print(plain(rest), soft_wrap=True)
        out.print()
    errors = sum(finding.level == "error" for finding in findings)
    parts = [count(errors, "error"), count(len(findings) - errors, "warning")]
    out.print(plain(f"{', '.join(parts)} in {count(files, 'file')}"), soft_wrap=True)


def _github(findings: Sequence[Finding], files: int) -> None:
    """Workflow commands, which GitHub Actions shows at the lines."""
    for finding in findings:
        end = f",endColumn={finding.end}" if finding.end else ""
        where = f"file={_property(finding.file)},line={finding.line},col={finding.column}{end}"
        text = finding.message + (f"\n{finding.hint}" if finding.hint else "")
        sys.stdout.write(f"::{finding.level} {where},title={finding.code}::{_data(clean(text))}\n")


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def _json(findings: Sequence[Finding], files: int) -> None:
    errors = sum(finding.level == "error" for finding in findings)
    print_json(
        {
            "files": files,
            "errors": errors,
            "warnings": len(findings) - errors,
            "findings": [{"level": finding.level, **asdict(finding)} for finding in findings],
        }
    )


_PRINTERS = {Format.TEXT: _text, Format.GITHUB: _github, Format.JSON: _json}
