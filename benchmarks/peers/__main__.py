"""`make bench-peers`: our actors against PyTorch Monarch's and Ray's, each in a virtual environment of its own.

    python -m benchmarks.peers .peers              # all; writes benchmarks/results/<date>-peers.md
    python -m benchmarks.peers .peers --quick      # few calls, to see that all of it runs; writes nothing

The libraries' processes run at the same time, and are asked in turns for the same thing, so that what else the machine
does hits all. Each answer has a time; who does not keep it is ended with all that it started, and the row says so.
"""

from __future__ import annotations

import argparse
import datetime
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.__main__ import RESULTS, machine, markdown
from benchmarks.peers.comparison import OURS, Asked, Measured, cells, failures, head
from benchmarks.peers.peer import Failed, Peer, adopt, descendants, end

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent.parent
MONARCH, RAY = "PyTorch Monarch", "Ray"
CALLS = {MONARCH: 3.0, RAY: 5.0}
TENSORS = {MONARCH: 5.0, RAY: 5.0}
STARTS = {MONARCH: 1.0, RAY: 1.0}
ROWS = (
    Asked("call_one", "call_one, waited for", 200, 10, CALLS),
    Asked("pipelined", "call_one, 200 at a time", 200, 10, CALLS),
    Asked("call 2", "call on 2 actors", 100, 10, CALLS),
    Asked("call 8", "call on 8 actors", 50, 10, CALLS),
    Asked("broadcast", "broadcast to 8 actors, 50 and a call", 50, 10, CALLS),
    Asked("message 1 MiB", "1 MiB from actor to actor, in a message", 100, 10, TENSORS),
    Asked("RDMABuffer 1 MiB", "1 MiB from actor to actor, by RDMABuffer", 100, 10, TENSORS),
    Asked("message 64 MiB", "64 MiB from actor to actor, in a message", 2, 7, TENSORS),
    Asked("RDMABuffer 64 MiB", "64 MiB from actor to actor, by RDMABuffer", 2, 7, TENSORS),
    Asked("start 2", "2 processes to their first replies", 1, 3, STARTS, warm=0),
    Asked("start 8", "8 processes to their first replies", 1, 3, STARTS, warm=0),
    Asked("start 32", "32 processes to their first replies", 1, 2, STARTS, seconds=60, warm=0),
    Asked("many", "1,000 actors in 8 processes answer", 1, 5, seconds=60),
)


def quick(row: Asked) -> Asked:
    return Asked(row.what, row.title, min(row.count, 2), 2, row.aims, row.seconds, warm=0)


def peers(environments: Path, scratch: Path) -> tuple[list[Peer], dict[str, str]]:
    """The libraries that can be asked, and why others cannot."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RAY_"))}
    environ |= {"TMPDIR": str(scratch), "RAY_USAGE_STATS_ENABLED": "0"}

    def peer(name: str, python: str, script: str, *arguments: str, path: Sequence[Path] = ()) -> Peer:
        log = scratch / f"{script}-{len(found)}.log"
        command = [python, str(FOLDER / script), *arguments]
        searched = os.pathsep.join(map(str, (*path, FOLDER)))  # by processes of actors too
        return Peer(name, command, environ | {"PYTHONPATH": searched}, log)

    found: list[Peer] = []
    absent: dict[str, str] = {}
    found.append(peer(OURS, sys.executable, "with_monarch.py", path=[ROOT / ".src"]))
    for name, folder, script, arguments in (
        (MONARCH, "torchmonarch", "with_monarch.py", ()),
        (RAY, "ray", "with_ray.py", (str(scratch / "ray"),)),
    ):
        environment = environments.resolve() / folder
        if (environment / ".ready").exists():
            found.append(peer(name, str(environment / "bin/python"), script, *arguments))
        else:
            absent[name] = f"its virtual environment could not be made: see {environments / folder}.log"
    return found, absent


def measure(rows: Sequence[Asked], libraries: Sequence[Peer], console: Console) -> list[Measured]:
    found = []
    for row in rows:
        measured = Measured(row)
        with console.status(row.title):
            for turn in range(row.warm + row.rounds):
                for at in range(len(libraries)):
                    peer = libraries[(at + turn) % len(libraries)]
                    if peer.name in measured.failed:
                        continue
                    try:
                        taken, note = peer.measure(row.what, row.count, row.seconds)
                    except Failed as failed:
                        measured.failed[peer.name] = str(failed)
                        continue
                    if turn >= row.warm:
                        measured.seconds.setdefault(peer.name, []).append(taken)
                    if note:
                        measured.notes[peer.name] = note
        found.append(measured)
        console.print(" | ".join(cells(measured, [peer.name for peer in libraries])), highlight=False)
    return found


def written(measured: Sequence[Measured], versions: Mapping[str, str], absent: Mapping[str, str], day: str) -> str:
    """The results' page."""
    libraries = list(versions)
    lines = [cells(row, libraries) for row in measured]
    parts = [
        f"# Actors against other libraries, measured on {day}",
        machine(),
        "\n".join(f"- {name}: {version}" for name, version in versions.items()),
        "Medians and quartiles of rounds in turns, of one call. `×` is how many times as fast ours is, by round.\n"
        "Tensors: to whom the message goes reads its last byte. In a message, Ray's go through its object store; by\n"
        "`RDMABuffer`, PyTorch Monarch's go over TCP, for there is no RDMA device. Processes are started from a\n"
        "program that runs, and have ended before the next ones are; Ray's do not import torch, the others' have.",
        markdown(head(libraries), lines),
    ]
    left = [*(f"{name}: {why}" for name, why in absent.items()), *failures(measured)]
    if left:
        parts += ["There is no figure where a library has no such thing, or did not answer:", _listed(left)]
    return "\n\n".join(parts) + "\n"


def _listed(lines: Sequence[str]) -> str:
    return "\n".join(f"- {' '.join(line.split())}" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "environments", type=Path, help="the folder with the virtual environments, torchmonarch and ray"
    )
    parser.add_argument("--quick", action="store_true", help="few calls, and no file: the figures mean nothing")
    parser.add_argument("--rows", nargs="*", choices=[row.what for row in ROWS], help="these only; writes nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder to write to")
    options = parser.parse_args()
    rows = [row for row in ROWS if not options.rows or row.what in options.rows]

    console = Console() if sys.stdout.isatty() else Console(width=200)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    adopt()
    scratch = Path(tempfile.mkdtemp(prefix="peers-"))
    libraries, absent = peers(options.environments, scratch)
    try:
        for peer in list(libraries):
            try:
                with console.status(f"starting {peer.name}"):
                    peer.start()
            except Failed as failed:
                absent[peer.name] = str(failed)
                libraries.remove(peer)
        if not any(peer.name == OURS for peer in libraries):
            raise SystemExit(f"ours cannot be measured: {absent[OURS]}")
        measured = measure([quick(row) for row in rows] if options.quick else rows, libraries, console)
    finally:
        for peer in libraries:
            peer.close()
        end(descendants(os.getpid()))
        shutil.rmtree(scratch, ignore_errors=True)

    day = datetime.date.today().isoformat()
    page = written(measured, {peer.name: peer.versions for peer in libraries}, absent, day)
    console.print(f"\n{page}", highlight=False, markup=False, soft_wrap=True)
    if not options.quick and not options.rows:
        options.results.mkdir(parents=True, exist_ok=True)
        path = options.results / f"{day}-peers.md"
        path.write_text(page)
        console.print(f"written to {path}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
