"""Pages in docs/ show what the commands print: run them in order, and compare.

Durations, hashes, sizes of files and the spaces between columns may differ. Of a block marked `measured` only the lines
at the margin are compared, without their numbers. `pytest --rewrite` writes the outputs anew. Sweeps, which compile for
many meshes and machines and write nothing that others read, run with --full only; test_sweep.py has small ones.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.compiler.cli.conftest import Run
from tests.sample import is_full

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "reference" / "monarchc.md"
PAGES = {
    "reference/monarchc.md": "",
    "guide/memory.md": "",
    "guide/per-worker.md": "",
    "guide/sizes.md": "",
    "internals/kernels.md": "",
    "start/read-the-page.md": "start/train-a-gpt.md",
}
"""Pages, and for some another page whose files they go on with."""
LONG = ("guide/memory.md", "start/read-the-page.md")
"""Whose commands, with other options, are those of the first page too."""
BLOCK = re.compile(r"^```(python|console)( measured)?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FILE = re.compile(r"^```python\n(# (\w+\.py)\n.*?)^```$", re.DOTALL | re.MULTILINE)


def normal(text: str, measured: bool) -> list[str]:
    text = re.sub(r"\b[\d.e+-]+ (µs|ms|s)\b", "TIME", text)
    text = re.sub(r"\b[0-9a-f]{64}\b", "HASH", text)
    text = re.sub(r'("(?:file_bytes|[\w-]+)": )\d+(\.\d+)?(e-\d+)?(,?)$', r"\1N\4", text, flags=re.MULTILINE)
    text = re.sub(r"(wrote \S+), [\d.]+ \w+", r"\1, SIZE", text)
    lines = [" ".join(line.split()) if line.strip() else "" for line in text.splitlines()]
    if measured:
        margin = [line for line in text.splitlines() if line.strip() and not line.startswith(" ")]
        return [re.sub(r"[\d,.]+", "N", line) for line in margin]
    return lines


def outputs(block: str) -> list[tuple[str, str]]:
    """A block's commands, each with what stands below it."""
    parts = re.split(r"^\$ (.*)\n", block, flags=re.MULTILINE)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def printed(command: str, monarchc: Run) -> str:
    """What a command prints: `monarchc …`, with `> file` or `| head -N` behind it."""
    command, _, file = command.partition(" > ")
    command, _, lines = command.partition(" | head -")
    words = shlex.split(command)
    with pytest.MonkeyPatch.context() as patch:
        while "=" in words[0]:  # MONARCH_KERNELS=all monarchc …
            patch.setenv(*words.pop(0).split("=", 1))
        program, *arguments = words
        assert program == "monarchc"
        result = monarchc(*arguments, code=None)
    if file:
        Path(file).write_text(result.out)
        return result.err
    shown = (result.out + result.err).splitlines(keepends=True)
    return "".join(shown[: int(lines)] if lines else shown)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full if name in LONG else ()) for name in PAGES])
def test_a_page_shows_what_the_commands_print(
    name: str, tmp_path: Path, monarchc: Run, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MONARCH_VERIFY", "0")  # as users have it; other tests verify such programs
    page = (DOCS / name).read_text()
    rewrite = request.config.getoption("--rewrite")
    wrong = []
    for content, file in FILE.findall((DOCS / PAGES[name]).read_text() if PAGES[name] else ""):
        Path(file).write_text(content)

    def check(match: re.Match[str]) -> str:
        language, measured, block = match[1], bool(match[2]), match[3]
        if language == "python":
            file, _, content = block.partition("\n")
            Path(file.removeprefix("# ")).write_text(content)
            return match[0]
        shown = ""
        for command, before in outputs(block):
            if "sweep" in command.split() and not (rewrite or is_full()):
                shown += f"$ {command}\n{before}"
                continue
            now = printed(command, monarchc)
            same = normal(now, measured) == normal(before, measured)
            if not same and not rewrite:
                wrong.append(f"$ {command}\n{now}")
            shown += f"$ {command}\n{before if same else now}"
        return f"```console{' measured' if measured else ''}\n{shown}```"

    rewritten = BLOCK.sub(check, page)
    if rewrite:
        (DOCS / name).write_text(rewritten)
    assert wrong == []


def test_the_page_names_every_command() -> None:
    from typer.main import get_command

    from monarch.compiler.cli.app import app

    commands = set(get_command(app).commands)  # type: ignore[attr-defined]
    headings = set(re.findall(r"^## (\w+)$", PAGE.read_text(), re.MULTILINE))
    assert commands <= headings
    assert commands == set(re.findall(r"^\| `monarchc (\w+)", PAGE.read_text(), re.MULTILINE))


def test_the_command_line_reference_is_what_help_says(request: pytest.FixtureRequest) -> None:
    import click
    from typer.main import get_command

    from monarch.compiler.cli import app, hosts

    text = "# Command line\n\nThe `--help` of each command; [monarchc](monarchc.md) shows them at work.\n"
    for program, made in (("monarchc", app.app), ("monarch", hosts.app)):
        group: click.Group = get_command(made)  # type: ignore[assignment]
        for name, command in [("", group), *sorted(group.commands.items())]:
            context = click.Context(group, info_name=program, max_content_width=100, terminal_width=100)
            if name:
                context = click.Context(command, context, name, max_content_width=100, terminal_width=100)
            text += f"\n## {program} {name}".rstrip() + f"\n\n```\n{command.get_help(context)}\n```\n"
    page = DOCS / "reference" / "commands.md"
    if request.config.getoption("--rewrite"):
        page.write_text(text)
    assert page.read_text() == text
