"""`make test-ops`: the scoreboard of PyTorch's op database, as a table. Fails where an entry is wrong."""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from tests.ops.judge import Findings, judge
from tests.ops.scoreboard import DTYPES, REFUSED, RIGHT, WHOLE, WRONG, Entry, entries, full_name, play

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results" / "ops.md"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only entries with one of these in their names")
    parser.add_argument("--samples", type=int, default=6, help="of each entry")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--judge", action="store_true", help="ask PyTorch's own judge about the rules instead")
    options = parser.parse_args()
    if options.judge:
        return _judge(options)
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


def _judge(options: argparse.Namespace) -> int:
    """Print what the second judge finds; 1 where a rule is incorrect."""
    names = [full_name(op) for op in entries(options.words)]
    found: list[Findings] = []
    with ThreadPoolExecutor(options.processes) as threads:
        for each in threads.map(_ask_apart, [(name, min(options.samples, 2)) for name in names]):
            found.append(each)
            for kind, examples in (("incorrect", each.incorrect), ("missing", each.missing)):
                for op, example in examples.items():
                    print(f"{kind:9} {op:40} {example}", flush=True)
    explained = sum((each.explained for each in found), Counter[str]())
    print(
        f"{sum(each.calls for each in found)} calls of {len(names)} entries; {sum(e.correct for e in found)} correct,"
    )
    incorrect, missing = ({op for each in found for op in getattr(each, kind)} for kind in ("incorrect", "missing"))
    print(f"incorrect for {len(incorrect)} ops, missing for {len(missing)}")
    for why, count in explained.most_common():
        print(f"{count:6} left out: {why}")
    return any(each.incorrect for each in found)


def _ask_apart(task: tuple[str, int]) -> Findings:
    """In a process of its own: some ops of PyTorch write outside of memory where shapes do not fit, and the judge tries
    what does not fit."""
    context = multiprocessing.get_context("fork")
    reading, writing = context.Pipe(duplex=False)
    process = context.Process(target=lambda: writing.send(_ask(task)))
    process.start()
    writing.close()
    try:
        found: Findings = reading.recv()
    except EOFError:
        found = Findings(task[0], explained=Counter(["the judge's process died: an op wrote outside of memory"]))
        print(f"died      {task[0]}", flush=True)
    process.join()
    return found


def _ask(task: tuple[str, int]) -> Findings:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    name, samples = task
    (op,) = (op for op in entries([name]) if full_name(op) == name)
    dtype = next((each for each in DTYPES if each in op.dtypes), None)
    return Findings(name) if dtype is None else judge(op, dtype, samples)


def _play(task: tuple[str, int]) -> Entry:
    torch.set_num_threads(1)
    name, samples = task
    (op,) = (op for op in entries([name]) if full_name(op) == name)
    return play(op, samples)


def _counts(entry: Entry) -> str:
    return ", ".join(f"{entry.outcomes[outcome]} {outcome}" for outcome in (RIGHT, WHOLE, REFUSED, WRONG))


def _reasons(entry: Entry, most: int) -> str:
    """Why cases were refused or wrong, the commonest first."""
    found = [reason for (outcome, reason), _ in entry.reasons.most_common() if outcome in (REFUSED, WRONG)]
    return "; ".join(found[:most])


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
    lines += ["", "## Whole", "", "| entry | cases | ops that ran whole |", "| --- | --- | --- |"]
    for entry in played:
        if entry.outcomes[WHOLE]:
            ops = "; ".join(reason for outcome, reason in entry.reasons if outcome == WHOLE)
            lines.append(f"| {entry.name} | {entry.outcomes[WHOLE]} | {ops} |")
    correct, refused = cases[RIGHT] + cases[WHOLE], verdicts["refused in part"] + verdicts[REFUSED]
    share = cases[WHOLE] / max(correct, 1)
    lines += [
        "",
        f"{verdicts[RIGHT] + verdicts[WHOLE]} entries right throughout, {refused} refused in whole or in part, "
        f"{verdicts[WRONG]} wrong. Of {correct} right results {cases[WHOLE]} ({share:.1%}) needed a gather that a rule "
        "could spare.",
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
