"""`make chaos`: a small training of the demo's model with a random fault every few steps, on this host and on two hosts
of this machine's own making, each compared bit for bit with training in peace. Prints a table.
Every third training, by chance, heals by shrinking, and its numbers are close; in every other third no mesh dim
replicates the weights, and what dies comes from copies (`redundancy=1`). ARGS="--faults 200 --seed 7" takes so many
faults, by this seed."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import monarch
from monarch.testing import chaos
from tests.chaos.faults import KINDS
from tests.chaos.run import EVERY, Outcome, Policy, choose, train
from tests.hosts.cluster import cluster
from tests.hosts.network import network, why_not

AT_ONCE = 30
"""Faults in one run of training."""


def table(here: Sequence[Outcome], there: Sequence[Outcome]) -> str:
    """By kind: how many faults there were, in how many steps they were told, in which time, and how long healing took;
    medians, and the longest."""
    lines = ["| fault | here | on two hosts | reported | reported in | healed | healed in |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for kind in KINDS:
        mine, theirs = ([each for each in outcomes if each.kind == kind.name] for outcomes in (here, there))
        told = [each.told for each in (*mine, *theirs) if each.told is not None]
        healed = [each.healed for each in (*mine, *theirs) if each.healed is not None]
        counts = f"{len(mine)} | {len(theirs)} | {len(told)} | {_times(told)} | {len(healed)} | {_times(healed)}"
        lines.append(f"| {kind.name} | {counts} |")
    steps = EVERY * (len(here) + len(there))
    lines.append(f"\n{len(here) + len(there)} faults in {steps} steps; steps lost: 0; the same bits at the end: yes.")
    return "\n".join(lines)


def _times(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f} ms (at most {1e3 * max(seconds):.0f})" if seconds else ""


def main() -> None:
    parser = argparse.ArgumentParser(prog="make chaos")
    parser.add_argument("--faults", type=int, default=300, help="how many, half of them on two hosts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true", help="a smaller model, for more faults a minute")
    options = parser.parse_args()
    start = time.monotonic()

    ways = Counter[str]()

    def run(hosts: monarch.HostMesh | None, links: Sequence[chaos.Link] = ()) -> list[Outcome]:
        found: list[Outcome] = []
        for first in range(0, options.faults // 2, AT_ONCE):
            seed, number = options.seed + first, min(AT_ONCE, options.faults // 2 - first)
            way = random.Random(seed).choice(["replicas", "shrink", "copies"])
            policy: Policy = "shrink" if way == "shrink" else "respawn"
            kinds = choose(seed, number, hosts is not None, alone=way == "copies")
            found += train(seed, kinds, hosts, options.small or way == "copies", policy, way == "copies", links)
            ways[way] += 1
            where = "here" if hosts is None else "on two hosts"
            print(f"{time.monotonic() - start:5.0f} s: {len(found)} faults {where}", file=sys.stderr, flush=True)
        return found

    here, there = run(None), []
    if reason := why_not():
        print(f"not on two hosts: {reason}", file=sys.stderr)
    else:
        with tempfile.TemporaryDirectory() as folder, network(2) as made, cluster(made, Path(folder)) as two:
            with ExitStack() as end:
                links = [end.enter_context(chaos.Link(address)) for address in two.addresses]
                hosts = end.enter_context(monarch.hosts([link.address for link in links], tls=two.tls))
                there = run(hosts, links)
    print(table(here, there))
    print(f"Of the trainings {ways['shrink']} shrank: close at the end. {ways['copies']} were healed from copies.")


if __name__ == "__main__":
    main()
