"""`monarch doctor`: what this machine offers and lacks, and what to do about it."""

from __future__ import annotations

import subprocess
import tempfile
import textwrap
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from monarch.compiler.cli.measure import measure
from monarch.compiler.cli.screen import clean, console, heading, plain, print_json
from monarch.compiler.config import settings
from monarch.compiler.kernels.cache import BuildError, private_folder
from monarch.compiler.kernels.cpp.build import build, find_compiler
from monarch.runtime.hosts.doctor.certificates import look_at
from monarch.runtime.hosts.doctor.facts import Facts, Toolchain
from monarch.runtime.hosts.doctor.findings import Section, State, sections, worst
from monarch.runtime.hosts.doctor.machine import look, version
from monarch.runtime.hosts.doctor.transports import measure_copy, measure_transports

SMALL_KERNEL = '#include <cmath>\n#include <cstdint>\nextern "C" int64_t one() { return 1; }\n'
MARKS = {"good": ("✓", "green"), "absent": ("–", "dim"), "lacking": ("!", "yellow"), "broken": ("✗", "bold red")}


def doctor(as_json: bool, tls: Path | None, describe: Path | None) -> None:
    """Look at this machine, and print the findings; or measure it, and write its description."""
    if describe is not None:
        return measure(describe)
    facts = examine(tls)
    found = sections(facts)
    if as_json:
        print_json({"facts": _plain(asdict(facts)), "sections": [asdict(section) for section in found]})
    else:
        show(console(), found)
    if worst(found) is State.BROKEN:
        raise typer.Exit(1)


def examine(tls: Path | None = None) -> Facts:
    """All facts. Call it before this process has threads or uses a GPU: measuring transports forks."""
    named = settings.tls if tls is None else tls
    transports = measure_transports()
    return Facts(
        machine=look(),
        transports=transports,
        copy=measure_copy(),
        toolchain=toolchain(),
        certificates=look_at(None if named is None else Path(named)),
        now=datetime.now(UTC),
    )


def toolchain() -> Toolchain:
    """The compiler of kernels here, tried on a small one, and the folder in which they are kept."""
    name = compiler_error = cache = cache_error = ""
    built: list[int] = []
    if (compiler := find_compiler()) is not None:
        said = subprocess.run([compiler.path, "--version"], capture_output=True, text=True, timeout=30)
        name = f"{said.stdout.partition(chr(10))[0].strip()} ({compiler.path})"
        with tempfile.TemporaryDirectory() as folder:
            try:
                build(SMALL_KERNEL, compiler, Path(folder))
            except BuildError as error:
                compiler_error = str(error)
    try:
        folder_ = private_folder()
        cache, built = str(folder_), [each.stat().st_size for each in folder_.iterdir() if each.is_file()]
    except (BuildError, OSError) as error:
        cache_error = str(error)
    return Toolchain(name, compiler_error, version("triton"), cache, len(built), sum(built), cache_error)


def show(out: Console, found: tuple[Section, ...]) -> None:
    """Findings in three columns, what to do about each below it, no line wider than the screen."""
    names = max(len(finding.what) for section in found for finding in section.findings)
    start = names + 6
    for number, section in enumerate(found):
        heading(out, section.title, section.note, first=not number)
        for finding in section.findings:
            mark, style = MARKS[finding.state]
            first, *rest = _folded(finding.found, out.width - start)
            line = Text.assemble(
                "  ", plain(mark, style), " ", plain(f"{finding.what:<{names}}", style), "  ", plain(first)
            )
            out.print(line, soft_wrap=True)
            for more in rest:
                out.print(Text(" " * start) + plain(more), soft_wrap=True)
            for advice in finding.do:
                for at, more in enumerate(_folded(advice, out.width - start - 2)):
                    out.print(Text(" " * start) + plain(("  " if at else "→ ") + more, "cyan"), soft_wrap=True)


def _folded(text: str, width: int) -> list[str]:
    """Text in lines of at most so many characters; its own line breaks stay."""
    lines = [
        part
        for line in clean(text).splitlines()
        for part in textwrap.wrap(line, max(width, 20), break_long_words=False, break_on_hyphens=False) or [""]
    ]
    return lines or [""]


def _plain(value: Any) -> Any:
    """A value of dataclasses as JSON has it."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value.isoformat() if isinstance(value, datetime) else value
