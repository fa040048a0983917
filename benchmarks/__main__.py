"""`make bench`: every measurement, as one table of ours against another's and one of the compiler's own times.

    python -m benchmarks                        # all
    python -m benchmarks all_reduce dispatch    # some

Prints as it goes, and writes `benchmarks/results/<date>.md`.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import platform
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import HEAD, Row, cells, duration, table

COMPARED = (
    *"train_step uneven named kernels memory tracing telemetry all_reduce across transports dispatch start".split(),
    *"warm_start actors faults checkpoints data sync pipeline".split(),
)
COMPILER = "compile_time"
PAGE = "page"
RELAY = "relay"
ESTIMATES = "estimates"
RESULTS = Path(__file__).parent / "results"


def machine() -> str:
    """What the numbers were measured on."""
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    cores = len(os.sched_getaffinity(0))
    return (
        f"{cores} cores of {model}, {memory:.0f} GiB, Linux {'.'.join(platform.release().split('.')[:2])}, "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def show(console: Console, title: str, head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    shown = Table(*head, title=title, title_justify="left")
    for line in lines:
        shown.add_row(*line)
    console.print(shown)


def compiler_tables() -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """The compiler's times, as (title, head, lines)."""
    from benchmarks import compile_time

    compiled, stacked, firsts, steps = compile_time.measure()
    programs = {
        "the GPT's training step, data and tensor parallel": compiled,
        "a training step through monarch.scan over stacked layers": stacked,
    }
    return [
        *(
            (
                f"Processor time from Python to a plan: {name}",
                ("layers", "workers", "ops traced", "trace", "partition", "plan"),
                [
                    (
                        str(found.layers),
                        f"{found.workers:,}",
                        str(found.ops),
                        duration(found.trace),
                        duration(found.partition),
                        duration(found.plan),
                    )
                    for found in times
                ],
            )
            for name, times in programs.items()
        ),
        (
            "Processor time of the first call in a new process, tracing included: compiled, and with its plan on disk",
            ("model", "layers", "compiled", "plan on disk"),
            [(found.model, str(found.layers), duration(found.cold), duration(found.kept)) for found in firsts],
        ),
        (
            "The controller's time for one training step, until the call returns",
            (
                "layers",
                "workers",
                "time",
                "processor time, at least",
                "of it the guards' check, at least",
                "places",
                "looking up as many in C",
            ),
            [
                (
                    str(found.layers),
                    str(found.workers),
                    *map(duration, (found.step, found.processor, found.check)),
                    f"{found.places:,}",
                    duration(found.floor),
                )
                for found in steps
            ],
        ),
    ]


def page_tables() -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """The inspector's page in a browser, as (title, head, lines)."""
    from benchmarks import page

    return [
        (
            "The inspector's page, in headless Chromium without a GPU",
            (
                "ops",
                "size",
                "written",
                "opened",
                "a layer expanded",
                "a search",
                "frame while panning",
                "slowest frame",
            ),
            [
                (
                    f"{found.ops:,}",
                    f"{found.size / 2**20:.2g} MiB",
                    duration(found.write),
                    duration(found.open),
                    "" if found.expand is None else duration(found.expand),
                    *(duration(each) for each in (found.search, found.frame, found.slowest)),
                )
                for found in page.measure()
            ],
        )
    ]


def relay_tables() -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Commands through a tree of hosts, as (title, head, lines)."""
    from benchmarks import relay

    costs, lines = relay.measure()
    hop = ", ".join(f"{name} {duration(value)}" for name, value in vars(costs).items())
    title = f"One command to many hosts; simulated over hops that cost what was measured ({hop})"
    return [(title, relay.HEAD, [relay.cells(line) for line in lines])]


def estimates_tables() -> list[tuple[str, tuple[str, ...], list[tuple[str, ...]]]]:
    """Estimates of steps against measured ones, as (title, head, lines)."""
    from benchmarks import estimates

    return estimates.tables(estimates.measure())


TABLES = {
    COMPILER: compiler_tables,
    PAGE: page_tables,
    RELAY: relay_tables,
    ESTIMATES: estimates_tables,
}


def markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *lines])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join([*COMPARED, *TABLES])}; all of them if none is given")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder to write to")
    options = parser.parse_args()
    if unknown := set(options.names) - {*COMPARED, *TABLES}:
        parser.error(f"no such benchmark: {', '.join(sorted(unknown))}")
    names = options.names or [*COMPARED, *TABLES]

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    where = machine()
    console.print(where, highlight=False)
    today = datetime.date.today().isoformat()
    parts = [f"# Measured on {today}", where]

    rows: list[Row] = []
    for name in COMPARED:
        if name in names:
            with console.status(name):
                found = importlib.import_module(f"benchmarks.{name}").rows()
            for row in found:
                line = cells(row)
                console.print(f"{line[0]}: {line[1]} / {line[2]} = {line[3]}", highlight=False)
            rows += found
    if rows:
        console.print()
        show(console, "Ours against another's", HEAD, [cells(row) for row in rows])
        parts += [
            "## Ours against another's",
            "Medians; in brackets the quartiles of the ratios of pairs.",
            table(rows),
        ]
    for name, tables_of in TABLES.items():
        if name not in names:
            continue
        with console.status(name):
            tables = tables_of()
        for title, head, lines in tables:
            show(console, title, head, lines)
            parts += [f"## {title}", markdown(head, lines)]

    options.results.mkdir(parents=True, exist_ok=True)
    path = options.results / f"{today}.md"
    path.write_text("\n\n".join(parts) + "\n")
    console.print(f"written to {path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
