"""What each library's process runs: it is told on standard input what to measure, and answers with seconds.

Runs in the virtual environment of its library, and so imports nothing but the standard library.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping

Way = Callable[[int], float]
"""Seconds that one of so many calls takes."""
SIZES = {"1 MiB": 1 << 20, "64 MiB": 64 << 20}
STARTED = (2, 8, 32)
ACTORS = 1000
PROCESSES = 8


def each(call: Callable[[], object]) -> Way:
    def way(count: int) -> float:
        begin = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - begin) / count

    return way


def together(calls: Callable[[int], object]) -> Way:
    """For calls that are made before the first is waited for."""

    def way(count: int) -> float:
        begin = time.perf_counter()
        calls(count)
        return (time.perf_counter() - begin) / count

    return way


def own_bytes() -> int:
    """The memory that this process has of its own."""
    with open("/proc/self/smaps_rollup", encoding="ascii") as file:
        fields = {name: int(value) for name, value, *_ in map(str.split, file.read().splitlines()[1:])}
    return 1024 * (fields["Private_Clean:"] + fields["Private_Dirty:"])


def serve(versions: str, ways: Mapping[str, Way | str], notes: Mapping[str, str]) -> None:
    """Says what it is, and answers each line, {"what": name, "count": n}, with one of its own: the seconds of one call
    and what there is to say of it, or an error. A way that is a text says why there is none."""
    out = sys.stdout
    sys.stdout = sys.stderr  # what a library prints is no answer
    print(json.dumps({"versions": versions}), file=out, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        way = ways[asked["what"]]
        answer: dict[str, object]
        if isinstance(way, str):
            answer = {"error": way}
        else:
            try:
                answer = {"seconds": way(asked["count"]), "note": notes.get(asked["what"], "")}
            except Exception as error:  # any library's, and the other rows are measured all the same
                answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
        print(json.dumps(answer), file=out, flush=True)
