"""`monarch.sync`: 256 MiB from two workers to two others in other layouts, against one thread's copy of as much."""

from __future__ import annotations

import torch

import monarch
from benchmarks.measure import Row, interleaved, seconds, table

SIZE, COUNT = 4096, 4  # of 64 MiB each
REPETITIONS = 9


def rows() -> list[Row]:
    """One row: a sync with its checksums, until the target's version is known, and the copy."""
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
        return [Row(name, *found, "copy_ in one thread", 2.5)]


if __name__ == "__main__":
    print(table(rows()))
