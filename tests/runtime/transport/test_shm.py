"""What shared memory does beside frames, which it must not overtake. `test_conformance.py` tries its promises."""

from __future__ import annotations

import mmap

import pytest

from monarch.runtime.transport.endpoint import Endpoint
from monarch.runtime.transport.interface import Memory, Region, Signal
from monarch.runtime.transport.shm import ShmLink
from monarch.runtime.transport.stream import StreamLink
from monarch.runtime.transport.works import FINISHED
from tests.runtime.transport.peers import PATIENCE, SECRET


def test_waiting_for_frames_takes_no_newer_ones_for_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """One thread waits for frames to be done; meanwhile another sends more, whose order it relies on."""
    with Endpoint(SECRET, transports=("shm",)) as owner, Endpoint(SECRET, transports=("shm",)) as endpoint:
        link = endpoint.connect(owner.address, timeout=PATIENCE)
        assert isinstance(link, ShmLink)
        region = owner.register(mmap.mmap(-1, 4096)).region
        link.post(b"1", region, 8, Signal(region, 0, 1))  # small, and signalled in private memory: a frame
        assert link.behind is not None
        whole = StreamLink.put

        def put(self: StreamLink, source: Memory, where: Region, *rest: object) -> object:
            work = whole(self, source, where)
            monkeypatch.setattr(StreamLink, "put", whole)
            link.post(b"2", region, 8, Signal(region, 0, 2))  # the other thread's
            work.wait(PATIENCE)
            return FINISHED

        monkeypatch.setattr(StreamLink, "put", put)
        link.put(b"x" * 100, region, 16).wait(PATIENCE)
        assert link.behind is not None, "the second frame may still be under way"
        link.put(b"x" * 100, region, 16).wait(PATIENCE)
        assert link.behind is None
