"""What the README shows is what one gets."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path

from monarch.compiler.config import Settings
from monarch.compiler.config.kinds import Size
from monarch.compiler.sizes import format_bytes
from tests import python

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_and_the_command_print_what_stands_below_them(tmp_path: Path) -> None:
    example, output = re.findall(r"^```(?:python)?\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    (tmp_path / "mlp.py").write_text(example)
    result = python.run("mlp.py", cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == output
    ((arguments, why),) = re.findall(r"^    \$ monarchc (.*)\n((?:    .*\n|\n(?=    ))+)", README, re.MULTILINE)
    command = ["-c", "from monarch.compiler.cli import main; main()", *arguments.split()]
    result = python.run(*command, cwd=tmp_path, capture_output=True, text=True, timeout=100, check=True)
    assert result.stdout.rstrip("\n") == textwrap.dedent(why).rstrip("\n")


def test_every_page_is_on_the_site() -> None:
    pages = sorted(str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
    listed = re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(listed) == pages


def test_every_link_leads_somewhere() -> None:
    commands = (ROOT / "docs" / "reference" / "monarchc.md").read_text()
    assert {"../guide/profile.md", "check.md", "../guide/inspector.md"} <= set(re.findall(r"\]\(([^)#]*)", commands))
    for page in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md")):
        prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
        for link, place in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", prose):
            target = page.parent / link if link else page
            assert target.is_file(), f"{page.name}: {link}"
            if place:
                headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
                assert place in [re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings]


def test_the_commands_are_make_targets() -> None:
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^ {4})make ([a-z]+)", README, re.MULTILINE))
    assert {"demo", "test"} <= named <= targets


def settings_table() -> list[str]:
    """The rows of docs/reference/settings.md, from the definitions."""
    rows = []
    for name, each in Settings.definitions().items():
        default = each.kind.show(each.default)
        if isinstance(each.kind, Size):
            default = format_bytes(each.default)
        shown = "" if default in (None, "") else f"`{default}`"
        rows.append(f"| `{name}` | {shown} | {each.kind.form} | {each.about}{' †' * each.local} |")
    return rows


def test_the_page_of_settings_is_that_of_their_definitions() -> None:
    page = (ROOT / "docs" / "reference" / "settings.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| `")] == settings_table()


def test_the_settings_in_the_readme_are_settings() -> None:
    by_variable = {each.variable for each in Settings.definitions().values()}
    assert set(re.findall(r"MONARCH_[A-Z]+", README)) <= by_variable


def test_the_folders_exist() -> None:
    folders = re.findall(r"`([\w./]+/)`", README)
    assert len(folders) >= 7
    assert [folder for folder in folders if not (ROOT / folder).is_dir()] == []
