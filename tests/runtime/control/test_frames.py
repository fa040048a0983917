"""The frames of a stream over connections that break."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from monarch.runtime.control.frames import Frames
from monarch.runtime.control.records import Malformed

LIMIT = 3


class End:
    """One end of a stream that says 0, 1, 2, ..., as long as it may."""

    def __init__(self) -> None:
        self.frames = Frames[int](LIMIT)
        self.made = 0
        self.wire: deque[tuple[int, int]] = deque()
        self.got: list[int] = []

    def send(self) -> None:
        """Write a frame, if there is one to be written or made."""
        frames = self.frames
        if frames.written and not frames.full:
            frames.put(self.made, 1)
            self.made += 1
        if not frames.written:
            self.wire.append((frames.next(), frames.say()))

    def take(self, other: End) -> None:
        """Take what has come next from the other end."""
        if other.wire:
            frame, taken = other.wire.popleft()
            self.frames.acknowledged(taken)
            self.frames.take(1)
            self.got.append(frame)


@given(st.lists(st.sampled_from(["send a", "send b", "take a", "take b", "break"]), max_size=200))
def test_every_frame_is_taken_once_and_in_order_over_connections_that_break(acts: list[str]) -> None:
    a, b = End(), End()
    for act in [*acts, "break", *["send a", "take b", "send b", "take a"] * 20]:
        if act == "break":  # with all that is under way
            for end in (a, b):
                end.wire.clear()
            a.frames.go_on(b.frames.taken)
            b.frames.go_on(a.frames.taken)
        elif act.startswith("send"):
            (a if act[-1] == "a" else b).send()
        else:
            a.take(b) if act[-1] == "a" else b.take(a)
        for end, other in ((a, b), (b, a)):
            assert other.got == list(range(len(other.got)))
            assert end.made - len(other.got) <= 2 * 4  # what is kept has a bound
    assert len(a.got) >= 20 and len(b.got) >= 20  # the stream goes on


def test_an_end_that_only_takes_says_so_in_time() -> None:
    sends, takes = End(), End()
    for _ in range(100):
        sends.send()
        takes.take(sends)
        if takes.frames.due:
            takes.send()
            sends.take(takes)
    assert len(takes.got) > 90


@pytest.mark.parametrize("taken", [1, 4])
def test_who_says_that_it_has_taken_what_it_cannot_is_refused(taken: int) -> None:
    frames = Frames[str]()
    for _ in range(3):
        frames.put("x", 1)
    frames.acknowledged(2)
    with pytest.raises(Malformed, match=f"has taken {taken} frames, where it can have taken 2 to 3"):
        frames.go_on(taken)
