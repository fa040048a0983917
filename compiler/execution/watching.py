"""What shows a program to its user from outside, where the setting `live` wants that from the start.

The library does (`monarch.stdlib.live`), which those who start workers and actors do not know. `monarch` registers it
on import, before torch is loaded: so this module loads nothing but the settings.
"""

from __future__ import annotations

from collections.abc import Callable

from monarch.compiler.config import settings

_load: Callable[[], Callable[[], None]] | None = None


def watch_with(load: Callable[[], Callable[[], None]]) -> None:
    """Register what gives the function that shows this program. To call that again changes nothing."""
    global _load
    _load = load


def begin() -> None:
    """The program has workers or actors: show it, where the setting says so."""
    if settings.live and _load is not None:
        _load()()
