"""`make bench-peers`, without other libraries: what is made of the figures, and how a library's process is asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.peers.comparison import Asked, Measured, cells, failures, head, quartiles, times_as_fast
from benchmarks.peers.peer import Failed, Peer, descendants

SCRIPT = """
import os, subprocess, sys
from serving import each, serve
def fail(): raise ValueError("it\\nbroke")
def child(count): return subprocess.Popen(["sleep", "1000"], start_new_session=True).pid
print("the last line", file=sys.stderr)
serve("library 1.0", {
    "nothing": each(lambda: None), "fails": each(fail), "absent": "it has none", "ends": each(lambda: os._exit(3)),
    "child": child, "never": each(lambda: os.read(os.pipe()[0], 1)),
}, {"nothing": "a note"})
"""


def test_quartiles_of_rounds_and_of_their_ratios() -> None:
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
    assert quartiles([5.0, 1.0, 2.0, 4.0, 3.0]) == (2.0, 3.0, 4.0)
    assert times_as_fast([1.0, 2.0], [4.0, 5.0]) == [4.0, 2.5]


def test_a_row_has_what_was_measured_and_says_what_missed_its_aim() -> None:
    asked = Asked("call", "a call", 10, 3, {"Slow": 5.0, "Fast": 3.0, "Absent": 5.0})
    times = {"ours": [1e-3, 2e-3, 3e-3], "Slow": [6e-3, 14e-3, 30e-3], "Fast": [2e-3, 2e-3, 2e-3], "Absent": [1.0]}
    row = Measured(asked, times, {"Absent": "it ended"}, {"ours": "2 KiB an actor"})
    libraries = list(times)
    assert head(libraries) == ["what", "ours", "Slow", "Fast", "Absent", "× Slow", "× Fast", "× Absent"]
    assert cells(row, libraries) == [
        "a call",
        "2 ms (1.5 ms to 2.5 ms), 2 KiB an actor",
        "14 ms (10 ms to 22 ms)",
        "2 ms (2 ms to 2 ms)",
        "none",
        "7 (6.5 to 8.5), aim 5",
        "1 (0.833 to 1.5), aim 3 missed",
        "",
    ]
    assert failures([row]) == ["a call, Absent: it ended"]


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Peer]:
    folder = Path(__file__).parents[2] / "benchmarks" / "peers"
    environ = {**os.environ, "PYTHONPATH": str(folder)}
    peer = Peer("library", [sys.executable, "-c", SCRIPT], environ, tmp_path / "log")
    yield peer
    peer.close(kill=True)


def test_a_librarys_process_answers_and_says_why_it_does_not(peer: Peer) -> None:
    seconds, note = peer.measure("nothing", 100, 30)
    assert seconds >= 0 and note == "a note" and peer.versions == "library 1.0"
    with pytest.raises(Failed, match=r"ValueError: it\s+broke"):
        peer.measure("fails", 1, 30)
    with pytest.raises(Failed, match="it has none"):
        peer.measure("absent", 1, 30)
    with pytest.raises(Failed, match="status 3: the last line"):
        peer.measure("ends", 1, 30)
    assert peer.measure("nothing", 1, 30)[1] == "a note"  # it was started anew


def test_one_that_does_not_answer_in_time_ends_with_what_it_started(peer: Peer) -> None:
    child = int(peer.measure("child", 1, 30)[0])
    assert child in descendants(os.getpid())
    with pytest.raises(Failed, match=r"no answer within 0\.01 s"):
        peer.measure("never", 1, 0.01)
    assert child not in descendants(os.getpid())
    with pytest.raises(ProcessLookupError):  # whoever it fell to waits for it soon
        while True:
            os.kill(child, 0)
