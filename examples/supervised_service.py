"""A service that survives `kill -9` of its workers: it owns them, so it is told, and replaces them.

The workers count words. Whoever uses the service sees no failure: what a dead worker was to do is done by another.
"""

import os
import signal
from collections import Counter

from monarch.actor import (
    Actor,
    MeshFailure,
    SupervisionError,
    endpoint,
    get_or_spawn_controller,
    this_host,
)

TEXT = ["the cat and the dog", "the dog and the bird", "a bird in the hand"] * 100


class Worker(Actor):
    @endpoint
    def count(self, line: str) -> Counter[str]:
        return Counter(line.split())

    @endpoint
    def pid(self) -> int:
        return os.getpid()


class WordCount(Actor):
    """Owns one worker in each of three processes."""

    def __init__(self) -> None:
        self.replaced: list[str] = []
        self.workers = [self.start() for _ in range(3)]

    def start(self) -> Worker:
        return this_host().spawn_procs(name="crew").spawn("worker", Worker)

    def __supervise__(self, failure: MeshFailure) -> bool:
        """Called between messages. True: the failure is dealt with, and goes no further."""
        self.replaced.append(f"{failure.mesh_name}: exit status {failure.status}")
        return True

    @endpoint
    def count(self, lines: list[str]) -> Counter[str]:
        total: Counter[str] = Counter()
        while lines:
            asked = [(line, at % 3, self.workers[at % 3].count.call_one(line)) for at, line in enumerate(lines)]
            lines = []
            dead = set()
            for line, at, reply in asked:
                try:
                    total += reply.get()
                except SupervisionError:
                    lines.append(line)  # for the next round
                    dead.add(at)
            for at in dead:
                self.workers[at] = self.start()
        return total

    @endpoint
    def pids(self) -> list[int]:
        return [worker.pid.call_one().get() for worker in self.workers]

    @endpoint
    def history(self) -> list[str]:
        return self.replaced


def main() -> None:
    service = get_or_spawn_controller("word count", WordCount).get()
    before = service.pids.call_one().get()
    print("counted:", service.count.call_one(TEXT).get().most_common(2))

    os.kill(before[0], signal.SIGKILL)
    os.kill(before[2], signal.SIGKILL)
    print("killed two of three workers")
    print("counted:", service.count.call_one(TEXT).get().most_common(2))

    after = service.pids.call_one().get()
    print(f"workers kept: {len(set(before) & set(after))}, new: {len(set(after) - set(before))}")
    for line in service.history.call_one().get():
        print(f"the service was told: {line}")


if __name__ == "__main__":
    main()
