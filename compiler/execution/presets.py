"""The chooser of layouts for a module that is placed with `layouts="auto"`.

The library has it (`monarch.stdlib.parallel.automatic`), which the language does not know. `monarch` registers it on
import, before torch is loaded: so this module loads nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_load: Callable[[], Callable[[Any, Any], Any]] | None = None


def choose_with(load: Callable[[], Callable[[Any, Any], Any]]) -> None:
    """Register what gives the function that chooses layouts for a module and a mesh."""
    global _load
    _load = load


def choose_layouts(module: Any, mesh: Any) -> Any:
    """Layouts by name, whose `why` says how they were chosen."""
    assert _load is not None, "import monarch registers it"
    return _load()(module, mesh)
