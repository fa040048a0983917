"""A host, or a controller that attaches the hosts that it is given, as a process of its own. Prints its address, or
that it has attached; ends when its input does."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from monarch.runtime.control.security import Security
from monarch.runtime.control.tree import HostTree
from tests import python
from tests.runtime.control.hosts import TOKEN, Host

ROOT = Path(__file__).parents[3]


@contextmanager
def process(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process, and the line that it prints."""
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT / '.src')!r}, {str(ROOT)!r}]\n"
        "from tests.runtime.control.process import main; main()"
    )
    pipe = subprocess.PIPE
    with python.Popen("-c", code, *arguments, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as started:
        try:
            assert started.stdout is not None
            yield started, started.stdout.readline().strip()
        finally:
            started.kill()


def main() -> None:
    what, *addresses = sys.argv[1:]
    security = Security.token(TOKEN)
    if what == "host":
        host = Host(security)
        print(host.address, flush=True)
        sys.stdin.read()
        host.agent.close()
    else:
        HostTree(addresses, security)
        print("attached", flush=True)
        sys.stdin.read()
