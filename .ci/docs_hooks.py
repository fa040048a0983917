"""What mkdocs does besides with the pages of docs/ (mkdocs.yml): examples become pages, links into the project lead to
them or become text, and no page may load anything from the network.
"""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
POLICY = "default-src 'self' data: blob: 'unsafe-inline'"
LOADED = re.compile(r"""<(?:script|link|img|iframe|source)\b[^>]*?(?:src|href)=["']?((?:https?:)?//[^"' >]+)""")


def example(path: Path) -> str:
    """The page of an example: what its docstring says, and the file."""
    text = path.read_text()
    said = ast.get_docstring(ast.parse(text)) or ""
    return f"# {path.name}\n\n{said}\n\n```python\n{text}```\n"


def notebook(path: Path) -> str:
    """The page of a notebook: its cells."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    return "\n\n".join(parts) + "\n"


def on_files(files: Files, config: Any) -> Files:
    """Each file of `examples/` is a page, and their list another."""
    listed = [
        "# Examples\n\nEach runs by itself: `.venv/bin/python examples/NAME.py`.\n\n| file | what it shows |\n|---|---|"
    ]
    for path in sorted((ROOT / "examples").glob("*.py")):
        page = f"examples/{path.stem}.md"
        files.append(File.generated(config, page, content=example(path)))
        first = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n\n")[0].replace("\n", " ")
        listed.append(f"| [{path.name}]({path.stem}.md) | {first} |")
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        page = notebook(path)
        files.append(File.generated(config, f"examples/{path.stem}.md", content=page))
        listed.append(f"| [{path.name}]({path.stem}.md) | {page.splitlines()[0].lstrip('# ')}: for Jupyter |")
    files.append(File.generated(config, "examples/index.md", content="\n".join(listed) + "\n"))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links to examples lead to their pages; links to other files of the project become text."""
    up = "../" * (page.file.src_uri.count("/") + 1)
    here = up.removeprefix("../")
    markdown = re.sub(rf"\]\({re.escape(up)}examples/(\w+)\.(?:py|ipynb)\)", rf"]({here}examples/\1.md)", markdown)
    markdown = re.sub(rf"\[([^]]+)\]\({re.escape(up)}[^)]*\)", r"\1", markdown)
    return re.sub(r"^```console( measured)?$", "```text", markdown, flags=re.MULTILINE)  # most of it is output


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """A page that names something to load from elsewhere is refused, and a browser is told to load nothing either."""
    found = LOADED.findall(re.sub(r'<link rel="canonical"[^>]*>', "", output))
    if found:
        raise PluginError(f"{page.file.src_uri} loads {found[0]}: the site loads nothing from the network.")
    return output.replace("<head>", f'<head><meta http-equiv="Content-Security-Policy" content="{POLICY}">', 1)
