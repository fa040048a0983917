"""The rows of `benchmarks.peers`, with Ray: on a cluster of its own, in the folder that is given."""

from __future__ import annotations

import os
import platform
import sys
import time
from contextlib import suppress
from functools import partial

import ray
import torch
from serving import ACTORS, SIZES, STARTED, Way, each, serve, together

GONE_SECONDS = 20.0


@ray.remote(num_cpus=0)
class Echo:
    """The least that answers: it does not import torch."""

    def echo(self, value: object) -> object:
        return value

    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0)
class Holder:
    def __init__(self) -> None:
        self.tensors: dict[int, torch.Tensor] = {}

    def last(self, tensor: torch.Tensor) -> int:
        return int(tensor[-1])

    def hand_over(self, other: object, size: int) -> int:
        if size not in self.tensors:
            self.tensors[size] = torch.ones(size, dtype=torch.uint8)
        return ray.get(other.last.remote(self.tensors[size]))  # type: ignore[attr-defined]


def call(actors: list[object]) -> None:
    ray.get([actor.echo.remote(1) for actor in actors])  # type: ignore[attr-defined]


def start(count: int, repetitions: int) -> float:
    """From asking for so many actors, each a process, to the last one's first reply; their end is waited for, and not
    counted."""
    taken = 0.0
    for _ in range(repetitions):
        begin = time.perf_counter()
        actors = [Echo.remote() for _ in range(count)]
        call(actors)
        taken += time.perf_counter() - begin
        pids = ray.get([actor.pid.remote() for actor in actors])
        for actor in actors:
            ray.kill(actor)
        deadline = time.monotonic() + GONE_SECONDS
        while any(map(alive, pids)) and time.monotonic() < deadline:
            time.sleep(0.05)
    return taken / repetitions


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def main() -> None:
    ray.init(
        address="local",
        include_dashboard=False,
        logging_level="ERROR",
        log_to_driver=False,
        object_store_memory=1 << 30,
        _temp_dir=sys.argv[1],
    )
    eight = [Echo.remote() for _ in range(8)]
    here = eight[0]
    holders = [Holder.remote() for _ in range(2)]

    def pipelined(count: int) -> None:
        ray.get([here.echo.remote(1) for _ in range(count)])

    def broadcast(count: int) -> None:
        for _ in range(count):
            for actor in eight:
                actor.echo.remote(1)
        call(eight)

    ways: dict[str, Way | str] = {
        "call_one": each(lambda: ray.get(here.echo.remote(1))),
        "pipelined": together(pipelined),
        "call 2": each(lambda: call(eight[:2])),
        "call 8": each(lambda: call(eight)),
        "broadcast": together(broadcast),
        **{f"start {count}": partial(start, count) for count in STARTED},
        "many": f"each actor is a process of its own, and {ACTORS:,} of them are too many for this machine",
    }
    for name, size in SIZES.items():
        ways[f"message {name}"] = each(lambda size=size: ray.get(holders[0].hand_over.remote(holders[1], size)))
        ways[f"RDMABuffer {name}"] = "it has none"
    call(eight)
    serve(f"ray {ray.__version__}, torch {torch.__version__}, Python {platform.python_version()}", ways, {})
    ray.shutdown()


if __name__ == "__main__":
    main()
