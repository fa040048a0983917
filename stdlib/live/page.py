"""`monarch.dashboard`: the live page of the program that calls it."""

from __future__ import annotations

import html
import os
import threading

from monarch.stdlib.live.listening import listen
from monarch.stdlib.live.serving import Server
from monarch.stdlib.live.watching import watch

_lock = threading.Lock()
_listening = False
_dashboard: Dashboard | None = None


class Dashboard:
    """The live page of this program, at `url`. In Jupyter and Marimo it shows itself. Made by `monarch.dashboard`."""

    def __init__(self, port: int) -> None:
        self._server = Server({"snapshot": watch().snapshot, "stacks": watch().stacks}, port)
        self.url = self._server.url
        self.owner = os.getpid()

    def close(self) -> None:
        """Serve the page no more; `monarch.dashboard()` makes another. Idempotent."""
        global _dashboard
        with _lock:
            if _dashboard is self:
                _dashboard = None
                self._server.close()

    def _repr_html_(self) -> str:
        url = html.escape(self.url)
        return (
            f'<iframe src="{url}" style="width: 100%; height: 720px; border: 0" title="Monarch"></iframe>'
            f'<p><a href="{url}" target="_blank" rel="noreferrer">Open the page by itself</a></p>'
        )

    def __repr__(self) -> str:
        return f"<dashboard at {self.url}>"


def start() -> None:
    """Have `monarch dashboard` and `monarch top` find this program. Idempotent."""
    global _listening
    with _lock:
        if not _listening:
            listen({"snapshot": watch().snapshot, "stacks": watch().stacks})
            _listening = True


def dashboard(port: int = 0) -> Dashboard:
    """A live page of this program: its meshes and their programs, memory, steps per second, values of `monarch.log`,
    queues, failures as they happen, stacks on request.

        print(monarch.dashboard().url)      # in a notebook the value shows itself

    The page only reads. It is served on this machine's loopback, for users who have the address with its token: from
    elsewhere by `ssh -L 8000:127.0.0.1:PORT`. The same page is made each time. From now on `monarch top` and `monarch
    dashboard` find this program too; with the setting `live` they find it from the start. Raises MonarchError where
    `port` is taken.
    """
    global _dashboard
    start()
    with _lock:
        if _dashboard is None:
            _dashboard = Dashboard(port)
        return _dashboard


def at_exit() -> None:
    """Close it, at the program's end."""
    if _dashboard is not None and _dashboard.owner == os.getpid():
        _dashboard.close()
