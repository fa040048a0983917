"""`make test-ops`: the scoreboard of PyTorch's op database, as a table. Fails where an entry is wrong."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from tests.ops.scoreboard import REFUSED, RIGHT, WHOLE, WRONG, Entry, entries, full_name, play

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "ops.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only entries with one of these in their names")
    parser.add_argument("--samples", type=int, default=6, help="of each entry")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    names = [full_name(op) for op in entries(options.words)]
    found = []
    context = multiprocessing.get_context("fork")
    with context.Pool(options.processes, maxtasksperchild=50) as pool:
        for entry in pool.imap(_play, [(name, options.samples) for name in names]):
            found.append(entry)
            if entry.verdict in (WRONG, REFUSED):
                print(f"{entry.verdict:8} {entry.name:40} {_counts(entry)}  {_reasons(entry, 3)}", flush=True)
    report = text(found, options.samples)
    print(report)
    if not options.words:
        RESULTS.write_text(report)
    return any(entry.verdict == WRONG for entry in found)


def _play(task: tuple[str, int]) -> Entry:
    torch.set_num_threads(1)
    name, samples = task
    (op,) = (op for op in entries([name]) if full_name(op) == name)
    return play(op, samples)


def _counts(entry: Entry) -> str:
    return ", ".join(f"{entry.outcomes[outcome]} {outcome}" for outcome in (RIGHT, WHOLE, REFUSED, WRONG))


def _reasons(entry: Entry, most: int) -> str:
    return "; ".join(reason for (_, reason), _ in entry.reasons.most_common(most))


def text(found: Sequence[Entry], samples: int) -> str:
    """The table as Markdown."""
    played = [entry for entry in found if entry.outcomes]
    verdicts = Counter("refused in part" if entry.in_part else entry.verdict for entry in played)
    cases = sum((entry.outcomes for entry in played), Counter())
    lines = [
        "# PyTorch's op database",
        "",
        f"`make test-ops`: {len(played)} entries of torch {torch.__version__}, at most {samples} samples each,",
        "forward and backward; operands replicated, sharded on the first dim, on the last, and mixed, over meshes",
        "of 2, of 2x2, and of 3, there also where sizes do not divide; against plain PyTorch, in the reference",
        "executor.",
        "",
        "| outcome | entries (the worst of their cases) | cases |",
        "| --- | --- | --- |",
        f"| right | {verdicts[RIGHT]} | {cases[RIGHT]} |",
        f"| right, and some op ran whole | {verdicts[WHOLE]} | {cases[WHOLE]} |",
        f"| refused in part | {verdicts['refused in part']} | |",
        f"| refused | {verdicts[REFUSED]} | {cases[REFUSED]} |",
        f"| wrong | {verdicts[WRONG]} | {cases[WRONG]} |",
        "",
        "## Refused and wrong",
        "",
        "| entry | right, whole, refused, wrong | reasons |",
        "| --- | --- | --- |",
    ]
    for entry in played:
        if entry.verdict in (REFUSED, WRONG):
            reasons = _reasons(entry, 2).replace("|", "\\|")
            counts = ", ".join(str(entry.outcomes[outcome]) for outcome in (RIGHT, WHOLE, REFUSED, WRONG))
            lines.append(f"| {entry.name} | {counts} | {reasons} |")
    whole = ", ".join(f"{entry.name} ({entry.outcomes[WHOLE]})" for entry in played if entry.verdict == WHOLE)
    return "\n".join([*lines, "", "## Whole", "", whole, ""])


if __name__ == "__main__":
    sys.exit(main())
