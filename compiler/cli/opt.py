"""`monarchc opt`: a graph's text through passes, text in and text out."""

from __future__ import annotations

import sys
from pathlib import Path

from monarch.compiler.cli.screen import clean, console, print_json, table
from monarch.compiler.errors import GraphError, MonarchError
from monarch.compiler.graph import Graph
from monarch.compiler.pipeline import PASSES, run_passes
from monarch.compiler.text import parse_graph
from monarch.compiler.types import MeshSpec


def opt(file: Path | None, passes: str, list_passes: bool, as_json: bool) -> None:
    """Print the graph that some passes make of one in text."""
    if list_passes:
        _list(as_json)
        return
    if file is None:
        raise MonarchError("opt needs a graph", hint="give a file with a graph's text, or - for standard input.")
    names = [name.strip() for name in passes.split(",") if name.strip()]
    graph = run_passes(_read(file), names)
    if as_json:
        print_json({"name": graph.name, "passes": names, "graph": str(graph)})
    else:
        sys.stdout.write(clean(str(graph)) + "\n")


def _read(file: Path) -> Graph:
    name = "<stdin>" if str(file) == "-" else str(file)
    try:
        data = sys.stdin.buffer.read() if name == "<stdin>" else file.read_bytes()
        text = data.decode()
    except OSError as error:
        raise GraphError(f"cannot read {file}: {error.strerror}", hint="give a file with a graph's text.") from None
    except UnicodeDecodeError:
        raise GraphError(f"{file} is not text in UTF-8", hint="give a file with a graph's text.") from None
    return parse_graph(text, file=None if name == "<stdin>" else name)


def _list(as_json: bool) -> None:
    graph = Graph("", MeshSpec.of(x=2))
    made = {name: PASSES[name](graph)[0] for name in PASSES}
    known = {name: (step.__doc__ or "").strip().partition("\n")[0] for name, step in made.items()}
    if as_json:
        print_json(known)
    else:
        table(console(), ["pass", "~what it does"], known.items())
