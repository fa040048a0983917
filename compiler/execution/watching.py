"""What shows a program to its user from outside, where the setting `live` wants that from the start.

The library does (`monarch.stdlib.live`), which those who start workers and actors do not know. `monarch` registers it
on import, before torch is loaded: so this module loads nothing, and the settings when there are workers.
"""

from __future__ import annotations

from collections.abc import Callable

from monarch.compiler.loading import load

_page: Callable[[], Callable[[], None]] | None = None


def watch_with(page: Callable[[], Callable[[], None]]) -> None:
    """Register what gives the function that shows this program. To call that again changes nothing."""
    global _page
    _page = page


def begin() -> None:
    """The program has workers or actors: show it, where the setting says so."""
    if _page is not None and load("monarch.compiler.config:settings").live:
        _page()()
