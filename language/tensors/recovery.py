"""What follows from steps that fail on the workers, or are given up: Python and state go back."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from monarch.compiler.errors import DeviceMeshError


def recover(mesh: Any) -> None:
    """Have Python and all state be as the last step left them that did not fail. Waits for the workers. What is on
    other parts of the mesh, a failed step may have been for too."""
    with suppress(DeviceMeshError):  # the mesh is lost
        mesh.executor.undo()
    for part in mesh._family:
        for cell in list(part._states):
            if cell.handle is not None:
                try:
                    cell.handle = part.executor.recover(cell.handle, wait=part is mesh)
                except DeviceMeshError:
                    continue  # the failed step was to make it first, or the mesh is lost: reading it raises
