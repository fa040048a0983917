"""A call that is traced, and how it is taken back where it fails."""

from __future__ import annotations

from collections.abc import Callable

from monarch.language.programs.handlers import ALL, HandlersLater
from monarch.language.programs.nodes import Path
from monarch.language.tensors.mesh import Mesh


def nothing() -> None:
    """There is nothing to undo."""


class Attempt:
    """A call that is traced. Wherever it fails or is interrupted, until its step is given to the workers, what it has
    changed in Python is taken back:

        attempt = Attempt()
        try:
            ...  # trace with it, run the step, and say `attempt.given = True` where the step is bound
        except BaseException:
            try:
                attempt.take_back()
            finally:
                attempt.take_back()  # where Ctrl-C has come before the first could begin
            raise
    """

    def __init__(self) -> None:
        self.mesh: Mesh | None = None
        self.given = False
        self.asks_type = False
        """Whether the function asks for the exact type of a float argument."""
        self.stand_ins: set[Path] = set()
        """The places of numbers and lists in Python for which it takes stand-ins."""
        self.undo: Callable[[], None] = nothing

    def take_back(self) -> None:
        """Put Python's objects back to what they were, unless the step has been given. Ctrl-C ends waiting for the
        workers, and waits for the rest."""
        mesh, self.mesh = self.mesh, None
        try:
            if mesh is not None and not self.given:
                mesh.settle()
        finally:
            with HandlersLater(ctrl_c=ALL):
                if mesh is not None:
                    mesh.bind()  # a step that was given when the interrupt came
                if not self.given:
                    self.undo()
                self.undo = nothing
