"""How what processes print is put together. Pure: no process, and time is told."""

from __future__ import annotations

from collections import deque

from monarch.runtime.actors.processes.output import HOLD_SECONDS, Output, Source


def sources(count: int, error: bool = False) -> list[Source]:
    return [Source("crew", f"gpus={rank}", error, deque(maxlen=3)) for rank in range(count)]


def test_equal_lines_of_several_processes_are_one() -> None:
    output, crew = Output(), sources(3)
    for source in crew:
        output.read(source, b"ready\n", 1.0)
    output.read(crew[1], b"loss 0.5\n", 1.0)
    assert output.due == 1.0 + HOLD_SECONDS
    assert output.take() == [(False, "[crew × 3] ready"), (False, "[crew gpus=1] loss 0.5")]
    assert output.due is None and output.take() == []


def test_what_one_process_says_twice_are_two_lines() -> None:
    output, crew = Output(), sources(2)
    output.read(crew[0], b"a\na\n", 0.0)
    output.read(crew[1], b"a\n", 0.0)
    assert output.take() == [(False, "[crew × 2] a"), (False, "[crew gpus=0] a")]
    output.read(crew[0], b"a\n", 1.0)
    assert output.take() == [(False, "[crew gpus=0] a")]


def test_lines_come_in_pieces_and_end_with_the_process() -> None:
    output, (source,) = Output(), sources(1)
    output.read(source, "grü".encode()[:-1], 0.0)
    assert output.due is None
    output.read(source, "ü".encode()[1:] + b"n\nno end", 0.0)
    assert output.take() == [(False, "[crew gpus=0] grün")]
    output.read(source, b"", 0.0)
    assert output.take() == [(False, "[crew gpus=0] no end")]


def test_the_two_streams_are_kept_apart_and_the_last_lines_of_both_are_kept() -> None:
    output = Output()
    last: deque[str] = deque(maxlen=3)
    out, err = Source("crew", "", False, last), Source("crew", "", True, last)
    output.read(out, b"1\n2\n", 0.0)
    output.read(err, b"2\n3\n", 0.0)
    assert output.take() == [(False, "[crew] 1"), (False, "[crew] 2"), (True, "[crew] 2"), (True, "[crew] 3")]
    assert list(last) == ["2", "2", "3"]


def test_a_progress_bar_is_its_last_state() -> None:
    output, (source,) = Output(), sources(1)
    output.read(source, b"10%\r50%\r100%\nnext\r\n", 0.0)
    assert output.take() == [(False, "[crew gpus=0] 100%"), (False, "[crew gpus=0] next")]


def test_lines_may_be_merged_over_a_time_and_kept_back() -> None:
    output, crew = Output(10.0, merged=True), sources(2)
    output.read(crew[0], b"a\na\nb\n", 1.0)
    output.read(crew[1], b"a\n", 2.0)
    assert output.due == 11.0
    assert output.take() == [(False, "[crew × 3] a"), (False, "[crew gpus=0] b")]
    silent = Output(None)
    silent.read(crew[0], b"c\n", 0.0)
    assert silent.due is None and silent.take() == [] and list(crew[0].last) == ["a", "b", "c"]
