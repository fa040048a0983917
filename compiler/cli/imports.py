"""`--import MODULE`, of both command lines: modules that register ops of the user's own, imported before anything needs
them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

from monarch.compiler.cli.load import import_file, users_errors
from monarch.compiler.errors import MonarchError


def import_all(names: list[str]) -> None:
    """Import modules, by their names or files. Raises MonarchError where there is none, or it fails."""
    sys.path.insert(0, "")  # the working folder, as `python -m` has it
    for name in names:
        if name.endswith(".py"):
            if not Path(name).is_file():
                raise MonarchError(f"there is no file {name}")
            import_file(Path(name))
            continue
        with users_errors(f"importing {name}"):
            if importlib.util.find_spec(name) is None:
                raise MonarchError(f"there is no module {name}")
            importlib.import_module(name)
