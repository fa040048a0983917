"""What threads hand to the event loop, and Ctrl-C among them."""

from __future__ import annotations

import queue
import threading
from contextlib import suppress

from monarch.runtime.control.inbox import Handoff
from monarch.testing import chaos
from tests.runtime.control.hosts import SECONDS

WITHIN = ("/runtime/control/inbox.py", "/threading.py", "/asyncio/base_events.py")


def test_ctrl_c_in_a_put_holds_up_no_other_item() -> None:
    got: queue.SimpleQueue[int] = queue.SimpleQueue()

    def take(items: list[int]) -> None:
        for item in items:
            got.put(item)
        handoff.release()

    handoff = Handoff(take, limit=4)
    with chaos.interrupt(-1, within=WITHIN) as points:
        handoff.put(-1, 1, SECONDS)
    assert got.get(timeout=SECONDS) == -1 and points.passed > 5
    for at in range(points.passed):
        with suppress(KeyboardInterrupt), chaos.interrupt(at, within=WITHIN) as found:
            handoff.put(-at, 1, SECONDS)
        others = threading.Thread(target=handoff.put, args=(1 + at, 1, SECONDS))
        others.start()
        while got.get(timeout=SECONDS) != 1 + at:
            pass
        others.join(SECONDS)
        assert not others.is_alive(), found.where
