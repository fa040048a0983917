"""What writes plans as files and reads them: the module `file`, which stands above plans, and is loaded when it is
asked for first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_files: Callable[[], Any]  # the package sets it, before anything can have a plan


def files() -> Any:
    """The module, with `save_plan` and `load_plan`."""
    return _files()


def set_files(found: Callable[[], Any]) -> None:
    """Say which it is."""
    global _files
    _files = found
