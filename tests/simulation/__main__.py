"""`make simulate`: a hundred thousand schedules of a simulated cluster, each by a seed. ARGS="--first 7 --count 1" runs
the schedule with the seed 7 again."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from functools import partial

from tests.simulation.schedule import run_some

AT_ONCE = 50


def main() -> None:
    parser = argparse.ArgumentParser(prog="make simulate")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=100_000)
    options = parser.parse_args()
    start, happened, failed = time.monotonic(), Counter[str](), 0
    firsts = range(options.first, options.first + options.count, AT_ONCE)
    some = partial(run_some, count=min(AT_ONCE, options.count))
    with multiprocessing.get_context("spawn").Pool(min(len(os.sched_getaffinity(0)), len(firsts))) as pool:
        for number, (what, wrong) in enumerate(pool.imap_unordered(some, firsts), start=1):
            happened += what
            failed += len(wrong)
            for seed, error in wrong:
                print(f"seed {seed}: {error}", flush=True)
            if number % 40 == 0:
                print(f"{time.monotonic() - start:5.0f} s: {number * AT_ONCE:,} schedules", file=sys.stderr, flush=True)
    faults = ", ".join(f"{count:,} × {what}" for what, count in sorted(happened.items()))
    print(f"{options.count:,} schedules in {time.monotonic() - start:.0f} s, with {faults}: {failed} failed")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
