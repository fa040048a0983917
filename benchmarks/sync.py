"""`monarch.sync`: 256 MiB from two workers to two others in other layouts, against one thread's copy of as much; and
64 MiB from a worker to one on another host, over a link that a token secures, against a plain socket's."""

from __future__ import annotations

import torch

import monarch
from benchmarks.across import Hosts
from benchmarks.measure import Row, interleaved, seconds, table
from benchmarks.transports import SIZE as SENT
from benchmarks.transports import plain_socket

SIZE, COUNT = 4096, 4  # of 64 MiB each
REPETITIONS = 9


def rows() -> list[Row]:
    """A row for either: a sync with its checksums, until the target's version is known, and the copy."""
    across = between_hosts()  # first: it forks, and what is forked behind products in several threads stands still
    return [on_one_host(), across]


def on_one_host() -> Row:
    with monarch.Mesh(role=2, each=2) as root:
        trainers, generators = root.slice(role=0).rename(each="data"), root.slice(role=1).rename(each="model")
        values = torch.randn(COUNT, SIZE, SIZE)
        source = {f"w{at}": monarch.distribute(values[at], trainers, "[@data, -]") for at in range(COUNT)}
        target = {name: monarch.distribute(values[0], generators, "[-, @model]") for name in source}
        taken = torch.empty_like(values)
        threads = torch.get_num_threads()

        def sync() -> None:
            monarch.sync(source, target)
            monarch.version(target)

        torch.set_num_threads(1)
        try:
            found = interleaved(lambda: seconds(sync), lambda: seconds(lambda: taken.copy_(values)), REPETITIONS, 3)
        finally:
            torch.set_num_threads(threads)
        name = f"sync of {values.nbytes >> 20} MiB to other layouts, 2 workers to 2"
        return Row(name, *found, "copy_ in one thread", 2.5)


def between_hosts() -> Row:
    hosts, values = Hosts(), torch.randn(SENT // 4)
    try:
        with (
            plain_socket(values.view(torch.uint8).numpy().data) as copy,
            monarch.Mesh(role=2, hosts=hosts.attached) as root,
        ):
            source = {"w": monarch.distribute(values, root.slice(role=0))}
            target = {"w": monarch.distribute(values, root.slice(role=1))}

            def sync() -> None:
                monarch.sync(source, target)
                monarch.version(target)

            found = interleaved(lambda: seconds(sync), copy, REPETITIONS, 3)
            return Row(
                f"sync of {SENT >> 20} MiB between 2 hosts, over TCP with a token", *found, "a socket copy", 1 / 0.7
            )
    finally:
        hosts.close()


if __name__ == "__main__":
    print(table(rows()))
