"""A crawler: workers in processes of their own take pages from one queue, and put the links that they find into it.

The pages are the modules of Python's standard library, and the links are their imports, so that it runs anywhere.
"""

import ast
import asyncio
import importlib.util
import sys
from collections import deque

from monarch.actor import Actor, concurrent_endpoint, endpoint, this_host, this_proc

START = "pydoc"


class Queue(Actor):
    """Pages to visit, each once. An actor with `async def` endpoints handles messages while somebody waits for work."""

    def __init__(self, start: str) -> None:
        self.waiting = deque([start])
        self.links: dict[str, list[str]] = {}
        self.seen = {start}
        self.busy = 0
        self.changed = asyncio.Condition()

    @concurrent_endpoint
    async def take(self) -> str | None:
        """A page, as soon as there is one; None once all have been visited."""
        async with self.changed:
            await self.changed.wait_for(lambda: self.waiting or not self.busy)
            if not self.waiting:
                return None
            self.busy += 1
            return self.waiting.popleft()

    @concurrent_endpoint
    async def visited(self, page: str, links: list[str]) -> None:
        async with self.changed:
            self.links[page] = links
            self.waiting += [link for link in links if link not in self.seen]
            self.seen.update(links)
            self.busy -= 1
            self.changed.notify_all()

    @endpoint
    async def found(self) -> dict[str, list[str]]:
        return self.links


class Crawler(Actor):
    @endpoint
    def run(self, queue: Queue) -> int:
        """Visit pages until there are no more. Gives how many it visited."""
        visits = 0
        while (page := queue.take.call_one().get()) is not None:
            queue.visited.broadcast(page, imports_of(page))  # handled before the next `take`: they come in order
            visits += 1
        return visits


def imports_of(module: str) -> list[str]:
    """The modules of the standard library that a module imports, at the top of its file or deeper."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return []  # built in, or compiled
    with open(spec.origin, encoding="utf-8") as file:
        tree = ast.parse(file.read())
    names: set[str] = set()
    for statement in ast.walk(tree):
        if isinstance(statement, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names.add(statement.module.partition(".")[0])
    return sorted(names & sys.stdlib_module_names - {"__main__", module})


def main() -> None:
    queue = this_proc().spawn("queue", Queue, START)
    crawlers = this_host().spawn_procs(per_host={"crawlers": 3}).spawn("crawlers", Crawler)
    visits = crawlers.run.call(queue).get()
    links = queue.found.call_one().get()

    print(f"{len(links)} modules can be reached from {START}, over {sum(map(len, links.values()))} imports")
    for point, count in visits.items():
        print(f"crawler {point['crawlers']} read {count}")
    popular = sorted(links, key=lambda page: -sum(page in found for found in links.values()))
    print(f"imported most often: {', '.join(popular[:3])}")


if __name__ == "__main__":
    main()
