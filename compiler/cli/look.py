"""Plans' files as commands read them that only look: without torch."""

from __future__ import annotations

import re
from pathlib import Path

from monarch.compiler.errors import MonarchError
from monarch.compiler.plan.look import look_at
from monarch.compiler.plan.plan import Plan


def is_program(spec: str) -> bool:
    """Whether a command's argument names a program (`train.py:step`, `train.py`) and not a plan's file."""
    return re.search(r"\.py(:[^/]*)?$", spec) is not None


def no_program(file: Path) -> Path:
    """The path of a plan's file. Raises MonarchError where it names a program, or a notebook."""
    if file.suffix == ".ipynb":
        raise MonarchError(
            f"{file} is a notebook, and a plan is wanted",
            hint="call program.inspect(…) in the notebook, or program.compile(…).save('step.mplan').",
        )
    if is_program(str(file)):
        raise MonarchError(
            f"{file} is a program, and a plan is wanted",
            hint=f"compile it first: monarchc compile {file} -o step.mplan.",
        )
    return file


def seen_plan(file: Path) -> Plan:
    """A plan's file, to look at (`plan.look`). Raises MonarchError where it is none, and where it is a program."""
    return look_at(no_program(file))
