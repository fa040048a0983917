"""Code that is loaded when it is first run, by name.

Modules import one another at their heads. What only some processes run, and takes long to load, they name instead: the
compiler's passes, which nobody needs who only makes a mesh, the passes for GPUs, each command of the command line. A
test follows the names as it follows imports: they too close no cycle.
"""

from __future__ import annotations

import importlib
from typing import Any


def load(name: str) -> Any:
    """What "module:attribute" names, or "module"; imported now if it has not been."""
    module, _, attribute = name.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found
