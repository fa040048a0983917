"""A role for tests."""

from __future__ import annotations

import json
import os

from monarch.runtime.processes.roles import Forked


def say(forked: Forked) -> None:
    """Write what this process was given into its own file, and end well."""
    shared = os.pread(forked.shared, 100, 0).decode()
    said = [forked.rank, shared, forked.window is None, forked.given]
    os.write(forked.files[0], json.dumps(said).encode())
    os._exit(0)
