"""The page that shows a program from outside, where the setting `live` wants it from the start.

The library has it (`monarch.stdlib.live`), which the code that starts workers and actors does not know. `monarch`
registers it on import, before torch is loaded: so this module loads nothing, and the settings when there are workers.
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
