"""`monarch host` processes on this machine, each a host of its own for actors."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tests import python

TOKEN = "0123456789abcdef0123456789abcdef"


@dataclass
class Hosts:
    """Some that serve."""

    running: list[subprocess.Popen[str]]
    addresses: list[str]
    said: list[Path]
    """What each writes to its log."""


@contextmanager
def hosts_here(count: int, folder: Path, before: tuple[str, ...] = ()) -> Iterator[Hosts]:
    """`before` begins each host's command line."""
    token = folder / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    command = ["host", "--listen", "127.0.0.1:0", "--token-file", str(token)]
    start = partial(python.Popen, "-c", "from monarch.compiler.cli.hosts import main; main()", *command)
    if before:
        start = partial(subprocess.Popen, [*before, str(Path(sys.executable).with_name("monarch")), *command])
    running: list[subprocess.Popen[str]] = []
    said = [folder / f"log{number}" for number in range(count)]
    try:
        for log in said:
            with log.open("w") as file:
                running.append(start(stdout=subprocess.PIPE, stderr=file, text=True))
        addresses = []
        for host in running:
            assert host.stdout is not None
            found = re.search(r"serving on (\S+)", host.stdout.readline())
            assert found is not None, said
            addresses.append(found.group(1))
        yield Hosts(running, addresses, said)
    finally:
        for host in running:
            host.kill()
            host.wait()
            assert host.stdout is not None
            host.stdout.close()
