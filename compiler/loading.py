"""Code that is loaded when it is first run, by name.

Modules import one another at their heads. Code that only some processes run, and that takes long to load, they name
instead: the compiler's passes, which a program that only makes a mesh does not need, the passes for GPUs, each command
of the command line. A test follows the names as it follows imports: they too close no cycle.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def load(name: str) -> Any:
    """The object that "module:attribute" names, or the module that "module" names; imported now if it has not been."""
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found


@contextmanager
def unwatched() -> Iterator[None]:
    """Within the block nothing watches which functions this thread enters, as tracing a program does: code that does
    not depend on the program then runs several times as fast."""
    watcher = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(watcher)
