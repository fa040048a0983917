"""To which stage and microbatch of a pipeline the ops of a program belong."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from monarch.compiler.errors import ProgramError
from monarch.compiler.tape import Task, Timetable
from monarch.language.recorder.recording import Recording, current, current_program
from monarch.language.source import user_source


def take_timetable(timetable: Timetable) -> Recording:
    """Have the program that is traced follow a timetable. Raises ProgramError outside of programs, inside of regions,
    and in a program that follows one already."""
    recording = current_program()
    if recording is None:
        raise ProgramError(
            "a pipeline's step outside of a program: its microbatches would run one after the other",
            hint="@monarch.program\ndef step(x, y):\n    return pipe.step(x, target=y, loss_fn=F.cross_entropy)",
            source=user_source(),
        )
    if recording.inside:
        raise ProgramError(
            f"a pipeline's step in {recording.inside}", hint="call it outside of that.", source=user_source()
        )
    if recording.tape.timetable is not None:
        raise ProgramError(
            "a program with two steps of pipelines",
            hint="make one of them: a larger batch in more microbatches gives the same gradients.",
            source=user_source(),
        )
    recording.tape.timetable = timetable
    return recording


@contextmanager
def belonging_to(task: Task | None) -> Iterator[None]:
    """Have the recorded ops belong to a stage and a microbatch, and so their gradients."""
    before, current.task = current.task, task
    try:
        yield
    finally:
        current.task = before


def set_task(task: Task | None) -> None:
    """Have the ops from here on belong to another stage."""
    current.task = task
