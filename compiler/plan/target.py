"""What a plan can be compiled for."""

from __future__ import annotations

import difflib

from monarch.compiler.errors import MonarchError

TARGETS: dict[str, str] = {
    "cpu": "workers on CPU cores",
    "cuda:80": "NVIDIA A100 (compute capability 8.0)",
    "cuda:90": "NVIDIA H100 and H200 (compute capability 9.0)",
    "cuda:100": "NVIDIA B200 (compute capability 10.0)",
    "gfx942": "AMD Instinct MI300",
}


def check_target(target: object) -> None:
    """Raise MonarchError, which lists those that there are, for an unknown target."""
    if target in TARGETS:
        return
    close = difflib.get_close_matches(str(target), TARGETS, n=1)
    known = "\n".join(f"{name:<9} {what}" for name, what in TARGETS.items())
    raise MonarchError(
        f"unknown target {str(target)[:60]!r}",
        hint=(f"did you mean {close[0]}? " if close else "") + f"Targets are\n{known}",
    )
