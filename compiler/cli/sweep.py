"""`monarchc sweep`: estimates of a program on other meshes, machines and layouts. Nothing runs, nothing is built."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any

import typer

from monarch.compiler import ops
from monarch.compiler.cli.compile import passes_shown
from monarch.compiler.cli.load import LoadedProgram, load_program
from monarch.compiler.cli.screen import amount, console, duration, heading, line, plain, print_json, size, table
from monarch.compiler.cli.values import read_mesh, read_pairs
from monarch.compiler.cost.cluster import Cluster, cluster_of, load_cluster
from monarch.compiler.cost.work import with_regions
from monarch.compiler.errors import MonarchError, did_you_mean
from monarch.compiler.graph import Graph
from monarch.compiler.inspect.estimate import Estimate, estimate
from monarch.compiler.plan import Plan
from monarch.compiler.plan.file import save_plan
from monarch.compiler.search.find import Answer, find_layouts
from monarch.compiler.sizes import parse_bytes
from monarch.compiler.states import StateKey
from monarch.compiler.text import parse_layout


@dataclass(frozen=True)
class Row:
    """One combination: `found` is its estimate, and `error` why there is none. `plan` is its file, "" for none."""

    mesh: str
    machine: str
    layout: str
    limit: int | None
    found: Estimate | None
    error: str = ""
    plan: str = ""

    @property
    def fits(self) -> bool:
        """Whether a worker holds no more than the machine has, or than --memory-limit says."""
        return self.found is not None and (self.limit is None or self.found.peak <= self.limit)


def sweep(
    program: str,
    mesh: list[str] | None,
    machine: list[str] | None,
    layout: list[str] | None,
    auto: bool,
    memory_limit: str | None,
    arg: list[str] | None,
    keep: Path | None,
    as_json: bool,
) -> None:
    """Print a line for each combination of a mesh, a machine and layouts; with `auto` for the layouts that are found
    there, those of `--layout` given, and for the usual ones."""
    clusters = [load_cluster(name) for name in machine or ()]
    layouts = [";".join(layout or ())] if auto else ["", *(layout or ())]
    read = {text: _overrides(text) for text in layouts}
    given = read_pairs(arg, "--arg")
    limit = None if memory_limit is None else parse_bytes(memory_limit, "--memory-limit")
    if keep is not None and not keep.is_dir():
        raise MonarchError(f"--keep {keep}: no such folder", hint=f"make it first: mkdir {keep}.")
    rows: list[Row] = []
    answers: list[tuple[Row, Answer]] = []
    loops = False
    with passes_shown(False) as (say, _):
        for text in mesh or ("",):
            say(f"tracing {program}" + (f" on {text}" if text else ""))
            loaded = load_program(program, read_mesh(text or None), given)
            loaded = replace(loaded, options=replace(loaded.options, layouts="", machine=""))  # --auto searches
            loops = loops or _has_while_loop(loaded.graph)
            if limit is not None:
                loaded = loaded.limited(limit)
            for cluster, changed in product(clusters or [cluster_of(loaded.options.target)], layouts):
                asked = _asked(loaded, cluster, changed, limit)
                laid = replace(loaded, graph=with_layouts(loaded.graph, read[changed]))
                if auto:
                    say(f"searching layouts for {loaded.mesh} on {cluster.name}")
                    found, answer = _auto(laid, cluster, asked, read[changed], keep)
                    rows += found
                    answers += [] if answer is None else [(found[-1], answer)]
                    continue
                say(f"compiling for {loaded.mesh} on {cluster.name}")
                rows.append(_row(laid, cluster, asked, keep))
    if as_json:
        each = [{"mesh": row.mesh, "machine": row.machine, **answer.data} for row, answer in answers]
        print_json({"program": program, "rows": [_data(row) for row in rows], **({"auto": each} if auto else {})})
    else:
        _show(rows, program)
        if loops:
            line(console(), "  a while_loop counts with one round: their number is unknown")
        for row, answer in answers:
            _show_answer(row, answer)
        if not any(row.fits for row in rows):
            line(console(), f"  {_none(rows)}")
    if not any(row.fits for row in rows):
        raise typer.Exit(1)


def _none(rows: list[Row]) -> str:
    if all(row.found is None for row in rows):
        return "none of them can be compiled: the table has the errors"
    return "none fits: --memory-limit has values computed again rather than kept; more workers hold less each"


def _has_while_loop(graph: Graph) -> bool:
    return any(call.target is ops.while_loop for each in with_regions(graph) for call in each.calls)


def _row(loaded: LoadedProgram, cluster: Cluster, asked: Row, keep: Path | None) -> Row:
    try:
        plan = loaded.compile(cluster.target, cluster=cluster, binaries=False)
    except MonarchError as error:
        return replace(asked, error=error.message)
    return replace(asked, found=estimate(plan, cluster), plan=_kept(plan, keep, asked))


def _asked(loaded: LoadedProgram, cluster: Cluster, text: str, limit: int | None) -> Row:
    sizes = ",".join(f"{name}={size_}" for name, size_ in loaded.mesh.dims) or "one worker"
    memory = cluster.shared(loaded.mesh.workers).memory
    return Row(sizes, cluster.name, text, limit if limit is not None else memory, None)


def _auto(
    loaded: LoadedProgram, cluster: Cluster, asked: Row, overrides: list[tuple[str, str]], keep: Path | None
) -> tuple[list[Row], Answer | None]:
    """The candidates of a search, the chosen one last. Given layouts bind it."""
    graph = loaded.graph
    bound = {
        label
        for label in graph.states
        for pattern, _ in overrides
        if fnmatchcase(StateKey.of(label).parameter, pattern)
    }
    try:
        answer = find_layouts(graph, cluster, loaded.options, bound=frozenset(bound))
    except MonarchError as error:
        return [replace(asked, error=error.message + (f"\n{error.hint}" if error.hint else ""))], None
    rows = [
        replace(asked, layout=each.name, found=each.estimate, error=each.error)
        for each in sorted(answer.candidates, key=lambda each: each is answer.chosen)
    ]
    if keep is not None:
        chosen = replace(loaded, graph=answer.chosen.layouts.on(graph), options=answer.options)
        plan = chosen.compile(cluster.target, cluster=cluster, binaries=False)
        rows[-1] = replace(rows[-1], plan=_kept(plan, keep, rows[-1]))
    return rows, answer


def _kept(plan: Plan, folder: Path | None, row: Row) -> str:
    if folder is None:
        return ""
    name = re.sub(r"[^\w=.,-]+", "_", "-".join(filter(None, [plan.name, row.mesh, row.machine, row.layout])))[:120]
    path = folder / f"{name}.mplan"
    save_plan(plan, path)
    return str(path)


def _overrides(text: str) -> list[tuple[str, str]]:
    """`blocks.*.up.weight=[-, @model]; head.weight=[@model, -]` as pairs. Raises MonarchError."""
    pairs = []
    for part in filter(str.strip, text.split(";")):
        pattern, equals, layout = part.partition("=")
        if not equals or not pattern.strip() or not layout.strip():
            raise MonarchError(
                f"--layout {part.strip()!r} is not NAME=LAYOUT", hint="write it as 'blocks.*.up.weight=[-, @model]'."
            )
        parse_layout(layout.strip())
        pairs.append((pattern.strip(), layout.strip()))
    return pairs


def with_layouts(graph: Graph, overrides: list[tuple[str, str]]) -> Graph:
    """A traced graph with other layouts of its parameters, and of the optimizers' state for these: each pattern (of
    fnmatch, over the parameters' names) with a layout's text, the last that fits. The argument is not changed.

    Raises MonarchError for a pattern that fits no parameter, and a layout that the parameter or the mesh cannot have.
    """
    if not overrides:
        return graph
    graph = graph.copy()
    used: set[str] = set()
    for node in graph.placeholders:
        if node.meta["kind"] != "state":
            continue
        key, type_ = StateKey.of(str(node.meta["label"])), node.meta["type"]
        for pattern, text in overrides:
            if not fnmatchcase(key.parameter, pattern):
                continue
            layout = parse_layout(text)
            if key.role and type_.ndim != layout.ndim:
                continue  # an optimizer's number for the parameter
            used.add(pattern)
            type_ = type_.with_layout(layout)
            type_.check(graph.mesh, f"state '{node.meta['label']}'")
        node.meta["type"] = type_
    if missed := [pattern for pattern, _ in overrides if pattern not in used]:
        names = sorted({StateKey.of(label).parameter for label in graph.states})
        patterns = list(dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", name) for name in names))
        raise MonarchError(
            f"--layout: no parameter is called {missed[0]}",
            hint=did_you_mean(missed[0], [*patterns, *names])
            + f"There are {', '.join(patterns[:12])}{', …' * (len(patterns) > 12)}.",
        )
    return graph


# -- printing ----------------------------------------------------------------------------------------------------------


def _data(row: Row) -> dict[str, Any]:
    return {**asdict(row), "found": None if row.found is None else asdict(row.found), "fits": row.fits}


def _show(rows: list[Row], program: str) -> None:
    out = console()
    heading(out, program, "estimates of one step; nothing was run", first=True)
    best = min((row for row in rows if row.fits), key=_seconds, default=None)
    cells: list[tuple[object, ...]] = []
    for row in rows:
        style = "bold" if row is best else ""
        if row.found is None:
            cells.append((plain(row.mesh), row.machine, "", "", "", "", "", ""))
            cells.append((plain(f"  {row.error}", "red"),))
        else:
            cells.append((plain(row.mesh, style), row.machine, *_numbers(row, row.found)))
        if row.layout:
            cells.append((plain(f"  with {row.layout}", "cyan"),))
    columns = ["~mesh", "~machine", ">step", ">computing", ">collectives", ">holds", ">a second", ">of peak"]
    table(out, columns, cells)
    for text in _words(rows, best):
        line(out, f"  {text}")


def _show_answer(row: Row, answer: Answer) -> None:
    """The layouts, and why."""
    took = f"in {duration(answer.seconds)}, of which the solver took {duration(answer.solving)}"
    out = console()
    more = "" if answer.exact else "; the solver's time was up, and there may be better ones"
    heading(out, f"{row.mesh} on {row.machine}", f"{answer.chosen.name}, {took}{more}")
    for text in answer.findings:
        line(out, f"  {text}")


def _seconds(row: Row) -> float:
    return row.found.seconds if row.found is not None else 0.0


def _numbers(row: Row, found: Estimate) -> tuple[object, ...]:
    together = sum(found.communicating.values())
    rate = f"{amount(found.items / found.seconds)} {found.unit}" if found.unit and found.seconds else ""
    holds = plain(size(found.peak), "" if row.fits else "red")
    return (
        duration(found.seconds),
        duration(found.computing),
        duration(together) if together else "",
        holds,
        rate,
        f"{found.used:.1%}",
    )


def _words(rows: list[Row], best: Row | None) -> Iterator[str]:
    """Verdicts: which candidates do not fit, where the fastest spends its time, and how much of that is hidden."""
    for row in rows:
        if row.found is not None and not row.fits:
            assert row.limit is not None
            held, there = size(row.found.peak), size(row.limit)
            yield f"{row.mesh} on {row.machine} does not fit: a worker holds {held}, and there are {there}"
    if best is None:
        return
    assert best.found is not None
    parts = sorted(best.found.communicating.items(), key=lambda item: -item[1])
    spent = ", ".join(f"{duration(seconds)} over {dims} ({size(best.found.sent[dims])})" for dims, seconds in parts)
    where = f"{best.mesh} on {best.machine}" + (f" with {best.layout}" if best.layout else "")
    yield f"fastest of those that fit: {where}" + (f"; its collectives take {spent}" if spent else "")
