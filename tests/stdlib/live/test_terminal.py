"""What `monarch top` prints."""

from __future__ import annotations

import io

from rich.console import Console

from monarch.stdlib.live.terminal import render, spark
from tests.stdlib.live.seen import FAILURE, snapshot


def printed(**changes: object) -> str:
    out = Console(file=io.StringIO(), width=110, no_color=True)
    out.print(render(snapshot(**changes)))
    text = out.file.getvalue()  # type: ignore[attr-defined]
    return "\n".join(line.rstrip() for line in text.splitlines())


def test_a_program_as_text() -> None:
    lines = printed().splitlines()
    assert lines[0] == "train.py  process 4711 on node1  1:02:05  1.5 GiB"
    assert lines[1].split() == ["MESH", "PROGRAM", "STEPS", "STEPS/S", "QUEUE", "MEMORY", "LAST", "TWO", "MINUTES"]
    assert lines[2].split() == "mesh<data=2, model=2> train_step 12,345 8.2 3 3.5 GiB ▁▅██".split()
    assert lines[3].split() == ["mesh<data=8>", "ended", "0", "8.2", "0"]
    assert lines[5].split() == ["loss", "3", "1", "█▃▁"]
    assert lines[6].split() == ["<i>rate", "7", "0.001", "▁"]
    assert lines[8].split() == "procs gpus=0 99 5.0 MiB samplers[0] 17 sample, score".split()
    assert lines[9].split() == "procs gpus=1 does not answer".split()
    assert lines[10].endswith("samplers[1]: ValueError: <b>no data</b>") and len(lines) == 11


def test_what_a_terminal_would_obey_is_not_printed() -> None:
    text = printed(failures=[{**FAILURE, "what": "\x1b[2J", "summary": "a\rb\x07"}], logs={"\x1b]0;x": [(0, None)]})
    assert not any(bad in text for bad in "\x1b\r\x07") and "not a number" in text


def test_a_program_that_has_nothing_yet() -> None:
    assert len(printed(meshes=[], processes=[], logs={}, failures=[]).splitlines()) == 1


def test_curves_as_bars() -> None:
    assert spark([]) == spark([None]) == ""
    assert spark([0, 7]) == "▁█" and spark([3, 3]) == "▁▁"
    assert spark(list(range(30_000))) == spark(list(range(30))) and len(spark(list(range(30_000)))) == 30
